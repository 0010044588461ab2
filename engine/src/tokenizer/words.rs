//! Pre-tokenizers: split text into words, across which no merge goes.
//!
//! The regular expressions of published tokenizers are data ([`super::pretokenizers`]), matched by the small
//! backtracking matcher below. A [`SplitStep`] splits each piece of text into matches and the gaps between them, and
//! passes both to the next step, like a sequence of `Split(Regex, "isolated")` in Hugging Face tokenizers.

use alloc::vec::Vec;

use super::class::{CharClass, LETTER_BITS, WHITE_BIT, bit, char_at};
use super::unicode;

/// An element of a pattern.
#[derive(Debug, Clone, Copy)]
pub(super) enum PatternItem {
    /// `[class]{min,max}`, greedy.
    Run { class: CharClass, min: u32, max: u32 },
    /// `'s 't 're 've 'm 'll 'd` in lower case.
    LowerContraction,
    /// As `LowerContraction`, in any case.
    Contraction,
    /// `(?: contraction in any case )?`
    MaybeContraction,
    /// `\s*[\r\n]+`: white space up to the last line break of the run. Only as the sole item of an alternative.
    Lines,
    /// `(?!\S)`: white space or the end follows.
    NotBeforeText,
    /// `(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+`: letters with marks, single spaces between them.
    SpacedLetters,
}

/// Patterns tried in order at each position. None of them matches the empty string.
pub(super) type Alternatives = &'static [&'static [PatternItem]];

/// A step of a pre-tokenizer.
#[derive(Debug, Clone, Copy)]
pub(super) enum SplitStep {
    /// Splits at the matches of the first alternative that fits, leftmost first.
    Matches(Alternatives),
    /// Splits runs of decimal digits into groups of three, counted from the end of the run.
    DigitGroups(DigitGroups),
    /// Splits off white space at the end: `\s+$`.
    TrailingWhitespace,
}

/// Variants of [`SplitStep::DigitGroups`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DigitGroups {
    /// Each group is a word.
    Isolated,
    /// As `Isolated`, except for runs that are followed by a word character: `\d{1,3}(?=(?:\d{3})*\b)`.
    BeforeBoundary,
    /// Splits only before groups of three: `(?=(\d{3})+(?!\d))`.
    Between,
}

/// The steps, each with a table of the alternatives that can match at a first character.
#[derive(Debug, Clone)]
pub(super) struct Splitter {
    steps: Vec<(SplitStep, FirstChars)>,
}

/// Bit `i` is set if alternative `i` may begin with the ASCII character; the last entry is for all other characters.
type FirstChars = [u16; 129];

impl Splitter {
    pub(super) fn new(steps: &'static [SplitStep]) -> Splitter {
        let starts = |step: &SplitStep| match step {
            SplitStep::Matches(alternatives) => first_chars(alternatives),
            SplitStep::DigitGroups(_) | SplitStep::TrailingWhitespace => [0; 129],
        };
        Splitter { steps: steps.iter().map(|step| (*step, starts(step))).collect() }
    }

    /// Calls `word(start, end)` for each word of `text`, in order; together they cover it.
    #[inline]
    pub(super) fn split(&self, text: &str, mut word: impl FnMut(usize, usize)) {
        match &*self.steps {
            [(SplitStep::Matches(alternatives), starts)] => {
                split_matches(alternatives, starts, text.as_bytes(), &mut word)
            }
            steps => run_steps(steps, text.as_bytes(), 0, &mut word),
        }
    }
}

fn run_steps(steps: &[(SplitStep, FirstChars)], text: &[u8], offset: usize, word: &mut dyn FnMut(usize, usize)) {
    let Some(((step, starts), rest)) = steps.split_first() else {
        return word(offset, offset + text.len());
    };
    let mut next = |start: usize, end: usize| run_steps(rest, &text[start..end], offset + start, word);
    match step {
        SplitStep::Matches(alternatives) => split_matches(alternatives, starts, text, &mut next),
        SplitStep::DigitGroups(rule) => split_digit_groups(text, *rule, &mut next),
        SplitStep::TrailingWhitespace => {
            let mut start = text.len();
            for at in (0..text.len()).rev().filter(|&at| text[at] & 0xc0 != 0x80) {
                if CharClass::any(WHITE_BIT).len_at(text, at) == 0 {
                    break;
                }
                start = at;
            }
            if start > 0 {
                next(0, start);
            }
            if start < text.len() {
                next(start, text.len());
            }
        }
    }
}

#[inline]
fn split_matches<F: FnMut(usize, usize) + ?Sized>(
    alternatives: Alternatives,
    starts: &FirstChars,
    text: &[u8],
    word: &mut F,
) {
    let (mut at, mut gap) = (0, 0);
    // no line break before this offset: a long run of white space is scanned for one only once
    let mut no_line = 0;
    while at < text.len() {
        let mut candidates = starts[usize::from(text[at]).min(128)];
        let mut end = None;
        while candidates != 0 && end.is_none() {
            end = match alternatives[candidates.trailing_zeros() as usize] {
                [PatternItem::Lines] if at < no_line => None,
                [PatternItem::Lines] => lines(text, at).map_err(|end| no_line = end).ok(),
                items => match_items(items, text, at),
            };
            candidates &= candidates - 1;
        }
        let Some(end) = end else {
            at += char_at(text, at).1;
            continue;
        };
        if gap < at {
            word(gap, at);
        }
        word(at, end);
        (at, gap) = (end, end);
    }
    if gap < text.len() {
        word(gap, text.len());
    }
}

fn split_digit_groups(text: &[u8], rule: DigitGroups, word: &mut dyn FnMut(usize, usize)) {
    let digit = CharClass::any(1 << unicode::DECIMAL);
    let word_like = CharClass {
        with: &[
            ('\u{203f}', '\u{2040}'),
            ('\u{2054}', '\u{2054}'),
            ('\u{fe33}', '\u{fe34}'),
            ('\u{fe4d}', '\u{fe4f}'),
            ('＿', '＿'),
        ],
        ..CharClass::any(LETTER_BITS | 1 << unicode::MARK | 1 << unicode::OTHER_NUMBER | bit::UNDERSCORE)
    };
    let (mut at, mut begun) = (0, 0);
    let mut cut = |at: usize| {
        if begun < at {
            word(core::mem::replace(&mut begun, at), at);
        }
    };
    while at < text.len() {
        if digit.len_at(text, at) == 0 {
            at += char_at(text, at).1;
            continue;
        }
        let (mut end, mut count) = (at, 0);
        while let len @ 1.. = digit.len_at(text, end) {
            end += len;
            count += 1;
        }
        if rule == DigitGroups::BeforeBoundary && word_like.len_at(text, end) > 0 {
            at = end;
            continue;
        }
        if rule != DigitGroups::Between {
            cut(at);
        }
        while at < end {
            if count % 3 == 0 {
                cut(at);
            }
            at += digit.len_at(text, at);
            count -= 1;
        }
        if rule != DigitGroups::Between {
            cut(end);
        }
    }
    cut(text.len());
}

/// The end of the match of `items` at `at`, with the semantics of a backtracking regular expression.
fn match_items(items: &[PatternItem], text: &[u8], mut at: usize) -> Option<usize> {
    for (i, item) in items.iter().enumerate() {
        match item {
            PatternItem::Run { class, min, max } => {
                let start = at;
                let mut count = 0;
                while count < *max {
                    let len = class.len_at(text, at);
                    if len == 0 {
                        break;
                    }
                    at += len;
                    count += 1;
                }
                if count < *min {
                    return None;
                }
                let rest = &items[i + 1..];
                if count == *min || rest.iter().all(PatternItem::always_matches) {
                    continue;
                }
                // greedy: try the longest run first, then backtrack one character at a time
                loop {
                    if let Some(end) = match_items(rest, text, at) {
                        return Some(end);
                    }
                    if count == *min || at == start {
                        return None;
                    }
                    count -= 1;
                    at -= 1;
                    while text[at] & 0xc0 == 0x80 {
                        at -= 1;
                    }
                }
            }
            PatternItem::Lines => at = lines(text, at).ok()?,
            PatternItem::LowerContraction => at += contraction(text, at, false)?,
            PatternItem::Contraction => at += contraction(text, at, true)?,
            PatternItem::MaybeContraction => at += contraction(text, at, true).unwrap_or(0),
            PatternItem::NotBeforeText => {
                if at < text.len() && CharClass::any(WHITE_BIT).len_at(text, at) == 0 {
                    return None;
                }
            }
            PatternItem::SpacedLetters => at = spaced_letters(text, at)?,
        }
    }
    Some(at)
}

impl PatternItem {
    fn always_matches(&self) -> bool {
        matches!(self, PatternItem::Run { min: 0, .. } | PatternItem::MaybeContraction)
    }
}

/// Length of the contraction at `at`. With case folding, U+017F (long s) matches s.
fn contraction(text: &[u8], at: usize, any_case: bool) -> Option<usize> {
    let tail = text[at..].strip_prefix(b"'")?;
    let fold = |i: usize| tail.get(i).map_or(0, |b| if any_case { b.to_ascii_lowercase() } else { *b });
    match (fold(0), fold(1)) {
        (b's' | b't' | b'm' | b'd', _) => Some(2),
        (b'r' | b'v', b'e') | (b'l', b'l') => Some(3),
        _ if any_case && tail.starts_with("ſ".as_bytes()) => Some(3),
        _ => None,
    }
}

/// The end of the last line break in the run of white space at `at`; `Err` with the end of the run if it has none.
fn lines(text: &[u8], mut at: usize) -> Result<usize, usize> {
    let mut line = None;
    while let len @ 1.. = CharClass::any(WHITE_BIT).len_at(text, at) {
        at += len;
        if matches!(text[at - 1], b'\n' | b'\r') {
            line = Some(at);
        }
    }
    line.ok_or(at)
}

fn spaced_letters(text: &[u8], mut at: usize) -> Option<usize> {
    let letter = CharClass::any(LETTER_BITS);
    let letter_or_mark = CharClass::any(LETTER_BITS | 1 << unicode::MARK);
    if letter.len_at(text, at) == 0 {
        return None;
    }
    loop {
        let space = usize::from(text.get(at) == Some(&b' '));
        let len = if space == 1 { letter.len_at(text, at + 1) } else { letter_or_mark.len_at(text, at) };
        if len == 0 {
            return Some(at);
        }
        at += space + len;
    }
}

fn first_chars(alternatives: &[&[PatternItem]]) -> FirstChars {
    let mut starts = [0; 129];
    for (i, items) in alternatives.iter().enumerate() {
        for item in *items {
            let (class, min) = match item {
                PatternItem::Run { class, min, .. } => (*class, *min),
                PatternItem::LowerContraction | PatternItem::Contraction => (CharClass::any(0), 1),
                PatternItem::SpacedLetters => (CharClass::any(LETTER_BITS), 1),
                PatternItem::Lines => (CharClass::any(WHITE_BIT), 1),
                PatternItem::MaybeContraction | PatternItem::NotBeforeText => continue,
            };
            let apostrophe = matches!(item, PatternItem::LowerContraction | PatternItem::Contraction);
            for (c, start) in starts.iter_mut().enumerate() {
                // for other characters, assume that every class may match
                let fits = match c {
                    128 => !apostrophe,
                    39 if apostrophe => true,
                    _ => class.len_at(&[c as u8], 0) > 0,
                };
                *start |= u16::from(fits) << i;
            }
            if min > 0 {
                break;
            }
        }
    }
    starts
}

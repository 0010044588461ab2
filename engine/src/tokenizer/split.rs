//! Pre-tokenizers: cutting text into the words that merges may not cross.
//!
//! The regular expressions of published tokenizers are held as data ([`super::pretokenizers`]) and matched by the small
//! backtracking matcher below. A [`Pass`] cuts each piece it is given into matches and the gaps between them, and hands
//! both to the next pass, like a sequence of `Split(Regex, "isolated")` in Hugging Face tokenizers.

use alloc::vec::Vec;

use super::class::{Class, LETTER_BITS, WHITE_BIT, bit, char_at};
use super::unicode;

/// One step of a pattern.
#[derive(Debug, Clone, Copy)]
pub(super) enum Item {
    /// `[class]{min,max}`, greedy.
    Run { class: Class, min: u32, max: u32 },
    /// `'s 't 're 've 'm 'll 'd` in lower case.
    LowerContraction,
    /// The same in any case.
    Contraction,
    /// `(?: contraction in any case )?`
    MaybeContraction,
    /// `\s*[\r\n]+`: white space up to the last line break in its run. Alone in its alternative.
    Lines,
    /// `(?!\S)`: white space or the end follows.
    NotBeforeText,
    /// `(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+`: letters with marks, single spaces between them.
    SpacedLetters,
}

/// Patterns tried in order at each position; none of them matches the empty string.
pub(super) type Alternatives = &'static [&'static [Item]];

/// One cut of the text.
#[derive(Debug, Clone, Copy)]
pub(super) enum Pass {
    /// Matches of the first alternative that fits, leftmost first.
    Match(Alternatives),
    /// Runs of decimal digits in groups of three, counted from the right of the run.
    Threes(Threes),
    /// White space at the end: `\s+$`.
    TrailingBlanks,
}

/// What [`Pass::Threes`] does with a run of digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Threes {
    /// Each group is a word.
    Isolated,
    /// The same, but runs that go on as a word are left alone: `\d{1,3}(?=(?:\d{3})*\b)`.
    BeforeBoundary,
    /// Cuts only before groups of three: `(?=(\d{3})+(?!\d))`.
    Between,
}

/// Passes with, for each first character, the set of alternatives that can begin with it.
#[derive(Debug, Clone)]
pub(super) struct Splitter {
    passes: Vec<(Pass, Starts)>,
}

/// Bit `i` is set if alternative `i` may begin with the ASCII character; the last entry is for all other characters.
type Starts = [u16; 129];

impl Splitter {
    pub(super) fn new(passes: &'static [Pass]) -> Splitter {
        let starts = |pass: &Pass| match pass {
            Pass::Match(alternatives) => starts(alternatives),
            Pass::Threes(_) | Pass::TrailingBlanks => [0; 129],
        };
        Splitter { passes: passes.iter().map(|pass| (*pass, starts(pass))).collect() }
    }

    /// Calls `word(start, end)` for each word of `text`, in order; together they cover it.
    #[inline]
    pub(super) fn split(&self, text: &str, mut word: impl FnMut(usize, usize)) {
        match &*self.passes {
            [(Pass::Match(alternatives), starts)] => cut(alternatives, starts, text.as_bytes(), &mut word),
            passes => split_by(passes, text.as_bytes(), 0, &mut word),
        }
    }
}

fn split_by(passes: &[(Pass, Starts)], text: &[u8], offset: usize, word: &mut dyn FnMut(usize, usize)) {
    let Some(((pass, starts), rest)) = passes.split_first() else {
        return word(offset, offset + text.len());
    };
    let mut next = |start: usize, end: usize| split_by(rest, &text[start..end], offset + start, word);
    match pass {
        Pass::Match(alternatives) => cut(alternatives, starts, text, &mut next),
        Pass::Threes(rule) => cut_threes(text, *rule, &mut next),
        Pass::TrailingBlanks => {
            let mut start = text.len();
            for at in (0..text.len()).rev().filter(|&at| text[at] & 0xc0 != 0x80) {
                if Class::any(WHITE_BIT).len_at(text, at) == 0 {
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
fn cut<F: FnMut(usize, usize) + ?Sized>(alternatives: Alternatives, starts: &Starts, text: &[u8], word: &mut F) {
    let (mut at, mut gap) = (0, 0);
    // white space up to here has no line break: a long run is looked through once, however it is cut
    let mut no_line = 0;
    while at < text.len() {
        let mut candidates = starts[usize::from(text[at]).min(128)];
        let mut end = None;
        while candidates != 0 && end.is_none() {
            end = match alternatives[candidates.trailing_zeros() as usize] {
                [Item::Lines] if at < no_line => None,
                [Item::Lines] => lines(text, at).map_err(|end| no_line = end).ok(),
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

fn cut_threes(text: &[u8], rule: Threes, word: &mut dyn FnMut(usize, usize)) {
    let digit = Class::any(1 << unicode::DECIMAL);
    let word_like = Class {
        with: &[
            ('\u{203f}', '\u{2040}'),
            ('\u{2054}', '\u{2054}'),
            ('\u{fe33}', '\u{fe34}'),
            ('\u{fe4d}', '\u{fe4f}'),
            ('＿', '＿'),
        ],
        ..Class::any(LETTER_BITS | 1 << unicode::MARK | 1 << unicode::OTHER_NUMBER | bit::UNDERSCORE)
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
        if rule == Threes::BeforeBoundary && word_like.len_at(text, end) > 0 {
            at = end;
            continue;
        }
        if rule != Threes::Between {
            cut(at);
        }
        while at < end {
            if count % 3 == 0 {
                cut(at);
            }
            at += digit.len_at(text, at);
            count -= 1;
        }
        if rule != Threes::Between {
            cut(end);
        }
    }
    cut(text.len());
}

/// The end of the match of `items` at `at`, as a backtracking regular expression would find it.
fn match_items(items: &[Item], text: &[u8], mut at: usize) -> Option<usize> {
    for (i, item) in items.iter().enumerate() {
        match item {
            Item::Run { class, min, max } => {
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
                if count == *min || rest.iter().all(Item::always_matches) {
                    continue;
                }
                // longest first, giving characters back
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
            Item::Lines => at = lines(text, at).ok()?,
            Item::LowerContraction => at += contraction(text, at, false)?,
            Item::Contraction => at += contraction(text, at, true)?,
            Item::MaybeContraction => at += contraction(text, at, true).unwrap_or(0),
            Item::NotBeforeText => {
                if at < text.len() && Class::any(WHITE_BIT).len_at(text, at) == 0 {
                    return None;
                }
            }
            Item::SpacedLetters => at = spaced_letters(text, at)?,
        }
    }
    Some(at)
}

impl Item {
    fn always_matches(&self) -> bool {
        matches!(self, Item::Run { min: 0, .. } | Item::MaybeContraction)
    }
}

/// Length of the contraction at `at`. Case folding takes U+017F, the long s, for an s.
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

/// The end of the last line break in the run of white space at `at`; the end of the run if it has none.
fn lines(text: &[u8], mut at: usize) -> Result<usize, usize> {
    let mut line = None;
    while let len @ 1.. = Class::any(WHITE_BIT).len_at(text, at) {
        at += len;
        if matches!(text[at - 1], b'\n' | b'\r') {
            line = Some(at);
        }
    }
    line.ok_or(at)
}

fn spaced_letters(text: &[u8], mut at: usize) -> Option<usize> {
    let letter = Class::any(LETTER_BITS);
    let letter_or_mark = Class::any(LETTER_BITS | 1 << unicode::MARK);
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

fn starts(alternatives: &[&[Item]]) -> Starts {
    let mut starts = [0; 129];
    for (i, items) in alternatives.iter().enumerate() {
        for item in *items {
            let (class, min) = match item {
                Item::Run { class, min, .. } => (*class, *min),
                Item::LowerContraction | Item::Contraction => (Class::any(0), 1),
                Item::SpacedLetters => (Class::any(LETTER_BITS), 1),
                Item::Lines => (Class::any(WHITE_BIT), 1),
                Item::MaybeContraction | Item::NotBeforeText => continue,
            };
            let apostrophe = matches!(item, Item::LowerContraction | Item::Contraction);
            for (c, start) in starts.iter_mut().enumerate() {
                // beyond ASCII anything may fit
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

//! WordPiece, as in BERT: words, lower-cased and without accents, are split greedily into the longest pieces from the
//! left. In GGUF, U+2581 marks pieces that begin a word.

use alloc::vec::Vec;

use super::accents::{DECOMPOSED, SEVERAL, SPACING_MARKS, TARGETS};
use super::matcher::Matcher;
use super::unicode::{self, MARK, OTHER, PUNCTUATION, WHITE};
use super::vocab::{Kind, META_SPACE, Vocab};
use super::{Output, TextSpan};

/// Longer words become the unknown token, as in BERT; bounds the time per word.
const MAX_CHARS: usize = 100;

/// Pieces and options of a vocabulary.
#[derive(Debug, Clone)]
pub(super) struct WordPiece {
    pub(super) pieces: Matcher,
    /// Token of words that are not made of pieces; without it they are dropped.
    pub(super) unknown: Option<u32>,
    pub(super) lowercase: bool,
    pub(super) strip_accents: bool,
}

/// A normalised word in the spelling of the pieces.
struct Word {
    bytes: Vec<u8>,
    /// For each byte, the end in the whole text of the character it comes from.
    ends: Vec<usize>,
    n_chars: usize,
}

impl WordPiece {
    /// Matcher for the pieces of a vocabulary.
    pub(super) fn pieces(vocab: &Vocab) -> Matcher {
        Matcher::new(vocab, |kind| !matches!(kind, Kind::Control | Kind::Unknown))
    }

    /// Appends the tokens of a span of text.
    pub(super) fn encode(&self, vocab: &Vocab, span: TextSpan<'_>, out: &mut Output) {
        let mut word = Word { bytes: Vec::new(), ends: Vec::new(), n_chars: 0 };
        for (at, c) in span.text.char_indices() {
            if is_removed(c) {
                continue;
            }
            let end = span.offset + at + c.len_utf8();
            if unicode::kind(c as u32) == WHITE {
                self.finish(vocab, &mut word, out);
                continue;
            }
            let alone = is_ideograph(c);
            if alone {
                self.finish(vocab, &mut word, out);
            }
            self.normalise(c, |c| {
                let punctuation = c.is_ascii_punctuation() || unicode::kind(c as u32) == PUNCTUATION;
                if punctuation {
                    self.finish(vocab, &mut word, out);
                }
                word.push(c, end);
                if punctuation {
                    self.finish(vocab, &mut word, out);
                }
            });
            if alone {
                self.finish(vocab, &mut word, out);
            }
        }
        self.finish(vocab, &mut word, out);
    }

    fn normalise(&self, c: char, mut each: impl FnMut(char)) {
        let mut lower = |c: char| if self.lowercase { c.to_lowercase().for_each(&mut each) } else { each(c) };
        if self.strip_accents { strip_accents(c, lower) } else { lower(c) }
    }

    /// Appends the tokens of a word and clears it.
    fn finish(&self, vocab: &Vocab, word: &mut Word, out: &mut Output) {
        let Some(&last) = word.ends.last() else { return };
        let (n_ids, bytes) = (out.ids.len(), &word.bytes[..]);
        let mut at = 0;
        while at < bytes.len() {
            // inside a word no piece may start with the word-start mark
            let found = (word.n_chars <= MAX_CHARS && (at == 0 || !bytes[at..].starts_with(META_SPACE)))
                .then(|| self.pieces.longest(vocab, &bytes[at..]))
                .flatten();
            let Some((id, len)) = found else {
                out.truncate(n_ids);
                if let Some(unknown) = self.unknown {
                    out.push(unknown, last);
                }
                break;
            };
            at += len;
            out.push(id, word.ends[at - 1]);
        }
        word.bytes.clear();
        word.ends.clear();
        word.n_chars = 0;
    }
}

impl Word {
    /// Appends a character that ends at `end` of the whole text.
    fn push(&mut self, c: char, end: usize) {
        if self.n_chars == 0 {
            self.bytes.extend_from_slice(META_SPACE);
        }
        self.n_chars += 1;
        if self.n_chars <= MAX_CHARS {
            self.bytes.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes());
            self.ends.resize(self.bytes.len(), end);
        } else if let Some(last) = self.ends.last_mut() {
            *last = end;
        }
    }
}

/// Calls `each` for the characters of the canonical decomposition of `c`, without nonspacing marks.
fn strip_accents(c: char, mut each: impl FnMut(char)) {
    let code = c as u32;
    if code < 0xc0 {
        return each(c);
    }
    if unicode::kind(code) == MARK && !within(&SPACING_MARKS, code) {
        return;
    }
    // Hangul syllables decompose arithmetically: 19 initials, 21 vowels, 27 finals or none
    if let 0xac00..0xd7a4 = code {
        let syllable = code - 0xac00;
        let (initial, vowel, last) = (syllable / 588, syllable % 588 / 28, syllable % 28);
        let letters = [0x1100 + initial, 0x1161 + vowel, 0x11a7 + last];
        let n = if last == 0 { 2 } else { 3 };
        return letters.iter().take(n).filter_map(|&letter| char::from_u32(letter)).for_each(each);
    }
    match DECOMPOSED.binary_search(&code).ok().and_then(|place| TARGETS.get(place)) {
        None => each(c),
        Some(&target) => match char::from_u32(target) {
            Some(bare) => each(bare),
            None => SEVERAL.get((target - 0x11_0000) as usize).unwrap_or(&"").chars().for_each(each),
        },
    }
}

/// Whether `code` is in one of the ranges, given as ascending pairs of first and last characters.
fn within(ends: &[u32], code: u32) -> bool {
    let at = ends.partition_point(|&end| end < code);
    at % 2 == 1 || ends.get(at) == Some(&code)
}

/// Unicode format characters, as pairs of first and last.
#[rustfmt::skip]
static FORMAT: [u32; 42] = [
    0xad, 0xad, 0x600, 0x605, 0x61c, 0x61c, 0x6dd, 0x6dd, 0x70f, 0x70f, 0x890, 0x891, 0x8e2, 0x8e2, 0x180e, 0x180e,
    0x200b, 0x200f, 0x202a, 0x202e, 0x2060, 0x2064, 0x2066, 0x206f, 0xfeff, 0xfeff, 0xfff9, 0xfffb, 0x110bd, 0x110bd,
    0x110cd, 0x110cd, 0x13430, 0x1343f, 0x1bca0, 0x1bca3, 0x1d173, 0x1d17a, 0xe0001, 0xe0001, 0xe0020, 0xe007f,
];

/// Characters that BERT removes: control, format and private-use characters and U+FFFD. Line feeds, carriage returns
/// and tabs count as white space instead.
fn is_removed(c: char) -> bool {
    match c {
        '\t' | '\n' | '\r' => false,
        '\0'..='\u{1f}' | '\u{7f}'..='\u{9f}' | '\u{fffd}' => true,
        '\u{e000}'..='\u{f8ff}' | '\u{f0000}'.. => true,
        _ => unicode::kind(c as u32) == OTHER && within(&FORMAT, c as u32),
    }
}

/// CJK ideographs, each a word of its own. The gap below U+2B920 is in the original code.
fn is_ideograph(c: char) -> bool {
    matches!(c, '\u{3400}'..='\u{4dbf}' | '\u{4e00}'..='\u{9fff}' | '\u{f900}'..='\u{faff}'
        | '\u{20000}'..='\u{2a6df}' | '\u{2a700}'..='\u{2b81f}' | '\u{2b920}'..='\u{2ceaf}'
        | '\u{2f800}'..='\u{2fa1f}')
}

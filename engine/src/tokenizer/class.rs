//! Character classes of pre-tokenizers: bit sets for ASCII, tables for other characters.

use super::unicode;

/// A character class: characters with any of `bits` or in the ranges `with`, but not in the ranges `without`; negated
/// if `not`.
#[derive(Debug, Clone, Copy)]
pub(super) struct CharClass {
    pub(super) bits: u32,
    pub(super) with: &'static [(char, char)],
    pub(super) without: &'static [(char, char)],
    pub(super) not: bool,
}

/// Property bits besides the Unicode categories, which are the bits `1 << kind`. Only ASCII characters have them.
pub(super) mod bit {
    pub(in super::super) const NEWLINE: u32 = 1 << 12;
    pub(in super::super) const SPACE: u32 = 1 << 13;
    pub(in super::super) const SLASH: u32 = 1 << 14;
    pub(in super::super) const ALPHA: u32 = 1 << 15;
    pub(in super::super) const DIGIT: u32 = 1 << 16;
    pub(in super::super) const ASCII_PUNCT: u32 = 1 << 17;
    pub(in super::super) const LINE_FEED: u32 = 1 << 18;
    pub(in super::super) const MATHS: u32 = 1 << 19;
    pub(in super::super) const BACKTICK: u32 = 1 << 20;
    pub(in super::super) const STOP: u32 = 1 << 21;
    pub(in super::super) const TAB: u32 = 1 << 22;
    pub(in super::super) const UNDERSCORE: u32 = 1 << 23;
}

pub(super) const LETTER_BITS: u32 = 0b11_1110;
pub(super) const WHITE_BIT: u32 = 1 << unicode::WHITE;

static ASCII_BITS: [u32; 128] = ascii_bits();

const fn ascii_bits() -> [u32; 128] {
    let mut table = [0; 128];
    let mut c = 0;
    while c < 128 {
        let mut bits = 1 << unicode::ASCII[c];
        let byte = c as u8;
        if byte.is_ascii_alphabetic() {
            bits |= bit::ALPHA;
        }
        if byte.is_ascii_digit() {
            bits |= bit::DIGIT;
        }
        if byte.is_ascii_punctuation() {
            bits |= bit::ASCII_PUNCT;
        }
        bits |= match byte {
            b'\n' => bit::NEWLINE | bit::LINE_FEED,
            b'\r' => bit::NEWLINE,
            b'\t' => bit::TAB,
            b' ' => bit::SPACE,
            b'/' => bit::SLASH,
            b'$' | b'+' | b'<' | b'=' | b'>' | b'^' | b'~' => bit::MATHS,
            b'|' => bit::MATHS | bit::STOP,
            b'`' => bit::BACKTICK,
            b'(' | b')' | b'.' | b',' | b'!' | b'?' => bit::STOP,
            b'_' => bit::UNDERSCORE,
            _ => 0,
        };
        table[c] = bits;
        c += 1;
    }
    table
}

impl CharClass {
    /// Characters with any of `bits`.
    pub(super) const fn any(bits: u32) -> CharClass {
        CharClass { bits, with: &[], without: &[], not: false }
    }

    /// Characters with none of `bits`.
    pub(super) const fn none(bits: u32) -> CharClass {
        CharClass { bits, with: &[], without: &[], not: true }
    }

    /// Length in bytes of the character at `at` if it is in the class, else 0; 0 at the end.
    #[inline(always)]
    pub(super) fn len_at(&self, text: &[u8], at: usize) -> usize {
        match text.get(at) {
            None => 0,
            Some(&byte) if byte < 128 => usize::from((ASCII_BITS[usize::from(byte)] & self.bits != 0) != self.not),
            Some(_) => self.wide_len_at(text, at),
        }
    }

    #[inline(never)]
    fn wide_len_at(&self, text: &[u8], at: usize) -> usize {
        let (c, len) = char_at(text, at);
        let within = |ranges: &[(char, char)]| ranges.iter().any(|&(a, b)| (a as u32) <= c && c <= b as u32);
        let inside = (1 << unicode::kind(c) & self.bits != 0 || within(self.with)) && !within(self.without);
        if inside != self.not { len } else { 0 }
    }
}

/// The character at `at`, which must be the first byte of one, and its length in bytes.
pub(super) fn char_at(text: &[u8], at: usize) -> (u32, usize) {
    let byte = |i: usize| u32::from(text.get(at + i).copied().unwrap_or(0x80)) & 0x3f;
    match text[at] {
        b @ 0..0x80 => (u32::from(b), 1),
        b @ 0x80..0xe0 => (u32::from(b & 0x1f) << 6 | byte(1), 2),
        b @ 0xe0..0xf0 => (u32::from(b & 0x0f) << 12 | byte(1) << 6 | byte(2), 3),
        b => (u32::from(b & 0x07) << 18 | byte(1) << 12 | byte(2) << 6 | byte(3), 4),
    }
}

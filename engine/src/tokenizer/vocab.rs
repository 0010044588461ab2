//! The vocabulary: for each token its text in the file, the bytes it decodes to, and its kind.

use alloc::vec::Vec;

use super::table::TextTable;

/// `tokenizer.ggml.token_type`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Undefined,
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

impl Kind {
    pub(super) fn from_id(id: i32) -> Kind {
        match id {
            1 => Kind::Normal,
            2 => Kind::Unknown,
            3 => Kind::Control,
            4 => Kind::UserDefined,
            5 => Kind::Unused,
            6 => Kind::Byte,
            _ => Kind::Undefined,
        }
    }
}

/// How the bytes of normal tokens are spelled in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Spelling {
    /// Byte-level: each byte is a printable character, as in GPT-2.
    Bytes,
    /// SentencePiece: plain text with U+2581 for spaces, and `<0xAB>` for bytes.
    Meta,
    /// Plain text, and `<0xAB>` for bytes.
    Plain,
    /// Bytes with the escapes `\t`, `\n`, `\r`, `\xab`, and a backslash before other characters (RWKV).
    Escaped,
}

/// Byte strings in one allocation.
#[derive(Debug, Clone)]
struct Strings {
    bytes: Vec<u8>,
    ends: Vec<u32>,
}

impl Strings {
    fn with_capacity(n: usize, n_bytes: u32) -> Strings {
        Strings { bytes: Vec::with_capacity(n_bytes as usize), ends: Vec::with_capacity(n) }
    }

    /// Ends the string of the bytes appended since the last call.
    fn end(&mut self) {
        self.ends.push(self.bytes.len() as u32);
    }

    fn get(&self, i: usize) -> Option<&[u8]> {
        let end = *self.ends.get(i)?;
        let start = if i == 0 { 0 } else { self.ends[i - 1] };
        self.bytes.get(start as usize..end as usize)
    }
}

/// All tokens of a vocabulary.
#[derive(Debug, Clone)]
pub(super) struct Vocab {
    texts: Strings,
    pieces: Strings,
    pub(super) kinds: Vec<Kind>,
}

impl Vocab {
    /// Builds the vocabulary from the token texts, `n_bytes` in total, and a kind per token.
    pub(super) fn new<'t>(
        texts: impl Iterator<Item = &'t [u8]>,
        n_bytes: u32,
        kinds: Vec<Kind>,
        spelling: Spelling,
    ) -> Vocab {
        let strings = || Strings::with_capacity(kinds.len(), n_bytes);
        let mut vocab = Vocab { texts: strings(), pieces: strings(), kinds };
        for (text, &kind) in texts.zip(&vocab.kinds) {
            vocab.texts.bytes.extend_from_slice(text);
            vocab.texts.end();
            let out = &mut vocab.pieces.bytes;
            match (kind, spelling) {
                (Kind::Control | Kind::Unknown, _) | (Kind::UserDefined, Spelling::Bytes) => {
                    out.extend_from_slice(text);
                }
                (Kind::Byte, Spelling::Meta | Spelling::Plain) => match hex_byte(text) {
                    Some(byte) => out.push(byte),
                    None => out.extend_from_slice(text),
                },
                (_, Spelling::Bytes) => unspell_bytes(text, out),
                (_, Spelling::Meta) => unspell_meta(text, out),
                (_, Spelling::Plain) => out.extend_from_slice(text),
                (_, Spelling::Escaped) => unescape(text, out),
            }
            vocab.pieces.end();
        }
        // a piece is never longer than its text
        vocab.pieces.bytes.shrink_to_fit();
        vocab
    }

    pub(super) fn len(&self) -> usize {
        self.kinds.len()
    }

    /// The token's text as the file spells it.
    pub(super) fn text(&self, id: u32) -> Option<&[u8]> {
        self.texts.get(id as usize)
    }

    /// The bytes that the token decodes to.
    pub(super) fn piece(&self, id: u32) -> Option<&[u8]> {
        self.pieces.get(id as usize)
    }

    pub(super) fn kind(&self, id: u32) -> Option<Kind> {
        self.kinds.get(id as usize).copied()
    }

    /// All token ids.
    pub(super) fn ids(&self) -> impl Iterator<Item = u32> + use<> {
        0..self.len() as u32
    }
}

/// The byte of a token `<0xAB>`.
pub(super) fn hex_byte(text: &[u8]) -> Option<u8> {
    let digits = text.strip_prefix(b"<0x")?.strip_suffix(b">")?;
    match digits.iter().map(|&d| char::from(d).to_digit(16)).collect::<Option<Vec<_>>>()?[..] {
        [high, low] => Some((high << 4 | low) as u8),
        _ => None,
    }
}

/// The character that spells `byte` in byte-level vocabularies: the byte itself if it is printable in Latin-1, else the
/// next character from U+0100 on.
pub(super) fn byte_char(byte: u8) -> char {
    let gap = match byte {
        b'!'..=b'~' | 0xa1..=0xac | 0xae.. => return char::from(byte),
        0..=b' ' => u32::from(byte),
        0x7f..=0xa0 => u32::from(byte) - 0x7f + 33,
        0xad => 67,
    };
    char::from_u32(0x100 + gap).unwrap_or(char::REPLACEMENT_CHARACTER)
}

fn char_byte(c: char) -> Option<u8> {
    match c as u32 {
        c @ (0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) => Some(c as u8),
        c @ 0x100..=0x120 => Some((c - 0x100) as u8),
        c @ 0x121..=0x142 => Some((c - 0x121 + 0x7f) as u8),
        0x143 => Some(0xad),
        _ => None,
    }
}

/// Characters outside the byte alphabet and bytes that are not UTF-8 are copied.
fn unspell_bytes(text: &[u8], out: &mut Vec<u8>) {
    for chunk in text.utf8_chunks() {
        for c in chunk.valid().chars() {
            match char_byte(c) {
                Some(byte) => out.push(byte),
                None => out.extend_from_slice(c.encode_utf8(&mut [0; 4]).as_bytes()),
            }
        }
        out.extend_from_slice(chunk.invalid());
    }
}

/// Writes the bytes of a text with escapes. A backslash at the end stands for itself.
fn unescape(text: &[u8], out: &mut Vec<u8>) {
    let digit = |byte: u8| char::from(byte).to_digit(16);
    let mut rest = text;
    while let Some((&first, after)) = rest.split_first() {
        let (byte, len) = match (first, after) {
            (b'\\', [b't', ..]) => (b'\t', 2),
            (b'\\', [b'n', ..]) => (b'\n', 2),
            (b'\\', [b'r', ..]) => (b'\r', 2),
            (b'\\', [b'x', high, low, ..]) => match (digit(*high), digit(*low)) {
                (Some(high), Some(low)) => ((high << 4 | low) as u8, 4),
                _ => (b'x', 2),
            },
            (b'\\', [other, ..]) => (*other, 2),
            _ => (first, 1),
        };
        out.push(byte);
        rest = &rest[len..];
    }
}

/// U+2581 in UTF-8, SentencePiece's space.
pub(super) const META_SPACE: &[u8] = "\u{2581}".as_bytes();

fn unspell_meta(text: &[u8], out: &mut Vec<u8>) {
    let mut rest = text;
    while let Some((&first, after)) = rest.split_first() {
        match rest.strip_prefix(META_SPACE) {
            Some(after) => {
                out.push(b' ');
                rest = after;
            }
            None => {
                out.push(first);
                rest = after;
            }
        }
    }
}

impl Vocab {
    /// The token of each byte, where `spelled(byte)` is its text in the file. Control tokens are excluded: plain text
    /// must not become one.
    pub(super) fn byte_ids(&self, texts: &TextTable, spelled: impl Fn(u8) -> Vec<u8>) -> Vec<Option<u32>> {
        let find = |byte| texts.get(&spelled(byte), |id| self.text(id).unwrap_or_default());
        (0..=255).map(|byte| find(byte).filter(|&id| self.kind(id) != Some(Kind::Control))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn byte_alphabet() {
        for byte in 0..=255 {
            assert_eq!(char_byte(byte_char(byte)), Some(byte));
        }
        assert_eq!((byte_char(b' '), byte_char(b'\n'), byte_char(0xad)), ('Ġ', 'Ċ', 'Ń'));
    }

    #[test]
    fn escapes() {
        for (text, bytes) in [
            (r"a\t\n\r", &b"a\t\n\r"[..]),
            (r"\xe4\xBD\x00z", b"\xe4\xbd\0z"),
            (r"\\\'\x", b"\\'x"),
            (r"\xg1\x1", b"xg1x1"),
            ("\\", b"\\"),
        ] {
            let mut out = Vec::new();
            unescape(text.as_bytes(), &mut out);
            assert_eq!(out, bytes, "{text}");
        }
    }

    #[test]
    fn bytes_in_hex() {
        let cases: [(&str, Option<u8>); 5] =
            [("<0x0A>", Some(10)), ("<0xff>", Some(255)), ("<0xA>", None), ("<0x0AB>", None), ("0x0A", None)];
        for (text, byte) in cases {
            assert_eq!(hex_byte(text.as_bytes()), byte, "{text}");
        }
    }
}

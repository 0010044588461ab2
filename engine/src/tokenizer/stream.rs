//! Streaming UTF-8 decoder: a token may end in the middle of a character.

use alloc::string::String;
use alloc::vec::Vec;

/// Decodes bytes to text incrementally. The concatenated output equals [`String::from_utf8_lossy`] of all bytes.
#[derive(Debug, Clone, Default)]
pub struct StreamDecoder {
    /// An incomplete character, at most 3 bytes.
    partial: Vec<u8>,
}

impl StreamDecoder {
    /// A decoder at the start of a text.
    pub fn new() -> StreamDecoder {
        StreamDecoder::default()
    }

    /// Appends bytes and returns the decoded text. An incomplete character at the end is kept for the next call.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        self.partial.extend_from_slice(bytes);
        let mut text = String::with_capacity(self.partial.len());
        let mut kept = 0;
        let mut chunks = self.partial.utf8_chunks().peekable();
        while let Some(chunk) = chunks.next() {
            text.push_str(chunk.valid());
            let invalid = chunk.invalid();
            if chunks.peek().is_none() && may_continue(invalid) {
                kept = invalid.len();
            } else if !invalid.is_empty() {
                text.push(char::REPLACEMENT_CHARACTER);
            }
        }
        self.partial.drain(..self.partial.len() - kept);
        text
    }

    /// The bytes held back: an incomplete character.
    pub fn pending(&self) -> &[u8] {
        &self.partial
    }

    /// Ends the text: returns U+FFFD for an incomplete character, else an empty string.
    pub fn finish(&mut self) -> String {
        let text = String::from_utf8_lossy(&self.partial).into_owned();
        self.partial.clear();
        text
    }
}

/// Whether more bytes could complete the invalid sequence.
fn may_continue(invalid: &[u8]) -> bool {
    // `error_len` is `None` exactly for a proper prefix of a character
    core::str::from_utf8(invalid).is_err_and(|e| e.error_len().is_none())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Arbitrary bytes, many of them nearly UTF-8.
    fn bytes() -> impl Strategy<Value = Vec<u8>> {
        let part = prop_oneof![
            any::<char>().prop_map(|c| c.encode_utf8(&mut [0; 4]).as_bytes().to_vec()),
            any::<char>().prop_map(|c| {
                let mut bytes = c.encode_utf8(&mut [0; 4]).as_bytes().to_vec();
                bytes.pop();
                bytes
            }),
            prop::collection::vec(any::<u8>(), 0..4),
            Just(Vec::from([0xed, 0xa0, 0x80])),
            Just(Vec::from([0xf4, 0x90])),
        ];
        prop::collection::vec(part, 0..20).prop_map(|parts| parts.concat())
    }

    proptest! {
        #[test]
        fn equals_lossy_for_any_chunks(bytes in bytes(), sizes in prop::collection::vec(0usize..5, 0..100)) {
            let mut decoder = StreamDecoder::new();
            let mut text = String::new();
            let mut rest = &bytes[..];
            for size in sizes {
                let (chunk, after) = rest.split_at(size.min(rest.len()));
                text.push_str(&decoder.push(chunk));
                prop_assert!(decoder.pending().len() < 4);
                rest = after;
            }
            text.push_str(&decoder.push(rest));
            text.push_str(&decoder.finish());
            prop_assert_eq!(text, String::from_utf8_lossy(&bytes).into_owned());
        }
    }

    #[test]
    fn holds_back_half_a_character() {
        let mut decoder = StreamDecoder::new();
        assert_eq!(decoder.push(b"a\xe2\x82"), "a");
        assert_eq!(decoder.push(b"\xac!"), "€!");
        assert_eq!(decoder.push(b"\xf0\x9f"), "");
        assert_eq!(decoder.finish(), "\u{fffd}");
    }
}

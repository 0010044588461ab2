//! Serialised vocabulary for the grammar engine, which may be a separate WebAssembly module.

use alloc::vec::Vec;

use super::Tokenizer;

/// First byte of a serialised control token; it never occurs in UTF-8 text.
pub const CONTROL_MARK: u8 = 0xFF;

impl Tokenizer {
    /// Serialises the first `n_vocab` tokens, in u32 little-endian: the number of tokens; for each its length and
    /// bytes, for a control token [`CONTROL_MARK`] and its text; then the ids of the end-of-generation tokens. A token
    /// whose bytes begin with the mark is serialised as empty.
    pub fn grammar_vocabulary(&self, n_vocab: usize) -> Vec<u8> {
        let mut out = (n_vocab as u32).to_le_bytes().to_vec();
        for id in 0..n_vocab as u32 {
            let (mark, bytes): (&[u8], _) =
                if self.is_control(id) { (&[CONTROL_MARK], self.token_text(id)) } else { (&[], self.piece(id)) };
            let bytes = bytes.filter(|bytes| bytes.first() != Some(&CONTROL_MARK)).unwrap_or_default();
            out.extend(((mark.len() + bytes.len()) as u32).to_le_bytes());
            out.extend(mark);
            out.extend(bytes);
        }
        out.extend(self.end_tokens().iter().flat_map(|id| id.to_le_bytes()));
        out
    }
}

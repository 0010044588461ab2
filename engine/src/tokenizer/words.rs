//! A vocabulary in bytes, as grammars are given it, which may be in another module.

use alloc::vec::Vec;

use super::Tokenizer;

/// What the name of a control token begins with; no text does, as it is no byte of UTF-8.
pub const CONTROL_MARK: u8 = 0xFF;

impl Tokenizer {
    /// The first `n_vocab` tokens, and which of them end an answer, in u32 little-endian: how many tokens there are; for
    /// each its length and its bytes, [`CONTROL_MARK`] and the name for a control token; and the ids of those that end.
    /// A text that begins with the mark counts as none.
    pub fn words(&self, n_vocab: usize) -> Vec<u8> {
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

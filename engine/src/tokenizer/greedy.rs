//! The tokenizer of RWKV: from the left, the longest token that the text begins with. Tokens are any bytes.

use super::matcher::Matcher;
use super::vocab::{Kind, Vocab};
use super::{Output, TextSpan};

/// Tokens of a vocabulary.
#[derive(Debug, Clone)]
pub(super) struct Greedy {
    pieces: Matcher,
    /// Token of bytes that no token begins with; without it they are dropped.
    unknown: Option<u32>,
}

impl Greedy {
    pub(super) fn new(vocab: &Vocab, unknown: Option<u32>) -> Greedy {
        let is_text = |kind| !matches!(kind, Kind::Control | Kind::Unknown | Kind::Unused);
        Greedy { pieces: Matcher::of_bytes(vocab, is_text), unknown }
    }

    /// Appends the tokens of a span of text.
    pub(super) fn encode(&self, vocab: &Vocab, span: TextSpan<'_>, out: &mut Output) {
        let (bytes, mut at) = (span.text.as_bytes(), 0);
        while at < bytes.len() {
            let (id, len) = match self.pieces.longest(vocab, &bytes[at..]) {
                Some((id, len)) => (Some(id), len),
                None => (self.unknown, 1),
            };
            at += len;
            if let Some(id) = id {
                out.push(id, span.offset + at);
            }
        }
    }
}

//! Token sequences that contain a given text.

use alloc::vec::Vec;

use super::{EncodeOptions, Tokenizer};

impl Tokenizer {
    /// The token sequences of DRY's sequence breakers `texts` ([`Dry::breakers`](crate::sampler::Dry::breakers)). Searches
    /// the whole vocabulary for each text.
    pub fn dry_breakers(&self, texts: &[impl AsRef<str>]) -> Vec<Vec<u32>> {
        texts.iter().flat_map(|text| self.sequences_with(text.as_ref())).collect()
    }

    /// The token sequences that complete `text`: each token that contains it, and each
    /// token that ends with a prefix of it, followed by the tokens of the rest. In order of the first tokens.
    ///
    /// Source: `get_overlapping_token_sequences` in
    /// <https://github.com/ggml-org/llama.cpp/blob/master/src/llama-sampler.cpp>.
    pub(super) fn sequences_with(&self, text: &str) -> Vec<Vec<u32>> {
        let wanted = text.as_bytes();
        let mut all = Vec::new();
        if wanted.is_empty() {
            return all;
        }
        let rests: Vec<Vec<u32>> = (1..wanted.len())
            .map(|n| text.get(n..).map_or(Vec::new(), |rest| self.encode(rest, EncodeOptions::default())))
            .collect();
        for id in 0..self.n_vocab() as u32 {
            let piece = self.piece(id).unwrap_or_default();
            if piece.windows(wanted.len()).any(|part| part == wanted) {
                all.push([id].into());
                continue;
            }
            for (n, rest) in (1..).zip(&rests) {
                if !rest.is_empty() && piece.ends_with(&wanted[..n]) {
                    all.push([&[id], &rest[..]].concat());
                }
            }
        }
        // `text` is a character that no single token contains
        if all.is_empty() {
            all.push(self.encode(text, EncodeOptions::default()));
        }
        all
    }
}

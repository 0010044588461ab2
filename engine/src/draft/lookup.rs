//! Prompt lookup: proposes what followed the same tokens earlier in the text (Saxena 2023, "Prompt Lookup Decoding").
//!
//! Positions with equal n-grams of [`MIN_MATCH`] tokens are chained through a hash table, as in LZ77. Of the
//! [`MAX_CHAIN`] latest the longest match is taken. Besides, the positions around the last one that was followed are
//! compared directly: there one equal token suffices, so that an edited copy is found again right after the edit.
//!
//! Appending a token takes constant amortised time, a proposal of k tokens O(k). Memory: at most 16 bytes per token of
//! prediction, prompt and answer.

use alloc::boxed::Box;
use alloc::vec::Vec;

use super::Drafter;

/// Tokens of the n-grams that are indexed.
const MIN_MATCH: usize = 3;
/// Matches are compared up to this length.
const MAX_MATCH: usize = 16;
/// Positions that are compared per proposal.
const MAX_CHAIN: usize = 32;
/// Positions before and after the anchor that are compared per proposal.
const WINDOW: (usize, usize) = (4, 48);
/// Tokens that must follow a source before it becomes the anchor.
const ANCHOR_RUN: usize = 2;
/// No position.
const NONE: u32 = u32::MAX;

/// Proposes from an expected output, the prompt and the answer itself.
#[derive(Debug, Clone, Default)]
pub struct Lookup {
    /// Prediction, prompt, answer.
    tokens: Vec<u32>,
    /// Last position of an n-gram with this hash, a power of two of them, or none.
    heads: Vec<u32>,
    /// For the n-gram that ends at each position, the previous one with the same hash.
    previous: Vec<u32>,
    /// Position after the tokens that were followed last.
    anchor: Option<usize>,
    /// Position of the next expected token, and the tokens that have agreed since the proposal.
    cursor: Option<usize>,
    run: usize,
}

impl Lookup {
    /// A lookup that follows `prediction`, which may be empty.
    pub fn new(prediction: &[u32]) -> Lookup {
        let mut lookup = Lookup::default();
        prediction.iter().for_each(|&token| lookup.append(token));
        lookup.anchor = (!prediction.is_empty()).then_some(0);
        lookup
    }

    fn append(&mut self, token: u32) {
        self.tokens.push(token);
        self.previous.push(NONE);
        if self.tokens.len() > self.heads.len() {
            self.heads.clear();
            self.heads.resize(self.tokens.len().next_power_of_two().max(64), NONE);
            (0..self.tokens.len()).for_each(|end| self.index(end));
        } else {
            self.index(self.tokens.len() - 1);
        }
    }

    /// Indexes the n-gram that ends at a position.
    fn index(&mut self, end: usize) {
        let Some(first) = (end + 1).checked_sub(MIN_MATCH) else { return };
        let hash = self.tokens[first..=end].iter().fold(0u32, |h, t| (h ^ t).wrapping_mul(0x9e37_79b1).rotate_left(15));
        let slot = hash.wrapping_mul(0x85eb_ca6b) >> (32 - self.heads.len().trailing_zeros());
        self.previous[end] = core::mem::replace(&mut self.heads[slot as usize], end as u32);
    }

    /// Length of the match of the tokens before `at` with the last tokens, up to [`MAX_MATCH`].
    fn matched(&self, at: usize) -> usize {
        let (before, last) = (self.tokens[..at].iter().rev(), self.tokens.iter().rev());
        before.zip(last).take(MAX_MATCH).take_while(|(a, b)| a == b).count()
    }

    /// The position to copy from, and the length of its match: the longest match, around the anchor before elsewhere,
    /// the nearest to it, then the latest.
    fn source(&self) -> Option<(usize, usize)> {
        let n = self.tokens.len();
        let mut best: Option<(usize, usize)> = None;
        let mut consider = |at: usize, length: usize| {
            if length > best.map_or(0, |best| best.1) {
                best = Some((at, length));
            }
        };
        if let Some(anchor) = self.anchor {
            let window = (anchor.saturating_sub(WINDOW.0)..anchor).rev();
            (anchor..(anchor + WINDOW.1).min(n)).chain(window).for_each(|at| consider(at, self.matched(at)));
        }
        let mut end = self.previous.last().copied().unwrap_or(NONE);
        for _ in 0..MAX_CHAIN {
            if end == NONE {
                break;
            }
            let length = self.matched(end as usize + 1);
            // shorter: another n-gram of the same hash
            if length >= MIN_MATCH {
                consider(end as usize + 1, length);
            }
            end = self.previous[end as usize];
        }
        best
    }
}

impl Drafter for Lookup {
    fn fork(&self) -> Box<dyn Drafter> {
        Box::new(self.clone())
    }

    fn accept(&mut self, token: u32) {
        self.append(token);
        let Some(cursor) = self.cursor else { return };
        if self.tokens[cursor] == token {
            self.run += 1;
            self.cursor = Some(cursor + 1);
            if self.run >= ANCHOR_RUN {
                self.anchor = self.cursor;
            }
        } else {
            self.cursor = None;
        }
    }

    fn propose(&mut self, max: usize, draft: &mut Vec<u32>) -> usize {
        self.cursor = None;
        let Some((at, length)) = self.source() else { return 0 };
        (self.cursor, self.run) = (Some(at), 0);
        // a source that reaches the end of the text repeats
        draft.extend((0..max).map(|i| self.tokens[at + i % (self.tokens.len() - at)]));
        match length {
            1 => 0,
            2..4 => 1,
            4..8 => 2,
            _ => 3,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn proposal(lookup: &mut Lookup, max: usize) -> Vec<u32> {
        let mut draft = Vec::new();
        lookup.propose(max, &mut draft);
        draft
    }

    fn fed(prediction: &[u32], tokens: &[u32]) -> Lookup {
        let mut lookup = Lookup::new(prediction);
        tokens.iter().for_each(|t| lookup.accept(*t));
        lookup
    }

    #[test]
    fn proposes_what_followed() {
        let mut lookup = fed(&[], &[1, 2, 3, 4, 5, 6, 9, 1, 2, 3]);
        assert_eq!(proposal(&mut lookup, 4), [4, 5, 6, 9]);
        // the longer match wins over the later
        let mut lookup = fed(&[], &[7, 1, 2, 3, 4, 8, 1, 2, 3, 5, 7, 1, 2, 3]);
        assert_eq!(proposal(&mut lookup, 1), [4]);
        // a repetition goes on
        let mut lookup = fed(&[], &[5, 6, 5, 6, 5, 6]);
        assert_eq!(proposal(&mut lookup, 5), [5, 6, 5, 6, 5]);
        assert_eq!(proposal(&mut fed(&[], &[1, 2, 3, 4]), 4), [0u32; 0]);
        assert_eq!(proposal(&mut Lookup::default(), 4), [0u32; 0]);
    }

    #[test]
    fn follows_a_prediction_across_edits() {
        let prediction: Vec<u32> = (100..160).collect();
        let mut lookup = fed(&prediction, &[1, 2, 3]);
        // replaced, inserted, left out
        let mut answer = prediction.clone();
        answer.splice(10..11, [7, 8]);
        answer.splice(20..20, [9, 9]);
        answer.splice(40..45, []);
        let mut hits = 0;
        for token in answer {
            hits += usize::from(proposal(&mut lookup, 3).first() == Some(&token));
            lookup.accept(token);
        }
        // all but the first token, those of the edits, and the one after each
        assert_eq!(hits, 58 - 1 - 4 - 3);
    }

    proptest! {
        /// The index finds the longest match that a search of all positions finds, as long as the chain is not cut.
        #[test]
        fn finds_the_longest_match(tokens in prop::collection::vec(0u32..4, 0..80)) {
            let mut lookup = fed(&[], &tokens);
            let found = lookup.source().map_or(0, |s| s.1);
            let longest = (0..tokens.len()).map(|at| lookup.matched(at)).max().unwrap_or(0);
            prop_assert!(found == longest || longest < MIN_MATCH || found >= MIN_MATCH);
            let draft = proposal(&mut lookup, 6);
            prop_assert_eq!(draft.len(), 6 * usize::from(found > 0));
        }
    }
}

//! Speculative decoding: guesses of the next tokens, verified in one batch.
//!
//! A [`Drafter`] proposes tokens. The engine computes them as further rows of the batch and samples at each position as
//! ever, with that position's own draw, as long as the sampled token equals the proposed one (Leviathan et al.,
//! arXiv:2211.17192, with equality in place of rejection sampling). So a draft changes the time of an answer but no byte
//! of it: neither the drafter nor the number of draft tokens is part of a result.

mod acceptance;
mod cost;
mod lookup;

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt::Debug;

pub(crate) use acceptance::Acceptance;
pub(crate) use cost::{StepCosts, allot};
pub use lookup::Lookup;

/// Number of confidence levels of a [`Drafter`].
pub const LEVELS: usize = 4;

/// Proposes the next tokens of one sequence.
pub trait Drafter: Debug + Send + Sync {
    /// An independent copy of the state.
    fn fork(&self) -> Box<dyn Drafter>;

    /// Appends the next token of the sequence: first those of the prompt, then the sampled ones.
    fn accept(&mut self, token: u32);

    /// Appends up to `max` tokens that may come next to `draft`, which is empty. Returns its confidence, below
    /// [`LEVELS`]: the engine measures the acceptance of each level by itself.
    fn propose(&mut self, max: usize, draft: &mut Vec<u32>) -> usize;
}

/// Speculative decoding of a request. Changes no byte of its output.
#[derive(Debug, Clone, Default)]
pub struct Speculation {
    /// Maximal draft tokens per step, at most [`EngineOptions::draft_rows`](crate::engine::EngineOptions::draft_rows); 0
    /// turns speculation off.
    pub max: usize,
    /// Draft only as many tokens that this share of them is expected to be accepted, from 0 to 1.
    pub min_acceptance: f32,
    /// Expected output, e.g. OpenAI's `prediction`: [`Lookup`] follows it from its first token. Only as many tokens as the
    /// context holds are used.
    pub prediction: Vec<u32>,
    /// The drafter, which the request forks; `None` for [`Lookup`] in the prediction, the prompt and the answer.
    pub drafter: Option<Arc<dyn Drafter>>,
}

/// State of a request's speculation.
#[derive(Debug)]
pub(crate) struct Speculator {
    drafter: Box<dyn Drafter>,
    acceptance: Acceptance,
    /// [`Speculation::max`] and [`Speculation::min_acceptance`].
    max: usize,
    min_acceptance: f32,
    /// Proposal of this step, and its confidence.
    proposal: Vec<u32>,
    level: usize,
    /// The last token of the sequence and the first tokens of `proposal`: the rows of the batch.
    rows: Vec<u32>,
}

impl Speculator {
    /// `None` if the options turn speculation off.
    pub(crate) fn new(options: &Speculation, prompt: &[u32], n_ctx: usize) -> Option<Speculator> {
        if options.max == 0 {
            return None;
        }
        let mut drafter = match &options.drafter {
            Some(drafter) => drafter.fork(),
            None => Box::new(Lookup::new(&options.prediction[..options.prediction.len().min(n_ctx)])),
        };
        prompt.iter().for_each(|&token| drafter.accept(token));
        Some(Speculator {
            drafter,
            acceptance: Acceptance::default(),
            max: options.max,
            min_acceptance: options.min_acceptance,
            proposal: Vec::new(),
            level: 0,
            rows: Vec::new(),
        })
    }

    /// Appends a sampled token.
    pub(crate) fn accept(&mut self, token: u32) {
        self.drafter.accept(token);
    }

    /// Asks the drafter for up to `limit` tokens below `n_vocab` and returns the chance of each to be accepted. The
    /// proposal is compared with the answer even if none of it is drafted, so that a drafter that does badly now is
    /// used again once it does better.
    pub(crate) fn propose(&mut self, limit: usize, n_vocab: usize) -> Vec<f32> {
        self.rows.clear();
        self.proposal.clear();
        self.level = self.drafter.propose(self.max.min(limit), &mut self.proposal).min(LEVELS - 1);
        let valid = self.proposal.iter().take_while(|token| (**token as usize) < n_vocab).count();
        self.proposal.truncate(valid.min(self.max.min(limit)));
        self.acceptance.chances(self.level, self.proposal.len(), self.min_acceptance)
    }

    /// Drafts the first `n` tokens of the proposal, to follow the token `last`.
    pub(crate) fn draft(&mut self, last: u32, n: usize) {
        self.rows.clear();
        self.rows.push(last);
        self.rows.extend(&self.proposal[..n]);
    }

    /// Tokens of the rows of the batch.
    pub(crate) fn rows(&self) -> &[u32] {
        &self.rows
    }

    /// Compares the proposal with the tokens that were sampled in its place.
    pub(crate) fn learn(&mut self, sampled: &[u32]) {
        for (i, (proposed, token)) in self.proposal.iter().zip(sampled).enumerate() {
            self.acceptance.record(self.level, i, proposed == token);
            if proposed != token {
                break;
            }
        }
        self.proposal.clear();
    }
}

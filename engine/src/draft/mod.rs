//! Speculative decoding: guesses of the next tokens, verified in one batch.
//!
//! A [`Drafter`] proposes tokens, and where it is not confident a draft model, if the engine has one
//! ([`Engine::set_draft_model`](crate::engine::Engine::set_draft_model)). The engine computes them as further rows of the
//! batch and samples at each position as ever, with that position's own draw, as long as the sampled token equals the
//! proposed one (Leviathan et al., arXiv:2211.17192, with equality in place of rejection sampling). So a draft changes the
//! time of an answer but no byte of it: neither drafter, draft model nor the number of draft tokens is part of a result.

mod acceptance;
mod cost;
mod head;
mod lookup;
mod memory;
mod model;
mod proposal;
mod source;

use alloc::boxed::Box;
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt::Debug;

pub(crate) use acceptance::{Acceptance, Rate};
pub(crate) use cost::{DraftCost, StepCosts, allot, draft_limits, worthwhile_length};
pub(crate) use head::ComputedRows;
pub use lookup::Lookup;
pub use model::check_draft_model;
pub(crate) use model::{DraftModel, relative_cost};
pub(crate) use proposal::{Guess, ProposalJob};
pub(crate) use source::DraftSource;

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

/// A first token of a lower chance is left to the draft model.
const CONFIDENT: f32 = 0.6;
/// Tokens for which the draft model is not asked, once it does not pay: doubled each time.
const PAUSE: (usize, usize) = (8, 256);

/// State of a request's speculation.
#[derive(Debug)]
pub(crate) struct Speculator {
    drafter: Box<dyn Drafter>,
    /// [`Speculation::max`] and [`Speculation::min_acceptance`].
    max: usize,
    min_acceptance: f32,
    /// Proposals of this step by the drafter and by the draft model.
    drafted: Proposal,
    guessed: Proposal,
    model: ModelUse,
    /// The last token of the sequence and the first tokens of a proposal: the rows of the batch.
    rows: Vec<u32>,
}

/// A proposal, and how those before it were accepted.
#[derive(Debug, Default)]
struct Proposal {
    acceptance: Acceptance,
    tokens: Vec<u32>,
    /// Confidence of its first token.
    level: usize,
}

/// Whether it pays to ask the draft model.
#[derive(Debug)]
struct ModelUse {
    /// Chance that its first token is proposed and accepted.
    first: Rate,
    /// Tokens of a step in which it was asked, in those that a plain step would have given in the same time.
    gain: Rate,
    /// Whether it was asked in this step.
    is_asked: bool,
    /// Tokens until it is asked again, and the length of the next pause.
    pause: usize,
    next_pause: usize,
}

impl Default for ModelUse {
    fn default() -> ModelUse {
        ModelUse { first: Rate::new(0.7), gain: Rate::new(1.2), is_asked: false, pause: 0, next_pause: PAUSE.0 }
    }
}

impl Proposal {
    fn chances(&self, min_acceptance: f32) -> Vec<f32> {
        self.acceptance.chances(self.level, self.tokens.len(), min_acceptance)
    }

    /// Compares the proposal with the tokens that were sampled in its place.
    fn learn(&mut self, sampled: &[u32]) {
        for (i, (proposed, token)) in self.tokens.iter().zip(sampled).enumerate() {
            self.acceptance.record(self.level, i, proposed == token);
            if proposed != token {
                break;
            }
        }
        self.tokens.clear();
    }
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
            max: options.max,
            min_acceptance: options.min_acceptance,
            drafted: Proposal::default(),
            guessed: Proposal::default(),
            model: ModelUse::default(),
            rows: Vec::new(),
        })
    }

    /// Appends a sampled token.
    pub(crate) fn accept(&mut self, token: u32) {
        self.drafter.accept(token);
        self.model.pause = self.model.pause.saturating_sub(1);
    }

    /// Asks the drafter for up to `limit` tokens below `n_vocab`. The proposal is compared with the answer even if none
    /// of it is drafted, so that a drafter that does badly now is used again once it does better.
    pub(crate) fn propose(&mut self, limit: usize, n_vocab: usize) {
        self.rows.clear();
        self.guessed.tokens.clear();
        let (max, proposal) = (self.max.min(limit), &mut self.drafted);
        proposal.tokens.clear();
        proposal.level = self.drafter.propose(max, &mut proposal.tokens).min(LEVELS - 1);
        let valid = proposal.tokens.iter().take_while(|token| (**token as usize) < n_vocab).count();
        proposal.tokens.truncate(valid.min(max));
    }

    /// Whether to ask the draft model: not where the drafter is confident, nor where it does not pay. Returns the maximal
    /// number of tokens, the expected chance of a token to be accepted, and the chance below which a token does not pay.
    /// `length` returns the number of tokens that pay, for the chances of the first and of later ones, and the latter.
    pub(crate) fn ask_model(
        &mut self,
        limit: usize,
        length: impl FnOnce((f32, f32), usize) -> (usize, f32),
    ) -> Option<(usize, f32, f32)> {
        let Speculator { drafted, model, .. } = self;
        let is_confident = !drafted.tokens.is_empty() && drafted.acceptance.first(drafted.level) >= CONFIDENT;
        if is_confident || model.pause > 0 || self.max.min(limit) == 0 {
            return None;
        }
        let (max, next) = (self.max.min(limit), self.guessed.acceptance.next());
        let (n, min_chance) = length((model.first.mean(), next), max);
        if n > 0 && model.gain.mean() >= 1.0 {
            model.next_pause = PAUSE.0;
            return Some((n, next, min_chance));
        }
        // once after each pause it is asked all the same, to learn whether it pays now
        model.pause = model.next_pause;
        model.next_pause = (2 * model.next_pause).min(PAUSE.1);
        Some((max, next, min_chance))
    }

    /// Takes the proposal of the draft model.
    pub(crate) fn set_guesses(&mut self, guesses: &[Guess]) {
        self.model.is_asked = true;
        self.guessed.tokens.clear();
        self.guessed.tokens.extend(guesses.iter().map(|guess| guess.token));
        self.guessed.level = match guesses.first().map_or(0.0, |guess| guess.probability) {
            ..0.55 => 0,
            ..0.75 => 1,
            ..0.92 => 2,
            _ => 3,
        };
    }

    /// The proposal that is drafted: that of the draft model, if it was asked and has one.
    fn proposal(&self) -> &Proposal {
        if self.guessed.tokens.is_empty() { &self.drafted } else { &self.guessed }
    }

    /// Chance of each proposed token to be accepted.
    pub(crate) fn chances(&self) -> Vec<f32> {
        self.proposal().chances(self.min_acceptance)
    }

    /// Drafts the first `n` tokens of the proposal, to follow the token `last`.
    pub(crate) fn draft(&mut self, last: u32, n: usize) {
        let mut rows = core::mem::take(&mut self.rows);
        rows.clear();
        rows.push(last);
        rows.extend(&self.proposal().tokens[..n]);
        self.rows = rows;
    }

    /// Tokens of the rows of the batch.
    pub(crate) fn rows(&self) -> &[u32] {
        &self.rows
    }

    /// Compares the proposals with the tokens that were sampled in their place, in a step that took `cost` plain ones.
    pub(crate) fn learn(&mut self, sampled: &[u32], cost: f32) {
        if core::mem::take(&mut self.model.is_asked)
            && let Some(token) = sampled.first()
        {
            self.model.first.record(f32::from(u8::from(self.guessed.tokens.first() == Some(token))));
            self.model.gain.record(sampled.len() as f32 / cost.max(1.0));
        }
        self.drafted.learn(sampled);
        self.guessed.learn(sampled);
    }
}

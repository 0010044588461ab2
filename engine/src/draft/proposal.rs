//! Proposals of a model: batches of guesses, each one token longer, until they are unlikely to be accepted.

use alloc::vec;
use alloc::vec::Vec;

use crate::engine::RequestId;
use crate::math::exp;
use crate::model::Exec;

/// A token of lower probability ends the proposal.
const MIN_PROBABILITY: f32 = 0.4;
/// Logits that are smaller than the largest by more than this add less than 2 % to the sum of 200,000 tokens.
const MAX_DIFFERENCE: f32 = 16.0;

/// A sequence that wants a proposal.
pub(crate) struct ProposalJob<'a> {
    pub(crate) id: RequestId,
    /// Prompt and answer so far.
    pub(crate) tokens: &'a [u32],
    /// Salt of the prefix tree.
    pub(crate) salt: u64,
    /// Maximal tokens of the proposal.
    pub(crate) max: usize,
    /// Expected chance of the next token to be accepted, all before it being accepted.
    pub(crate) next: f32,
    /// No token is guessed whose chance to be accepted is below this.
    pub(crate) min_chance: f32,
}

/// A guessed token, and its probability in the model that guesses.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Guess {
    pub(crate) token: u32,
    pub(crate) probability: f32,
}

/// The proposals of a step, and what they cost.
pub(crate) struct Proposals {
    /// By job. `None` if the model has not caught up with the sequence.
    pub(crate) guesses: Vec<Option<Vec<Guess>>>,
    /// Batches computed.
    pub(crate) n_batches: usize,
    /// Rows of the largest batch.
    pub(crate) max_rows: usize,
}

/// A sequence's tokens in a batch.
pub(super) struct BatchEntry {
    /// Index of the job.
    pub(super) job: usize,
    pub(super) tokens: Vec<u32>,
    /// Position of the first.
    pub(super) pos: usize,
    /// Whether a token is guessed after the last.
    pub(super) picks: bool,
}

/// A model that guesses the next token of sequences.
pub(super) trait Guesser {
    /// The first batch: the tokens of each sequence that are not computed yet, at most `budget`.
    fn catch_up(&mut self, jobs: &[ProposalJob<'_>], budget: usize) -> Vec<BatchEntry>;

    /// Computes a batch. Returns the guesses of the entries that pick, in their order.
    fn compute(&mut self, exec: Exec<'_>, jobs: &[ProposalJob<'_>], batch: &[BatchEntry]) -> Vec<Guess>;

    /// Appends a guess to its sequence, to be computed. Returns its position, or `None` if that is not possible.
    fn append(&mut self, id: RequestId, token: u32) -> Option<usize>;
}

/// Proposes tokens. Computes at most `budget` tokens that the sequences have got since their last proposals.
pub(super) fn propose(model: &mut impl Guesser, exec: Exec<'_>, jobs: &[ProposalJob<'_>], budget: usize) -> Proposals {
    let mut proposals = Proposals { guesses: vec![None; jobs.len()], n_batches: 0, max_rows: 0 };
    let mut chances = vec![1.0f32; jobs.len()];
    let mut batch = model.catch_up(jobs, budget);
    while !batch.is_empty() {
        let rows = batch.iter().map(|entry| entry.tokens.len()).sum();
        proposals.max_rows = proposals.max_rows.max(rows);
        proposals.n_batches += 1;
        let mut guessed = model.compute(exec, jobs, &batch).into_iter();
        let done = core::mem::take(&mut batch);
        for BatchEntry { job: i, .. } in done.into_iter().filter(|entry| entry.picks) {
            let (Some(guess), job) = (guessed.next(), &jobs[i]) else { continue };
            let guesses = proposals.guesses[i].get_or_insert_default();
            if guess.probability < MIN_PROBABILITY {
                continue;
            }
            guesses.push(guess);
            chances[i] *= guess.probability;
            let is_last = guesses.len() >= job.max || chances[i] * job.next < job.min_chance;
            if !is_last && let Some(pos) = model.append(job.id, guess.token) {
                batch.push(BatchEntry { job: i, tokens: vec![guess.token], pos, picks: true });
            }
        }
    }
    proposals
}

impl Guess {
    /// The most probable token; the first of equals.
    pub(super) fn of(logits: &[f32]) -> Guess {
        let mut best = (0, f32::NEG_INFINITY);
        for (token, &logit) in logits.iter().enumerate() {
            if logit > best.1 {
                best = (token, logit);
            }
        }
        let differences = logits.iter().map(|logit| logit - best.1).filter(|d| *d >= -MAX_DIFFERENCE);
        let sum: f64 = differences.map(|difference| exp(f64::from(difference))).sum();
        Guess { token: best.0 as u32, probability: (1.0 / sum) as f32 }
    }
}

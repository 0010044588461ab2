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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::Cpu;
    use crate::pool::Inline;

    /// Guesses tokens 0, 1, 2, ... of each job with the given probabilities.
    struct Script {
        /// By job. A job without any has not caught up.
        probabilities: Vec<Vec<f32>>,
        n_guessed: Vec<usize>,
        /// Tokens that can be appended.
        n_free: usize,
    }

    impl Guesser for Script {
        fn catch_up(&mut self, jobs: &[ProposalJob<'_>], budget: usize) -> Vec<BatchEntry> {
            let entry = |job: usize| {
                let picks = !self.probabilities[job].is_empty();
                BatchEntry { job, tokens: jobs[job].tokens[..budget].to_vec(), pos: 0, picks }
            };
            (0..jobs.len()).map(entry).collect()
        }

        fn compute(&mut self, _: Exec<'_>, _: &[ProposalJob<'_>], batch: &[BatchEntry]) -> Vec<Guess> {
            let mut guess = |entry: &BatchEntry| {
                let n = self.n_guessed[entry.job];
                self.n_guessed[entry.job] += 1;
                Guess { token: n as u32, probability: self.probabilities[entry.job][n] }
            };
            batch.iter().filter(|entry| entry.picks).map(&mut guess).collect()
        }

        fn append(&mut self, _: RequestId, token: u32) -> Option<usize> {
            self.n_free = self.n_free.checked_sub(1)?;
            Some(100 + token as usize)
        }
    }

    /// What is proposed to jobs of at most 4 tokens and a chance of at least 0.3.
    fn proposals(probabilities: &[&[f32]], n_free: usize) -> Proposals {
        let job = |i| ProposalJob { id: RequestId(i), tokens: &[7, 8, 9], salt: 0, max: 4, next: 1.0, min_chance: 0.3 };
        let jobs: Vec<ProposalJob<'_>> = (0..probabilities.len() as u64).map(job).collect();
        let probabilities = probabilities.iter().map(|p| p.to_vec()).collect();
        let mut script = Script { probabilities, n_guessed: vec![0; jobs.len()], n_free };
        propose(&mut script, Exec { cpu: Cpu::detect(), pool: &Inline }, &jobs, 2)
    }

    /// Numbers of tokens proposed.
    fn lengths(proposals: &Proposals) -> Vec<Option<usize>> {
        proposals.guesses.iter().map(|guesses| guesses.as_ref().map(Vec::len)).collect()
    }

    #[test]
    fn proposals_end_where_tokens_are_unlikely() {
        for (probabilities, expected, why) in [
            (&[0.9; 9][..], 4, "the maximum of the job"),
            (&[0.9, 0.39, 0.9][..], 1, "a token of low probability, which is not proposed"),
            (&[0.2][..], 0, "no token is likely"),
            (&[0.6, 0.6, 0.6, 0.6][..], 3, "the chance of all together: 0.36, then 0.216"),
        ] {
            assert_eq!(lengths(&proposals(&[probabilities], 9)), [Some(expected)], "{why}");
        }
    }

    #[test]
    fn jobs_share_batches() {
        let found = proposals(&[&[0.9, 0.9, 0.1], &[], &[0.9, 0.1]], 9);
        assert_eq!(lengths(&found), [Some(2), None, Some(1)]);
        // two tokens of each job, then those of the jobs that go on
        assert_eq!((found.n_batches, found.max_rows), (3, 6));
        let tokens: Vec<u32> = found.guesses[0].iter().flatten().map(|guess| guess.token).collect();
        assert_eq!(tokens, [0, 1]);
        assert_eq!(lengths(&proposals(&[], 9)), []);
    }

    #[test]
    fn proposals_end_without_memory() {
        let found = proposals(&[&[0.9; 9], &[0.9; 9]], 3);
        assert_eq!(lengths(&found), [Some(3), Some(2)]);
    }

    #[test]
    fn the_most_probable_token() {
        let guess = Guess::of(&[1.0, 3.0, 3.0, -100.0]);
        assert_eq!(guess.token, 1);
        // 1 / (1 + 1 + exp(-2))
        assert!((guess.probability - 0.468_311).abs() < 1e-5, "{guess:?}");
        assert_eq!(Guess::of(&[-5.0]), Guess { token: 0, probability: 1.0 });
    }
}

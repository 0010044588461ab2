//! Composition of the next batch.
//!
//! Every decoding request gets one row. The rest of the token budget, limited to `prefill_chunk` if there are decode
//! rows, goes to prompts: a quarter to the oldest, the rest to those with the fewest tokens left, the older of equals
//! first. So short prompts overtake long ones, and the oldest prompt cannot starve.

use alloc::vec::Vec;

/// A request's share of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BatchEntry {
    /// Index of the request in order of submission.
    pub(super) request: usize,
    /// Number of its next tokens.
    pub(super) n_tokens: usize,
    /// Number of draft tokens after them.
    pub(super) n_draft: usize,
}

impl BatchEntry {
    pub(super) fn n_rows(&self) -> usize {
        self.n_tokens + self.n_draft
    }
}

/// The oldest prompt gets the prompt budget divided by this.
const OLDEST: usize = 4;

/// A batch of up to `batch_tokens` tokens, with up to `prefill_chunk` prompt tokens if there are decode rows; but at
/// least one row per decoding request and one prompt token. `pending[i]` is the number of tokens of request `i` that
/// are not computed yet: 0 while preempted, 1 when decoding, more during prefill.
pub(super) fn plan(pending: &[usize], batch_tokens: usize, prefill_chunk: usize) -> Vec<BatchEntry> {
    let mut plan = Vec::with_capacity(pending.len());
    let entry = |request, n_tokens| BatchEntry { request, n_tokens, n_draft: 0 };
    plan.extend((0..pending.len()).filter(|&i| pending[i] == 1).map(|request| entry(request, 1)));
    let most = if plan.is_empty() { batch_tokens } else { prefill_chunk };
    let mut budget = batch_tokens.saturating_sub(plan.len()).min(most).max(1);
    let mut prompts: Vec<BatchEntry> =
        (0..pending.len()).filter(|&i| pending[i] > 1).map(|request| entry(request, 0)).collect();
    let left = |p: &BatchEntry| pending[p.request] - p.n_tokens;
    if let Some(oldest) = prompts.first_mut() {
        oldest.n_tokens = left(oldest).min(budget.div_ceil(OLDEST));
        budget -= oldest.n_tokens;
    }
    let mut shortest: Vec<usize> = (0..prompts.len()).collect();
    shortest.sort_by_key(|&i| left(&prompts[i]));
    for i in shortest {
        let part = &mut prompts[i];
        let n = left(part).min(budget);
        part.n_tokens += n;
        budget -= n;
    }
    plan.extend(prompts.into_iter().filter(|p| p.n_tokens > 0));
    plan
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Batch size; prompts as (length, step before which they are submitted).
    fn loads() -> impl Strategy<Value = (usize, Vec<(usize, usize)>)> {
        (1usize..40, prop::collection::vec((2usize..200, 0usize..60), 1..24))
    }

    proptest! {
        /// Batches are full, no request is in a batch twice, and every decoding request gets a row.
        #[test]
        fn a_batch_takes_what_it_can(
            pending in prop::collection::vec(1usize..50, 0..12),
            budget in 1usize..64,
            chunk in 1usize..64,
        ) {
            let plan = plan(&pending, budget, chunk);
            let n: usize = plan.iter().map(|p| p.n_tokens).sum();
            let answers = pending.iter().filter(|&&n| n == 1).count();
            let most = if answers > 0 { budget.min(answers + chunk) } else { budget };
            prop_assert_eq!(n, pending.iter().sum::<usize>().min(most.max(answers + 1)));
            let mut seen: Vec<usize> = plan.iter().map(|p| p.request).collect();
            seen.sort_unstable();
            prop_assert!(seen.windows(2).all(|pair| pair[0] < pair[1]));
            prop_assert!(plan.iter().all(|p| (1..=pending[p.request]).contains(&p.n_tokens)));
            prop_assert_eq!(plan.iter().filter(|p| pending[p.request] == 1).count(), answers);
        }

        /// The oldest prompt gets a quarter of the prompt budget and at least one token, so all prompts end.
        #[test]
        fn nobody_starves((budget, mut prompts) in loads(), chunk in 1usize..40) {
            prompts.sort_by_key(|p| p.1);
            let mut left: Vec<usize> = prompts.iter().map(|p| p.0).collect();
            for step in 0.. {
                // requests that have been submitted and are not done, in order of submission
                let here: Vec<usize> = (0..left.len()).filter(|&i| left[i] > 0 && prompts[i].1 <= step).collect();
                let pending: Vec<usize> = here.iter().map(|&i| left[i]).collect();
                let answers = pending.iter().filter(|&&n| n == 1).count();
                let most = if answers > 0 { chunk } else { budget };
                let share = budget.saturating_sub(answers).min(most).max(1).div_ceil(OLDEST);
                let oldest = pending.iter().position(|&n| n > 1);
                let plan = plan(&pending, budget, chunk);
                for entry in &plan {
                    left[here[entry.request]] -= entry.n_tokens;
                }
                if let Some(oldest) = oldest {
                    let taken = plan.iter().find(|p| p.request == oldest).map_or(0, |p| p.n_tokens);
                    prop_assert!(taken >= share.min(pending[oldest]), "{} of {} in step {}", taken, share, step);
                }
                if left.iter().all(|&n| n == 0) {
                    break;
                }
            }
        }

        /// A short prompt overtakes a long one: it waits only for shorter prompts and the quarter of the oldest.
        #[test]
        fn a_short_prompt_passes_long_ones(budget in 8usize..128, long in 2000usize..10_000, short in 2usize..200) {
            let mut left = [long, short];
            let mut steps = 0;
            while left[1] > 0 {
                for entry in plan(&left, budget, budget) {
                    left[entry.request] -= entry.n_tokens;
                }
                steps += 1;
            }
            prop_assert!(steps <= short.div_ceil(budget - budget.div_ceil(OLDEST)), "{steps} steps");
        }
    }
}

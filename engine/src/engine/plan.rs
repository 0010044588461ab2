//! Which tokens the next batch takes.
//!
//! First a row of every answer, so that none waits for a prompt. Of what is left, or less where answers would wait long for
//! the batch to end, a quarter goes to the oldest prompt, and the rest to prompts by how little is left of them, the older
//! of equals first. So a short prompt passes long ones, and a long one still advances by a quarter of what prompts get in
//! every batch from when it is the oldest, whatever comes after it.

use alloc::vec::Vec;

/// A request's share of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Part {
    /// Its place among all, in order of submission.
    pub(super) active: usize,
    /// Its next tokens.
    pub(super) n: usize,
}

/// The oldest prompt has one part in this of the batch.
const OLDEST: usize = 4;

/// A batch of up to `batch_tokens` tokens, with answers in it up to `prefill_chunk` of prompts; one of each answer, and one
/// of prompts, there are in any case. `waiting` has how many tokens of each request are known and not computed: 1 of an
/// answer, more of a prompt.
pub(super) fn plan(waiting: &[usize], batch_tokens: usize, prefill_chunk: usize) -> Vec<Part> {
    let mut plan = Vec::with_capacity(waiting.len());
    plan.extend((0..waiting.len()).filter(|&i| waiting[i] == 1).map(|active| Part { active, n: 1 }));
    let most = if plan.is_empty() { batch_tokens } else { prefill_chunk };
    let mut budget = batch_tokens.saturating_sub(plan.len()).min(most).max(1);
    let mut prompts: Vec<Part> =
        (0..waiting.len()).filter(|&i| waiting[i] > 1).map(|active| Part { active, n: 0 }).collect();
    let left = |p: &Part| waiting[p.active] - p.n;
    if let Some(oldest) = prompts.first_mut() {
        oldest.n = left(oldest).min(budget.div_ceil(OLDEST));
        budget -= oldest.n;
    }
    let mut shortest: Vec<usize> = (0..prompts.len()).collect();
    shortest.sort_by_key(|&i| left(&prompts[i]));
    for i in shortest {
        let part = &mut prompts[i];
        let n = left(part).min(budget);
        part.n += n;
        budget -= n;
    }
    plan.extend(prompts.into_iter().filter(|p| p.n > 0));
    plan
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Sizes of a batch, and prompts with the step before which they come.
    fn loads() -> impl Strategy<Value = (usize, Vec<(usize, usize)>)> {
        (1usize..40, prop::collection::vec((2usize..200, 0usize..60), 1..24))
    }

    proptest! {
        /// Batches are full, nobody's tokens are taken twice, and all answers advance.
        #[test]
        fn a_batch_takes_what_it_can(
            waiting in prop::collection::vec(1usize..50, 0..12),
            budget in 1usize..64,
            chunk in 1usize..64,
        ) {
            let plan = plan(&waiting, budget, chunk);
            let n: usize = plan.iter().map(|p| p.n).sum();
            let answers = waiting.iter().filter(|&&n| n == 1).count();
            let most = if answers > 0 { budget.min(answers + chunk) } else { budget };
            prop_assert_eq!(n, waiting.iter().sum::<usize>().min(most.max(answers + 1)));
            let mut seen: Vec<usize> = plan.iter().map(|p| p.active).collect();
            seen.sort_unstable();
            prop_assert!(seen.windows(2).all(|pair| pair[0] < pair[1]));
            prop_assert!(plan.iter().all(|p| (1..=waiting[p.active]).contains(&p.n)));
            prop_assert_eq!(plan.iter().filter(|p| waiting[p.active] == 1).count(), answers);
        }

        /// The oldest prompt has its quarter of what prompts get, and at least a token; so all end, whatever comes.
        #[test]
        fn nobody_starves((budget, mut prompts) in loads(), chunk in 1usize..40) {
            prompts.sort_by_key(|p| p.1);
            let mut left: Vec<usize> = prompts.iter().map(|p| p.0).collect();
            for step in 0.. {
                // those that are here, in order of submission
                let here: Vec<usize> = (0..left.len()).filter(|&i| left[i] > 0 && prompts[i].1 <= step).collect();
                let waiting: Vec<usize> = here.iter().map(|&i| left[i]).collect();
                let answers = waiting.iter().filter(|&&n| n == 1).count();
                let most = if answers > 0 { chunk } else { budget };
                let share = budget.saturating_sub(answers).min(most).max(1).div_ceil(OLDEST);
                let oldest = waiting.iter().position(|&n| n > 1);
                let plan = plan(&waiting, budget, chunk);
                for part in &plan {
                    left[here[part.active]] -= part.n;
                }
                if let Some(oldest) = oldest {
                    let taken = plan.iter().find(|p| p.active == oldest).map_or(0, |p| p.n);
                    prop_assert!(taken >= share.min(waiting[oldest]), "{} of {} in step {}", taken, share, step);
                }
                if left.iter().all(|&n| n == 0) {
                    break;
                }
            }
        }

        /// A short prompt passes a long one: it waits for no more than those at least as short, and the quarter.
        #[test]
        fn a_short_prompt_passes_long_ones(budget in 8usize..128, long in 2000usize..10_000, short in 2usize..200) {
            let mut left = [long, short];
            let mut steps = 0;
            while left[1] > 0 {
                for part in plan(&left, budget, budget) {
                    left[part.active] -= part.n;
                }
                steps += 1;
            }
            prop_assert!(steps <= short.div_ceil(budget - budget.div_ceil(OLDEST)), "{steps} steps");
        }
    }
}

use alloc::vec::Vec;

use super::schedule::{Plan, Schedule};

/// The counts of the steps of an answer of `length` tokens.
fn counts(schedule: Schedule, length: usize, steps: usize) -> Vec<(usize, usize)> {
    let mut plan = Plan::new(schedule, length, steps);
    let mut left = alloc::vec![true; length];
    let mut all = Vec::new();
    while let Some((step, block, n)) = plan.next(|block| block.filter(|at| left[*at]).count()) {
        all.push((step, n));
        block.filter(|at| left[*at]).take(n).collect::<Vec<_>>().into_iter().for_each(|at| left[at] = false);
    }
    assert!(!left.contains(&true), "{schedule:?}, {length} tokens, {steps} steps: masks are left");
    all
}

/// Worked out from llama.cpp's functions.
#[test]
fn steps_replace_what_llama_cpp_replaces() {
    let of = |schedule, length, steps| counts(schedule, length, steps).iter().map(|(_, n)| *n).collect::<Vec<_>>();
    let blocks = |length| Schedule::Blocks { length };
    assert_eq!(of(blocks(8), 16, 6), [3, 3, 2, 3, 3, 2]);
    assert_eq!(of(blocks(8), 20, 6), [4, 4, 4, 4, 2, 2], "the last block is shorter");
    assert_eq!(of(blocks(32), 5, 2), [3, 2], "a block is no longer than the answer");
    assert_eq!(of(blocks(2), 6, 1), [2, 2, 2], "each block has a step");
    assert_eq!(of(Schedule::Timesteps { eps: 0.001 }, 16, 4), [3, 4, 4, 5]);
    assert_eq!(counts(Schedule::Timesteps { eps: 0.001 }, 2, 4), [(3, 2)], "shares below a token are rounded down");
    assert_eq!(counts(Schedule::Timesteps { eps: 0.001 }, 3, 4), [(2, 1), (3, 2)], "steps without a token are skipped");
    assert_eq!(of(Schedule::Timesteps { eps: 0.001 }, 9, 1), [9]);
}

#[test]
fn no_plan_leaves_masks() {
    for length in 1..40 {
        for steps in [1, 2, 3, 7, 64] {
            counts(Schedule::Timesteps { eps: 0.5 }, length, steps);
            for block in [1, 2, 5, 64] {
                counts(Schedule::Blocks { length: block }, length, steps);
            }
        }
    }
}

//! How many masks each step replaces.

use core::ops::Range;

/// How the masks of an answer are divided among the steps.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Schedule {
    /// Dream: step i of n replaces the share `1 - s / t` of the masks that are left, with `t = 1 - i/n * (1 - eps)` and s
    /// that of the next step; the last step replaces all.
    Timesteps {
        /// Above 0 and below 1.
        eps: f32,
    },
    /// LLaDA: block after block of this many tokens; the steps of a block replace equally many masks each, the first ones
    /// one more where they do not divide.
    Blocks {
        /// Tokens of a block; the last block may have fewer.
        length: usize,
    },
}

/// The blocks of an answer and their steps.
#[derive(Debug, Clone)]
pub(super) struct Plan {
    schedule: Schedule,
    /// Tokens of the answer, and of a block.
    length: usize,
    block: usize,
    /// Steps of a block.
    steps: usize,
    /// Number of the next step.
    step: usize,
    /// Masks that the block began with.
    n_begun: usize,
}

impl Plan {
    pub(super) fn new(schedule: Schedule, length: usize, steps: usize) -> Plan {
        let block = match schedule {
            Schedule::Timesteps { .. } => length,
            Schedule::Blocks { length: block } => block.min(length),
        };
        let steps = (steps / length.div_ceil(block)).max(1);
        Plan { schedule, length, block, steps, step: 0, n_begun: 0 }
    }

    /// Steps of all blocks.
    pub(super) fn n_steps(&self) -> usize {
        self.length.div_ceil(self.block) * self.steps
    }

    /// Number of the next step.
    pub(super) fn step(&self) -> usize {
        self.step
    }

    /// The number of the next step that replaces masks, the positions of its block, and how many of its masks it replaces;
    /// `None` after the last. `masks` tells how many masks a block has left.
    pub(super) fn next(&mut self, masks: impl Fn(Range<usize>) -> usize) -> Option<(usize, Range<usize>, usize)> {
        while self.step < self.n_steps() {
            let (number, start) = (self.step, self.step / self.steps * self.block);
            let block = start..(start + self.block).min(self.length);
            let (i, left) = (number % self.steps, masks(block.clone()));
            if i == 0 {
                self.n_begun = left;
            }
            self.step += 1;
            let n = self.count(i, left).min(left);
            if n > 0 {
                return Some((number, block, n));
            }
        }
        None
    }

    /// Masks that step `i` of a block replaces, of which `left` are left.
    fn count(&self, i: usize, left: usize) -> usize {
        if i + 1 == self.steps {
            return left;
        }
        match self.schedule {
            Schedule::Timesteps { eps } => {
                // in single precision, as llama.cpp
                let t = |i: usize| 1.0 - i as f32 / self.steps as f32 * (1.0 - eps);
                (left as f32 * (1.0 - t(i + 1) / t(i))) as usize
            }
            Schedule::Blocks { .. } => self.n_begun / self.steps + usize::from(i < self.n_begun % self.steps),
        }
    }
}

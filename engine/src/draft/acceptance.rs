//! Running acceptance rates of a request's drafts.

use alloc::vec::Vec;

use super::LEVELS;

/// Least weight of a new observation.
const WEIGHT: f32 = 0.125;
/// Observations that the initial chance counts as.
const PRIOR: f32 = 2.0;

/// Chances that a proposed token is the one sampled: of the first by confidence, of later ones given that all before
/// them were accepted.
#[derive(Debug, Clone)]
pub(crate) struct Acceptance {
    first: [Rate; LEVELS],
    next: Rate,
}

/// A running mean.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rate {
    mean: f32,
    weight: f32,
}

impl Rate {
    pub(crate) const fn new(mean: f32) -> Rate {
        Rate { mean, weight: 1.0 / (PRIOR + 1.0) }
    }

    pub(crate) fn mean(self) -> f32 {
        self.mean
    }

    pub(crate) fn record(&mut self, value: f32) {
        self.mean += self.weight * (value - self.mean);
        self.weight = (self.weight / (1.0 + self.weight)).max(WEIGHT);
    }
}

impl Default for Acceptance {
    fn default() -> Acceptance {
        Acceptance { first: [0.3, 0.5, 0.7, 0.85].map(Rate::new), next: Rate::new(0.85) }
    }
}

impl Acceptance {
    /// Chances that the first, the second, ... of up to `n` tokens are accepted, as many as are expected to be accepted
    /// at a rate of at least `min`.
    pub(crate) fn chances(&self, level: usize, n: usize, min: f32) -> Vec<f32> {
        let (mut chance, mut sum) = (self.first[level].mean, 0.0);
        let mut chances = Vec::with_capacity(n);
        while chances.len() < n {
            sum += chance;
            if sum < min * (chances.len() + 1) as f32 {
                break;
            }
            chances.push(chance);
            chance *= self.next.mean;
        }
        chances
    }

    /// Chance of the first token at a confidence level.
    pub(crate) fn first(&self, level: usize) -> f32 {
        self.first[level].mean
    }

    /// Chance of a later token, all before it being accepted.
    pub(crate) fn next(&self) -> f32 {
        self.next.mean
    }

    /// Records whether the token at `index` of a proposal was accepted, all before it being accepted.
    pub(crate) fn record(&mut self, level: usize, index: usize, is_accepted: bool) {
        let rate = if index == 0 { &mut self.first[level] } else { &mut self.next };
        rate.record(f32::from(u8::from(is_accepted)));
    }
}

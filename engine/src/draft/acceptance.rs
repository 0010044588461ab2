//! Running acceptance rates of a request's drafts.

use alloc::vec::Vec;

use super::LEVELS;

/// Weight of a new observation.
const WEIGHT: f32 = 0.125;

/// Chances that a proposed token is the one sampled: of the first by confidence, of later ones given that all before
/// them were accepted.
#[derive(Debug, Clone)]
pub(crate) struct Acceptance {
    first: [f32; LEVELS],
    next: f32,
}

impl Default for Acceptance {
    fn default() -> Acceptance {
        Acceptance { first: [0.3, 0.5, 0.7, 0.85], next: 0.85 }
    }
}

impl Acceptance {
    /// Chances that the first, the second, ... of up to `n` tokens are accepted, as many as are expected to be accepted
    /// at a rate of at least `min`.
    pub(crate) fn chances(&self, level: usize, n: usize, min: f32) -> Vec<f32> {
        let (mut chance, mut sum) = (self.first[level], 0.0);
        let mut chances = Vec::with_capacity(n);
        while chances.len() < n {
            sum += chance;
            if sum < min * (chances.len() + 1) as f32 {
                break;
            }
            chances.push(chance);
            chance *= self.next;
        }
        chances
    }

    /// Records whether the token at `index` of a proposal was accepted, all before it being accepted.
    pub(crate) fn record(&mut self, level: usize, index: usize, is_accepted: bool) {
        let rate = if index == 0 { &mut self.first[level] } else { &mut self.next };
        *rate += WEIGHT * (f32::from(u8::from(is_accepted)) - *rate);
    }
}

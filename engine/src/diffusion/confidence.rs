//! How sure the model is of a token.

use alloc::vec;
use alloc::vec::Vec;

use super::Algorithm;
use crate::kernels::Cpu;
use crate::kernels::softmax::exps;
use crate::math::{exp, ln};
use crate::sampler::Pick;

/// Computes the numbers by which masks are ordered, the largest first.
pub(super) struct Confidence {
    algorithm: Algorithm,
    /// Exponentials of the logits (n_vocab), for entropies.
    weights: Vec<f32>,
}

impl Confidence {
    pub(super) fn new(algorithm: Algorithm, n_vocab: usize) -> Confidence {
        let n = if algorithm == Algorithm::Entropy { n_vocab } else { 0 };
        Confidence { algorithm, weights: vec![0.0; n] }
    }

    /// The confidence in `pick`, sampled from `logits`; `draw` is a random number in [0, 1).
    pub(super) fn of(&mut self, cpu: Cpu, logits: &[f32], pick: &Pick, draw: f64) -> f64 {
        match self.algorithm {
            Algorithm::Origin => 0.0,
            Algorithm::Random => draw,
            Algorithm::Confidence => f64::from(pick.logprob),
            Algorithm::Margin => {
                let p = |i: usize| pick.top.get(i).map_or(0.0, |(_, logprob)| exp(f64::from(*logprob)));
                p(0) - p(1)
            }
            Algorithm::Entropy => self.negative_entropy(cpu, logits),
        }
    }

    /// `sum p ln p` of the softmax p of `logits`: with `w = exp(x - max)` and `W = sum w`, `sum w (x - max) / W - ln W`.
    fn negative_entropy(&mut self, cpu: Cpu, logits: &[f32]) -> f64 {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let total = f64::from(exps(cpu, logits, max, 1.0, &mut self.weights));
        let terms = self.weights.iter().zip(logits).map(|(w, x)| f64::from(*w) * f64::from(x - max));
        terms.fold(0.0, |sum, term| sum + term) / total - ln(total)
    }
}

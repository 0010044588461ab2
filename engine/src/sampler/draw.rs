//! Random draws: ChaCha12 (Bernstein 2008) as a counter-based generator. Key = seed, nonce = sequence, block counter =
//! position, so a draw does not depend on previous draws.

use alloc::vec::Vec;

use rand_chacha::ChaCha12Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use crate::kernels::Cpu;
use crate::kernels::softmax::exps;

/// Words of a ChaCha block.
const BLOCK_WORDS: u128 = 16;
/// Weights per chunk. A chunk is summed in f32 on the virtual lanes, chunks in f64, in order.
const CHUNK: usize = 1024;

/// A uniform number in [0, 1), a multiple of 2^-53.
pub(crate) fn uniform(seed: u64, sequence: u64, position: u64) -> f64 {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    let mut rng = ChaCha12Rng::from_seed(key);
    rng.set_stream(sequence);
    rng.set_word_pos(u128::from(position) * BLOCK_WORDS);
    (rng.next_u64() >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
}

/// Sums of the weights `exp((x - max) / t)`.
pub(super) struct WeightSums {
    /// Running sums at the ends of chunks.
    sums: Vec<f64>,
    weights: [f32; CHUNK],
}

impl WeightSums {
    pub(super) fn new(n_vocab: usize) -> Self {
        WeightSums { sums: Vec::with_capacity(n_vocab.div_ceil(CHUNK)), weights: [0.0; CHUNK] }
    }

    /// The sum of all weights, chunk by chunk.
    pub(super) fn total(&mut self, cpu: Cpu, x: &[f32], max: f32, t: f32) -> f64 {
        let mut sum = 0.0;
        self.sums.clear();
        for x in x.chunks(CHUNK) {
            sum += f64::from(exps(cpu, x, max, t, &mut self.weights[..x.len()]));
            self.sums.push(sum);
        }
        sum
    }

    /// The first index whose running sum exceeds `u` times the total. Call [`WeightSums::total`] for the same weights
    /// first.
    ///
    /// Within a chunk, weights are summed in f64. If rounding leaves no such index: the last index with a weight above
    /// 0.
    pub(super) fn index_at(&mut self, cpu: Cpu, x: &[f32], max: f32, t: f32, u: f64) -> usize {
        let total = self.sums.last().copied().unwrap_or(0.0);
        let target = u * total;
        let is_here = |sum: &f64| *sum > target || *sum == total;
        let chunk = self.sums.iter().position(is_here).unwrap_or(0);
        let mut sum = if chunk > 0 { self.sums[chunk - 1] } else { 0.0 };
        let Some(x) = x.chunks(CHUNK).nth(chunk) else { return 0 };
        let weights = &mut self.weights[..x.len()];
        exps(cpu, x, max, t, weights);
        let mut last = 0;
        for (i, w) in weights.iter().enumerate().filter(|(_, w)| **w > 0.0) {
            last = i;
            sum += f64::from(*w);
            if sum > target {
                break;
            }
        }
        chunk * CHUNK + last
    }
}

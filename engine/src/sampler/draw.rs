//! The draw: ChaCha12 (Bernstein 2008) as a counter-based generator. The key is the seed, the nonce the sequence, the
//! block counter the position, so a draw depends on where it is made and on nothing before it.

use rand_chacha::ChaCha12Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use crate::kernels::Cpu;
use crate::kernels::softmax::exps;

/// Words of a ChaCha block.
const BLOCK_WORDS: u128 = 16;
/// Weights of a chunk: their sum is one f32 on the lane array; sums of chunks add up in f64, in order.
pub(super) const CHUNK: usize = 1024;

/// A number in [0, 1), a multiple of 2^-53.
pub(super) fn uniform(seed: u64, sequence: u64, position: u64) -> f64 {
    let mut key = [0; 32];
    key[..8].copy_from_slice(&seed.to_le_bytes());
    let mut rng = ChaCha12Rng::from_seed(key);
    rng.set_stream(sequence);
    rng.set_word_pos(u128::from(position) * BLOCK_WORDS);
    (rng.next_u64() >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
}

/// `sum exp((x - max) / t)`, chunk by chunk.
pub(super) fn mass(cpu: Cpu, x: &[f32], max: f32, t: f32, weights: &mut [f32; CHUNK]) -> f64 {
    x.chunks(CHUNK).fold(0.0, |sum, x| sum + f64::from(exps(cpu, x, max, t, &mut weights[..x.len()])))
}

/// The first place whose running sum of weights `exp((x - max) / t)` exceeds `u * total`; `total` is the [`mass`].
///
/// Rounding may leave the running sums short of it: then it is the last place of any weight.
pub(super) fn place(cpu: Cpu, x: &[f32], max: f32, t: f32, u: f64, total: f64, weights: &mut [f32; CHUNK]) -> usize {
    let target = u * total;
    let (mut sum, mut last) = (0.0, 0);
    for (i, chunk) in x.chunks(CHUNK).enumerate() {
        let weights = &mut weights[..chunk.len()];
        let after = sum + f64::from(exps(cpu, chunk, max, t, weights));
        if after > sum {
            let is_here = after > target;
            for (j, w) in weights.iter().enumerate().filter(|(_, w)| **w > 0.0) {
                last = i * CHUNK + j;
                sum += f64::from(*w);
                if is_here && sum > target {
                    return last;
                }
            }
            if is_here {
                return last;
            }
        }
        sum = after;
    }
    last
}

//! Q4_1: 32 elements in 20 bytes, 5 bits each: `x = d * q + m`.
//!
//! | bytes | field |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..4 | `m`, f16 |
//! | 4..20 | `q`, 4 bits: low half of byte j is element j, high half is element j + 16 |

use super::fit;
use super::float::{inverse, min_max, scale_at, set_scale};

/// Elements of a block.
pub const LEN: usize = 32;
/// Bytes of a block.
pub const BYTES: usize = 2 + 2 + LEN / 2;
const _: () = assert!(super::Dtype::Q4_1.block_len() == LEN as u64 && super::Dtype::Q4_1.block_bytes() == BYTES as u64);

/// Dequantises a block.
pub fn dequantise(block: &[u8; BYTES], out: &mut [f32; LEN]) {
    let (d, m) = (scale_at(block, 0), scale_at(block, 2));
    for (j, &q) in block[4..].iter().enumerate() {
        out[j] = f32::from(q & 15) * d + m;
        out[j + 16] = f32::from(q >> 4) * d + m;
    }
}

/// Quantises a block: the range from the smallest to the largest element in 15 steps.
pub fn quantise(x: &[f32; LEN], block: &mut [u8; BYTES]) {
    let (min, max) = min_max(x);
    let d = (max - min) / 15.0;
    let id = inverse(d);
    set_scale(block, 0, d);
    set_scale(block, 2, min);
    let q = |x: f32| (((x - min) * id + 0.5) as u8).min(15);
    for j in 0..16 {
        block[4 + j] = q(x[j]) | q(x[j + 16]) << 4;
    }
}

/// Quantises with the scale and minimum of least squared error, elements weighted by `w`.
pub(super) fn quantise_weighted(x: &[f32; LEN], w: &[f32; LEN], block: &mut [u8; BYTES]) {
    let ([d], [m], q) = fit::with_min::<1, LEN>(&x.map(|x| [x]), &w.map(|w| [w]), &fit::weighted(15));
    set_scale(block, 0, d);
    set_scale(block, 2, -m);
    for j in 0..16 {
        block[4 + j] = q[j][0] as u8 | (q[j + 16][0] as u8) << 4;
    }
}

//! Q6_K: 256 elements in 210 bytes, 6.6 bits each: 16 sub-blocks of 16, `x = (d * scale) * (q - 32)`.
//!
//! | bytes | field |
//! |---|---|
//! | 0..128 | low 4 bits of `q`: of each 64 bytes (128 elements), byte l has element l low and l + 64 high |
//! | 128..192 | high 2 bits of `q`: of each 32 bytes (128 elements), byte l has elements l, l + 32, l + 64, l + 96 |
//! | 192..208 | scales, i8 |
//! | 208..210 | `d`, f16 |

use core::array;

use super::fit::{self, TINY, nearest, side_by_side};
use super::float::{largest, scale_at, set_scale};
use super::kquant;

/// Elements of a block.
pub const LEN: usize = kquant::LEN;
/// Bytes of a block.
pub const BYTES: usize = LEN / 2 + LEN / 4 + LEN / 16 + 2;
const _: () = assert!(super::Dtype::Q6_K.block_len() == LEN as u64 && super::Dtype::Q6_K.block_bytes() == BYTES as u64);

const HIGH: usize = 128;
const SCALES: usize = 192;
const D: usize = 208;

/// Dequantises a block.
pub fn dequantise(block: &[u8; BYTES], out: &mut [f32; LEN]) {
    let d = scale_at(block, D);
    let scales: [f32; 16] = array::from_fn(|i| d * f32::from(block[SCALES + i] as i8));
    for half in 0..2 {
        let low = &block[half * 64..][..64];
        let high = &block[HIGH + half * 32..][..32];
        let out = &mut out[half * 128..][..128];
        for l in 0..32 {
            let scale = |quarter: usize| scales[half * 8 + quarter * 2 + l / 16];
            let value = |low: u8, high: u8| f32::from((low | (high & 3) << 4) as i8 - 32);
            out[l] = scale(0) * value(low[l] & 15, high[l]);
            out[l + 32] = scale(1) * value(low[l + 32] & 15, high[l] >> 2);
            out[l + 64] = scale(2) * value(low[l] >> 4, high[l] >> 4);
            out[l + 96] = scale(3) * value(low[l + 32] >> 4, high[l] >> 6);
        }
    }
}

/// Fits a scale to each sub-block, with elements weighted by importance or else by their squares, rounds the scales to
/// multiples of a common `d` (the largest becomes -128), and requantises.
pub fn quantise(x: &[f32; LEN], importance: Option<&[f32; LEN]>, block: &mut [u8; BYTES]) {
    let weights = importance.map_or_else(|| x.map(|x| x * x), |w| *w);
    let (scales, fitted): ([f32; 16], [_; 16]) = fit::signed(&side_by_side(x), &side_by_side(&weights), 32.0);
    if scales.iter().any(|scale| !scale.is_finite()) {
        set_scale(block, D, f32::INFINITY); // the squares overflowed, and so would `d`; the caller validates the block
        return;
    }
    let max_scale = largest(&scales);
    if max_scale.abs() < TINY {
        block.fill(0);
        return;
    }
    let inverse = -128.0 / max_scale;
    let d = set_scale(block, D, 1.0 / inverse);
    let mut q = [0; LEN];
    for (j, scale) in scales.into_iter().enumerate() {
        let scale = nearest(inverse * scale, -128.0, 127.0);
        block[SCALES + j] = scale as i8 as u8;
        let d = d * scale;
        for i in 0..16 {
            let fitted = if d == 0.0 { fitted[i][j] } else { nearest(x[16 * j + i] / d, -32.0, 31.0) };
            q[16 * j + i] = (fitted + 32.0) as u8;
        }
    }
    for half in 0..2 {
        let q = &q[half * 128..][..128];
        for l in 0..32 {
            block[half * 64 + l] = q[l] & 15 | q[l + 64] << 4;
            block[half * 64 + l + 32] = q[l + 32] & 15 | q[l + 96] << 4;
            block[HIGH + half * 32 + l] = q[l] >> 4 | q[l + 32] >> 4 << 2 | q[l + 64] >> 4 << 4 | q[l + 96] >> 4 << 6;
        }
    }
}

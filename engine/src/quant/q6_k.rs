//! Q6_K: 256 elements in 210 bytes, 6.6 bits each: 16 sub-blocks of 16, `x = (d * scale) * (q - 32)`.
//!
//! | bytes | field |
//! |---|---|
//! | 0..128 | low 4 bits of `q`: of each 64 bytes (128 elements), byte l has element l low and l + 64 high |
//! | 128..192 | high 2 bits of `q`: of each 32 bytes (128 elements), byte l has elements l, l + 32, l + 64, l + 96 |
//! | 192..208 | scales, i8 |
//! | 208..210 | `d`, f16 |

use core::array;

use super::float::{largest, scale_at, set_scale};
use super::kquant::{self, nearest};

/// Elements in a block.
pub const LEN: usize = kquant::LEN;
/// Bytes of a block.
pub const BYTES: usize = LEN / 2 + LEN / 4 + LEN / 16 + 2;
const _: () = assert!(super::Dtype::Q6_K.block_len() == LEN as u64 && super::Dtype::Q6_K.block_bytes() == BYTES as u64);

const HIGH: usize = 128;
const SCALES: usize = 192;
const D: usize = 208;
/// Groups of a smaller magnitude are taken for zero.
const TINY: f32 = 1e-15;

/// The values of a block.
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

/// Fits a scale to each sub-block, rounds the scales to multiples of a common `d` (the largest becomes -128), and
/// chooses the numbers for the rounded scales.
pub fn quantise(x: &[f32; LEN], block: &mut [u8; BYTES]) {
    let (scales, fitted) = fit(&array::from_fn(|i| array::from_fn(|j| x[16 * j + i])));
    if scales.iter().any(|scale| !scale.is_finite()) {
        set_scale(block, D, f32::INFINITY); // the squares overflowed: `d` would too, and the caller checks it
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

/// A number for each of the 16 sub-blocks.
type Lanes = [f32; 16];

/// For 16 sub-blocks side by side (`x[i][j]` is element i of sub-block j): the scale for which `scale * q` is closest
/// to `x` weighted by `x^2`, and the `q`.
///
/// Starts with the largest element at -32; each attempt puts it slightly elsewhere, and is kept if the best scale for
/// its rounding explains more.
fn fit(x: &[Lanes; 16]) -> (Lanes, [Lanes; 16]) {
    let largest =
        x.iter().fold([0.0; 16], |max: Lanes, x| lanes(|j| if max[j].abs() < x[j].abs() { x[j] } else { max[j] }));
    let attempt = |first: f32| {
        let inverse = lanes(|j| first / largest[j]);
        let mut l = [[0.0; 16]; 16];
        let (mut sum_lx, mut sum_l2) = ([0.0; 16], [0.0; 16]);
        for i in 0..16 {
            l[i] = lanes(|j| nearest(inverse[j] * x[i][j], -32.0, 31.0));
            let wl: Lanes = lanes(|j| x[i][j] * x[i][j] * l[i][j]);
            sum_lx = lanes(|j| sum_lx[j] + x[i][j] * x[i][j] * x[i][j] * l[i][j]);
            sum_l2 = lanes(|j| sum_l2[j] + wl[j] * l[i][j]);
        }
        (l, sum_lx, sum_l2)
    };
    let (mut best_l, sum_lx, sum_l2) = attempt(-32.0);
    let mut scale = lanes(|j| if sum_l2[j] == 0.0 { 0.0 } else { sum_lx[j] / sum_l2[j] });
    let mut best = lanes(|j| scale[j] * sum_lx[j]);
    for step in (-9i8..=9).filter(|&step| step != 0) {
        let (l, sum_lx, sum_l2) = attempt(-(32.0 + 0.1 * f32::from(step)));
        for j in 0..16 {
            if sum_l2[j] > 0.0 && sum_lx[j] * sum_lx[j] > best[j] * sum_l2[j] {
                scale[j] = sum_lx[j] / sum_l2[j];
                best[j] = scale[j] * sum_lx[j];
                (0..16).for_each(|i| best_l[i][j] = l[i][j]);
            }
        }
    }
    for j in (0..16).filter(|&j| largest[j].abs() < TINY) {
        scale[j] = 0.0;
        (0..16).for_each(|i| best_l[i][j] = -32.0); // as ggml leaves it: whatever `q`, the scale is 0
    }
    (scale, best_l)
}

#[inline(always)]
fn lanes(f: impl FnMut(usize) -> f32) -> Lanes {
    array::from_fn(f)
}

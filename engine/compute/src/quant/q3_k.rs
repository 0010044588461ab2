//! Q3_K: 256 elements in 110 bytes, 3.4 bits each: 16 sub-blocks of 16, `x = (d * (scale - 32)) * (q - 4)`.
//!
//! | bytes | field |
//! |---|---|
//! | 0..32 | bit 2 of `q`: bit b of byte l is element 32 b + l |
//! | 32..96 | low 2 bits of `q`: of each 32 bytes (128 elements), byte l has elements l, l + 32, l + 64, l + 96 |
//! | 96..108 | 16 scales of 6 bits: low 4 bits in 8 bytes (of scale i low, of i + 8 high), high 2 bits in 4 bytes |
//! | 108..110 | `d`, f16 |

use core::array;

use super::codebook::Codes;
use super::fit::{self, TINY, error_weights, nearest, refine, side_by_side, sum_of_squares};
use super::float::{largest, scale_at, set_scale};

pub(super) fn unpack(block: &[u8], out: &mut Codes) {
    out.d.fill(scale_at(block, 108));
    for (e, code) in out.code.iter_mut().enumerate() {
        let low = block[32 + e / 128 * 32 + e % 32] >> (e % 128 / 32 * 2) & 3;
        *code = low | (block[e % 32] >> (e / 32) & 1) << 2;
    }
    let packed = &block[96..108];
    for (s, scale) in out.scale.iter_mut().enumerate() {
        let low = packed[s % 8] >> (s / 8 * 4) & 15;
        let high = packed[8 + s % 4] >> (s / 4 * 2) & 3;
        *scale = (low | high << 4) as i8 - 32;
    }
}

/// Fits a scale per sub-block, rounds it to 6 bits, and requantises.
pub(super) fn quantise(x: &[f32; 256], importance: Option<&[f32; 256]>, block: &mut [u8; 110]) {
    let (d, scales, fitted): (f32, [f32; 16], [[f32; 16]; 16]) = match importance {
        None => {
            let fits: [(f32, [f32; 16]); 16] = array::from_fn(|j| fit_one(&array::from_fn(|i| x[16 * j + i])));
            let scales = fits.map(|fit| fit.0);
            let max = largest(&scales);
            let inverse = if max == 0.0 { 0.0 } else { -32.0 / max };
            let d = if max == 0.0 { 0.0 } else { 1.0 / inverse };
            // as in ggml: a block of zeros has scales of 0, which stand for -32
            let rounded = scales.map(|v| if max == 0.0 { -32.0 } else { nearest(inverse * v, -32.0, 31.0) });
            (d, rounded, array::from_fn(|i| array::from_fn(|j| fits[j].1[i])))
        }
        Some(importance) => {
            let weights: [f32; 256] = error_weights(importance, 2.0 * sum_of_squares(x) / 256.0, x);
            let (scales, fitted) = fit::signed(&side_by_side(x), &side_by_side(&weights), 4.0);
            let sums: [f32; 16] = array::from_fn(|j| weights[16 * j..][..16].iter().sum());
            let (d, rounded) = fit::signed::<1, 16>(&scales.map(|v| [v]), &sums.map(|v| [v]), 32.0);
            (d[0], rounded.map(|v| v[0]), fitted)
        }
    };
    let d = set_scale(block, 108, d);
    block[..108].fill(0);
    for s in 0..16 {
        let six = (scales[s] + 32.0) as u8;
        block[96 + s % 8] |= (six & 15) << (s / 8 * 4);
        block[104 + s % 4] |= six >> 4 << (s / 4 * 2);
        let d = d * scales[s];
        for (i, fitted) in fitted.iter().enumerate() {
            let e = 16 * s + i;
            let q = if d == 0.0 { fitted[s] } else { nearest(x[e] / d, -4.0, 3.0) };
            let q = (q + 4.0) as u8;
            block[32 + e / 128 * 32 + e % 32] |= (q & 3) << (e % 128 / 32 * 2);
            block[e % 32] |= q >> 2 << (e / 32);
        }
    }
}

/// The scale for which `scale * q`, q from -4 to 3, is closest to `x`, weighted by its squares; and the `q`.
fn fit_one(x: &[f32; 16]) -> (f32, [f32; 16]) {
    let max = largest(x);
    if max.abs() < TINY {
        return (0.0, [-4.0; 16]); // as in ggml: `q` is irrelevant, as the scale is 0
    }
    let inverse = -4.0 / max;
    let w = x.map(|x| x * x);
    let mut q = x.map(|x| nearest(inverse * x, -4.0, 3.0));
    let (mut sum_lx, mut sum_l2) = (0.0, 0.0);
    for i in 0..16 {
        sum_lx += w[i] * x[i] * q[i];
        sum_l2 += w[i] * q[i] * q[i];
    }
    refine(x, &w, &mut q, (&mut sum_lx, &mut sum_l2), |v| nearest(v, -4.0, 3.0), |q| q);
    (if sum_l2 > 0.0 { sum_lx / sum_l2 } else { 0.0 }, q)
}

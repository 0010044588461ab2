//! Q2_K: 256 elements in 84 bytes, 2.6 bits each: 16 sub-blocks of 16, `x = (d * scale) * q - dmin * min`.
//!
//! | bytes | field |
//! |---|---|
//! | 0..16 | scale (low half) and minimum (high half) of each sub-block |
//! | 16..80 | `q`, 2 bits: of each 32 bytes (128 elements), byte l has elements l, l + 32, l + 64, l + 96 |
//! | 80..82 | `d`, f16 |
//! | 82..84 | `dmin`, f16 |

use core::array;

use super::codebook::Codes;
use super::fit::{self, ScaleSearch, error_weights, nearest, side_by_side, sum_of_squares};
use super::float::{scale_at, set_scale};

pub(super) fn unpack(block: &[u8], out: &mut Codes) {
    out.d.fill(scale_at(block, 80));
    out.dmin = scale_at(block, 82);
    for (s, packed) in block[..16].iter().enumerate() {
        (out.scale[s], out.min[s]) = ((packed & 15) as i8, packed >> 4);
    }
    for (e, code) in out.code.iter_mut().enumerate() {
        *code = block[16 + e / 128 * 32 + e % 32] >> (e % 128 / 32 * 2) & 3;
    }
}

/// Fits a scale and a minimum per sub-block, rounds them to 4 bits, and requantises. Without an importance matrix
/// elements are weighted by their magnitude, and errors are absolute.
pub(super) fn quantise(x: &[f32; 256], importance: Option<&[f32; 256]>, block: &mut [u8; 84]) {
    const SEARCH: ScaleSearch = ScaleSearch { max_q: 3, from: -0.5, step: 0.1, n_steps: 15, absolute: true };
    type Rows = [[f32; 16]; 16];
    let columns: Rows = side_by_side(x);
    let (d, dmin, scales, mins, fitted) = match importance {
        None => {
            let weights: Rows = columns.map(|x| x.map(f32::abs));
            let (scales, mins, fitted) = fit::with_min(&columns, &weights, &SEARCH);
            let four_bits = |v: [f32; 16]| {
                let max = v.iter().fold(0.0, |max: f32, &v| if v > max { v } else { max });
                let inverse = if max > 0.0 { 15.0 / max } else { 0.0 };
                (max / 15.0, v.map(|v| nearest(inverse * v, 0.0, 15.0)))
            };
            let ((d, scales), (dmin, mins)) = (four_bits(scales), four_bits(mins));
            (d, dmin, scales, mins, fitted)
        }
        Some(importance) => {
            let weights: [f32; 256] = error_weights(importance, sum_of_squares(x) / 256.0, x);
            let (scales, mins, fitted) = fit::with_min(&columns, &side_by_side(&weights), &fit::weighted(3));
            let sums = array::from_fn(|j| weights[16 * j..][..16].iter().sum());
            let (d, scales) = fit::positive(&scales, &sums, 15.0);
            let (dmin, mins) = fit::positive(&mins, &sums, 15.0);
            (d, dmin, scales, mins, fitted)
        }
    };
    let (d, dmin) = (set_scale(block, 80, d), set_scale(block, 82, dmin));
    block[16..80].fill(0);
    for s in 0..16 {
        block[s] = scales[s] as u8 | (mins[s] as u8) << 4;
        let (d, m) = (d * scales[s], dmin * mins[s]);
        for (i, fitted) in fitted.iter().enumerate() {
            let e = 16 * s + i;
            let q = if d == 0.0 { fitted[s] } else { nearest((x[e] + m) / d, 0.0, 3.0) };
            block[16 + e / 128 * 32 + e % 32] |= (q as u8) << (e % 128 / 32 * 2);
        }
    }
}

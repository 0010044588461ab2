//! Shared by Q4_K and Q5_K: 6-bit scales and minima packed into 12 bytes, and the search for them.

use core::array;

use super::fit::{self, ScaleSearch, error_weights, lanes, nearest, side_by_side, sqrt, sum_of_squares};
use super::float::{scale_at, set_scale};

/// Elements of a block of every K-quant.
pub(super) const LEN: usize = 256;

/// Scale and minimum of sub-block `j` of 8, 6 bits each, from their 12 bytes.
///
/// Bytes 0..4 and 4..8 hold the first four scales and minima in their low 6 bits; bytes 8..12 hold the low 4 bits of the
/// other four (scale in the low half, minimum in the high half), whose high 2 bits are on top of bytes 0..8.
pub(super) fn scale_min(packed: &[u8; 12], j: usize) -> (u8, u8) {
    if j < 4 {
        (packed[j] & 63, packed[j + 4] & 63)
    } else {
        (packed[j + 4] & 15 | packed[j - 4] >> 6 << 4, packed[j + 4] >> 4 | packed[j] >> 6 << 4)
    }
}

/// `d * scale` and `dmin * min` of the 8 sub-blocks, from the first 16 bytes of a Q4_K or Q5_K block.
pub(super) fn sub_scales(head: &[u8]) -> [(f32, f32); 8] {
    let (d, dmin) = (scale_at(head, 0), scale_at(head, 2));
    let packed: [u8; 12] = array::from_fn(|i| head[4 + i]);
    array::from_fn(|j| {
        let (scale, min) = scale_min(&packed, j);
        (d * f32::from(scale), dmin * f32::from(min))
    })
}

/// The inverse of [`scale_min`].
fn pack_scale_min(scales: [u8; 8], mins: [u8; 8]) -> [u8; 12] {
    let mut packed = [0; 12];
    for j in 0..4 {
        packed[j] = scales[j] | scales[j + 4] >> 4 << 6;
        packed[j + 4] = mins[j] | mins[j + 4] >> 4 << 6;
        packed[j + 8] = scales[j + 4] & 15 | mins[j + 4] << 4;
    }
    packed
}

/// One number per sub-block.
type Lanes = [f32; 8];

/// Fills the first 16 bytes of a Q4_K or Q5_K block (f16 `d`, f16 `dmin`, packed scales and minima) and returns the
/// 256 numbers `q`, from 0 to `max_q`, for which `x` is about `d * scale * q - dmin * min`.
pub(super) fn quantise_with_mins(
    x: &[f32; LEN],
    importance: Option<&[f32; LEN]>,
    head: &mut [u8],
    search: &ScaleSearch,
) -> [u8; LEN] {
    let columns: [Lanes; 32] = side_by_side(x);
    let (packed, d, dmin, fitted) = match importance {
        None => {
            let squares = columns.iter().fold([0.0; 8], |sum: Lanes, x| lanes(|j| sum[j] + x[j] * x[j]));
            let mean = squares.map(|sum| sqrt(sum / 32.0));
            let w = array::from_fn(|i| lanes(|j| mean[j] + columns[i][j].abs()));
            let (scales, mins, fitted) = fit::with_min(&columns, &w, search);
            let largest = |v: &Lanes| v.iter().fold(0.0, |max, &v| if v > max { v } else { max });
            let (max_scale, max_min) = (largest(&scales), largest(&mins));
            let six_bits = |v: Lanes, max: f32| {
                let inverse = if max > 0.0 { 63.0 / max } else { 0.0 };
                v.map(|v| nearest(inverse * v, 0.0, 63.0) as u8)
            };
            let packed = pack_scale_min(six_bits(scales, max_scale), six_bits(mins, max_min));
            (packed, max_scale / 63.0, max_min / 63.0, fitted)
        }
        Some(importance) => {
            let weights: [f32; LEN] = error_weights(importance, 2.0 * sum_of_squares(x) / 256.0, x);
            let (scales, mins, fitted) = fit::with_min(&columns, &side_by_side(&weights), &fit::weighted(search.max_q));
            let sums = array::from_fn(|j| weights[32 * j..][..32].iter().sum());
            let (d, ls) = fit::positive(&scales, &sums, 63.0);
            let (dmin, lm) = fit::positive(&mins, &sums, 63.0);
            (pack_scale_min(ls.map(|v| v as u8), lm.map(|v| v as u8)), d, dmin, fitted)
        }
    };
    set_scale(head, 0, d);
    set_scale(head, 2, dmin);
    head[4..].copy_from_slice(&packed);

    // the scales are rounded now: requantises with them
    let mut q = [0; LEN];
    for (j, (d, m)) in sub_scales(head).into_iter().enumerate() {
        for i in 0..32 {
            let fitted =
                if d == 0.0 { fitted[i][j] } else { nearest((x[32 * j + i] + m) / d, 0.0, search.max_q.into()) };
            q[32 * j + i] = fitted as u8;
        }
    }
    q
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scale_min_round_trip() {
        let (scales, mins) = ([0, 63, 17, 5, 44, 32, 16, 15], [1, 2, 62, 33, 60, 0, 31, 48]);
        let packed = pack_scale_min(scales, mins);
        for j in 0..8 {
            assert_eq!(scale_min(&packed, j), (scales[j], mins[j]));
        }
    }
}

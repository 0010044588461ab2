//! What the K formats share: 6-bit scales and minima packed into 12 bytes, and the search for a good scale.

use core::array;

use super::float::{scale_at, set_scale};

/// Elements in a block of every K format.
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

/// How Q4_K and Q5_K look for scales: `n_steps + 1` attempts at `max_q + from + 0.1 * step` levels.
pub(super) struct Search {
    pub(super) max_q: u8,
    pub(super) from: f32,
    pub(super) n_steps: u8,
}

/// A number for each of the 8 sub-blocks.
type Lanes = [f32; 8];

/// Fills the first 16 bytes of a Q4_K or Q5_K block (f16 `d`, f16 `dmin`, packed scales and minima) and returns the
/// 256 numbers `q`, from 0 to `max_q`, for which `x` is about `d * scale * q - dmin * min`.
pub(super) fn quantise_with_mins(x: &[f32; LEN], head: &mut [u8], search: &Search) -> [u8; LEN] {
    let (scales, mins, fitted) = fit_with_mins(&array::from_fn(|i| array::from_fn(|j| x[32 * j + i])), search);
    let largest = |v: &Lanes| v.iter().fold(0.0, |max, &v| if v > max { v } else { max });
    let (max_scale, max_min) = (largest(&scales), largest(&mins));
    let six_bits = |v: Lanes, max: f32| {
        let inverse = if max > 0.0 { 63.0 / max } else { 0.0 };
        v.map(|v| nearest(inverse * v, 0.0, 63.0) as u8)
    };
    let packed = pack_scale_min(six_bits(scales, max_scale), six_bits(mins, max_min));
    set_scale(head, 0, max_scale / 63.0);
    set_scale(head, 2, max_min / 63.0);
    head[4..].copy_from_slice(&packed);

    // the scales are rounded now: choose the numbers anew
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

/// For 8 sub-blocks side by side (`x[i][j]` is element i of sub-block j): scale and minimum (>= 0) for which
/// `scale * q - min` is closest to `x`, weighted towards large elements; and the `q`.
///
/// Starts from the range of `x`; each attempt rounds to a slightly different number of levels, solves the weighted
/// least-squares problem for scale and minimum, and is kept if its error is smaller. The range is that of the best
/// minimum so far. Equal elements give an infinite inverse, which [`nearest`] takes to q = 0, and a scale of 0.
fn fit_with_mins(x: &[Lanes; 32], search: &Search) -> (Lanes, Lanes, [Lanes; 32]) {
    let max_q = f32::from(search.max_q);
    let squares = x.iter().fold([0.0; 8], |sum: Lanes, x| lanes(|j| sum[j] + x[j] * x[j]));
    let mean = squares.map(|sum| sqrt(sum / 32.0));
    let w: [Lanes; 32] = array::from_fn(|i| lanes(|j| mean[j] + x[i][j].abs()));
    let max = x.iter().fold(x[0], |max, x| lanes(|j| if x[j] > max[j] { x[j] } else { max[j] }));
    let mut min = x.iter().fold([0.0; 8], |min: Lanes, x| lanes(|j| if x[j] < min[j] { x[j] } else { min[j] }));
    let sum_w = w[1..].iter().fold(w[0], |sum, w| lanes(|j| sum[j] + w[j]));
    let sum_x = (1..32).fold(lanes(|j| w[0][j] * x[0][j]), |sum, i| lanes(|j| sum[j] + w[i][j] * x[i][j]));

    let levels = |inverse: &Lanes, min: &Lanes| -> [Lanes; 32] {
        array::from_fn(|i| lanes(|j| nearest(inverse[j] * (x[i][j] - min[j]), 0.0, max_q)))
    };
    let error = |q: &[Lanes; 32], scale: &Lanes, min: &Lanes| {
        (0..32).fold([0.0; 8], |sum: Lanes, i| {
            lanes(|j| {
                let diff = scale[j] * q[i][j] + min[j] - x[i][j];
                sum[j] + w[i][j] * (diff * diff)
            })
        })
    };

    let inverse = lanes(|j| max_q / (max[j] - min[j]));
    let mut scale = inverse.map(|inverse| 1.0 / inverse);
    let mut best = levels(&inverse, &min);
    let mut best_error = error(&best, &scale, &min);
    for step in 0..=search.n_steps {
        let n_levels = search.from + 0.1 * f32::from(step) + max_q;
        let l = levels(&lanes(|j| n_levels / (max[j] - min[j])), &min);
        let (mut sum_l, mut sum_l2, mut sum_xl) = ([0.0; 8], [0.0; 8], [0.0; 8]);
        for i in 0..32 {
            let wl: Lanes = lanes(|j| w[i][j] * l[i][j]);
            sum_l = lanes(|j| sum_l[j] + wl[j]);
            sum_l2 = lanes(|j| sum_l2[j] + wl[j] * l[i][j]);
            sum_xl = lanes(|j| sum_xl[j] + wl[j] * x[i][j]);
        }
        let determinant = lanes(|j| sum_w[j] * sum_l2[j] - sum_l[j] * sum_l[j]);
        let free_min = lanes(|j| (sum_l2[j] * sum_x[j] - sum_l[j] * sum_xl[j]) / determinant[j]);
        let this_min = free_min.map(|min| if min > 0.0 { 0.0 } else { min });
        let this_scale = lanes(|j| {
            let free = (sum_w[j] * sum_xl[j] - sum_x[j] * sum_l[j]) / determinant[j];
            if free_min[j] > 0.0 { sum_xl[j] / sum_l2[j] } else { free }
        });
        let this_error = error(&l, &this_scale, &this_min);
        for j in 0..8 {
            if determinant[j] > 0.0 && this_error[j] < best_error[j] {
                (best_error[j], scale[j], min[j]) = (this_error[j], this_scale[j], this_min[j]);
                (0..32).for_each(|i| best[i][j] = l[i][j]);
            }
        }
    }
    (scale, min.map(|min| -min), best)
}

/// A number for each sub-block.
#[inline(always)]
fn lanes(f: impl FnMut(usize) -> f32) -> Lanes {
    array::from_fn(f)
}

/// The integer nearest to `v`, ties to even, within `low..=high` (integers below 2^22 in magnitude); `low` for NaN.
#[inline(always)]
pub(super) fn nearest(v: f32, low: f32, high: f32) -> f32 {
    const MAGIC: f32 = 12_582_912.0; // 1.5 * 2^23: adding it leaves no bits for a fraction
    let v = if v > low { v } else { low };
    let v = if v < high { v } else { high };
    (v + MAGIC) - MAGIC
}

/// The correctly rounded square root of a finite `x >= 0`; `core` has none.
fn sqrt(x: f32) -> f32 {
    if x == 0.0 {
        return 0.0;
    }
    let (exponent, fraction) = ((x.to_bits() >> 23) as i32, x.to_bits() & 0x7f_ffff);
    let (mut e, mut m) = if exponent == 0 { (-149, fraction) } else { (exponent - 150, fraction | 0x80_0000) };
    let shift = m.leading_zeros() as i32 - 8; // x = m * 2^e, m of 24 bits
    m <<= shift;
    e -= shift;
    let up = if e % 2 == 0 { 26 } else { 25 }; // to 49 or 50 bits, so that the root has 25, and an even exponent
    let root = (u64::from(m) << up).isqrt();
    let rounded = (root >> 1) + (root & 1); // a root is never halfway between two floats
    rounded as f32 * f32::from_bits(((e - up) / 2 + 1 + 127) as u32 * 0x80_0000)
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

    #[test]
    fn sqrt_is_correctly_rounded() {
        let mut bits = 1u32;
        while bits < 0x7f80_0000 {
            let x = f32::from_bits(bits);
            assert_eq!(sqrt(x).to_bits(), x.sqrt().to_bits(), "{x:e}");
            bits += 4099;
        }
        assert_eq!(sqrt(f32::MAX), f32::MAX.sqrt());
    }

    #[test]
    fn nearest_rounds_and_clamps() {
        for (v, expected) in [(0.5, 0.0), (1.5, 2.0), (2.49, 2.0), (-3.0, 0.0), (99.0, 15.0), (f32::NAN, 0.0)] {
            assert_eq!(nearest(v, 0.0, 15.0), expected);
        }
    }
}

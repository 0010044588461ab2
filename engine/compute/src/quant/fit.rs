//! Searches for block scales, shared by the quantisers. Each follows the order of operations of ggml, so that the bytes
//! are the same. Sub-blocks are processed side by side (`x[i][j]` is element i of sub-block j of `L`), which
//! vectorises.

use core::array;

/// Groups with a smaller magnitude count as zero.
pub(super) const TINY: f32 = 1e-15;

/// One number per sub-block.
#[inline(always)]
pub(super) fn lanes<const L: usize>(f: impl FnMut(usize) -> f32) -> [f32; L] {
    array::from_fn(f)
}

/// Transposes a block: element by element, sub-blocks side by side.
pub(super) fn side_by_side<const L: usize, const N: usize>(x: &[f32]) -> [[f32; L]; N] {
    array::from_fn(|i| array::from_fn(|j| x[N * j + i]))
}

/// Parameters of a search for scale and minimum: `n_steps + 1` attempts with `max_q + from + step * i` levels.
pub(super) struct ScaleSearch {
    pub(super) max_q: u8,
    pub(super) from: f32,
    pub(super) step: f32,
    pub(super) n_steps: u8,
    /// Minimise the absolute error instead of the squared error.
    pub(super) absolute: bool,
}

/// The search of all types with minima when there is an importance matrix.
pub(super) const fn weighted(max_q: u8) -> ScaleSearch {
    ScaleSearch { max_q, from: -0.9, step: 0.05, n_steps: 36, absolute: false }
}

/// Scale and minimum (>= 0) for which `scale * q - min` is closest to `x`, weighted by `w`; and the `q`.
///
/// Starts from the range of `x`. Each attempt rounds to a slightly different number of levels, solves the weighted
/// least-squares problem for scale and minimum, and is kept if its error is smaller. The range starts at the best
/// minimum so far. Equal elements give an infinite inverse, which [`nearest`] maps to q = 0, and a scale of 0.
pub(super) fn with_min<const L: usize, const N: usize>(
    x: &[[f32; L]; N],
    w: &[[f32; L]; N],
    search: &ScaleSearch,
) -> ([f32; L], [f32; L], [[f32; L]; N]) {
    let max_q = f32::from(search.max_q);
    // adding 0 turns -0 into 0: the relaxed minimum of WebAssembly may return either
    let max = x[1..].iter().fold(lanes(|j| x[0][j] + 0.0), |max: [f32; L], x| {
        lanes(|j| if x[j] + 0.0 > max[j] { x[j] + 0.0 } else { max[j] })
    });
    let mut min =
        x.iter().fold([0.0; L], |min: [f32; L], x| lanes(|j| if x[j] + 0.0 < min[j] { x[j] + 0.0 } else { min[j] }));
    let sum_w = w[1..].iter().fold(w[0], |sum, w| lanes(|j| sum[j] + w[j]));
    let sum_x = (1..N).fold(lanes(|j| w[0][j] * x[0][j]), |sum: [f32; L], i| lanes(|j| sum[j] + w[i][j] * x[i][j]));

    let levels = |inverse: &[f32; L], min: &[f32; L]| -> [[f32; L]; N] {
        array::from_fn(|i| lanes(|j| nearest(inverse[j] * (x[i][j] - min[j]), 0.0, max_q)))
    };
    let error = |q: &[[f32; L]; N], scale: &[f32; L], min: &[f32; L]| {
        (0..N).fold([0.0; L], |sum: [f32; L], i| {
            lanes(|j| {
                let diff = scale[j] * q[i][j] + min[j] - x[i][j];
                sum[j] + w[i][j] * if search.absolute { diff.abs() } else { diff * diff }
            })
        })
    };

    let inverse = lanes(|j| max_q / (max[j] - min[j]));
    let mut scale = inverse.map(|inverse| 1.0 / inverse);
    let mut best = levels(&inverse, &min);
    let mut best_error = error(&best, &scale, &min);
    for step in 0..=search.n_steps {
        let n_levels = search.from + search.step * f32::from(step) + max_q;
        let l = levels(&lanes(|j| n_levels / (max[j] - min[j])), &min);
        let (mut sum_l, mut sum_l2, mut sum_xl) = ([0.0; L], [0.0; L], [0.0; L]);
        for i in 0..N {
            let wl: [f32; L] = lanes(|j| w[i][j] * l[i][j]);
            sum_l = lanes(|j| sum_l[j] + wl[j]);
            sum_l2 = lanes(|j| sum_l2[j] + wl[j] * l[i][j]);
            sum_xl = lanes(|j| sum_xl[j] + wl[j] * x[i][j]);
        }
        let determinant: [f32; L] = lanes(|j| sum_w[j] * sum_l2[j] - sum_l[j] * sum_l[j]);
        let free_min: [f32; L] = lanes(|j| (sum_l2[j] * sum_x[j] - sum_l[j] * sum_xl[j]) / determinant[j]);
        // minimum with 0 on the bit patterns: negative numbers have the sign bit set
        let this_min = free_min.map(|min| f32::from_bits((min.to_bits() as i32).min(0) as u32));
        let this_scale = lanes(|j| {
            let free = (sum_w[j] * sum_xl[j] - sum_x[j] * sum_l[j]) / determinant[j];
            if free_min[j] > 0.0 { sum_xl[j] / sum_l2[j] } else { free }
        });
        let this_error = error(&l, &this_scale, &this_min);
        for j in 0..L {
            if determinant[j] > 0.0 && this_error[j] < best_error[j] {
                (best_error[j], scale[j], min[j]) = (this_error[j], this_scale[j], this_min[j]);
                (0..N).for_each(|i| best[i][j] = l[i][j]);
            }
        }
    }
    (scale, min.map(|min| -min), best)
}

/// The scale for which `scale * q`, q from -max_q to max_q - 1, is closest to `x`, weighted by `w`; and the `q`.
///
/// Starts with the largest element at -max_q. Each attempt maps it to a slightly different value, and is kept if the
/// best scale for its rounding gives a smaller error.
pub(super) fn signed<const L: usize, const N: usize>(
    x: &[[f32; L]; N],
    w: &[[f32; L]; N],
    max_q: f32,
) -> ([f32; L], [[f32; L]; N]) {
    let largest =
        x.iter().fold([0.0; L], |max: [f32; L], x| lanes(|j| if max[j].abs() < x[j].abs() { x[j] } else { max[j] }));
    let attempt = |first: f32| {
        let inverse: [f32; L] = lanes(|j| first / largest[j]);
        let mut l = [[0.0; L]; N];
        let (mut sum_lx, mut sum_l2) = ([0.0; L], [0.0; L]);
        for i in 0..N {
            l[i] = lanes(|j| nearest(inverse[j] * x[i][j], -max_q, max_q - 1.0));
            sum_lx = lanes(|j| sum_lx[j] + w[i][j] * x[i][j] * l[i][j]);
            sum_l2 = lanes(|j| sum_l2[j] + w[i][j] * l[i][j] * l[i][j]);
        }
        (l, sum_lx, sum_l2)
    };
    let (mut best_l, sum_lx, sum_l2) = attempt(-max_q);
    let mut scale = lanes(|j| if sum_l2[j] == 0.0 { 0.0 } else { sum_lx[j] / sum_l2[j] });
    let mut best: [f32; L] = lanes(|j| scale[j] * sum_lx[j]);
    for step in (-9i8..=9).filter(|&step| step != 0) {
        let (l, sum_lx, sum_l2) = attempt(-(max_q + 0.1 * f32::from(step)));
        for j in 0..L {
            if sum_l2[j] > 0.0 && sum_lx[j] * sum_lx[j] > best[j] * sum_l2[j] {
                scale[j] = sum_lx[j] / sum_l2[j];
                best[j] = scale[j] * sum_lx[j];
                (0..N).for_each(|i| best_l[i][j] = l[i][j]);
            }
        }
    }
    for j in (0..L).filter(|&j| largest[j].abs() < TINY) {
        scale[j] = 0.0;
        (0..N).for_each(|i| best_l[i][j] = -max_q); // as in ggml: `q` is irrelevant, as the scale is 0
    }
    (scale, best_l)
}

/// The scale for which `scale * q`, q from 0 to max_q, is closest to `x` (>= 0), weighted by `w`; and the `q`.
///
/// Tries some numbers of levels, then moves single `q`, in up to five rounds, as long as the error decreases. Only
/// IQ2_XXS has negative `x`, and uses only the scale: as in ggml, such a `q` is stored in a byte and comes back as `q +
/// 256`.
pub(super) fn positive<const N: usize>(x: &[f32; N], w: &[f32; N], max_q: f32) -> (f32, [f32; N]) {
    let max = x.iter().fold(0.0, |max: f32, &x| if x > max { x } else { max });
    if max < TINY {
        return (0.0, [0.0; N]);
    }
    let round = |v: f32| nearest(v, -4_194_303.0, max_q);
    let byte = |q: f32| f32::from(q as i32 as u8);
    let error = |inverse: f32, kept: &dyn Fn(f32) -> f32| {
        let scale = 1.0 / inverse;
        (0..N).fold(0.0, |sum, i| {
            let diff = x[i] - scale * kept(round(inverse * x[i]));
            sum + w[i] * diff * diff
        })
    };
    let mut inverse = max_q / max;
    let mut best = error(inverse, &byte);
    for step in (-4i8..=4).filter(|&step| step != 0) {
        let this = (0.1 * f32::from(step) + max_q) / max;
        let e = error(this, &|q| q);
        if e < best {
            (best, inverse) = (e, this);
        }
    }
    let mut q = [0.0; N];
    let (mut sum_lx, mut sum_l2) = (0.0, 0.0);
    for i in 0..N {
        let l = round(inverse * x[i]);
        sum_lx += w[i] * x[i] * l;
        sum_l2 += w[i] * l * l;
        q[i] = byte(l);
    }
    refine(x, w, &mut q, (&mut sum_lx, &mut sum_l2), round, byte);
    (if sum_l2 > 0.0 { sum_lx / sum_l2 } else { 0.0 }, q)
}

/// Moves single `q` to where the best scale, `sums.0 / sums.1`, gives a smaller error, in up to five rounds. `round`
/// maps a number to a `q`, `keep` to the stored form.
pub(super) fn refine<const N: usize>(
    x: &[f32; N],
    w: &[f32; N],
    q: &mut [f32; N],
    (sum_lx, sum_l2): (&mut f32, &mut f32),
    round: impl Fn(f32) -> f32,
    keep: impl Fn(f32) -> f32,
) {
    for _ in 0..5 {
        let mut changed = false;
        for i in 0..N {
            let (mut lx, mut l2) = (*sum_lx - w[i] * x[i] * q[i], *sum_l2 - w[i] * q[i] * q[i]);
            let new = if lx > 0.0 { round(x[i] * l2 / lx) } else { q[i] };
            if new != q[i] {
                let rest = l2;
                lx += w[i] * x[i] * new;
                l2 += w[i] * new * new;
                if rest > 0.0 && lx * lx * *sum_l2 > *sum_lx * *sum_lx * l2 {
                    (q[i], *sum_lx, *sum_l2) = (keep(new), lx, l2);
                    changed = true;
                }
            }
        }
        if !changed {
            break;
        }
    }
}

/// Weights of the error: importance times `sqrt(mean_square + x * x)`.
pub(super) fn error_weights<const N: usize>(importance: &[f32], mean_square: f32, x: &[f32]) -> [f32; N] {
    array::from_fn(|i| importance[i] * sqrt(mean_square + x[i] * x[i]))
}

/// The sum of the squares, added in order.
pub(super) fn sum_of_squares(x: &[f32]) -> f32 {
    x.iter().fold(0.0, |sum, x| sum + x * x)
}

/// The integer nearest to `v`, ties to even, within `low..=high` (integers below 2^22 in magnitude); `low` for NaN.
#[inline(always)]
pub(super) fn nearest(v: f32, low: f32, high: f32) -> f32 {
    const MAGIC: f32 = 12_582_912.0; // 1.5 * 2^23: adding it rounds to an integer
    // clamps the bit patterns: the relaxed float minimum of WebAssembly may return NaN
    let bits = if v.is_nan() { 0 } else { (v + MAGIC).to_bits() as i32 };
    let (low, high) = ((low + MAGIC).to_bits() as i32, (high + MAGIC).to_bits() as i32);
    f32::from_bits(bits.max(low).min(high) as u32) - MAGIC
}

/// The correctly rounded square root of a finite `x >= 0`, which `core` does not have. Infinity for infinity, NaN for
/// NaN and negative numbers.
pub(super) fn sqrt(x: f32) -> f32 {
    if x == 0.0 || x == f32::INFINITY {
        return x;
    }
    if x < 0.0 || x.is_nan() {
        return f32::NAN;
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
    fn sqrt_is_correctly_rounded() {
        let mut bits = 1u32;
        while bits < 0x7f80_0000 {
            let x = f32::from_bits(bits);
            assert_eq!(sqrt(x).to_bits(), x.sqrt().to_bits(), "{x:e}");
            bits += 4099;
        }
        assert_eq!(sqrt(f32::MAX), f32::MAX.sqrt());
        assert_eq!(sqrt(f32::INFINITY), f32::INFINITY);
        assert!(sqrt(-1.0).is_nan() && sqrt(f32::NAN).is_nan());
    }

    #[test]
    fn nearest_rounds_and_clamps() {
        for (v, expected) in [(0.5, 0.0), (1.5, 2.0), (2.49, 2.0), (-3.0, 0.0), (99.0, 15.0), (f32::NAN, 0.0)] {
            assert_eq!(nearest(v, 0.0, 15.0), expected);
        }
    }
}

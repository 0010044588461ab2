//! exp(x) by Cody-Waite reduction and a polynomial of degree 6 (Cephes' coefficients), multiply and add only.
//! 0 at and below -87.3, constant from 88.3 on, `exp(0) = 1`; worst error 0.96 ulp in between.

#![allow(clippy::excessive_precision)]

use super::simd::{Simd, each};

pub(super) const LOW: f32 = -87.3;
const HIGH: f32 = 88.3;
const MAGIC: f32 = 12_582_912.0; // 1.5 * 2^23
const LN2_HIGH: f32 = 0.693359375;
const LN2_LOW: f32 = -2.12194440e-4;
static P: [f32; 6] =
    [1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1];
static REDUCTION: [f32; 6] = [HIGH, core::f32::consts::LOG2_E, MAGIC, -MAGIC, -LN2_HIGH, -LN2_LOW];

/// The scalar definition of exp.
pub fn exp(x: f32) -> f32 {
    exp_above(LOW, x)
}

/// [`exp`], but 0 at and below `low`, which must be at least -87.3.
pub(super) fn exp_above(low: f32, x: f32) -> f32 {
    // the minimum of the bit patterns: negative numbers have the sign bit set; NaN ends as 0
    let xc = f32::from_bits((x.to_bits() as i32).min(HIGH.to_bits() as i32) as u32);
    let t = xc * core::f32::consts::LOG2_E + MAGIC;
    let n = t - MAGIC;
    let r = (xc - n * LN2_HIGH) - n * LN2_LOW;
    let p = polynomial(&P, r);
    let y = (p * (r * r) + r) + 1.0;
    let scale = f32::from_bits((t.to_bits() << 23).wrapping_add(0x3f80_0000));
    // below `low` the scale is not a valid power of two
    if x > low { y * scale } else { 0.0 }
}

/// Evaluates a polynomial by Horner's rule, highest coefficient first.
pub(super) fn polynomial<const N: usize>(coefficients: &[f32; N], x: f32) -> f32 {
    coefficients[1..].iter().fold(coefficients[0], |p, c| p * x + c)
}

/// Number of vectors processed side by side: a single one is a dependency chain of thirty steps.
pub(super) const UNROLL: usize = 4;

/// [`exp`] on lanes.
#[inline(always)]
pub(super) fn exp_lanes<S: Simd>(s: S, x: S::F) -> S::F {
    exp_above_lanes(s, LOW, [x])[0]
}

/// [`exp_above`] on lanes of several vectors.
#[inline(always)]
pub(super) fn exp_above_lanes<S: Simd, const N: usize>(s: S, low: f32, x: [S::F; N]) -> [S::F; N] {
    let low = s.splat(low);
    let (coefficients, reduction) = (s.constants(&P), s.constants(&REDUCTION));
    let [high, log2_e, magic, less_magic, ln2_high, ln2_low] = each!(6, |i| s.splat(reduction[i]));
    // loops, as closures may be compiled without the CPU features
    let (mut t, mut r, mut p) = (x, x, [s.splat(coefficients[0]); N]);
    for i in 0..N {
        let xc = s.from_bits(s.min_i(s.bits(x[i]), s.bits(high)));
        t[i] = s.add(s.mul(xc, log2_e), magic);
        let n = s.add(t[i], less_magic);
        // exact: 8 bits times 9 bits
        r[i] = s.mac_exact(xc, n, ln2_high);
        r[i] = s.add(r[i], s.mul(n, ln2_low));
    }
    for c in &coefficients[1..] {
        let c = s.splat(*c);
        for i in 0..N {
            p[i] = s.add(s.mul(p[i], r[i]), c);
        }
    }
    let one = s.splat(1.0);
    for i in 0..N {
        let y = s.add(s.add(s.mul(p[i], s.mul(r[i], r[i])), r[i]), one);
        let scale = s.from_bits(s.add_i(s.shl_i::<23>(s.bits(t[i])), s.bits(one)));
        p[i] = s.select_gt(x[i], low, s.mul(y, scale), s.splat(0.0));
    }
    p
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn within_one_ulp_of_the_real_exponential() {
        let mut worst = 0.0f64;
        for i in 0..2_000_000 {
            let x = -87.2 + i as f32 * (175.4 / 2_000_000.0);
            let want = f64::from(x).exp();
            let ulp = f64::from(f32::from_bits((want as f32).to_bits() + 1)) - f64::from(want as f32);
            worst = worst.max((f64::from(exp(x)) - want).abs() / ulp);
        }
        assert!(worst < 1.0, "{worst} ulp");
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert!(exp(f32::INFINITY).is_finite());
    }
}

//! exp(x) by Cody-Waite reduction and a polynomial of degree 6 (Cephes' coefficients), multiply and add only.
//! 0 at and below -87.3, constant from 88.3 on, `exp(0) = 1`; worst error 0.96 ulp in between.

#![allow(clippy::excessive_precision)]

use super::simd::Simd;

const LOW: f32 = -87.3;
const HIGH: f32 = 88.3;
const MAGIC: f32 = 12_582_912.0; // 1.5 * 2^23
const LN2_HIGH: f32 = 0.693359375;
const LN2_LOW: f32 = -2.12194440e-4;
const P: [f32; 6] =
    [1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1];

/// The definition.
pub fn exp(x: f32) -> f32 {
    let low = if x > HIGH { HIGH } else { x };
    let xc = if low > LOW { low } else { LOW };
    let t = xc * core::f32::consts::LOG2_E + MAGIC;
    let n = t - MAGIC;
    let r = (xc - n * LN2_HIGH) - n * LN2_LOW;
    let mut p = P[0];
    for c in &P[1..] {
        p = p * r + c;
    }
    let y = (p * (r * r) + r) + 1.0;
    let scale = f32::from_bits((t.to_bits() << 23).wrapping_add(0x3f80_0000));
    if x > LOW { y * scale } else { 0.0 }
}

/// [`exp`] on lanes.
#[inline(always)]
pub(super) fn exp_lanes<S: Simd>(s: S, x: S::F) -> S::F {
    let low = s.select_gt(x, s.splat(HIGH), s.splat(HIGH), x);
    let xc = s.select_gt(low, s.splat(LOW), low, s.splat(LOW));
    let t = s.add(s.mul(xc, s.splat(core::f32::consts::LOG2_E)), s.splat(MAGIC));
    let n = s.sub(t, s.splat(MAGIC));
    let r = s.sub(s.sub(xc, s.mul(n, s.splat(LN2_HIGH))), s.mul(n, s.splat(LN2_LOW)));
    let mut p = s.splat(P[0]);
    for c in &P[1..] {
        p = s.add(s.mul(p, r), s.splat(*c));
    }
    let y = s.add(s.add(s.mul(p, s.mul(r, r)), r), s.splat(1.0));
    let scale = s.from_bits(s.add_i(s.shl_i::<23>(s.bits(t)), s.splat_i(0x3f80_0000)));
    s.select_gt(x, s.splat(LOW), s.mul(y, scale), s.splat(0.0))
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

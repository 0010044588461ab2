//! tanh and erfc, from [`exp`] and multiplication, addition and division only.

#![allow(clippy::excessive_precision)]

use super::exp::{exp, exp_lanes, polynomial};
use super::simd::Simd;

/// tanh is a polynomial up to this magnitude, and `1 - 2 / (exp(2|x|) + 1)` with the sign of x beyond.
const SMALL: f32 = 0.625;
/// Coefficients of `x^2` in `(tanh(x) - x) / x^3`, highest first (Cephes).
static TANH: [f32; 5] = [-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1];

/// Abramowitz and Stegun 7.1.26, highest first: absolute error of erfc below 1.5e-7, 6e-7 with rounding.
static ERFC: [f32; 5] = [1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592];
const ERFC_P: f32 = 0.3275911;

/// [`polynomial`] on lanes.
#[inline(always)]
fn polynomial_lanes<S: Simd, const N: usize>(s: S, coefficients: &'static [f32; N], x: S::F) -> S::F {
    let coefficients = s.constants(coefficients);
    let mut p = s.splat(coefficients[0]);
    for c in &coefficients[1..] {
        p = s.add(s.mul(p, x), s.splat(*c));
    }
    p
}

/// Hyperbolic tangent.
pub fn tanh(x: f32) -> f32 {
    let a = x.abs();
    let z = x * x;
    let p = polynomial(&TANH, z);
    let large = 1.0 - 2.0 / (exp(a + a) + 1.0);
    if a > SMALL { if x > 0.0 { large } else { 0.0 - large } } else { (p * z) * x + x }
}

/// [`tanh`] on lanes.
#[inline(always)]
pub(super) fn tanh_lanes<S: Simd>(s: S, x: S::F) -> S::F {
    let (zero, one) = (s.splat(0.0), s.splat(1.0));
    let a = s.abs(x);
    let z = s.mul(x, x);
    let p = polynomial_lanes(s, &TANH, z);
    let large = s.sub(one, s.div(s.splat(2.0), s.add(exp_lanes(s, s.add(a, a)), one)));
    let large = s.select_gt(x, zero, large, s.sub(zero, large));
    s.select_gt(a, s.splat(SMALL), large, s.add(s.mul(s.mul(p, z), x), x))
}

/// `1 - erf(x)` for x >= 0.
pub fn erfc(x: f32) -> f32 {
    let t = 1.0 / (1.0 + ERFC_P * x);
    let p = polynomial(&ERFC, t);
    (p * t) * exp(0.0 - x * x)
}

/// [`erfc`] on lanes.
#[inline(always)]
pub(super) fn erfc_lanes<S: Simd>(s: S, x: S::F) -> S::F {
    let one = s.splat(1.0);
    let t = s.div(one, s.add(one, s.mul(s.splat(ERFC_P), x)));
    let p = polynomial_lanes(s, &ERFC, t);
    s.mul(s.mul(p, t), exp_lanes(s, s.sub(s.splat(0.0), s.mul(x, x))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn close_to_the_real_functions() {
        // erfc from the series of erf in f64
        let erf = |x: f64| {
            let (mut term, mut sum) = (x, x);
            for n in 1..200 {
                term *= -x * x / f64::from(n);
                sum += term / f64::from(2 * n + 1);
            }
            sum * core::f64::consts::FRAC_2_SQRT_PI
        };
        for i in -40_000..40_000 {
            let x = i as f32 * 1e-4;
            let want = f64::from(x).tanh();
            assert!((f64::from(tanh(x)) - want).abs() <= 5e-7 * want.abs(), "tanh {x}");
            if x >= 0.0 {
                assert!((f64::from(erfc(x)) - (1.0 - erf(f64::from(x)))).abs() < 6e-7, "erfc {x}");
            }
        }
        assert_eq!((tanh(0.0), tanh(30.0), tanh(-30.0), tanh(f32::INFINITY)), (0.0, 1.0, -1.0, 1.0));
        assert!(tanh(f32::NAN).is_nan() && tanh(1e-40) == 1e-40);
        assert_eq!((erfc(20.0), erfc(f32::INFINITY)), (0.0, 0.0));
    }
}

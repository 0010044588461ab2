//! Elementary functions in f64 from multiplication, addition and division alone, for values computed at load or once
//! per token (rotary frequencies, sampling). Without libm every target gets the same bits. The error is below 2 ulp
//! over the ranges used.
#![allow(clippy::neg_cmp_op_on_partial_ord)] // `!(x > a)` is true for NaN on purpose
#![allow(clippy::excessive_precision)]

use core::f64::consts::{FRAC_2_PI, LN_2, LOG2_E};

/// Correctly rounded square root: an instruction on every target.
pub fn sqrt(x: f32) -> f32 {
    libm_free_sqrt(x)
}

#[cfg(any(feature = "std", test))]
fn libm_free_sqrt(x: f32) -> f32 {
    x.sqrt()
}

/// Without std: Newton's iteration in f64, then rounding. The f64 value is within 1 ulp of the root, and the root of
/// an f32 is never that close to the middle of two f32, so the rounding is correct.
#[cfg(not(any(feature = "std", test)))]
fn libm_free_sqrt(x: f32) -> f32 {
    newton_sqrt(x)
}

#[cfg_attr(any(feature = "std", test), allow(dead_code))]
fn newton_sqrt(x: f32) -> f32 {
    if !(x > 0.0) || x == f32::INFINITY {
        return if x == 0.0 || x == f32::INFINITY { x } else { f32::NAN };
    }
    let x = f64::from(x);
    let mut y = f64::from_bits((x.to_bits() >> 1) + (1023u64 << 51));
    for _ in 0..6 {
        y = 0.5 * (y + x / y);
    }
    y as f32
}

const MAGIC: f64 = 6_755_399_441_055_744.0; // 1.5 * 2^52: adding it rounds to an integer

/// e^x; 0 below -708, infinity above 709.
pub fn exp(x: f64) -> f64 {
    if !(x > -708.0) {
        return if x.is_nan() { x } else { 0.0 };
    }
    if x > 709.0 {
        return f64::INFINITY;
    }
    let t = x * LOG2_E + MAGIC;
    let n = t - MAGIC;
    // ln 2 in two parts, the first exact in 32 bits, so that n * LN2_HIGH is exact
    let r = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
    let mut p = 1.0;
    for i in (1..=14).rev() {
        p = 1.0 + p * r / f64::from(i);
    }
    p * f64::from_bits(t.to_bits().wrapping_add(1023) << 52)
}

/// Natural logarithm of a positive, normal x.
pub fn ln(x: f64) -> f64 {
    let mut e = (x.to_bits() >> 52) as i32 - 1023;
    let mut m = f64::from_bits(x.to_bits() & 0x000f_ffff_ffff_ffff | 1023 << 52);
    if m > core::f64::consts::SQRT_2 {
        m *= 0.5;
        e += 1;
    }
    // ln m = 2 atanh(s), s = (m-1)/(m+1), |s| < 0.172
    let s = (m - 1.0) / (m + 1.0);
    let z = s * s;
    let mut p = 0.0;
    for i in (1..=11).rev() {
        p = p * z + 1.0 / f64::from(2 * i + 1);
    }
    f64::from(e) * LN_2 + (2.0 * s + 2.0 * s * (z * p))
}

/// x to the power y, for positive normal x.
pub fn pow(x: f64, y: f64) -> f64 {
    exp(y * ln(x))
}

/// Sine and cosine of `x`, |x| below 2^31.
pub fn sin_cos(x: f64) -> (f64, f64) {
    let t = x * FRAC_2_PI + MAGIC;
    let n = t - MAGIC;
    // pi/2 in three parts of 33 bits: the products are exact for |n| < 2^20, and good to 1e-12 far beyond
    let r = ((x - n * 1.57079632673412561417e+00) - n * 6.07710050630396597660e-11) - n * 2.02226624879595063154e-21;
    let z = r * r;
    let (mut s, mut c) = (0.0, 0.0);
    for i in (1..=9).rev() {
        let i = f64::from(i);
        s = (s + 1.0) * -z / ((2.0 * i) * (2.0 * i + 1.0));
        c = (c + 1.0) * -z / ((2.0 * i - 1.0) * (2.0 * i));
    }
    let (s, c) = (r + r * s, 1.0 + c);
    match t.to_bits() & 3 {
        0 => (s, c),
        1 => (c, -s),
        2 => (-s, -c),
        _ => (-c, s),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn close(got: f64, want: f64) -> bool {
        (got - want).abs() <= 1e-15 * want.abs().max(1e-3) * 4.0
    }

    #[test]
    fn agrees_with_the_platform() {
        for i in 0..100_000 {
            let x = f64::from(i) * 0.37 + 0.001;
            let (s, c) = sin_cos(x);
            assert!((s - x.sin()).abs() < 1e-12 && (c - x.cos()).abs() < 1e-12, "{x}");
            assert!(close(ln(x), x.ln()), "ln {x}");
            let y = (f64::from(i) - 50_000.0) * 0.001;
            assert!(close(exp(y) / y.exp(), 1.0), "exp {y}");
            assert!((pow(x, y / 50.0) / x.powf(y / 50.0) - 1.0).abs() < 1e-13);
            assert_eq!(newton_sqrt(x as f32), (x as f32).sqrt());
        }
    }
}

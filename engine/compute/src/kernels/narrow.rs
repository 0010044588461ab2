//! Rounding to 13 significant bits, which makes products with f16 numbers exact in f32.
//!
//! ```text
//! c = x * 2049;  round13(x) = c - (c - x)                         Veltkamp's splitting
//! narrow(x) = round13(x clamped to -2^100 ..= 2^100), 0 below 2^-112
//! ```
//!
//! An f16 has 11 bits and is a multiple of 2^-24, so the product has at most 24 bits and neither overflows nor
//! underflows. An exact multiplication may be fused with the addition that follows: one instruction instead of two,
//! same result. Source: T. J. Dekker, A Floating-Point Technique for Extending the Available Precision, 1971.
#![allow(unsafe_code)]

use super::simd::Simd;

const MAX: f32 = f32::from_bits((127 + 100) << 23);
const MIN: f32 = f32::from_bits((127 - 112) << 23);
const SPLIT: f32 = 2049.0;

/// x rounded to 13 bits, for |x| up to 2^100.
pub(super) fn round13(x: f32) -> f32 {
    let c = x * SPLIT;
    c - (c - x)
}

/// [`round13`] on lanes.
#[inline(always)]
pub(super) fn round13_lanes<S: Simd>(s: S, x: S::F) -> S::F {
    let c = s.mul(x, s.splat(SPLIT));
    s.sub(c, s.sub(c, x))
}

/// The nearest number whose product with any f16 is exact.
///
/// Clamps by comparison, not with `min` and `max`: with relaxed-simd compilers turn these into instructions whose
/// result for NaN depends on the engine.
pub(super) fn narrow(x: f32) -> f32 {
    let limit = if x > 0.0 { MAX } else { -MAX };
    let n = round13(if x.abs() > MAX { limit } else { x });
    if MIN > n.abs() { 0.0 } else { n }
}

/// [`narrow`] of each element, on lanes.
#[inline(always)]
pub(super) fn narrow_lanes<S: Simd>(s: S, x: &mut [f32]) {
    let (whole, rest) = x.split_at_mut(x.len() / S::LANES * S::LANES);
    for x in whole.chunks_exact_mut(S::LANES) {
        // SAFETY: whole vectors.
        unsafe { s.store(x.as_mut_ptr(), narrow_vector(s, s.load(x.as_ptr()))) }
    }
    rest.iter_mut().for_each(|x| *x = narrow(*x));
}

#[inline(always)]
fn narrow_vector<S: Simd>(s: S, x: S::F) -> S::F {
    let max = s.splat(MAX);
    let limit = s.select_gt(x, s.splat(0.0), max, s.splat(-MAX));
    let n = round13_lanes(s, s.select_gt(s.abs(x), max, limit, x));
    s.select_gt(s.splat(MIN), s.abs(n), s.splat(0.0), n)
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use proptest::prelude::*;

    use super::super::Cpu;
    use super::super::cpu::Op;
    use super::super::decoded::f16_to_f32;
    use super::{Simd, narrow, narrow_lanes};

    struct Narrow<'a>(&'a mut [f32]);

    impl Op for Narrow<'_> {
        type Out = ();
        fn scalar(self) {
            self.0.iter_mut().for_each(|x| *x = narrow(*x));
        }
        #[inline(always)]
        fn simd<S: Simd>(self, s: S) {
            narrow_lanes(s, self.0);
        }
    }

    proptest! {
        #[test]
        fn lanes_give_the_same_bits(x in prop::collection::vec(any::<u32>().prop_map(f32::from_bits), 0..70)) {
            let of = |cpu: Cpu| {
                let mut x = x.clone();
                cpu.run(Narrow(&mut x));
                // the bits of a NaN depend on the processor
                x.iter().map(|x| if x.is_nan() { f32::NAN.to_bits() } else { x.to_bits() }).collect::<Vec<_>>()
            };
            prop_assert!(Cpu::all_variants().into_iter().all(|cpu| of(cpu) == of(Cpu::SCALAR)));
        }

        #[test]
        fn products_with_f16_are_exact(x in any::<f32>().prop_filter("finite", |x| x.is_finite()), w in 0u16..0x7c00) {
            let (n, w) = (narrow(x), f16_to_f32(w));
            prop_assert!(n.to_bits().trailing_zeros() >= 11, "{n:e} has more than 13 bits");
            prop_assert_eq!(f64::from(n * w), f64::from(n) * f64::from(w));
        }

        #[test]
        fn the_nearest_number_of_13_bits(x in any::<f32>().prop_filter("in range", |x| (1e-30..1e30).contains(&x.abs()))) {
            let error = (f64::from(narrow(x)) - f64::from(x)).abs();
            prop_assert!(error <= f64::from(x).abs() / 8192.0, "{x:e} became {:e}", narrow(x));
        }
    }

    #[test]
    fn nan_stays_nan() {
        assert!(narrow(f32::NAN).is_nan());
        assert_eq!(narrow(f32::INFINITY), narrow(f32::MAX));
        assert_eq!(narrow(-1e-40).to_bits(), 0);
    }
}

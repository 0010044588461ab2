//! MXFP4 and NVFP4: 4-bit floats with a scale. Codes stand for twice the FP4 values, 0, 1, 2, 3, 4, 6, 8, 12 and their
//! negatives, so scales are halved.
//!
//! MXFP4: 32 elements in 17 bytes, 4.25 bits each. Source: OCP Microscaling Formats (MX) 1.0.
//!
//! | bytes | field |
//! |---|---|
//! | 0 | `e`: `d = 2^(e - 128)` |
//! | 1..17 | codes: low half of byte j is element j, high half is element j + 16 |
//!
//! NVFP4: 64 elements in 36 bytes, 4.5 bits each.
//!
//! | bytes | field |
//! |---|---|
//! | 0..4 | `d` of each 16 elements, an unsigned float: 4 bits of exponent, bias 7, and 3 of fraction; 127 counts as 0 |
//! | 4..36 | codes: of each 8 bytes, the low halves are 8 elements and the high halves the next |

use super::codebook::{Codes, FP4};
use super::float::largest;
use super::iq4::nibbles;
use crate::math;

/// Largest exponent of MXFP4 for which 12 times the scale is finite.
pub(super) const MAX_EXPONENT: u8 = 252;

/// `2^(e - 128)`; subnormal for e < 2.
pub(super) fn power(e: u8) -> f32 {
    f32::from_bits(if e < 2 { 0x20_0000 << e } else { u32::from(e - 1) << 23 })
}

/// Half the value of an unsigned 8-bit float (E4M3).
pub(super) fn half_ue4m3(bits: u8) -> f32 {
    let (exponent, fraction) = (u32::from(bits >> 3 & 15), f32::from(bits & 7));
    match (bits, exponent) {
        (0x7f, _) => 0.0,
        (_, 0) => fraction * power(118),
        _ => (8.0 + fraction) * power(117 + exponent as u8),
    }
}

pub(super) fn unpack_mx(block: &[u8], out: &mut Codes) {
    out.d[..2].fill(power(block[0]));
    nibbles(&block[1..], &mut out.code);
}

pub(super) fn unpack_nv(block: &[u8], out: &mut Codes) {
    for s in 0..4 {
        out.d[s] = half_ue4m3(block[s]);
        nibbles(&block[4 + 8 * s..][..8], &mut out.code[16 * s..]);
    }
}

/// Code of the value nearest to `x`; the first one of equally near values.
fn nearest_code(x: f32, d: f32) -> u8 {
    let error = |code: u8| (f32::from(FP4[usize::from(code)]) * d - x).abs();
    (1..16).fold((0, error(0)), |best, code| if error(code) < best.1 { (code, error(code)) } else { best }).0
}

fn put_nibbles(x: &[f32], d: f32, out: &mut [u8]) {
    let half = out.len();
    for (j, out) in out.iter_mut().enumerate() {
        *out = nearest_code(x[j], d) | nearest_code(x[j + half], d) << 4;
    }
}

/// The scale is the power of two that maps the largest element to at most about 8.
pub(super) fn quantise_mx(x: &[f32; 32], block: &mut [u8; 17]) {
    let max = largest(x).abs();
    // as in ggml: the logarithm is rounded to f32, so numbers just below a power of two count as that power
    let log2 = (math::ln(f64::from(max)) * core::f64::consts::LOG2_E) as f32;
    let floor = log2 as i32 - i32::from((log2 as i32 as f32) > log2);
    block[0] = if max > 0.0 { (floor + 125).clamp(0, 255) as u8 } else { 0 };
    put_nibbles(x, power(block[0]), &mut block[1..]);
}

/// The scale is a sixth of the largest of 16 elements, rounded.
pub(super) fn quantise_nv(x: &[f32; 64], block: &mut [u8; 36]) {
    for (s, x) in x.chunks_exact(16).enumerate() {
        block[s] = to_ue4m3(largest(x).abs() / 6.0);
        put_nibbles(x, half_ue4m3(block[s]), &mut block[4 + 8 * s..][..8]);
    }
}

/// The unsigned 8-bit float (E4M3) nearest to `x` (>= 0), halves rounded up; as in ggml 448 from 248 on.
fn to_ue4m3(x: f32) -> u8 {
    let exponent = (x.to_bits() >> 23) as i32 - 127 + 7;
    if exponent <= 0 {
        return ((x * 512.0 + 0.5) as u8).min(7);
    }
    // a carry of the fraction increments the exponent
    let rounded = (((exponent as u32) << 4 | x.to_bits() >> 19 & 15) + 1) >> 1;
    if rounded < 0x78 { rounded as u8 } else { 0x7e }
}

//! F32, F16 and BF16 as blocks of one element. Conversions to the smaller types round to nearest, ties to even.

use half::{bf16, f16};

pub(super) fn f32_from(src: &[u8; 4], out: &mut [f32; 1]) {
    out[0] = f32::from_le_bytes(*src);
}

pub(super) fn f32_into(x: &[f32; 1], out: &mut [u8; 4]) {
    *out = x[0].to_le_bytes();
}

pub(super) fn f16_from(src: &[u8; 2], out: &mut [f32; 1]) {
    out[0] = f16::from_le_bytes(*src).to_f32();
}

pub(super) fn f16_into(x: &[f32; 1], out: &mut [u8; 2]) {
    *out = f16::from_f32(x[0]).to_le_bytes();
}

pub(super) fn bf16_from(src: &[u8; 2], out: &mut [f32; 1]) {
    out[0] = bf16::from_le_bytes(*src).to_f32();
}

pub(super) fn bf16_into(x: &[f32; 1], out: &mut [u8; 2]) {
    *out = bf16::from_f32(x[0]).to_le_bytes();
}

/// The f16 at a byte offset of a block.
pub(super) fn scale_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// Rounds `scale` to f16, stores it at a byte offset of a block, and returns the rounded value.
pub(super) fn set_scale(block: &mut [u8], at: usize, scale: f32) -> f32 {
    let rounded = f16::from_f32(scale);
    block[at..at + 2].copy_from_slice(&rounded.to_le_bytes());
    rounded.to_f32()
}

/// Index of the first infinity or NaN.
pub(super) fn not_finite(x: &[f32]) -> Option<usize> {
    const RUN: usize = 1024;
    for (run, x) in x.chunks(RUN).enumerate() {
        if x.iter().fold(false, |any, v| any | !v.is_finite()) {
            return x.iter().position(|v| !v.is_finite()).map(|i| run * RUN + i);
        }
    }
    None
}

/// `1 / d`, or 0 for 0.
pub(super) fn inverse(d: f32) -> f32 {
    if d == 0.0 { 0.0 } else { 1.0 / d }
}

/// The element of largest magnitude, with its sign; the first one of equals; 0 if all are 0.
pub(super) fn largest(x: &[f32]) -> f32 {
    x.iter().fold(0.0, |max: f32, &v| if max.abs() < v.abs() { v } else { max })
}

/// Smallest and largest element.
pub(super) fn min_max(x: &[f32]) -> (f32, f32) {
    x.iter()
        .fold((f32::MAX, -f32::MAX), |(min, max), &v| (if v < min { v } else { min }, if v > max { v } else { max }))
}

/// Nearest integer of |x| <= 127.5, halves away from zero.
pub(super) fn round(x: f32) -> i8 {
    let whole = x as i8; // towards zero
    let rest = x - f32::from(whole); // exact
    whole + i8::from(rest >= 0.5) - i8::from(rest <= -0.5)
}

//! IQ4_NL and IQ4_XS: 4-bit codes of 16 unequally spaced levels, `IQ4` in [`super::codebook`].
//!
//! IQ4_NL: 32 elements in 18 bytes, 4.5 bits each: `x = d * level`.
//!
//! | bytes | field |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..18 | codes: low half of byte j is element j, high half is element j + 16 |
//!
//! IQ4_XS: 256 elements in 136 bytes, 4.25 bits each: `x = d * (scale - 32) * level`.
//!
//! | bytes | field |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..4 | high 2 bits of the 8 scales |
//! | 4..8 | their low 4 bits, low half first |
//! | 8..136 | codes: of each 16 bytes, the low halves are 16 elements and the high halves the next |

use super::codebook::{Codes, IQ4, u16_at};
use super::fit::{TINY, error_weights, nearest, sum_of_squares};
use super::float::{inverse, largest, scale_at, set_scale};

/// Reads packed nibbles: first all low ones, then all high ones.
pub(super) fn nibbles(bytes: &[u8], out: &mut [u8]) {
    for (j, &b) in bytes.iter().enumerate() {
        (out[j], out[j + bytes.len()]) = (b & 15, b >> 4);
    }
}

pub(super) fn unpack_nl(block: &[u8], out: &mut Codes) {
    out.d[..2].fill(scale_at(block, 0));
    nibbles(&block[2..], &mut out.code);
}

pub(super) fn unpack_xs(block: &[u8], out: &mut Codes) {
    out.d.fill(scale_at(block, 0));
    let high = u16_at(block, 2);
    for (i, code) in out.code.chunks_exact_mut(32).enumerate() {
        nibbles(&block[8 + 16 * i..][..16], code);
        let (low, high) = (block[4 + i / 2] >> (i % 2 * 4) & 15, (high >> (2 * i) & 3) as u8);
        out.scale[2 * i..][..2].fill((low | high << 4) as i8 - 32);
    }
}

/// Index of the level nearest to `x`; the upper one of two equally near levels.
fn nearest_step(x: f32) -> u8 {
    let (first, last) = (f32::from(IQ4[0]), f32::from(IQ4[15]));
    if x <= first || x.is_nan() {
        return 0;
    }
    if x >= last {
        return 15;
    }
    let above = (1..15).find(|&i| x < f32::from(IQ4[i])).unwrap_or(15);
    let below = x - f32::from(IQ4[above - 1]) < f32::from(IQ4[above]) - x;
    above as u8 - u8::from(below)
}

/// The scale for which `scale * level` is closest to `x`, weighted by `w`. Each attempt maps the largest element to a
/// value near the first level, and is kept if the best scale for that rounding gives a smaller error.
fn fit(x: &[f32], w: &[f32]) -> f32 {
    let max = largest(x);
    if max.abs() < TINY {
        return 0.0;
    }
    let sums = |inverse: f32| {
        let (mut qx, mut q2) = (0.0, 0.0);
        for (&x, &w) in x.iter().zip(w) {
            let q = f32::from(IQ4[usize::from(nearest_step(inverse * x))]);
            qx += w * q * x;
            q2 += w * q * q;
        }
        (qx, q2)
    };
    let first = f32::from(IQ4[0]);
    let (qx, q2) = sums(1.0 / (-max / first));
    let mut d = if q2 > 0.0 { qx / q2 } else { 0.0 };
    let mut best = d * qx;
    for step in -7i8..=7 {
        let (qx, q2) = sums((f32::from(step) + first) / max);
        if q2 > 0.0 && qx * qx > best * q2 {
            d = qx / q2;
            best = d * qx;
        }
    }
    d
}

/// Error weights of 32 elements: from importance and twice the mean square of the block, or else the squares.
fn weights(x: &[f32], importance: Option<&[f32]>, mean_square: f32) -> [f32; 32] {
    match importance {
        Some(importance) => error_weights(importance, mean_square, x),
        None => core::array::from_fn(|i| x[i] * x[i]),
    }
}

fn put_nibbles(x: &[f32], inverse: f32, out: &mut [u8]) {
    for (j, out) in out.iter_mut().enumerate() {
        *out = nearest_step(inverse * x[j]) | nearest_step(inverse * x[j + 16]) << 4;
    }
}

pub(super) fn quantise_nl(x: &[f32; 32], importance: Option<&[f32; 32]>, block: &mut [u8; 18]) {
    let mean_square = sum_of_squares(x) * (2.0 / 32.0);
    let d = fit(x, &weights(x, importance.map(|w| &w[..]), mean_square));
    set_scale(block, 0, d);
    put_nibbles(x, inverse(d), &mut block[2..]);
}

pub(super) fn quantise_xs(x: &[f32; 256], importance: Option<&[f32; 256]>, block: &mut [u8; 136]) {
    let mean_square = sum_of_squares(x) * (2.0 / 256.0);
    let scales: [f32; 8] = core::array::from_fn(|i| {
        let x = &x[32 * i..][..32];
        fit(x, &weights(x, importance.map(|w| &w[32 * i..][..32]), mean_square))
    });
    let d = -largest(&scales) / 32.0;
    set_scale(block, 0, d);
    let id = inverse(d);
    let mut high = 0u16;
    block[4..8].fill(0);
    for (i, x) in x.chunks_exact(32).enumerate() {
        let scale = nearest(id * scales[i], -32.0, 31.0);
        put_nibbles(x, inverse(d * scale), &mut block[8 + 16 * i..][..16]);
        let six = (scale + 32.0) as u8;
        block[4 + i / 2] |= (six & 15) << (i % 2 * 4);
        high |= u16::from(six >> 4) << (2 * i);
    }
    block[2..4].copy_from_slice(&high.to_le_bytes());
}

//! Q1_0 and Q2_0: one and two bits with a scale.
//!
//! Q1_0: 128 elements in 18 bytes, 1.125 bits each: `x = d` or `-d`.
//!
//! | bytes | field |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..18 | a bit per element, set for `d`, low bits first |
//!
//! Q2_0: 64 elements in 18 bytes, 2.25 bits each: `x = d * (q - 1)`.
//!
//! | bytes | field |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..18 | `q`, 2 bits, low bits first |

use super::codebook::Codes;
use super::float::{inverse, largest, round, scale_at, set_scale};

pub(super) fn unpack_1(block: &[u8], out: &mut Codes) {
    out.d[..8].fill(scale_at(block, 0));
    for (i, code) in out.code[..128].iter_mut().enumerate() {
        *code = block[2 + i / 8] >> (i % 8) & 1;
    }
}

pub(super) fn unpack_2(block: &[u8], out: &mut Codes) {
    out.d[..4].fill(scale_at(block, 0));
    for (i, code) in out.code[..64].iter_mut().enumerate() {
        *code = block[2 + i / 4] >> (i % 4 * 2) & 3;
    }
}

/// The scale is the mean magnitude.
pub(super) fn quantise_1(x: &[f32; 128], block: &mut [u8; 18]) {
    set_scale(block, 0, x.iter().fold(0.0, |sum, x| sum + x.abs()) / 128.0);
    block[2..].fill(0);
    for (i, &x) in x.iter().enumerate() {
        block[2 + i / 8] |= u8::from(x >= 0.0) << (i % 8);
    }
}

/// The scale is the largest magnitude.
pub(super) fn quantise_2(x: &[f32; 64], block: &mut [u8; 18]) {
    let d = largest(x).abs();
    let id = inverse(d);
    set_scale(block, 0, d);
    block[2..].fill(0);
    for (i, &x) in x.iter().enumerate() {
        block[2 + i / 4] |= ((round(x * id) + 1).clamp(0, 3) as u8) << (i % 4 * 2);
    }
}

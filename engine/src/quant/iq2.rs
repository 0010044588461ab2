//! IQ2_XXS, IQ2_XS and IQ2_S: 256 elements of 2.06, 2.31 and 2.56 bits: `x = d/8 * (2 * scale + 1) * ±{8, 25, 43}`.
//!
//! Eight neighbours are a point of a grid ([`super::grids`]), each with a sign. In XXS and XS a point's signs have 7 bits:
//! the number of minus signs is even, so the eighth follows.
//!
//! | IQ2_XXS, of 66 bytes | |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..66 | per 32 elements: 4 indices of 8 bits; 4 x 7 bits of signs and, on top, a scale of 4 bits |
//!
//! | IQ2_XS, of 74 | |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..66 | per 8 elements 16 bits: index 9, signs 7 |
//! | 66..74 | scales of 4 bits, one per 16 elements, low half first |
//!
//! | IQ2_S, of 82 | |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..34 | low 8 bits of the indices |
//! | 34..66 | signs, a byte per 8 elements |
//! | 66..74 | high 2 bits of the indices, a byte per 32 elements, low bits first |
//! | 74..82 | scales of 4 bits, one per 16 elements, low half first |

use super::codebook::{Codes, u16_at, u32_at};
use super::float::scale_at;
use super::grids::{IQ2_S, IQ2_XS, IQ2_XXS};

/// All eight signs, from seven.
pub(super) fn even_signs(seven: u32) -> u8 {
    let seven = seven as u8 & 127;
    seven | (seven.count_ones() as u8 & 1) << 7
}

/// The codes of eight elements: a level in the low bits, the sign in bit 3.
fn put(point: u16, signs: u8, out: &mut [u8]) {
    for (j, out) in out.iter_mut().enumerate() {
        *out = (point >> (2 * j) & 3) as u8 | (signs >> j & 1) << 3;
    }
}

fn odd(scale: u8) -> i8 {
    2 * (scale & 15) as i8 + 1
}

pub(super) fn unpack_xxs(block: &[u8], out: &mut Codes) {
    out.d.fill(scale_at(block, 0) * 0.125);
    for (i, code) in out.code.chunks_exact_mut(32).enumerate() {
        let at = 2 + 8 * i;
        let signs = u32_at(block, at + 4);
        for (l, code) in code.chunks_exact_mut(8).enumerate() {
            put(IQ2_XXS[usize::from(block[at + l])], even_signs(signs >> (7 * l)), code);
        }
        out.scale[2 * i..][..2].fill(odd((signs >> 28) as u8));
    }
}

pub(super) fn unpack_xs(block: &[u8], out: &mut Codes) {
    out.d.fill(scale_at(block, 0) * 0.125);
    for (i, code) in out.code.chunks_exact_mut(8).enumerate() {
        let index = u16_at(block, 2 + 2 * i);
        put(IQ2_XS[usize::from(index & 511)], even_signs(u32::from(index >> 9)), code);
    }
    scales(&block[66..], out);
}

pub(super) fn unpack_s(block: &[u8], out: &mut Codes) {
    out.d.fill(scale_at(block, 0) * 0.125);
    for (i, code) in out.code.chunks_exact_mut(8).enumerate() {
        let high = usize::from(block[66 + i / 4] >> (i % 4 * 2) & 3);
        put(IQ2_S[usize::from(block[2 + i]) | high << 8], block[34 + i], code);
    }
    scales(&block[74..], out);
}

fn scales(nibbles: &[u8], out: &mut Codes) {
    for (s, scale) in out.scale.iter_mut().enumerate() {
        *scale = odd(nibbles[s / 2] >> (s % 2 * 4));
    }
}

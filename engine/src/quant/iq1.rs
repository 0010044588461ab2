//! IQ1_S and IQ1_M: 256 elements of 1.56 and 1.75 bits: `x = d/8 * (2 * scale + 1) * (8 * {-1, 0, 1} ± 1)`.
//!
//! Eight neighbours are a point of a grid of 2048 ([`super::grids`]).
//!
//! | IQ1_S, of 50 bytes | |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..34 | low 8 bits of the indices |
//! | 34..50 | per 32 elements 16 bits: 4 x 3 high bits of the indices, scale 3, and 1 for `- 1` |
//!
//! | IQ1_M, of 56 | |
//! |---|---|
//! | 0..32 | low 8 bits of the indices |
//! | 32..48 | per 8 elements 4 bits: 3 high bits of the index, and 1 for `- 1` |
//! | 48..56 | per 64 elements 16 bits: 4 scales of 3 bits, one per 16 elements, and, on top, 4 bits of `d`, f16 |

use super::codebook::{Codes, u16_at};
use super::float::scale_at;
use super::grids::IQ1;

/// The codes of eight elements: a level in the low bits, in bit 2 which way the eighth goes.
fn put(point: u16, minus: bool, out: &mut [u8]) {
    for (j, out) in out.iter_mut().enumerate() {
        *out = (point >> (2 * j) & 3) as u8 | u8::from(minus) << 2;
    }
}

pub(super) fn unpack_s(block: &[u8], out: &mut Codes) {
    out.d.fill(scale_at(block, 0) * 0.125);
    for (i, code) in out.code.chunks_exact_mut(8).enumerate() {
        let high = u16_at(block, 34 + i / 4 * 2);
        let index = usize::from(block[2 + i]) | usize::from(high >> (i % 4 * 3) & 7) << 8;
        put(IQ1[index], high & 0x8000 != 0, code);
    }
    for (s, scale) in out.scale.iter_mut().enumerate() {
        *scale = 2 * (u16_at(block, 34 + s / 2 * 2) >> 12 & 7) as i8 + 1;
    }
}

pub(super) fn unpack_m(block: &[u8], out: &mut Codes) {
    out.d.fill(scale_at(&scale_of_m(block), 0) * 0.125);
    for (i, code) in out.code.chunks_exact_mut(8).enumerate() {
        let high = block[32 + i / 2] >> (i % 2 * 4);
        put(IQ1[usize::from(block[i]) | usize::from(high & 7) << 8], high & 8 != 0, code);
    }
    for (s, scale) in out.scale.iter_mut().enumerate() {
        *scale = 2 * (u16_at(block, 48 + s / 4 * 2) >> (s % 4 * 3) & 7) as i8 + 1;
    }
}

/// The f16 whose four parts lie on top of IQ1_M's scales.
pub(super) fn scale_of_m(block: &[u8]) -> [u8; 2] {
    (0..4).fold(0, |d, i| d | (u16_at(block, 48 + 2 * i) >> 12) << (4 * i)).to_le_bytes()
}

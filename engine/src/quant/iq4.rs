//! IQ4_NL and IQ4_XS: 4 bits stand for 16 steps of unequal size, [`super::codebook::IQ4`].
//!
//! IQ4_NL: 32 elements in 18 bytes, 4.5 bits each: `x = d * step`.
//!
//! | bytes | field |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..18 | codes: low half of byte j is element j, high half is element j + 16 |
//!
//! IQ4_XS: 256 elements in 136 bytes, 4.25 bits each: `x = d * (scale - 32) * step`.
//!
//! | bytes | field |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..4 | high 2 bits of the 8 scales |
//! | 4..8 | their low 4 bits, low half first |
//! | 8..136 | codes: of each 16 bytes, the low halves are 16 elements and the high halves the next |

use super::codebook::{Codes, u16_at};
use super::float::scale_at;

/// Codes in halves of bytes: 16 low ones, then 16 high ones.
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
        let scale = block[4 + i / 2] >> (i % 2 * 4) & 15 | (high >> (2 * i) & 3) as u8 * 16;
        out.scale[2 * i..][..2].fill(scale as i8 - 32);
    }
}

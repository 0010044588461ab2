//! Q3_K: 256 elements in 110 bytes, 3.4 bits each: 16 sub-blocks of 16, `x = (d * (scale - 32)) * (q - 4)`.
//!
//! | bytes | field |
//! |---|---|
//! | 0..32 | bit 2 of `q`: bit b of byte l is element 32 b + l |
//! | 32..96 | low 2 bits of `q`: of each 32 bytes (128 elements), byte l has elements l, l + 32, l + 64, l + 96 |
//! | 96..108 | scales of 6 bits: bytes 0..8 the low 4 bits (low half: scale i, high half: scale i + 8); bytes 8..12 the high 2 bits of scales i, i + 4, i + 8, i + 12 |
//! | 108..110 | `d`, f16 |

use super::codebook::Codes;
use super::float::scale_at;

pub(super) fn unpack(block: &[u8], out: &mut Codes) {
    out.d.fill(scale_at(block, 108));
    for (e, code) in out.code.iter_mut().enumerate() {
        let low = block[32 + e / 128 * 32 + e % 32] >> (e % 128 / 32 * 2) & 3;
        *code = low | (block[e % 32] >> (e / 32) & 1) << 2;
    }
    let packed = &block[96..108];
    for (s, scale) in out.scale.iter_mut().enumerate() {
        let low = packed[s % 8] >> (s / 8 * 4) & 15;
        let high = packed[8 + s % 4] >> (s / 4 * 2) & 3;
        *scale = (low | high << 4) as i8 - 32;
    }
}

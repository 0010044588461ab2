//! Q2_K: 256 elements in 84 bytes, 2.6 bits each: 16 sub-blocks of 16, `x = (d * scale) * q - dmin * min`.
//!
//! | bytes | field |
//! |---|---|
//! | 0..16 | scale (low half) and minimum (high half) of each sub-block |
//! | 16..80 | `q`, 2 bits: of each 32 bytes (128 elements), byte l has elements l, l + 32, l + 64, l + 96 |
//! | 80..82 | `d`, f16 |
//! | 82..84 | `dmin`, f16 |

use super::codebook::Codes;
use super::float::scale_at;

pub(super) fn unpack(block: &[u8], out: &mut Codes) {
    out.d.fill(scale_at(block, 80));
    out.dmin = scale_at(block, 82);
    for s in 0..16 {
        (out.scale[s], out.min[s]) = ((block[s] & 15) as i8, block[s] >> 4);
    }
    for (e, code) in out.code.iter_mut().enumerate() {
        *code = block[16 + e / 128 * 32 + e % 32] >> (e % 128 / 32 * 2) & 3;
    }
}

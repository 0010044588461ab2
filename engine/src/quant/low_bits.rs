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
use super::float::scale_at;

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

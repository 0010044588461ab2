//! MXFP4 and NVFP4: 4-bit floats with a scale. The codes stand for twice their values, 0, 1, 2, 3, 4, 6, 8, 12 and the
//! same with a minus, so scales are halved.
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

use super::codebook::Codes;
use super::iq4::nibbles;

/// The largest exponent of MXFP4 for which 12 times the scale is finite.
pub(super) const MAX_EXPONENT: u8 = 252;

/// `2^(e - 128)`; the first two are subnormal.
pub(super) fn power(e: u8) -> f32 {
    f32::from_bits(if e < 2 { 0x20_0000 << e } else { u32::from(e - 1) << 23 })
}

/// Half the value of an unsigned 8-bit float.
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

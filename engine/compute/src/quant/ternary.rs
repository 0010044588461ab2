//! TQ1_0 and TQ2_0: 256 elements that are -1, 0 or 1 times a scale: `x = d * (q - 1)`.
//!
//! TQ1_0: 54 bytes, 1.69 bits each. A byte holds five digits to base 3 as a fraction of 256, rounded up: the first
//! digit is the whole part of three times that fraction, and so on.
//!
//! | bytes | field |
//! |---|---|
//! | 0..32 | digit n of byte m is element 32 n + m |
//! | 32..48 | digit n of byte m is element 160 + 16 n + m |
//! | 48..52 | four digits: digit n of byte m is element 240 + 4 n + m |
//! | 52..54 | `d`, f16 |
//!
//! TQ2_0: 66 bytes, 2.06 bits each.
//!
//! | bytes | field |
//! |---|---|
//! | 0..64 | `q`, 2 bits: of each 32 bytes (128 elements), byte l has elements l, l + 32, l + 64, l + 96 |
//! | 64..66 | `d`, f16 |

use super::codebook::Codes;
use super::float::{inverse, largest, round, scale_at, set_scale};

/// First byte, number of bytes, first element, digits per byte.
pub(super) const PARTS: [(usize, usize, usize, usize); 3] = [(0, 32, 0, 5), (32, 16, 160, 5), (48, 4, 240, 4)];

pub(super) fn unpack_1(block: &[u8], out: &mut Codes) {
    out.d.fill(scale_at(block, 52));
    for (from, bytes, first, digits) in PARTS {
        for m in 0..bytes {
            let mut fraction = block[from + m];
            for n in 0..digits {
                out.code[first + n * bytes + m] = ((u16::from(fraction) * 3) >> 8) as u8;
                fraction = fraction.wrapping_mul(3);
            }
        }
    }
}

pub(super) fn unpack_2(block: &[u8], out: &mut Codes) {
    out.d.fill(scale_at(block, 64));
    for (e, code) in out.code.iter_mut().enumerate() {
        *code = block[e / 128 * 32 + e % 32] >> (e % 128 / 32 * 2) & 3;
    }
}

/// Stores the largest magnitude as the scale and returns its inverse.
fn scale(x: &[f32; 256], block: &mut [u8], at: usize) -> f32 {
    let d = largest(x).abs();
    set_scale(block, at, d);
    inverse(d)
}

pub(super) fn quantise_1(x: &[f32; 256], block: &mut [u8; 54]) {
    let id = scale(x, block, 52);
    for (from, bytes, first, digits) in PARTS {
        for m in 0..bytes {
            let digit = |n: usize| if n < digits { round(x[first + n * bytes + m] * id) + 1 } else { 0 };
            let number = (0..5).fold(0, |number, n| number * 3 + digit(n) as u32);
            block[from + m] = (number * 256).div_ceil(243) as u8;
        }
    }
}

pub(super) fn quantise_2(x: &[f32; 256], block: &mut [u8; 66]) {
    let id = scale(x, block, 64);
    block[..64].fill(0);
    for (e, x) in x.iter().enumerate() {
        block[e / 128 * 32 + e % 32] |= ((round(x * id) + 1) as u8 & 3) << (e % 128 / 32 * 2);
    }
}

//! Q4_0: 32 elements in 18 bytes, 4.5 bits each: `x = d * (q - 8)`.
//!
//! | bytes | field |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..18 | `q`, 4 bits: low half of byte j is element j, high half is element j + 16 |

use super::fit;
use super::float::{inverse, largest, scale_at, set_scale};

/// Elements of a block.
pub const LEN: usize = 32;
/// Bytes of a block.
pub const BYTES: usize = 2 + LEN / 2;
const _: () = assert!(super::Dtype::Q4_0.block_len() == LEN as u64 && super::Dtype::Q4_0.block_bytes() == BYTES as u64);

/// Dequantises a block.
pub fn dequantise(block: &[u8; BYTES], out: &mut [f32; LEN]) {
    let d = scale_at(block, 0);
    for (j, &q) in block[2..].iter().enumerate() {
        out[j] = f32::from((q & 15) as i8 - 8) * d;
        out[j + 16] = f32::from((q >> 4) as i8 - 8) * d;
    }
}

/// Quantises a block: the element of largest magnitude becomes q = 0, which stands for -8.
pub fn quantise(x: &[f32; LEN], block: &mut [u8; BYTES]) {
    let d = largest(x) / -8.0;
    let id = inverse(d);
    set_scale(block, 0, d);
    let q = |x: f32| ((x * id + 8.5) as u8).min(15);
    for j in 0..16 {
        block[2 + j] = q(x[j]) | q(x[j + 16]) << 4;
    }
}

/// Quantises with the scale of least squared error, elements weighted by `w`.
pub(super) fn quantise_weighted(x: &[f32; LEN], w: &[f32; LEN], block: &mut [u8; BYTES]) {
    let ([d], q) = fit::signed::<1, LEN>(&x.map(|x| [x]), &w.map(|w| [w]), 8.0);
    set_scale(block, 0, d);
    for j in 0..16 {
        block[2 + j] = (q[j][0] + 8.0) as u8 | ((q[j + 16][0] + 8.0) as u8) << 4;
    }
}

//! Q5_0: 32 elements in 22 bytes, 5.5 bits each: `x = d * (q - 16)`.
//!
//! | bytes | field |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..6 | bit 4 of `q`: bit j of this u32 is element j |
//! | 6..22 | low 4 bits of `q`: low half of byte j is element j, high half is element j + 16 |

use super::fit;
use super::float::{inverse, largest, scale_at, set_scale};

/// Elements of a block.
pub const LEN: usize = 32;
/// Bytes of a block.
pub const BYTES: usize = 2 + 4 + LEN / 2;
const _: () = assert!(super::Dtype::Q5_0.block_len() == LEN as u64 && super::Dtype::Q5_0.block_bytes() == BYTES as u64);

/// Dequantises a block.
pub fn dequantise(block: &[u8; BYTES], out: &mut [f32; LEN]) {
    let d = scale_at(block, 0);
    let q = unpack_q(&block[2..]);
    for (out, q) in out.iter_mut().zip(q) {
        *out = f32::from(q as i8 - 16) * d;
    }
}

/// Quantises a block: the element of largest magnitude becomes q = 0, which stands for -16.
pub fn quantise(x: &[f32; LEN], block: &mut [u8; BYTES]) {
    let d = largest(x) / -16.0;
    let id = inverse(d);
    set_scale(block, 0, d);
    pack_q(x.map(|x| ((x * id + 16.5) as u8).min(31)), &mut block[2..]);
}

/// Unpacks the 5-bit quants from the last 20 bytes of a block.
pub(super) fn unpack_q(bytes: &[u8]) -> [u8; LEN] {
    let high = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    core::array::from_fn(|j| {
        let low = if j < 16 { bytes[4 + j] & 15 } else { bytes[4 + j - 16] >> 4 };
        low | ((high >> j) as u8 & 1) << 4
    })
}

/// The inverse of [`unpack_q`].
pub(super) fn pack_q(q: [u8; LEN], bytes: &mut [u8]) {
    let high = q.iter().enumerate().fold(0, |high, (j, &q)| high | u32::from(q >> 4) << j);
    bytes[..4].copy_from_slice(&high.to_le_bytes());
    for j in 0..16 {
        bytes[4 + j] = q[j] & 15 | q[j + 16] << 4;
    }
}

/// Quantises with the scale of least squared error, elements weighted by `w`.
pub(super) fn quantise_weighted(x: &[f32; LEN], w: &[f32; LEN], block: &mut [u8; BYTES]) {
    let ([d], q) = fit::signed::<1, LEN>(&x.map(|x| [x]), &w.map(|w| [w]), 16.0);
    set_scale(block, 0, d);
    pack_q(q.map(|q| (q[0] + 16.0) as u8), &mut block[2..]);
}

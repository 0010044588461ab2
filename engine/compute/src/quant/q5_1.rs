//! Q5_1: 32 elements in 24 bytes, 6 bits each: `x = d * q + m`.
//!
//! | bytes | field |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..4 | `m`, f16 |
//! | 4..8 | bit 4 of `q`: bit j of this u32 is element j |
//! | 8..24 | low 4 bits of `q`: low half of byte j is element j, high half is element j + 16 |

use super::fit;
use super::float::{inverse, min_max, scale_at, set_scale};
use super::q5_0::{pack_q, unpack_q};

/// Elements of a block.
pub const LEN: usize = 32;
/// Bytes of a block.
pub const BYTES: usize = 2 + 2 + 4 + LEN / 2;
const _: () = assert!(super::Dtype::Q5_1.block_len() == LEN as u64 && super::Dtype::Q5_1.block_bytes() == BYTES as u64);

/// Dequantises a block.
pub fn dequantise(block: &[u8; BYTES], out: &mut [f32; LEN]) {
    let (d, m) = (scale_at(block, 0), scale_at(block, 2));
    let q = unpack_q(&block[4..]);
    for (out, q) in out.iter_mut().zip(q) {
        *out = f32::from(q) * d + m;
    }
}

/// Quantises a block: the range from the smallest to the largest element in 31 steps.
pub fn quantise(x: &[f32; LEN], block: &mut [u8; BYTES]) {
    let (min, max) = min_max(x);
    let d = (max - min) / 31.0;
    let id = inverse(d);
    set_scale(block, 0, d);
    set_scale(block, 2, min);
    pack_q(x.map(|x| (((x - min) * id + 0.5) as u8).min(31)), &mut block[4..]);
}

/// Quantises with the scale and minimum of least squared error, elements weighted by `w`.
pub(super) fn quantise_weighted(x: &[f32; LEN], w: &[f32; LEN], block: &mut [u8; BYTES]) {
    let ([d], [m], q) = fit::with_min::<1, LEN>(&x.map(|x| [x]), &w.map(|w| [w]), &fit::weighted(31));
    set_scale(block, 0, d);
    set_scale(block, 2, -m);
    pack_q(q.map(|q| q[0] as u8), &mut block[4..]);
}

//! Q4_K: 256 elements in 144 bytes, 4.5 bits each: 8 sub-blocks of 32, `x = (d * scale) * q - dmin * min`.
//!
//! | bytes | field |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..4 | `dmin`, f16 |
//! | 4..16 | 8 scales and 8 minima of 6 bits: [`scale_min`] |
//! | 16..144 | `q`, 4 bits: of each 32 bytes, the low halves are one sub-block and the high halves the next |

use super::fit::ScaleSearch;
use super::kquant;

/// Elements of a block.
pub const LEN: usize = kquant::LEN;
/// Bytes of a block.
pub const BYTES: usize = 2 + 2 + 12 + LEN / 2;
const _: () = assert!(super::Dtype::Q4_K.block_len() == LEN as u64 && super::Dtype::Q4_K.block_bytes() == BYTES as u64);

/// Scale and minimum of sub-block `j` of 8, 6 bits each.
pub fn scale_min(packed: &[u8; 12], j: usize) -> (u8, u8) {
    kquant::scale_min(packed, j)
}

/// Dequantises a block.
pub fn dequantise(block: &[u8; BYTES], out: &mut [f32; LEN]) {
    let (head, qs) = block.split_at(16);
    let scales = kquant::sub_scales(head);
    let (qs, out) = (qs.as_chunks::<32>().0, out.as_chunks_mut::<64>().0);
    for (pair, (qs, out)) in qs.iter().zip(out).enumerate() {
        let ((d1, m1), (d2, m2)) = (scales[2 * pair], scales[2 * pair + 1]);
        for (l, &q) in qs.iter().enumerate() {
            out[l] = d1 * f32::from(q & 15) - m1;
            out[l + 32] = d2 * f32::from(q >> 4) - m2;
        }
    }
}

/// Fits a scale and a minimum per sub-block by weighted least squares, rounds them, and requantises.
pub fn quantise(x: &[f32; LEN], importance: Option<&[f32; LEN]>, block: &mut [u8; BYTES]) {
    const SEARCH: ScaleSearch = ScaleSearch { max_q: 15, from: -1.0, step: 0.1, n_steps: 20, absolute: false };
    let (head, qs) = block.split_at_mut(16);
    let q = kquant::quantise_with_mins(x, importance, head, &SEARCH);
    for (qs, q) in qs.as_chunks_mut::<32>().0.iter_mut().zip(q.as_chunks::<64>().0) {
        for (l, out) in qs.iter_mut().enumerate() {
            *out = q[l] | q[l + 32] << 4;
        }
    }
}

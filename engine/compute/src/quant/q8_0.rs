//! Q8_0: 32 elements in 34 bytes, 8.5 bits each: `x = d * q`.
//!
//! | bytes | field |
//! |---|---|
//! | 0..2 | `d`, f16 |
//! | 2..34 | `q`, i8 |

use super::float::{inverse, largest, round, scale_at, set_scale};

/// Elements of a block.
pub const LEN: usize = 32;
/// Bytes of a block.
pub const BYTES: usize = 2 + LEN;
const _: () = assert!(super::Dtype::Q8_0.block_len() == LEN as u64 && super::Dtype::Q8_0.block_bytes() == BYTES as u64);

/// Dequantises a block.
pub fn dequantise(block: &[u8; BYTES], out: &mut [f32; LEN]) {
    let d = scale_at(block, 0);
    for (out, &q) in out.iter_mut().zip(&block[2..]) {
        *out = f32::from(q as i8) * d;
    }
}

/// Quantises a block: the largest magnitude becomes 127; halves round away from zero.
pub fn quantise(x: &[f32; LEN], block: &mut [u8; BYTES]) {
    let d = largest(x).abs() / 127.0;
    let id = inverse(d);
    set_scale(block, 0, d);
    for (q, &x) in block[2..].iter_mut().zip(x) {
        *q = round(x * id) as u8;
    }
}

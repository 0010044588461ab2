//! Compressed keys (DeepSeek-V4): one for each block of `ratio` positions, from values and gates of the positions of the
//! block, and of the block before if blocks overlap.
//!
//! ```text
//! m = max g[t];  e[t] = exp(g[t] - m);  out = sum e[t] * v[t] * (1 / sum e[t])        each element by itself, t ascending
//! ```
//!
//! Values and gates are [exact](KvHeads::exact) keys of a layer in KV pages: heads 0.. are the values, the others the gates.
//! With overlap the first head of both is for the block that follows the position's own, the second for its own.
//!
//! [`KvHeads::exact`]: super::KvHeads::exact

use core::ops::Range;

use super::super::exp::exp;
use super::super::norm::max;
use super::{KvLayer, KvMemory, PAGE, Slot};

/// Most positions that a compressed key is made of.
const MAX_POSITIONS: usize = 256;

/// Which positions a compressed key is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Compressor {
    /// Positions of a block.
    pub ratio: usize,
    /// Whether the block before takes part.
    pub overlaps: bool,
}

impl Compressor {
    /// Heads of the layer with values and gates.
    pub const fn heads(self) -> usize {
        if self.overlaps { 4 } else { 2 }
    }

    /// The first position of the block that ends at `last`.
    pub fn start(self, last: usize) -> usize {
        (last + 1).saturating_sub(self.ratio)
    }

    /// Computes the key of the block that ends at position `last` of a sequence with these pages.
    ///
    /// # Panics
    /// If the layer is not one of such values and gates, or a block has more positions than the largest supported.
    pub fn compress(self, kv: &KvLayer, memory: &KvMemory, pages: &[u32], last: usize, out: &mut [f32]) {
        assert!(kv.heads.n == self.heads() && kv.heads.key_dim == out.len());
        let start = self.start(last);
        let first = if self.overlaps { start.saturating_sub(self.ratio) } else { start };
        let n = last + 1 - first;
        assert!(n <= MAX_POSITIONS, "a block of {n} positions");
        let mut tokens: [(&[u8], &[u8]); MAX_POSITIONS] = [(&[], &[]); MAX_POSITIONS];
        for (pos, token) in (first..=last).zip(&mut tokens) {
            let slot = Slot { page: pages[pos / PAGE], token: (pos % PAGE) as u32 };
            let head = usize::from(self.overlaps && pos >= start);
            let read = |head| kv.exact_key(memory, head, slot);
            *token = (read(head), read(head + self.heads() / 2));
        }
        let tokens = &tokens[..n];
        for (d, out) in out.iter_mut().enumerate() {
            let read = |key: &[u8]| {
                let b = &key[d * PAGE * 4..][..4];
                f32::from_le_bytes([b[0], b[1], b[2], b[3]])
            };
            let top = tokens.iter().fold(f32::NEG_INFINITY, |m, (_, gate)| max(m, read(gate)));
            let (mut sum, mut weights) = (0.0, 0.0);
            for (value, gate) in tokens {
                let weight = exp(read(gate) - top);
                sum += weight * read(value);
                weights += weight;
            }
            *out = sum * (1.0 / weights);
        }
    }
}

/// Computes the mean of the keys of consecutive positions of a sequence with these pages: their sum, ascending, times the
/// reciprocal of their number.
///
/// # Panics
/// If the layer has no [exact](super::KvHeads::exact) keys of one head, or a page is missing.
pub fn mean_key(kv: &KvLayer, memory: &KvMemory, pages: &[u32], positions: Range<usize>, out: &mut [f32]) {
    assert!(kv.heads.n == 1 && kv.heads.key_dim == out.len());
    let scale = 1.0 / positions.len() as f32;
    for (i, pos) in positions.enumerate() {
        let key = kv.exact_key(memory, 0, Slot { page: pages[pos / PAGE], token: (pos % PAGE) as u32 });
        for (d, out) in out.iter_mut().enumerate() {
            let b = &key[d * PAGE * 4..][..4];
            let x = f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
            *out = if i == 0 { x } else { *out + x };
        }
    }
    out.iter_mut().for_each(|x| *x *= scale);
}

#[cfg(test)]
mod tests {
    use alloc::vec;
    use alloc::vec::Vec;

    use super::super::{KvHeads, KvLayout, KvRows, KvType, write_kv};
    use super::*;
    use crate::kernels::Cpu;
    use crate::pool::Inline;

    /// Values that no KV type but f32 could hold.
    fn value(pos: usize, i: usize) -> f32 {
        ((pos * 37 + i * 11) % 101) as f32 / 23.0 - 2.0
    }

    #[test]
    fn equals_a_softmax_in_f64_for_every_storage_type() {
        for (ratio, overlaps) in [(4, true), (16, false), (128, false)] {
            let (c, dim, n) = (Compressor { ratio, overlaps }, 24, 3 * ratio);
            for kv_type in KvType::ALL {
                let layout = KvLayout::new(kv_type, [KvHeads::separate(1, 8, 8), KvHeads::exact(c.heads(), dim)]);
                let pages: Vec<u32> = (0..n.div_ceil(PAGE) as u32).rev().collect();
                let mut memory = KvMemory::zeroed(&layout, pages.len()).expect("memory");
                let (kv, stride) = (layout.layers()[1], c.heads() * dim);
                let x: Vec<f32> = (0..n).flat_map(|pos| (0..stride).map(move |i| value(pos, i))).collect();
                let slots: Vec<Slot> =
                    (0..n).map(|pos| Slot { page: pages[pos / PAGE], token: (pos % PAGE) as u32 }).collect();
                let rows = KvRows { x: &x, stride, k_at: 0, v_at: 0, slots: &slots };
                write_kv(Cpu::SCALAR, &Inline, &kv, rows, &mut memory);
                for last in (0..n).filter(|pos| (pos + 1).is_multiple_of(c.ratio)) {
                    let mut out = vec![0.0; dim];
                    c.compress(&kv, &memory, &pages, last, &mut out);
                    let (start, half) = (last + 1 - ratio, c.heads() / 2);
                    let first = if overlaps { start.saturating_sub(ratio) } else { start };
                    for (d, out) in out.iter().enumerate() {
                        let at = |pos: usize, gate: usize| {
                            let head = usize::from(overlaps && pos >= start) + gate * half;
                            f64::from(value(pos, head * dim + d))
                        };
                        let weights = (first..=last).map(|pos| at(pos, 1).exp()).sum::<f64>();
                        let want = (first..=last).map(|pos| at(pos, 1).exp() * at(pos, 0)).sum::<f64>() / weights;
                        assert!((f64::from(*out) - want).abs() < 1e-5, "{out} {want} at {last}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_mean_equals_that_in_f64_for_every_storage_type() {
        let (dim, n) = (20, 3 * PAGE);
        for kv_type in KvType::ALL {
            let layout = KvLayout::new(kv_type, [KvHeads::separate(1, 8, 8), KvHeads::exact(1, dim)]);
            let pages: Vec<u32> = (0..n.div_ceil(PAGE) as u32).rev().collect();
            let mut memory = KvMemory::zeroed(&layout, pages.len()).expect("memory");
            let x: Vec<f32> = (0..n).flat_map(|pos| (0..dim).map(move |i| value(pos, i))).collect();
            let slots: Vec<Slot> =
                (0..n).map(|pos| Slot { page: pages[pos / PAGE], token: (pos % PAGE) as u32 }).collect();
            let rows = KvRows { x: &x, stride: dim, k_at: 0, v_at: 0, slots: &slots };
            let kv = layout.layers()[1];
            write_kv(Cpu::SCALAR, &Inline, &kv, rows, &mut memory);
            for (start, len) in [(0, 1), (0, 4), (13, 7), (16, 32), (47, 1)] {
                let mut out = vec![0.0; dim];
                mean_key(&kv, &memory, &pages, start..start + len, &mut out);
                for (d, out) in out.iter().enumerate() {
                    let want = (start..start + len).map(|pos| f64::from(value(pos, d))).sum::<f64>() / len as f64;
                    assert!((f64::from(*out) - want).abs() < 1e-6, "{out} {want} of {len} from {start} on");
                }
            }
        }
    }
}

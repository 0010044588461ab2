//! Values of multi-head latent attention: the beginnings of the keys. Keys are stored by dimension, so their values are
//! transposed before they are weighted, a few pages at a time for all columns.
//!
//! ```text
//! v[t][d] = k[t][d]                                 f32 and f16
//! v[t][d] = f16(q8[t][d] * scale[t])                int8
//! ```
#![allow(unsafe_code)]

use core::ops::Range;

use super::super::decoded::f16_to_f32;
use super::super::f32_tile::{AsF16, AsF32, Elem};
use super::super::norm::VIRTUAL_LANES;
use super::super::simd::Simd;
use super::block::{F16, F32};
use super::kv::{F16_MAX, clamp};
use super::lanes::LaneKernel;
use super::{KvLayer, PAGE, WIDE};

/// The scalar definition of an int8 value.
pub(super) fn int8_value(q: i8, scale: f32) -> f32 {
    f16_to_f32(half::f16::from_f32_const(clamp(f32::from(q) * scale, F16_MAX)).to_bits())
}

/// Index of the byte of token `t` and dimension `d` in int8 keys.
pub(super) fn int8_at(d: usize, t: usize) -> usize {
    (d / 4 * PAGE + t) * 4 + d % 4
}

/// Scales of the values in the int8 keys of a page.
pub(super) fn int8_scales<'k>(kv: &KvLayer, keys: &'k [u8]) -> &'k [u8] {
    &keys[kv.heads.key_dim.next_multiple_of(4) * PAGE..][..PAGE * 4]
}

/// 16 dimensions of the tokens of a page: (dimensions, tokens).
type Tile = [[f32; PAGE]; VIRTUAL_LANES];

impl<S: Simd, const KV: usize> LaneKernel<'_, S, KV> {
    /// Writes the values of `tokens` of the chunk, at most [`WIDE`] whole pages, to `wide`, (value_dim / 16, [`WIDE`], 16).
    #[inline(always)]
    pub(super) fn gather_latents(&self, chunk: usize, tokens: Range<usize>, wide: &mut [f32]) {
        let n = self.a.kv().heads.value_dim / VIRTUAL_LANES;
        for (i, page) in tokens.step_by(PAGE).enumerate() {
            let keys = self.a.keys(chunk, page);
            for (group, wide) in wide.chunks_exact_mut(WIDE * VIRTUAL_LANES).take(n).enumerate() {
                let mut tile = [[0.0; PAGE]; VIRTUAL_LANES];
                match self.kv_type() {
                    F32 => self.load_tile::<AsF32>(keys, group, &mut tile),
                    F16 => self.load_tile::<AsF16>(keys, group, &mut tile),
                    _ => self.load_int8_tile(keys, group, &mut tile),
                }
                let out = &mut wide[i * PAGE * VIRTUAL_LANES..][..PAGE * VIRTUAL_LANES];
                for (t, out) in out.chunks_exact_mut(VIRTUAL_LANES).enumerate() {
                    out.iter_mut().zip(&tile).for_each(|(out, row)| *out = row[t]);
                }
            }
        }
    }

    #[inline(always)]
    fn load_tile<E: Elem>(&self, keys: &[u8], group: usize, tile: &mut Tile) {
        let bytes = VIRTUAL_LANES * PAGE * E::BYTES;
        let keys = &keys[group * bytes..][..bytes];
        let tile = tile.as_flattened_mut();
        for i in (0..tile.len()).step_by(S::LANES) {
            // SAFETY: the tile has 16 x 16 elements, and so has the slice of keys.
            unsafe { self.s.store(tile.as_mut_ptr().add(i), E::load(self.s, keys.as_ptr().add(i * E::BYTES))) }
        }
    }

    /// Products of int8 and scale, rounded to f16.
    #[inline(always)]
    fn load_int8_tile(&self, keys: &[u8], group: usize, tile: &mut Tile) {
        let scales = int8_scales(self.a.kv(), keys);
        for (i, row) in tile.iter_mut().enumerate() {
            for (t, (x, scale)) in row.iter_mut().zip(scales.chunks_exact(4)).enumerate() {
                let scale = f32::from_le_bytes([scale[0], scale[1], scale[2], scale[3]]);
                let q = (keys[int8_at(group * VIRTUAL_LANES + i, t)] ^ 0x80) as i8;
                *x = clamp(f32::from(q) * scale, F16_MAX);
            }
        }
        let tile = tile.as_flattened_mut();
        let mut narrow = [0u16; VIRTUAL_LANES];
        for i in (0..tile.len()).step_by(S::LANES) {
            // SAFETY: the tile has 16 x 16 elements, and a vector has at most 16.
            unsafe {
                let at = tile.as_mut_ptr().add(i);
                self.s.store_f16(narrow.as_mut_ptr(), self.s.load(at));
                self.s.store(at, self.s.load_f16(narrow.as_ptr()));
            }
        }
    }
}

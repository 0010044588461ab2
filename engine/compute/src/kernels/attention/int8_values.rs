//! Int8 values: `v[t][d] = f16(v8[t][d] * d_v[t])`. They are converted before they are weighted, a few pages at a time for all
//! columns.
#![allow(unsafe_code)]

use core::ops::Range;

use super::super::norm::VIRTUAL_LANES;
use super::super::simd::Simd;
use super::kv::{F16_MAX, clamp};
use super::lanes::LaneKernel;
use super::{PAGE, WIDE};

/// Scales of the int8 values of a page.
pub(super) fn int8_value_scales(values: &[u8]) -> &[u8] {
    &values[values.len() - PAGE * 4..]
}

impl<S: Simd, const KV: usize> LaneKernel<'_, S, KV> {
    /// Writes the values of `tokens` of the chunk, at most [`WIDE`] whole pages, to `wide`, (value_dim / 16, [`WIDE`], 16).
    /// Values up to token `end` are read next.
    #[inline(always)]
    pub(super) fn gather_int8_values(&self, chunk: usize, tokens: Range<usize>, end: usize, wide: &mut [f32]) {
        const BYTES: usize = PAGE * VIRTUAL_LANES;
        for (i, page) in tokens.step_by(PAGE).enumerate() {
            let values = self.a.values(chunk, page);
            let prefetch = self.prefetch_after_values(chunk, page, end);
            let mut scales = [0.0; PAGE];
            for (scale, bytes) in scales.iter_mut().zip(int8_value_scales(values).chunks_exact(4)) {
                *scale = f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
            }
            let groups = values[..values.len() - PAGE * 4].chunks_exact(BYTES);
            for (g, (group, wide)) in groups.zip(wide.chunks_exact_mut(WIDE * VIRTUAL_LANES)).enumerate() {
                for line in (0..BYTES).step_by(64) {
                    self.s.prefetch_line(prefetch, g * BYTES + line);
                }
                let out = &mut wide[i * BYTES..][..BYTES];
                let rows = out.chunks_exact_mut(VIRTUAL_LANES).zip(group.chunks_exact(VIRTUAL_LANES));
                for ((out, q), scale) in rows.zip(scales) {
                    self.int8_row(q, scale, out);
                }
            }
        }
    }

    /// Products of 16 int8 numbers and a scale, rounded to f16.
    #[inline(always)]
    fn int8_row(&self, q: &[u8], scale: f32, out: &mut [f32]) {
        for (out, q) in out.iter_mut().zip(q) {
            *out = clamp(f32::from(*q as i8) * scale, F16_MAX);
        }
        let mut narrow = [0u16; VIRTUAL_LANES];
        for i in (0..out.len()).step_by(S::LANES) {
            // SAFETY: `out` has 16 elements, whole vectors, and a vector has at most 16.
            unsafe {
                let at = out.as_mut_ptr().add(i);
                self.s.store_f16(narrow.as_mut_ptr(), self.s.load(at));
                self.s.store(at, self.s.load_f16(narrow.as_ptr()));
            }
        }
    }
}

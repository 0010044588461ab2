//! Layout of keys and values in pages, and writing them.
#![allow(unsafe_code)]

use alloc::sync::Arc;
use core::ops::Range;

use super::super::act::{quantise, quantise_lanes};
use super::super::cpu::Op;
use super::super::norm::VIRTUAL_LANES;
use super::super::simd::Simd;
use super::super::{Cpu, tasks};
use super::KvMemory;
use crate::pool::{Inline, Pool};

/// Tokens of a page: the width of the score kernel.
pub const PAGE: usize = 16;
/// Largest supported head dimension.
pub const MAX_HEAD_DIM: usize = 512;
/// Largest supported key of multi-head latent attention: the largest value and 128 rotated elements.
pub const MAX_LATENT_DIM: usize = MAX_HEAD_DIM + 128;

/// Storage type of keys and values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "lowercase"))]
pub enum KvType {
    /// Keys and values f32.
    F32,
    /// Keys and values f16; larger values are clamped to its range.
    F16,
    /// Keys int8 with a scale per token and head, values f16.
    K8,
    /// Keys and values int8 with a scale per token and head each.
    Q8,
}

impl KvType {
    /// All types.
    pub const ALL: [KvType; 4] = [KvType::F32, KvType::F16, KvType::K8, KvType::Q8];

    /// The name that `--kv-type` takes.
    pub const fn name(self) -> &'static str {
        match self {
            KvType::F32 => "f32",
            KvType::F16 => "f16",
            KvType::K8 => "k8",
            KvType::Q8 => "q8",
        }
    }

    /// Whether values are f16, or int8 that becomes f16. Softmax weights are then rounded to 13 bits, and are 0 for scores `WEIGHT_LOW` below the
    /// maximum, so that products are exact.
    pub(super) fn has_f16_values(self) -> bool {
        self != KvType::F32
    }
}

/// Heads of the keys and values of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvHeads {
    /// Number of KV heads.
    pub n: usize,
    /// Elements of a key.
    pub key_dim: usize,
    /// Elements of a value.
    pub value_dim: usize,
    /// Whether the first elements of a key are its value, which is not stored again (multi-head latent attention).
    /// `value_dim` is then a multiple of 16.
    pub latent: bool,
    /// Whether keys are stored as f32 whatever the storage type is, so that what is read is what was written.
    pub exact: bool,
}

impl KvHeads {
    /// Heads whose keys and values are stored separately.
    pub const fn separate(n: usize, key_dim: usize, value_dim: usize) -> KvHeads {
        KvHeads { n, key_dim, value_dim, latent: false, exact: false }
    }

    /// One head whose value is the beginning of its key.
    pub const fn latent(key_dim: usize, value_dim: usize) -> KvHeads {
        KvHeads { n: 1, key_dim, value_dim, latent: true, exact: false }
    }

    /// Keys alone, stored as f32.
    pub const fn exact(n: usize, key_dim: usize) -> KvHeads {
        KvHeads { n, key_dim, value_dim: 0, latent: false, exact: true }
    }

    /// The parts of a key that have a scale each in int8: the whole key; or its value, and the rest.
    pub(super) fn scaled_parts(&self) -> ([Range<usize>; 2], usize) {
        let middle = if self.latent { self.value_dim } else { self.key_dim };
        ([0..middle, middle..self.key_dim], if middle < self.key_dim { 2 } else { 1 })
    }

    /// Whether the kernels have memory for heads of these dimensions.
    pub(super) fn is_supported(&self) -> bool {
        match self.latent {
            true => {
                let is_whole = self.value_dim.is_multiple_of(VIRTUAL_LANES) && self.value_dim <= self.key_dim;
                is_whole && self.value_dim <= MAX_HEAD_DIM && self.key_dim <= MAX_LATENT_DIM
            }
            false => self.key_dim.max(self.value_dim) <= MAX_HEAD_DIM,
        }
    }
}

/// Keys and values of a layer in a page: the keys of all heads, then the values. Keys of a head as `[key_dim][16 tokens]`
/// (int8: `[key_dim/4][16][4]` offset binary, then 16 f32 scales), values of a head as `[value_dim/16][16 tokens][16]` (int8: then
/// 16 f32 scales).
/// Latent keys are their values too; in int8 they have 16 scales of the values, then 16 of the rest if there is one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvLayer {
    /// The heads.
    pub heads: KvHeads,
    /// Storage type.
    pub kv_type: KvType,
    /// Offset in the page.
    start: usize,
}

impl KvLayer {
    pub(super) fn key_bytes(&self) -> usize {
        let dim = self.heads.key_dim;
        match self.kv_type {
            KvType::F32 => dim * PAGE * 4,
            KvType::F16 => dim * PAGE * 2,
            KvType::K8 | KvType::Q8 => dim.next_multiple_of(4) * PAGE + self.scales_bytes(),
        }
    }

    /// Bytes of the scales of int8 keys, which follow them.
    fn scales_bytes(&self) -> usize {
        self.heads.scaled_parts().1 * PAGE * 4
    }

    pub(super) fn value_dims(&self) -> usize {
        self.heads.value_dim.next_multiple_of(VIRTUAL_LANES)
    }

    /// Floats of the partial result of one chunk, token and query head.
    pub(super) fn part_len(&self) -> usize {
        2 + self.value_dims()
    }

    pub(super) fn value_bytes(&self) -> usize {
        match self.kv_type {
            _ if self.heads.latent || self.heads.value_dim == 0 => 0,
            KvType::F32 => self.value_dims() * PAGE * 4,
            KvType::Q8 => (self.value_dims() + 4) * PAGE,
            KvType::F16 | KvType::K8 => self.value_dims() * PAGE * 2,
        }
    }

    /// The keys of a head in a page of the memory, from token `token` of the page on: element d of its key is the f32 at
    /// byte `d * 4 * PAGE`. Only of [exact](KvHeads::exact) keys.
    ///
    /// # Panics
    /// If the page is not committed, or keys have another type.
    pub(super) fn exact_key<'m>(&self, memory: &'m KvMemory, head: usize, slot: Slot) -> &'m [u8] {
        assert!(self.kv_type == KvType::F32 && head < self.heads.n);
        &memory.page(slot.page)[self.key_at(head)..][..self.key_bytes()][slot.token as usize * 4..]
    }

    /// Bytes of the layer in a page.
    fn len_bytes(&self) -> usize {
        self.heads.n.saturating_mul(self.key_bytes() + self.value_bytes())
    }

    pub(super) fn key_at(&self, head: usize) -> usize {
        self.start + head * self.key_bytes()
    }

    pub(super) fn value_at(&self, head: usize) -> usize {
        self.start + self.heads.n * self.key_bytes() + head * self.value_bytes()
    }
}

/// Layout of keys and values in a page: those of one layer after another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvLayout {
    layers: Arc<[KvLayer]>,
    kv_type: KvType,
    len_bytes: usize,
}

impl KvLayout {
    /// The layout for layers with these heads.
    pub fn new(kv_type: KvType, heads: impl IntoIterator<Item = KvHeads>) -> KvLayout {
        let mut len_bytes = 0usize;
        let place = |heads: KvHeads| {
            let kv_type = if heads.exact { KvType::F32 } else { kv_type };
            let layer = KvLayer { heads, kv_type, start: len_bytes };
            len_bytes = len_bytes.saturating_add(layer.len_bytes());
            layer
        };
        let layers = heads.into_iter().map(place).collect();
        KvLayout { layers, kv_type, len_bytes }
    }

    /// The layout for batches that read keys and values of the layers only while these are computed, but for those
    /// `kept`: the others have the same bytes in turn.
    pub fn in_turn(&self, kept: impl Fn(usize) -> bool) -> KvLayout {
        let (mut layers, mut len_bytes) = (self.layers.to_vec(), 0usize);
        for (_, layer) in layers.iter_mut().enumerate().filter(|(i, _)| kept(*i)) {
            layer.start = len_bytes;
            len_bytes = len_bytes.saturating_add(layer.len_bytes());
        }
        let start = len_bytes;
        for (_, layer) in layers.iter_mut().enumerate().filter(|(i, _)| !kept(*i)) {
            layer.start = start;
            len_bytes = len_bytes.max(start.saturating_add(layer.len_bytes()));
        }
        KvLayout { layers: layers.into(), kv_type: self.kv_type, len_bytes }
    }

    /// The layers with keys and values.
    pub fn layers(&self) -> &[KvLayer] {
        &self.layers
    }

    /// Storage type.
    pub fn kv_type(&self) -> KvType {
        self.kv_type
    }

    /// Bytes of a page, a multiple of 64. Saturates for sizes beyond the address space, so that allocating such pages
    /// fails.
    pub fn page_bytes(&self) -> usize {
        // a model without attention has empty pages, which still identify the tokens of a prefix
        self.len_bytes.max(1).checked_next_multiple_of(64).unwrap_or(usize::MAX - 63)
    }

    /// Whether all numbers of a page are finite, as [`write_kv`] guarantees. `page` must be [`KvLayout::page_bytes`]
    /// long.
    pub fn is_finite(&self, page: &[u8]) -> bool {
        let f16s = |b: &[u8]| b.chunks_exact(2).all(|b| b[1] & 0x7c != 0x7c);
        let f32s = |b: &[u8]| b.chunks_exact(4).all(|b| b[3] & 0x7f != 0x7f || b[2] & 0x80 == 0);
        self.layers.iter().flat_map(|layer| (0..layer.heads.n).map(move |head| (layer, head))).all(|(layer, head)| {
            let keys = &page[layer.key_at(head)..][..layer.key_bytes()];
            let values = &page[layer.value_at(head)..][..layer.value_bytes()];
            match layer.kv_type {
                KvType::F32 => f32s(keys) && f32s(values),
                KvType::F16 => f16s(keys) && f16s(values),
                KvType::K8 => f32s(&keys[keys.len() - layer.scales_bytes()..]) && f16s(values),
                KvType::Q8 => {
                    let scales = values.len().saturating_sub(PAGE * 4);
                    f32s(&keys[keys.len() - layer.scales_bytes()..]) && f32s(&values[scales..])
                }
            }
        })
    }
}

/// Position of a token in the KV memory.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Slot {
    /// Page number.
    pub page: u32,
    /// Index of the token in the page, below [`PAGE`].
    pub token: u32,
}

/// Rows of keys and values to write: the keys of row r, (n_head_kv, key_dim), start at `r * stride + k_at`, its values,
/// (n_head_kv, value_dim), at `r * stride + v_at`. Latent keys contain their values, which are not read.
#[derive(Clone, Copy)]
pub struct KvRows<'a> {
    /// The rows.
    pub x: &'a [f32],
    /// Floats from one row to the next.
    pub stride: usize,
    /// Offset of the keys in a row.
    pub k_at: usize,
    /// Offset of the values in a row.
    pub v_at: usize,
    /// Destination of each row.
    pub slots: &'a [Slot],
}

/// Writes keys and values of some tokens of a layer into their slots, heads in parallel. Pages hold finite numbers
/// only: f32 and f16 infinities become the largest finite number of their sign and NaN the most negative one; an int8
/// key with such an element becomes zero.
///
/// # Panics
/// If a row or slot is outside its buffer.
pub fn write_kv(cpu: Cpu, pool: &dyn Pool, kv: &KvLayer, rows: KvRows<'_>, memory: &mut KvMemory) {
    let KvHeads { n, key_dim, latent, .. } = kv.heads;
    let value_dim = if latent { 0 } else { kv.heads.value_dim };
    assert!(kv.heads.is_supported() && kv.start + kv.len_bytes() <= memory.page_bytes());
    assert!(rows.x.len() >= (rows.slots.len() * rows.stride));
    assert!(rows.k_at + n * key_dim <= rows.stride && rows.v_at + n * value_dim <= rows.stride);
    let pages = memory.shared();
    let write_head = |head: usize, _| {
        for (row, slot) in rows.x.chunks_exact(rows.stride).zip(rows.slots) {
            // SAFETY: keys and values of a head have their own bytes of a page, and one task writes each head.
            let (keys, values) = unsafe {
                (
                    pages.slice(slot.page, kv.key_at(head), kv.key_bytes()),
                    pages.slice(slot.page, kv.value_at(head), kv.value_bytes()),
                )
            };
            let k = &row[rows.k_at + head * key_dim..][..key_dim];
            let v = &row[rows.v_at + head * value_dim..][..value_dim];
            cpu.run(WriteKv { kv, k, v, keys, values, slot: slot.token as usize });
        }
    };
    // waking other threads costs more than writing a few rows
    let pool = if rows.slots.len() < 8 { &Inline } else { pool };
    tasks::run(pool, n, &write_head);
}

/// Writes the key and value of one token and head.
struct WriteKv<'a> {
    kv: &'a KvLayer,
    k: &'a [f32],
    v: &'a [f32],
    keys: &'a mut [u8],
    values: &'a mut [u8],
    slot: usize,
}

pub(super) const F16_MAX: f32 = 65504.0;

/// `x` within `-limit..=limit`; NaN becomes `-limit`.
#[inline(always)]
pub(super) fn clamp(x: f32, limit: f32) -> f32 {
    let bound = if x > 0.0 { limit } else { -limit };
    if limit > x.abs() { x } else { bound }
}

impl Op for WriteKv<'_> {
    type Out = ();

    fn scalar(self) {
        self.write(
            |x, out| {
                for (x, out) in x.iter().zip(out) {
                    *out = half::f16::from_f32_const(clamp(*x, F16_MAX)).to_bits();
                }
            },
            quantise,
        );
    }

    #[inline(always)]
    fn simd<S: Simd>(self, s: S) {
        self.write(
            #[inline(always)]
            |x, out| {
                let whole = x.len() / S::LANES * S::LANES;
                // SAFETY: `out` is as long as `x`; whole vectors below the length.
                unsafe {
                    let limit = s.splat(F16_MAX);
                    let low = s.splat(-F16_MAX);
                    for i in (0..whole).step_by(S::LANES) {
                        let v = s.load(x.as_ptr().add(i));
                        let bound = s.select_gt(v, s.splat(0.0), limit, low);
                        s.store_f16(out.as_mut_ptr().add(i), s.select_gt(limit, s.abs(v), v, bound));
                    }
                }
                for (x, out) in x[whole..].iter().zip(&mut out[whole..]) {
                    *out = half::f16::from_f32_const(clamp(*x, F16_MAX)).to_bits();
                }
            },
            #[inline(always)]
            |x, q| quantise_lanes(s, x, q),
        );
    }
}

impl WriteKv<'_> {
    #[inline(always)]
    fn write(self, to_f16: impl Fn(&[f32], &mut [u16]), quantise: impl Fn(&[f32], &mut [i8]) -> f32) {
        let (kv_type, d, slot) = (self.kv.kv_type, self.k.len(), self.slot);
        let mut h = [0u16; MAX_LATENT_DIM];
        match kv_type {
            KvType::F32 => {
                for (x, tokens) in self.k.iter().zip(self.keys.chunks_exact_mut(PAGE * 4)) {
                    tokens[slot * 4..][..4].copy_from_slice(&clamp(*x, f32::MAX).to_le_bytes());
                }
            }
            KvType::F16 => {
                let h = &mut h[..d];
                to_f16(self.k, h);
                for (x, tokens) in h.iter().zip(self.keys.chunks_exact_mut(PAGE * 2)) {
                    tokens[slot * 2..][..2].copy_from_slice(&x.to_le_bytes());
                }
            }
            KvType::K8 | KvType::Q8 => {
                let mut q = [0i8; MAX_LATENT_DIM];
                let (parts, n) = self.kv.heads.scaled_parts();
                let (keys, scales) = self.keys.split_at_mut(d.next_multiple_of(4) * PAGE);
                for (part, scales) in parts.into_iter().zip(scales.chunks_exact_mut(PAGE * 4)).take(n) {
                    let scale = quantise(&self.k[part.clone()], &mut q[part]);
                    scales[slot * 4..][..4].copy_from_slice(&scale.to_le_bytes());
                }
                for (q, tokens) in q.chunks_exact(4).zip(keys.chunks_exact_mut(PAGE * 4)) {
                    tokens[slot * 4..][..4].copy_from_slice(&[q[0], q[1], q[2], q[3]].map(|q| q as u8 ^ 0x80));
                }
            }
        }
        if kv_type == KvType::F32 {
            for (x, group) in self.v.chunks(VIRTUAL_LANES).zip(self.values.chunks_exact_mut(PAGE * VIRTUAL_LANES * 4)) {
                for (x, out) in x.iter().zip(group[slot * VIRTUAL_LANES * 4..].chunks_exact_mut(4)) {
                    out.copy_from_slice(&clamp(*x, f32::MAX).to_le_bytes());
                }
            }
        } else if kv_type == KvType::Q8 && !self.v.is_empty() {
            let mut q = [0i8; MAX_HEAD_DIM];
            let q = &mut q[..self.v.len()];
            let scale = quantise(self.v, q);
            let (values, scales) = self.values.split_at_mut(self.values.len() - PAGE * 4);
            for (q, group) in q.chunks(VIRTUAL_LANES).zip(values.chunks_exact_mut(PAGE * VIRTUAL_LANES)) {
                for (q, out) in q.iter().zip(&mut group[slot * VIRTUAL_LANES..]) {
                    *out = *q as u8;
                }
            }
            scales[slot * 4..][..4].copy_from_slice(&scale.to_le_bytes());
        } else {
            let h = &mut h[..self.v.len()];
            to_f16(self.v, h);
            for (x, group) in h.chunks(VIRTUAL_LANES).zip(self.values.chunks_exact_mut(PAGE * VIRTUAL_LANES * 2)) {
                for (x, out) in x.iter().zip(group[slot * VIRTUAL_LANES * 2..].chunks_exact_mut(2)) {
                    out.copy_from_slice(&x.to_le_bytes());
                }
            }
        }
    }
}

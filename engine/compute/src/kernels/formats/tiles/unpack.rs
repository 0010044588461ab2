//! Unpacking of quants to bytes, and of scales to f32 where that pays, for products that use each weight many times.
#![allow(unsafe_code)]

use core::mem::MaybeUninit;

use crate::kernels::bit_packing::{self, BitPacking};
use crate::kernels::i16_fields::{self, HAS_I16_FIELDS};
use crate::kernels::panel::{Matrix, PANEL};
use crate::kernels::panel_layout::{HEAD, PanelLayout, code_line};
use crate::kernels::simd::Simd;
use crate::kernels::tiles::QuantFormat;

/// Buffer for the unpacked weights of some rows and blocks; small enough to stay in the L1 cache while the columns
/// pass.
#[repr(align(64))]
pub(in crate::kernels) struct UnpackBuffer([MaybeUninit<u8>; UnpackBuffer::BYTES]);

impl UnpackBuffer {
    const BYTES: usize = 18 * 1024;

    pub(in crate::kernels) fn new() -> UnpackBuffer {
        UnpackBuffer([const { MaybeUninit::uninit() }; Self::BYTES])
    }

    /// Whether products of several columns unpack the weights or scales of this format.
    pub(in crate::kernels) const fn is_used<S: Simd, Q: QuantFormat>() -> bool {
        S::UNPACKS_SCALES || Self::groups::<S, Q>() > 0
    }

    /// Number of groups that are unpacked of a chunk of 32 elements: all or none.
    pub(in crate::kernels) const fn groups<S: Simd, Q: QuantFormat>() -> usize {
        if S::UNPACKS && (Q::PACKED || S::UNPACKS_BYTES) { 8 } else { 0 }
    }

    /// Number of scales of a chunk that are converted to f32, of `scales`.
    pub(super) const fn widened<S: Simd>(scales: usize) -> usize {
        if S::UNPACKS_SCALES { scales } else { 0 }
    }

    /// Number of blocks that fit, for `rv` row vectors.
    pub(in crate::kernels) fn blocks<S: Simd>(layout: &PanelLayout, rv: usize) -> usize {
        Self::BYTES / Self::block_bytes::<S>(layout, rv)
    }

    /// Bytes of a block with all its groups. Weights that stay packed count too, as they share the L1 cache.
    fn block_bytes<S: Simd>(layout: &PanelLayout, rv: usize) -> usize {
        layout.block_len() / 32 * (8 + Self::widened::<S>(layout.scales())) * rv * 4 * S::LANES
    }

    /// Unpacks blocks `first..end` of `rv` row vectors from `row` on: groups of that many `bits`, or scales only. The
    /// vectors of each group of a chunk are consecutive, and so are those of each scale. Returns the start of the
    /// buffer.
    ///
    /// # Panics
    /// If the blocks do not fit, or are not in the matrix.
    #[cfg_attr(not(target_family = "wasm"), inline(always))]
    #[cfg_attr(target_family = "wasm", inline(never))]
    pub(in crate::kernels) fn unpack<S: Simd>(
        &mut self,
        s: S,
        w: &Matrix,
        bits: Option<u32>,
        row: usize,
        rv: usize,
        [first, end]: [usize; 2],
    ) -> *const u8 {
        let (layout, vector) = (w.layout(), 4 * S::LANES);
        let chunks = layout.block_len() / 32;
        // already in this form in the panel; copied nevertheless, so that one tile serves byte weights and unpacked
        // ones
        let as_is = HAS_I16_FIELDS && matches!(layout, PanelLayout::Blocks32(f) if f.words == 8);
        let fits = end - first <= Self::blocks::<S>(layout, rv) && end * chunks * 32 <= w.k();
        assert!(fits, "blocks outside the matrix or the unpack buffer");
        let start: *mut u8 = self.0.as_mut_ptr().cast();
        for v in 0..rv {
            let row = row + v * S::LANES;
            let panel = w.panel(row / PANEL).as_ptr();
            // SAFETY: the panel has these blocks, and all places are below the length asserted above.
            unsafe {
                let mut to = start.add(v * vector);
                for b in first..end {
                    let (quants, scales) = layout.block_at(w.dtype(), b);
                    let block = panel.add(quants + row % PANEL * 4);
                    if let Some(bits) = bits {
                        for t in 0..chunks {
                            chunk(
                                s,
                                layout,
                                block,
                                t,
                                #[inline(always)]
                                |group| {
                                    s.store_b(to, if as_is { group } else { s.unpacked(group, bits) });
                                    to = to.add(rv * vector);
                                },
                            );
                        }
                    }
                    for i in 0..Self::widened::<S>(layout.scales()) {
                        let scale = panel.add(scales + i * 32 + row % PANEL * 2).cast();
                        s.store(to.cast(), if layout.bf16() { s.load_bf16(scale) } else { s.load_f16(scale) });
                        to = to.add(rv * vector);
                    }
                }
            }
        }
        start
    }
}

/// Calls `put` with each group of the 32 elements of chunk `t` of a block, as unsigned bytes; 8-bit weights stay as
/// stored. `at` points at the record of a super-block, or at the quants of a block of 32.
///
/// # Safety
/// The chunk must be readable.
#[inline(always)]
pub(in crate::kernels) unsafe fn chunk<S: Simd>(
    s: S,
    layout: &PanelLayout,
    at: *const u8,
    t: usize,
    mut put: impl FnMut(S::B),
) {
    // SAFETY: the contract of this function, which its caller keeps.
    unsafe {
        let eight = s.bound(8);
        let load = |line: usize| s.load_b(at.add(line * 64));
        let put = &mut put;
        if let Some(bits) = layout.packed_bits() {
            let head = if layout.block_len() == 256 { HEAD } else { 0 };
            let (sub_block_bytes, sub_blocks) = (BitPacking::of(bits).sub_block_bytes(), 32 / BitPacking::of(bits).len);
            for i in t * sub_blocks..(t + 1) * sub_blocks {
                let at = at.add(head + i * sub_block_bytes);
                match bits {
                    4 if HAS_I16_FIELDS => i16_fields::unpack::<S, 4>(s, at, put),
                    5 if HAS_I16_FIELDS => i16_fields::unpack::<S, 5>(s, at, put),
                    _ if HAS_I16_FIELDS => i16_fields::unpack::<S, 6>(s, at, put),
                    4 => bit_packing::unpack::<S, 4>(s, at, put),
                    5 => bit_packing::unpack::<S, 5>(s, at, put),
                    _ => bit_packing::unpack::<S, 6>(s, at, put),
                }
            }
            return;
        }
        match layout {
            PanelLayout::Float | PanelLayout::SuperMin { .. } | PanelLayout::SuperSigned => {}
            PanelLayout::Blocks32(_) => {
                for g in 0..eight {
                    put(load(g));
                }
            }
            PanelLayout::Codes(f) => {
                let table = s.load_table(f.offset_table.as_ptr());
                let first = if f.is_super() { f.codes() / 64 + t * f.width } else { 0 };
                for g in 0..eight {
                    let (line, shift) = code_line(g, f.width);
                    put(s.look_up(table, s.and_b(s.shr16_b(load(first + line), shift as u32), 15)));
                }
            }
        }
    }
}

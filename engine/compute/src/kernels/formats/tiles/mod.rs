//! Register tiles of products with quantised weights: `RV` row vectors times `NC` columns, over the whole of K. One
//! file per kind of block; the head of `matmul/mod.rs` has the formulas, that of `panel.rs` the layouts.
#![allow(unsafe_code)]

mod block32;
mod codes;
mod sub_block;
mod supers;
pub(in crate::kernels) mod unpack;
mod weight_prefetch;

pub(in crate::kernels) use block32::Block32;
pub(in crate::kernels) use codes::{Codes32, SuperCodes};
use sub_block::SubBlockActs;
pub(in crate::kernels) use supers::{SuperMin, SuperSigned};
pub(in crate::kernels) use unpack::UnpackBuffer;
pub(in crate::kernels) use weight_prefetch::WeightPrefetch;

use core::ops::Range;

use crate::kernels::act::tile_columns;
use crate::kernels::panel_layout::CodebookLayout;
use crate::kernels::simd::{FEW_TILES, Simd, TileShape, each};

/// Classes of weight formats with a tile size of their own, in the order of `Simd::GEMV`.
#[derive(Clone, Copy)]
pub(in crate::kernels) enum TileClass {
    /// 4- and 5-bit blocks of 32.
    Four,
    /// 8-bit blocks of 32.
    Eight,
    /// Super-blocks.
    Super,
}

impl TileClass {
    /// Tile size for several columns.
    pub(in crate::kernels) const fn tile<S: Simd>(self) -> TileShape {
        match self {
            TileClass::Four => S::TILE4,
            TileClass::Eight => S::TILE8,
            TileClass::Super => S::TILE_K,
        }
    }

    /// Largest number of row vectors of a gemv tile.
    pub(in crate::kernels) const fn gemv<S: Simd>(self) -> usize {
        S::GEMV[self as usize]
    }

    /// Whether products use tiles of `rv` vectors and `nc` columns: full tiles, and single vectors where full tiles do
    /// not divide a panel. Other sizes are not compiled.
    pub(in crate::kernels) const fn has<S: Simd>(self, rv: usize, nc: usize) -> bool {
        const fn rows<S: Simd>(whole: usize, rv: usize) -> bool {
            rv == whole || (rv == 1 && !crate::kernels::panel::PANEL.is_multiple_of(S::LANES * whole))
        }
        let TileShape { rv: whole, nc: columns } = self.tile::<S>();
        let block = if let TileClass::Super = self { 256 } else { 32 };
        let of_tiles = tile_columns(columns, block, nc) == nc && rows::<S>(whole, rv) && !(FEW_TILES && nc == 1);
        of_tiles || (nc == 1 && rows::<S>(self.gemv::<S>(), rv))
    }
}

/// A quantised weight format on lanes.
pub(in crate::kernels) trait QuantFormat {
    /// The class that determines its tile sizes.
    const TILE_CLASS: TileClass;
    /// The `BITS` of its dots.
    const BITS: u32;
    /// Whether quants take less than a byte.
    const PACKED: bool = true;
    /// Computes a register tile: `RV` row vectors times `NC` columns, over some blocks.
    ///
    /// # Safety
    /// `panel[v]` must point at the panel of vector v and `lane[v]` be its first row there; `acts` must point at these
    /// blocks in a tile of NC packed columns; `out + c * stride + v * LANES` must be writable. If NC > 1 and both
    /// format and instruction set use it, `unpacked` must point at the result of [`UnpackBuffer::unpack`] for these
    /// blocks.
    unsafe fn tile<S: Simd, const RV: usize, const NC: usize>(s: S, t: &TileArgs<'_, RV>);
}

/// Inputs and output of a register tile.
pub(in crate::kernels) struct TileArgs<'a, const RV: usize> {
    pub(in crate::kernels) panel: [*const u8; RV],
    pub(in crate::kernels) lane: [usize; RV],
    /// First block and end. If the first is not 0, the output holds the sums of the blocks before.
    pub(in crate::kernels) blocks: [usize; 2],
    /// Bytes of the record of a super-block.
    pub(in crate::kernels) bytes: usize,
    pub(in crate::kernels) unpacked: *const u8,
    /// Weights to prefetch meanwhile, if NC > 1.
    pub(in crate::kernels) prefetch: WeightPrefetch,
    pub(in crate::kernels) acts: *const u32,
    pub(in crate::kernels) out: *mut f32,
    pub(in crate::kernels) stride: usize,
    /// The layout of codebook types.
    pub(in crate::kernels) codes: Option<&'a CodebookLayout>,
}

/// Chunk `i` of the unpack buffer, for chunks with that many scales. Group g of vector v is at `(g * RV + v) * 4 *
/// LANES`.
#[inline(always)]
fn unpacked_chunk<S: Simd, Q: QuantFormat, const RV: usize>(
    t: &TileArgs<'_, RV>,
    i: usize,
    scales: usize,
) -> *const u8 {
    let vectors = const { UnpackBuffer::groups::<S, Q>() } + UnpackBuffer::widened::<S>(scales);
    t.unpacked.wrapping_add(i * vectors * RV * 4 * S::LANES)
}

/// Scale `i` of the rows of vector `v` in an unpacked chunk.
#[inline(always)]
unsafe fn unpacked_scale<S: Simd, Q: QuantFormat, const RV: usize>(s: S, chunk: *const u8, i: usize, v: usize) -> S::F {
    let scale = (const { UnpackBuffer::groups::<S, Q>() } + i) * RV + v;
    // SAFETY: the caller's chunk.
    unsafe { s.load(chunk.add(scale * 4 * S::LANES).cast()) }
}

/// Group `g` of an unpacked chunk.
#[inline(always)]
unsafe fn unpacked_group<S: Simd, const RV: usize, const BITS: u32>(s: S, chunk: *const u8, g: usize) -> [S::W; RV] {
    // SAFETY: the caller's chunk.
    unsafe { weights_at(s, chunk.add(g * RV * 4 * S::LANES), |b| s.unpacked_weights::<BITS>(b)) }
}

/// The RV consecutive vectors of a group from `p` on.
#[inline(always)]
unsafe fn weights_at<S: Simd, const RV: usize>(s: S, p: *const u8, weights: impl Fn(S::B) -> S::W) -> [S::W; RV] {
    // SAFETY: the contract of this function, which its caller keeps.
    unsafe { each!(RV, |v| weights(s.load_b(p.add(v * 4 * S::LANES)))) }
}

/// The initial f32 accumulators of a tile.
#[inline(always)]
unsafe fn load_accumulators<S: Simd, const RV: usize, const NC: usize>(s: S, t: &TileArgs<'_, RV>) -> [[S::F; NC]; RV] {
    let mut acc = [[s.splat(0.0); NC]; RV];
    if S::UNPACKS && NC > 1 && t.blocks[0] > 0 {
        for (v, acc) in acc.iter_mut().enumerate() {
            for (c, acc) in acc.iter_mut().enumerate() {
                // SAFETY: the caller's tile.
                *acc = unsafe { s.load(t.out.add(c * t.stride + v * S::LANES)) };
            }
        }
    }
    acc
}

/// Adds the dots of one group.
///
/// # Safety
/// `acts` must point at the activations of the group, for NC columns.
#[inline(always)]
unsafe fn add_group<S: Simd, const RV: usize, const NC: usize, const BITS: u32>(
    s: S,
    w: [S::W; RV],
    acts: *const u32,
    dots: &mut [[S::Acc; NC]; RV],
) {
    for c in 0..NC {
        // SAFETY: the contract of this function, which its caller keeps.
        let a = unsafe { s.act_of::<BITS, NC>(acts, c) };
        for v in 0..RV {
            dots[v][c] = s.dot::<BITS>(dots[v][c], w[v], a);
        }
    }
}

#[inline(always)]
unsafe fn store_accumulators<S: Simd, const RV: usize, const NC: usize>(
    s: S,
    acc: &[[S::F; NC]; RV],
    t: &TileArgs<'_, RV>,
) {
    for (v, acc) in acc.iter().enumerate() {
        for (c, acc) in acc.iter().enumerate() {
            // SAFETY: the caller's tile.
            unsafe { s.store(t.out.add(c * t.stride + v * S::LANES), *acc) }
        }
    }
}

/// Prefetches `lines` from `at` in each panel, `ahead` bytes ahead; nothing if that is 0.
#[inline(always)]
fn prefetch_ahead<S: Simd, const RV: usize>(
    s: S,
    t: &TileArgs<'_, RV>,
    at: [*const u8; RV],
    ahead: usize,
    lines: Range<usize>,
) {
    if ahead > 0 {
        prefetch_lines(s, t, each!(RV, |v| at[v].wrapping_add(ahead)), lines);
    }
}

/// Prefetches the share of chunk `chunk` of 8 in a record of `bytes`, one record ahead: each line once and in order, as
/// many prefetches at once would queue up.
#[inline(always)]
fn prefetch_record_part<S: Simd, const RV: usize>(
    s: S,
    t: &TileArgs<'_, RV>,
    record: [*const u8; RV],
    bytes: usize,
    chunk: usize,
) {
    let lines = bytes / 64;
    prefetch_ahead(s, t, record, s.prefetch_policy().distance.packed, lines * chunk / 8..lines * (chunk + 1) / 8);
}

/// Prefetches the head of the current record, which is not read sequentially, if nothing is prefetched ahead.
#[inline(always)]
fn prefetch_head<S: Simd, const RV: usize>(s: S, t: &TileArgs<'_, RV>, record: [*const u8; RV], bytes: usize) {
    if s.prefetch_policy().distance.packed == 0 {
        prefetch_lines(s, t, record, 0..bytes / 64);
    }
}

#[inline(always)]
fn prefetch_lines<S: Simd, const RV: usize>(s: S, t: &TileArgs<'_, RV>, at: [*const u8; RV], lines: Range<usize>) {
    for v in 0..RV {
        if t.lane[v] == 0 {
            for l in lines.clone() {
                s.prefetch(at[v].wrapping_add(l * 64));
            }
        }
    }
}

//! Register tiles of products with quantised weights: some vectors of rows times some columns, over the whole of K. A
//! file for each kind of block; the formulas are at the head of `matmul.rs`, the layouts at that of `panel.rs`.

mod block32;
mod codes;
mod sub_block;
mod supers;
pub(super) mod unpack;
mod weight_prefetch;

pub(super) use block32::Block32;
pub(super) use codes::{Codes32, SuperCodes};
use sub_block::SubBlockActs;
pub(super) use supers::{SuperMin, SuperSigned};
pub(super) use unpack::UnpackBuffer;
pub(super) use weight_prefetch::WeightPrefetch;

use core::ops::Range;

use super::act::tile_columns;
use super::panel_layout::CodebookLayout;
use super::simd::{FEW_TILES, Simd, TileShape, each};

/// The register tiles that an instruction set has for quantised weights, in the order of `Simd::GEMV`.
#[derive(Clone, Copy)]
pub(super) enum TileClass {
    /// 4- and 5-bit blocks of 32.
    Four,
    /// 8-bit blocks of 32.
    Eight,
    /// Super-blocks.
    Super,
}

impl TileClass {
    /// The tile for several columns.
    pub(super) const fn tile<S: Simd>(self) -> TileShape {
        match self {
            TileClass::Four => S::TILE4,
            TileClass::Eight => S::TILE8,
            TileClass::Super => S::TILE_K,
        }
    }

    /// Vectors of rows at a time for one column, at most.
    pub(super) const fn gemv<S: Simd>(self) -> usize {
        S::GEMV[self as usize]
    }

    /// Whether products come to a tile of `rv` vectors times `nc` columns: whole tiles, and single vectors where those
    /// do not divide a panel. Keeps the others out of the binary.
    pub(super) const fn has<S: Simd>(self, rv: usize, nc: usize) -> bool {
        const fn rows<S: Simd>(whole: usize, rv: usize) -> bool {
            rv == whole || (rv == 1 && !super::panel::PANEL.is_multiple_of(S::LANES * whole))
        }
        let TileShape { rv: whole, nc: columns } = self.tile::<S>();
        let block = if let TileClass::Super = self { 256 } else { 32 };
        let of_tiles = tile_columns(columns, block, nc) == nc && rows::<S>(whole, rv) && !(FEW_TILES && nc == 1);
        of_tiles || (nc == 1 && rows::<S>(self.gemv::<S>(), rv))
    }
}

/// A quantised format on lanes.
pub(super) trait QuantFormat {
    /// Which of an instruction set's shapes it takes.
    const TILE_CLASS: TileClass;
    /// `BITS` of its dots.
    const BITS: u32;
    /// Whether quants are less than bytes.
    const PACKED: bool = true;
    /// Computes a register tile: `RV` vectors of rows times `NC` columns over some blocks.
    ///
    /// # Safety
    /// `panel[v]` points at the panel of vector v, `lane[v]` is its first row in that panel; `acts` at these blocks of a
    /// tile of NC packed columns; `out + c * stride + v * LANES` is writable. `unpacked` points at what
    /// [`UnpackBuffer::unpack`] made of the blocks, if NC > 1 and both the type and the instruction set have use for it.
    unsafe fn tile<S: Simd, const RV: usize, const NC: usize>(s: S, t: &TileArgs<'_, RV>);
}

/// Where a register tile reads and writes.
pub(super) struct TileArgs<'a, const RV: usize> {
    pub(super) panel: [*const u8; RV],
    pub(super) lane: [usize; RV],
    /// First and end; where the first is not 0, sums go on from what stands in the output.
    pub(super) blocks: [usize; 2],
    /// Of a super-block's record.
    pub(super) bytes: usize,
    pub(super) unpacked: *const u8,
    /// What is asked for meanwhile, if NC > 1.
    pub(super) prefetch: WeightPrefetch,
    pub(super) acts: *const u32,
    pub(super) out: *mut f32,
    pub(super) stride: usize,
    /// For the types of codes.
    pub(super) codes: Option<&'a CodebookLayout>,
}

/// The unpacked chunk `i` of the tile, of chunks with so many scales; group g of vector v is at `(g * RV + v) * 4 * LANES`.
#[inline(always)]
fn unpacked_chunk<S: Simd, Q: QuantFormat, const RV: usize>(
    t: &TileArgs<'_, RV>,
    i: usize,
    scales: usize,
) -> *const u8 {
    let vectors = const { UnpackBuffer::groups::<S, Q>() } + UnpackBuffer::widened::<S>(scales);
    t.unpacked.wrapping_add(i * vectors * RV * 4 * S::LANES)
}

/// Scale `i` of the rows of vector `v` of an unpacked chunk, if those are there.
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

/// The vectors of a group that follow each other from `p` on.
#[inline(always)]
unsafe fn weights_at<S: Simd, const RV: usize>(s: S, p: *const u8, weights: impl Fn(S::B) -> S::W) -> [S::W; RV] {
    // SAFETY: the caller's.
    unsafe { each!(RV, |v| weights(s.load_b(p.add(v * 4 * S::LANES)))) }
}

/// The sums that a tile starts from.
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

/// Adds the dots of a group, whose activations are at `acts`.
///
/// # Safety
/// The activations of NC columns are there.
#[inline(always)]
unsafe fn add_group<S: Simd, const RV: usize, const NC: usize, const BITS: u32>(
    s: S,
    w: [S::W; RV],
    acts: *const u32,
    dots: &mut [[S::Acc; NC]; RV],
) {
    for c in 0..NC {
        // SAFETY: the caller's.
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

/// Asks for `lines` from `at` in each panel, that far `ahead`, if at all.
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

/// Asks ahead with a chunk, of eight, of a record of `bytes`: for its share, each line once and in their order, as many at once would
/// wait for each other.
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

/// Asks for the head of a record, which is read here and there, where nothing is asked for ahead.
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

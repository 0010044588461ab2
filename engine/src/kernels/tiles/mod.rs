//! Register tiles of products with quantised weights: some vectors of rows times some columns, over the whole of K. A
//! file for each kind of block; the formulas are at the head of `matmul.rs`, the layouts at that of `panel.rs`.

mod codes;
mod matrix;
mod small;
mod supers;

pub(super) use codes::{Codes32, SuperCodes};
pub(super) use matrix::MatrixTile;
pub(super) use small::Small;
pub(super) use supers::{SuperMin, SuperSigned};

use super::form::CodesForm;
use super::simd::Simd;

/// How far ahead decoding prefetches, in bytes of quants.
const AHEAD: usize = 2048;

/// A quantised format on lanes.
pub(super) trait Quant {
    /// Computes a register tile: `RV` vectors of rows times `NC` columns over all of K.
    ///
    /// # Safety
    /// `rows[v]` points at the panel of vector v, `lane[v]` is its first row in that panel; `acts` at a tile of NC
    /// packed columns; `out + c * stride + v * LANES` is writable.
    unsafe fn tile<S: Simd, const RV: usize, const NC: usize>(s: S, t: &Tile<'_, RV>);
}

/// Where a register tile reads and writes.
pub(super) struct Tile<'a, const RV: usize> {
    pub(super) panel: [*const u8; RV],
    pub(super) lane: [usize; RV],
    pub(super) nb: usize,
    pub(super) acts: *const u32,
    pub(super) out: *mut f32,
    pub(super) stride: usize,
    /// For the types of codes.
    pub(super) codes: Option<&'a CodesForm>,
}

#[inline(always)]
unsafe fn store<S: Simd, const RV: usize, const NC: usize>(s: S, acc: &[[S::F; NC]; RV], t: &Tile<'_, RV>) {
    for (v, acc) in acc.iter().enumerate() {
        for (c, acc) in acc.iter().enumerate() {
            // SAFETY: the caller's tile.
            unsafe { s.store(t.out.add(c * t.stride + v * S::LANES), *acc) }
        }
    }
}

/// Asks for the next record of each panel.
#[inline(always)]
fn prefetch_record<S: Simd, const RV: usize>(s: S, t: &Tile<'_, RV>, o: [*const u8; RV], bytes: usize) {
    for v in 0..RV {
        if t.lane[v] == 0 {
            for l in 0..bytes / 64 {
                s.prefetch(o[v].wrapping_add(bytes + l * 64));
            }
        }
    }
}

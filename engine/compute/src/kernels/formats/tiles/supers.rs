//! Q4_K, Q5_K and Q6_K: super-blocks of 256 with small integer scales.
#![allow(unsafe_code)]

use super::{
    QuantFormat, SubBlockActs, TileArgs, TileClass, add_group, load_accumulators, prefetch_head, prefetch_record_part,
    store_accumulators, sub_block, unpacked_group,
};
use crate::kernels::bit_packing::BitPacking;
use crate::kernels::i16_fields::{self, I16Fields};
use crate::kernels::panel::PANEL;
use crate::kernels::panel_layout::HEAD;
use crate::kernels::simd::{FEW_TILES, Simd, each};

/// Q4_K and Q5_K: unsigned quants, eight sub-blocks with 6-bit scales and minima.
pub(in crate::kernels) struct SuperMin<const BITS: u32>;

impl<const BITS: u32> QuantFormat for SuperMin<BITS> {
    const TILE_CLASS: TileClass = TileClass::Super;
    const BITS: u32 = BITS;

    #[inline(always)]
    unsafe fn tile<S: Simd, const RV: usize, const NC: usize>(s: S, t: &TileArgs<'_, RV>) {
        // SAFETY: the contract of this function, which its caller keeps.
        unsafe { super_tile::<S, RV, NC, BITS, true>(s, t) }
    }
}

/// Q6_K: 6-bit quants stored with 32 added, sixteen sub-blocks with signed scales.
pub(in crate::kernels) struct SuperSigned;

impl QuantFormat for SuperSigned {
    const TILE_CLASS: TileClass = TileClass::Super;
    const BITS: u32 = 6;

    #[inline(always)]
    unsafe fn tile<S: Simd, const RV: usize, const NC: usize>(s: S, t: &TileArgs<'_, RV>) {
        // SAFETY: the contract of this function, which its caller keeps.
        unsafe { super_tile::<S, RV, NC, { SuperSigned::BITS }, false>(s, t) }
    }
}

/// A tile of super-blocks, with minima or with signed quants.
///
/// # Safety
/// As [`QuantFormat::tile`].
#[inline(always)]
unsafe fn super_tile<S: Simd, const RV: usize, const NC: usize, const BITS: u32, const MIN: bool>(
    s: S,
    t: &TileArgs<'_, RV>,
) {
    let packing = BitPacking::of(BITS);
    let (sub_block_bytes, groups, bytes) = (packing.sub_block_bytes(), packing.groups(), packing.record_bytes());
    let sub_blocks = 64 / groups;
    let (aw, unpacked) = (S::act_encoding(BITS).words(), S::UNPACKS && NC > 1);
    let fields = const { I16Fields::for_columns::<NC>(BITS) };
    let head = if MIN { 5 } else { 17 };
    let sub_block_words = fields.map_or(groups * aw, |f| f.words()) * NC;
    // read from the arguments on WebAssembly, so that the code for both widths is the same and can be merged
    let bytes = if FEW_TILES && unpacked && MIN { t.bytes } else { bytes };
    // SAFETY: offsets stay inside the panels, columns and outputs that the caller vouches for.
    unsafe {
        let mut acc = load_accumulators::<S, RV, NC>(s, t);
        let (mut record, mut prefetch) = (t.acts, t.prefetch.clone());
        for b in t.blocks[0]..t.blocks[1] {
            let o: [*const u8; RV] = each!(RV, |v| t.panel[v].add(b * bytes));
            if NC == 1 {
                prefetch_head(s, t, o, HEAD);
            }
            let mut isum = [[s.splat_i(0); NC]; RV];
            // opaque bound: unrolled, the compiler interleaves the sub-blocks and spills
            for i in 0..core::hint::black_box(sub_blocks) {
                if i.is_multiple_of(sub_blocks / 8) {
                    if NC == 1 {
                        prefetch_record_part(s, t, o, bytes, i / (sub_blocks / 8));
                    } else {
                        prefetch.prefetch_chunk(s);
                    }
                }
                let x = SubBlock {
                    lines: each!(RV, |v| o[v].add(HEAD + i * sub_block_bytes + t.lane[v] * 4)),
                    scales: each!(RV, |v| o[v].add(i * 16 + t.lane[v])),
                    unpacked: t
                        .unpacked
                        .wrapping_add(((b - t.blocks[0]) * sub_blocks + i) * groups * RV * 4 * S::LANES),
                    acts: SubBlockActs {
                        groups: record.add(head * NC + i * sub_block_words),
                        zero_point_terms: if MIN { None } else { Some(record.add((1 + i) * NC)) },
                    },
                };
                x.add_scaled::<S, NC, BITS, MIN>(s, &mut isum);
            }
            let d = scales(s, t, o, 256);
            let dmin = if MIN { scales(s, t, o, 288) } else { d };
            for v in 0..RV {
                for c in 0..NC {
                    let da = s.splat(f32::from_bits(record.add(c).read()));
                    let mut term = s.mul(s.to_f32(isum[v][c]), s.mul(d[v], da));
                    if MIN {
                        let mut msum = s.splat_i(0);
                        for j in 0..4 {
                            let mins = o[v].add(128 + j * 32 + t.lane[v] * 2);
                            msum = s.pair_dot(msum, mins, record.add((1 + j) * NC + c).read());
                        }
                        term = s.sub(term, s.mul(s.to_f32(msum), s.mul(dmin[v], da)));
                    }
                    acc[v][c] = s.add(acc[v][c], term);
                }
            }
            record = record.add(head * NC + sub_blocks * sub_block_words);
        }
        store_accumulators(s, &acc, t);
    }
}

/// The f16 at offset `at` of the records of the tile's rows.
///
/// # Safety
/// The records must be readable.
#[inline(always)]
unsafe fn scales<S: Simd, const RV: usize>(s: S, t: &TileArgs<'_, RV>, o: [*const u8; RV], at: usize) -> [S::F; RV] {
    // SAFETY: the contract of this function, which its caller keeps; rows of one panel follow each other.
    unsafe {
        if const { PANEL.is_multiple_of(RV * S::LANES) } {
            return widened(s, o[0].add(at + t.lane[0] * 2).cast());
        }
        each!(RV, |v| s.load_small_f16(o[v].add(at + t.lane[v] * 2).cast()))
    }
}

/// RV consecutive vectors of f16, as f32.
///
/// # Safety
/// The vectors must be readable.
// not inlined on WebAssembly, to keep the module small
#[cfg_attr(not(target_family = "wasm"), inline(always))]
#[cfg_attr(target_family = "wasm", inline(never))]
unsafe fn widened<S: Simd, const RV: usize>(s: S, at: *const u16) -> [S::F; RV] {
    // SAFETY: the contract of this function, which its caller keeps.
    unsafe { each!(RV, |v| s.load_small_f16(at.add(v * S::LANES))) }
}

/// A sub-block of a super-block, the elements that share a scale, in RV row vectors; with its activations.
struct SubBlock<const RV: usize> {
    lines: [*const u8; RV],
    scales: [*const u8; RV],
    unpacked: *const u8,
    acts: SubBlockActs,
}

impl<const RV: usize> SubBlock<RV> {
    /// Adds `scale * dot` to `isum`.
    ///
    /// # Safety
    /// The sub-block and its activations must be readable.
    #[inline(always)]
    unsafe fn add_scaled<S: Simd, const NC: usize, const BITS: u32, const MIN: bool>(
        &self,
        s: S,
        isum: &mut [[S::I; NC]; RV],
    ) {
        let acts = self.acts;
        // SAFETY: the contract of this function, which its caller keeps.
        unsafe {
            if const { I16Fields::for_columns::<NC>(BITS).is_some() } {
                let zero_point = acts.zero_point_terms.map(|terms| terms.read());
                i16_fields::add_sub_block::<S, RV, BITS>(s, self.lines, acts.groups, zero_point, |v, dot| {
                    let scaled = s.total_of_fields(dot, Some(self.scale::<S, MIN>(s, v)));
                    isum[v][0] = s.add_i(isum[v][0], scaled);
                });
                return;
            }
            if !S::UNPACKS || NC == 1 {
                sub_block::add_sub_block::<S, RV, NC, BITS>(
                    s,
                    self.lines,
                    acts,
                    #[inline(always)]
                    |v, c, dot| {
                        let scaled = s.total_scaled::<BITS>(dot, acts.zero_point_term(c), self.scale::<S, MIN>(s, v));
                        isum[v][c] = s.add_i(isum[v][c], scaled);
                    },
                );
                return;
            }
            let groups = const { BitPacking::of(BITS).groups() };
            let run = if MIN { S::max_groups(BITS, false) } else { groups };
            let bound = s.bound(run);
            for r in 0..groups / run {
                let mut dots = acts.start::<S, RV, NC, BITS>(s);
                for i in 0..bound {
                    let g = r * run + i;
                    let w = unpacked_group::<S, RV, BITS>(s, self.unpacked, g);
                    add_group::<S, RV, NC, BITS>(
                        s,
                        w,
                        acts.groups.add(g * NC * S::act_encoding(BITS).words()),
                        &mut dots,
                    );
                }
                for v in 0..RV {
                    let scale = self.scale::<S, MIN>(s, v);
                    for c in 0..NC {
                        isum[v][c] =
                            s.add_i(isum[v][c], s.total_scaled::<BITS>(dots[v][c], acts.zero_point_term(c), scale));
                    }
                }
            }
        }
    }

    /// The scales of vector `v`.
    ///
    /// # Safety
    /// The scales must be readable.
    #[inline(always)]
    unsafe fn scale<S: Simd, const MIN: bool>(&self, s: S, v: usize) -> S::I {
        // SAFETY: the contract of this function, which its caller keeps.
        unsafe { if MIN { s.load_u8(self.scales[v]) } else { s.load_i8(self.scales[v].cast()) } }
    }
}

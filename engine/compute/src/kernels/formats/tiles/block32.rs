//! The legacy types: blocks of 32.
#![allow(unsafe_code)]

use super::{
    QuantFormat, SubBlockActs, TileArgs, TileClass, UnpackBuffer, add_group, load_accumulators, prefetch_ahead,
    store_accumulators, sub_block, unpacked_chunk, unpacked_scale, weights_at,
};
use crate::kernels::bit_packing::BitPacking;
use crate::kernels::i16_fields::{self, HAS_I16_FIELDS, I16Fields};
use crate::kernels::panel::PANEL;
use crate::kernels::panel_layout::block_at;
use crate::kernels::simd::{PrefetchDistance, Simd, each};

/// Blocks of 32 with `BITS` per quant, and a minimum if `MIN`.
pub(in crate::kernels) struct Block32<const BITS: u32, const MIN: bool>;

impl<const BITS: u32, const MIN: bool> QuantFormat for Block32<BITS, MIN> {
    const TILE_CLASS: TileClass = if BITS < 8 { TileClass::Four } else { TileClass::Eight };
    const BITS: u32 = BITS;
    const PACKED: bool = BITS < 8;

    #[inline(always)]
    unsafe fn tile<S: Simd, const RV: usize, const NC: usize>(s: S, t: &TileArgs<'_, RV>) {
        let unpacked = NC > 1 && const { UnpackBuffer::groups::<S, Self>() > 0 };
        let in_place = Self::PACKED && !unpacked;
        let run = S::max_groups(BITS, !MIN);
        // opaque as in `Simd::bound`, on every instruction set that unpacks
        let bound = if unpacked { core::hint::black_box(run) } else { s.bound(run) };
        let fields = const { I16Fields::for_columns::<NC>(BITS) };
        let runs = if in_place { 0 } else { 8 / run };
        let qb = if Self::PACKED { BitPacking::of(BITS).sub_block_bytes() } else { 512 };
        let aw = S::act_encoding(BITS).words();
        // consecutive weights of a group are read with opaque steps: for an index the WebAssembly compiler emits
        // several additions per load
        let walked = S::UNPACKS && NC > 1;
        assert!(!walked || PANEL.is_multiple_of(RV * S::LANES), "tile that crosses a panel");
        let line_step = if unpacked { RV * 4 * S::LANES } else { 64 };
        let (line_step, acts_step) = if walked { (s.bound(line_step), s.bound(aw * NC)) } else { (0, 0) };
        // SAFETY: offsets stay inside the panels, columns and outputs that the caller vouches for.
        unsafe {
            let mut acc = load_accumulators::<S, RV, NC>(s, t);
            let (mut record, mut prefetch) = (t.acts, t.prefetch.clone());
            for b in t.blocks[0]..t.blocks[1] {
                let (quants_at, scales_at) = block_at(qb, 1 + MIN as usize, b);
                let quants: [*const u8; RV] = each!(RV, |v| t.panel[v].add(quants_at + t.lane[v] * 4));
                if NC == 1 {
                    // the quants, and a line of scales
                    let PrefetchDistance { packed, bytes, .. } = s.prefetch_policy().distance;
                    prefetch_ahead(s, t, quants, if in_place { packed } else { bytes }, 0..qb / 64 + 1);
                } else {
                    prefetch.prefetch_chunk(s);
                }
                let zero_point = |c: usize| if MIN { 0 } else { record.add(NC + c).read() as i32 };
                let mut isum = [[s.splat_i(0); NC]; RV];
                let groups = record.add(2 * NC);
                if fields.is_some() {
                    let zero_point = if MIN { None } else { Some(zero_point(0) as u32) };
                    i16_fields::add_sub_block::<S, RV, BITS>(s, quants, record.add(2), zero_point, |v, dot| {
                        isum[v][0] = s.add_i(isum[v][0], s.total_of_fields(dot, None));
                    });
                } else if in_place {
                    let zero_point_terms = if MIN { None } else { Some(record.add(NC)) };
                    let acts = SubBlockActs { groups, zero_point_terms };
                    sub_block::add_sub_block::<S, RV, NC, BITS>(
                        s,
                        quants,
                        acts,
                        #[inline(always)]
                        |v, c, dot| isum[v][c] = s.add_i(isum[v][c], s.total::<BITS>(dot, acts.zero_point_term(c))),
                    );
                }
                let chunk = unpacked_chunk::<S, Self, RV>(t, b - t.blocks[0], 1 + MIN as usize);
                let (mut line, mut acts) = (if unpacked { chunk } else { quants[0] }, groups);
                // V8 unrolls the loop over groups, which pays for several columns but not for one
                for r in 0..runs {
                    let mut dots: [[S::Acc; NC]; RV] = each!(RV, |_v| each!(NC, |c| s.acc::<BITS>(zero_point(c))));
                    for i in 0..bound {
                        let l = r * run + i;
                        if walked {
                            let w = weights_at::<S, RV>(s, line, |b| match unpacked {
                                true => s.unpacked_weights::<BITS>(b),
                                false => s.weights::<8>(b),
                            });
                            add_group::<S, RV, NC, BITS>(s, w, acts, &mut dots);
                            (line, acts) = (line.wrapping_add(line_step), acts.wrapping_add(acts_step));
                        } else {
                            let load = |v: usize| s.load_b(quants[v].add(l * 64));
                            // with i16 fields, byte weights are stored in the form of the unpack buffer
                            let w = match HAS_I16_FIELDS {
                                true => each!(RV, |v| s.unpacked_weights::<8>(load(v))),
                                false => each!(RV, |v| s.weights::<8>(load(v))),
                            };
                            add_group::<S, RV, NC, BITS>(s, w, groups.add(l * aw * NC), &mut dots);
                        }
                    }
                    for v in 0..RV {
                        for c in 0..NC {
                            let dot = s.total::<BITS>(dots[v][c], zero_point(c));
                            isum[v][c] = if runs > 1 { s.add_i(isum[v][c], dot) } else { dot };
                        }
                    }
                }
                for v in 0..RV {
                    let scales = t.panel[v].add(scales_at + t.lane[v] * 2);
                    let scale = |i: usize| match NC > 1 && S::UNPACKS_SCALES {
                        true => unpacked_scale::<S, Self, RV>(s, chunk, i, v),
                        false => s.load_f16(scales.add(i * 32).cast()),
                    };
                    let d = scale(0);
                    let m = if MIN { scale(1) } else { d };
                    for c in 0..NC {
                        let da = s.splat(f32::from_bits(record.add(c).read()));
                        let mut term = s.mul(s.to_f32(isum[v][c]), s.mul(d, da));
                        if MIN {
                            let asum = s.splat(record.add(NC + c).read() as i32 as f32);
                            term = s.add(term, s.mul(asum, s.mul(m, da)));
                        }
                        acc[v][c] = s.add(acc[v][c], term);
                    }
                }
                s.spill(&mut acc);
                record = record.add(fields.map_or((2 + 8 * aw) * NC, |f| 2 + f.words()));
            }
            store_accumulators(s, &acc, t);
        }
    }
}

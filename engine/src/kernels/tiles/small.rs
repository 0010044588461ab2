//! The legacy types: blocks of 32.

use super::{
    Quant, Shape, Tile, Unpacked, add_group, ask_ahead, nibble_weights, start, store, unpacked_chunk, unpacked_scale,
    weights_at,
};
use crate::kernels::fields::{Fields, IN_FIELDS, add_unit};
use crate::kernels::form::block_at;
use crate::kernels::panel::PANEL;
use crate::kernels::simd::{Ahead, Simd, each};

/// Blocks of 32: `BITS` per quant, `HIGH` = a plane of fifth bits, `MIN` = a minimum.
pub(in super::super) struct Small<const BITS: u32, const HIGH: bool, const MIN: bool>;

impl<const BITS: u32, const HIGH: bool, const MIN: bool> Quant for Small<BITS, HIGH, MIN> {
    const SHAPE: Shape = if BITS < 8 { Shape::Four } else { Shape::Eight };
    const BITS: u32 = BITS;
    const PACKED: bool = BITS < 8;

    #[inline(always)]
    unsafe fn tile<S: Simd, const RV: usize, const NC: usize>(s: S, t: &Tile<'_, RV>) {
        let unpacked = NC > 1 && const { Unpacked::groups::<S, Self>() > 0 };
        let lines = if Self::PACKED { 4 } else { 8 };
        let nibbles = Self::PACKED && !unpacked;
        let (all, run) = if nibbles { (4, S::run(BITS, !MIN) / 2) } else { (8, S::run(BITS, !MIN)) };
        // opaque for the reasons of `Simd::bound`, on every instruction set that unpacks
        let bound = if unpacked { core::hint::black_box(run) } else { s.bound(run) };
        let fields = const { Fields::alone::<NC>(BITS) };
        let runs = if fields.is_some() { 0 } else { all / run };
        let qb = 64 * (lines + HIGH as usize);
        let aw = S::rec(BITS).words();
        // weights of a group side by side are walked through by steps as opaque: of an index the compiler of WebAssembly
        // makes several additions for each load
        let walked = S::UNPACKS && NC > 1;
        assert!(!walked || PANEL.is_multiple_of(RV * S::LANES), "a group in one panel");
        let line_step = if unpacked { RV * 4 * S::LANES } else { 64 };
        let (line_step, acts_step) = if walked { (s.bound(line_step), s.bound(aw * NC)) } else { (0, 0) };
        // SAFETY: offsets stay inside the panels, columns and outputs that the caller vouches for.
        unsafe {
            let mut acc = start::<S, RV, NC>(s, t);
            let (mut rec, mut next) = (t.acts, t.next.clone());
            for b in t.blocks[0]..t.blocks[1] {
                let (quants_at, scales_at) = block_at(qb, 1 + MIN as usize, b);
                let quants: [*const u8; RV] = each!(RV, |v| t.panel[v].add(quants_at + t.lane[v] * 4));
                if NC == 1 {
                    // the quants, and a line of scales
                    let Ahead { packed, bytes, .. } = s.reading().ahead;
                    ask_ahead(s, t, quants, if nibbles { packed } else { bytes }, 0..qb / 64 + 1);
                } else {
                    next.ask(s, 1);
                }
                let first = |c: usize| if MIN { 0 } else { rec.add(NC + c).read() as i32 };
                let mut isum = [[s.splat_i(0); NC]; RV];
                if fields.is_some() {
                    let first = if MIN { None } else { Some(first(0) as u32) };
                    add_unit::<S, RV, BITS>(s, quants, rec.add(2), first, |v, dot| {
                        isum[v][0] = s.add_i(isum[v][0], s.total_of_fields(dot, None));
                    });
                }
                // V8 unrolls the loop over these, which pays for several columns; for one it does not
                let groups = rec.add(2 * NC);
                let chunk = unpacked_chunk::<S, Self, RV>(t, b - t.blocks[0], 1 + MIN as usize);
                let mut high: [S::B; RV] = each!(RV, |v| s.load_b(quants[v].add(if HIGH { lines * 64 } else { 0 })));
                let (mut line, mut acts) = (if unpacked { chunk } else { quants[0] }, groups);
                for r in 0..runs {
                    let mut dots: [[S::Acc; NC]; RV] = each!(RV, |_v| each!(NC, |c| s.acc::<BITS>(first(c))));
                    for i in 0..bound {
                        let l = r * run + i;
                        if walked {
                            let w = weights_at::<S, RV>(s, line, |b| match unpacked {
                                true => s.unpacked_weights::<BITS>(b),
                                false => s.weights::<8>(b),
                            });
                            add_group::<S, RV, NC, BITS>(s, w, acts, &mut dots);
                            (line, acts) = (line.wrapping_add(line_step), acts.wrapping_add(acts_step));
                        } else if nibbles {
                            let acts = |g: usize| rec.add((2 + g * aw) * NC);
                            let lines: [S::B; RV] = each!(RV, |v| s.load_b(quants[v].add(l * 64)));
                            // of groups l and l + 4, as lines move the plane on
                            let first = |v: usize| s.and_b(s.shl16_b(high[v], 4), 16);
                            let w = each!(RV, |v| nibble_weights::<S, BITS, 0>(s, lines[v], || first(v)));
                            add_group::<S, RV, NC, BITS>(s, w, acts(l), &mut dots);
                            let w = each!(RV, |v| nibble_weights::<S, BITS, 1>(s, lines[v], || s.and_b(high[v], 16)));
                            add_group::<S, RV, NC, BITS>(s, w, acts(l + 4), &mut dots);
                            high = each!(RV, |v| s.shr16_b(high[v], 1));
                        } else {
                            let load = |v: usize| s.load_b(quants[v].add(l * 64));
                            // beside fields bytes are as unpacking leaves them
                            let w = match IN_FIELDS {
                                true => each!(RV, |v| s.unpacked_weights::<8>(load(v))),
                                false => each!(RV, |v| s.weights::<8>(load(v))),
                            };
                            add_group::<S, RV, NC, BITS>(s, w, groups.add(l * aw * NC), &mut dots);
                        }
                    }
                    for v in 0..RV {
                        for c in 0..NC {
                            let dot = s.total::<BITS>(dots[v][c], first(c));
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
                        let da = s.splat(f32::from_bits(rec.add(c).read()));
                        let mut term = s.mul(s.to_f32(isum[v][c]), s.mul(d, da));
                        if MIN {
                            let asum = s.splat(rec.add(NC + c).read() as i32 as f32);
                            term = s.add(term, s.mul(asum, s.mul(m, da)));
                        }
                        acc[v][c] = s.add(acc[v][c], term);
                    }
                }
                s.park(&mut acc);
                rec = rec.add(fields.map_or((2 + 8 * aw) * NC, |f| 2 + f.words()));
            }
            store(s, &acc, t);
        }
    }
}

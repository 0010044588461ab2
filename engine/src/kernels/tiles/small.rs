//! The legacy types: blocks of 32.

use super::{Quant, Shape, Tile, ask_ahead, start, store, unpacked_chunk, unpacked_group};
use crate::kernels::form::block_at;
use crate::kernels::simd::{Ahead, FEW_TILES, Simd, each};

/// Blocks of 32: `BITS` per quant, `HIGH` = a plane of fifth bits, `MIN` = a minimum.
pub(in super::super) struct Small<const BITS: u32, const HIGH: bool, const MIN: bool>;

impl<const BITS: u32, const HIGH: bool, const MIN: bool> Quant for Small<BITS, HIGH, MIN> {
    const SHAPE: Shape = if BITS < 8 { Shape::Four } else { Shape::Eight };
    const BITS: u32 = BITS;
    const PACKED: bool = BITS < 8;

    #[inline(always)]
    unsafe fn tile<S: Simd, const RV: usize, const NC: usize>(s: S, t: &Tile<'_, RV>) {
        let unpacked = S::UNPACKS && Self::PACKED && NC > 1;
        let lines = if Self::PACKED { 4 } else { 8 };
        let nibbles = Self::PACKED && !unpacked;
        let bound = s.bound(if nibbles { 4 } else { 8 });
        // looked up in modules for browsers, where code for both widths is to be alike
        let qb = if FEW_TILES && unpacked { t.bytes } else { 64 * (lines + HIGH as usize) };
        let aw = S::rec(BITS).words();
        // SAFETY: offsets stay inside the panels, columns and outputs that the caller vouches for.
        unsafe {
            let mut acc = start::<S, RV, NC>(s, t);
            let mut rec = t.acts;
            for b in t.blocks[0]..t.blocks[1] {
                let (quants_at, scales_at) = block_at(qb, 1 + MIN as usize, b);
                let quants: [*const u8; RV] = each!(RV, |v| t.panel[v].add(quants_at + t.lane[v] * 4));
                if NC == 1 {
                    // the quants, and a line of scales
                    let Ahead { packed, bytes, .. } = s.reading().ahead;
                    ask_ahead(s, t, quants, if nibbles { packed } else { bytes }, 0..qb / 64 + 1);
                }
                let first = |c: usize| if MIN { 0 } else { rec.add(NC + c).read() as i32 };
                let mut dots: [[S::Acc; NC]; RV] = each!(RV, |_v| each!(NC, |c| s.acc::<BITS>(first(c))));
                let chunk = unpacked_chunk::<S, RV>(t, b - t.blocks[0]);
                let high: [S::B; RV] = each!(RV, |v| s.load_b(quants[v].add(if HIGH { lines * 64 } else { 0 })));
                for l in 0..bound {
                    for half in 0..if nibbles { 2 } else { 1 } {
                        let g = l + half * 4;
                        let w: [S::W; RV] = if unpacked {
                            unpacked_group::<S, RV, BITS>(s, chunk, g)
                        } else {
                            each!(RV, |v| {
                                let line = s.load_b(quants[v].add(l * 64));
                                match (nibbles, HIGH) {
                                    (false, _) => s.weights::<8>(line),
                                    (true, false) if half == 0 => s.weights_lo4(line),
                                    (true, false) => s.weights_hi4(line),
                                    (true, true) => {
                                        let low = s.and_b(if half == 0 { line } else { s.shr16_b(line, 4) }, 15);
                                        s.weights::<BITS>(s.or_b(low, fifth_bit(s, high[v], l, half)))
                                    }
                                }
                            })
                        };
                        for c in 0..NC {
                            let a = s.act::<BITS>(rec.add(2 * NC + (g * NC + c) * aw));
                            for v in 0..RV {
                                let dot = s.dot::<BITS>(dots[v][c], w[v], a);
                                dots[v][c] = s.settle::<BITS>(dot, if nibbles { l * 2 + half } else { l } + 1);
                            }
                        }
                    }
                }
                for v in 0..RV {
                    let scales = t.panel[v].add(scales_at + t.lane[v] * 2);
                    let d = s.load_f16(scales.cast());
                    let m = if MIN { s.load_f16(scales.add(32).cast()) } else { d };
                    for c in 0..NC {
                        let da = s.splat(f32::from_bits(rec.add(c).read()));
                        let isum = s.to_f32(s.total::<BITS>(dots[v][c], first(c)));
                        let mut term = s.mul(isum, s.mul(d, da));
                        if MIN {
                            let asum = s.splat(rec.add(NC + c).read() as i32 as f32);
                            term = s.add(term, s.mul(asum, s.mul(m, da)));
                        }
                        acc[v][c] = s.add(acc[v][c], term);
                    }
                }
                s.park(&mut acc);
                rec = rec.add((2 + 8 * aw) * NC);
            }
            store(s, &acc, t);
        }
    }
}

/// The fifth bits of group `l + 4 * half`, at bit 4 of each byte.
#[inline(always)]
fn fifth_bit<S: Simd>(s: S, plane: S::B, l: usize, half: usize) -> S::B {
    let b = if half == 0 { s.shl16_b(plane, 4 - l as u32) } else { s.shr16_b(plane, l as u32) };
    s.and_b(b, 16)
}

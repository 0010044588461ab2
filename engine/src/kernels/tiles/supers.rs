//! Q4_K, Q5_K and Q6_K: super-blocks of 256 with small integer scales.

use super::{Quant, Shape, Tile, ask_for_head, ask_for_share, start, store, unpacked_chunk, unpacked_group};
use crate::kernels::form::HEAD;
use crate::kernels::simd::{FEW_TILES, Simd, each};

/// Q4_K and Q5_K: unsigned quants, eight sub-blocks with 6-bit scales and minima.
pub(in super::super) struct SuperMin<const BITS: u32>;

impl<const BITS: u32> Quant for SuperMin<BITS> {
    const SHAPE: Shape = Shape::Super;
    const BITS: u32 = BITS;

    #[inline(always)]
    unsafe fn tile<S: Simd, const RV: usize, const NC: usize>(s: S, t: &Tile<'_, RV>) {
        let (bytes, nibbles): (usize, _) = if BITS == 5 { (2880, HEAD + 512) } else { (2368, HEAD) };
        let aw = S::rec(BITS).words();
        let unpacked = S::UNPACKS && NC > 1;
        // looked up in modules for browsers, where code for both widths is to be alike
        let bytes = if FEW_TILES && unpacked { t.bytes } else { bytes };
        // the chunk loop stays rolled (opaque bound): unrolled, the compiler interleaves the sub-blocks and spills
        let chunks = core::hint::black_box(4usize);
        let eight = s.bound(8);
        // SAFETY: offsets stay inside the panels, columns and outputs that the caller vouches for.
        unsafe {
            let mut acc = start::<S, RV, NC>(s, t);
            let mut rec = t.acts;
            for b in t.blocks[0]..t.blocks[1] {
                let o: [*const u8; RV] = each!(RV, |v| t.panel[v].add(b * bytes));
                if NC == 1 {
                    ask_for_head(s, t, o, HEAD);
                }
                let mut isum = [[s.splat_i(0); NC]; RV];
                let groups = rec.add(5 * NC);
                for chunk in 0..chunks {
                    if NC == 1 {
                        ask_for_share(s, t, o, bytes, chunk, 4);
                    }
                    for half in 0..2 {
                        let sub = chunk * 2 + half;
                        let here = unpacked_chunk::<S, RV>(t, (b - t.blocks[0]) * 8 + sub);
                        let mut dots: [[S::Acc; NC]; RV] = [[s.acc::<BITS>(0); NC]; RV];
                        for g in 0..eight {
                            let w: [S::W; RV] = if unpacked {
                                unpacked_group::<S, RV, BITS>(s, here, g)
                            } else {
                                each!(RV, |v| {
                                    let line = s.load_b(o[v].add(nibbles + (chunk * 8 + g) * 64 + t.lane[v] * 4));
                                    if BITS == 5 {
                                        let plane = s.load_b(o[v].add(HEAD + g * 64 + t.lane[v] * 4));
                                        let bit = s.and_b(s.shl16_b(s.and_b(s.shr16_b(plane, sub as u32), 1), 4), 16);
                                        let low = s.and_b(if half == 0 { line } else { s.shr16_b(line, 4) }, 15);
                                        s.weights::<BITS>(s.or_b(low, bit))
                                    } else if half == 0 {
                                        s.weights_lo4(line)
                                    } else {
                                        s.weights_hi4(line)
                                    }
                                })
                            };
                            for c in 0..NC {
                                let a = s.act::<BITS>(groups.add(((sub * 8 + g) * NC + c) * aw));
                                for v in 0..RV {
                                    let dot = s.dot::<BITS>(dots[v][c], w[v], a);
                                    dots[v][c] = s.settle::<BITS>(dot, g + 1);
                                }
                            }
                        }
                        for v in 0..RV {
                            let scale = s.load_u8(o[v].add(sub * 16 + t.lane[v]));
                            for c in 0..NC {
                                isum[v][c] = s.add_i(isum[v][c], s.total_scaled::<BITS>(dots[v][c], scale));
                            }
                        }
                    }
                }
                for v in 0..RV {
                    let d = s.load_f16(o[v].add(256 + t.lane[v] * 2).cast());
                    let dmin = s.load_f16(o[v].add(288 + t.lane[v] * 2).cast());
                    for c in 0..NC {
                        let mut msum = s.splat_i(0);
                        for j in 0..4 {
                            let mins = o[v].add(128 + j * 32 + t.lane[v] * 2);
                            msum = s.pair_dot(msum, mins, rec.add((1 + j) * NC + c).read());
                        }
                        let da = s.splat(f32::from_bits(rec.add(c).read()));
                        let term = s.mul(s.to_f32(isum[v][c]), s.mul(d, da));
                        let min = s.mul(s.to_f32(msum), s.mul(dmin, da));
                        acc[v][c] = s.add(acc[v][c], s.sub(term, min));
                    }
                }
                rec = rec.add((5 + 64 * aw) * NC);
            }
            store(s, &acc, t);
        }
    }
}

/// Q6_K: 6-bit quants stored with 32 added, sixteen sub-blocks with signed scales.
pub(in super::super) struct SuperSigned;

impl Quant for SuperSigned {
    const SHAPE: Shape = Shape::Super;
    const BITS: u32 = 6;

    #[inline(always)]
    unsafe fn tile<S: Simd, const RV: usize, const NC: usize>(s: S, t: &Tile<'_, RV>) {
        const BITS: u32 = SuperSigned::BITS;
        let bytes: usize = 3392;
        let aw = S::rec(BITS).words();
        let unpacked = S::UNPACKS && NC > 1;
        let chunks = core::hint::black_box(8usize); // rolled, as above
        // SAFETY: offsets stay inside the panels, columns and outputs that the caller vouches for.
        unsafe {
            let mut acc = start::<S, RV, NC>(s, t);
            let mut rec = t.acts;
            for b in t.blocks[0]..t.blocks[1] {
                let o: [*const u8; RV] = each!(RV, |v| t.panel[v].add(b * bytes));
                if NC == 1 {
                    ask_for_head(s, t, o, HEAD);
                }
                let mut isum = [[s.splat_i(0); NC]; RV];
                let groups = rec.add(17 * NC);
                for chunk in 0..chunks {
                    if NC == 1 {
                        ask_for_share(s, t, o, bytes, chunk, 8);
                    }
                    let here = unpacked_chunk::<S, RV>(t, (b - t.blocks[0]) * 8 + chunk);
                    let lines: [*const u8; RV] = each!(RV, |v| o[v].add(HEAD + chunk * 384 + t.lane[v] * 4));
                    for half in 0..2 {
                        let sub = chunk * 2 + half;
                        let first = |c: usize| rec.add((1 + sub) * NC + c).read() as i32;
                        let mut dots: [[S::Acc; NC]; RV] = each!(RV, |_v| each!(NC, |c| s.acc::<BITS>(first(c))));
                        let high: [S::B; RV] = each!(RV, |v| s.load_b(lines[v].add((4 + half) * 64)));
                        for i in 0..4 {
                            let w: [S::W; RV] = if unpacked {
                                unpacked_group::<S, RV, BITS>(s, here, half * 4 + i)
                            } else {
                                each!(RV, |v| {
                                    let line = s.load_b(lines[v].add(i * 64));
                                    let low = s.and_b(if half == 0 { line } else { s.shr16_b(line, 4) }, 15);
                                    let two = if i < 2 {
                                        s.shl16_b(high[v], 4 - 2 * i as u32)
                                    } else {
                                        s.shr16_b(high[v], 2 * i as u32 - 4)
                                    };
                                    s.weights::<BITS>(s.or_b(low, s.and_b(two, 0x30)))
                                })
                            };
                            for c in 0..NC {
                                let a = s.act::<BITS>(groups.add(((sub * 4 + i) * NC + c) * aw));
                                for v in 0..RV {
                                    let dot = s.dot::<BITS>(dots[v][c], w[v], a);
                                    dots[v][c] = s.settle::<BITS>(dot, i + 1);
                                }
                            }
                        }
                        for v in 0..RV {
                            let scale = s.load_i8(o[v].add(sub * 16 + t.lane[v]).cast());
                            for c in 0..NC {
                                let dot = s.total::<BITS>(dots[v][c], first(c));
                                isum[v][c] = s.add_i(isum[v][c], s.mul_i(dot, scale));
                            }
                        }
                    }
                }
                for v in 0..RV {
                    let d = s.load_f16(o[v].add(256 + t.lane[v] * 2).cast());
                    for c in 0..NC {
                        let da = s.splat(f32::from_bits(rec.add(c).read()));
                        acc[v][c] = s.add(acc[v][c], s.mul(s.to_f32(isum[v][c]), s.mul(d, da)));
                    }
                }
                rec = rec.add((17 + 64 * aw) * NC);
            }
            store(s, &acc, t);
        }
    }
}

//! Register tiles of products with quantised weights: the legacy types, Q4_K, Q5_K and Q6_K. The arithmetic is that at
//! the head of `matmul.rs`, the layouts those at the heads of `panel.rs` and `act.rs`.

use super::form::CodesForm;
use super::simd::Simd;

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

/// Blocks of 32: `BITS` per quant, `HIGH` = a plane of fifth bits, `MIN` = a minimum.
pub(super) struct Small<const BITS: u32, const HIGH: bool, const MIN: bool>;

/// How far ahead decoding prefetches, in bytes of quants.
pub(super) const AHEAD: usize = 2048;

impl<const BITS: u32, const HIGH: bool, const MIN: bool> Quant for Small<BITS, HIGH, MIN> {
    #[inline(always)]
    unsafe fn tile<S: Simd, const RV: usize, const NC: usize>(s: S, t: &Tile<'_, RV>) {
        let nibbles = BITS < 8;
        let lines = if nibbles { 4 } else { 8 };
        let bound = s.bound(lines);
        let qb = 64 * (lines + HIGH as usize);
        let aw = S::rec(BITS).words();
        // SAFETY: offsets stay inside the panels, columns and outputs that the caller vouches for.
        unsafe {
            let mut acc = [[s.splat(0.0); NC]; RV];
            let mut rec = t.acts;
            for b in 0..t.nb {
                let quants: [*const u8; RV] = core::array::from_fn(|v| t.panel[v].add(b * qb + t.lane[v] * 4));
                if NC == 1 {
                    for v in 0..RV {
                        if t.lane[v] == 0 {
                            let scales = t.panel[v].wrapping_add(t.nb * qb + b * 32);
                            s.prefetch(scales.wrapping_add(AHEAD / 8));
                            for l in 0..qb / 64 {
                                s.prefetch(quants[v].wrapping_add(AHEAD + l * 64));
                            }
                        }
                    }
                }
                let first = |c: usize| if MIN { 0 } else { rec.add(NC + c).read() as i32 };
                let mut dots: [[S::Acc; NC]; RV] =
                    core::array::from_fn(|_| core::array::from_fn(|c| s.acc::<BITS>(first(c))));
                let high: [S::B; RV] =
                    core::array::from_fn(|v| s.load_b(quants[v].add(if HIGH { lines * 64 } else { 0 })));
                for l in 0..bound {
                    let line: [S::B; RV] = core::array::from_fn(|v| s.load_b(quants[v].add(l * 64)));
                    for half in 0..if nibbles { 2 } else { 1 } {
                        let g = l + half * 4;
                        let w: [S::W; RV] = core::array::from_fn(|v| match (nibbles, HIGH) {
                            (false, _) => s.weights(line[v]),
                            (true, false) if half == 0 => s.weights_lo4(line[v]),
                            (true, false) => s.weights_hi4(line[v]),
                            (true, true) => {
                                let low = s.and_b(if half == 0 { line[v] } else { s.shr16_b(line[v], 4) }, 15);
                                s.weights(s.or_b(low, fifth_bit(s, high[v], l, half)))
                            }
                        });
                        for c in 0..NC {
                            let a = s.act::<BITS>(rec.add(2 * NC + (g * NC + c) * aw));
                            for v in 0..RV {
                                dots[v][c] = s.dot::<BITS>(dots[v][c], w[v], a);
                            }
                        }
                    }
                }
                for v in 0..RV {
                    let scales = t.panel[v].add(t.nb * qb + b * 32 + t.lane[v] * 2);
                    let d = s.load_f16(scales.cast());
                    let m = if MIN { s.load_f16(scales.add(t.nb * 32).cast()) } else { d };
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

#[inline(always)]
pub(super) unsafe fn store<S: Simd, const RV: usize, const NC: usize>(s: S, acc: &[[S::F; NC]; RV], t: &Tile<'_, RV>) {
    for (v, acc) in acc.iter().enumerate() {
        for (c, acc) in acc.iter().enumerate() {
            // SAFETY: the caller's tile.
            unsafe { s.store(t.out.add(c * t.stride + v * S::LANES), *acc) }
        }
    }
}

/// Q4_K and Q5_K: unsigned quants, eight sub-blocks with 6-bit scales and minima.
pub(super) struct SuperMin<const BITS: u32>;

impl<const BITS: u32> Quant for SuperMin<BITS> {
    #[inline(always)]
    unsafe fn tile<S: Simd, const RV: usize, const NC: usize>(s: S, t: &Tile<'_, RV>) {
        let (bytes, meta) = if BITS == 5 { (2880, 2560) } else { (2368, 2048) };
        let aw = S::rec(BITS).words();
        // the chunk loop stays rolled (opaque bound): unrolled, the compiler interleaves the sub-blocks and spills
        let chunks = core::hint::black_box(4usize);
        let eight = s.bound(8);
        // SAFETY: offsets stay inside the panels, columns and outputs that the caller vouches for.
        unsafe {
            let mut acc = [[s.splat(0.0); NC]; RV];
            let mut rec = t.acts;
            for b in 0..t.nb {
                let o: [*const u8; RV] = core::array::from_fn(|v| t.panel[v].add(b * bytes));
                if NC == 1 {
                    prefetch_record(s, t, o, bytes);
                }
                let mut isum = [[s.splat_i(0); NC]; RV];
                let groups = rec.add(5 * NC);
                for chunk in 0..chunks {
                    for half in 0..2 {
                        let sub = chunk * 2 + half;
                        let mut dots: [[S::Acc; NC]; RV] = [[s.acc::<BITS>(0); NC]; RV];
                        for g in 0..eight {
                            let w: [S::W; RV] = core::array::from_fn(|v| {
                                let line = s.load_b(o[v].add((chunk * 8 + g) * 64 + t.lane[v] * 4));
                                if BITS == 5 {
                                    let plane = s.load_b(o[v].add(2048 + g * 64 + t.lane[v] * 4));
                                    let bit = s.and_b(s.shl16_b(s.and_b(s.shr16_b(plane, sub as u32), 1), 4), 16);
                                    let low = s.and_b(if half == 0 { line } else { s.shr16_b(line, 4) }, 15);
                                    s.weights(s.or_b(low, bit))
                                } else if half == 0 {
                                    s.weights_lo4(line)
                                } else {
                                    s.weights_hi4(line)
                                }
                            });
                            for c in 0..NC {
                                let a = s.act::<BITS>(groups.add(((sub * 8 + g) * NC + c) * aw));
                                for v in 0..RV {
                                    dots[v][c] = s.dot::<BITS>(dots[v][c], w[v], a);
                                }
                            }
                        }
                        for v in 0..RV {
                            let scale = s.load_u8(o[v].add(meta + sub * 16 + t.lane[v]));
                            for c in 0..NC {
                                isum[v][c] = s.add_i(isum[v][c], s.total_scaled::<BITS>(dots[v][c], scale));
                            }
                        }
                    }
                }
                for v in 0..RV {
                    let d = s.load_f16(o[v].add(meta + 256 + t.lane[v] * 2).cast());
                    let dmin = s.load_f16(o[v].add(meta + 288 + t.lane[v] * 2).cast());
                    for c in 0..NC {
                        let mut msum = s.splat_i(0);
                        for j in 0..4 {
                            let mins = o[v].add(meta + 128 + j * 32 + t.lane[v] * 2);
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

/// Asks for the next record of each panel.
#[inline(always)]
pub(super) fn prefetch_record<S: Simd, const RV: usize>(s: S, t: &Tile<'_, RV>, o: [*const u8; RV], bytes: usize) {
    for v in 0..RV {
        if t.lane[v] == 0 {
            for l in 0..bytes / 64 {
                s.prefetch(o[v].wrapping_add(bytes + l * 64));
            }
        }
    }
}

/// Q6_K: 6-bit quants stored with 32 added, sixteen sub-blocks with signed scales.
pub(super) struct SuperSigned;

impl Quant for SuperSigned {
    #[inline(always)]
    unsafe fn tile<S: Simd, const RV: usize, const NC: usize>(s: S, t: &Tile<'_, RV>) {
        const BITS: u32 = 6;
        let bytes = 3392;
        let aw = S::rec(BITS).words();
        let chunks = core::hint::black_box(8usize); // rolled, as above
        // SAFETY: offsets stay inside the panels, columns and outputs that the caller vouches for.
        unsafe {
            let mut acc = [[s.splat(0.0); NC]; RV];
            let mut rec = t.acts;
            for b in 0..t.nb {
                let o: [*const u8; RV] = core::array::from_fn(|v| t.panel[v].add(b * bytes));
                if NC == 1 {
                    prefetch_record(s, t, o, bytes);
                }
                let mut isum = [[s.splat_i(0); NC]; RV];
                let groups = rec.add(17 * NC);
                for chunk in 0..chunks {
                    for half in 0..2 {
                        let sub = chunk * 2 + half;
                        let first = |c: usize| rec.add((1 + sub) * NC + c).read() as i32;
                        let mut dots: [[S::Acc; NC]; RV] =
                            core::array::from_fn(|_| core::array::from_fn(|c| s.acc::<BITS>(first(c))));
                        let high: [S::B; RV] =
                            core::array::from_fn(|v| s.load_b(o[v].add(2048 + sub * 64 + t.lane[v] * 4)));
                        for i in 0..4 {
                            let w: [S::W; RV] = core::array::from_fn(|v| {
                                let line = s.load_b(o[v].add((chunk * 4 + i) * 64 + t.lane[v] * 4));
                                let low = s.and_b(if half == 0 { line } else { s.shr16_b(line, 4) }, 15);
                                let two = if i < 2 {
                                    s.shl16_b(high[v], 4 - 2 * i as u32)
                                } else {
                                    s.shr16_b(high[v], 2 * i as u32 - 4)
                                };
                                s.weights(s.or_b(low, s.and_b(two, 0x30)))
                            });
                            for c in 0..NC {
                                let a = s.act::<BITS>(groups.add(((sub * 4 + i) * NC + c) * aw));
                                for v in 0..RV {
                                    dots[v][c] = s.dot::<BITS>(dots[v][c], w[v], a);
                                }
                            }
                        }
                        for v in 0..RV {
                            let scale = s.load_i8(o[v].add(3072 + sub * 16 + t.lane[v]).cast());
                            for c in 0..NC {
                                let dot = s.total::<BITS>(dots[v][c], first(c));
                                isum[v][c] = s.add_i(isum[v][c], s.mul_i(dot, scale));
                            }
                        }
                    }
                }
                for v in 0..RV {
                    let d = s.load_f16(o[v].add(3328 + t.lane[v] * 2).cast());
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

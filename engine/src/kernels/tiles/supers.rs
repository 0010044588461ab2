//! Q4_K, Q5_K and Q6_K: super-blocks of 256 with small integer scales.

use super::{
    Quant, Shape, Tile, add_group, ask_for_head, ask_for_share, nibble_weights, start, store, unpacked_chunk,
    unpacked_group,
};
use crate::kernels::fields::{Fields, add_unit};
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
        let fields = const { Fields::alone::<NC>(BITS) };
        let words = 5 + fields.map_or(64 * aw, |f| 8 * f.words());
        // looked up in modules for browsers, where code for both widths is to be alike
        let bytes = if FEW_TILES && unpacked { t.bytes } else { bytes };
        // the chunk loop stays rolled (opaque bound): unrolled, the compiler interleaves the sub-blocks and spills
        let chunks = if fields.is_some() { 0 } else { core::hint::black_box(4usize) };
        // SAFETY: offsets stay inside the panels, columns and outputs that the caller vouches for.
        unsafe {
            let mut acc = start::<S, RV, NC>(s, t);
            let (mut rec, mut next) = (t.acts, t.next.clone());
            for b in t.blocks[0]..t.blocks[1] {
                let o: [*const u8; RV] = each!(RV, |v| t.panel[v].add(b * bytes));
                if NC == 1 {
                    ask_for_head(s, t, o, HEAD);
                }
                let mut isum = [[s.splat_i(0); NC]; RV];
                let groups = rec.add(5 * NC);
                if let Some(f) = fields {
                    for sub in 0..core::hint::black_box(8) {
                        let lines = each!(RV, |v| o[v].add(HEAD + sub * f.unit_bytes() + t.lane[v] * 4));
                        let scales: [*const u8; RV] = each!(RV, |v| o[v].add(sub * 16 + t.lane[v]));
                        add_unit::<S, RV, BITS>(s, lines, groups.add(sub * f.words()), None, |v, dot| {
                            let scaled = s.total_of_fields(dot, Some(s.load_u8(scales[v])));
                            isum[v][0] = s.add_i(isum[v][0], scaled);
                        });
                    }
                }
                for chunk in 0..chunks {
                    if NC == 1 {
                        ask_for_share(s, t, o, bytes, chunk, 4);
                    } else {
                        next.ask(s, 2);
                    }
                    let sub_block = |half: usize| {
                        let sub = chunk * 2 + half;
                        SubBlock {
                            lines: each!(RV, |v| o[v].add(nibbles + chunk * 512 + t.lane[v] * 4)),
                            high: each!(RV, |v| o[v].add(HEAD + t.lane[v] * 4)),
                            scales: each!(RV, |v| o[v].add(sub * 16 + t.lane[v])),
                            unpacked: unpacked_chunk::<S, Self, RV>(t, (b - t.blocks[0]) * 8 + sub, 0),
                            groups: groups.add(sub * 8 * NC * aw),
                        }
                    };
                    for half in 0..2 {
                        let (x, sub) = (sub_block(half), chunk * 2 + half);
                        if half == 0 || FEW_TILES && unpacked {
                            x.add_unsigned::<S, NC, BITS, 0>(s, sub, &mut isum);
                        } else {
                            x.add_unsigned::<S, NC, BITS, 1>(s, sub, &mut isum);
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
                rec = rec.add(words * NC);
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
        let (aw, unpacked) = (S::rec(BITS).words(), S::UNPACKS && NC > 1);
        let fields = const { Fields::alone::<NC>(BITS) };
        let words = 17 + fields.map_or(64 * aw, |f| 16 * f.words());
        let chunks = if fields.is_some() { 0 } else { core::hint::black_box(8usize) }; // rolled, as above
        // SAFETY: offsets stay inside the panels, columns and outputs that the caller vouches for.
        unsafe {
            let mut acc = start::<S, RV, NC>(s, t);
            let (mut rec, mut next) = (t.acts, t.next.clone());
            for b in t.blocks[0]..t.blocks[1] {
                let o: [*const u8; RV] = each!(RV, |v| t.panel[v].add(b * bytes));
                if NC == 1 {
                    ask_for_head(s, t, o, HEAD);
                }
                let mut isum = [[s.splat_i(0); NC]; RV];
                let groups = rec.add(17 * NC);
                if let Some(f) = fields {
                    for sub in 0..core::hint::black_box(16) {
                        let lines = each!(RV, |v| o[v].add(HEAD + sub * f.unit_bytes() + t.lane[v] * 4));
                        let scales: [*const u8; RV] = each!(RV, |v| o[v].add(sub * 16 + t.lane[v]));
                        let first = Some(rec.add(1 + sub).read());
                        add_unit::<S, RV, BITS>(s, lines, groups.add(sub * f.words()), first, |v, dot| {
                            let scaled = s.total_of_fields(dot, Some(s.load_i8(scales[v].cast())));
                            isum[v][0] = s.add_i(isum[v][0], scaled);
                        });
                    }
                }
                for chunk in 0..chunks {
                    if NC == 1 {
                        ask_for_share(s, t, o, bytes, chunk, 8);
                    } else {
                        next.ask(s, 1);
                    }
                    let sub_block = |half: usize| {
                        let sub = chunk * 2 + half;
                        let lines = HEAD + chunk * 384;
                        SubBlock {
                            lines: each!(RV, |v| o[v].add(lines + t.lane[v] * 4)),
                            high: each!(RV, |v| o[v].add(lines + (4 + half) * 64 + t.lane[v] * 4)),
                            scales: each!(RV, |v| o[v].add(sub * 16 + t.lane[v])),
                            unpacked: unpacked_chunk::<S, Self, RV>(t, (b - t.blocks[0]) * 8 + chunk, 0)
                                .wrapping_add(half * 4 * RV * 4 * S::LANES),
                            groups: groups.add(sub * 4 * NC * aw),
                        }
                    };
                    for half in 0..2 {
                        let (x, first) = (sub_block(half), rec.add((1 + chunk * 2 + half) * NC));
                        if half == 0 || FEW_TILES && unpacked {
                            x.add_signed::<S, NC, 0>(s, first, &mut isum);
                        } else {
                            x.add_signed::<S, NC, 1>(s, first, &mut isum);
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
                rec = rec.add(words * NC);
            }
            store(s, &acc, t);
        }
    }
}

/// Elements of a super-block that have a scale in common, in some vectors of rows, and their activations.
struct SubBlock<const RV: usize> {
    /// Nibbles; of two sub-blocks, the first has the low ones.
    lines: [*const u8; RV],
    /// Bits above.
    high: [*const u8; RV],
    scales: [*const u8; RV],
    unpacked: *const u8,
    groups: *const u32,
}

impl<const RV: usize> SubBlock<RV> {
    /// Adds `scale * dot`, of the 32 elements of sub-block `sub` with unsigned quants; `HALF` is that of the nibbles.
    ///
    /// # Safety
    /// The elements and their activations are there.
    #[inline(always)]
    unsafe fn add_unsigned<S: Simd, const NC: usize, const BITS: u32, const HALF: usize>(
        &self,
        s: S,
        sub: usize,
        isum: &mut [[S::I; NC]; RV],
    ) {
        let (run, aw) = (S::run(BITS, false), S::rec(BITS).words());
        let bound = s.bound(run);
        // SAFETY: the caller's.
        unsafe {
            for r in 0..8 / run {
                let mut dots: [[S::Acc; NC]; RV] = [[s.acc::<BITS>(0); NC]; RV];
                for i in 0..bound {
                    let g = r * run + i;
                    let w: [S::W; RV] = if S::UNPACKS && NC > 1 {
                        unpacked_group::<S, RV, BITS>(s, self.unpacked, g)
                    } else {
                        each!(RV, |v| {
                            let line = s.load_b(self.lines[v].add(g * 64));
                            let fifth = || s.sixteens(s.load_b(self.high[v].add(g * 64)), sub);
                            nibble_weights::<S, BITS, HALF>(s, line, fifth)
                        })
                    };
                    add_group::<S, RV, NC, BITS>(s, w, self.groups.add(g * NC * aw), &mut dots);
                }
                for v in 0..RV {
                    let scale = s.load_u8(self.scales[v]);
                    for c in 0..NC {
                        isum[v][c] = s.add_i(isum[v][c], s.total_scaled::<BITS>(dots[v][c], 0, scale));
                    }
                }
            }
        }
    }

    /// The same of 16 elements of 6 bits, whose scales have signs; dots begin from `first`.
    ///
    /// # Safety
    /// The elements and their activations are there.
    #[inline(always)]
    unsafe fn add_signed<S: Simd, const NC: usize, const HALF: usize>(
        &self,
        s: S,
        first: *const u32,
        isum: &mut [[S::I; NC]; RV],
    ) {
        const BITS: u32 = SuperSigned::BITS;
        let aw = S::rec(BITS).words();
        // SAFETY: the caller's.
        unsafe {
            let first = |c: usize| first.add(c).read() as i32;
            let mut dots: [[S::Acc; NC]; RV] = each!(RV, |_v| each!(NC, |c| s.acc::<BITS>(first(c))));
            let mut high: [S::B; RV] = each!(RV, |v| s.load_b(self.high[v]));
            for g in 0..4 {
                let w: [S::W; RV] = if S::UNPACKS && NC > 1 {
                    unpacked_group::<S, RV, BITS>(s, self.unpacked, g)
                } else {
                    each!(RV, |v| {
                        let line = s.load_b(self.lines[v].add(g * 64));
                        let low = s.and_b(if HALF == 0 { line } else { s.shr16_b(line, 4) }, 15);
                        let two = s.and_b(s.shl16_b(high[v], 4), 0x30);
                        high[v] = s.shr16_b(high[v], 2);
                        s.weights::<BITS>(s.or_b(low, two))
                    })
                };
                add_group::<S, RV, NC, BITS>(s, w, self.groups.add(g * NC * aw), &mut dots);
            }
            for v in 0..RV {
                let scale = s.load_i8(self.scales[v].cast());
                for c in 0..NC {
                    isum[v][c] = s.add_i(isum[v][c], s.total_scaled::<BITS>(dots[v][c], first(c), scale));
                }
            }
        }
    }
}

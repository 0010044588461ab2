//! Codebook types: a table look-up turns codes into weights.
#![allow(unsafe_code)]

use super::{
    QuantFormat, TileArgs, TileClass, add_group, load_accumulators, prefetch_ahead, prefetch_head,
    prefetch_record_part, store_accumulators, unpacked_chunk, unpacked_group, unpacked_scale,
};
use crate::kernels::panel_layout::{CodebookLayout, HEAD, block_at, code_line};
use crate::kernels::simd::{Simd, each};

/// Codes in blocks of 32, with one scale, or one per half.
pub(in crate::kernels) struct Codes32;

impl QuantFormat for Codes32 {
    const TILE_CLASS: TileClass = TileClass::Eight;
    const BITS: u32 = 8;

    #[inline(always)]
    unsafe fn tile<S: Simd, const RV: usize, const NC: usize>(s: S, t: &TileArgs<'_, RV>) {
        let Some(f) = t.codes else { return };
        let (qb, aw) = (f.chunk_bytes(), S::act_encoding(8).words());
        let halves = 2 / f.parts; // per scale
        // SAFETY: offsets stay inside the panels, columns and outputs that the caller vouches for.
        unsafe {
            let table = s.load_table(f.offset_table.as_ptr());
            let mut acc = load_accumulators::<S, RV, NC>(s, t);
            let (mut record, mut prefetch) = (t.acts, t.prefetch.clone());
            for b in t.blocks[0]..t.blocks[1] {
                let (quants_at, scales_at) = block_at(qb, f.parts, b);
                let quants: [*const u8; RV] = each!(RV, |v| t.panel[v].add(quants_at + t.lane[v] * 4));
                if NC == 1 {
                    prefetch_ahead(s, t, quants, s.prefetch_policy().distance.packed, 0..f.width + 1);
                } else {
                    prefetch.prefetch_chunk(s);
                }
                let chunk = CodeChunk { quants, unpacked: unpacked_chunk::<S, Self, RV>(t, b - t.blocks[0], f.parts) };
                let groups = record.add((1 + f.parts) * NC);
                for part in 0..f.parts {
                    let zero_point = |c: usize| record.add((1 + part) * NC + c).read() as i32;
                    let mut dots: [[S::Acc; NC]; RV] = each!(RV, |_v| each!(NC, |c| s.acc::<8>(zero_point(c))));
                    for half in part * halves..(part + 1) * halves {
                        chunk.add_half(s, f, table, half, groups.add(half * 4 * NC * aw), &mut dots);
                    }
                    for v in 0..RV {
                        let scales = t.panel[v].add(scales_at + part * 32 + t.lane[v] * 2);
                        let d = match f.bf16() {
                            _ if S::UNPACKS_SCALES && NC > 1 => {
                                unpacked_scale::<S, Self, RV>(s, chunk.unpacked, part, v)
                            }
                            true => s.load_bf16(scales.cast()),
                            false => s.load_f16(scales.cast()),
                        };
                        for c in 0..NC {
                            let da = s.splat(f32::from_bits(record.add(c).read()));
                            let isum = s.to_f32(s.total::<8>(dots[v][c], zero_point(c)));
                            acc[v][c] = s.add(acc[v][c], s.mul(isum, s.mul(d, da)));
                        }
                    }
                }
                record = record.add((1 + f.parts + 8 * aw) * NC);
            }
            store_accumulators(s, &acc, t);
        }
    }
}

/// 32 elements: their codes, and their unpacked weights if they were unpacked.
struct CodeChunk<const RV: usize> {
    quants: [*const u8; RV],
    unpacked: *const u8,
}

impl<const RV: usize> CodeChunk<RV> {
    /// Adds 16 elements to the dots.
    ///
    /// # Safety
    /// The chunk must be readable, and `groups` point at the activations of these elements.
    #[inline(always)]
    unsafe fn add_half<S: Simd, const NC: usize>(
        &self,
        s: S,
        f: &CodebookLayout,
        table: S::B,
        half: usize,
        groups: *const u32,
        dots: &mut [[S::Acc; NC]; RV],
    ) {
        // SAFETY: the contract of this function, which its caller keeps.
        unsafe {
            if S::UNPACKS && NC > 1 {
                // opaque as in `Simd::bound`
                for i in 0..core::hint::black_box(4) {
                    let w = unpacked_group::<S, RV, 8>(s, self.unpacked, half * 4 + i);
                    add_group::<S, RV, NC, 8>(s, w, groups.add(i * NC * S::act_encoding(8).words()), dots);
                }
            } else if half == 0 {
                self.unpack_half::<S, NC, 0>(s, f, table, groups, dots);
            } else {
                self.unpack_half::<S, NC, 1>(s, f, table, groups, dots);
            }
        }
    }

    /// [`CodeChunk::add_half`] for codes that were not unpacked. `HALF` is a constant because shifts by variables are
    /// slow in WebAssembly.
    ///
    /// # Safety
    /// As [`CodeChunk::add_half`].
    #[inline(always)]
    unsafe fn unpack_half<S: Simd, const NC: usize, const HALF: usize>(
        &self,
        s: S,
        f: &CodebookLayout,
        table: S::B,
        groups: *const u32,
        dots: &mut [[S::Acc; NC]; RV],
    ) {
        // SAFETY: the contract of this function, which its caller keeps.
        unsafe {
            let load = |v: usize, line: usize| s.load_b(self.quants[v].add(line * 64));
            let weights = |codes: S::B| s.weights::<8>(s.look_up(table, s.and_b(codes, 15)));
            let groups = |i: usize| groups.add(i * NC * S::act_encoding(8).words());
            if f.width == 4 {
                for i in 0..4 {
                    let nibbles = |line: S::B| if HALF == 0 { line } else { s.shr16_b(line, 4) };
                    let w: [S::W; RV] = each!(RV, |v| weights(nibbles(load(v, i))));
                    add_group::<S, RV, NC, 8>(s, w, groups(i), dots);
                }
            } else {
                for i in 0..4 {
                    let (line, shift) = code_line(HALF * 4 + i, f.width);
                    let w: [S::W; RV] = each!(RV, |v| weights(s.shr16_b(load(v, line), shift as u32)));
                    add_group::<S, RV, NC, 8>(s, w, groups(i), dots);
                }
            }
        }
    }
}

/// Codes in super-blocks of 256: sixteen sub-blocks with signed scales, in Q2_K also with minima.
///
/// The sums fit i32: a dot of 16 is at most 16 * 127 * 127 and a scale within -32..=31, so the 16 sub-blocks sum to
/// less than 2^28.
pub(in crate::kernels) struct SuperCodes;

impl QuantFormat for SuperCodes {
    const TILE_CLASS: TileClass = TileClass::Super;
    const BITS: u32 = 8;

    #[inline(always)]
    unsafe fn tile<S: Simd, const RV: usize, const NC: usize>(s: S, t: &TileArgs<'_, RV>) {
        let Some(f) = t.codes else { return };
        let (bytes, codes, aw) = (f.record_bytes(), f.codes(), S::act_encoding(8).words());
        let head = if f.has_min() { 25 } else { 17 };
        let chunks = core::hint::black_box(8usize); // opaque, so that the loop is not unrolled
        // SAFETY: offsets stay inside the panels, columns and outputs that the caller vouches for.
        unsafe {
            let table = s.load_table(f.offset_table.as_ptr());
            let mut acc = load_accumulators::<S, RV, NC>(s, t);
            let (mut record, mut prefetch) = (t.acts, t.prefetch.clone());
            for b in t.blocks[0]..t.blocks[1] {
                let o: [*const u8; RV] = each!(RV, |v| t.panel[v].add(b * bytes));
                if NC == 1 {
                    prefetch_head(s, t, o, codes);
                }
                let mut isum = [[s.splat_i(0); NC]; RV];
                let groups = record.add(head * NC);
                for chunk in 0..chunks {
                    if NC == 1 {
                        prefetch_record_part(s, t, o, bytes, chunk);
                    } else {
                        prefetch.prefetch_chunk(s);
                    }
                    let quants: [*const u8; RV] =
                        each!(RV, |v| o[v].add(codes + chunk * f.chunk_bytes() + t.lane[v] * 4));
                    let here = CodeChunk {
                        quants,
                        unpacked: unpacked_chunk::<S, Self, RV>(t, (b - t.blocks[0]) * 8 + chunk, 0),
                    };
                    for half in 0..2 {
                        let sub = chunk * 2 + half;
                        let zero_point = |c: usize| record.add((1 + sub) * NC + c).read() as i32;
                        let mut dots: [[S::Acc; NC]; RV] = each!(RV, |_v| each!(NC, |c| s.acc::<8>(zero_point(c))));
                        here.add_half(s, f, table, half, groups.add(sub * 4 * NC * aw), &mut dots);
                        for v in 0..RV {
                            let scale = s.load_i8(o[v].add(sub * 16 + t.lane[v]).cast());
                            for c in 0..NC {
                                let dot = s.total::<8>(dots[v][c], zero_point(c));
                                isum[v][c] = s.add_i(isum[v][c], s.mul_i(dot, scale));
                            }
                        }
                    }
                }
                for v in 0..RV {
                    let d = s.load(o[v].add(256 + t.lane[v] * 4).cast());
                    for c in 0..NC {
                        let da = s.splat(f32::from_bits(record.add(c).read()));
                        let mut term = s.mul(s.to_f32(isum[v][c]), s.mul(d, da));
                        if f.has_min() {
                            let mut msum = s.splat_i(0);
                            for j in 0..8 {
                                let mins = o[v].add(HEAD + j * 32 + t.lane[v] * 2);
                                msum = s.pair_dot(msum, mins, record.add((17 + j) * NC + c).read());
                            }
                            let dmin = s.load(o[v].add(HEAD + 256 + t.lane[v] * 4).cast());
                            term = s.sub(term, s.mul(s.to_f32(msum), s.mul(dmin, da)));
                        }
                        acc[v][c] = s.add(acc[v][c], term);
                    }
                }
                record = record.add((head + 64 * aw) * NC);
            }
            store_accumulators(s, &acc, t);
        }
    }
}

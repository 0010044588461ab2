//! Records of packed activations: written column by column, and read back for the scalar definition.
#![allow(unsafe_code)]

use super::quantise::PartSums;
use super::{AMX_COLUMNS, ActLayout, PackedActs, Sums};
use crate::kernels::simd::ActEncoding;

/// Writes column `c` of a record of `nc` columns.
// one copy for all blocks in modules without relaxed-simd, to keep them small
#[cfg_attr(any(not(target_family = "wasm"), target_feature = "relaxed-simd"), inline(always))]
pub(super) fn write_record(
    layout: ActLayout,
    q: &[i8],
    sums: PartSums<'_>,
    d: f32,
    nc: usize,
    c: usize,
    out: &mut [u32],
) {
    // opaque, or the compiler keeps an address per group in registers
    let (fields, nc) = (layout.fields(nc), core::hint::black_box(nc));
    let mut at = c;
    let mut put = |v: u32| {
        out[at] = v;
        at += nc;
    };
    put(d.to_bits());
    if layout.zero_point_terms > 0 {
        // the zero-point terms
        match layout.encoding {
            ActEncoding::AbsAndMask => sums.subset.iter().for_each(|sum| put(-sum as u32)),
            encoding if encoding == ActEncoding::I8PairSums || fields.is_some() => {
                sums.all.iter().zip(sums.subset).for_each(|(all, last)| {
                    put(pair((-layout.offset * (all - *last)) as i16, (-layout.offset * *last) as i16));
                })
            }
            encoding => {
                let offset = if encoding == ActEncoding::I16OddSigned { sums.subset } else { &mut *sums.all };
                offset.iter().for_each(|sum| put((-layout.offset * sum) as u32));
            }
        }
    }
    match layout.sums {
        Sums::None => {}
        Sums::Block => put(sums.all[0] as u32),
        Sums::Pairs(_) => sums.all.chunks_exact(2).for_each(|s| put(pair(s[0] as i16, s[1] as i16))),
    }
    let groups = &mut out[at - c..];
    if let Some(f) = fields {
        return f.write_factors(q, groups);
    }
    if layout.uses_amx() && nc == AMX_COLUMNS {
        return write_amx_columns(layout.encoding, q, c, groups);
    }
    write_groups(layout.encoding, q, nc, c, groups);
}

/// Writes the bytes of column `c` of an AMX tile.
#[inline(always)]
fn write_amx_columns(encoding: ActEncoding, q: &[i8], c: usize, out: &mut [u32]) {
    let row = q.len().min(64);
    for (q, out) in q.chunks_exact(row).zip(out.chunks_exact_mut(AMX_COLUMNS * row / 4)) {
        write_groups(encoding, q, 1, 0, &mut out[c * row / 4..]);
    }
}

fn pair(a: i16, b: i16) -> u32 {
    u32::from(a as u16) | u32::from(b as u16) << 16
}

/// The magnitudes of four i8, and the xor mask for weights: 0x7f where the i8 is negative, else 0x80.
#[inline(always)]
fn magnitudes(word: u32) -> (u32, u32) {
    let negative = word >> 7 & 0x0101_0101;
    let ones = negative * 0xff;
    ((word ^ ones) + negative, ones ^ 0x8080_8080)
}

/// Two words of i16 pairs from four i8: (q0, q2), and (q1 - 256 q0, q3 - 256 q2).
#[inline(always)]
fn halves(word: u32) -> (u32, u32) {
    let (even, odd) = (word & 0x00ff_00ff, word >> 8 & 0x00ff_00ff);
    // sign-extends q0 and q2 to 16 bits
    let extended = even | ((even >> 7 & 0x0001_0001) * 0xff00);
    // the upper byte is the sign of the odd q, 0 or -1, minus the even q
    let upper = 0x0200_0200 - (even + (odd >> 7 & 0x0001_0001));
    (extended, odd | (upper & 0x00ff_00ff) << 8)
}

/// Writes the words of the groups of column `c`.
#[inline(always)]
pub(in crate::kernels) fn write_groups(encoding: ActEncoding, q: &[i8], nc: usize, c: usize, out: &mut [u32]) {
    let mut at = c * encoding.words();
    for q in q.chunks_exact(4) {
        // a single load: compilers load four bytes one by one
        // SAFETY: four bytes.
        let word = u32::from_le(unsafe { q.as_ptr().cast::<u32>().read_unaligned() });
        let (first, second) = match encoding {
            ActEncoding::I8 | ActEncoding::I8PairSums => (word, 0),
            ActEncoding::AbsAndMask => magnitudes(word),
            ActEncoding::I16 | ActEncoding::I16OddSigned => halves(word),
        };
        out[at] = first;
        if encoding.words() == 2 {
            out[at + 1] = second;
        }
        at += nc * encoding.words();
    }
}

/// Zero-point term of a dot of `q` with 8-bit weights.
pub(in crate::kernels) fn zero_point_term_of_bytes(encoding: ActEncoding, q: &[i8]) -> i32 {
    let q = q.iter().map(|&q| i32::from(q));
    match encoding {
        ActEncoding::AbsAndMask => -q.map(|q| q.min(0)).sum::<i32>(),
        ActEncoding::I16OddSigned => -128 * q.step_by(2).sum::<i32>(),
        _ => -128 * q.sum::<i32>(),
    }
}

/// Reads block `b` of column `c`: fills `q` and returns the scale. For the scalar definition of products.
pub(in crate::kernels) fn read_block(a: &PackedActs<'_>, c: usize, b: usize, q: &mut [i8]) -> f32 {
    debug_assert!(a.layout.nc == 1 && a.layout.encoding == ActEncoding::I8 && a.layout.fields == 0);
    let words = a.layout.words;
    let record = &a.words[(c * (a.k / a.layout.block) + b) * words..][..words];
    for (q, w) in q.chunks_exact_mut(4).zip(&record[a.layout.head()..]) {
        for (q, b) in q.iter_mut().zip(w.to_le_bytes()) {
            *q = b as i8;
        }
    }
    f32::from_bits(record[0])
}

//! Packing of 4-, 5- and 6-bit weights as bit fields of 16-bit lanes, for simd128, which multiplies 16-bit lanes but
//! not bytes. Only in builds that run on no other instruction set.
//!
//! A sub-block is the 32 elements (16 in Q6_K) that share a scale. Element `e` belongs to half `h = e%4/2` and has
//! index `j = e/4*2 + e%2` in it. A line is 64 bytes; the lane of row `r` and half `h` is at `r*4 + h*2`. From bit 0 on
//! a lane holds:
//!
//! - 4 bits, 4 lines: four fields; line l has the elements `4l + i`;
//! - 5 bits, 5 lines: three fields, `3l + i`, and bit l of the last element;
//! - 6 bits, 3 lines: two fields, `2l + i`, and two bits, from 2l on, of each of the last two elements.
//!
//! A line needs no masks: it is shifted to each of its fields and multiplied whole, and the factors cancel what lies
//! above the field. With fields `x_i` from bit `s_i` on and multipliers `m_i`,
//!
//! ```text
//! sum_i x_i m_i = sum_i (line >> s_i) * c_i,   c_0 = m_0, c_i = m_i - 2^(s_i - s_(i-1)) m_(i-1)
//! ```
//!
//! The arithmetic is modulo 2^16 and exact, as the sums of a sub-block fit i16 (see `max_i16_groups`). Without a
//! zero-point term only two lines of 5 bits fit: `(6*31 + 3*4)*127 = 25,146`; three would overflow.
#![allow(unsafe_code)]

use core::ops::Range;

use crate::kernels::simd::{Simd, each};

/// Whether panels of this build hold i16 fields: builds for simd128 without relaxed-simd.
pub(in crate::kernels) const HAS_I16_FIELDS: bool =
    cfg!(all(target_family = "wasm", target_feature = "simd128", not(target_feature = "relaxed-simd")));

/// The i16 fields of one weight width.
pub(in crate::kernels) struct I16Fields {
    bits: u32,
    /// Elements of a sub-block.
    pub(in crate::kernels) len: usize,
    /// Lines of a sub-block.
    lines: usize,
    /// Fields of a line that hold a whole element; the others hold a part of one.
    whole: usize,
    /// Bits of a part.
    part: u32,
    /// First bit of each field.
    shifts: [u32; 4],
}

static I16_FIELDS: [I16Fields; 3] = [
    I16Fields { bits: 4, len: 32, lines: 4, whole: 4, part: 0, shifts: [0, 4, 8, 12] },
    I16Fields { bits: 5, len: 32, lines: 5, whole: 3, part: 1, shifts: [0, 5, 10, 15] },
    I16Fields { bits: 6, len: 16, lines: 3, whole: 2, part: 2, shifts: [0, 6, 12, 14] },
];

/// Words of activation factors per line.
const WORDS: usize = 4;

impl I16Fields {
    /// The fields of weights of that width; `None` for bytes, and in builds without i16 fields.
    pub(in crate::kernels) const fn of(bits: u32) -> Option<&'static I16Fields> {
        match bits {
            4..=6 if HAS_I16_FIELDS => Some(&I16_FIELDS[bits as usize - 4]),
            _ => None,
        }
    }

    /// The fields that a tile of `NC` columns reads: only gemv does; tiles of several columns unpack.
    pub(in crate::kernels) const fn for_columns<const NC: usize>(bits: u32) -> Option<&'static I16Fields> {
        if NC == 1 { I16Fields::of(bits) } else { None }
    }

    /// Words of activation factors per sub-block and column.
    pub(in crate::kernels) const fn words(&self) -> usize {
        self.lines * WORDS
    }

    /// Number of lines whose dots fit in i16 together.
    const fn max_lines(&self, has_zero_point: bool) -> usize {
        if self.bits == 5 && !has_zero_point { 2 } else { self.lines }
    }

    /// Content of field `i` of a line: index of the element, and its first bit there.
    #[inline(always)]
    fn content(&self, line: usize, i: usize) -> (usize, u32) {
        match i.checked_sub(self.whole) {
            None => (line * self.whole + i, 0),
            Some(part) => (self.lines * self.whole + part, line as u32 * self.part),
        }
    }

    /// Position of element `j` of a half: range of lines, first bit in them, and number of bits per line; the first
    /// line has the lowest bits.
    #[inline(always)]
    fn position(&self, j: usize) -> (Range<usize>, u32, u32) {
        match j.checked_sub(self.lines * self.whole) {
            None => (j / self.whole..j / self.whole + 1, self.shifts[j % self.whole], self.bits),
            Some(part) => (0..self.lines, self.shifts[self.whole + part], self.part),
        }
    }

    /// Packs one or two sub-blocks of row `r`. `group(g)` is group g as four bytes, the second sub-block in the upper
    /// half of the word.
    #[inline(always)]
    pub(in crate::kernels) fn pack(&self, group: impl Fn(usize) -> u64, sub_blocks: &mut [u8], r: usize) {
        let mut groups = [0; 8];
        // opaque bound: not unrolled, to keep the module small
        for (g, four) in groups[..core::hint::black_box(self.len / 4)].iter_mut().enumerate() {
            *four = group(g);
        }
        self.pack_groups(&groups, sub_blocks, r);
    }

    fn pack_groups(&self, groups: &[u64; 8], sub_blocks: &mut [u8], r: usize) {
        for (l, line) in sub_blocks.chunks_exact_mut(64).enumerate() {
            let (sub_block, l) = (l / self.lines, l % self.lines);
            let mut word = 0;
            for i in 0..4 {
                let (j, from) = self.content(l, i);
                let bits = if i < self.whole { self.bits } else { self.part };
                // the pair of both halves
                let pair = (groups[j / 2 % 8] >> (sub_block * 32 + j % 2 * 8)) as u32 & 0x00ff_00ff;
                let mask = ((1 << bits) - 1) * 0x0001_0001;
                word |= (pair >> from & mask) << self.shifts[i];
            }
            line[r * 4..][..4].copy_from_slice(&word.to_le_bytes());
        }
    }

    /// Element `e` of a sub-block; `lane(line, half)` reads a lane.
    pub(in crate::kernels) fn element(&self, e: usize, lane: impl Fn(usize, usize) -> u16) -> u8 {
        let (lines, shift, bits) = self.position(e / 4 * 2 + e % 2);
        let part = |l: usize| lane(l, e % 4 / 2) >> shift & ((1 << bits) - 1);
        lines.enumerate().fold(0, |value, (i, l)| value | part(l) << (i as u32 * bits)) as u8
    }

    /// Writes the factors of the lines: an i16 pair per field, one factor for each half.
    pub(in crate::kernels) fn write_factors(&self, q: &[i8], out: &mut [u32]) {
        for (i, out) in out.chunks_exact_mut(WORDS).enumerate() {
            let (line, q) = (i % self.lines, &q[i / self.lines * self.len..]);
            let (mut before, mut at) = ([0; 2], 0);
            for (i, out) in out.iter_mut().enumerate() {
                let (j, from) = self.content(line, i);
                let factors: [i32; 2] = each!(2, |h| i32::from(q[j / 2 * 4 + j % 2 + h * 2]) << from);
                let [a, b] = each!(2, |h| factors[h] - (before[h] << (self.shifts[i] - at)));
                *out = a as u32 & 0xffff | (b as u32) << 16;
                (before, at) = (factors, self.shifts[i]);
            }
        }
    }
}

/// First bit of field `i`.
const fn shift_of(bits: u32, i: usize) -> u32 {
    match I16Fields::of(bits) {
        Some(f) => f.shifts[i],
        None => 0,
    }
}

/// Calls `put` with each group of the sub-block at `at`, as bytes.
///
/// # Safety
/// `at` must point at a whole sub-block.
#[inline(always)]
pub(in crate::kernels) unsafe fn unpack<S: Simd, const BITS: u32>(s: S, at: *const u8, put: &mut impl FnMut(S::B)) {
    let Some(f) = (const { I16Fields::of(BITS) }) else { return };
    // SAFETY: lines of the sub-block.
    let line = |l: usize| unsafe { s.load_b(at.add(l * 64)) };
    let element = |j: usize| {
        let (lines, shift, bits) = f.position(j);
        let part = |l: usize| s.and_b(s.shr16_b(line(l), shift), (1 << bits) - 1);
        lines.clone().skip(1).fold(part(lines.start), |all, l| s.xor_b(all, s.shl16_b(part(l), l as u32 * bits)))
    };
    for g in 0..f.len / 4 {
        // the first element of each lane goes to the lower byte
        let low = s.shr16_b(s.shl16_b(element(2 * g), 8), 8);
        put(s.xor_b(low, s.shl16_b(element(2 * g + 1), 8)));
    }
}

/// Computes the dots of a sub-block for one column and calls `total(v, dot)` for each row vector, once or several
/// times: the parts add up. `zero_point` is the initial i16 pair of each dot, if there is a zero-point term.
///
/// # Safety
/// The lines and factors of a whole sub-block must be readable.
#[inline(always)]
pub(in crate::kernels) unsafe fn add_sub_block<S: Simd, const RV: usize, const BITS: u32>(
    s: S,
    lines: [*const u8; RV],
    factors: *const u32,
    zero_point: Option<u32>,
    mut total: impl FnMut(usize, S::Acc),
) {
    let Some(f) = (const { I16Fields::of(BITS) }) else { return };
    let run = f.max_lines(zero_point.is_some());
    let bound = s.bound(run);
    // SAFETY: the contract of this function, which its caller keeps.
    unsafe {
        for from in (0..f.lines).step_by(run) {
            let mut dots: [S::Acc; RV] = [s.acc::<BITS>(zero_point.unwrap_or(0) as i32); RV];
            for l in from..f.lines.min(from + bound) {
                let line: [S::B; RV] = each!(RV, |v| s.load_b(lines[v].add(l * 64)));
                // unrolled by hand: shifts by variables are slow in WebAssembly
                let words = factors.add(l * WORDS);
                dots = each!(RV, |v| s.add_field(dots[v], line[v], const { shift_of(BITS, 0) }, words, 0));
                dots = each!(RV, |v| s.add_field(dots[v], line[v], const { shift_of(BITS, 1) }, words, 1));
                dots = each!(RV, |v| s.add_field(dots[v], line[v], const { shift_of(BITS, 2) }, words, 2));
                dots = each!(RV, |v| s.add_field(dots[v], line[v], const { shift_of(BITS, 3) }, words, 3));
            }
            for (v, dot) in dots.into_iter().enumerate() {
                total(v, dot);
            }
        }
    }
}

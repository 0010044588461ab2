//! Weights of 4, 5 and 6 bits as fields of 16-bit lanes: what panels hold for instruction sets that multiply such lanes
//! but not bytes, and where a module knows when it is compiled that it runs on no other. That is simd128.
//!
//! A sub-block is 32 elements, in Q6_K 16: those with one scale. Of its element `e`, `j = e/4*2 + e%2` is the place among
//! those of its half, `h = e%4/2`. A line is 64 bytes, the lane of row `r` and half `h` at `r*4 + h*2`. From bit 0 on:
//!
//! - 4 bits, 4 lines: four fields, line l has the elements `4l + i`;
//! - 5 bits, 5 lines: three fields, `3l + i`, and bit l of the last element;
//! - 6 bits, 3 lines: two fields, `2l + i`, and two bits, from 2l on, of the last element but one and of the last.
//!
//! So a line takes no masks: it is multiplied as it is and shifted to each of its fields, and what stands above a field
//! is taken off by the factors. With fields `x_i` from bit `s_i` on and what they are to be multiplied by, `m_i`,
//!
//! ```text
//! sum_i x_i m_i = sum_i (line >> s_i) * c_i,   c_0 = m_0, c_i = m_i - 2^(s_i - s_(i-1)) m_(i-1)
//! ```
//!
//! All of it is modulo 2^16, and exact, as the sums of a sub-block fit (see `max_i16_groups`), or of two lines of 5 bits without a
//! `first` value: `(6*31 + 3*4)*127`, that is 25,146. Three would not.

use core::ops::Range;

use super::simd::{Simd, each};

/// Whether panels of this build have fields. In others a fallback at most runs on simd128 alone.
pub(super) const HAS_I16_FIELDS: bool =
    cfg!(all(target_arch = "wasm32", target_feature = "simd128", not(target_feature = "relaxed-simd")));

/// Where the fields lie.
pub(super) struct I16Fields {
    bits: u32,
    /// Elements of a sub-block.
    pub(super) len: usize,
    /// BitPacking of a sub-block.
    lines: usize,
    /// I16Fields of a line that are elements; the others are parts of one.
    whole: usize,
    /// Bits of a part.
    part: u32,
    /// First bits of the fields.
    shifts: [u32; 4],
}

static I16_FIELDS: [I16Fields; 3] = [
    I16Fields { bits: 4, len: 32, lines: 4, whole: 4, part: 0, shifts: [0, 4, 8, 12] },
    I16Fields { bits: 5, len: 32, lines: 5, whole: 3, part: 1, shifts: [0, 5, 10, 15] },
    I16Fields { bits: 6, len: 16, lines: 3, whole: 2, part: 2, shifts: [0, 6, 12, 14] },
];

/// Words of activations that a line takes.
const WORDS: usize = 4;

impl I16Fields {
    /// Those of weights of so many bits; `None` for bytes, and where panels have none.
    pub(super) const fn of(bits: u32) -> Option<&'static I16Fields> {
        match bits {
            4..=6 if HAS_I16_FIELDS => Some(&I16_FIELDS[bits as usize - 4]),
            _ => None,
        }
    }

    /// Those of a tile of one column; tiles of several unpack.
    pub(super) const fn alone<const NC: usize>(bits: u32) -> Option<&'static I16Fields> {
        if NC == 1 { I16Fields::of(bits) } else { None }
    }

    /// Words of activations of a sub-block and column.
    pub(super) const fn words(&self) -> usize {
        self.lines * WORDS
    }

    /// BitPacking whose dots fit in 16 bits together.
    const fn max_lines(&self, has_zero_point: bool) -> usize {
        if self.bits == 5 && !has_zero_point { 2 } else { self.lines }
    }

    /// What field `i` of a line holds: the element, and from which of its bits on.
    #[inline(always)]
    fn held(&self, line: usize, i: usize) -> (usize, u32) {
        match i.checked_sub(self.whole) {
            None => (line * self.whole + i, 0),
            Some(part) => (self.lines * self.whole + part, line as u32 * self.part),
        }
    }

    /// Which lines element `j` of a half is in, from which bit on, and how many bits in each; the first has the lowest.
    #[inline(always)]
    fn place(&self, j: usize) -> (Range<usize>, u32, u32) {
        match j.checked_sub(self.lines * self.whole) {
            None => (j / self.whole..j / self.whole + 1, self.shifts[j % self.whole], self.bits),
            Some(part) => (0..self.lines, self.shifts[self.whole + part], self.part),
        }
    }

    /// Writes the lines of one or two sub-blocks of row `r`; `group` gives four weights of each, as bytes, those of the second in
    /// the upper half.
    #[inline(always)]
    pub(super) fn pack(&self, group: impl Fn(usize) -> u64, sub_blocks: &mut [u8], r: usize) {
        let mut groups = [0; 8];
        // rolled, for modules to be small
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
                let (j, from) = self.held(l, i);
                let bits = if i < self.whole { self.bits } else { self.part };
                // of both halves
                let pair = (groups[j / 2 % 8] >> (sub_block * 32 + j % 2 * 8)) as u32 & 0x00ff_00ff;
                let mask = ((1 << bits) - 1) * 0x0001_0001;
                word |= (pair >> from & mask) << self.shifts[i];
            }
            line[r * 4..][..4].copy_from_slice(&word.to_le_bytes());
        }
    }

    /// Element `e` of a sub-block; `lane` gives the lane of a line and half.
    pub(super) fn element(&self, e: usize, lane: impl Fn(usize, usize) -> u16) -> u8 {
        let (lines, shift, bits) = self.place(e / 4 * 2 + e % 2);
        let part = |l: usize| lane(l, e % 4 / 2) >> shift & ((1 << bits) - 1);
        lines.enumerate().fold(0, |value, (i, l)| value | part(l) << (i as u32 * bits)) as u8
    }

    /// Writes what the lines of sub-blocks are multiplied by: of each field a pair of i16, for the halves.
    pub(super) fn write_factors(&self, q: &[i8], out: &mut [u32]) {
        for (i, out) in out.chunks_exact_mut(WORDS).enumerate() {
            let (line, q) = (i % self.lines, &q[i / self.lines * self.len..]);
            let (mut before, mut at) = ([0; 2], 0);
            for (i, out) in out.iter_mut().enumerate() {
                let (j, from) = self.held(line, i);
                let factors: [i32; 2] = each!(2, |h| i32::from(q[j / 2 * 4 + j % 2 + h * 2]) << from);
                let [a, b] = each!(2, |h| factors[h] - (before[h] << (self.shifts[i] - at)));
                *out = a as u32 & 0xffff | (b as u32) << 16;
                (before, at) = (factors, self.shifts[i]);
            }
        }
    }
}

/// The first bit of field `i`.
const fn shift_of(bits: u32, i: usize) -> u32 {
    match I16Fields::of(bits) {
        Some(f) => f.shifts[i],
        None => 0,
    }
}

/// Gives `put` the groups of four of the sub-block at `at`, with weights of so many bits, as bytes.
///
/// # Safety
/// The sub-block is there.
#[inline(always)]
pub(super) unsafe fn unpack<S: Simd, const BITS: u32>(s: S, at: *const u8, put: &mut impl FnMut(S::B)) {
    let Some(f) = (const { I16Fields::of(BITS) }) else { return };
    // SAFETY: lines of the sub-block.
    let line = |l: usize| unsafe { s.load_b(at.add(l * 64)) };
    let element = |j: usize| {
        let (lines, shift, bits) = f.place(j);
        let part = |l: usize| s.and_b(s.shr16_b(line(l), shift), (1 << bits) - 1);
        lines.clone().skip(1).fold(part(lines.start), |all, l| s.xor_b(all, s.shl16_b(part(l), l as u32 * bits)))
    };
    for g in 0..f.len / 4 {
        // the first of each lane's two in the lower byte
        let low = s.shr16_b(s.shl16_b(element(2 * g), 8), 8);
        put(s.xor_b(low, s.shl16_b(element(2 * g + 1), 8)));
    }
}

/// Gives `total` the dots of a sub-block of one column, with weights of so many bits, by vectors of rows; maybe in several
/// parts. They start from `first`, a pair of i16, which takes the weights' offset off, if there is one.
///
/// # Safety
/// The lines are there, and the activations' words.
#[inline(always)]
pub(super) unsafe fn add_sub_block<S: Simd, const RV: usize, const BITS: u32>(
    s: S,
    lines: [*const u8; RV],
    factors: *const u32,
    zero_point: Option<u32>,
    mut total: impl FnMut(usize, S::Acc),
) {
    let Some(f) = (const { I16Fields::of(BITS) }) else { return };
    let run = f.max_lines(zero_point.is_some());
    let bound = s.bound(run);
    // SAFETY: the caller's.
    unsafe {
        for from in (0..f.lines).step_by(run) {
            let mut dots: [S::Acc; RV] = [s.acc::<BITS>(zero_point.unwrap_or(0) as i32); RV];
            for l in from..f.lines.min(from + bound) {
                let line: [S::B; RV] = each!(RV, |v| s.load_b(lines[v].add(l * 64)));
                // not a loop: shifts by variables are dear in WebAssembly
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

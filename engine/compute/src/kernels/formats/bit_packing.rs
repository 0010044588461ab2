//! Bit packing of 4-, 5- and 6-bit weights in panels, for instruction sets that multiply bytes.
//!
//! A sub-block is the 32 elements (16 in Q6_K) that share a scale. A line is 64 bytes; element `e` of row `r` belongs
//! to group `e/4` and to byte `r*4 + e%4` of each line. The low bits of a line hold one group. The other groups are
//! spread over the high bits of several lines: such a group is the exclusive or of these lines, each shifted right:
//!
//! - 4 bits, 4 lines: line l is group l, and `l >> 4` is group 4 + l;
//! - 5 bits, lines A to E: groups 0, 1, 3, 4 and 6; group 2 is `A >> 2 ^ B >> 5`, 5 is `C >> 2 ^ D >> 5`, and 7 is `E
//!   >> 5 ^ A >> 4 ^ C >> 3`;
//! - 6 bits, lines A to C: groups 0 to 2; group 3 is `A >> 6 ^ B >> 4 ^ C >> 2`.
//!
//! Only the low 4, 5 or 6 bits of each result count. x86 has no byte shifts, so 16-bit lanes are shifted, and bits of
//! other elements are shifted in. These bits are known when the last bits of a line are packed, and packing chooses
//! those such that the exclusive or gives the group. So a group takes one mask, not one per line.
#![allow(unsafe_code)]

use crate::kernels::panel_layout::HEAD;
use crate::kernels::simd::Simd;

/// Part of a group in a line: index of the line, right shift, and mask of the bits of the group that it supplies.
type BitShare = (usize, u32, u8);

/// Bit packing of one width.
pub(in crate::kernels) struct BitPacking {
    bits: u32,
    /// Elements of a sub-block.
    pub(in crate::kernels) len: usize,
    /// Lines of a sub-block.
    lines: usize,
    /// The parts of each group, in order of the lines, as they are read. A group that owns the low bits of a line comes
    /// before groups with parts in its high bits.
    groups: [&'static [BitShare]; 8],
}

static BIT_PACKINGS: [BitPacking; 3] = [
    BitPacking {
        bits: 4,
        len: 32,
        lines: 4,
        groups: [
            &[(0, 0, 15)],
            &[(1, 0, 15)],
            &[(2, 0, 15)],
            &[(3, 0, 15)],
            &[(0, 4, 15)],
            &[(1, 4, 15)],
            &[(2, 4, 15)],
            &[(3, 4, 15)],
        ],
    },
    BitPacking {
        bits: 5,
        len: 32,
        lines: 5,
        groups: [
            &[(0, 0, 31)],
            &[(1, 0, 31)],
            &[(0, 2, 24), (1, 5, 7)],
            &[(2, 0, 31)],
            &[(3, 0, 31)],
            &[(2, 2, 24), (3, 5, 7)],
            &[(4, 0, 31)],
            &[(0, 4, 8), (2, 3, 16), (4, 5, 7)],
        ],
    },
    BitPacking {
        bits: 6,
        len: 16,
        lines: 3,
        groups: [&[(0, 0, 63)], &[(1, 0, 63)], &[(2, 0, 63)], &[(0, 6, 3), (1, 4, 12), (2, 2, 48)], &[], &[], &[], &[]],
    },
];

impl BitPacking {
    /// The packing of weights of 4, 5 or 6 bits.
    pub(in crate::kernels) const fn of(bits: u32) -> &'static BitPacking {
        &BIT_PACKINGS[bits as usize - 4]
    }

    /// Bytes of a sub-block of 16 rows.
    pub(in crate::kernels) const fn sub_block_bytes(&self) -> usize {
        self.lines * 64
    }

    /// Bytes of the record of a super-block: scales and sub-blocks.
    pub(in crate::kernels) const fn record_bytes(&self) -> usize {
        HEAD + 256 / self.len * self.sub_block_bytes()
    }

    /// Groups of a sub-block.
    pub(in crate::kernels) const fn groups(&self) -> usize {
        self.len / 4
    }

    /// Element `e` of a sub-block. `lane(line)` is the 16-bit lane of the line with the element and its neighbour.
    pub(in crate::kernels) fn element(&self, e: usize, lane: impl Fn(usize) -> u16) -> u8 {
        let shares = self.groups[e / 4].iter();
        let lane = shares.fold(0, |all, &(line, shift, _)| all ^ lane(line) >> shift);
        (lane >> (e % 2 * 8)) as u8 & ((1 << self.bits) - 1)
    }
}

/// Packs one or two sub-blocks of row `r`. `group(g)` is group g as four bytes, the second sub-block in the upper half
/// of the word.
#[inline(always)]
pub(in crate::kernels) fn pack<const BITS: u32>(group: impl Fn(usize) -> u64, sub_blocks: &mut [u8], r: usize) {
    let mut words = [0u64; 5];
    // unrolled by a macro, so that the parts are constants
    macro_rules! groups {
        ($($g:literal)*) => {$(
            let mut wanted = if $g < const { BitPacking::of(BITS).groups() } { group($g) } else { 0 };
            // minus what the lines already give: nothing if the group owns the low bits of the line
            for &(line, shift, _) in const { BitPacking::of(BITS).groups[$g] } {
                wanted ^= shr16(words[line], shift);
            }
            for &(line, shift, bits) in const { BitPacking::of(BITS).groups[$g] } {
                words[line] |= (wanted & (u64::from(bits) * 0x0101_0101_0101_0101)) << shift;
            }
        )*};
    }
    groups!(0 1 2 3 4 5 6 7);
    for (i, sub_block) in sub_blocks.chunks_exact_mut(const { BitPacking::of(BITS).sub_block_bytes() }).enumerate() {
        for (line, word) in sub_block.chunks_exact_mut(64).zip(words) {
            line[r * 4..][..4].copy_from_slice(&((word >> (32 * i)) as u32).to_le_bytes());
        }
    }
}

/// Shifts 16-bit lanes right.
#[inline(always)]
fn shr16(x: u64, n: u32) -> u64 {
    (x >> n) & ((0xffff >> n) * 0x0001_0001_0001_0001)
}

/// Group `g` of the sub-block at `at`, as bytes.
///
/// # Safety
/// `at` must point at a whole sub-block.
#[inline(always)]
pub(in crate::kernels) unsafe fn group<S: Simd, const BITS: u32>(s: S, at: *const u8, g: usize) -> S::B {
    let mut all = s.zeros();
    for &(line, shift, _) in BitPacking::of(BITS).groups[g] {
        // SAFETY: a line of the sub-block.
        let line = unsafe { s.load_b(at.add(line * 64)) };
        all = s.xor_b(all, if shift == 0 { line } else { s.shr16_b(line, shift) });
    }
    s.and_b(all, (1 << BITS) - 1)
}

/// Calls `put` with each group of the sub-block at `at`, as bytes.
///
/// # Safety
/// `at` must point at a whole sub-block.
#[inline(always)]
pub(in crate::kernels) unsafe fn unpack<S: Simd, const BITS: u32>(s: S, at: *const u8, put: &mut impl FnMut(S::B)) {
    for g in 0..const { BitPacking::of(BITS).groups() } {
        // SAFETY: the contract of this function, which its caller keeps.
        put(unsafe { group::<S, BITS>(s, at, g) });
    }
}

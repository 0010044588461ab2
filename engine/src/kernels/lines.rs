//! Weights of 4, 5 and 6 bits in lines of bytes: what panels hold for instruction sets that multiply bytes.
//!
//! A unit is 32 elements, in Q6_K 16: those with one scale. A line is 64 bytes; element `e` of row `r` is of group `e/4`
//! and has byte `r*4 + e%4` of its lines. A line's low bits are a group. The other groups have no line of their own, but
//! shares of what is left of some: such a group is the exclusive or of these lines, each shifted right so far:
//!
//! - 4 bits, 4 lines: line l is group l, and `l >> 4` group 4 + l;
//! - 5 bits, lines A to E: groups 0, 1, 3, 4 and 6; group 2 is `A >> 2 ^ B >> 5`, 5 is `C >> 2 ^ D >> 5`, and 7 is
//!   `E >> 5 ^ A >> 4 ^ C >> 3`;
//! - 6 bits, lines A to C: groups 0 to 2; group 3 is `A >> 6 ^ B >> 4 ^ C >> 2`.
//!
//! Of each, as many low bits count as a weight has. Few instruction sets shift bytes, so these are lanes of 16 bits. What
//! shifts bring along, of the same byte and of the other one, is known when a line's last bits are written: they are such
//! that all of it together is the group. So a group takes one mask, not one for each share.

use super::simd::{Simd, each};
use super::tiles::{add_group, add_groups};

/// What a group has in a line: the line, how far it is shifted right, and which bits of the group are there.
type Share = (usize, u32, u8);

/// How elements lie in lines.
pub(super) struct Lines {
    bits: u32,
    /// Elements of a unit.
    pub(super) len: usize,
    /// Lines of a unit.
    lines: usize,
    /// Shares of the groups. Those with a line of their own come before those with shares in it.
    groups: [&'static [Share]; 8],
}

static LINES: [Lines; 3] = [
    Lines {
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
    Lines {
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
            &[(4, 5, 7), (0, 4, 8), (2, 3, 16)],
        ],
    },
    Lines {
        bits: 6,
        len: 16,
        lines: 3,
        groups: [&[(0, 0, 63)], &[(1, 0, 63)], &[(2, 0, 63)], &[(2, 2, 48), (1, 4, 12), (0, 6, 3)], &[], &[], &[], &[]],
    },
];

impl Lines {
    /// Those of weights of so many bits, 4 to 6.
    pub(super) const fn of(bits: u32) -> &'static Lines {
        &LINES[bits as usize - 4]
    }

    /// Bytes of a unit of 16 rows.
    pub(super) const fn unit_bytes(&self) -> usize {
        self.lines * 64
    }

    /// Groups of a unit.
    pub(super) const fn groups(&self) -> usize {
        self.len / 4
    }

    /// Element `e` of a unit; `lane` gives the lane of 16 bits with two elements of a line.
    pub(super) fn element(&self, e: usize, lane: impl Fn(usize) -> u16) -> u8 {
        let shares = self.groups[e / 4].iter();
        let lane = shares.fold(0, |all, &(line, shift, _)| all ^ lane(line) >> shift);
        (lane >> (e % 2 * 8)) as u8 & ((1 << self.bits) - 1)
    }
}

/// Writes the lines of one or two units of row `r`; `group` gives four weights of so many bits of each, as bytes, those of
/// the second in the upper half.
#[inline(always)]
pub(super) fn pack<const BITS: u32>(group: impl Fn(usize) -> u64, units: &mut [u8], r: usize) {
    let mut words = [0u64; 5];
    // not a loop, for shares to be constants
    macro_rules! groups {
        ($($g:literal)*) => {$(
            // what is there already: of a group with its own line, nothing
            let mut wanted = if $g < const { Lines::of(BITS).groups() } { group($g) } else { 0 };
            for &(line, shift, _) in const { Lines::of(BITS).groups[$g] } {
                wanted ^= shr16(words[line], shift);
            }
            for &(line, shift, bits) in const { Lines::of(BITS).groups[$g] } {
                words[line] |= (wanted & (u64::from(bits) * 0x0101_0101_0101_0101)) << shift;
            }
        )*};
    }
    groups!(0 1 2 3 4 5 6 7);
    for (i, unit) in units.chunks_exact_mut(const { Lines::of(BITS).unit_bytes() }).enumerate() {
        for (line, word) in unit.chunks_exact_mut(64).zip(words) {
            line[r * 4..][..4].copy_from_slice(&((word >> (32 * i)) as u32).to_le_bytes());
        }
    }
}

/// Lanes of 16 bits, shifted right.
#[inline(always)]
fn shr16(x: u64, n: u32) -> u64 {
    (x >> n) & ((0xffff >> n) * 0x0001_0001_0001_0001)
}

/// Group `g` of the unit at `at`, with weights of so many bits, as bytes.
///
/// # Safety
/// The unit is there.
#[inline(always)]
unsafe fn group<S: Simd, const BITS: u32>(s: S, at: *const u8, g: usize) -> S::B {
    let shares = Lines::of(BITS).groups[g];
    // SAFETY: lines of the unit.
    let mut all = unsafe { s.load_b(at.add(shares[0].0 * 64)) };
    for (i, &(line, shift, _)) in shares.iter().enumerate() {
        // SAFETY: as above.
        let line = unsafe { s.load_b(at.add(line * 64)) };
        let share = if shift == 0 { line } else { s.shr16_b(line, shift) };
        all = if i == 0 { share } else { s.xor_b(all, share) };
    }
    s.and_b(all, (1 << BITS) - 1)
}

/// Gives `put` the groups of the unit at `at`, with weights of so many bits, as bytes.
///
/// # Safety
/// The unit is there.
#[inline(always)]
pub(super) unsafe fn unpack<S: Simd, const BITS: u32>(s: S, at: *const u8, put: &mut impl FnMut(S::B)) {
    for g in 0..const { Lines::of(BITS).groups() } {
        // SAFETY: the caller's.
        put(unsafe { group::<S, BITS>(s, at, g) });
    }
}

/// Where the activations of a unit are, of some columns.
#[derive(Clone, Copy)]
pub(super) struct UnitActs {
    /// The groups.
    pub(super) groups: *const u32,
    /// What dots start from, where that takes the weights' offset off.
    pub(super) first: Option<*const u32>,
}

impl UnitActs {
    /// The first value of a dot of column `c`.
    ///
    /// # Safety
    /// The column is there.
    #[inline(always)]
    pub(super) unsafe fn first(&self, c: usize) -> i32 {
        match self.first {
            // SAFETY: the caller's.
            Some(first) => unsafe { first.add(c).read() as i32 },
            None => 0,
        }
    }

    /// Dots that nothing was added to.
    ///
    /// # Safety
    /// The columns are there.
    #[inline(always)]
    pub(super) unsafe fn start<S: Simd, const RV: usize, const NC: usize, const BITS: u32>(
        &self,
        s: S,
    ) -> [[S::Acc; NC]; RV] {
        // SAFETY: the caller's.
        unsafe { each!(RV, |_v| each!(NC, |c| s.acc::<BITS>(self.first(c)))) }
    }
}

/// Gives `total` the dots of a unit, with weights of so many bits, by vectors of rows and columns, maybe in several parts:
/// where pairs of products stay in i16, and no first values take the weights' offset off, so that they fit there.
///
/// # Safety
/// The lines are there, and the activations of NC columns.
#[inline(always)]
pub(super) unsafe fn add_unit<S: Simd, const RV: usize, const NC: usize, const BITS: u32>(
    s: S,
    lines: [*const u8; RV],
    acts: UnitActs,
    mut total: impl FnMut(usize, usize, S::Acc),
) {
    let words = S::rec(BITS).words() * NC;
    // SAFETY: the caller's.
    unsafe {
        let mut dots: [[S::Acc; NC]; RV] = acts.start::<S, RV, NC, BITS>(s);
        match BITS {
            4 => {
                for l in 0..s.bound(4) {
                    let lines = line(s, lines, l);
                    let (low, high) = (each!(RV, |v| s.weights_lo4(lines[v])), each!(RV, |v| s.weights_hi4(lines[v])));
                    add_group::<S, RV, NC, BITS>(s, low, acts.groups.add(l * words), &mut dots);
                    add_group::<S, RV, NC, BITS>(s, high, acts.groups.add((l + 4) * words), &mut dots);
                }
            }
            5 => {
                let parts = S::run(BITS, acts.first.is_some()) < 8;
                // of group 7, what is in the lines that were read; the first was moved on by one more
                let mut last = [s.zeros(); RV];
                // a loop for engines of WebAssembly: in one piece, the compiler nests all dots, and weights of the last
                // would be made first
                for i in 0..s.bound(2) {
                    add_groups::<S, RV, NC, BITS, 3>(
                        s,
                        #[inline(always)]
                        |v| {
                            let at = lines[v].add(i * 128);
                            let (a, b) = (s.load_b(at), s.load_b(at.add(64)));
                            last[v] = s.xor_b(s.shr16_b(last[v], 1), s.shr16_b(a, 3));
                            let (of_b, of_a) = (s.shr16_b(b, 5), s.shr16_b(a, 2));
                            let three = [a, b, s.xor_b(of_a, of_b)];
                            each!(3, |g| s.weights::<BITS>(s.and_b(three[g], 31)))
                        },
                        acts.groups.add(3 * i * words),
                        &mut dots,
                    );
                    if parts {
                        give::<S, RV, NC>(dots, &mut total);
                        dots = acts.start::<S, RV, NC, BITS>(s);
                    }
                }
                add_groups::<S, RV, NC, BITS, 2>(
                    s,
                    #[inline(always)]
                    |v| {
                        let e = s.load_b(lines[v].add(256));
                        let two = [e, s.xor_b(s.shr16_b(e, 5), last[v])];
                        each!(2, |g| s.weights::<BITS>(s.and_b(two[g], 31)))
                    },
                    acts.groups.add(6 * words),
                    &mut dots,
                );
            }
            _ => add_groups::<S, RV, NC, BITS, 4>(
                s,
                #[inline(always)]
                |v| each!(4, |g| s.weights::<BITS>(group::<S, BITS>(s, lines[v], g))),
                acts.groups,
                &mut dots,
            ),
        }
        give::<S, RV, NC>(dots, &mut total);
    }
}

/// Line `l` of some vectors of rows.
///
/// # Safety
/// It is there.
#[inline(always)]
unsafe fn line<S: Simd, const RV: usize>(s: S, lines: [*const u8; RV], l: usize) -> [S::B; RV] {
    // SAFETY: the caller's.
    unsafe { each!(RV, |v| s.load_b(lines[v].add(l * 64))) }
}

#[inline(always)]
fn give<S: Simd, const RV: usize, const NC: usize>(
    dots: [[S::Acc; NC]; RV],
    total: &mut impl FnMut(usize, usize, S::Acc),
) {
    for v in 0..RV {
        for c in 0..NC {
            total(v, c, dots[v][c]);
        }
    }
}

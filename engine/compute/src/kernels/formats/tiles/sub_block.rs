//! Dots of a sub-block of 4- to 6-bit weights that stay bit-packed.
#![allow(unsafe_code)]

use super::add_group;
use crate::kernels::bit_packing::group;
use crate::kernels::simd::{Simd, each};

/// The activations of a sub-block, of some columns.
#[derive(Clone, Copy)]
pub(super) struct SubBlockActs {
    /// The groups, or the factors of i16 fields.
    pub(super) groups: *const u32,
    /// The zero-point terms, if the weights have an offset.
    pub(super) zero_point_terms: Option<*const u32>,
}

impl SubBlockActs {
    /// The zero-point term of column `c`, or 0.
    ///
    /// # Safety
    /// The record must have that column.
    #[inline(always)]
    pub(super) unsafe fn zero_point_term(&self, c: usize) -> i32 {
        match self.zero_point_terms {
            // SAFETY: the contract of this function, which its caller keeps.
            Some(terms) => unsafe { terms.add(c).read() as i32 },
            None => 0,
        }
    }

    /// Initial accumulators.
    ///
    /// # Safety
    /// The record must have NC columns.
    #[inline(always)]
    pub(super) unsafe fn start<S: Simd, const RV: usize, const NC: usize, const BITS: u32>(
        &self,
        s: S,
    ) -> [[S::Acc; NC]; RV] {
        // SAFETY: the contract of this function, which its caller keeps.
        unsafe { each!(RV, |_v| each!(NC, |c| s.acc::<BITS>(self.zero_point_term(c)))) }
    }
}

/// Computes the dots of a sub-block and calls `total(v, c, dot)` for each row vector and column, once or several times:
/// the parts add up. Dots are split where i16 pairs without a zero-point term would overflow.
///
/// # Safety
/// The lines of a whole sub-block must be readable, and the activations of NC columns.
#[inline(always)]
pub(super) unsafe fn add_sub_block<S: Simd, const RV: usize, const NC: usize, const BITS: u32>(
    s: S,
    lines: [*const u8; RV],
    acts: SubBlockActs,
    mut total: impl FnMut(usize, usize, S::Acc),
) {
    let words = S::act_encoding(BITS).words() * NC;
    // SAFETY: the contract of this function, which its caller keeps.
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
                let parts = S::max_groups(BITS, acts.zero_point_terms.is_some()) < 8;
                // bits of group 7 from the lines read so far; those of the first line are shifted once more
                let mut last = [s.zeros(); RV];
                // a loop, for WebAssembly engines: in straight-line code the compiler would nest all dots and compute
                // the last weights first
                for i in 0..s.bound(2) {
                    add_groups::<S, RV, NC, BITS, 3>(
                        s,
                        #[inline(always)]
                        |v| {
                            let at = lines[v].add(i * 128);
                            let (a, b) = (s.load_b(at), s.load_b(at.add(64)));
                            last[v] = s.xor_b(s.shr16_b(last[v], 1), s.shr16_b(a, 3));
                            let three = [a, b, s.xor_b(s.shr16_b(a, 2), s.shr16_b(b, 5))];
                            each!(3, |g| s.weights::<BITS>(s.and_b(three[g], 31)))
                        },
                        acts.groups.add(3 * i * words),
                        &mut dots,
                    );
                    if parts {
                        emit::<S, RV, NC>(dots, &mut total);
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
        emit::<S, RV, NC>(dots, &mut total);
    }
}

/// Line `l` of RV row vectors.
///
/// # Safety
/// The line must be readable.
#[inline(always)]
unsafe fn line<S: Simd, const RV: usize>(s: S, lines: [*const u8; RV], l: usize) -> [S::B; RV] {
    // SAFETY: the contract of this function, which its caller keeps.
    unsafe { each!(RV, |v| s.load_b(lines[v].add(l * 64))) }
}

#[inline(always)]
fn emit<S: Simd, const RV: usize, const NC: usize>(
    dots: [[S::Acc; NC]; RV],
    total: &mut impl FnMut(usize, usize, S::Acc),
) {
    for v in 0..RV {
        for c in 0..NC {
            total(v, c, dots[v][c]);
        }
    }
}

/// Adds the dots of N consecutive groups. With one column, vector after vector: WebAssembly engines keep that order,
/// and have too few registers for the weights of all vectors.
///
/// # Safety
/// `acts` must point at the activations of these groups, for NC columns.
#[inline(always)]
unsafe fn add_groups<S: Simd, const RV: usize, const NC: usize, const BITS: u32, const N: usize>(
    s: S,
    mut w: impl FnMut(usize) -> [S::W; N],
    acts: *const u32,
    dots: &mut [[S::Acc; NC]; RV],
) {
    let group_words = S::act_encoding(BITS).words() * NC;
    // SAFETY: the contract of this function, which its caller keeps.
    unsafe {
        if NC == 1 {
            assert!(RV <= 4, "tile size that no instruction set has");
            let a: [S::A; N] = each!(N, |g| s.act_of::<BITS, NC>(acts.add(g * group_words), 0));
            // unrolled by a macro: the compiler would keep a loop, and its operands in memory
            macro_rules! vectors {
                ($($v:literal)*) => {$(
                    if $v < RV {
                        let w = w($v);
                        for g in 0..N {
                            dots[$v][0] = s.dot::<BITS>(dots[$v][0], w[g], a[g]);
                        }
                    }
                )*};
            }
            vectors!(0 1 2 3);
        } else {
            let w: [[S::W; N]; RV] = each!(RV, |v| w(v));
            for g in 0..N {
                add_group::<S, RV, NC, BITS>(s, each!(RV, |v| w[v][g]), acts.add(g * group_words), dots);
            }
        }
    }
}

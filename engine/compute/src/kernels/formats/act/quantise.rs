//! Quantisation of a block of activations to 8 bits; the formula is at the head of `act`.
#![allow(unsafe_code)]

use crate::kernels::simd::{ActEncoding, Simd};

const MAGIC: f32 = 12_582_912.0; // 1.5 * 2^23: adding it rounds to an integer in the low bits
const TINY: f32 = 1e-30; // smaller blocks would overflow 127 / amax: they are zero by definition

/// The scalar definition: quantises a block and returns its scale.
pub(in crate::kernels) fn quantise(x: &[f32], q: &mut [i8]) -> f32 {
    let amax = x.iter().fold(0, |m, v| m.max(v.to_bits() & 0x7fff_ffff));
    let Some((id, d)) = scales(amax) else {
        q.fill(0);
        return 0.0;
    };
    for (q, v) in q.iter_mut().zip(x) {
        *q = ((v * id + MAGIC).to_bits() as i32 - MAGIC.to_bits() as i32) as i8;
    }
    d
}

/// Factors that map values to -127..=127 and back, for a block whose largest magnitude has the bits `amax`; `None` if
/// the block is zero by definition.
fn scales(amax: u32) -> Option<(f32, f32)> {
    let (bits, amax) = (amax, f32::from_bits(amax));
    (bits < 0x7f80_0000 && amax >= TINY).then(|| (127.0 / amax, amax * (1.0 / 127.0)))
}

/// Sums of q over equal parts of a block, and for some encodings sums over a subset: the negative q
/// (`ActEncoding::AbsAndMask`), the last two of each four (`ActEncoding::I8PairSums`, and i16 fields), or the first and
/// third of each four (`ActEncoding::I16OddSigned`).
pub(super) struct PartSums<'a> {
    pub(super) all: &'a mut [i32],
    pub(super) subset: &'a mut [i32],
}

/// 1 for the last two of each four elements.
static LAST_TWO: [i8; 16] = [0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1];

/// 1 for elements of even index.
static EVEN: [i8; 16] = [1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0, 1, 0];

/// [`quantise`] on lanes, for whole vectors; otherwise the scalar code.
#[inline(always)]
pub(in crate::kernels) fn quantise_lanes<S: Simd>(s: S, x: &[f32], q: &mut [i8]) -> f32 {
    if !x.len().is_multiple_of(S::LANES) {
        return quantise(x, q);
    }
    quantise_and_sum(s, ActEncoding::I8, x, q, PartSums { all: &mut [], subset: &mut [] })
}

/// [`quantise`] on lanes, with sums; the length must be a multiple of LANES.
#[inline(always)]
pub(super) fn quantise_and_sum<S: Simd>(
    s: S,
    encoding: ActEncoding,
    x: &[f32],
    q: &mut [i8],
    sums: PartSums<'_>,
) -> f32 {
    assert!(x.len() == q.len() && x.len().is_multiple_of(S::LANES));
    // SAFETY: all accesses are at multiples of LANES below the length.
    unsafe {
        let mut m = s.splat_i(0);
        for i in (0..x.len()).step_by(S::LANES) {
            m = s.max_i(m, s.bits(s.abs(s.load(x.as_ptr().add(i)))));
        }
        let Some((id, d)) = scales(s.max_lane(m) as u32) else {
            q.fill(0);
            sums.all.fill(0);
            sums.subset.fill(0);
            return 0.0;
        };
        let (id, magic) = (s.splat(id), s.splat(MAGIC));
        let per = x.len() / sums.all.len().max(1);
        for j in 0..x.len() / per {
            let (mut all, mut subset) = (s.splat_i(0), s.splat_i(0));
            for i in (j * per..(j + 1) * per).step_by(S::LANES) {
                let v = s.add(s.mul(s.load(x.as_ptr().add(i)), id), magic);
                let n = s.sub_i(s.bits(v), s.splat_i(MAGIC.to_bits() as i32));
                s.store_i8(q.as_mut_ptr().add(i), n);
                all = s.add_i(all, n);
                if encoding == ActEncoding::AbsAndMask {
                    subset = s.add_i(subset, s.min_i(n, s.splat_i(0)));
                }
            }
            if let ActEncoding::I8PairSums | ActEncoding::I16 | ActEncoding::I16OddSigned = encoding
                && !sums.subset.is_empty()
            {
                let these = if encoding == ActEncoding::I16OddSigned { &EVEN } else { &LAST_TWO };
                subset = s.mul_i(all, s.load_i8(these.as_ptr()));
            }
            if let Some(sum) = sums.all.get_mut(j) {
                *sum = s.sum_lanes(all);
            }
            if let Some(sum) = sums.subset.get_mut(j) {
                *sum = s.sum_lanes(subset);
            }
        }
        d
    }
}

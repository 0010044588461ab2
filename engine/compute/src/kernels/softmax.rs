//! The two passes of a softmax over a vocabulary: maxima of groups of logits, and exponentials with their sum.
#![allow(unsafe_code)]

use super::Cpu;
use super::cpu::Op;
use super::exp::{exp, exp_lanes};
use super::norm::{VIRTUAL_LANES, max, reduce};
use super::simd::Simd;

/// Elements of a group of [`group_maxima`].
pub const GROUP: usize = 32;
/// Elements of a block, which 16 groups share.
pub const GROUP_BLOCK: usize = VIRTUAL_LANES * GROUP;

/// Number of groups of `n` elements.
pub const fn groups(n: usize) -> usize {
    n.div_ceil(GROUP_BLOCK) * VIRTUAL_LANES
}

/// Indices of the elements of group `g`, of `n` elements: one lane of a block.
pub fn group(g: usize, n: usize) -> impl Iterator<Item = usize> {
    let first = g / VIRTUAL_LANES * GROUP_BLOCK + g % VIRTUAL_LANES;
    (first..n.min(first + GROUP_BLOCK - g % VIRTUAL_LANES)).step_by(VIRTUAL_LANES)
}

/// The largest element of each group of `x`; -inf for an empty group.
///
/// # Panics
/// If `out` is not [`groups`] long.
pub fn group_maxima(cpu: Cpu, x: &[f32], out: &mut [f32]) {
    assert!(out.len() == groups(x.len()));
    cpu.run(GroupMaxima { x, out });
}

struct GroupMaxima<'a> {
    x: &'a [f32],
    out: &'a mut [f32],
}

/// The maxima of a block that may be incomplete.
fn block_maxima(block: &[f32], out: &mut [f32]) {
    out.fill(f32::NEG_INFINITY);
    for row in block.chunks(VIRTUAL_LANES) {
        for (out, x) in out.iter_mut().zip(row) {
            *out = max(*out, *x);
        }
    }
}

impl Op for GroupMaxima<'_> {
    type Out = ();

    fn scalar(self) {
        for (block, out) in self.x.chunks(GROUP_BLOCK).zip(self.out.chunks_exact_mut(VIRTUAL_LANES)) {
            block_maxima(block, out);
        }
    }

    #[inline(always)]
    fn simd<S: Simd>(self, s: S) {
        for (block, out) in self.x.chunks(GROUP_BLOCK).zip(self.out.chunks_exact_mut(VIRTUAL_LANES)) {
            if block.len() < GROUP_BLOCK {
                block_maxima(block, out);
                continue;
            }
            // SAFETY: a whole block, and 16 places for its maxima.
            unsafe {
                let mut m = [s.splat(f32::NEG_INFINITY); 4];
                for i in (0..GROUP_BLOCK).step_by(VIRTUAL_LANES) {
                    for (j, m) in m[..VIRTUAL_LANES / S::LANES].iter_mut().enumerate() {
                        let v = s.load(block.as_ptr().add(i + j * S::LANES));
                        *m = s.max(v, *m);
                    }
                }
                for (j, m) in m[..VIRTUAL_LANES / S::LANES].iter().enumerate() {
                    s.store(out.as_mut_ptr().add(j * S::LANES), *m);
                }
            }
        }
    }
}

/// `out = exp((x - max) / t)`; returns the sum on virtual lanes. `x` may contain -inf, which gives 0.
///
/// # Panics
/// If `x` and `out` differ in length.
pub fn exps(cpu: Cpu, x: &[f32], max: f32, t: f32, out: &mut [f32]) -> f32 {
    assert!(x.len() == out.len());
    cpu.run(Exps { x, max, t, out })
}

struct Exps<'a> {
    x: &'a [f32],
    max: f32,
    t: f32,
    out: &'a mut [f32],
}

impl Op for Exps<'_> {
    type Out = f32;

    fn scalar(self) -> f32 {
        let mut lanes = [0.0; VIRTUAL_LANES];
        for (i, (x, out)) in self.x.iter().zip(self.out).enumerate() {
            *out = exp((x - self.max) / self.t);
            lanes[i % VIRTUAL_LANES] += *out;
        }
        reduce(lanes, |a, b| a + b)
    }

    #[inline(always)]
    fn simd<S: Simd>(self, s: S) -> f32 {
        let mut lanes = [0.0f32; VIRTUAL_LANES];
        let whole = self.x.len() / VIRTUAL_LANES * VIRTUAL_LANES;
        // SAFETY: equal lengths (checked by `exps`), whole groups of 16 below them, and 16 lanes.
        unsafe {
            let (m, t) = (s.splat(self.max), s.splat(self.t));
            let mut acc = [s.splat(0.0); 4];
            for i in (0..whole).step_by(VIRTUAL_LANES) {
                for (j, acc) in acc[..VIRTUAL_LANES / S::LANES].iter_mut().enumerate() {
                    let at = i + j * S::LANES;
                    let v = exp_lanes(s, s.div(s.sub(s.load(self.x.as_ptr().add(at)), m), t));
                    s.store(self.out.as_mut_ptr().add(at), v);
                    *acc = s.add(*acc, v);
                }
            }
            for (j, acc) in acc[..VIRTUAL_LANES / S::LANES].iter().enumerate() {
                s.store(lanes.as_mut_ptr().add(j * S::LANES), *acc);
            }
        }
        for (i, (x, out)) in self.x[whole..].iter().zip(&mut self.out[whole..]).enumerate() {
            *out = exp((x - self.max) / self.t);
            lanes[i] += *out;
        }
        reduce(lanes, |a, b| a + b)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::vec;
    use alloc::vec::Vec;

    #[test]
    fn every_instruction_set_gives_the_scalar_bits() {
        for n in [0, 1, 15, 16, 17, 511, 512, 513, 1024, 1500, 5000] {
            let x: Vec<f32> = (0..n).map(|i| ((i * 7919) % 1013) as f32 * 0.05 - 20.0).collect();
            let (mut want, mut want_max) = (vec![0.0; n], vec![0.0; groups(n)]);
            let sum = exps(Cpu::SCALAR, &x, 30.0, 0.7, &mut want);
            group_maxima(Cpu::SCALAR, &x, &mut want_max);
            for (g, m) in want_max.iter().enumerate() {
                assert_eq!(*m, group(g, n).map(|i| x[i]).fold(f32::NEG_INFINITY, f32::max));
            }
            assert_eq!((0..groups(n)).map(|g| group(g, n).count()).sum::<usize>(), n);
            for cpu in Cpu::available() {
                let (mut got, mut got_max) = (vec![0.0; n], vec![0.0; groups(n)]);
                assert_eq!(exps(cpu, &x, 30.0, 0.7, &mut got).to_bits(), sum.to_bits());
                group_maxima(cpu, &x, &mut got_max);
                assert_eq!(got, want);
                assert_eq!(got_max, want_max);
            }
        }
    }
}

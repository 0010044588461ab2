//! RMSNorm (Zhang and Sennrich 2019) and LayerNorm, and the lane array on which true reductions are defined:
//! lane i accumulates elements i, i+16, i+32, ... in order, then `v[i] += v[i+8]`, `+4`, `+2`, `+1`.

use super::Cpu;
use super::cpu::Op;
use super::simd::Simd;

/// Virtual lanes of a reduction.
pub(super) const LANES: usize = 16;

/// The fixed tree over the lanes.
#[inline(always)]
pub(super) fn tree(mut v: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> f32 {
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            v[i] = f(v[i], v[i + half]);
        }
    }
    v[0]
}

/// `max` as compare and select.
#[inline(always)]
pub(super) fn max(a: f32, b: f32) -> f32 {
    if b > a { b } else { a }
}

/// The sum of squares of `x` on the lane array.
fn sum_of_squares(x: &[f32]) -> f32 {
    let mut lanes = [0.0; LANES];
    for (i, v) in x.iter().enumerate() {
        lanes[i % LANES] += v * v;
    }
    tree(lanes, |a, b| a + b)
}

#[inline(always)]
fn sum_of_squares_lanes<S: Simd>(s: S, x: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let whole = x.len() / LANES * LANES;
    // SAFETY: whole groups of 16 elements, and 16 lanes.
    unsafe {
        let mut acc = [s.splat(0.0); 4];
        for i in (0..whole).step_by(LANES) {
            for (j, acc) in acc[..LANES / S::LANES].iter_mut().enumerate() {
                let v = s.load(x.as_ptr().add(i + j * S::LANES));
                *acc = s.add(*acc, s.mul(v, v));
            }
        }
        for (j, acc) in acc[..LANES / S::LANES].iter().enumerate() {
            s.store(lanes.as_mut_ptr().add(j * S::LANES), *acc);
        }
    }
    for (lane, v) in lanes.iter_mut().zip(&x[whole..]) {
        *lane += v * v;
    }
    tree(lanes, |a, b| a + b)
}

/// `out = (x * (1 / sqrt(sum(x*x) / n + eps))) * w`; `x`, `w` and `out` have n elements.
pub fn rms_norm(cpu: Cpu, x: &[f32], w: &[f32], eps: f32, out: &mut [f32]) {
    assert!(x.len() == w.len() && x.len() == out.len());
    cpu.run(RmsNorm { x, w, eps, out });
}

struct RmsNorm<'a> {
    x: &'a [f32],
    w: &'a [f32],
    eps: f32,
    out: &'a mut [f32],
}

impl Op for RmsNorm<'_> {
    type Out = ();

    fn scalar(self) {
        let scale = inverse_rms(sum_of_squares(self.x), self.x.len(), self.eps);
        for ((out, x), w) in self.out.iter_mut().zip(self.x).zip(self.w) {
            *out = (x * scale) * w;
        }
    }

    #[inline(always)]
    fn simd<S: Simd>(self, s: S) {
        let n = self.x.len();
        let scale = inverse_rms(sum_of_squares_lanes(s, self.x), n, self.eps);
        let whole = n / S::LANES * S::LANES;
        // SAFETY: three slices of n elements (checked by `rms_norm`), whole vectors below n.
        unsafe {
            let r = s.splat(scale);
            for i in (0..whole).step_by(S::LANES) {
                let v = s.mul(s.load(self.x.as_ptr().add(i)), r);
                s.store(self.out.as_mut_ptr().add(i), s.mul(v, s.load(self.w.as_ptr().add(i))));
            }
        }
        for i in whole..n {
            self.out[i] = (self.x[i] * scale) * self.w[i];
        }
    }
}

#[inline(always)]
fn inverse_rms(sum: f32, n: usize, eps: f32) -> f32 {
    1.0 / crate::math::sqrt(sum / n as f32 + eps)
}

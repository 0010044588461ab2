//! RMSNorm (Zhang and Sennrich 2019) and LayerNorm (Ba et al. 2016), on the 16 virtual lanes that define all true
//! reductions: lane i adds elements i, i+16, i+32, ... in order, then `v[i] += v[i+8]`, `+4`, `+2`, `+1`.
#![allow(unsafe_code)]

use super::Cpu;
use super::cpu::Op;
use super::elementwise::scale;
use super::simd::{Simd, each};

/// Virtual lanes of a reduction.
pub(super) const VIRTUAL_LANES: usize = 16;

/// Reduces the virtual lanes in the fixed tree order.
#[inline(always)]
pub(super) fn reduce(v: [f32; VIRTUAL_LANES], f: impl Fn(f32, f32) -> f32) -> f32 {
    // separate arrays, which compilers keep in registers
    let v: [f32; 8] = each!(8, |i| f(v[i], v[i + 8]));
    let v: [f32; 4] = each!(4, |i| f(v[i], v[i + 4]));
    let v: [f32; 2] = each!(2, |i| f(v[i], v[i + 2]));
    f(v[0], v[1])
}

/// Maximum by compare and select; `a` if one is NaN.
#[inline(always)]
pub(super) fn max(a: f32, b: f32) -> f32 {
    if b > a { b } else { a }
}

/// Kind of normalisation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormKind {
    /// RMSNorm: no centring.
    Rms,
    /// LayerNorm: subtracts the mean.
    Layer,
}

/// The parameters of a normalisation.
#[derive(Clone, Copy)]
pub struct NormWeights<'a> {
    /// RMSNorm or LayerNorm.
    pub kind: NormKind,
    /// Added to the mean square.
    pub eps: f32,
    /// Weight of each element.
    pub w: &'a [f32],
    /// Bias of each element, if any.
    pub b: Option<&'a [f32]>,
}

/// `out = ((x - c) * (1 / sqrt(sum((x - c)^2) / n + eps))) * w + b`, where c is 0 or the mean `sum(x) / n`, and n the
/// length of all slices. Without a bias nothing is added.
///
/// # Panics
/// If lengths differ.
pub fn norm(cpu: Cpu, n: &NormWeights<'_>, x: &[f32], out: &mut [f32]) {
    assert!(x.len() == out.len());
    Norm::run(cpu, n, Some(x), out);
}

/// [`norm`] with `x` as input and output.
pub fn norm_in_place(cpu: Cpu, n: &NormWeights<'_>, x: &mut [f32]) {
    Norm::run(cpu, n, None, x);
}

/// L2 normalisation: `x = x * (1 / sqrt(sum(x * x)))`. A zero vector is left unchanged.
pub fn normalise(cpu: Cpu, x: &mut [f32]) {
    let sum = cpu.run(Squares(x));
    if sum > 0.0 {
        scale(cpu, x, 1.0 / crate::math::sqrt(sum));
    }
}

/// L2 normalisation with a lower limit of the length: `x = x * (factor / max(sqrt(sum(x * x)), eps))`.
pub fn l2_norm(cpu: Cpu, x: &mut [f32], eps: f32, factor: f32) {
    let length = crate::math::sqrt(cpu.run(Squares(x)));
    scale(cpu, x, factor / max(length, eps));
}

/// L2 normalisation with an epsilon in the root: `x = x * (factor / sqrt(sum(x * x) + eps))`.
pub fn l2_norm_with_eps(cpu: Cpu, x: &mut [f32], eps: f32, factor: f32) {
    let length = crate::math::sqrt(cpu.run(Squares(x)) + eps);
    scale(cpu, x, factor / length);
}

/// The mean of the squares of `x`.
pub fn mean_square(cpu: Cpu, x: &[f32]) -> f32 {
    cpu.run(Squares(x)) / x.len() as f32
}

/// Activation sparsity (Gemma 3n): `x = max(x - (mean + factor * deviation), 0)`, with the mean and the standard deviation
/// `sqrt(sum((x - mean)^2) / (n - 1))` of the n elements; one element has no deviation.
pub fn sparsify(cpu: Cpu, x: &mut [f32], factor: f32) {
    cpu.run(Sparsify { x, factor });
}

struct Sparsify<'a> {
    x: &'a mut [f32],
    factor: f32,
}

impl Sparsify<'_> {
    #[inline(always)]
    fn run(self, sum: impl Fn(&[f32], Option<f32>) -> f32) {
        let n = self.x.len() as f32;
        let mean = sum(self.x, None) / n;
        let cutoff = mean + crate::math::sqrt(sum(self.x, Some(mean)) / (n - 1.0).max(1.0)) * self.factor;
        for x in self.x {
            *x = if *x > cutoff { *x - cutoff } else { 0.0 };
        }
    }
}

impl Op for Sparsify<'_> {
    type Out = ();

    fn scalar(self) {
        self.run(sum);
    }

    #[inline(always)]
    fn simd<S: Simd>(self, s: S) {
        self.run(
            #[inline(always)]
            |x, squares_from| sum_lanes(s, x, squares_from),
        );
    }
}

/// The sum of squares on virtual lanes.
struct Squares<'a>(&'a [f32]);

impl Op for Squares<'_> {
    type Out = f32;

    fn scalar(self) -> f32 {
        sum(self.0, Some(0.0))
    }

    #[inline(always)]
    fn simd<S: Simd>(self, s: S) -> f32 {
        sum_lanes(s, self.0, Some(0.0))
    }
}

struct Norm<'a> {
    n: &'a NormWeights<'a>,
    /// `None`: the input is the content of `out`.
    x: Option<&'a [f32]>,
    out: &'a mut [f32],
}

/// The sum of `x`, or of the squares of `x - center`, on virtual lanes.
fn sum(x: &[f32], squares_from: Option<f32>) -> f32 {
    let mut lanes = [0.0; VIRTUAL_LANES];
    for (i, x) in x.iter().enumerate() {
        lanes[i % VIRTUAL_LANES] += term(*x, squares_from);
    }
    reduce(lanes, |a, b| a + b)
}

#[inline(always)]
fn term(x: f32, squares_from: Option<f32>) -> f32 {
    match squares_from {
        None => x,
        Some(center) => (x - center) * (x - center),
    }
}

#[inline(always)]
fn sum_lanes<S: Simd>(s: S, x: &[f32], squares_from: Option<f32>) -> f32 {
    let mut lanes = [0.0f32; VIRTUAL_LANES];
    let whole = x.len() / VIRTUAL_LANES * VIRTUAL_LANES;
    // SAFETY: whole groups of 16 elements, and 16 lanes.
    unsafe {
        let mut acc = [s.splat(0.0); 4];
        for i in (0..whole).step_by(VIRTUAL_LANES) {
            for (j, acc) in acc[..VIRTUAL_LANES / S::LANES].iter_mut().enumerate() {
                let mut v = s.load(x.as_ptr().add(i + j * S::LANES));
                if let Some(center) = squares_from {
                    v = s.sub(v, s.splat(center));
                    v = s.mul(v, v);
                }
                *acc = s.add(*acc, v);
            }
        }
        for (j, acc) in acc[..VIRTUAL_LANES / S::LANES].iter().enumerate() {
            s.store(lanes.as_mut_ptr().add(j * S::LANES), *acc);
        }
    }
    for (lane, x) in lanes.iter_mut().zip(&x[whole..]) {
        *lane += term(*x, squares_from);
    }
    reduce(lanes, |a, b| a + b)
}

impl Norm<'_> {
    fn run(cpu: Cpu, n: &NormWeights<'_>, x: Option<&[f32]>, out: &mut [f32]) {
        assert!(n.w.len() == out.len() && n.b.is_none_or(|b| b.len() == out.len()));
        cpu.run(Norm { n, x, out });
    }

    #[inline(always)]
    fn x(&self) -> &[f32] {
        self.x.unwrap_or(self.out)
    }

    /// The centre, and the factor.
    #[inline(always)]
    fn center_and_scale(&self, sum: impl Fn(&[f32], Option<f32>) -> f32) -> (f32, f32) {
        let (x, n) = (self.x(), self.out.len() as f32);
        let center = match self.n.kind {
            NormKind::Rms => 0.0,
            NormKind::Layer => sum(x, None) / n,
        };
        (center, 1.0 / crate::math::sqrt(sum(x, Some(center)) / n + self.n.eps))
    }

    /// Element `i` of the result.
    #[inline(always)]
    fn at(&self, i: usize, center: f32, scale: f32) -> f32 {
        let y = ((self.x()[i] - center) * scale) * self.n.w[i];
        match self.n.b {
            None => y,
            Some(b) => y + b[i],
        }
    }
}

impl Op for Norm<'_> {
    type Out = ();

    fn scalar(self) {
        let (center, scale) = self.center_and_scale(sum);
        for i in 0..self.out.len() {
            self.out[i] = self.at(i, center, scale);
        }
    }

    #[inline(always)]
    fn simd<S: Simd>(self, s: S) {
        let n = self.out.len();
        let (center, scale) = self.center_and_scale(
            #[inline(always)]
            |x, squares_from| sum_lanes(s, x, squares_from),
        );
        let whole = n / S::LANES * S::LANES;
        // SAFETY: slices of n elements (checked by `norm` and `run`), whole vectors below n; each vector is read before
        // it is written.
        unsafe {
            let (c, r) = (s.splat(center), s.splat(scale));
            for i in (0..whole).step_by(S::LANES) {
                let v = s.mul(s.sub(s.load(self.x().as_ptr().add(i)), c), r);
                let mut v = s.mul(v, s.load(self.n.w.as_ptr().add(i)));
                if let Some(b) = self.n.b {
                    v = s.add(v, s.load(b.as_ptr().add(i)));
                }
                s.store(self.out.as_mut_ptr().add(i), v);
            }
        }
        for i in whole..n {
            self.out[i] = self.at(i, center, scale);
        }
    }
}

//! Elementwise operations: activation functions, scaled addition, soft cap.
#![allow(unsafe_code)]

use super::Cpu;
use super::cpu::Op;
use super::exp::{LOW, UNROLL, exp, exp_above_lanes};
use super::simd::Simd;
use super::special::{erfc, erfc_lanes, tanh, tanh_lanes};

/// Activation function of a feed-forward network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Activation {
    /// `x / (1 + exp(-x))`.
    Silu,
    /// GELU's tanh form (Hendrycks and Gimpel 2016), `x * (1 + tanh u) / 2` with `u = sqrt(2/pi) * (x + 0.044715 x^3)`,
    /// which is `x / (1 + exp(-2u))`.
    GeluTanh,
    /// GELU, `x * (1 + erf(x / sqrt 2)) / 2`, as `max(x, 0) - |x|/2 * erfc(|x| / sqrt 2)`.
    GeluErf,
    /// `max(x, 0)`.
    Relu,
    /// `max(x, 0)^2`.
    ReluSquared,
    /// The logistic function, `1 / (1 + exp(-x))`.
    Sigmoid,
}

const GELU_SCALE: f32 = 0.797_884_6; // sqrt(2 / pi)
const GELU_CUBE: f32 = 0.044_715;

/// `1 / (1 + exp(-x))`.
pub fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

impl Activation {
    fn of(self, x: f32) -> f32 {
        match self {
            Activation::Silu => x / (1.0 + exp(-x)),
            Activation::GeluTanh => {
                let u = GELU_SCALE * (x + GELU_CUBE * (x * (x * x)));
                x / (1.0 + exp(-(u + u)))
            }
            Activation::GeluErf => {
                let a = x.abs();
                let positive = if x > 0.0 { x } else { 0.0 };
                positive - (a * 0.5) * erfc(a * core::f32::consts::FRAC_1_SQRT_2)
            }
            Activation::Relu => positive(x),
            Activation::ReluSquared => positive(x) * positive(x),
            Activation::Sigmoid => sigmoid(x),
        }
    }

    #[inline(always)]
    fn of_lanes<S: Simd, const N: usize>(self, s: S, x: [S::F; N]) -> [S::F; N] {
        let mut y = x;
        match self {
            Activation::Silu => return times_logistic(s, x, x),
            Activation::Sigmoid => return times_logistic(s, [s.splat(1.0); N], x),
            Activation::Relu | Activation::ReluSquared => {
                for y in &mut y {
                    *y = s.select_gt(*y, s.splat(0.0), *y, s.splat(0.0));
                    if self == Activation::ReluSquared {
                        *y = s.mul(*y, *y);
                    }
                }
            }
            Activation::GeluTanh => {
                for y in &mut y {
                    let cube = s.mul(*y, s.mul(*y, *y));
                    let u = s.mul(s.splat(GELU_SCALE), s.add(*y, s.mul(s.splat(GELU_CUBE), cube)));
                    *y = s.add(u, u);
                }
                return times_logistic(s, x, y);
            }
            Activation::GeluErf => {
                for y in &mut y {
                    let a = s.abs(*y);
                    let positive = s.select_gt(*y, s.splat(0.0), *y, s.splat(0.0));
                    let tail = erfc_lanes(s, s.mul(a, s.splat(core::f32::consts::FRAC_1_SQRT_2)));
                    *y = s.sub(positive, s.mul(s.mul(a, s.splat(0.5)), tail));
                }
            }
        }
        y
    }
}

/// `max(x, 0)`; 0 for NaN.
fn positive(x: f32) -> f32 {
    if x > 0.0 { x } else { 0.0 }
}

/// `x / (1 + exp(-u))`.
#[inline(always)]
fn times_logistic<S: Simd, const N: usize>(s: S, x: [S::F; N], u: [S::F; N]) -> [S::F; N] {
    let mut y = u;
    for y in &mut y {
        *y = s.from_bits(s.add_i(s.bits(*y), s.splat_i(i32::MIN)));
    }
    let mut y = exp_above_lanes(s, LOW, y);
    for (y, x) in y.iter_mut().zip(x) {
        *y = s.div(x, s.add(s.splat(1.0), *y));
    }
    y
}

/// `x += y * scale`.
pub fn add_scaled(cpu: Cpu, x: &mut [f32], y: &[f32], scale: f32) {
    Elementwise::run(cpu, ElementwiseOp::AddScaled(scale), x, Some(y));
}

/// `x *= scale`.
pub fn scale(cpu: Cpu, x: &mut [f32], scale: f32) {
    Elementwise::run(cpu, ElementwiseOp::Scale(scale), x, None);
}

/// `x *= y`.
pub fn multiply(cpu: Cpu, x: &mut [f32], y: &[f32]) {
    Elementwise::run(cpu, ElementwiseOp::Multiply, x, Some(y));
}

/// `x = act(x)`.
pub fn activate(cpu: Cpu, act: Activation, x: &mut [f32]) {
    Elementwise::run(cpu, ElementwiseOp::Activate(act), x, None);
}

/// `gate = act(gate) * up`.
pub fn gated(cpu: Cpu, act: Activation, gate: &mut [f32], up: &[f32]) {
    Elementwise::run(cpu, ElementwiseOp::Gated(act), gate, Some(up));
}

/// `x = min(max(x, -limit), limit)`.
pub fn clamp(cpu: Cpu, x: &mut [f32], limit: f32) {
    Elementwise::run(cpu, ElementwiseOp::Clamp(limit), x, None);
}

/// SwiGLU with clamped inputs and a linear term (gpt-oss): `gate = g / (1 + exp(-1.702 g)) * (u + 1)` with
/// `g = min(gate, limit)` and `u` = `up` clamped to `limit`.
pub fn clamped_swiglu(cpu: Cpu, gate: &mut [f32], up: &[f32], limit: f32) {
    Elementwise::run(cpu, ElementwiseOp::ClampedSwiglu(limit), gate, Some(up));
}

/// SwiGLU whose factors are clamped (Step 3.5): `gate = min(silu(gate), limit) * u` with `u` = `up` clamped to `limit`.
pub fn silu_clamped(cpu: Cpu, gate: &mut [f32], up: &[f32], limit: f32) {
    Elementwise::run(cpu, ElementwiseOp::SiluClamped(limit), gate, Some(up));
}

/// SwiGLU with clamped inputs (Maple): `gate = silu(min(gate, limit)) * u` with `u` = `up` clamped to `limit`.
pub fn limited_swiglu(cpu: Cpu, gate: &mut [f32], up: &[f32], limit: f32) {
    Elementwise::run(cpu, ElementwiseOp::LimitedSwiglu(limit), gate, Some(up));
}

/// Parameters of xIELU (Huang and Schlag 2024).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Xielu {
    /// Factor of the exponential part, for x up to 0.
    pub negative: f32,
    /// Factor of the square, for x above 0.
    pub positive: f32,
    /// Factor of the linear part.
    pub beta: f32,
    /// Largest argument of the exponential.
    pub eps: f32,
}

/// xIELU: `positive * x^2 + beta * x` for x above 0, else `(exp(min(x, eps)) - 1 - x) * negative + beta * x`.
pub fn xielu(cpu: Cpu, x: &mut [f32], xielu: Xielu) {
    Elementwise::run(cpu, ElementwiseOp::Xielu(xielu), x, None);
}

/// `x = x / (1 + exp(-gate))`: the product with the sigmoid of the gate.
pub fn gate_by_sigmoid(cpu: Cpu, x: &mut [f32], gate: &[f32]) {
    Elementwise::run(cpu, ElementwiseOp::SigmoidGate, x, Some(gate));
}

/// `x = cap * tanh(x / cap)`.
pub fn soft_cap(cpu: Cpu, x: &mut [f32], cap: f32) {
    Elementwise::run(cpu, ElementwiseOp::SoftCap(cap), x, None);
}

/// The soft cap of one element.
#[inline(always)]
pub(super) fn soft_cap_one(x: f32, cap: f32) -> f32 {
    cap * tanh(x / cap)
}

/// [`soft_cap_one`] on lanes.
#[inline(always)]
pub(super) fn soft_cap_lanes<S: Simd>(s: S, x: S::F, cap: f32) -> S::F {
    s.mul(s.splat(cap), tanh_lanes(s, s.div(x, s.splat(cap))))
}

/// An elementwise operation on x, and on y of a second operand if it has one.
#[derive(Clone, Copy)]
enum ElementwiseOp {
    AddScaled(f32),
    Scale(f32),
    Activate(Activation),
    Gated(Activation),
    SigmoidGate,
    SoftCap(f32),
    Multiply,
    Clamp(f32),
    ClampedSwiglu(f32),
    SiluClamped(f32),
    LimitedSwiglu(f32),
    Xielu(Xielu),
}

/// Slope of the logistic function in gpt-oss' SwiGLU.
const SWIGLU_SLOPE: f32 = 1.702;

/// `min(x, limit)`; `limit` for NaN.
fn at_most(x: f32, limit: f32) -> f32 {
    if limit > x { x } else { limit }
}

fn within(x: f32, limit: f32) -> f32 {
    let x = at_most(x, limit);
    if x > -limit { x } else { -limit }
}

#[inline(always)]
fn at_most_lanes<S: Simd>(s: S, x: S::F, limit: f32) -> S::F {
    s.select_gt(s.splat(limit), x, x, s.splat(limit))
}

#[inline(always)]
fn within_lanes<S: Simd>(s: S, x: S::F, limit: f32) -> S::F {
    let x = at_most_lanes(s, x, limit);
    s.select_gt(x, s.splat(-limit), x, s.splat(-limit))
}

impl ElementwiseOp {
    fn of(self, x: f32, y: f32) -> f32 {
        match self {
            ElementwiseOp::AddScaled(scale) => x + y * scale,
            ElementwiseOp::Scale(scale) => x * scale,
            ElementwiseOp::Activate(act) => act.of(x),
            ElementwiseOp::Gated(act) => act.of(x) * y,
            ElementwiseOp::SigmoidGate => x / (1.0 + exp(-y)),
            ElementwiseOp::SoftCap(cap) => soft_cap_one(x, cap),
            ElementwiseOp::Multiply => x * y,
            ElementwiseOp::Clamp(limit) => within(x, limit),
            ElementwiseOp::ClampedSwiglu(limit) => {
                let gate = at_most(x, limit);
                gate / (1.0 + exp(-(SWIGLU_SLOPE * gate))) * (within(y, limit) + 1.0)
            }
            ElementwiseOp::LimitedSwiglu(limit) => Activation::Silu.of(at_most(x, limit)) * within(y, limit),
            ElementwiseOp::Xielu(p) => {
                let part = match x > 0.0 {
                    true => p.positive * (x * x),
                    false => (exp(at_most(x, p.eps)) - 1.0 - x) * p.negative,
                };
                part + p.beta * x
            }
            ElementwiseOp::SiluClamped(limit) => at_most(Activation::Silu.of(x), limit) * within(y, limit),
        }
    }

    #[inline(always)]
    fn of_lanes<S: Simd, const N: usize>(self, s: S, mut x: [S::F; N], y: [S::F; N]) -> [S::F; N] {
        if let ElementwiseOp::Activate(act) | ElementwiseOp::Gated(act) = self {
            x = act.of_lanes(s, x);
        }
        if let ElementwiseOp::SigmoidGate = self {
            return times_logistic(s, x, y);
        }
        match self {
            ElementwiseOp::ClampedSwiglu(limit) => {
                let mut u = x;
                for (x, u) in x.iter_mut().zip(&mut u) {
                    *x = at_most_lanes(s, *x, limit);
                    *u = s.mul(s.splat(SWIGLU_SLOPE), *x);
                }
                x = times_logistic(s, x, u);
            }
            ElementwiseOp::SiluClamped(_) => x = times_logistic(s, x, x),
            ElementwiseOp::LimitedSwiglu(limit) => {
                for x in &mut x {
                    *x = at_most_lanes(s, *x, limit);
                }
                x = times_logistic(s, x, x);
            }
            ElementwiseOp::Xielu(p) => {
                let mut e = x;
                for e in &mut e {
                    *e = at_most_lanes(s, *e, p.eps);
                }
                let e = exp_above_lanes(s, LOW, e);
                for (x, e) in x.iter_mut().zip(e) {
                    let square = s.mul(s.splat(p.positive), s.mul(*x, *x));
                    let low = s.mul(s.sub(s.sub(e, s.splat(1.0)), *x), s.splat(p.negative));
                    let part = s.select_gt(*x, s.splat(0.0), square, low);
                    *x = s.add(part, s.mul(s.splat(p.beta), *x));
                }
            }
            _ => {}
        }
        for (x, y) in x.iter_mut().zip(y) {
            *x = match self {
                ElementwiseOp::Multiply => s.mul(*x, y),
                ElementwiseOp::LimitedSwiglu(limit) => s.mul(*x, within_lanes(s, y, limit)),
                ElementwiseOp::Xielu(_) => *x,
                ElementwiseOp::Clamp(limit) => within_lanes(s, *x, limit),
                ElementwiseOp::ClampedSwiglu(limit) => s.mul(*x, s.add(within_lanes(s, y, limit), s.splat(1.0))),
                ElementwiseOp::SiluClamped(limit) => s.mul(at_most_lanes(s, *x, limit), within_lanes(s, y, limit)),
                ElementwiseOp::AddScaled(scale) => s.add(*x, s.mul(y, s.splat(scale))),
                ElementwiseOp::Scale(scale) => s.mul(*x, s.splat(scale)),
                ElementwiseOp::Activate(_) | ElementwiseOp::SigmoidGate => *x,
                ElementwiseOp::Gated(_) => s.mul(*x, y),
                ElementwiseOp::SoftCap(cap) => soft_cap_lanes(s, *x, cap),
            };
        }
        x
    }
}

/// `x = op(x, y)` for all elements.
struct Elementwise<'a> {
    op: ElementwiseOp,
    x: &'a mut [f32],
    y: Option<&'a [f32]>,
}

impl Elementwise<'_> {
    fn run(cpu: Cpu, op: ElementwiseOp, x: &mut [f32], y: Option<&[f32]>) {
        assert!(y.is_none_or(|y| y.len() == x.len()));
        cpu.run(Elementwise { op, x, y });
    }

    /// Applies the operation to the elements from `from` on, one by one.
    fn rest(&mut self, from: usize) {
        for i in from..self.x.len() {
            self.x[i] = self.op.of(self.x[i], self.y.map_or(0.0, |y| y[i]));
        }
    }
}

impl Op for Elementwise<'_> {
    type Out = ();

    fn scalar(mut self) {
        self.rest(0);
    }

    #[inline(always)]
    fn simd<S: Simd>(mut self, s: S) {
        let whole = self.x.len() / S::LANES * S::LANES;
        let p = self.x.as_mut_ptr();
        // SAFETY: equal lengths (checked by `run`), whole vectors below them.
        unsafe {
            for i in (0..whole).step_by(UNROLL * S::LANES) {
                // an incomplete last step repeats vectors instead of processing them one by one
                let at = |j: usize| (i + j * S::LANES).min(whole - S::LANES);
                let (mut x, mut y) = ([s.splat(0.0); UNROLL], [s.splat(0.0); UNROLL]);
                for j in 0..UNROLL {
                    x[j] = s.load(p.add(at(j)));
                    if let Some(operand) = self.y {
                        y[j] = s.load(operand.as_ptr().add(at(j)));
                    }
                }
                let x = self.op.of_lanes(s, x, y);
                for (j, x) in x.iter().enumerate() {
                    s.store(p.add(at(j)), *x);
                }
            }
        }
        self.rest(whole);
    }
}

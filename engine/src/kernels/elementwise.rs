//! Elementwise steps between the products.

use super::Cpu;
use super::cpu::Op;
use super::exp::{ABREAST, exp, exp_lanes};
use super::simd::Simd;

/// `x += y`.
pub fn add(cpu: Cpu, x: &mut [f32], y: &[f32]) {
    assert!(x.len() == y.len());
    cpu.run(Add { x, y });
}

struct Add<'a> {
    x: &'a mut [f32],
    y: &'a [f32],
}

impl Op for Add<'_> {
    type Out = ();
    fn scalar(self) {
        for (x, y) in self.x.iter_mut().zip(self.y) {
            *x += y;
        }
    }
    #[inline(always)]
    fn simd<S: Simd>(self, s: S) {
        let whole = self.x.len() / S::LANES * S::LANES;
        // SAFETY: equal lengths (checked by `add`), whole vectors below them.
        unsafe {
            for i in (0..whole).step_by(S::LANES) {
                let p = self.x.as_mut_ptr().add(i);
                s.store(p, s.add(s.load(p), s.load(self.y.as_ptr().add(i))));
            }
        }
        for (x, y) in self.x[whole..].iter_mut().zip(&self.y[whole..]) {
            *x += y;
        }
    }
}

/// The activation of a gated feed-forward.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gate {
    /// `x / (1 + exp(-x))`.
    Silu,
    /// `x * (1 - 1 / (exp(2u) + 1))`, `u = sqrt(2/pi) * (x + 0.044715 x^3)`: GELU's tanh form, `(1 + tanh u)/2` written
    /// with exp (Hendrycks and Gimpel 2016).
    GeluTanh,
}

const GELU_SCALE: f32 = 0.797_884_6; // sqrt(2 / pi)
const GELU_CUBE: f32 = 0.044_715;

impl Gate {
    fn of(self, x: f32) -> f32 {
        match self {
            Gate::Silu => x / (1.0 + exp(-x)),
            Gate::GeluTanh => {
                let u = GELU_SCALE * (x + GELU_CUBE * (x * (x * x)));
                x * (1.0 - 1.0 / (exp(u + u) + 1.0))
            }
        }
    }

    #[inline(always)]
    fn of_lanes<S: Simd, const N: usize>(self, s: S, x: [S::F; N]) -> [S::F; N] {
        let one = s.splat(1.0);
        match self {
            Gate::Silu => {
                let mut y = x;
                for y in &mut y {
                    *y = s.from_bits(s.add_i(s.bits(*y), s.splat_i(i32::MIN)));
                }
                let mut y = exp_lanes(s, y);
                for (y, x) in y.iter_mut().zip(x) {
                    *y = s.div(x, s.add(one, *y));
                }
                y
            }
            Gate::GeluTanh => {
                let mut y = x;
                for y in &mut y {
                    let cube = s.mul(*y, s.mul(*y, *y));
                    let u = s.mul(s.splat(GELU_SCALE), s.add(*y, s.mul(s.splat(GELU_CUBE), cube)));
                    *y = s.add(u, u);
                }
                let mut y = exp_lanes(s, y);
                for (y, x) in y.iter_mut().zip(x) {
                    *y = s.mul(x, s.sub(one, s.div(one, s.add(*y, one))));
                }
                y
            }
        }
    }
}

/// `gate = act(gate) * up`.
pub fn gated(cpu: Cpu, act: Gate, gate: &mut [f32], up: &[f32]) {
    assert!(gate.len() == up.len());
    cpu.run(Gated { act, gate, up });
}

struct Gated<'a> {
    act: Gate,
    gate: &'a mut [f32],
    up: &'a [f32],
}

impl Op for Gated<'_> {
    type Out = ();
    fn scalar(self) {
        for (g, u) in self.gate.iter_mut().zip(self.up) {
            *g = self.act.of(*g) * u;
        }
    }
    #[inline(always)]
    fn simd<S: Simd>(self, s: S) {
        let whole = self.gate.len() / S::LANES * S::LANES;
        // SAFETY: equal lengths (checked by `gated`), whole vectors below them.
        unsafe {
            for i in (0..whole).step_by(ABREAST * S::LANES) {
                // what is left over is done twice rather than alone
                let at = |j: usize| (i + j * S::LANES).min(whole - S::LANES);
                let (gate, up) = (self.gate.as_mut_ptr(), self.up.as_ptr());
                let mut g = [s.splat(0.0); ABREAST];
                for (j, g) in g.iter_mut().enumerate() {
                    *g = s.load(gate.add(at(j)));
                }
                let g = self.act.of_lanes(s, g);
                for (j, g) in g.iter().enumerate() {
                    s.store(gate.add(at(j)), s.mul(*g, s.load(up.add(at(j)))));
                }
            }
        }
        for (g, u) in self.gate[whole..].iter_mut().zip(&self.up[whole..]) {
            *g = self.act.of(*g) * u;
        }
    }
}

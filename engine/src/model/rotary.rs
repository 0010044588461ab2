//! Rotary frequencies: one per pair of a head, from base, scaling and the file's own divisors.

use alloc::vec::Vec;
use core::f64::consts::PI;

use super::config::Config;
use crate::math::{ln, pow, sin_cos};

/// How frequencies are stretched beyond the context a model was first trained for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScalingKind {
    /// Not at all. Llama 3's scaling is of this kind: its divisors are a tensor.
    None,
    /// All by one factor (Chen et al. 2023).
    Linear,
    /// By wavelength (YaRN, Peng et al. 2023).
    Yarn,
}

impl ScalingKind {
    /// All kinds.
    pub const ALL: [ScalingKind; 3] = [ScalingKind::None, ScalingKind::Linear, ScalingKind::Yarn];

    /// The name in `rope.scaling.type`.
    pub const fn name(self) -> &'static str {
        match self {
            ScalingKind::None => "none",
            ScalingKind::Linear => "linear",
            ScalingKind::Yarn => "yarn",
        }
    }
}

/// Parameters of the scaling.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scaling {
    /// The formula.
    pub kind: ScalingKind,
    /// How many times longer the context became.
    pub factor: f32,
    /// Context before stretching.
    pub original_context: usize,
    /// Extra factor on the length of rotated vectors.
    pub attn_factor: f32,
    /// YaRN: turns over the original context above which a pair keeps its frequency.
    pub beta_fast: f32,
    /// YaRN: turns below which a pair is stretched by the whole factor.
    pub beta_slow: f32,
}

impl Scaling {
    /// No scaling.
    pub const NONE: Scaling = Scaling {
        kind: ScalingKind::None,
        factor: 1.0,
        original_context: 0,
        attn_factor: 1.0,
        beta_fast: 32.0,
        beta_slow: 1.0,
    };
}

/// Frequencies of the pairs, in radians per position.
#[derive(Debug, Clone, PartialEq)]
pub struct Rotary {
    freqs: Vec<f64>,
    /// Cosines and sines are multiplied by it.
    magnitude: f32,
}

impl Rotary {
    /// From the configuration and, where the file has them, the divisors of `rope_freqs.weight` (n_rot / 2).
    pub fn new(c: &Config, divisors: Option<&[f32]>) -> Rotary {
        let s = &c.rope_scaling;
        let (n, base) = (c.n_rot as f64, f64::from(c.rope_base));
        let factor = f64::from(s.factor);
        let mut freqs: Vec<f64> = (0..c.n_rot / 2).map(|i| pow(base, -2.0 * i as f64 / n)).collect();
        let mut magnitude = 1.0;
        match s.kind {
            ScalingKind::None => {}
            ScalingKind::Linear => freqs.iter_mut().for_each(|f| *f /= factor),
            ScalingKind::Yarn => {
                // the pair that turns `beta` times over the original context
                let pair =
                    |beta: f32| n * ln(s.original_context as f64 / (f64::from(beta) * 2.0 * PI)) / (2.0 * ln(base));
                let low = floor(pair(s.beta_fast)).max(0.0);
                let high = (-floor(-pair(s.beta_slow))).min(n - 1.0);
                for (i, f) in freqs.iter_mut().enumerate() {
                    let ramp = ((i as f64 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
                    *f = *f / factor * ramp + *f * (1.0 - ramp);
                }
                magnitude = s.attn_factor * (1.0 + 0.1 * ln(factor) as f32);
            }
        }
        if let Some(divisors) = divisors {
            for (f, d) in freqs.iter_mut().zip(divisors) {
                *f /= f64::from(*d);
            }
        }
        Rotary { freqs, magnitude }
    }

    /// Cosines and sines of a position, one of each per pair.
    pub fn at(&self, pos: usize, cos: &mut [f32], sin: &mut [f32]) {
        for ((f, cos), sin) in self.freqs.iter().zip(cos).zip(sin) {
            let (s, c) = sin_cos(pos as f64 * f);
            (*cos, *sin) = (c as f32 * self.magnitude, s as f32 * self.magnitude);
        }
    }
}

/// The largest integer not above x; |x| is far below 2^53.
fn floor(x: f64) -> f64 {
    let t = x as i64 as f64;
    if t > x { t - 1.0 } else { t }
}

//! RoPE frequencies: one per pair of elements of a head, from base, scaling and the file's divisors.

use alloc::vec::Vec;
use core::f64::consts::PI;

use crate::error::LoadError;
use crate::math::{ln, pow, sin_cos};
use crate::model::family::{Family, YarnLog};
use crate::model::keys::Keys;
use crate::model::keys::MAX_CONTEXT;
use crate::model::tensors::{Declared, Loaded, Name, vector};

/// RoPE scaling: how frequencies are changed for contexts longer than the original training context.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScalingKind {
    /// No formula. Llama 3's scaling is of this kind: files store it as the tensor `rope_freqs`.
    None,
    /// All frequencies are divided by one factor (Chen et al. 2023).
    Linear,
    /// Frequencies are divided depending on their wavelength (YaRN, Peng et al. 2023).
    Yarn,
    /// Frequencies are divided by one tensor in short contexts and by another in long ones (LongRoPE, Ding et al.
    /// 2024).
    LongRope,
}

impl ScalingKind {
    /// All kinds, for parsing.
    pub const ALL: [ScalingKind; 4] =
        [ScalingKind::None, ScalingKind::Linear, ScalingKind::Yarn, ScalingKind::LongRope];

    /// The kind's name in `rope.scaling.type`.
    pub const fn name(self) -> &'static str {
        match self {
            ScalingKind::None => "none",
            ScalingKind::Linear => "linear",
            ScalingKind::Yarn => "yarn",
            ScalingKind::LongRope => "longrope",
        }
    }
}

/// Parameters of RoPE scaling.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scaling {
    /// Which formula applies.
    pub kind: ScalingKind,
    /// Context extension factor.
    pub factor: f32,
    /// Training context before the extension, in tokens.
    pub original_context: usize,
    /// Factor on cosines and sines, and so on the magnitude of rotated vectors.
    pub attn_factor: f32,
    /// YaRN: pairs with more turns over the original context keep their frequency.
    pub beta_fast: f32,
    /// YaRN: pairs with fewer turns over the original context are divided by the whole factor.
    pub beta_slow: f32,
    /// YaRN: a further factor on cosines and sines.
    pub magnitude: f32,
    /// YaRN: factor on attention scores.
    pub score_factor: f32,
}

impl Scaling {
    /// Reads the scaling from metadata.
    ///
    /// # Errors
    /// [`LoadError::Unsupported`] for an unknown kind, [`LoadError::Metadata`] for a value out of range.
    pub(crate) fn read(keys: &Keys<'_, '_>, n_ctx_train: usize, family: &Family) -> Result<Scaling, LoadError> {
        let factor = keys.optional("rope.scaling.factor")?.or(keys.optional("rope.scale_linear")?);
        let kind = match keys.str("rope.scaling.type")? {
            // older files have a factor without a type: linear
            None if factor.is_some() => ScalingKind::Linear,
            None => ScalingKind::None,
            Some(name) => match ScalingKind::ALL.iter().find(|k| k.name() == name) {
                Some(kind) => *kind,
                None => {
                    return Err(LoadError::Unsupported {
                        what: "rope scaling",
                        found: name.into(),
                        known: ScalingKind::ALL.iter().map(|k| k.name()).collect(),
                    });
                }
            },
        };
        let factor = factor.unwrap_or(1.0);
        let attn_factor = keys.positive("rope.scaling.attn_factor", 1.0)?;
        let multiplier = keys.optional("rope.scaling.yarn_log_multiplier")?;
        let (magnitude, score_factor) = yarn_factors(family.yarn_log, factor, attn_factor, multiplier);
        Ok(Scaling {
            kind,
            factor,
            original_context: match keys.u32("rope.scaling.original_context_length")? {
                None | Some(0) => n_ctx_train,
                v => keys.in_range("rope.scaling.original_context_length", v, 1..=MAX_CONTEXT)?,
            },
            attn_factor,
            beta_fast: keys.positive("rope.scaling.yarn_beta_fast", 32.0)?,
            beta_slow: keys.positive("rope.scaling.yarn_beta_slow", 1.0)?,
            magnitude,
            score_factor: if kind == ScalingKind::Yarn { score_factor } else { 1.0 },
        })
    }
}

/// Factors of YaRN on rotated vectors, beside `attn_factor`, and on attention scores; `multiplier` is
/// `rope.scaling.yarn_log_multiplier`.
fn yarn_factors(kind: YarnLog, factor: f32, attn_factor: f32, multiplier: Option<f32>) -> (f32, f32) {
    let log = ln(f64::from(factor)) as f32;
    let magnitude = 1.0 + 0.1 * log;
    let scores = 1.0 + multiplier.unwrap_or(0.0) * log;
    let magnitude = match (kind, multiplier) {
        (_, None) => magnitude,
        (YarnLog::Magnitude, Some(m)) => magnitude / (1.0 + 0.1 * m * log),
        (YarnLog::ScoresAndMagnitude, Some(_)) => magnitude / scores,
        (YarnLog::Scores, Some(_)) => 1.0,
    };
    let scores = attn_factor * magnitude * scores;
    (magnitude, if kind == YarnLog::Magnitude { 1.0 } else { scores * scores })
}

/// A RoPE variant; models with local and global layers have two.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct RopeConfig {
    /// Base of the frequencies (theta).
    pub base: f32,
    /// Scaling of the frequencies; with `None` the file's divisors are not applied either.
    pub scaling: Option<Scaling>,
    /// Leading elements of a head that rotate; even.
    pub n_rot: usize,
    /// Pairs that do not rotate.
    pub unrotated: Vec<usize>,
}

/// RoPE frequencies of the pairs, in radians per position.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Rotary {
    freqs: Vec<f64>,
    /// Factor on cosines and sines.
    magnitude: f32,
}

impl Rotary {
    /// Frequencies of a variant; `divisors`, at least one per pair, come from the file.
    pub(crate) fn new(rope: &RopeConfig, divisors: Option<&[f32]>) -> Rotary {
        let (n, base) = (rope.n_rot as f64, f64::from(rope.base));
        let mut freqs: Vec<f64> = (0..rope.n_rot / 2).map(|i| pow(base, -2.0 * i as f64 / n)).collect();
        rope.unrotated.iter().for_each(|i| freqs[*i] = 0.0);
        let Some(s) = &rope.scaling else { return Rotary { freqs, magnitude: 1.0 } };
        let factor = f64::from(s.factor);
        let mut magnitude = s.attn_factor;
        match s.kind {
            ScalingKind::None | ScalingKind::LongRope => {}
            ScalingKind::Linear => freqs.iter_mut().for_each(|f| *f /= factor),
            ScalingKind::Yarn => {
                // index of the pair that makes `beta` turns over the original context
                let pair =
                    |beta: f32| n * ln(s.original_context as f64 / (f64::from(beta) * 2.0 * PI)) / (2.0 * ln(base));
                let low = floor(pair(s.beta_fast)).max(0.0);
                let high = (-floor(-pair(s.beta_slow))).min(n - 1.0);
                for (i, f) in freqs.iter_mut().enumerate() {
                    let ramp = ((i as f64 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
                    *f = *f / factor * ramp + *f * (1.0 - ramp);
                }
                magnitude *= s.magnitude;
            }
        }
        if let Some(divisors) = divisors {
            for (f, d) in freqs.iter_mut().zip(divisors) {
                *f /= f64::from(*d);
            }
        }
        Rotary { freqs, magnitude }
    }

    /// Number of pairs.
    pub(crate) fn pairs(&self) -> usize {
        self.freqs.len()
    }

    /// Writes cosine and sine of each pair (n_rot / 2) at a position.
    pub(crate) fn at(&self, pos: usize, cos: &mut [f32], sin: &mut [f32]) {
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

/// Divisors of the RoPE frequencies, one per pair.
#[derive(Clone)]
pub(crate) enum RopeDivisors {
    /// The file has none.
    None,
    /// The same for all contexts (Llama 3).
    All(Vec<f32>),
    /// LongRoPE: selected by the length of the context.
    ByContext {
        /// For contexts up to the original training context.
        short: Vec<f32>,
        /// For longer contexts.
        long: Vec<f32>,
    },
}

const ALL: Name = Name::weight("rope_freqs");
const SHORT: Name = Name::weight("rope_factors_short");
const LONG: Name = Name::weight("rope_factors_long");

impl RopeDivisors {
    /// Declares the tensors of a model whose variants rotate at most so many pairs.
    pub(crate) fn tensors(t: &mut Declared<'_>, pairs: usize, is_longrope: bool) {
        let pairs = vector(pairs);
        // divisors for short and for long contexts come together
        let by_context = is_longrope || t.has(SHORT) || t.has(LONG);
        for name in [LONG, SHORT] {
            if by_context { t.required(name, pairs) } else { t.optional(name, pairs) }
        }
        t.optional(ALL, pairs);
    }

    pub(crate) fn load(t: &mut Loaded<'_>) -> RopeDivisors {
        match (t.optional(ALL), t.optional(SHORT), t.optional(LONG)) {
            (Some(all), ..) => RopeDivisors::All(all),
            (None, Some(short), Some(long)) => RopeDivisors::ByContext { short, long },
            _ => RopeDivisors::None,
        }
    }

    /// Whether contexts have different divisors.
    pub(crate) fn depend_on_context(&self) -> bool {
        matches!(self, RopeDivisors::ByContext { .. })
    }

    /// RoPE frequencies of the model's variants; `is_long` for contexts longer than the original training context.
    pub(crate) fn rotary(&self, ropes: &[RopeConfig], is_long: bool) -> Vec<Rotary> {
        let divisors = match self {
            RopeDivisors::None => None,
            RopeDivisors::All(all) => Some(&all[..]),
            RopeDivisors::ByContext { short, long } => Some(if is_long { &long[..] } else { short }),
        };
        ropes.iter().map(|rope| Rotary::new(rope, divisors)).collect()
    }
}

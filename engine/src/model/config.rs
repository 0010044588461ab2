//! A model's hyper-parameters, read from untrusted metadata.

use alloc::format;
use alloc::string::{String, ToString};
use core::fmt::Display;
use core::ops::RangeInclusive;

use super::arch::{ARCHS, Arch};
use super::rotary::{Scaling, ScalingKind};
use crate::error::LoadError;
use crate::gguf::Gguf;
use crate::kernels::attention::{MAX_GROUP, MAX_HEAD_DIM};

/// Layers: beyond any model known, and cheap to hold.
const MAX_LAYERS: u32 = 4096;
/// Width of any vector: keeps every product of two within 2^48.
const MAX_WIDTH: u32 = 1 << 24;
/// Positions: f64 angles stay exact to 1e-12 well beyond.
const MAX_CONTEXT: u32 = 1 << 28;

/// Shape and constants of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// The family's row.
    pub arch: Arch,
    /// Layers.
    pub n_layer: usize,
    /// Width of the residual stream.
    pub n_embd: usize,
    /// Width of the feed-forward.
    pub n_ff: usize,
    /// Query heads; a multiple of `n_head_kv`.
    pub n_head: usize,
    /// Heads of keys and values.
    pub n_head_kv: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Rows of the embedding.
    pub n_vocab: usize,
    /// Positions the model was made for.
    pub n_ctx_train: usize,
    /// Epsilon of the norms.
    pub norm_eps: f32,
    /// What scores are multiplied by.
    pub attn_scale: f32,
    /// Tokens before and with the own one that a token sees; `usize::MAX` for all.
    pub window: usize,
    /// Leading elements of a head that rotate; even.
    pub n_rot: usize,
    /// Base of the rotary frequencies.
    pub rope_base: f32,
    /// How the rotary frequencies are stretched.
    pub rope_scaling: Scaling,
}

/// Reads keys of one architecture.
struct Keys<'g, 'a> {
    gguf: &'g Gguf<'a>,
    arch: &'static str,
}

impl Keys<'_, '_> {
    fn key(&self, name: &str) -> String {
        format!("{}.{name}", self.arch)
    }

    fn u32(&self, name: &str) -> Result<Option<u32>, LoadError> {
        self.gguf.u32(&self.key(name))
    }

    fn f32(&self, name: &str) -> Result<Option<f32>, LoadError> {
        match self.gguf.f32(&self.key(name))? {
            Some(v) if !v.is_finite() => Err(self.wrong(name, v, "a finite number")),
            v => Ok(v),
        }
    }

    fn wrong(&self, name: &str, found: impl ToString, expected: impl Display) -> LoadError {
        LoadError::Metadata { key: self.key(name), found: found.to_string(), expected: expected.to_string() }
    }

    fn in_range(&self, name: &str, v: Option<u32>, range: RangeInclusive<u32>) -> Result<usize, LoadError> {
        match v {
            Some(v) if range.contains(&v) => Ok(v as usize),
            Some(v) => Err(self.wrong(name, v, format!("{} to {}", range.start(), range.end()))),
            None => Err(self.wrong(name, "nothing", format!("{} to {}", range.start(), range.end()))),
        }
    }

    fn size(&self, name: &str, range: RangeInclusive<u32>) -> Result<usize, LoadError> {
        self.in_range(name, self.u32(name)?, range)
    }

    fn above(&self, name: &str, limit: f32, default: f32) -> Result<f32, LoadError> {
        match self.f32(name)?.unwrap_or(default) {
            v if v > limit => Ok(v),
            v => Err(self.wrong(name, v, format!("a number above {limit}"))),
        }
    }

    fn positive(&self, name: &str, default: Option<f32>) -> Result<f32, LoadError> {
        match self.f32(name)?.or(default) {
            Some(v) if v > 0.0 => Ok(v),
            Some(v) => Err(self.wrong(name, v, "a positive number")),
            None => Err(self.wrong(name, "nothing", "a positive number")),
        }
    }
}

impl Config {
    /// Reads and cross-checks the metadata of a file.
    ///
    /// # Errors
    /// An unknown architecture or rope scaling, by name; a number that is missing, out of range, or that contradicts
    /// another, by key.
    pub fn from_gguf(gguf: &Gguf<'_>) -> Result<Config, LoadError> {
        let name = gguf.str("general.architecture")?.unwrap_or("nothing");
        let Some(arch) = ARCHS.iter().find(|a| a.name == name) else {
            return Err(LoadError::Unsupported {
                what: "architecture",
                found: name.into(),
                known: ARCHS.iter().map(|a| a.name).collect(),
            });
        };
        let keys = Keys { gguf, arch: arch.name };
        let n_embd = keys.size("embedding_length", 1..=MAX_WIDTH)?;
        let n_head = keys.size("attention.head_count", 1..=MAX_WIDTH)?;
        let n_head_kv = match keys.u32("attention.head_count_kv")? {
            None => n_head,
            v => keys.in_range("attention.head_count_kv", v, 1..=n_head as u32)?,
        };
        if !n_head.is_multiple_of(n_head_kv) {
            return Err(keys.wrong("attention.head_count_kv", n_head_kv, format!("a divisor of {n_head} heads")));
        }
        if n_head / n_head_kv > MAX_GROUP {
            let found = format!("{n_head} heads share {n_head_kv}");
            return Err(keys.wrong("attention.head_count", found, format!("at most {MAX_GROUP} to share one")));
        }
        let max_dim = MAX_HEAD_DIM as u32;
        let default_dim = (n_embd / n_head) as u32;
        let head_dim = keys.in_range(
            "attention.key_length",
            keys.u32("attention.key_length")?.or(Some(default_dim)),
            1..=max_dim,
        )?;
        let value_dim = keys.u32("attention.value_length")?.map_or(head_dim, |v| v as usize);
        if value_dim != head_dim {
            return Err(keys.wrong("attention.value_length", value_dim, format!("the key length {head_dim}")));
        }
        if n_head * head_dim > MAX_WIDTH as usize {
            return Err(keys.wrong("attention.head_count", n_head, format!("at most {MAX_WIDTH} / {head_dim}")));
        }
        let n_rot = match keys.u32("rope.dimension_count")? {
            None => head_dim,
            v => keys.in_range("rope.dimension_count", v, 0..=head_dim as u32)?,
        };
        if !n_rot.is_multiple_of(2) {
            return Err(keys.wrong("rope.dimension_count", n_rot, "an even number"));
        }
        if keys.u32("expert_count")?.unwrap_or(0) > 0 {
            return Err(LoadError::Unsupported {
                what: "feed-forward",
                found: "mixture of experts".into(),
                known: ["dense"].into(),
            });
        }
        let n_ctx_train = keys.size("context_length", 1..=MAX_CONTEXT)?;
        let attn_scale = keys.positive("attention.scale", Some(1.0 / crate::math::sqrt(head_dim as f32)))?;
        Ok(Config {
            arch: *arch,
            n_layer: keys.size("block_count", 1..=MAX_LAYERS)?,
            n_embd,
            n_ff: keys.size("feed_forward_length", 1..=MAX_WIDTH)?,
            n_head,
            n_head_kv,
            head_dim,
            n_vocab: vocabulary(gguf)?,
            n_ctx_train,
            norm_eps: keys.positive("attention.layer_norm_rms_epsilon", None)?,
            attn_scale,
            window: match keys.u32("attention.sliding_window")? {
                None | Some(0) => usize::MAX,
                Some(n) => n as usize,
            },
            n_rot,
            rope_base: keys.above("rope.freq_base", 1.0, 10_000.0)?,
            rope_scaling: scaling(&keys, n_ctx_train)?,
        })
    }
}

/// The number of tokens is the number of rows of the embedding.
fn vocabulary(gguf: &Gguf<'_>) -> Result<usize, LoadError> {
    let Some(t) = gguf.tensor("token_embd.weight") else {
        return Err(LoadError::Tensor {
            name: "token_embd.weight".into(),
            found: "nothing".into(),
            expected: "the token embedding".into(),
        });
    };
    if t.dims[1] > u64::from(MAX_WIDTH) {
        return Err(LoadError::Tensor {
            name: "token_embd.weight".into(),
            found: format!("{} rows", t.dims[1]),
            expected: format!("at most {MAX_WIDTH}"),
        });
    }
    Ok(t.dims[1] as usize)
}

fn scaling(keys: &Keys<'_, '_>, n_ctx_train: usize) -> Result<Scaling, LoadError> {
    let key = "rope.scaling.type";
    let name = keys.gguf.str(&keys.key(key))?;
    let linear = keys.f32("rope.scale_linear")?;
    let kind = match name {
        // older files give a linear factor alone
        None => {
            if linear.is_some() {
                ScalingKind::Linear
            } else {
                ScalingKind::None
            }
        }
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
    if kind == ScalingKind::None {
        return Ok(Scaling::NONE);
    }
    Ok(Scaling {
        kind,
        factor: keys.positive("rope.scaling.factor", Some(linear.unwrap_or(1.0)))?,
        original_context: match keys.u32("rope.scaling.original_context_length")? {
            None | Some(0) => n_ctx_train,
            v => keys.in_range("rope.scaling.original_context_length", v, 1..=MAX_CONTEXT)?,
        },
        attn_factor: keys.positive("rope.scaling.attn_factor", Some(1.0))?,
        beta_fast: keys.positive("rope.scaling.yarn_beta_fast", Some(32.0))?,
        beta_slow: keys.positive("rope.scaling.yarn_beta_slow", Some(1.0))?,
    })
}

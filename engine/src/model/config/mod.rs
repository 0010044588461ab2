//! Hyper-parameters, read from untrusted metadata.

mod attention;
mod experts;
mod layers;
mod rope;

use alloc::format;
use alloc::vec::Vec;

pub use attention::TemperatureConfig;
use attention::{head_dim, heads, slopes, temperature};
pub use experts::ExpertsConfig;
use experts::experts;
use layers::layers;
use rope::unrotated;

use super::arch::{ARCHS, Alibi, Arch, ExpertInput, Rotated, ScoreScale};
use super::keys::Keys;
use super::mixers;
pub use super::mixers::{MixerKind, RecurrentConfig};
use super::rotary::{RopeConfig, ScalingKind};
use crate::error::LoadError;
use crate::gguf::Gguf;
use crate::kernels::attention::{AttentionWindow, KvLayout, KvType};
use crate::kernels::elementwise::Xielu;
use crate::kernels::norm::NormKind;
use crate::kernels::rope::RopeStyle;
use crate::math::sqrt;

/// Maximal number of layers: beyond any known model, and cheap to hold.
const MAX_LAYERS: u32 = 4096;
/// Maximal width of a vector: keeps every product of two widths below 2^48.
pub(in crate::model) const MAX_WIDTH: u32 = 1 << 24;
/// Maximal context: f64 RoPE angles stay exact to 1e-12 well beyond.
pub(in crate::model) const MAX_CONTEXT: u32 = 1 << 28;

/// Hyper-parameters of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// The model family, a row of [`ARCHS`].
    pub arch: Arch,
    /// Width of the residual stream.
    pub n_embd: usize,
    /// Width of the dense feed-forward.
    pub n_ff: usize,
    /// Number of query heads; a multiple of `n_head_kv`.
    pub n_head: usize,
    /// Number of key and value heads.
    pub n_head_kv: usize,
    /// Dimension of a head.
    pub head_dim: usize,
    /// Rows of the token embedding.
    pub n_vocab: usize,
    /// Context that the model was trained for, in tokens.
    pub n_ctx_train: usize,
    /// Kind of all norms.
    pub norm: NormKind,
    /// Epsilon of all norms.
    pub norm_eps: f32,
    /// Factor on token embeddings.
    pub embedding_scale: f32,
    /// Factor on the outputs of attention and feed-forward.
    pub residual_scale: f32,
    /// Factor on logits.
    pub logit_scale: f32,
    /// Factor on attention scores.
    pub attn_scale: f32,
    /// tanh soft cap on attention scores (Gemma 2).
    pub attn_soft_cap: Option<f32>,
    /// tanh soft cap on logits (Gemma 2).
    pub logit_soft_cap: Option<f32>,
    /// Whether attention and feed-forward of all layers read the same residual stream (GPT-NeoX).
    pub parallel_residual: bool,
    /// Whether attention is causal. If not, the model is an encoder: it embeds whole texts and cannot generate.
    pub causal: bool,
    /// Pooling of token states to an embedding, as numbered in the file ([`crate::embed::Pooling`]).
    pub pooling_type: Option<u32>,
    /// Which elements of a head RoPE pairs; `None` without RoPE.
    pub rope: Option<RopeStyle>,
    /// Whether the model has learned position embeddings.
    pub learned_positions: bool,
    /// Slopes of ALiBi, one per query head.
    pub alibi: Option<Vec<f32>>,
    /// Limit of the absolute values of queries, keys and values.
    pub qkv_limit: Option<f32>,
    /// Whether heads of layers with RoPE are normalised without weights.
    pub plain_head_norms: bool,
    /// Factor on queries by position.
    pub temperature: Option<TemperatureConfig>,
    /// Leading elements of a head that RoPE rotates; even.
    pub n_rot: usize,
    /// The RoPE variants; layers refer to them by index.
    pub ropes: Vec<RopeConfig>,
    /// Experts, if the model has any.
    pub experts: Option<ExpertsConfig>,
    /// Recurrent layers, if the model has any.
    pub recurrent: Option<RecurrentConfig>,
    /// Per-layer parameters.
    pub layers: Vec<LayerConfig>,
}

/// Parameters of a layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayerConfig {
    /// Attention window of a token.
    pub window: AttentionWindow,
    /// Index in [`Config::ropes`]; `None` for a layer without RoPE.
    pub rope: Option<usize>,
    /// What mixes the tokens of a sequence.
    pub mixer: MixerKind,
    /// Whether the layer has a feed-forward.
    pub has_ffn: bool,
    /// Number of layers with attention before this one: its index in KV pages.
    pub kv_layer: usize,
    /// Offset of the layer's state in the recurrent state of a sequence.
    pub state_at: usize,
    /// Limit of the products of an expert's gate and up; 0 for none.
    pub expert_limit: f32,
    /// The same for the shared expert.
    pub shared_limit: f32,
    /// The activation, where it is xIELU.
    pub xielu: Option<Xielu>,
}

impl Config {
    /// Reads and checks the metadata of `gguf`, the first of `shards`; the shards have the tensors.
    ///
    /// # Errors
    /// [`LoadError::Unsupported`] for an unknown architecture, RoPE scaling or gating function; [`LoadError::Metadata`]
    /// for a value that is missing, out of range or contradicts another.
    pub fn from_gguf(gguf: &Gguf<'_>, shards: &[Gguf<'_>]) -> Result<Config, LoadError> {
        let key = "general.architecture";
        let name = gguf.str(key)?.ok_or_else(|| LoadError::Metadata {
            key: key.into(),
            found: "nothing".into(),
            expected: "the name of an architecture".into(),
        })?;
        let Some(arch) = ARCHS.iter().find(|a| a.name == name) else {
            return Err(LoadError::Unsupported {
                what: "architecture",
                found: name.into(),
                known: ARCHS.iter().map(|a| a.name).collect(),
            });
        };
        let keys = Keys { gguf, arch: arch.name };
        if let Some(name) = arch.required.iter().find(|name| !keys.has(name)) {
            return Err(keys.wrong(name, "nothing", "a number"));
        }
        let n_layer = keys.size("block_count", 1..=MAX_LAYERS)?;
        let n_embd = keys.size("embedding_length", 1..=MAX_WIDTH)?;
        let kinds = mixers::layer_kinds(n_layer, shards);
        let n_ff = match kinds.iter().any(|l| l.has_ffn) {
            true => keys.in_range("feed_forward_length", keys.u32_or_zero("feed_forward_length")?, 1..=MAX_WIDTH)?,
            false => 1,
        };
        let n_ff = n_ff / if arch.doubled_ff { 2 } else { 1 };
        if n_ff == 0 {
            return Err(keys.wrong("feed_forward_length", 1, "an even number"));
        }
        // without attention the sizes of heads mean nothing
        let (n_head, n_head_kv, head_dim) = match kinds.iter().any(|l| l.mixer.has_attention()) {
            true => {
                let (n_head, n_head_kv) = heads(&keys)?;
                (n_head, n_head_kv, head_dim(&keys, n_embd, n_head)?)
            }
            false => (1, 1, 1),
        };
        let alibi = match arch.alibi {
            Alibi::Never => false,
            Alibi::Always => true,
            Alibi::Layers(n) => n == n_layer,
        };
        let alibi = if alibi { Some(slopes(keys.positive("attention.max_alibi_bias", 8.0)?, n_head)) } else { None };
        let rope = if alibi.is_some() { None } else { arch.rope };
        let n_rot = match keys.u32("rope.dimension_count")? {
            _ if rope.is_none() || arch.rotated == Rotated::None => 0,
            None => head_dim,
            v => keys.in_range("rope.dimension_count", v, 0..=head_dim as u32)?,
        };
        if !n_rot.is_multiple_of(2) {
            return Err(keys.wrong("rope.dimension_count", n_rot, "an even number"));
        }
        let n_ctx_train = keys.size("context_length", 1..=MAX_CONTEXT)?;
        let (norm, norm_eps) = norm(&keys, arch)?;
        let scored_width = if arch.scaled_by_width == Some(n_layer) { n_embd / n_head } else { head_dim };
        let embedding_scale = if arch.embeddings_by_width { sqrt(n_embd as f32) } else { 1.0 };
        let logit_scale = keys.optional("logit_scale")?.unwrap_or(1.0);
        let causal = keys.bool("attention.causal")?.unwrap_or(!arch.bidirectional);
        let (mut ropes, mut layers) = layers(&keys, &Arch { rope, ..*arch }, n_layer, n_ctx_train, causal)?;
        let still = unrotated(&keys, arch.sections, n_rot / 2)?;
        ropes.iter_mut().for_each(|rope| rope.unrotated.clone_from(&still));
        let experts = experts(&keys, arch, n_ff)?;
        let score_scale = match arch.score_scale {
            ScoreScale::Root => 1.0 / sqrt(scored_width as f32),
            ScoreScale::Inverse => 1.0 / head_dim as f32,
            ScoreScale::One => 1.0,
        };
        let original_context = ropes.iter().find_map(|r| r.scaling).map_or(n_ctx_train, |s| s.original_context);
        let recurrent = mixers::read(&keys, arch, n_embd, &kinds, shards)?;
        mixers::place(&mut layers, &kinds, recurrent.as_ref());
        Ok(Config {
            arch: *arch,
            n_embd,
            // Arctic's dense feed-forwards are as wide as the model
            n_ff: if arch.expert_input == ExpertInput::Layer { n_embd } else { n_ff },
            n_head,
            n_head_kv,
            head_dim,
            n_vocab: vocabulary(shards)?,
            n_ctx_train,
            norm,
            norm_eps,
            embedding_scale: keys.optional("embedding_scale")?.unwrap_or(embedding_scale),
            residual_scale: keys.optional("residual_scale")?.unwrap_or(1.0),
            logit_scale: if arch.divided_logits { 1.0 / logit_scale } else { logit_scale },
            attn_scale: match keys.optional("attention.scale")? {
                Some(scale) => scale,
                None => keys.optional("attention.output_scale")?.unwrap_or(score_scale),
            },
            rope,
            learned_positions: rope.is_none() && alibi.is_none(),
            alibi,
            qkv_limit: keys.optional("attention.clamp_kqv")?,
            temperature: temperature(&keys, arch, original_context)?,
            attn_soft_cap: keys.optional("attn_logit_softcapping")?,
            logit_soft_cap: keys.optional("final_logit_softcapping")?,
            parallel_residual: keys.bool("use_parallel_residual")?.unwrap_or(arch.parallel),
            causal,
            pooling_type: keys.u32("pooling_type")?,
            n_rot,
            ropes,
            plain_head_norms: arch.plain_head_norms && experts.is_none_or(|e| e.n != 128),
            experts,
            recurrent,
            layers,
        })
    }

    /// Number of layers.
    pub fn n_layer(&self) -> usize {
        self.layers.len()
    }

    /// Width of the query projection: queries, and their gates if there are any.
    pub(in crate::model) fn q_stride(&self) -> usize {
        self.n_head * self.head_dim * if self.arch.gated_queries { 2 } else { 1 }
    }

    /// Number of layers with attention.
    pub fn n_attention(&self) -> usize {
        self.layers.iter().filter(|l| l.mixer.has_attention()).count()
    }

    /// Floats of the recurrent state of a sequence; 0 for a model without recurrent layers.
    pub fn state_len(&self) -> usize {
        let n = self.layers.iter().filter(|l| l.mixer.is_recurrent()).count();
        self.recurrent.map_or(0, |r| r.state_len().saturating_mul(n))
    }

    /// Bytes of the recurrent state of a sequence; 0 for a model without recurrent layers.
    pub fn state_bytes(&self) -> usize {
        self.state_len().saturating_mul(size_of::<f32>())
    }

    /// The layout of the model's KV pages.
    pub fn kv_layout(&self, kv_type: KvType) -> KvLayout {
        KvLayout { n_layer: self.n_attention(), n_head_kv: self.n_head_kv, head_dim: self.head_dim, kv_type }
    }

    /// Whether the model has LongRoPE: frequency divisors for short and for long contexts.
    pub(in crate::model) fn is_longrope(&self) -> bool {
        self.ropes.iter().any(|r| r.scaling.is_some_and(|s| s.kind == ScalingKind::LongRope))
    }

    /// Longest context: with learned position embeddings their number, else unlimited.
    pub fn max_context(&self) -> usize {
        if self.learned_positions { self.n_ctx_train } else { usize::MAX }
    }

    /// The longest attention window in tokens, if every layer has one: keys before it are never read again.
    pub fn window(&self) -> Option<usize> {
        if self.recurrent.is_some() {
            return None;
        }
        let before = self.layers.iter().map(|l| l.window.left).max()?;
        before.checked_add(1)
    }
}

/// Kind and epsilon of the norms. The key of the epsilon tells the kind; if both keys exist, the family's kind applies.
fn norm(keys: &Keys<'_, '_>, arch: &Arch) -> Result<(NormKind, f32), LoadError> {
    const RMS: (NormKind, &str) = (NormKind::Rms, "attention.layer_norm_rms_epsilon");
    const LAYER: (NormKind, &str) = (NormKind::Layer, "attention.layer_norm_epsilon");
    let (usual, other) = if arch.norm == NormKind::Rms { (RMS, LAYER) } else { (LAYER, RMS) };
    let ((kind, name), eps) = match keys.f32(usual.1)? {
        Some(eps) => (usual, eps),
        None => match keys.f32(other.1)? {
            Some(eps) => (other, eps),
            None => return Err(keys.wrong(usual.1, "nothing", format!("a positive number, or `{}`", other.1))),
        },
    };
    if eps <= 0.0 {
        return Err(keys.wrong(name, eps, "a positive number"));
    }
    Ok((if arch.always_rms { NormKind::Rms } else { kind }, eps))
}

/// The vocabulary size is the number of rows of the token embedding.
fn vocabulary(shards: &[Gguf<'_>]) -> Result<usize, LoadError> {
    let Some(t) = shards.iter().find_map(|gguf| gguf.tensor("token_embd.weight")) else {
        return Err(LoadError::MissingTensor { name: "token_embd.weight".into() });
    };
    if t.dims[1] > u64::from(MAX_WIDTH) {
        return Err(LoadError::Tensor {
            name: "token_embd.weight".into(),
            found: format!("{} rows", t.dims[1]),
            expected: format!("at most {MAX_WIDTH} rows"),
        });
    }
    Ok(t.dims[1] as usize)
}

//! Hyper-parameters, read from untrusted metadata.

use alloc::format;
use alloc::vec;
use alloc::vec::Vec;

use super::arch::{
    ARCHS, Alibi, Arch, ExpertInput, Gating, LocalRope, Rotated, ScoreScale, Sections, Swiglu, Temperature,
};
use super::keys::Keys;
use super::mixers;
pub use super::mixers::{MixerKind, RecurrentConfig};
use super::rotary::{RopeConfig, Scaling, ScalingKind};
use crate::error::LoadError;
use crate::gguf::Gguf;
use crate::kernels::attention::{AttentionWindow, KvLayout, KvType, MAX_GROUP, MAX_HEAD_DIM};
use crate::kernels::elementwise::Xielu;
use crate::kernels::norm::NormKind;
use crate::kernels::rope::RopeStyle;
use crate::math::{exp, ln, pow, sqrt};

/// Maximal number of layers: beyond any known model, and cheap to hold.
const MAX_LAYERS: u32 = 4096;
/// Maximal width of a vector: keeps every product of two widths below 2^48.
pub(super) const MAX_WIDTH: u32 = 1 << 24;
/// Maximal context: f64 RoPE angles stay exact to 1e-12 well beyond.
pub(super) const MAX_CONTEXT: u32 = 1 << 28;
/// Maximal experts of a layer, and experts per token: beyond any known model.
const MAX_EXPERTS: u32 = 4096;
const MAX_EXPERTS_USED: u32 = 64;

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
    /// Pooling before the classification head, likewise.
    pub classifier_pooling: Option<u32>,
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

/// Factor on queries by position: `1 + scale * ln(floor((pos + offset) / length) + 1)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TemperatureConfig {
    /// Growth of the factor.
    pub scale: f32,
    /// Tokens of a step.
    pub length: usize,
    /// Added to positions.
    pub offset: usize,
    /// Whether layers with RoPE have the factor too.
    pub with_rope: bool,
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

/// Parameters of the experts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertsConfig {
    /// Number of experts per layer.
    pub n: usize,
    /// Experts per token.
    pub n_used: usize,
    /// Width of an expert's feed-forward.
    pub n_ff: usize,
    /// Width of the shared expert's feed-forward.
    pub n_ff_shared: usize,
    /// Whether the weights of the selected experts are normalised to sum to 1.
    pub normalised: bool,
    /// Factor on the experts' weights.
    pub scale: f32,
    /// How scores become weights.
    pub gating: Gating,
    /// Groups of experts, and the number of groups that a token's experts are chosen from.
    pub groups: Option<(usize, usize)>,
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
            classifier_pooling: keys.u32("classifier.pooling_type")?,
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
    pub(super) fn q_stride(&self) -> usize {
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
    pub(super) fn is_longrope(&self) -> bool {
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

/// The pairs of a head that do not rotate in text: those of the fourth section of multimodal RoPE.
fn unrotated(keys: &Keys<'_, '_>, kind: Sections, n_pairs: usize) -> Result<Vec<usize>, LoadError> {
    let name = "rope.dimension_sections";
    let Some(sections) = keys.u32_array(name)?.filter(|_| kind != Sections::None) else { return Ok(Vec::new()) };
    let sum = sections.iter().fold(0u32, |sum, n| sum.saturating_add(*n)) as usize;
    let [a, b, c] = match sections[..] {
        [a, b, c, ..] if sum == n_pairs => [a, b, c].map(|n| n as usize),
        _ => return Err(keys.wrong(name, format!("{sections:?}"), format!("sections of {n_pairs} pairs"))),
    };
    let is_still = |i: &usize| match kind {
        Sections::None => false,
        Sections::Blocks => *i >= a + b + c,
        Sections::Interleaved => *i >= 3 * [a, b, c][i % 3],
    };
    Ok((0..n_pairs).filter(is_still).collect())
}

/// xIELU of each layer, if the file has its parameters.
fn xielu(keys: &Keys<'_, '_>, n: usize) -> Result<Option<Vec<Xielu>>, LoadError> {
    // these keys have a prefix of their own
    let keys = Keys { gguf: keys.gguf, arch: "xielu" };
    if !keys.has("alpha_p") {
        return Ok(None);
    }
    let read = |name: &str| keys.per_layer_f32(name, n);
    let (positive, negative, beta, eps) = (read("alpha_p")?, read("alpha_n")?, read("beta")?, read("eps")?);
    let softplus = |x: f32| (if x > 20.0 { f64::from(x) } else { ln(1.0 + exp(f64::from(x))) }) as f32;
    let one = |i: usize| Xielu {
        negative: beta[i] + softplus(negative[i]),
        positive: softplus(positive[i]),
        beta: beta[i],
        eps: eps[i],
    };
    Ok(Some((0..n).map(one).collect()))
}

/// Slopes of ALiBi: powers of 2^(-max_bias / n) for the largest power of two n up to `n_head`, then the odd powers of
/// its root.
fn slopes(max_bias: f32, n_head: usize) -> Vec<f32> {
    let n = 1 << n_head.ilog2();
    let slope = |h: usize| match h < n {
        true => f64::from(max_bias) * (h + 1) as f64 / n as f64,
        false => f64::from(max_bias) / 2.0 * (2 * (h - n) + 1) as f64 / n as f64,
    };
    (0..n_head).map(|h| pow(2.0, -slope(h)) as f32).collect()
}

fn temperature(
    keys: &Keys<'_, '_>,
    arch: &Arch,
    original_context: usize,
) -> Result<Option<TemperatureConfig>, LoadError> {
    let (scale, length, offset) = match arch.temperature {
        Temperature::ByKey => (None, original_context, 0),
        Temperature::NoRope => (Some(0.1), 8192, 1),
    };
    let Some(scale) = keys.optional("attention.temperature_scale")?.or(scale) else { return Ok(None) };
    let length = match keys.u32("attention.temperature_length")? {
        None => length,
        v => keys.in_range("attention.temperature_length", v, 1..=MAX_CONTEXT)?,
    };
    Ok(Some(TemperatureConfig { scale, length, offset, with_rope: arch.temperature == Temperature::ByKey }))
}

/// Numbers of query heads and of key and value heads.
fn heads(keys: &Keys<'_, '_>) -> Result<(usize, usize), LoadError> {
    let n_head = keys.u32_or_zero("attention.head_count")?;
    let n_head = keys.in_range("attention.head_count", n_head, 1..=MAX_WIDTH)?;
    let n_head_kv = match keys.u32_or_zero("attention.head_count_kv")? {
        None => n_head,
        v => keys.in_range("attention.head_count_kv", v, 1..=n_head as u32)?,
    };
    if !n_head.is_multiple_of(n_head_kv) {
        return Err(keys.wrong("attention.head_count_kv", n_head_kv, format!("a divisor of head_count, {n_head}")));
    }
    if n_head / n_head_kv > MAX_GROUP {
        let found = format!("{n_head} query heads for {n_head_kv} KV heads");
        return Err(keys.wrong("attention.head_count", found, format!("at most {MAX_GROUP} query heads per KV head")));
    }
    Ok((n_head, n_head_kv))
}

fn head_dim(keys: &Keys<'_, '_>, n_embd: usize, n_head: usize) -> Result<usize, LoadError> {
    let default = Some((n_embd / n_head) as u32);
    let given = keys.u32("attention.key_length")?.or(default);
    let head_dim = keys.in_range("attention.key_length", given, 1..=MAX_HEAD_DIM as u32)?;
    let value_dim = keys.u32("attention.value_length")?.map_or(head_dim, |v| v as usize);
    if value_dim != head_dim {
        return Err(keys.wrong("attention.value_length", value_dim, format!("{head_dim}, the value of key_length")));
    }
    if n_head * head_dim > MAX_WIDTH as usize {
        let expected =
            format!("at most {} (head_count * key_length is at most {MAX_WIDTH})", MAX_WIDTH as usize / head_dim);
        return Err(keys.wrong("attention.head_count", n_head, expected));
    }
    Ok(head_dim)
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

/// Attention windows and RoPE variants of the layers.
fn layers(
    keys: &Keys<'_, '_>,
    arch: &Arch,
    n_layer: usize,
    n_ctx_train: usize,
    causal: bool,
) -> Result<(Vec<RopeConfig>, Vec<LayerConfig>), LoadError> {
    let (window, local) = match keys.u32("attention.sliding_window")?.map_or(arch.window, |w| w as usize) {
        // without a window the pattern is unused and not checked
        0 => (usize::MAX, vec![false; n_layer]),
        w => (arch.fixed_window.unwrap_or(w), pattern(keys, arch, n_layer)?),
    };
    let rope_pattern = match keys.has("attention.rope_pattern") {
        true => Some(keys.pattern("attention.rope_pattern", n_layer, 0)?),
        false => None,
    };
    let is_chunked = match arch.attention_chunk {
        // a window of 0 turns chunks off
        0 => vec![false; n_layer],
        _ if keys.u32("attention.sliding_window")? == Some(0) => vec![false; n_layer],
        _ => pattern(keys, arch, n_layer)?,
    };
    let n_dense = keys.u32("leading_dense_block_count")?.unwrap_or(0) as usize;
    let xielu = xielu(keys, n_layer)?;
    let any_local = local.contains(&true);
    let [expert_limits, shared_limits] =
        [keys.per_layer_f32("swiglu_clamp_exp", n_layer)?, keys.per_layer_f32("swiglu_clamp_shexp", n_layer)?];
    let (global, near) = match arch.rope {
        None => Default::default(),
        Some(_) => rotations(keys, arch, n_ctx_train, local.contains(&true))?,
    };
    let is_finetuned = keys.bool("rope.scaling.finetuned")?.unwrap_or(true);
    let mut ropes = Vec::new();
    let mut layers = Vec::with_capacity(n_layer);
    for (i, local) in local.into_iter().enumerate() {
        let rotates = match arch.rotated {
            _ if arch.rope.is_none() => false,
            _ if rope_pattern.is_some() => rope_pattern.as_ref().is_some_and(|pattern| pattern[i]),
            Rotated::All => true,
            Rotated::AllBut(n) => (i + 1) % n != 0,
            Rotated::Local => local,
            Rotated::LocalOrDense => local || i < n_dense,
            Rotated::LocalIfAny => local || !any_local,
            Rotated::None => false,
            Rotated::IfFinetuned => is_finetuned,
        };
        let rope = if local { &near } else { &global };
        let known = ropes.iter().position(|r| r == rope);
        if rotates && known.is_none() {
            ropes.push(rope.clone());
        }
        let rope = rotates.then(|| known.unwrap_or(ropes.len() - 1));
        let before = match (local, causal) {
            (false, _) => usize::MAX,
            (true, true) => window - 1,
            (true, false) => window / 2,
        };
        layers.push(LayerConfig {
            window: AttentionWindow {
                left: before,
                right: if causal { 0 } else { before },
                chunk: if is_chunked[i] { arch.attention_chunk } else { usize::MAX },
            },
            rope,
            expert_limit: match arch.swiglu {
                Swiglu::Limited(limit) if expert_limits[i] == 0.0 => limit,
                _ => expert_limits[i],
            },
            xielu: xielu.as_ref().map(|all| all[i]),
            shared_limit: shared_limits[i],
            mixer: MixerKind::Attention,
            has_ffn: true,
            kv_layer: i,
            state_at: 0,
        });
    }
    Ok((ropes, layers))
}

/// Which layers have a window.
fn pattern(keys: &Keys<'_, '_>, arch: &Arch, n: usize) -> Result<Vec<bool>, LoadError> {
    let mut local = keys.pattern("attention.sliding_window_pattern", n, arch.window_pattern)?;
    if arch.global_first && !keys.is_array("attention.sliding_window_pattern") {
        // the last layer of a period becomes the first of the next
        let period = local.iter().position(|local| !local).map_or(n, |last| last + 1);
        local.iter_mut().enumerate().for_each(|(i, local)| *local = i % period != 0);
    }
    Ok(local)
}

/// The RoPE variants of global layers, and of local ones if `has_windows`.
fn rotations(
    keys: &Keys<'_, '_>,
    arch: &Arch,
    n_ctx_train: usize,
    has_windows: bool,
) -> Result<(RopeConfig, RopeConfig), LoadError> {
    let base = keys.above("rope.freq_base", 1.0, 10_000.0)?;
    let global =
        RopeConfig { base, scaling: Some(Scaling::read(keys, n_ctx_train, arch.beta_fast)?), unrotated: Vec::new() };
    if !has_windows {
        return Ok((global.clone(), global));
    }
    let near = match arch.local_rope {
        LocalRope::Same => global.clone(),
        LocalRope::Unscaled => RopeConfig { base, ..RopeConfig::default() },
        LocalRope::Base(base) => RopeConfig { base, ..RopeConfig::default() },
    };
    let near = RopeConfig { base: keys.above("rope.freq_base_swa", 1.0, near.base)?, ..near };
    Ok((global, near))
}

fn experts(keys: &Keys<'_, '_>, arch: &Arch, n_ff: usize) -> Result<Option<ExpertsConfig>, LoadError> {
    let n = match keys.u32("expert_count")? {
        None | Some(0) => return Ok(None),
        v => keys.in_range("expert_count", v, 1..=MAX_EXPERTS)?,
    };
    let (gating, over_selected) = match keys.u32("expert_gating_func")? {
        None | Some(0) => (arch.gating, false),
        Some(1) => (Gating::Softmax, false),
        Some(2) => (Gating::Sigmoid, false),
        // a softmax over the selected experts is a softmax over all, normalised
        Some(3) => (Gating::Softmax, true),
        Some(other) => {
            let (found, known) = (format!("{other}"), ["softmax", "sigmoid"].into());
            return Err(LoadError::Unsupported { what: "expert gating function", found, known });
        }
    };
    let groups = match keys.u32("expert_group_count")? {
        None | Some(0..=1) => None,
        v => {
            let n_groups = keys.in_range("expert_group_count", v, 1..=n as u32)?;
            if n % n_groups != 0 {
                return Err(keys.wrong("expert_group_count", n_groups, format!("a divisor of expert_count, {n}")));
            }
            let used = keys.u32("expert_group_used_count")?;
            Some((n_groups, keys.in_range("expert_group_used_count", used, 1..=n_groups as u32)?))
        }
    };
    let width = |name: &str| match keys.u32(name)? {
        None | Some(0) => Ok(n_ff),
        v => keys.in_range(name, v, 1..=MAX_WIDTH),
    };
    let n_used = keys.size("expert_used_count", 1..=MAX_EXPERTS_USED.min(n as u32))?;
    if let Some((n_groups, used)) = groups
        && n_used > used * (n / n_groups)
    {
        return Err(keys.wrong("expert_used_count", n_used, "at most the experts of the used groups"));
    }
    let expert_ff = width("expert_feed_forward_length")?;
    let n_ff_shared = match (keys.u32("expert_shared_feed_forward_length")?, keys.u32("expert_shared_count")?) {
        (None | Some(0), Some(count @ 1..)) => {
            let n = keys.in_range("expert_shared_count", Some(count), 1..=MAX_EXPERTS)?;
            keys.in_range("expert_shared_count", Some((n * expert_ff).min(u32::MAX as usize) as u32), 1..=MAX_WIDTH)?
        }
        (None | Some(0), _) if arch.shared_as_expert => expert_ff,
        _ => width("expert_shared_feed_forward_length")?,
    };
    Ok(Some(ExpertsConfig {
        n,
        n_used,
        n_ff: expert_ff,
        n_ff_shared,
        gating,
        groups,
        normalised: over_selected || keys.bool("expert_weights_norm")?.unwrap_or(arch.normalised_experts),
        scale: keys.optional("expert_weights_scale")?.unwrap_or(1.0),
    }))
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

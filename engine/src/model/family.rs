//! What model families have in common: the differences that at least three of them set. What one or two families do is in their
//! files in `families/`.

use crate::kernels::elementwise::Activation;
use crate::kernels::norm::NormKind;
use crate::kernels::rope::RopeStyle;

/// A model family: `general.architecture` in the file, and how it differs from others. Each field is set by at least three
/// families.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Family {
    /// Value of `general.architecture`, and prefix of the metadata keys.
    pub name: &'static str,
    /// Which elements of a head RoPE pairs; `None` for learned position embeddings.
    pub rope: Option<RopeStyle>,
    /// Which layers have RoPE.
    pub rotated: Rotated,
    /// RoPE of layers with a window.
    pub local_rope: LocalRope,
    /// Default period p of layers with a window: the last of p consecutive layers is global; 0 if all are local.
    /// `attention.sliding_window_pattern` takes precedence.
    pub window_pattern: usize,
    /// Whether the first, instead of the last, of the layers of a period is global.
    pub global_first: bool,
    /// Kind of norm if a file has the epsilons of both.
    pub norm: NormKind,
    /// Activation of the feed-forward.
    pub act: Activation,
    /// Whether the weights of the selected experts are normalised; `expert_weights_norm` takes precedence.
    pub normalised_experts: bool,
    /// How scores of experts become weights; `expert_gating_func` takes precedence.
    pub gating: Gating,
    /// Whether the shared experts are as wide as one expert if the file does not state their width.
    pub shared_as_expert: bool,
    /// Whether layers with experts have a dense feed-forward beside them.
    pub dense_beside_experts: bool,
    /// What the experts of a layer read.
    pub expert_input: ExpertInput,
    /// Activation of gate and up in experts.
    pub swiglu: Swiglu,
    /// Whether embeddings are multiplied by `sqrt(n_embd)` if the file has no factor.
    pub embeddings_by_width: bool,
    /// Whether logits are divided by `logit_scale` instead of multiplied.
    pub divided_logits: bool,
    /// Whether attention is bidirectional (an encoder); `attention.causal` takes precedence.
    pub bidirectional: bool,
    /// Whether such a model generates by diffusion.
    pub diffusion: bool,
    /// Names of tensors in files of this family, without the suffix, and the names of the same tensors in others.
    pub aliases: &'static [(&'static str, &'static str)],
    /// Whether norms that have no tensor are computed without weights, instead of left out.
    pub plain_norms: bool,
    /// Whether norms follow the residual sums, `x = norm(x + attention(x))`, and there is no final norm.
    pub post_norm: bool,
    /// ALiBi (Press et al. 2022) instead of RoPE; the largest slope is 2^(-max_bias / n_head), and max_bias is 8 unless
    /// `attention.max_alibi_bias` says otherwise.
    pub alibi: bool,
    /// Whether heads are normalised after RoPE instead of before.
    pub rope_before_norm: bool,
    /// Power of the head dimension that divides attention scores.
    pub score_scale: ScoreScale,
    /// How pairs belong to the sections of multimodal RoPE.
    pub sections: Sections,
    /// What `rope.scaling.yarn_log_multiplier` means.
    pub yarn_log: YarnLog,
    /// Keys that must be present, as older files rely on constants.
    pub required: &'static [&'static str],
    /// Whether the query projection also gives a gate of each head, after its query; attention is multiplied by its
    /// sigmoid.
    pub gated_queries: bool,
    /// Delta net: whether value head h has the key head `h % n_key`, instead of `h / (n_value / n_key)`.
    pub tiled_value_heads: bool,
    /// What multi-token prediction reads of the model.
    pub mtp: Mtp,
    /// Classification head of rerankers.
    pub head: HeadKind,
    /// Indexers of sparse attention.
    pub indexer: Option<IndexerKind>,
}

/// Which layers have RoPE.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rotated {
    /// All layers.
    All,
    /// All but the last of this many consecutive layers.
    AllBut(usize),
    /// Layers with a window.
    Local,
    /// Layers with a window; all if no layer has one.
    LocalIfAny,
    /// No layer.
    None,
}

/// RoPE of layers with a window. `rope.freq_base_swa` takes precedence over the base.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum LocalRope {
    /// As in global layers.
    Same,
    /// The same base, without scaling.
    Unscaled,
    /// This base, without scaling.
    Base(f32),
}

/// Factor of attention scores if the file has none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScoreScale {
    /// `1 / sqrt(head_dim)`.
    Root,
    /// `1 / head_dim`.
    Inverse,
    /// 1.
    One,
}

/// How pairs belong to the sections of multimodal RoPE, if the file has them. Text has the same position in the first three
/// sections, and position 0 in the fourth, so pairs of the fourth do not rotate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sections {
    /// All pairs rotate.
    None,
    /// A file with sections is refused.
    Refused,
    /// Section after section, pairs as in [`RopeStyle::NeoX`] (Qwen2-VL); none if the first or the second is empty.
    Blocks,
    /// By turns: pair i belongs to section i mod 3 while that has pairs left, then to the fourth (Qwen3-VL).
    Interleaved,
}

/// What `rope.scaling.yarn_log_multiplier`, m, means for a scaling factor f.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum YarnLog {
    /// Rotated vectors are multiplied by `(1 + 0.1 ln f) / (1 + 0.1 m ln f)`.
    Magnitude,
    /// Scores are multiplied by the square of `1 + m ln f`, rotated vectors not (DeepSeek).
    Scores,
    /// Rotated vectors are multiplied by `(1 + 0.1 ln f) / (1 + m ln f)`; scores by the square of that and `1 + m ln f`
    /// (Mistral 4).
    ScoresAndMagnitude,
}

/// How the scores of experts become their weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gating {
    /// Softmax over all experts.
    Softmax,
    /// The logistic function of each score.
    Sigmoid,
    /// The square root of the softplus of each score (DeepSeek-V4).
    SqrtSoftplus,
}

/// What the experts of a layer read, beside the feed-forward's input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpertInput {
    /// The input of the feed-forward.
    Same,
    /// The input of the layer, with a norm of its own (Arctic).
    Layer,
    /// The router reads the input of the layer (SmallThinker).
    LayerForRouter,
    /// Experts and router read the residual stream after attention, each with a norm of its own. The dense feed-forward
    /// is beside the experts (Gemma 4).
    Residual,
}

/// Activation of gated experts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Swiglu {
    /// `act(gate) * up`.
    Plain,
    /// With this clamp, a linear term and its own logistic slope (gpt-oss).
    Clamped(f32),
    /// With both inputs clamped to the layer's limit; this one by default (Maple).
    Limited(f32),
}

/// What the heads of an indexer select.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IndexerKind {
    /// Positions, all heads together, by the sum of their weighted scores (DeepSeek-V3.2). RoPE pairs elements this way.
    Lightning {
        /// The pairs.
        pairs: RopeStyle,
        /// Whether the last elements of queries and keys rotate, instead of the first; then the LayerNorm of keys has the
        /// epsilon of the other norms (Hunyuan 4).
        at_end: bool,
    },
    /// Blocks of positions, each head for the KV head of its number (MiniMax-M3).
    Blocks,
    /// Positions, all heads together, by the sum of their scores; a block of positions has one key, the mean of theirs
    /// (Qwen4-Exp).
    Means,
}

/// The hidden states that multi-token prediction reads.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Mtp {
    /// Those after the final norm.
    Normed,
    /// Those before it.
    Raw,
    /// The engine does not use the family's layers for it.
    Unsupported,
}

/// What the classification head of a reranker computes besides its products.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HeadKind {
    /// tanh after the hidden layer.
    Tanh,
    /// GELU after the hidden layer.
    Gelu,
    /// As [`HeadKind::Tanh`], and a softmax of the classes.
    Softmax,
}

impl IndexerKind {
    /// Lightning indexers whose first elements rotate.
    pub(crate) const fn lightning(pairs: RopeStyle) -> IndexerKind {
        IndexerKind::Lightning { pairs, at_end: false }
    }
}

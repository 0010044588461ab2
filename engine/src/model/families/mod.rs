//! Model families as data. Numbers come from the metadata of a file, optional parts from the presence of their tensors,
//! everything else from a row of [`ARCHS`].
//!
//! The key of the epsilon tells whether norms are RMSNorm or LayerNorm. Optional by presence: norms before and after
//! attention and feed-forward, biases, head norms, the feed-forward's gate, experts, the output matrix. A layer with
//! one norm for both sub-layers is a parallel block.

mod table;

pub use table::ARCHS;

use crate::kernels::elementwise::Activation;
use crate::kernels::norm::NormKind;
use crate::kernels::rope::RopeStyle;

/// A model family: `general.architecture` in the file, and how it differs from others.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Arch {
    /// Value of `general.architecture`, and prefix of the metadata keys.
    pub name: &'static str,
    /// Which elements of a head RoPE pairs; `None` for learned position embeddings.
    pub rope: Option<RopeStyle>,
    /// Which layers have RoPE.
    pub rotated: Rotated,
    /// The base of RoPE, whatever the file states.
    pub fixed_rope_base: Option<f32>,
    /// RoPE of layers with a window.
    pub local_rope: LocalRope,
    /// Default attention window of local layers in tokens; 0 for none.
    pub window: usize,
    /// The window of local layers if the file states one, whichever that is.
    pub fixed_window: Option<usize>,
    /// Default period p of layers with a window: the last of p consecutive layers is global; 0 if all are local.
    /// `attention.sliding_window_pattern` takes precedence.
    pub window_pattern: usize,
    /// Attention scores of the model size with this many layers are scaled by `1 / sqrt(n_embd / n_head)`; files do not
    /// state it.
    pub scaled_by_width: Option<usize>,
    /// Kind of norm if a file has the epsilons of both.
    pub norm: NormKind,
    /// Whether all norms are RMSNorm even if the file states the epsilon of LayerNorm.
    pub always_rms: bool,
    /// Activation of the feed-forward.
    pub act: Activation,
    /// Whether the weights of the selected experts are normalised; `expert_weights_norm` takes precedence.
    pub normalised_experts: bool,
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
    /// Beginnings of the names of layer tensors that text does not use.
    pub ignored: &'static [&'static str],
    /// How scores of experts become weights; `expert_gating_func` takes precedence.
    pub gating: Gating,
    /// Model sizes, by their number of layers, whose experts have the logistic function if the file does not say so.
    pub sigmoid_sizes: &'static [u32],
    /// Whether the shared experts are as wide as one expert if the file does not state their width.
    pub shared_as_expert: bool,
    /// Whether the weight of an expert multiplies its input instead of its output.
    pub weighted_inputs: bool,
    /// Whether norms that have no tensor are computed without weights, instead of left out.
    pub plain_norms: bool,
    /// Whether the first layer may lack the norm before attention (ModernBERT).
    pub optional_first_norm: bool,
    /// Whether embeddings are normalised without weights.
    pub plain_embedding_norm: bool,
    /// Whether experts have no gate.
    pub plain_experts: bool,
    /// ALiBi instead of RoPE.
    pub alibi: Alibi,
    /// Whether the file states twice the width of the feed-forward.
    pub doubled_ff: bool,
    /// Whether the norm of attention is `attn_norm_2` and that of the feed-forward `attn_norm`, where both exist.
    pub swapped_norms: bool,
    /// Whether attention and feed-forward read the same residual stream; `use_parallel_residual` takes precedence.
    pub parallel: bool,
    /// Whether heads are normalised after RoPE instead of before.
    pub rope_before_norm: bool,
    /// Power of the head dimension that divides attention scores.
    pub score_scale: ScoreScale,
    /// Activation of the gate on attention outputs.
    pub output_gate: OutputGate,
    /// Whether values are normalised without weights, head by head.
    pub plain_value_norm: bool,
    /// Whether layers without a value projection use the keys, before their norm and RoPE, as values.
    pub values_from_keys: bool,
    /// Activation of gate and up in experts.
    pub swiglu: Swiglu,
    /// Whether dense feed-forwards and shared experts are limited as [`Swiglu::Limited`], by the limit of shared experts.
    pub limited_dense: bool,
    /// Factor on the sum of routed and shared experts.
    pub shared_factor: f32,
    /// Whether layers with experts have a dense feed-forward beside them.
    pub dense_beside_experts: bool,
    /// What the experts of a layer read.
    pub expert_input: ExpertInput,
    /// Whether the first, instead of the last, of the layers of a period is global.
    pub global_first: bool,
    /// Whether heads of layers with RoPE are normalised without weights, unless the model has 128 experts (Llama 4).
    pub plain_head_norms: bool,
    /// Epsilon of norms after attention and feed-forward, if it is not that of the others.
    pub post_norm_eps: Option<f32>,
    /// Tokens of the chunks that local layers attend to, each token to those of its own chunk; 0 for none.
    pub attention_chunk: usize,
    /// How pairs belong to the sections of multimodal RoPE.
    pub sections: Sections,
    /// Default of `rope.scaling.yarn_beta_fast`.
    pub beta_fast: f32,
    /// What `rope.scaling.yarn_log_multiplier` means.
    pub yarn_log: YarnLog,
    /// Factors that files do not state.
    pub factors: Option<Factors>,
    /// Keys that must be present, as older files rely on constants.
    pub required: &'static [&'static str],
    /// Default of `attention.temperature_length`, and whether only layers without RoPE have the temperature.
    pub temperature: Temperature,
    /// Whether norms follow the residual sums, `x = norm(x + attention(x))`, and there is no final norm.
    pub post_norm: bool,
    /// Whether the residual stream of a block is the output of its norm:
    /// `x = residual_scale * norm(x) + attention(norm(x))`.
    pub normed_residual: bool,
    /// Whether layers with `attn_norm_2` have lightning attention.
    pub lightning: bool,
    /// Whether the query projection also gives a gate of each head, after its query; attention is multiplied by its
    /// sigmoid.
    pub gated_queries: bool,
    /// Number of layers with keys and values of their own; later ones read those of earlier layers.
    /// `attention.shared_kv_layers` takes precedence.
    pub kv_layers: Option<usize>,
    /// Width of the embeddings that each layer has of its own; `embedding_length_per_layer_input` takes precedence.
    pub layer_embeddings: usize,
    /// AltUp: default number of residual streams; 0 for models with one.
    pub streams: u32,
    /// Default activation sparsity: of this number of leading layers, and the cutoff in standard deviations.
    /// `activation_sparsity_scale` takes precedence.
    pub sparsity: Option<(usize, f32)>,
    /// Whether `layer_output_scale` is the factor of the token's embedding, which is added after each layer.
    pub embedding_skips: bool,
    /// T5: distance from which on keys have the same bias; 0 for models without such biases.
    pub relative_distance: usize,
    /// Activation of feed-forwards without a gate, if it is another.
    pub ungated_act: Option<Activation>,
    /// Beginning of the names of tensors that this family has beside others' names.
    pub prefix: &'static str,
    /// Whether global layers rotate half of the elements that the file states.
    pub half_rotary: bool,
    /// Kimi delta attention with a lower bound of decays: whether the factors A of the file are positive.
    pub positive_decay_factors: bool,
    /// Delta net: whether value head h has the key head `h % n_key`, instead of `h / (n_value / n_key)`.
    pub tiled_value_heads: bool,
    /// Whether indexers rotate the last elements of queries and keys, instead of the first, and their LayerNorm has the epsilon of
    /// the other norms.
    pub indexer_rotates_end: bool,
    /// What multi-token prediction reads of the model.
    pub mtp: Mtp,
    /// Delta nets: the epsilon of unit vectors, if it is not that of the norms.
    pub l2_eps: Option<f32>,
    /// Delta net: whether its output is multiplied by the sigmoid of the gate, instead of the SiLU.
    pub sigmoid_delta_gate: bool,
    /// Whether `embedding_length_per_layer_input` is the width of embeddings of n-grams.
    pub ngrams: bool,
    /// Whether the Mamba layers are those of PLaMo 2, whose channels form heads.
    pub mamba_by_heads: bool,
    /// Classification head of rerankers.
    pub head: HeadKind,
    /// Indexers of sparse attention.
    pub indexer: Option<IndexerKind>,
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

/// What the heads of an indexer select.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IndexerKind {
    /// Positions, all heads together, by the sum of their weighted scores (DeepSeek-V3.2). RoPE pairs elements this way.
    Lightning(RopeStyle),
    /// Blocks of positions, each head for the KV head of its number (MiniMax-M3).
    Blocks,
    /// Positions, all heads together, by the sum of their scores; a block of positions has one key, the mean of theirs
    /// (Qwen4-Exp).
    Means,
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

/// Factors of a family whose files do not state them (MiniCPM).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Factors {
    /// On embeddings.
    pub embedding: f32,
    /// On the outputs of sub-layers, times the square root of the number of layers.
    pub depth: f32,
    /// On logits, times the width of the model.
    pub width: f32,
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

/// Which models of a family have ALiBi (Press et al. 2022) instead of RoPE.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Alibi {
    /// None.
    Never,
    /// All; the largest slope is 2^(-max_bias / n_head), and max_bias is 8 unless `attention.max_alibi_bias` says
    /// otherwise.
    Always,
    /// The model size with this many layers.
    Layers(usize),
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

/// Activation of the gate on attention outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutputGate {
    /// The logistic function.
    Sigmoid,
    /// `ln(1 + exp(x))` (Laguna).
    Softplus,
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

/// Factor on queries that grows with the position (Llama 4): `1 + scale * ln(floor((pos + offset) / length) + 1)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Temperature {
    /// If the file has `attention.temperature_scale`, in all layers; `length` is by default the original context.
    ByKey,
    /// In layers without RoPE, of scale 0.1, length 8192 and offset 1.
    NoRope,
}

/// Which layers have RoPE.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rotated {
    /// All layers.
    All,
    /// All but the last of this many consecutive layers.
    AllBut(usize),
    /// All but the first of this many consecutive layers; all layers if no layer has a window, or if the model has this many
    /// layers (SmallThinker in llama.cpp).
    AllButFirst(usize),
    /// Layers with a window.
    Local,
    /// Layers with a window; all if no layer has one.
    LocalIfAny,
    /// Layers with a window and the leading dense layers.
    LocalOrDense,
    /// No layer.
    None,
    /// All layers, or none if `rope.scaling.finetuned` is false.
    IfFinetuned,
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

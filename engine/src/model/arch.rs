//! Model families as data. Numbers come from the metadata of a file, optional parts from the presence of their tensors,
//! everything else from a row of [`ARCHS`].
//!
//! The key of the epsilon tells whether norms are RMSNorm or LayerNorm. Optional by presence: norms before and after
//! attention and feed-forward, biases, head norms, the feed-forward's gate, experts, the output matrix. A layer with
//! one norm for both sub-layers is a parallel block.

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
    /// Names of tensors in files of this family, without the suffix, and the names of the same tensors in others.
    pub aliases: &'static [(&'static str, &'static str)],
    /// Beginnings of the names of layer tensors that text does not use.
    pub ignored: &'static [&'static str],
    /// How scores of experts become weights; `expert_gating_func` takes precedence.
    pub gating: Gating,
    /// Whether the shared experts are as wide as one expert if the file does not state their width.
    pub shared_as_expert: bool,
    /// Whether the weight of an expert multiplies its input instead of its output.
    pub weighted_inputs: bool,
    /// Whether norms that have no tensor are computed without weights, instead of left out.
    pub plain_norms: bool,
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
    pub output_gate: Activation,
    /// Activation of gate and up in experts.
    pub swiglu: Swiglu,
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
    /// Keys that must be present, as older files rely on constants.
    pub required: &'static [&'static str],
    /// Default of `attention.temperature_length`, and whether only layers without RoPE have the temperature.
    pub temperature: Temperature,
    /// Whether norms follow the residual sums, `x = norm(x + attention(x))`, and there is no final norm.
    pub post_norm: bool,
    /// Whether the query projection also gives a gate of each head, after its query; attention is multiplied by its
    /// sigmoid.
    pub gated_queries: bool,
    /// Delta net: whether value head h has the key head `h % n_key`, instead of `h / (n_value / n_key)`.
    pub tiled_value_heads: bool,
    /// Whether the Mamba layers are those of PLaMo 2, whose channels form heads.
    pub mamba_by_heads: bool,
    /// Classification head of rerankers.
    pub head: HeadKind,
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

/// What the experts of a layer read, beside the feed-forward's input.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpertInput {
    /// The input of the feed-forward.
    Same,
    /// The input of the layer, with a norm of its own (Arctic).
    Layer,
    /// The router reads the input of the layer (SmallThinker).
    LayerForRouter,
}

/// How pairs belong to the sections of multimodal RoPE. Text has the same position in the first three sections, and
/// position 0 in the fourth, so pairs of the fourth do not rotate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sections {
    /// All pairs rotate.
    None,
    /// Section after section (Qwen2-VL).
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

const BASE: Arch = Arch {
    name: "",
    rope: Some(RopeStyle::NeoX),
    rotated: Rotated::All,
    local_rope: LocalRope::Same,
    window: 0,
    fixed_window: None,
    window_pattern: 0,
    scaled_by_width: None,
    norm: NormKind::Rms,
    always_rms: false,
    act: Activation::Silu,
    normalised_experts: true,
    embeddings_by_width: false,
    divided_logits: false,
    bidirectional: false,
    post_norm: false,
    aliases: &[],
    ignored: &[],
    gating: Gating::Softmax,
    shared_as_expert: false,
    weighted_inputs: false,
    plain_norms: false,
    plain_embedding_norm: false,
    plain_experts: false,
    alibi: Alibi::Never,
    doubled_ff: false,
    swapped_norms: false,
    parallel: false,
    rope_before_norm: false,
    score_scale: ScoreScale::Root,
    output_gate: Activation::Sigmoid,
    swiglu: Swiglu::Plain,
    shared_factor: 1.0,
    dense_beside_experts: false,
    expert_input: ExpertInput::Same,
    global_first: false,
    plain_head_norms: false,
    post_norm_eps: None,
    attention_chunk: 0,
    sections: Sections::None,
    beta_fast: 32.0,
    required: &[],
    temperature: Temperature::ByKey,
    gated_queries: false,
    tiled_value_heads: false,
    mamba_by_heads: false,
    head: HeadKind::Tanh,
};
const LLAMA: Arch = Arch { name: "llama", rope: Some(RopeStyle::Interleaved), ..BASE };
const GEMMA: Arch = Arch { name: "gemma", act: Activation::GeluTanh, embeddings_by_width: true, ..BASE };
const GEMMA3: Arch = Arch {
    name: "gemma3",
    window_pattern: 6,
    local_rope: LocalRope::Base(10_000.0),
    scaled_by_width: Some(62),
    ..GEMMA
};
const LAYER_NORM: Arch = Arch { norm: NormKind::Layer, ..BASE };
const BERT: Arch =
    Arch { name: "bert", rope: None, act: Activation::GeluErf, bidirectional: true, post_norm: true, ..LAYER_NORM };
const QWEN35: Arch = Arch {
    name: "qwen35",
    gated_queries: true,
    sections: Sections::Interleaved,
    tiled_value_heads: true,
    aliases: FFN_NORM,
    ..BASE
};
const LFM2: Arch = Arch { name: "lfm2", aliases: &[("token_embd_norm", "output_norm")], ..BASE };
const MAMBA: Arch = Arch { name: "mamba", rotated: Rotated::None, ..BASE };
const GRANITE: Arch = Arch { name: "granite", divided_logits: true, ..LLAMA };

/// Experts whose weights are normalised only if the file says so.
const RAW_EXPERTS: Arch = Arch { name: "", normalised_experts: false, ..BASE };
const ALIBI: Arch = Arch { name: "", rope: None, alibi: Alibi::Always, act: Activation::GeluTanh, ..LAYER_NORM };
const LLAMA4: Arch = Arch {
    name: "llama4",
    rotated: Rotated::AllBut(4),
    attention_chunk: 8192,
    window_pattern: 4,
    gating: Gating::Sigmoid,
    normalised_experts: false,
    shared_as_expert: true,
    weighted_inputs: true,
    plain_head_norms: true,
    rope_before_norm: true,
    temperature: Temperature::NoRope,
    ..LLAMA
};
const COHERE: Arch = Arch { norm: NormKind::Layer, normalised_experts: false, ..LLAMA };
const GROK: &[(&str, &str)] = &[("attn_output_norm", "post_attention_norm"), ("layer_output_norm", "post_ffw_norm")];
const GROK_KEYS: &[&str] = &["logit_scale", "embedding_scale", "attention.output_scale", "attn_logit_softcapping"];
/// The norm after attention is the one before the feed-forward.
const FFN_NORM: &[(&str, &str)] = &[("post_attention_norm", "ffn_norm")];
const FALCON: &[(&str, &str)] = &[("attn_norm_2", "ffn_norm")];

/// All supported families. Mistral and Mixtral files use `llama`. `fixtures/README.md` lists the rows that are checked
/// against other implementations.
pub const ARCHS: &[Arch] = &[
    LLAMA,
    Arch { name: "qwen2", ..BASE },
    Arch { name: "qwen2vl", ..BASE },
    Arch { name: "qwen2moe", normalised_experts: false, ..BASE },
    Arch { name: "qwen3", head: HeadKind::Softmax, ..BASE },
    Arch { name: "qwen3moe", ..BASE },
    QWEN35,
    Arch { name: "qwen35moe", ..QWEN35 },
    LFM2,
    Arch { name: "lfm2moe", ..LFM2 },
    MAMBA,
    Arch { name: "mamba2", ..MAMBA },
    Arch { name: "nemotron_h", act: Activation::ReluSquared, always_rms: true, ..MAMBA },
    Arch { name: "jamba", normalised_experts: false, ..MAMBA },
    Arch { name: "falcon-h1", ..BASE },
    Arch { name: "granitehybrid", rotated: Rotated::IfFinetuned, ..GRANITE },
    Arch { name: "qwen3next", gated_queries: true, aliases: FFN_NORM, ..BASE },
    GEMMA,
    Arch { name: "gemma2", window: 4096, window_pattern: 2, scaled_by_width: Some(46), ..GEMMA },
    GEMMA3,
    Arch { name: "gemma-embedding", bidirectional: true, scaled_by_width: None, ..GEMMA3 },
    Arch { name: "phi2", act: Activation::GeluTanh, ..LAYER_NORM },
    Arch { name: "phi3", ..BASE },
    Arch { name: "stablelm", ..LAYER_NORM },
    Arch {
        name: "smallthinker",
        // as llama.cpp
        fixed_window: Some(4096),
        window_pattern: 4,
        global_first: true,
        rotated: Rotated::LocalIfAny,
        act: Activation::Relu,
        expert_input: ExpertInput::LayerForRouter,
        ..BASE
    },
    Arch { name: "smollm3", rotated: Rotated::AllBut(4), ..LLAMA },
    Arch { name: "olmo2", window_pattern: 4, local_rope: LocalRope::Unscaled, ..BASE },
    Arch { name: "olmoe", normalised_experts: false, ..BASE },
    GRANITE,
    Arch { name: "granitemoe", ..GRANITE },
    Arch { name: "gpt2", rope: None, act: Activation::GeluTanh, ..LAYER_NORM },
    Arch { name: "gptneox", act: Activation::GeluErf, ..LAYER_NORM },
    Arch { name: "starcoder2", act: Activation::GeluTanh, ..LAYER_NORM },
    Arch { name: "command-r", norm: NormKind::Layer, ..LLAMA },
    Arch { name: "cohere2", window_pattern: 4, rotated: Rotated::Local, norm: NormKind::Layer, ..LLAMA },
    Arch { name: "internlm2", ..LLAMA },
    Arch { name: "exaone", ..BASE },
    Arch { name: "ernie4_5", ..LLAMA },
    BERT,
    Arch { name: "arcee", act: Activation::ReluSquared, ..LLAMA },
    Arch { name: "nemotron", act: Activation::ReluSquared, ..LAYER_NORM },
    Arch { name: "jais2", act: Activation::ReluSquared, ..LAYER_NORM },
    Arch { name: "seed_oss", aliases: FFN_NORM, ..BASE },
    Arch { name: "glm4", ..LLAMA },
    Arch { name: "glm4moe", aliases: FFN_NORM, ..RAW_EXPERTS },
    Arch { name: "gpt-oss", aliases: FFN_NORM, swiglu: Swiglu::Clamped(7.0), window_pattern: 2, ..BASE },
    Arch { name: "bloom", ..ALIBI },
    Arch { name: "mpt", ..ALIBI },
    Arch { name: "jais", act: Activation::Silu, score_scale: ScoreScale::Inverse, ..ALIBI },
    Arch { name: "refact", norm: NormKind::Rms, act: Activation::Silu, ..ALIBI },
    Arch { name: "baichuan", alibi: Alibi::Layers(40), ..LLAMA },
    Arch {
        name: "falcon",
        act: Activation::GeluTanh,
        swapped_norms: true,
        parallel: true,
        aliases: FALCON,
        ..LAYER_NORM
    },
    Arch { name: "codeshell", act: Activation::GeluTanh, ..LAYER_NORM },
    Arch { name: "starcoder", rope: None, act: Activation::GeluTanh, ..LAYER_NORM },
    Arch { name: "orion", ..LAYER_NORM },
    Arch { name: "plamo", ..BASE },
    Arch { name: "plamo2", mamba_by_heads: true, ..BASE },
    Arch { name: "plamo3", window_pattern: 8, ..BASE },
    Arch { name: "xverse", ..LLAMA },
    Arch { name: "pangu-embedded", ..BASE },
    Arch { name: "qwen", doubled_ff: true, ..BASE },
    Arch { name: "chatglm", ..LLAMA },
    Arch { name: "cogvlm", ignored: &["vis_"], ..BASE },
    Arch { name: "olmo", norm: NormKind::Layer, plain_norms: true, ..LLAMA },
    Arch { name: "dbrx", aliases: &[("attn_output_norm", "ffn_norm")], ..LAYER_NORM },
    Arch { name: "minicpm", divided_logits: true, ..LLAMA },
    Arch { name: "exaone4", rotated: Rotated::LocalIfAny, ..BASE },
    Arch { name: "exaone-moe", shared_as_expert: true, rotated: Rotated::LocalIfAny, ..RAW_EXPERTS },
    Arch { name: "qwen3tts", ..BASE },
    Arch { name: "paddleocr", ..BASE },
    Arch { name: "hunyuan-dense", rope_before_norm: true, ..BASE },
    Arch { name: "hunyuan-moe", rope_before_norm: true, ..BASE },
    Arch { name: "mistral3", ..LLAMA },
    Arch { name: "bitnet", ..BASE },
    Arch { name: "phimoe", norm: NormKind::Layer, ..BASE },
    Arch { name: "deepseek", rope: Some(RopeStyle::Interleaved), ..RAW_EXPERTS },
    Arch { name: "bailingmoe", rope: Some(RopeStyle::Interleaved), ..RAW_EXPERTS },
    Arch { name: "bailingmoe2", ..RAW_EXPERTS },
    Arch { name: "dots1", ..RAW_EXPERTS },
    Arch { name: "hy_v3", ..RAW_EXPERTS },
    Arch { name: "minimax-m2", ..BASE },
    Arch { name: "ernie4_5-moe", ..LLAMA },
    Arch { name: "mellum", ..BASE },
    Arch {
        name: "afmoe",
        window_pattern: 4,
        rotated: Rotated::Local,
        gating: Gating::Sigmoid,
        embeddings_by_width: true,
        ..RAW_EXPERTS
    },
    Arch { name: "spark2_5", act: Activation::GeluTanh, ..BASE },
    Arch { name: "granite_swa", ..GRANITE },
    Arch { name: "llada", bidirectional: true, ..LLAMA },
    Arch { name: "llada-moe", bidirectional: true, ..RAW_EXPERTS },
    Arch { name: "dream", bidirectional: true, ..BASE },
    Arch { name: "rnd1", bidirectional: true, ..BASE },
    Arch { name: "eurobert", bidirectional: true, ..BASE },
    Arch { name: "neo-bert", bidirectional: true, aliases: &[("enc.output_norm", "output_norm")], ..LLAMA },
    Arch { name: "jina-bert-v3", rope: Some(RopeStyle::NeoX), ..BERT },
    Arch { name: "qwen3vl", sections: Sections::Interleaved, head: HeadKind::Softmax, ..BASE },
    Arch { name: "qwen3vlmoe", sections: Sections::Interleaved, ..BASE },
    Arch { name: "hunyuan_vl", rope_before_norm: true, sections: Sections::Blocks, ..BASE },
    LLAMA4,
    Arch { name: "maple", rotated: Rotated::Local, swiglu: Swiglu::Limited(7.0), ..BASE },
    Arch { name: "cohere2moe", rotated: Rotated::LocalOrDense, gating: Gating::Sigmoid, shared_factor: 0.5, ..COHERE },
    Arch {
        name: "modern-bert",
        bidirectional: true,
        window_pattern: 3,
        global_first: true,
        act: Activation::GeluErf,
        head: HeadKind::Gelu,
        ..LAYER_NORM
    },
    Arch {
        name: "muse-glimmer",
        plain_embedding_norm: true,
        window_pattern: 4,
        rotated: Rotated::Local,
        post_norm_eps: Some(1e-8),
        ..LLAMA
    },
    Arch {
        name: "grok",
        shared_factor: core::f32::consts::FRAC_1_SQRT_2,
        act: Activation::GeluTanh,
        dense_beside_experts: true,
        aliases: GROK,
        beta_fast: 8.0,
        required: GROK_KEYS,
        ..BASE
    },
    Arch { name: "apertus", ..BASE },
    Arch { name: "maincoder", rope_before_norm: true, ..LLAMA },
    Arch { name: "arctic", dense_beside_experts: true, expert_input: ExpertInput::Layer, ..LLAMA },
    Arch { name: "pockettts", act: Activation::GeluErf, rope: Some(RopeStyle::Interleaved), ..LAYER_NORM },
    Arch { name: "jina-bert-v2", alibi: Alibi::Always, ..BERT },
    Arch { name: "nomic-bert", rope: Some(RopeStyle::NeoX), act: Activation::Silu, ..BERT },
    Arch {
        name: "nomic-bert-moe",
        rope: Some(RopeStyle::NeoX),
        plain_experts: true,
        normalised_experts: false,
        ..BERT
    },
];

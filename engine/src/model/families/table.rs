//! The table of model families.

use crate::kernels::elementwise::Activation;
use crate::kernels::norm::NormKind;
use crate::kernels::rope::RopeStyle;
use crate::model::families::{
    Alibi, Arch, ExpertInput, Factors, Gating, HeadKind, IndexerKind, LocalRope, Mtp, OutputGate, Rotated, ScoreScale,
    Sections, Swiglu, Temperature, YarnLog,
};

const BASE: Arch = Arch {
    name: "",
    rope: Some(RopeStyle::NeoX),
    rotated: Rotated::All,
    fixed_rope_base: None,
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
    diffusion: false,
    post_norm: false,
    aliases: &[],
    ignored: &[],
    gating: Gating::Softmax,
    sigmoid_sizes: &[],
    shared_as_expert: false,
    weighted_inputs: false,
    plain_norms: false,
    optional_first_norm: false,
    plain_embedding_norm: false,
    plain_experts: false,
    alibi: Alibi::Never,
    doubled_ff: false,
    swapped_norms: false,
    parallel: false,
    rope_before_norm: false,
    score_scale: ScoreScale::Root,
    output_gate: OutputGate::Sigmoid,
    plain_value_norm: false,
    values_from_keys: false,
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
    yarn_log: YarnLog::Magnitude,
    factors: None,
    required: &[],
    temperature: Temperature::ByKey,
    gated_queries: false,
    kv_layers: None,
    layer_embeddings: 0,
    streams: 0,
    sparsity: None,
    embedding_skips: false,
    relative_distance: 0,
    ungated_act: None,
    prefix: "",
    half_rotary: false,
    tiled_value_heads: false,
    l2_eps: None,
    sigmoid_delta_gate: false,
    ngrams: false,
    mamba_by_heads: false,
    head: HeadKind::Tanh,
    positive_decay_factors: false,
    normed_residual: false,
    lightning: false,
    indexer: None,
    indexer_rotates_end: false,
    limited_dense: false,
    mtp: Mtp::Unsupported,
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
    mtp: Mtp::Normed,
    gated_queries: true,
    sections: Sections::Interleaved,
    tiled_value_heads: true,
    aliases: FFN_NORM,
    ..BASE
};
const LFM2: Arch = Arch { name: "lfm2", aliases: &[("token_embd_norm", "output_norm")], ..BASE };
const MAMBA: Arch = Arch { name: "mamba", rotated: Rotated::None, ..BASE };
const RWKV: Arch = Arch { name: "arwkv7", rotated: Rotated::None, ..BASE };
const NEMOTRON_H: Arch = Arch { name: "nemotron_h", act: Activation::ReluSquared, always_rms: true, ..MAMBA };
const GRANITE: Arch = Arch { name: "granite", divided_logits: true, ..LLAMA };

/// Experts whose weights are normalised only if the file says so.
const RAW_EXPERTS: Arch = Arch { name: "", normalised_experts: false, ..BASE };
const DEEPSEEK2: Arch = Arch {
    name: "deepseek2",
    mtp: Mtp::Normed,
    rope: Some(RopeStyle::Interleaved),
    yarn_log: YarnLog::Scores,
    ..RAW_EXPERTS
};
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
const GROK: &[(&str, &str)] = &[("attn_output_norm", "post_attention_norm"), ("layer_output_norm", "post_ffw_norm")];
const GROK_KEYS: &[&str] = &["logit_scale", "embedding_scale", "attention.output_scale", "attn_logit_softcapping"];
/// The norm after attention is the one before the feed-forward.
const FFN_NORM: &[(&str, &str)] = &[("post_attention_norm", "ffn_norm")];
const FALCON: &[(&str, &str)] = &[("attn_norm_2", "ffn_norm")];

const KIMI_K3: &[(&str, &str)] = &[
    ("ffn_routed_down", "ffn_latent_down"),
    ("ffn_routed_norm", "ffn_latent_norm"),
    ("ffn_routed_up", "ffn_latent_up"),
];

/// All supported families. Mistral and Mixtral files use `llama`. `fixtures/README.md` lists the rows that are checked
/// against other implementations.
pub const ARCHS: &[Arch] = &[
    LLAMA,
    Arch { name: "qwen2", ..BASE },
    Arch { name: "qwen2vl", sections: Sections::Blocks, ..BASE },
    Arch { name: "qwen2moe", normalised_experts: false, ..BASE },
    Arch { name: "qwen3", head: HeadKind::Softmax, ..BASE },
    Arch { name: "qwen3moe", ..BASE },
    Arch { name: "grovemoe", ..BASE },
    QWEN35,
    Arch { name: "qwen35moe", ..QWEN35 },
    Arch {
        name: "qwen4exp",
        indexer: Some(IndexerKind::Means),
        sigmoid_delta_gate: true,
        ngrams: true,
        mtp: Mtp::Unsupported,
        required: &["hyper_connection.count", "hyper_connection.low_rank", "expert_feed_forward_length"],
        ..QWEN35
    },
    LFM2,
    Arch { name: "lfm2moe", ..LFM2 },
    MAMBA,
    Arch { name: "mamba2", ..MAMBA },
    NEMOTRON_H,
    Arch { name: "nemotron_h_moe", gating: Gating::Sigmoid, plain_experts: true, ..NEMOTRON_H },
    Arch { name: "minimax-01", normed_residual: true, lightning: true, ..BASE },
    Arch { name: "rwkv6", aliases: FALCON, ..RWKV },
    Arch { name: "rwkv7", aliases: FALCON, ..RWKV },
    RWKV,
    Arch { name: "kimi-linear", rotated: Rotated::None, ..BASE },
    Arch { name: "kimi-k3", rotated: Rotated::None, aliases: KIMI_K3, ..BASE },
    Arch {
        name: "bailingmoe3",
        rope: Some(RopeStyle::Interleaved),
        sections: Sections::Refused,
        positive_decay_factors: true,
        required: &["kda.gate_lower_bound"],
        ..RAW_EXPERTS
    },
    Arch { name: "jamba", normalised_experts: false, ..MAMBA },
    Arch { name: "falcon-h1", ..BASE },
    Arch { name: "granitehybrid", rotated: Rotated::IfFinetuned, ..GRANITE },
    Arch { name: "qwen3next", mtp: Mtp::Normed, gated_queries: true, aliases: FFN_NORM, ..BASE },
    GEMMA,
    Arch { name: "gemma2", window: 4096, window_pattern: 2, scaled_by_width: Some(46), ..GEMMA },
    GEMMA3,
    Arch { name: "gemma-embedding", bidirectional: true, scaled_by_width: None, ..GEMMA3 },
    Arch { name: "phi2", act: Activation::GeluTanh, ..LAYER_NORM },
    Arch { name: "phi3", ..BASE },
    Arch { name: "stablelm", ..LAYER_NORM },
    Arch {
        name: "gemma4",
        local_rope: LocalRope::Base(10_000.0),
        score_scale: ScoreScale::One,
        plain_value_norm: true,
        values_from_keys: true,
        dense_beside_experts: true,
        expert_input: ExpertInput::Residual,
        ..GEMMA
    },
    Arch {
        name: "gemma3n",
        window_pattern: 5,
        local_rope: LocalRope::Base(10_000.0),
        score_scale: ScoreScale::One,
        plain_value_norm: true,
        kv_layers: Some(20),
        layer_embeddings: 256,
        streams: 4,
        // the quantile of 0.95 of a normal distribution
        sparsity: Some((10, 1.644_853_5)),
        ..GEMMA
    },
    Arch { name: "nanbeige", ..LLAMA },
    Arch { name: "hrm_text", plain_norms: true, ..BASE },
    Arch {
        name: "talkie",
        plain_norms: true,
        plain_embedding_norm: true,
        plain_head_norms: true,
        rope_before_norm: true,
        embedding_skips: true,
        ..BASE
    },
    Arch {
        name: "t5encoder",
        rope: None,
        bidirectional: true,
        act: Activation::GeluTanh,
        ungated_act: Some(Activation::Relu),
        score_scale: ScoreScale::One,
        relative_distance: 128,
        prefix: "enc.",
        aliases: &[("attn_o", "attn_output")],
        ..BASE
    },
    Arch { name: "openelm", ..BASE },
    Arch { name: "deci", ..LLAMA },
    Arch { name: "mimo2", mtp: Mtp::Raw, local_rope: LocalRope::Unscaled, gating: Gating::Sigmoid, ..BASE },
    Arch {
        name: "laguna",
        window_pattern: 4,
        global_first: true,
        local_rope: LocalRope::Unscaled,
        gating: Gating::Sigmoid,
        shared_as_expert: true,
        output_gate: OutputGate::Softplus,
        ..RAW_EXPERTS
    },
    Arch {
        name: "step35",
        mtp: Mtp::Raw,
        half_rotary: true,
        local_rope: LocalRope::Unscaled,
        gating: Gating::Sigmoid,
        ..RAW_EXPERTS
    },
    Arch {
        name: "smallthinker",
        // as llama.cpp
        fixed_window: Some(4096),
        window_pattern: 4,
        global_first: true,
        rotated: Rotated::AllButFirst(4),
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
    Arch { name: "glm4", sections: Sections::Blocks, ..LLAMA },
    Arch {
        name: "glm4moe",
        gating: Gating::Sigmoid,
        sections: Sections::Blocks,
        mtp: Mtp::Normed,
        aliases: FFN_NORM,
        ..RAW_EXPERTS
    },
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
    // llama.cpp does not read the base
    Arch { name: "cogvlm", ignored: &["vis_"], fixed_rope_base: Some(10_000.0), ..BASE },
    Arch { name: "olmo", norm: NormKind::Layer, plain_norms: true, ..LLAMA },
    Arch { name: "dbrx", aliases: &[("attn_output_norm", "ffn_norm")], ..LAYER_NORM },
    Arch { name: "minicpm", divided_logits: true, ..LLAMA },
    Arch { name: "exaone4", rotated: Rotated::LocalIfAny, ..BASE },
    Arch { name: "exaone-moe", shared_as_expert: true, rotated: Rotated::LocalIfAny, ..RAW_EXPERTS },
    Arch { name: "qwen3tts", sections: Sections::Interleaved, ..BASE },
    Arch { name: "paddleocr", sections: Sections::Blocks, ..BASE },
    Arch { name: "hunyuan-dense", rope_before_norm: true, ..BASE },
    Arch { name: "hunyuan-moe", rope_before_norm: true, ..BASE },
    Arch { name: "mistral3", ..LLAMA },
    Arch { name: "bitnet", ..BASE },
    Arch { name: "phimoe", norm: NormKind::Layer, ..BASE },
    Arch { name: "deepseek", rope: Some(RopeStyle::Interleaved), ..RAW_EXPERTS },
    // GLM 4.7 Lite
    Arch { sigmoid_sizes: &[47, 48], ..DEEPSEEK2 },
    Arch {
        name: "deepseek32",
        indexer: Some(IndexerKind::Lightning(RopeStyle::NeoX)),
        yarn_log: YarnLog::ScoresAndMagnitude,
        ..DEEPSEEK2
    },
    Arch {
        name: "deepseek4",
        rope: Some(RopeStyle::Interleaved),
        gating: Gating::SqrtSoftplus,
        swiglu: Swiglu::Limited(0.0),
        limited_dense: true,
        mtp: Mtp::Unsupported,
        // for images
        ignored: &["exp_probs_b_vl."],
        required: &[
            "expert_gating_func",
            "swiglu_clamp_exp",
            "hash_layer_count",
            "hyper_connection.sinkhorn_iterations",
        ],
        ..BASE
    },
    Arch {
        name: "glm-dsa",
        indexer: Some(IndexerKind::Lightning(RopeStyle::Interleaved)),
        gating: Gating::Sigmoid,
        yarn_log: YarnLog::ScoresAndMagnitude,
        ..DEEPSEEK2
    },
    Arch {
        name: "dots3note",
        rope: Some(RopeStyle::Interleaved),
        indexer: Some(IndexerKind::Lightning(RopeStyle::NeoX)),
        ..RAW_EXPERTS
    },
    Arch { name: "minimax-m3", indexer: Some(IndexerKind::Blocks), swiglu: Swiglu::Clamped(7.0), ..BASE },
    Arch { name: "mistral4", yarn_log: YarnLog::ScoresAndMagnitude, ..DEEPSEEK2 },
    Arch { name: "minicpm3", factors: Some(Factors { embedding: 12.0, depth: 1.4, width: 256.0 }), ..BASE },
    Arch { name: "plm", act: Activation::ReluSquared, ..LLAMA },
    Arch { name: "bailingmoe", rope: Some(RopeStyle::Interleaved), ..RAW_EXPERTS },
    Arch { name: "bailingmoe2", ..RAW_EXPERTS },
    Arch { name: "dots1", ..RAW_EXPERTS },
    Arch { name: "hy_v3", gating: Gating::Sigmoid, mtp: Mtp::Normed, ..RAW_EXPERTS },
    Arch {
        name: "glm5-next",
        rotated: Rotated::None,
        l2_eps: Some(1e-6),
        indexer: Some(IndexerKind::Lightning(RopeStyle::NeoX)),
        gating: Gating::Sigmoid,
        swiglu: Swiglu::Limited(0.0),
        limited_dense: true,
        ..RAW_EXPERTS
    },
    Arch {
        name: "hy_v4",
        rope: Some(RopeStyle::Interleaved),
        indexer: Some(IndexerKind::Lightning(RopeStyle::Interleaved)),
        indexer_rotates_end: true,
        swiglu: Swiglu::Limited(0.0),
        ..RAW_EXPERTS
    },
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
    Arch { name: "llada", bidirectional: true, diffusion: true, ..LLAMA },
    Arch { name: "llada-moe", bidirectional: true, diffusion: true, ..RAW_EXPERTS },
    Arch { name: "dream", bidirectional: true, diffusion: true, ..BASE },
    Arch { name: "rnd1", bidirectional: true, diffusion: true, ..BASE },
    Arch { name: "eurobert", bidirectional: true, ..BASE },
    Arch { name: "neo-bert", bidirectional: true, aliases: &[("enc.output_norm", "output_norm")], ..LLAMA },
    Arch { name: "jina-bert-v3", rope: Some(RopeStyle::NeoX), ..BERT },
    Arch { name: "qwen3vl", sections: Sections::Interleaved, head: HeadKind::Softmax, ..BASE },
    Arch { name: "qwen3vlmoe", sections: Sections::Interleaved, ..BASE },
    Arch { name: "hunyuan_vl", rope_before_norm: true, sections: Sections::Blocks, ..BASE },
    LLAMA4,
    Arch { name: "maple", rotated: Rotated::Local, swiglu: Swiglu::Limited(7.0), ..BASE },
    Arch {
        name: "cohere2moe",
        mtp: Mtp::Normed,
        rotated: Rotated::LocalOrDense,
        gating: Gating::Sigmoid,
        shared_factor: 0.5,
        normalised_experts: false,
        ..LLAMA
    },
    Arch {
        name: "modern-bert",
        bidirectional: true,
        window_pattern: 3,
        global_first: true,
        act: Activation::GeluErf,
        head: HeadKind::Gelu,
        optional_first_norm: true,
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

//! The table of model families. Those with an idea of their own have a file.

use super::Entry;
use super::baichuan::BAICHUAN;
use super::bailingmoe3::BAILINGMOE3;
use super::base::{
    ALIBI, ATTN_NORM_2, BASE, BERT, FFN_NORM, GRANITE, KIMI_K3, LAYER_NORM, LFM2, LLAMA, MAMBA, QWEN35, RAW_EXPERTS,
    RWKV,
};
use super::cogvlm::COGVLM;
use super::cohere2moe::COHERE2MOE;
use super::deepseek::{DEEPSEEK2, DEEPSEEK4, DEEPSEEK32, LATENT};
use super::falcon::FALCON;
use super::gemma::{GEMMA, GEMMA_EMBEDDING, GEMMA2, GEMMA3};
use super::gemma3n::GEMMA3N;
use super::gemma4::GEMMA4;
use super::glm5_next::GLM5_NEXT;
use super::granitehybrid::GRANITEHYBRID;
use super::grok::GROK;
use super::laguna::LAGUNA;
use super::llama4::LLAMA4;
use super::minicpm3::MINICPM3;
use super::minimax01::MINIMAX01;
use super::modern_bert::MODERN_BERT;
use super::muse_glimmer::MUSE_GLIMMER;
use super::nemotron_h::{NEMOTRON_H, NEMOTRON_H_MOE};
use super::nomic_bert::NOMIC_BERT_MOE;
use super::plamo2::PLAMO2;
use super::qwen::QWEN;
use super::qwen4exp::QWEN4EXP;
use super::smallthinker::SMALLTHINKER;
use super::step35::STEP35;
use super::t5encoder::T5ENCODER;
use super::talkie::TALKIE;
use crate::kernels::elementwise::Activation;
use crate::kernels::norm::NormKind;
use crate::kernels::rope::RopeStyle;
use crate::model::family::*;

/// All supported families. Mistral and Mixtral files use `llama`. `fixtures/README.md` lists the rows that are checked
/// against other implementations.
pub const FAMILIES: &[Entry] = &[
    Entry::plain(LLAMA),
    Entry::plain(Family { name: "qwen2", ..BASE }),
    Entry::plain(Family { name: "qwen2vl", sections: Sections::Blocks, ..BASE }),
    Entry::plain(Family { name: "qwen2moe", normalised_experts: false, ..BASE }),
    Entry::plain(Family { name: "qwen3", head: HeadKind::Softmax, ..BASE }),
    Entry::plain(Family { name: "qwen3moe", ..BASE }),
    Entry::plain(Family { name: "grovemoe", ..BASE }),
    Entry::plain(QWEN35),
    Entry::plain(Family { name: "qwen35moe", ..QWEN35 }),
    QWEN4EXP,
    Entry::plain(LFM2),
    Entry::plain(Family { name: "lfm2moe", ..LFM2 }),
    Entry::plain(MAMBA),
    Entry::plain(Family { name: "mamba2", ..MAMBA }),
    NEMOTRON_H,
    NEMOTRON_H_MOE,
    MINIMAX01,
    Entry::plain(Family { name: "rwkv6", aliases: ATTN_NORM_2, ..RWKV }),
    Entry::plain(Family { name: "rwkv7", aliases: ATTN_NORM_2, ..RWKV }),
    Entry::plain(RWKV),
    Entry::plain(Family { name: "kimi-linear", rotated: Rotated::None, ..BASE }),
    Entry::plain(Family { name: "kimi-k3", rotated: Rotated::None, aliases: KIMI_K3, ..BASE }),
    BAILINGMOE3,
    Entry::plain(Family { name: "jamba", normalised_experts: false, ..MAMBA }),
    Entry::plain(Family { name: "falcon-h1", ..BASE }),
    GRANITEHYBRID,
    Entry::plain(Family { name: "qwen3next", mtp: Mtp::Normed, gated_queries: true, aliases: FFN_NORM, ..BASE }),
    Entry::plain(GEMMA),
    GEMMA2,
    GEMMA3,
    Entry::plain(GEMMA_EMBEDDING),
    Entry::plain(Family { name: "phi2", act: Activation::GeluTanh, ..LAYER_NORM }),
    Entry::plain(Family { name: "phi3", ..BASE }),
    Entry::plain(Family { name: "stablelm", ..LAYER_NORM }),
    GEMMA4,
    GEMMA3N,
    Entry::plain(Family { name: "nanbeige", ..LLAMA }),
    Entry::plain(Family { name: "hrm_text", plain_norms: true, ..BASE }),
    TALKIE,
    T5ENCODER,
    Entry::plain(Family { name: "openelm", ..BASE }),
    Entry::plain(Family { name: "deci", ..LLAMA }),
    Entry::plain(Family {
        name: "mimo2",
        mtp: Mtp::Raw,
        local_rope: LocalRope::Unscaled,
        gating: Gating::Sigmoid,
        ..BASE
    }),
    LAGUNA,
    STEP35,
    SMALLTHINKER,
    Entry::plain(Family { name: "smollm3", rotated: Rotated::AllBut(4), ..LLAMA }),
    Entry::plain(Family { name: "olmo2", window_pattern: 4, local_rope: LocalRope::Unscaled, ..BASE }),
    Entry::plain(Family { name: "olmoe", normalised_experts: false, ..BASE }),
    Entry::plain(GRANITE),
    Entry::plain(Family { name: "granitemoe", ..GRANITE }),
    Entry::plain(Family { name: "gpt2", rope: None, act: Activation::GeluTanh, ..LAYER_NORM }),
    Entry::plain(Family { name: "gptneox", act: Activation::GeluErf, ..LAYER_NORM }),
    Entry::plain(Family { name: "starcoder2", act: Activation::GeluTanh, ..LAYER_NORM }),
    Entry::plain(Family { name: "command-r", norm: NormKind::Layer, ..LLAMA }),
    Entry::plain(Family {
        name: "cohere2",
        window_pattern: 4,
        rotated: Rotated::Local,
        norm: NormKind::Layer,
        ..LLAMA
    }),
    Entry::plain(Family { name: "internlm2", ..LLAMA }),
    Entry::plain(Family { name: "exaone", ..BASE }),
    Entry::plain(Family { name: "ernie4_5", ..LLAMA }),
    Entry::plain(BERT),
    Entry::plain(Family { name: "arcee", act: Activation::ReluSquared, ..LLAMA }),
    Entry::plain(Family { name: "nemotron", act: Activation::ReluSquared, ..LAYER_NORM }),
    Entry::plain(Family { name: "jais2", act: Activation::ReluSquared, ..LAYER_NORM }),
    Entry::plain(Family { name: "seed_oss", aliases: FFN_NORM, ..BASE }),
    Entry::plain(Family { name: "glm4", sections: Sections::Blocks, ..LLAMA }),
    Entry::plain(Family {
        name: "glm4moe",
        gating: Gating::Sigmoid,
        sections: Sections::Blocks,
        mtp: Mtp::Normed,
        aliases: FFN_NORM,
        ..RAW_EXPERTS
    }),
    Entry::plain(Family {
        name: "gpt-oss",
        aliases: FFN_NORM,
        swiglu: Swiglu::Clamped(7.0),
        window_pattern: 2,
        ..BASE
    }),
    Entry::plain(Family { name: "bloom", ..ALIBI }),
    Entry::plain(Family { name: "mpt", ..ALIBI }),
    Entry::plain(Family { name: "jais", act: Activation::Silu, score_scale: ScoreScale::Inverse, ..ALIBI }),
    Entry::plain(Family { name: "refact", norm: NormKind::Rms, act: Activation::Silu, ..ALIBI }),
    BAICHUAN,
    FALCON,
    Entry::plain(Family { name: "codeshell", act: Activation::GeluTanh, ..LAYER_NORM }),
    Entry::plain(Family { name: "starcoder", rope: None, act: Activation::GeluTanh, ..LAYER_NORM }),
    Entry::plain(Family { name: "orion", ..LAYER_NORM }),
    Entry::plain(Family { name: "plamo", ..BASE }),
    PLAMO2,
    Entry::plain(Family { name: "plamo3", window_pattern: 8, ..BASE }),
    Entry::plain(Family { name: "xverse", ..LLAMA }),
    Entry::plain(Family { name: "pangu-embedded", ..BASE }),
    QWEN,
    Entry::plain(Family { name: "chatglm", ..LLAMA }),
    COGVLM,
    Entry::plain(Family { name: "olmo", norm: NormKind::Layer, plain_norms: true, ..LLAMA }),
    Entry::plain(Family { name: "dbrx", aliases: &[("attn_output_norm", "ffn_norm")], ..LAYER_NORM }),
    Entry::plain(Family { name: "minicpm", divided_logits: true, ..LLAMA }),
    Entry::plain(Family { name: "exaone4", rotated: Rotated::LocalIfAny, ..BASE }),
    Entry::plain(Family { name: "exaone-moe", shared_as_expert: true, rotated: Rotated::LocalIfAny, ..RAW_EXPERTS }),
    Entry::plain(Family { name: "qwen3tts", sections: Sections::Interleaved, ..BASE }),
    Entry::plain(Family { name: "paddleocr", sections: Sections::Blocks, ..BASE }),
    Entry::plain(Family { name: "hunyuan-dense", rope_before_norm: true, ..BASE }),
    Entry::plain(Family { name: "hunyuan-moe", rope_before_norm: true, ..BASE }),
    Entry::plain(Family { name: "mistral3", ..LLAMA }),
    Entry::plain(Family { name: "bitnet", ..BASE }),
    Entry::plain(Family { name: "phimoe", norm: NormKind::Layer, ..BASE }),
    Entry::plain(Family { name: "deepseek", rope: Some(RopeStyle::Interleaved), ..RAW_EXPERTS }),
    DEEPSEEK2,
    Entry::plain(DEEPSEEK32),
    DEEPSEEK4,
    Entry::plain(Family {
        name: "glm-dsa",
        indexer: Some(IndexerKind::lightning(RopeStyle::Interleaved)),
        gating: Gating::Sigmoid,
        yarn_log: YarnLog::ScoresAndMagnitude,
        ..LATENT
    }),
    Entry::plain(Family {
        name: "dots3note",
        rope: Some(RopeStyle::Interleaved),
        indexer: Some(IndexerKind::lightning(RopeStyle::NeoX)),
        ..RAW_EXPERTS
    }),
    Entry::plain(Family {
        name: "minimax-m3",
        indexer: Some(IndexerKind::Blocks),
        swiglu: Swiglu::Clamped(7.0),
        ..BASE
    }),
    Entry::plain(Family { name: "mistral4", yarn_log: YarnLog::ScoresAndMagnitude, ..LATENT }),
    MINICPM3,
    Entry::plain(Family { name: "plm", act: Activation::ReluSquared, ..LLAMA }),
    Entry::plain(Family { name: "bailingmoe", rope: Some(RopeStyle::Interleaved), ..RAW_EXPERTS }),
    Entry::plain(Family { name: "bailingmoe2", ..RAW_EXPERTS }),
    Entry::plain(Family { name: "dots1", ..RAW_EXPERTS }),
    Entry::plain(Family { name: "hy_v3", gating: Gating::Sigmoid, mtp: Mtp::Normed, ..RAW_EXPERTS }),
    GLM5_NEXT,
    Entry::plain(Family {
        name: "hy_v4",
        rope: Some(RopeStyle::Interleaved),
        indexer: Some(IndexerKind::Lightning { pairs: RopeStyle::Interleaved, at_end: true }),
        swiglu: Swiglu::Limited(0.0),
        ..RAW_EXPERTS
    }),
    Entry::plain(Family { name: "minimax-m2", ..BASE }),
    Entry::plain(Family { name: "ernie4_5-moe", ..LLAMA }),
    Entry::plain(Family { name: "mellum", ..BASE }),
    Entry::plain(Family {
        name: "afmoe",
        window_pattern: 4,
        rotated: Rotated::Local,
        gating: Gating::Sigmoid,
        embeddings_by_width: true,
        ..RAW_EXPERTS
    }),
    Entry::plain(Family { name: "spark2_5", act: Activation::GeluTanh, ..BASE }),
    Entry::plain(Family { name: "granite_swa", ..GRANITE }),
    Entry::plain(Family { name: "llada", bidirectional: true, diffusion: true, ..LLAMA }),
    Entry::plain(Family { name: "llada-moe", bidirectional: true, diffusion: true, ..RAW_EXPERTS }),
    Entry::plain(Family { name: "dream", bidirectional: true, diffusion: true, ..BASE }),
    Entry::plain(Family { name: "rnd1", bidirectional: true, diffusion: true, ..BASE }),
    Entry::plain(Family { name: "eurobert", bidirectional: true, ..BASE }),
    Entry::plain(Family {
        name: "neo-bert",
        bidirectional: true,
        aliases: &[("enc.output_norm", "output_norm")],
        ..LLAMA
    }),
    Entry::plain(Family { name: "jina-bert-v3", rope: Some(RopeStyle::NeoX), ..BERT }),
    Entry::plain(Family { name: "qwen3vl", sections: Sections::Interleaved, head: HeadKind::Softmax, ..BASE }),
    Entry::plain(Family { name: "qwen3vlmoe", sections: Sections::Interleaved, ..BASE }),
    Entry::plain(Family { name: "hunyuan_vl", rope_before_norm: true, sections: Sections::Blocks, ..BASE }),
    LLAMA4,
    Entry::plain(Family { name: "maple", rotated: Rotated::Local, swiglu: Swiglu::Limited(7.0), ..BASE }),
    COHERE2MOE,
    MODERN_BERT,
    MUSE_GLIMMER,
    GROK,
    Entry::plain(Family { name: "apertus", ..BASE }),
    Entry::plain(Family { name: "maincoder", rope_before_norm: true, ..LLAMA }),
    Entry::plain(Family { name: "arctic", dense_beside_experts: true, expert_input: ExpertInput::Layer, ..LLAMA }),
    Entry::plain(Family {
        name: "pockettts",
        act: Activation::GeluErf,
        rope: Some(RopeStyle::Interleaved),
        ..LAYER_NORM
    }),
    Entry::plain(Family { name: "jina-bert-v2", alibi: true, ..BERT }),
    Entry::plain(Family { name: "nomic-bert", rope: Some(RopeStyle::NeoX), act: Activation::Silu, ..BERT }),
    NOMIC_BERT_MOE,
];

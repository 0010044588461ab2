//! What families have in common with others, by name.

use crate::kernels::elementwise::Activation;
use crate::kernels::norm::NormKind;
use crate::kernels::rope::RopeStyle;
use crate::model::family::*;

/// A family like most: RoPE of pairs of halves, RMSNorm, gated SiLU.
pub(super) const BASE: Family = Family {
    name: "",
    rope: Some(RopeStyle::NeoX),
    rotated: Rotated::All,
    local_rope: LocalRope::Same,
    window_pattern: 0,
    global_first: false,
    norm: NormKind::Rms,
    act: Activation::Silu,
    normalised_experts: true,
    gating: Gating::Softmax,
    shared_as_expert: false,
    dense_beside_experts: false,
    expert_input: ExpertInput::Same,
    swiglu: Swiglu::Plain,
    embeddings_by_width: false,
    divided_logits: false,
    bidirectional: false,
    diffusion: false,
    aliases: &[],
    plain_norms: false,
    post_norm: false,
    alibi: false,
    rope_before_norm: false,
    score_scale: ScoreScale::Root,
    sections: Sections::None,
    yarn_log: YarnLog::Magnitude,
    required: &[],
    gated_queries: false,
    tiled_value_heads: false,
    mtp: Mtp::Unsupported,
    head: HeadKind::Tanh,
    indexer: None,
};
pub(super) const LLAMA: Family = Family { name: "llama", rope: Some(RopeStyle::Interleaved), ..BASE };
pub(super) const LAYER_NORM: Family = Family { norm: NormKind::Layer, ..BASE };
pub(super) const BERT: Family =
    Family { name: "bert", rope: None, act: Activation::GeluErf, bidirectional: true, post_norm: true, ..LAYER_NORM };
pub(super) const QWEN35: Family = Family {
    name: "qwen35",
    mtp: Mtp::Normed,
    gated_queries: true,
    sections: Sections::Interleaved,
    tiled_value_heads: true,
    aliases: FFN_NORM,
    ..BASE
};
pub(super) const LFM2: Family = Family { name: "lfm2", aliases: &[("token_embd_norm", "output_norm")], ..BASE };
pub(super) const MAMBA: Family = Family { name: "mamba", rotated: Rotated::None, ..BASE };
pub(super) const RWKV: Family = Family { name: "arwkv7", rotated: Rotated::None, ..BASE };
pub(super) const GRANITE: Family = Family { name: "granite", divided_logits: true, ..LLAMA };

/// Experts whose weights are normalised only if the file says so.
pub(super) const RAW_EXPERTS: Family = Family { name: "", normalised_experts: false, ..BASE };
pub(super) const ALIBI: Family = Family { name: "", rope: None, alibi: true, act: Activation::GeluTanh, ..LAYER_NORM };
/// The norm after attention is the one before the feed-forward.
pub(super) const FFN_NORM: &[(&str, &str)] = &[("post_attention_norm", "ffn_norm")];
/// The norm of the feed-forward, which has another name in files.
pub(super) const ATTN_NORM_2: &[(&str, &str)] = &[("attn_norm_2", "ffn_norm")];

pub(super) const KIMI_K3: &[(&str, &str)] = &[
    ("ffn_routed_down", "ffn_latent_down"),
    ("ffn_routed_norm", "ffn_latent_norm"),
    ("ffn_routed_up", "ffn_latent_up"),
];

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
    /// Name of the final norm.
    pub final_norm: &'static str,
    /// Which elements of a head RoPE pairs; `None` for learned position embeddings.
    pub rope: Option<RopeStyle>,
    /// Which layers have RoPE.
    pub rotated: Rotated,
    /// RoPE of layers with a window.
    pub local_rope: LocalRope,
    /// Default attention window of local layers in tokens; 0 for none.
    pub window: usize,
    /// Default period p of layers with a window: the last of p consecutive layers is global; 0 if all are local.
    /// `attention.sliding_window_pattern` takes precedence.
    pub window_pattern: usize,
    /// Attention scores of the model size with this many layers are scaled by `1 / sqrt(n_embd / n_head)`; files do not
    /// state it.
    pub scaled_by_width: Option<usize>,
    /// Kind of norm if a file has the epsilons of both.
    pub norm: NormKind,
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
    /// Whether norms follow the residual sums, `x = norm(x + attention(x))`, and there is no final norm.
    pub post_norm: bool,
    /// Whether the query projection also gives a gate of each head, after its query; attention is multiplied by its
    /// sigmoid.
    pub gated_queries: bool,
    /// Whether the pairs of RoPE belong to the axes of `rope.dimension_sections` in turn (Qwen3.5). A pair beyond the
    /// section of its axis does not rotate in text.
    pub interleaved_sections: bool,
    /// Delta net: whether value head h has the key head `h % n_key`, instead of `h / (n_value / n_key)`.
    pub tiled_value_heads: bool,
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
    final_norm: "output_norm",
    rope: Some(RopeStyle::NeoX),
    rotated: Rotated::All,
    local_rope: LocalRope::Same,
    window: 0,
    window_pattern: 0,
    scaled_by_width: None,
    norm: NormKind::Rms,
    act: Activation::Silu,
    normalised_experts: true,
    embeddings_by_width: false,
    divided_logits: false,
    bidirectional: false,
    post_norm: false,
    gated_queries: false,
    interleaved_sections: false,
    tiled_value_heads: false,
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
const QWEN35: Arch =
    Arch { name: "qwen35", gated_queries: true, interleaved_sections: true, tiled_value_heads: true, ..BASE };
const LFM2: Arch = Arch { name: "lfm2", final_norm: "token_embd_norm", ..BASE };
const MAMBA: Arch = Arch { name: "mamba", rotated: Rotated::None, ..BASE };
const GRANITE: Arch = Arch { name: "granite", divided_logits: true, ..LLAMA };

/// All supported families. Mistral and Mixtral files use `llama`. `fixtures/README.md` lists the rows that are checked
/// against other implementations.
pub const ARCHS: &[Arch] = &[
    LLAMA,
    Arch { name: "qwen2", ..BASE },
    Arch { name: "qwen2vl", ..BASE },
    Arch { name: "qwen2moe", normalised_experts: false, ..BASE },
    Arch { name: "qwen3", ..BASE },
    Arch { name: "qwen3moe", ..BASE },
    QWEN35,
    Arch { name: "qwen35moe", ..QWEN35 },
    LFM2,
    Arch { name: "lfm2moe", ..LFM2 },
    MAMBA,
    Arch { name: "mamba2", ..MAMBA },
    Arch { name: "jamba", normalised_experts: false, ..MAMBA },
    Arch { name: "falcon-h1", ..BASE },
    Arch { name: "granitehybrid", rotated: Rotated::IfFinetuned, ..GRANITE },
    Arch { name: "qwen3next", gated_queries: true, ..BASE },
    GEMMA,
    Arch { name: "gemma2", window: 4096, window_pattern: 2, scaled_by_width: Some(46), ..GEMMA },
    GEMMA3,
    Arch { name: "gemma-embedding", bidirectional: true, scaled_by_width: None, ..GEMMA3 },
    Arch { name: "phi2", act: Activation::GeluTanh, ..LAYER_NORM },
    Arch { name: "phi3", ..BASE },
    Arch { name: "stablelm", ..LAYER_NORM },
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
    Arch { name: "nomic-bert", rope: Some(RopeStyle::NeoX), act: Activation::Silu, ..BERT },
];

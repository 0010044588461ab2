//! What differs between families, as data. Numbers come from the file's metadata, optional parts from the presence of
//! their tensors; a row says the rest.
//!
//! Norms are RMSNorm or LayerNorm by the key that gives their epsilon. Present or not are: norms before and after
//! attention and feed-forward, biases, norms of heads, the gate of the feed-forward, experts, an output matrix.
//! Attention and feed-forward read the same norm, side by side, where a layer has one norm before both.

use crate::kernels::elementwise::Activation;
use crate::kernels::norm::NormKind;
use crate::kernels::rope::RopeStyle;

/// A family: `general.architecture` in the file, and how it differs from the others.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Arch {
    /// The name in the file, which also prefixes the metadata keys.
    pub name: &'static str,
    /// Which elements of a head rotate together; `None` where positions are embedded.
    pub rope: Option<RopeStyle>,
    /// Which layers rotate.
    pub rotated: Rotated,
    /// How layers with a window rotate.
    pub local_rope: LocalRope,
    /// Tokens that a token sees in layers with a window, where the file does not say; 0 for all.
    pub window: usize,
    /// Of so many consecutive layers the last sees everything, where there is a window; 0 if all layers have it. The
    /// file's `attention.sliding_window_pattern` goes before.
    pub window_pattern: usize,
    /// Number of layers of the size whose scores are scaled by `1 / sqrt(n_embd / n_head)`: files do not say it.
    pub scaled_by_width: Option<usize>,
    /// The norm, where a file has the epsilons of both kinds.
    pub norm: NormKind,
    /// Activation of the feed-forward.
    pub act: Activation,
    /// Whether the weights of the chosen experts add up to 1. The file's `expert_weights_norm` goes before.
    pub normalised_experts: bool,
    /// Whether embeddings are multiplied by `sqrt(n_embd)` where the file gives no factor.
    pub embeddings_by_width: bool,
    /// Whether logits are divided by `logit_scale`, not multiplied.
    pub divided_logits: bool,
    /// Whether tokens see those after them too: an encoder, which embeds texts and continues none. The file's
    /// `attention.causal` goes before.
    pub bidirectional: bool,
    /// Whether norms come after the sums, `x = norm(x + attention(x))`, and none at the end.
    pub post_norm: bool,
}

/// Which layers rotate queries and keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rotated {
    /// All.
    All,
    /// All but the last of so many consecutive layers.
    AllBut(usize),
    /// Those with a window.
    Local,
}

/// How layers with a window rotate, next to those that see everything. The file's `rope.freq_base_swa` goes before.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum LocalRope {
    /// Alike.
    Same,
    /// From the same base, without scaling.
    Unscaled,
    /// From this base, without scaling.
    Base(f32),
}

const BASE: Arch = Arch {
    name: "",
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
const GRANITE: Arch = Arch { name: "granite", divided_logits: true, ..LLAMA };

/// Every family that loads. Mistral's and Mixtral's files name themselves `llama`. `fixtures/README.md` says which of
/// these rows are checked against other implementations.
pub const ARCHS: [Arch; 28] = [
    LLAMA,
    Arch { name: "qwen2", ..BASE },
    Arch { name: "qwen2vl", ..BASE },
    Arch { name: "qwen2moe", normalised_experts: false, ..BASE },
    Arch { name: "qwen3", ..BASE },
    Arch { name: "qwen3moe", ..BASE },
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

//! Kinds of layers.

/// What mixes the tokens of a sequence in a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum MixerKind {
    /// Attention over the keys and values of the tokens before.
    Attention,
    /// Multi-head latent attention: all heads share keys, which are values too.
    Latent,
    /// Attention over the keys in a window and compressed keys, which are values too (DeepSeek-V4).
    Compressed,
    /// A recurrent mixer, of the kind of [`RecurrentConfig`](super::RecurrentConfig).
    Recurrent,
    /// Attention and a recurrent mixer on the same input; their outputs are added.
    Both,
    /// A matrix instead of attention: tokens are not mixed (DeciLM).
    Linear,
    /// Nothing: the layer has a feed-forward only.
    None,
}

impl MixerKind {
    /// Whether the layer has keys and values.
    pub const fn has_attention(self) -> bool {
        matches!(self, MixerKind::Attention | MixerKind::Latent | MixerKind::Compressed | MixerKind::Both)
    }

    /// Whether the layer has a recurrent state.
    pub const fn is_recurrent(self) -> bool {
        matches!(self, MixerKind::Recurrent | MixerKind::Both)
    }
}

/// Longest convolution.
pub(super) const MAX_CONV: u32 = 64;

/// What the tensors of a file tell about a layer.
#[derive(Clone, Copy)]
pub(crate) struct LayerKind {
    pub(crate) mixer: MixerKind,
    pub(crate) has_ffn: bool,
}

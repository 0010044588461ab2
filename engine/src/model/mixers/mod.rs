//! What mixes the tokens of a sequence in a layer: attention, a recurrent mixer, both, or nothing. The tensors of a file
//! tell which, or its numbers of heads.

pub(crate) mod attention;
mod blocks;
pub(crate) mod compressed;
mod delta_net;
pub(crate) mod indexer;
mod kda;
mod kind;
pub(crate) mod latent;
mod lightning;
mod low_rank;
mod mamba;
mod rwkv;
mod rwkv6;
mod rwkv7;
mod short_conv;

use alloc::boxed::Box;
use alloc::format;
use alloc::vec::Vec;

pub use compressed::{CompressedConfig, CompressedWeights};
pub use delta_net::{DeltaNet, DeltaNetConfig};
pub use indexer::{IndexerConfig, IndexerWeights, Selection};
pub use kda::{Kda, KdaConfig};
pub(crate) use kind::LayerKind;
pub use kind::MixerKind;
pub use latent::{LatentHeads, LatentWeights};
pub use lightning::{Lightning, LightningConfig};
pub use low_rank::LowRank;
pub use mamba::{Mamba, MambaConfig};
pub use rwkv::{ChannelMix, RwkvConfig};
pub use rwkv6::Rwkv6;
pub use rwkv7::Rwkv7;
pub use short_conv::{ShortConv, ShortConvConfig};

use crate::error::LoadError;
use crate::gguf::Gguf;
use crate::kernels::panel::Matrix;
use crate::kernels::recurrent::StateMemory;
use crate::model::family::Family;
use crate::model::keys::Keys;
use crate::model::loader::LoadedTensors;
use crate::model::residual::orders::{ForwardPass, SubLayerRows};
use crate::model::roles::TensorRow;
use crate::model::scratch::StepScratch;

/// Kind and sizes of a model's recurrent mixers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RecurrentConfig {
    /// Gated delta net (Yang et al., arXiv:2412.06464).
    DeltaNet(DeltaNetConfig),
    /// Mamba or Mamba 2.
    Mamba(MambaConfig),
    /// Gated short convolution (LFM2).
    ShortConv(ShortConvConfig),
    /// Lightning attention.
    Lightning(LightningConfig),
    /// Kimi delta attention.
    Kda(KdaConfig),
    /// Time mix of RWKV 6.
    Rwkv6(RwkvConfig),
    /// Time mix of RWKV 7.
    Rwkv7(RwkvConfig),
}

/// Longest convolution.
const MAX_CONV: u32 = 64;

impl RecurrentConfig {
    /// Floats of the state of a layer.
    pub fn state_len(&self) -> usize {
        match self {
            RecurrentConfig::DeltaNet(c) => c.state_len(),
            RecurrentConfig::Mamba(c) => c.state_len(),
            RecurrentConfig::ShortConv(c) => c.state_len(),
            RecurrentConfig::Lightning(c) => c.state_len(),
            RecurrentConfig::Kda(c) => c.state_len(),
            RecurrentConfig::Rwkv6(c) | RecurrentConfig::Rwkv7(c) => c.state_len(),
        }
    }

    /// The tensors of a recurrent layer.
    pub(crate) const fn tensors(&self) -> &'static [TensorRow] {
        match self {
            RecurrentConfig::DeltaNet(_) => delta_net::TENSORS,
            RecurrentConfig::Mamba(_) => mamba::TENSORS,
            RecurrentConfig::ShortConv(_) => short_conv::TENSORS,
            RecurrentConfig::Lightning(_) => lightning::TENSORS,
            RecurrentConfig::Kda(_) => kda::TENSORS,
            RecurrentConfig::Rwkv6(_) => rwkv6::TENSORS,
            RecurrentConfig::Rwkv7(_) => rwkv7::TENSORS,
        }
    }
}

/// Weights of a recurrent mixer.
pub enum Recurrent {
    /// Gated delta net.
    DeltaNet(Box<DeltaNet>),
    /// Mamba or Mamba 2.
    Mamba(Box<Mamba>),
    /// Gated short convolution.
    ShortConv(Box<ShortConv>),
    /// Lightning attention.
    Lightning(Box<Lightning>),
    /// Kimi delta attention.
    Kda(Box<Kda>),
    /// Time mix of RWKV 6.
    Rwkv6(Box<Rwkv6>),
    /// Time mix of RWKV 7.
    Rwkv7(Box<Rwkv7>),
}

impl Recurrent {
    /// Takes the tensors of layer `i`.
    pub(crate) fn load(c: &RecurrentConfig, tensors: &mut LoadedTensors, i: usize) -> Result<Recurrent, LoadError> {
        Ok(match c {
            RecurrentConfig::DeltaNet(c) => Recurrent::DeltaNet(DeltaNet::load(c, tensors, i)?.into()),
            RecurrentConfig::Mamba(c) => Recurrent::Mamba(Mamba::load(c, tensors, i)?.into()),
            RecurrentConfig::ShortConv(_) => Recurrent::ShortConv(ShortConv::load(tensors, i)?.into()),
            RecurrentConfig::Lightning(c) => Recurrent::Lightning(Lightning::load(c, tensors, i)?.into()),
            RecurrentConfig::Kda(c) => Recurrent::Kda(Kda::load(c, tensors, i)?.into()),
            RecurrentConfig::Rwkv6(c) => Recurrent::Rwkv6(Rwkv6::load(c, tensors, i)?.into()),
            RecurrentConfig::Rwkv7(c) => Recurrent::Rwkv7(Rwkv7::load(c, tensors, i)?.into()),
        })
    }

    /// All matrices.
    pub(crate) fn matrices(&self) -> Vec<&Matrix> {
        match self {
            Recurrent::DeltaNet(m) => m.matrices(),
            Recurrent::Mamba(m) => m.matrices(),
            Recurrent::ShortConv(m) => m.matrices(),
            Recurrent::Lightning(m) => m.matrices(),
            Recurrent::Kda(m) => m.matrices(),
            Recurrent::Rwkv6(m) => m.matrices(),
            Recurrent::Rwkv7(m) => m.matrices(),
        }
    }

    /// The input projections, floats of a row of [`StepScratch::wide`], and columns of the output projection.
    pub(crate) fn widths(&self) -> (Vec<&Matrix>, usize, usize) {
        match self {
            Recurrent::DeltaNet(m) => m.widths(),
            Recurrent::Mamba(m) => m.widths(),
            Recurrent::ShortConv(m) => m.widths(),
            Recurrent::Lightning(m) => m.widths(),
            Recurrent::Kda(m) => m.widths(),
            Recurrent::Rwkv6(m) => m.widths(),
            Recurrent::Rwkv7(m) => m.widths(),
        }
    }

    /// Most inputs of the products of one call, each packed by itself.
    pub(crate) const fn n_inputs(&self) -> usize {
        match self {
            Recurrent::Rwkv6(_) => rwkv6::PARTS,
            Recurrent::Rwkv7(_) => rwkv7::PARTS,
            _ => 1,
        }
    }
}

/// A tensor of each kind of recurrent mixer that no other layer has, and whether `attn_output` belongs to the mixer.
const MARKERS: [(&str, bool); 4] = [
    ("ssm_conv1d.weight", false),
    ("shortconv.conv.weight", false),
    ("time_mix_key.weight", false),
    (kda::MARKER, true),
];

/// Tensors of which a layer with a feed-forward has one.
const FEED_FORWARDS: [&str; 4] =
    ["ffn_up.weight", "ffn_up_exps.weight", "ffn_gate_up_exps.weight", rwkv::CHANNEL_MIX_KEY];

fn has(shards: &[Gguf<'_>], name: &str) -> bool {
    shards.iter().any(|gguf| gguf.tensor(name).is_some())
}

/// The kinds of all layers: with recurrent layers by the presence of tensors. Without, layers lack attention or
/// feed-forward where the metadata state that they have no heads, or a width of 0; without KV heads they have a matrix
/// instead of attention.
pub(crate) fn layer_kinds(
    keys: &Keys<'_, '_>,
    n_layer: usize,
    shards: &[Gguf<'_>],
) -> Result<Vec<LayerKind>, LoadError> {
    let has = |i: usize, part: &str| has(shards, &format!("blk.{i}.{part}"));
    let marker = |i| match lightning::MARKERS.iter().all(|part| has(i, part)) {
        true => Some(true),
        false => MARKERS.iter().find(|(part, _)| has(i, part)).map(|(_, has_output)| *has_output),
    };
    let recurrent: Vec<Option<bool>> = (0..n_layer).map(marker).collect();
    let is_hybrid = recurrent.iter().any(Option::is_some);
    let sizes = |name: &str| match keys.is_array(name) && !is_hybrid {
        true => keys.per_layer_u32(name, n_layer),
        false => Ok(None),
    };
    let (heads, kv_heads) = (sizes("attention.head_count")?, sizes("attention.head_count_kv")?);
    let widths = sizes("feed_forward_length")?;
    let is_zero = |sizes: &Option<Vec<u32>>, i: usize| sizes.as_ref().is_some_and(|sizes| sizes[i] == 0);
    let kind = |(i, recurrent): (usize, Option<bool>)| {
        let has_attention = if is_hybrid { has(i, "attn_output.weight") } else { !is_zero(&heads, i) };
        let mixer = match (recurrent, has_attention) {
            (Some(false), true) => MixerKind::Both,
            (Some(_), _) => MixerKind::Recurrent,
            (None, true) if is_zero(&kv_heads, i) => MixerKind::Linear,
            (None, true) if has(i, "attn_kv_a_mqa.weight") => MixerKind::Latent,
            (None, true) if has(i, "attn_kv.weight") => MixerKind::Compressed,
            (None, true) => MixerKind::Attention,
            (None, false) => MixerKind::None,
        };
        let has_ffn = match is_hybrid {
            true => FEED_FORWARDS.iter().any(|part| has(i, part)),
            false => !is_zero(&widths, i),
        };
        LayerKind { mixer, has_ffn }
    };
    Ok(recurrent.into_iter().enumerate().map(kind).collect())
}

/// Reads the configuration of the recurrent layers, if there are any.
pub(crate) fn read(
    keys: &Keys<'_, '_>,
    family: &Family,
    (n_embd, norm_eps): (usize, f32),
    kinds: &[LayerKind],
    shards: &[Gguf<'_>],
) -> Result<Option<RecurrentConfig>, LoadError> {
    let Some(i) = kinds.iter().position(|l| l.mixer.is_recurrent()) else { return Ok(None) };
    let has = |part: &str| has(shards, &format!("blk.{i}.{part}"));
    let config = if has("shortconv.conv.weight") {
        RecurrentConfig::ShortConv(ShortConvConfig::read(keys, n_embd)?)
    } else if lightning::MARKERS.iter().all(|part| has(part)) {
        RecurrentConfig::Lightning(LightningConfig::read(keys, n_embd, kinds.len())?)
    } else if has(kda::MARKER) {
        RecurrentConfig::Kda(KdaConfig::read(keys, norm_eps)?)
    } else if has("time_mix_key.weight") {
        let c = RwkvConfig::read(keys, n_embd, has(rwkv::CHANNEL_MIX_KEY))?;
        if has("time_mix_first.weight") { RecurrentConfig::Rwkv6(c) } else { RecurrentConfig::Rwkv7(c) }
    } else if has("ssm_beta.weight") || has("ssm_ba.weight") {
        RecurrentConfig::DeltaNet(DeltaNetConfig::read(keys, family.tiled_value_heads, norm_eps)?)
    } else {
        RecurrentConfig::Mamba(MambaConfig::read(keys, !has("ssm_x.weight"))?)
    };
    Ok(Some(config))
}

impl ForwardPass<'_, '_> {
    /// `y = mixer(x)` of layer `i`. Reads and writes the states of the sequences.
    pub(crate) fn recurrent(
        &mut self,
        i: usize,
        mixer: &Recurrent,
        rows: SubLayerRows<'_>,
        states: &mut StateMemory,
        step: &mut StepScratch,
    ) {
        match mixer {
            Recurrent::DeltaNet(m) => self.delta_net(i, m, rows, states, step),
            Recurrent::Mamba(m) => self.mamba(i, m, rows, states, step),
            Recurrent::ShortConv(m) => self.short_conv(i, m, rows, states, step),
            Recurrent::Lightning(m) => self.lightning(i, m, rows, states, step),
            Recurrent::Kda(m) => self.kda(i, m, rows, states, step),
            Recurrent::Rwkv6(m) => self.rwkv6(i, m, rows, states, step),
            Recurrent::Rwkv7(m) => self.rwkv7(i, m, rows, states, step),
        }
    }
}

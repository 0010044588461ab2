//! What the tensors of a file tell about its layers.

use alloc::format;
use alloc::vec::Vec;

use crate::error::LoadError;
use crate::gguf::Gguf;
use crate::model::family::Family;
use crate::model::ffn::channel_mix::KEYS as CHANNEL_MIX;
use crate::model::ffn::dense::UP;
use crate::model::ffn::experts::{FUSED_EXPERTS, UP_EXPERTS};
use crate::model::heads::mtp;
use crate::model::keys::Keys;
use crate::model::mixers::attention::weights::OUTPUT;
use crate::model::mixers::delta_net::{self, DeltaNetConfig};
use crate::model::mixers::kda::{self, KdaConfig};
use crate::model::mixers::kind::{LayerKind, MixerKind};
use crate::model::mixers::lightning::{self, LightningConfig};
use crate::model::mixers::mamba::{self, MambaConfig};
use crate::model::mixers::recurrent::RecurrentConfig;
use crate::model::mixers::rwkv::RwkvConfig;
use crate::model::mixers::short_conv::{self, ShortConvConfig};
use crate::model::mixers::{compressed, latent, rwkv6, rwkv7};
use crate::model::tensors::Name;

/// A tensor of each kind of recurrent mixer that no other layer has, and whether `attn_output` belongs to the mixer.
const MARKERS: [(Name, bool); 4] =
    [(mamba::CONV.weight(), false), (short_conv::CONV, false), (rwkv7::KEY, false), (Name::whole(kda::MARKER), true)];

/// Tensors of which a layer with a feed-forward has one.
const FEED_FORWARDS: [Name; 4] = [UP.weight(), UP_EXPERTS, FUSED_EXPERTS, CHANNEL_MIX];

fn has(shards: &[Gguf<'_>], layer: usize, name: Name) -> bool {
    let name = format!("blk.{layer}.{}", name.text());
    shards.iter().any(|gguf| gguf.tensor(&name).is_some())
}

/// Whether layer `n_layer` predicts further tokens, where the metadata says so. Files of models with compressed keys have the key
/// without that layer.
pub(crate) fn has_mtp(kinds: &[LayerKind], shards: &[Gguf<'_>], n_layer: usize) -> bool {
    let is_compressed = kinds.iter().any(|kind| kind.mixer == MixerKind::Compressed);
    !is_compressed || has(shards, n_layer, mtp::JOIN.weight())
}

/// The kinds of all layers: with recurrent layers by the presence of tensors. Without, layers lack attention or
/// feed-forward where the metadata state that they have no heads, or a width of 0; without KV heads they have a matrix
/// instead of attention.
pub(crate) fn layer_kinds(
    keys: &Keys<'_, '_>,
    n_layer: usize,
    shards: &[Gguf<'_>],
) -> Result<Vec<LayerKind>, LoadError> {
    let has = |i: usize, name: Name| has(shards, i, name);
    let marker = |i| match lightning::MARKERS.iter().all(|name| has(i, *name)) {
        true => Some(true),
        false => MARKERS.iter().find(|(name, _)| has(i, *name)).map(|(_, has_output)| *has_output),
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
        let has_attention = if is_hybrid { has(i, OUTPUT.weight()) } else { !is_zero(&heads, i) };
        let mixer = match (recurrent, has_attention) {
            (Some(false), true) => MixerKind::Both,
            (Some(_), _) => MixerKind::Recurrent,
            (None, true) if is_zero(&kv_heads, i) => MixerKind::Linear,
            (None, true) if has(i, latent::MARKER) => MixerKind::Latent,
            (None, true) if has(i, compressed::MARKER) => MixerKind::Compressed,
            (None, true) => MixerKind::Attention,
            (None, false) => MixerKind::None,
        };
        let has_ffn = match is_hybrid {
            true => FEED_FORWARDS.iter().any(|name| has(i, *name)),
            false => !is_zero(&widths, i),
        };
        LayerKind { mixer, has_ffn }
    };
    Ok(recurrent.into_iter().enumerate().map(kind).collect())
}

/// Reads the configuration of the recurrent layers, if there are any.
pub(crate) fn recurrent(
    keys: &Keys<'_, '_>,
    family: &Family,
    (n_embd, norm_eps): (usize, f32),
    kinds: &[LayerKind],
    shards: &[Gguf<'_>],
) -> Result<Option<RecurrentConfig>, LoadError> {
    let Some(i) = kinds.iter().position(|l| l.mixer.is_recurrent()) else { return Ok(None) };
    let has = |name: Name| has(shards, i, name);
    let config = if has(short_conv::CONV) {
        RecurrentConfig::ShortConv(ShortConvConfig::read(keys, n_embd)?)
    } else if lightning::MARKERS.iter().all(|name| has(*name)) {
        RecurrentConfig::Lightning(LightningConfig::read(keys, n_embd, kinds.len())?)
    } else if has(Name::whole(kda::MARKER)) {
        RecurrentConfig::Kda(KdaConfig::read(keys, norm_eps)?)
    } else if has(rwkv7::KEY) {
        let c = RwkvConfig::read(keys, n_embd, has(CHANNEL_MIX))?;
        if has(rwkv6::FIRST) { RecurrentConfig::Rwkv6(c) } else { RecurrentConfig::Rwkv7(c) }
    } else if delta_net::MARKERS.iter().any(|name| has(*name)) {
        RecurrentConfig::DeltaNet(DeltaNetConfig::read(keys, family.tiled_value_heads, norm_eps)?)
    } else {
        RecurrentConfig::Mamba(MambaConfig::read(keys, !has(mamba::STEPS.weight()))?)
    };
    Ok(Some(config))
}

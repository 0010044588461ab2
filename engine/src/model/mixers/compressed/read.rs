//! Attention with compressed keys: what the metadata tell about it.

use alloc::format;
use alloc::vec::Vec;

use super::config::CompressedConfig;
use crate::error::LoadError;
use crate::kernels::attention::{AttentionWindow, Compressor, MAX_GROUP, MAX_HEAD_DIM};
use crate::math::sqrt;
use crate::model::family::Family;
use crate::model::keys::{Keys, MAX_CONTEXT, MAX_WIDTH};
use crate::model::mixers::attention::layers::LayerPart;
use crate::model::mixers::attention::rotary::{RopeConfig, Scaling};
use crate::model::mixers::kind::MixerKind;

/// The ratio of layers with overlapping blocks and an indexer, and that of the others.
const RATIOS: [u32; 2] = [4, 128];

/// Reads the sizes, the ratios of the layers and their RoPE variants: of layers without blocks, and of those with.
pub(crate) fn read(
    keys: &Keys<'_, '_>,
    family: &Family,
    n_ctx_train: usize,
    layers: &mut [LayerPart<'_>],
    ropes: &mut Vec<RopeConfig>,
) -> Result<Option<CompressedConfig>, LoadError> {
    let Some(heads) = layers.iter().find(|l| l.mixer == MixerKind::Compressed).map(|l| l.attention.heads) else {
        return Ok(None);
    };
    if heads.n_head_kv != 1 {
        return Err(keys.wrong("attention.head_count_kv", heads.n_head_kv, "1"));
    }
    if heads.key_dim != heads.value_dim {
        let expected = format!("{}, the value of key_length", heads.key_dim);
        return Err(keys.wrong("attention.value_length", heads.value_dim, expected));
    }
    let index_dim = keys.size("attention.indexer.key_length", 1..=MAX_HEAD_DIM as u32)?;
    let name = "rope.dimension_count";
    let n_rot = keys.u32(name)?.or(Some(heads.key_dim as u32));
    let n_rot = keys.in_range(name, n_rot, 2..=heads.key_dim.min(index_dim) as u32)?;
    if !n_rot.is_multiple_of(2) {
        return Err(keys.wrong(name, n_rot, "an even number"));
    }
    let groups = keys.size("attention.output_group_count", 1..=heads.n_head as u32)?;
    if !heads.n_head.is_multiple_of(groups) {
        let expected = format!("a divisor of head_count, {}", heads.n_head);
        return Err(keys.wrong("attention.output_group_count", groups, expected));
    }
    let window = keys.size("attention.sliding_window", 1..=MAX_CONTEXT)?;
    let name = "attention.compress_ratios";
    let ratios = keys.u32_array(name)?.unwrap_or_default();
    if ratios.len() < layers.len() {
        let found = format!("an array of {} elements", ratios.len());
        return Err(keys.wrong(name, found, format!("{} numbers, one per layer", layers.len())));
    }
    let bases =
        [keys.above("rope.freq_base", 1.0, 10_000.0)?, keys.above("attention.compress_rope_freq_base", 1.0, 0.0)?];
    // rotated vectors keep their magnitude
    let scaling = Scaling { attn_factor: 1.0, magnitude: 1.0, ..Scaling::read(keys, n_ctx_train, family)? };
    let variants = [(bases[0], None), (bases[1], Some(scaling))];
    let variant = |(base, scaling)| RopeConfig { base, scaling, n_rot, unrotated: Vec::new() };
    *ropes = variants.map(variant).into();
    for (LayerPart { attention: layer, .. }, ratio) in layers.iter_mut().zip(ratios) {
        layer.compressor = match ratio {
            0 => None,
            ratio if RATIOS.contains(&ratio) => {
                Some(Compressor { ratio: ratio as usize, overlaps: ratio == RATIOS[0] })
            }
            ratio => return Err(keys.wrong(name, ratio, format!("0, {} or {}", RATIOS[0], RATIOS[1]))),
        };
        layer.rope = Some(usize::from(layer.compressor.is_some()));
        layer.window = AttentionWindow { left: window - 1, right: 0, chunk: usize::MAX };
        layer.scale = 1.0 / sqrt(heads.key_dim as f32);
    }
    Ok(Some(CompressedConfig {
        q_rank: keys.size("attention.q_lora_rank", 1..=MAX_WIDTH)?,
        n_rot,
        groups,
        rank: keys.size("attention.output_lora_rank", 1..=MAX_WIDTH / groups as u32)?,
        index_heads: keys.size("attention.indexer.head_count", 1..=MAX_GROUP as u32)?,
        index_dim,
        top_k: keys.size("attention.indexer.top_k", 1..=MAX_CONTEXT)?,
    }))
}

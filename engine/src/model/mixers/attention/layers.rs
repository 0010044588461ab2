//! Attention of the layers: windows, RoPE variants, heads, and places in KV pages.

use alloc::format;
use alloc::vec;
use alloc::vec::Vec;

use super::config::LayerAttention;
use super::heads::{HeadConfig, heads, pattern};
use super::rope::rotations;
use super::rotary::RopeConfig;
use crate::error::LoadError;
use crate::kernels::attention::AttentionWindow;
use crate::math::sqrt;
use crate::model::family::{Family, Rotated, ScoreScale};
use crate::model::keys::Keys;
use crate::model::mixers::indexer::config::Selection;
use crate::model::mixers::kind::{LayerKind, MixerKind};

/// Reads the RoPE variants of a model of width `n_embd`, and the attention of its layers.
pub(crate) fn read(
    keys: &Keys<'_, '_>,
    family: &Family,
    kinds: &[LayerKind],
    (n_embd, n_ctx_train): (usize, usize),
    causal: bool,
) -> Result<(Vec<RopeConfig>, Vec<LayerAttention>), LoadError> {
    let n_layer = kinds.len();
    let (window, local) = match keys.u32("attention.sliding_window")? {
        // without a window the pattern is unused and not checked
        None | Some(0) => (usize::MAX, vec![false; n_layer]),
        Some(window) => (window as usize, pattern(keys, family, n_layer)?),
    };
    let rope_pattern = match keys.has("attention.rope_pattern") {
        true => Some(keys.pattern("attention.rope_pattern", n_layer, 0)?),
        false => None,
    };
    let any_local = local.contains(&true);
    let heads = heads(keys, n_embd, kinds, &local)?;
    if let Some(h) = heads.iter().find(|h| family.gated_queries && h.key_dim != h.value_dim) {
        let expected = format!("{}, the value of key_length", h.key_dim);
        return Err(keys.wrong("attention.value_length", h.value_dim, expected));
    }
    let key_dim = |of_local: bool| {
        (0..n_layer).find(|i| local[*i] == of_local && kinds[*i].mixer.has_attention()).map(|i| heads[i].rotated())
    };
    let (global, near) = match family.rope {
        Some(_) if family.rotated != Rotated::None => rotations(keys, family, n_ctx_train, [false, true].map(key_dim))?,
        _ => Default::default(),
    };
    let scale = keys.optional("attention.scale")?.or(keys.optional("attention.output_scale")?);
    let mut ropes = Vec::new();
    let mut layers = Vec::with_capacity(n_layer);
    for (i, local) in local.iter().copied().enumerate() {
        let rotates = match family.rotated {
            _ if family.rope.is_none() => false,
            _ if rope_pattern.is_some() => rope_pattern.as_ref().is_some_and(|pattern| pattern[i]),
            Rotated::All => true,
            Rotated::AllBut(n) => (i + 1) % n != 0,
            Rotated::Local => local,
            Rotated::LocalIfAny => local || !any_local,
            Rotated::None => false,
        };
        let rope = if local { &near } else { &global };
        let known = ropes.iter().position(|r| r == rope);
        if rotates && known.is_none() {
            ropes.push(rope.clone());
        }
        let rope = rotates.then(|| known.unwrap_or(ropes.len() - 1));
        let before = match (local, causal) {
            (false, _) => usize::MAX,
            (true, true) => window - 1,
            (true, false) => window / 2,
        };
        layers.push(LayerAttention {
            heads: heads[i],
            window: AttentionWindow { left: before, right: if causal { 0 } else { before }, chunk: usize::MAX },
            rope,
            scale: scale.unwrap_or_else(|| {
                let scaling = rope.and_then(|rope| ropes[rope].scaling);
                score_scale(family, &heads[i]) * scaling.map_or(1.0, |s| s.score_factor)
            }),
            selection: Selection::All,
            index_ratio: 1,
            compressor: None,
            kv_layer: 0,
            owns_kv: true,
        });
    }
    Ok((ropes, layers))
}

/// Attention of a layer, and what else its configuration depends on.
pub(crate) struct LayerPart<'l> {
    pub(crate) block: usize,
    pub(crate) mixer: MixerKind,
    pub(crate) attention: &'l mut LayerAttention,
}

/// Gives each layer with attention its keys and values in KV pages, of which an indexer has `index_layers`. The last layers may
/// read keys and values of the last layer before them that has the same kind of window.
pub(crate) fn place(keys: &Keys<'_, '_>, layers: &mut [LayerPart<'_>], index_layers: usize) -> Result<(), LoadError> {
    let n = layers.len();
    let name = "attention.shared_kv_layers";
    let shared = keys.u32(name)?.map(|shared| keys.in_range(name, Some(shared), 0..=n as u32 - 1)).transpose()?;
    let owners = n - shared.unwrap_or(0);
    let mut kv_layer = 0;
    for i in 0..n {
        let (before, rest) = layers.split_at_mut(i);
        let LayerPart { mixer, attention: layer, .. } = &mut rest[0];
        if !mixer.has_attention() {
            continue;
        }
        if i >= owners {
            let mut sources = before[..owners].iter().filter(|l| l.mixer.has_attention()).map(|l| &*l.attention);
            let source = sources.rfind(|l| l.window == layer.window);
            let Some(source) = source.filter(|l| l.heads.kv_heads() == layer.heads.kv_heads()) else {
                let found = format!("layer {i}, whose window and KV heads no layer before layer {owners} has");
                return Err(keys.wrong(name, found, "a layer with the same window and KV heads"));
            };
            (layer.kv_layer, layer.owns_kv) = (source.kv_layer, false);
            continue;
        }
        layer.kv_layer = kv_layer;
        kv_layer += layer.kv_layers();
        if let Selection::Own { kv_layer: index } = &mut layer.selection {
            *index = kv_layer;
            kv_layer += index_layers;
        }
    }
    Ok(())
}

/// Removes RoPE from the layers that do not keep it, and the variants that none has.
pub(crate) fn rotate_only<'l>(
    ropes: &mut Vec<RopeConfig>,
    layers: impl Iterator<Item = (&'l mut LayerAttention, bool)>,
) {
    let mut used = Vec::new();
    for (layer, keeps) in layers {
        let Some(rope) = layer.rope.filter(|_| keeps) else {
            layer.rope = None;
            continue;
        };
        let known = used.iter().position(|known| *known == rope);
        layer.rope = Some(known.unwrap_or(used.len()));
        if known.is_none() {
            used.push(rope);
        }
    }
    *ropes = used.into_iter().map(|i| ropes[i].clone()).collect();
}

/// Factor of attention scores if the file has none.
fn score_scale(family: &Family, heads: &HeadConfig) -> f32 {
    let dim = heads.latent.map_or(heads.key_dim, |latent| latent.query());
    match family.score_scale {
        ScoreScale::Root => 1.0 / sqrt(dim as f32),
        ScoreScale::Inverse => 1.0 / heads.key_dim as f32,
        ScoreScale::One => 1.0,
    }
}

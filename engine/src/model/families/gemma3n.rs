//! Gemma 3n: several residual streams (AltUp), embeddings of each layer, sparse activations in the first layers, and later layers
//! that read the keys and values of earlier ones.
//!
//! Source: llama.cpp, architecture `gemma3n`; `Gemma3nForCausalLM`.

use alloc::format;

use super::Entry;
use super::gemma::GEMMA;
use crate::error::LoadError;
use crate::model::config::Config;
use crate::model::family::{Family, LocalRope, ScoreScale};
use crate::model::keys::Keys;
use crate::model::residual::altup;

pub(super) const GEMMA3N: Entry = Entry::plain(Family {
    name: "gemma3n",
    window_pattern: 5,
    local_rope: LocalRope::Base(10_000.0),
    score_scale: ScoreScale::One,
    ..GEMMA
})
.prepared(prepare)
.composed(compose);

/// Residual streams.
const STREAMS: u32 = 4;
/// Width of a layer's embeddings.
const LAYER_EMBEDDINGS: u32 = 256;
/// Layers with keys and values of their own.
const KV_LAYERS: u32 = 20;
/// Leading layers with sparse activations, and the cutoff: the quantile of 0.95 of a normal distribution.
const SPARSE_LAYERS: usize = 10;
const SPARSITY: f32 = 1.644_853_5;

/// What older files do not state.
fn prepare(keys: &mut Keys<'_, '_>, _: &mut Family) -> Result<(), LoadError> {
    let n_layer = keys.u32("block_count")?.unwrap_or(0);
    for (name, default) in [
        ("embedding_length_per_layer_input", LAYER_EMBEDDINGS),
        ("altup.num_inputs", STREAMS),
        ("attention.shared_kv_layers", n_layer.saturating_sub(KV_LAYERS)),
    ] {
        if keys.u32(name)?.is_none() {
            keys.set_u32(name, default);
        }
    }
    Ok(())
}

fn compose(keys: &Keys<'_, '_>, c: &mut Config) -> Result<(), LoadError> {
    c.attention.plain_value_norm = true;
    c.residual.n_altup = altup::read(keys)?;
    let (name, n_layer) = ("activation_sparsity_scale", c.layers.len());
    let stated = keys.f32_array(name)?;
    if let Some(values) = &stated
        && (values.len() != n_layer || values.iter().any(|v| v.is_nan() || *v == f32::INFINITY))
    {
        return Err(keys.wrong(name, format!("{} values", values.len()), format!("{n_layer} numbers")));
    }
    for (i, layer) in c.layers.iter_mut().enumerate() {
        let default = if i < SPARSE_LAYERS { SPARSITY } else { 0.0 };
        // layers without have 0 or -infinity in files
        layer.ffn.sparsity = stated.as_ref().map_or(default, |values| values[i]).max(0.0);
    }
    Ok(())
}

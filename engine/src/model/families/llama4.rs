//! Llama 4: chunks of attention in layers with RoPE, a temperature in the others, heads normalised without weights, and experts
//! whose weight multiplies their input.
//!
//! Source: llama.cpp, architecture `llama4`; `Llama4ForCausalLM`.

use super::Entry;
use super::base::LLAMA;
use crate::error::LoadError;
use crate::model::config::Config;
use crate::model::family::{Family, Gating, Rotated};
use crate::model::keys::Keys;
use crate::model::mixers::attention::heads::pattern;

pub(super) const LLAMA4: Entry = Entry::plain(Family {
    name: "llama4",
    rotated: Rotated::AllBut(4),
    window_pattern: 4,
    gating: Gating::Sigmoid,
    normalised_experts: false,
    shared_as_expert: true,
    rope_before_norm: true,
    ..LLAMA
})
.prepared(prepare)
.composed(compose);

/// Tokens of the chunks that local layers attend to, each token to those of its own chunk.
const CHUNK: usize = 8192;

fn prepare(keys: &mut Keys<'_, '_>, _: &mut Family) -> Result<(), LoadError> {
    if keys.optional("attention.temperature_scale")?.is_none() {
        keys.set_f32("attention.temperature_scale", 0.1);
    }
    if keys.u32("attention.temperature_length")?.is_none() {
        keys.set_u32("attention.temperature_length", 8192);
    }
    Ok(())
}

fn compose(keys: &Keys<'_, '_>, c: &mut Config) -> Result<(), LoadError> {
    // a window of 0 turns chunks off
    if keys.u32("attention.sliding_window")? != Some(0) {
        let is_chunked = pattern(keys, &c.arch, c.layers.len())?;
        for (layer, _) in c.layers.iter_mut().zip(is_chunked).filter(|(_, is_chunked)| *is_chunked) {
            layer.attention.window.chunk = CHUNK;
        }
    }
    if let Some(temperature) = &mut c.attention.temperature {
        (temperature.offset, temperature.with_rope) = (1, false);
    }
    // the model with 128 experts has no norms of heads
    c.attention.plain_head_norms = c.ffn.experts.is_none_or(|experts| experts.n != 128);
    if let Some(experts) = &mut c.ffn.experts {
        experts.weighted_inputs = true;
    }
    Ok(())
}

//! MiniCPM 3, whose files do not state its factors.
//!
//! Source: llama.cpp, architecture `minicpm3`; `MiniCPM3ForCausalLM`.

use super::Entry;
use super::base::BASE;
use crate::error::LoadError;
use crate::math::sqrt;
use crate::model::family::Family;
use crate::model::keys::Keys;

pub(super) const MINICPM3: Entry = Entry::plain(Family { name: "minicpm3", ..BASE }).prepared(prepare);

/// Factors on embeddings; on the outputs of sub-layers, times the square root of the number of layers; on logits, times the
/// width of the model.
const EMBEDDING: f32 = 12.0;
const DEPTH: f32 = 1.4;
const WIDTH: f32 = 256.0;

fn prepare(keys: &mut Keys<'_, '_>, _: &mut Family) -> Result<(), LoadError> {
    let n_blocks = keys.u32("block_count")?.unwrap_or(0);
    let n_layer = n_blocks.saturating_sub(keys.u32("nextn_predict_layers")?.unwrap_or(0));
    let n_embd = keys.u32("embedding_length")?.unwrap_or(0);
    for (name, value) in [
        ("embedding_scale", EMBEDDING),
        ("residual_scale", DEPTH / sqrt(n_layer.max(1) as f32)),
        ("logit_scale", WIDTH / n_embd.max(1) as f32),
    ] {
        if keys.optional(name)?.is_none() {
            keys.set_f32(name, value);
        }
    }
    Ok(())
}

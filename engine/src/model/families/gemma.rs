//! Gemma, Gemma 2 and Gemma 3. The largest models scale attention scores by the width of the model per head.
//!
//! Sources: arXiv:2408.00118, arXiv:2503.19786; llama.cpp, architectures `gemma2`, `gemma3`.

use super::Entry;
use super::base::BASE;
use crate::error::LoadError;
use crate::kernels::elementwise::Activation;
use crate::math::sqrt;
use crate::model::family::{Family, LocalRope};
use crate::model::keys::Keys;

pub(super) const GEMMA: Family = Family { name: "gemma", act: Activation::GeluTanh, embeddings_by_width: true, ..BASE };
pub(super) const GEMMA2: Entry =
    Entry::plain(Family { name: "gemma2", window_pattern: 2, ..GEMMA }).prepared(prepare_2);
const LOCAL: Family = Family { name: "gemma3", window_pattern: 6, local_rope: LocalRope::Base(10_000.0), ..GEMMA };
pub(super) const GEMMA3: Entry = Entry::plain(LOCAL).prepared(prepare_3);
pub(super) const GEMMA_EMBEDDING: Family = Family { name: "gemma-embedding", bidirectional: true, ..LOCAL };

fn prepare_2(keys: &mut Keys<'_, '_>, _: &mut Family) -> Result<(), LoadError> {
    if keys.u32("attention.sliding_window")?.is_none() {
        keys.set_u32("attention.sliding_window", 4096);
    }
    scale_by_width(keys, 46)
}

fn prepare_3(keys: &mut Keys<'_, '_>, _: &mut Family) -> Result<(), LoadError> {
    scale_by_width(keys, 62)
}

/// Scores of the model of `n_layer` layers are scaled by `1 / sqrt(n_embd / n_head)`; files do not state it.
fn scale_by_width(keys: &mut Keys<'_, '_>, n_layer: u32) -> Result<(), LoadError> {
    let is_stated = keys.optional("attention.scale")?.or(keys.optional("attention.output_scale")?).is_some();
    if is_stated || keys.u32("block_count")? != Some(n_layer) {
        return Ok(());
    }
    if let (Some(n_embd), Some(n_head @ 1..)) = (keys.u32("embedding_length")?, keys.u32("attention.head_count")?) {
        keys.set_f32("attention.scale", 1.0 / sqrt((n_embd / n_head) as f32));
    }
    Ok(())
}

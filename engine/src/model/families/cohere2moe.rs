//! Cohere with experts: RoPE in local and leading dense layers, and a mean of routed and shared experts.
//!
//! Source: llama.cpp, architecture `cohere2moe`.

use super::Entry;
use super::base::LLAMA;
use crate::error::LoadError;
use crate::model::config::Config;
use crate::model::family::{Family, Gating, Mtp};
use crate::model::keys::Keys;

pub(super) const COHERE2MOE: Entry = Entry::plain(Family {
    name: "cohere2moe",
    mtp: Mtp::Normed,
    gating: Gating::Sigmoid,
    normalised_experts: false,
    ..LLAMA
})
.composed(compose);

fn compose(keys: &Keys<'_, '_>, c: &mut Config) -> Result<(), LoadError> {
    let n_dense = keys.u32("leading_dense_block_count")?.unwrap_or(0) as usize;
    c.rotate_only(keys, |i, layer| layer.attention.is_local() || i < n_dense);
    if let Some(experts) = &mut c.ffn.experts {
        experts.shared_factor = 0.5;
    }
    Ok(())
}

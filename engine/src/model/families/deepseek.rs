//! DeepSeek-V2 and those that follow it: latent attention, experts in groups; sparse attention by indexers (V3.2), compressed
//! keys and hyper-connections (V4).
//!
//! Sources: arXiv:2405.04434, arXiv:2412.19437; llama.cpp, architectures `deepseek2`, `deepseek32`, `deepseek4`.

use super::Entry;
use super::base::{BASE, RAW_EXPERTS};
use crate::error::LoadError;
use crate::kernels::rope::RopeStyle;
use crate::model::config::Config;
use crate::model::family::{Family, Gating, IndexerKind, Mtp, Swiglu, YarnLog};
use crate::model::keys::Keys;

/// What families with latent attention have in common.
pub(super) const LATENT: Family =
    Family { name: "", mtp: Mtp::Normed, rope: Some(RopeStyle::Interleaved), yarn_log: YarnLog::Scores, ..RAW_EXPERTS };

pub(super) const DEEPSEEK2: Entry = Entry::plain(Family { name: "deepseek2", ..LATENT }).prepared(prepare_2);

pub(super) const DEEPSEEK32: Family = Family {
    name: "deepseek32",
    indexer: Some(IndexerKind::lightning(RopeStyle::NeoX)),
    yarn_log: YarnLog::ScoresAndMagnitude,
    ..LATENT
};

pub(super) const DEEPSEEK4: Entry = Entry::plain(Family {
    name: "deepseek4",
    rope: Some(RopeStyle::Interleaved),
    gating: Gating::SqrtSoftplus,
    swiglu: Swiglu::Limited(0.0),
    required: &["expert_gating_func", "swiglu_clamp_exp", "hash_layer_count", "hyper_connection.sinkhorn_iterations"],
    ..BASE
})
.composed(compose_4);

/// GLM 4.7 Lite, of 47 layers, or 48 with one that predicts further tokens, whose files do not state the gating function.
fn prepare_2(keys: &mut Keys<'_, '_>, family: &mut Family) -> Result<(), LoadError> {
    if [47, 48].contains(&keys.u32("block_count")?.unwrap_or(0)) {
        family.gating = Gating::Sigmoid;
    }
    Ok(())
}

fn compose_4(keys: &Keys<'_, '_>, c: &mut Config) -> Result<(), LoadError> {
    // for images
    c.names.ignored = &["exp_probs_b_vl."];
    c.limit_dense(keys);
    Ok(())
}

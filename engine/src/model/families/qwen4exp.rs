//! Qwen4-Exp: delta nets whose outputs have sigmoid gates, sparse attention over means of keys, hyper-connections with a gate per
//! element, and embeddings of n-grams.
//!
//! Source: llama.cpp, architecture `qwen4exp`.

use super::Entry;
use super::base::QWEN35;
use crate::error::LoadError;
use crate::kernels::elementwise::Activation;
use crate::model::config::Config;
use crate::model::embeddings::ngrams::NgramConfig;
use crate::model::family::{Family, IndexerKind, Mtp};
use crate::model::keys::Keys;
use crate::model::mixers::RecurrentConfig;

pub(super) const QWEN4EXP: Entry = Entry::plain(Family {
    name: "qwen4exp",
    indexer: Some(IndexerKind::Means),
    mtp: Mtp::Unsupported,
    required: &["hyper_connection.count", "hyper_connection.low_rank", "expert_feed_forward_length"],
    ..QWEN35
})
.composed(compose);

fn compose(keys: &Keys<'_, '_>, c: &mut Config) -> Result<(), LoadError> {
    if let Some(RecurrentConfig::DeltaNet(delta_net)) = &mut c.recurrent {
        delta_net.gate = Activation::Sigmoid;
    }
    // `embedding_length_per_layer_input` is the width of embeddings of n-grams
    c.embedding.per_layer = 0;
    let is_recurrent: alloc::vec::Vec<bool> = c.layers.iter().map(|layer| layer.mixer.is_recurrent()).collect();
    let streams = c.residual.hyper.map_or(1, |hyper| hyper.n) * c.n_embd;
    c.embedding.ngrams = NgramConfig::read(keys, &is_recurrent[..c.layers.len() - c.n_nextn], (c.n_embd, streams))?;
    Ok(())
}

//! Sizes of indexers.

use core::iter;

use crate::kernels::attention::{Compressor, KvHeads, SelectionRule};
use crate::model::family::IndexerKind;

/// Sizes of the indexers of a model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct IndexerConfig {
    /// What the heads select, and the pairs that RoPE rotates.
    pub kind: IndexerKind,
    /// Number of query heads.
    pub n_head: usize,
    /// Elements of a query or key.
    pub key_dim: usize,
    /// How many positions are selected.
    pub rule: SelectionRule,
    /// Epsilon of the LayerNorm of keys.
    pub norm_eps: f32,
    /// Blocks of positions that have one key, made of theirs.
    pub pool: Option<Compressor>,
    /// Index in [`AttentionConfig::ropes`](super::super::attention::AttentionConfig::ropes) of the rotation of means, which has no sections.
    pub(super) mean_rope: usize,
}

impl IndexerConfig {
    /// What a layer has in KV pages: keys; and what pooled keys are made of.
    pub(crate) fn kv_heads(self) -> impl Iterator<Item = KvHeads> {
        let pool = self.pool.map(|pool| KvHeads::exact(pool.heads(), self.key_dim));
        let means = (self.kind == IndexerKind::Means).then(|| KvHeads::exact(1, self.key_dim));
        iter::once(KvHeads::separate(1, self.key_dim, 0)).chain(pool).chain(means)
    }

    /// How many positions a layer selects. Of blocks of `shared` positions with one key, `top_k` positions and as many as may
    /// follow the last block.
    pub(super) fn rule_of(&self, shared: usize) -> SelectionRule {
        SelectionRule { top_k: self.rule.top_k + shared - 1, shared, ..self.rule }
    }

    /// Selections per token: one for all KV heads, or one for each.
    pub fn lists(&self) -> usize {
        if self.kind == IndexerKind::Blocks { self.n_head } else { 1 }
    }
}

/// The positions that a layer attends to, of those in its window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Selection {
    /// All.
    All,
    /// Those that its own indexer selects, whose keys are at this index in KV pages.
    Own {
        /// Index of the keys in KV pages.
        kv_layer: usize,
    },
    /// Those that the layer before it attends to.
    Previous,
}

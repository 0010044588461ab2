//! Embeddings that were computed before, by text.

use std::sync::Arc;

use sha2::Digest;

use super::cache::Cache;
use super::key::{Computation, Kind, ReuseKey};
use crate::observe::metrics::Metrics;

/// The embeddings that are kept.
pub struct Embeddings {
    pub kept: Cache<Arc<[f32]>>,
}

impl Embeddings {
    /// Keeps at most `limit` bytes.
    pub fn new(limit: usize, metrics: Arc<Metrics>) -> Embeddings {
        Embeddings { kept: Cache::new("embeddings", limit, metrics) }
    }

    /// The key of a text; `None` if nothing is kept.
    pub fn key(
        &self,
        (name, computation): (&Arc<str>, &Computation),
        tenant: &Arc<str>,
        tokens: &[u32],
        dimensions: Option<usize>,
    ) -> Option<ReuseKey> {
        if !self.kept.is_on {
            return None;
        }
        Some(ReuseKey::new(name, computation, tenant, Kind::Embedding, |digest| {
            digest.update(dimensions.unwrap_or(0).to_le_bytes());
            tokens.iter().for_each(|token| digest.update(token.to_le_bytes()));
        }))
    }

    pub fn find(&self, key: &ReuseKey) -> Option<Arc<[f32]>> {
        let found = self.kept.get(key);
        self.kept.metrics.reused(if found.is_some() { "embedding_hit" } else { "embedding_miss" });
        found
    }

    pub fn insert(&self, key: ReuseKey, vector: &[f32]) {
        let n_bytes = std::mem::size_of_val(vector) + std::mem::size_of::<ReuseKey>();
        self.kept.insert(key, vector.into(), n_bytes);
    }
}

//! Embeddings that were computed before, by text.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use sha2::{Digest, Sha256};

use super::super::metrics::Metrics;
use super::super::models::instance::ModelInstance;
use super::bytes_lru::BytesLru;

/// Identifies a text of a tenant.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct TextKey {
    model: Arc<str>,
    tenant: Arc<str>,
    digest: [u8; 32],
}

/// The embeddings that are kept.
pub struct Embeddings {
    kept: Mutex<BytesLru<TextKey, Arc<[f32]>>>,
    metrics: Arc<Metrics>,
}

impl Embeddings {
    /// Keeps at most `limit` bytes.
    pub fn new(limit: usize, metrics: Arc<Metrics>) -> Embeddings {
        Embeddings { kept: Mutex::new(BytesLru::new(limit)), metrics }
    }

    /// The key of a text; `None` if nothing is kept.
    pub fn key(
        &self,
        instance: &ModelInstance,
        tenant: &Arc<str>,
        tokens: &[u32],
        dimensions: Option<usize>,
    ) -> Option<TextKey> {
        if self.lock().limit() == 0 {
            return None;
        }
        let mut digest = Sha256::new_with_prefix(instance.model_sha256);
        digest.update(dimensions.unwrap_or(0).to_le_bytes());
        tokens.iter().for_each(|token| digest.update(token.to_le_bytes()));
        let (model, tenant) = (Arc::clone(&instance.name), Arc::clone(tenant));
        Some(TextKey { model, tenant, digest: digest.finalize().into() })
    }

    pub fn find(&self, key: &TextKey) -> Option<Arc<[f32]>> {
        let found = self.lock().get(key).cloned();
        self.metrics.reused(if found.is_some() { "embedding_hit" } else { "embedding_miss" });
        found
    }

    pub fn insert(&self, key: TextKey, vector: &[f32]) {
        let n_bytes = std::mem::size_of_val(vector) + std::mem::size_of::<TextKey>();
        let mut kept = self.lock();
        kept.insert(key, vector.into(), n_bytes);
        self.metrics.set_kept_embeddings(kept.n_bytes(), kept.n_evicted);
    }

    /// Forgets the embeddings of a model, a tenant, or all. Returns how many.
    pub fn invalidate(&self, model: Option<&str>, tenant: Option<&str>) -> usize {
        let mut kept = self.lock();
        let n = kept.retain(|key, _| {
            model.is_some_and(|model| *key.model != *model) || tenant.is_some_and(|tenant| *key.tenant != *tenant)
        });
        self.metrics.set_kept_embeddings(kept.n_bytes(), kept.n_evicted);
        n
    }

    /// Number of embeddings, and their bytes.
    pub fn size(&self) -> (usize, usize) {
        let kept = self.lock();
        (kept.len(), kept.n_bytes())
    }

    fn lock(&self) -> MutexGuard<'_, BytesLru<TextKey, Arc<[f32]>>> {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

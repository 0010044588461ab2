//! Results that are kept, by tenant and model, within a number of bytes. Tenants have equal shares of them.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::key::ReuseKey;
use super::tenant_lru::TenantLru;
use crate::observe::metrics::Metrics;

/// A cache of results.
pub struct Cache<V> {
    /// Its name in metrics.
    name: &'static str,
    /// Whether anything is kept.
    pub is_on: bool,
    values: Mutex<TenantLru<V>>,
    pub metrics: Arc<Metrics>,
}

impl<V: Clone> Cache<V> {
    /// Keeps at most `limit` bytes.
    pub fn new(name: &'static str, limit: usize, metrics: Arc<Metrics>) -> Cache<V> {
        Cache { name, is_on: limit > 0, values: Mutex::new(TenantLru::new(limit)), metrics }
    }

    pub fn get(&self, key: &ReuseKey) -> Option<V> {
        self.lock().get(key).cloned()
    }

    pub fn insert(&self, key: ReuseKey, value: V, n_bytes: usize) {
        let mut values = self.lock();
        values.insert(key, value, n_bytes);
        self.publish(&values);
    }

    /// Forgets the results of a model, of a tenant, of an `etag`, or all. Returns how many.
    pub fn invalidate(&self, model: Option<&str>, tenant: Option<&str>, etag: Option<&str>) -> usize {
        let mut values = self.lock();
        let n = values.retain(|key, _| {
            model.is_some_and(|model| *key.model != *model)
                || tenant.is_some_and(|tenant| *key.tenant != *tenant)
                || etag.is_some_and(|etag| key.etag() != etag.trim_matches('"'))
        });
        self.publish(&values);
        n
    }

    /// Number of results, and their bytes.
    pub fn size(&self) -> (usize, usize) {
        let values = self.lock();
        (values.len(), values.n_bytes())
    }

    fn publish(&self, values: &TenantLru<V>) {
        self.metrics.set_kept(self.name, values.n_bytes(), values.n_evicted);
    }

    fn lock(&self) -> MutexGuard<'_, TenantLru<V>> {
        self.values.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

//! Least recently used cache of all tenants with a limit in bytes. When it is full, it evicts the least recently used entry of the
//! tenant that holds most, so that no tenant loses entries while it holds at most its share: the limit divided by the number of
//! tenants.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::bytes_lru::BytesLru;
use super::key::ReuseKey;

pub struct TenantLru<V> {
    tenants: BTreeMap<Arc<str>, BytesLru<ReuseKey, V>>,
    limit: usize,
    n_bytes: usize,
    /// Values removed for lack of room so far.
    pub n_evicted: u64,
}

impl<V> TenantLru<V> {
    pub fn new(limit: usize) -> TenantLru<V> {
        TenantLru { tenants: BTreeMap::new(), limit, n_bytes: 0, n_evicted: 0 }
    }

    pub fn get(&mut self, key: &ReuseKey) -> Option<&V> {
        self.tenants.get_mut(&key.tenant)?.get(key)
    }

    /// Inserts a value of `n_bytes`, unless it alone exceeds the limit.
    pub fn insert(&mut self, key: ReuseKey, value: V, n_bytes: usize) {
        if n_bytes > self.limit {
            return;
        }
        let (tenant, limit) = (Arc::clone(&key.tenant), self.limit);
        let own = self.tenants.entry(Arc::clone(&tenant)).or_insert_with(|| BytesLru::new(limit));
        let (before, evicted) = (own.n_bytes(), own.n_evicted);
        own.insert(key, value, n_bytes);
        self.n_bytes = self.n_bytes - before + own.n_bytes();
        self.n_evicted += own.n_evicted - evicted;
        while self.n_bytes > self.limit {
            // among equals, the one that has just inserted
            let most = self.tenants.iter().max_by_key(|(name, values)| (values.n_bytes(), **name == tenant));
            let Some(name) = most.map(|(name, _)| Arc::clone(name)) else { break };
            let Some(values) = self.tenants.get_mut(&name) else { break };
            self.n_bytes -= values.pop_oldest();
            self.n_evicted += 1;
            if values.len() == 0 {
                self.tenants.remove(&name);
            }
        }
    }

    /// Keeps the values for which `keeps` holds. Returns how many went.
    pub fn retain(&mut self, mut keeps: impl FnMut(&ReuseKey, &V) -> bool) -> usize {
        let n = self.tenants.values_mut().map(|values| values.retain(&mut keeps)).sum();
        self.tenants.retain(|_, values| values.len() > 0);
        self.n_bytes = self.tenants.values().map(BytesLru::n_bytes).sum();
        n
    }

    pub fn n_bytes(&self) -> usize {
        self.n_bytes
    }

    pub fn len(&self) -> usize {
        self.tenants.values().map(BytesLru::len).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(tenant: &str, n: u8) -> ReuseKey {
        ReuseKey { model: "m".into(), tenant: tenant.into(), digest: [n; 32] }
    }

    #[test]
    fn a_tenant_evicts_its_own_values_once_it_has_its_share() {
        let mut cache = TenantLru::new(100);
        cache.insert(key("a", 0), 0, 40);
        for n in 0..50 {
            cache.insert(key("b", n), n, 10);
            assert!(cache.get(&key("a", 0)).is_some(), "{n}");
        }
        assert_eq!((cache.n_bytes(), cache.len(), cache.n_evicted), (100, 7, 44));
        assert!(cache.get(&key("b", 43)).is_none() && cache.get(&key("b", 44)).is_some());
        // up to its share, a tenant takes room from those who hold more
        cache.insert(key("a", 1), 1, 10);
        assert!(cache.get(&key("b", 45)).is_none() && cache.get(&key("a", 0)).is_some());
        // more than the share is taken from its own
        cache.insert(key("a", 2), 2, 20);
        assert_eq!((cache.get(&key("a", 0)).is_some(), cache.len()), (false, 6));
        // larger than all
        cache.insert(key("c", 0), 0, 101);
        assert!(cache.get(&key("c", 0)).is_none());
        assert_eq!(cache.retain(|key, _| *key.tenant != *"b"), 5);
        assert_eq!((cache.len(), cache.n_bytes()), (1, 20));
    }
}

//! Least recently used cache with a bound on bytes.

use std::hash::Hash;

use lru::LruCache;

/// Values with their sizes; the least recently used ones go when all together exceed the limit.
pub struct BytesLru<K: Hash + Eq, V> {
    values: LruCache<K, (V, usize)>,
    limit: usize,
    n_bytes: usize,
    /// Values removed for lack of room so far.
    pub n_evicted: u64,
}

impl<K: Hash + Eq, V> BytesLru<K, V> {
    pub fn new(limit: usize) -> BytesLru<K, V> {
        BytesLru { values: LruCache::unbounded(), limit, n_bytes: 0, n_evicted: 0 }
    }

    pub fn get(&mut self, key: &K) -> Option<&V> {
        self.values.get(key).map(|(value, _)| value)
    }

    /// Inserts a value of `n_bytes`, unless it alone exceeds the limit.
    pub fn insert(&mut self, key: K, value: V, n_bytes: usize) {
        if n_bytes > self.limit {
            return;
        }
        self.n_bytes += n_bytes;
        if let Some((_, old)) = self.values.put(key, (value, n_bytes)) {
            self.n_bytes -= old;
        }
        while self.n_bytes > self.limit && !self.values.is_empty() {
            self.pop_oldest();
            self.n_evicted += 1;
        }
    }

    /// Removes the least recently used value. Returns its bytes.
    pub fn pop_oldest(&mut self) -> usize {
        let n_bytes = self.values.pop_lru().map_or(0, |(_, (_, n_bytes))| n_bytes);
        self.n_bytes -= n_bytes;
        n_bytes
    }

    pub fn remove(&mut self, key: &K) -> Option<V> {
        let (value, n_bytes) = self.values.pop(key)?;
        self.n_bytes -= n_bytes;
        Some(value)
    }

    /// Keeps the values for which `keeps` holds. Returns how many went.
    pub fn retain(&mut self, mut keeps: impl FnMut(&K, &V) -> bool) -> usize
    where
        K: Clone,
    {
        let gone: Vec<K> = self.values.iter().filter(|(k, (v, _))| !keeps(k, v)).map(|(k, _)| k.clone()).collect();
        gone.iter().for_each(|key| drop(self.remove(key)));
        gone.len()
    }

    pub fn n_bytes(&self) -> usize {
        self.n_bytes
    }

    pub fn len(&self) -> usize {
        self.values.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_most_recently_used_values_stay(
            limit in 0usize..40, uses in prop::collection::vec((0u8..12, 0usize..20), 0..80),
        ) {
            let mut cache = BytesLru::new(limit);
            // the definition: all uses, the last one first
            let mut order: Vec<(u8, usize)> = Vec::new();
            for (key, size) in uses {
                if size <= limit {
                    order.retain(|(known, _)| *known != key);
                    order.insert(0, (key, size));
                    while order.iter().map(|(_, size)| size).sum::<usize>() > limit {
                        order.pop();
                    }
                }
                cache.insert(key, size, size);
                let bytes: usize = order.iter().map(|(_, size)| size).sum();
                prop_assert_eq!((cache.n_bytes(), cache.len()), (bytes, order.len()));
            }
            for (key, size) in &order {
                prop_assert_eq!(cache.get(key), Some(size));
            }
            let n = cache.retain(|key, _| key % 2 == 0);
            prop_assert_eq!(n, order.iter().filter(|(key, _)| key % 2 == 1).count());
        }
    }
}

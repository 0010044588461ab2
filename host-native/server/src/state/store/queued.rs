//! Bytes that wait to be written, by tenant: one that writes much keeps nobody else from writing.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What waits. A tenant may hold the limit divided by the number of tenants with something that waits, at its admission: the sum
/// is at most the limit times 1 + 1/2 + 1/3 + …
#[derive(Debug, Default)]
pub struct Queued(Mutex<BTreeMap<Arc<str>, usize>>);

impl Queued {
    /// Counts bytes that begin to wait. Returns whether there is room for them.
    pub fn add(&self, tenant: &Arc<str>, n_bytes: usize, limit: usize) -> bool {
        let mut tenants = self.lock();
        let held = tenants.get(tenant).copied();
        let n_tenants = tenants.len() + usize::from(held.is_none());
        let sum = held.unwrap_or(0).saturating_add(n_bytes);
        let has_room = sum <= limit / n_tenants.max(1);
        if has_room {
            tenants.insert(Arc::clone(tenant), sum);
        }
        has_room
    }

    /// Counts bytes that no longer wait.
    pub fn remove(&self, tenant: &Arc<str>, n_bytes: usize) {
        let mut tenants = self.lock();
        let Some(held) = tenants.get_mut(tenant) else { return };
        *held = held.saturating_sub(n_bytes);
        if *held == 0 {
            tenants.remove(tenant);
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<Arc<str>, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenant_that_writes_much_leaves_room_for_others() {
        let (queued, a, b): (_, Arc<str>, Arc<str>) = (Queued::default(), "a".into(), "b".into());
        assert!(queued.add(&a, 60, 100) && queued.add(&a, 40, 100) && !queued.add(&a, 1, 100));
        assert!(queued.add(&b, 50, 100) && !queued.add(&b, 1, 100));
        queued.remove(&a, 60);
        assert!(queued.add(&a, 10, 100) && !queued.add(&a, 1, 100));
        queued.remove(&b, 50);
        assert!(queued.add(&a, 50, 100));
        queued.remove(&a, 100);
        assert!(queued.lock().is_empty());
    }
}

//! The memory budget that all models share.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Bytes that weights and KV caches may take together.
#[derive(Debug)]
pub struct MemoryBudget {
    limit: u64,
    used: Mutex<u64>,
    freed: Condvar,
}

/// A part of the budget, until it is dropped.
#[derive(Debug)]
pub struct MemoryLease {
    budget: Arc<MemoryBudget>,
    bytes: u64,
}

impl MemoryBudget {
    pub fn new(limit: u64) -> MemoryBudget {
        MemoryBudget { limit, used: Mutex::new(0), freed: Condvar::new() }
    }

    pub fn limit(&self) -> u64 {
        self.limit
    }

    pub fn used(&self) -> u64 {
        *self.lock()
    }

    pub fn free(&self) -> u64 {
        self.limit.saturating_sub(self.used())
    }

    /// Takes `bytes` of the budget; `None` if fewer are free.
    pub fn lease(self: &Arc<Self>, bytes: u64) -> Option<MemoryLease> {
        let mut used = self.lock();
        let total = used.checked_add(bytes).filter(|total| *total <= self.limit)?;
        *used = total;
        Some(MemoryLease { budget: Arc::clone(self), bytes })
    }

    /// Blocks until `bytes` are free, at most for `timeout`. Returns whether they are.
    pub fn wait_free(&self, bytes: u64, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        let mut used = self.lock();
        loop {
            if used.checked_add(bytes).is_some_and(|total| total <= self.limit) {
                return true;
            }
            let Some(left) = deadline.checked_duration_since(Instant::now()) else { return false };
            used = self.freed.wait_timeout(used, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn lock(&self) -> MutexGuard<'_, u64> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl MemoryLease {
    /// Changes the size to what is in use now.
    pub fn resize(&mut self, bytes: u64) {
        let mut used = self.budget.lock();
        *used = used.saturating_sub(self.bytes).saturating_add(bytes);
        drop(used);
        self.bytes = bytes;
        self.budget.freed.notify_all();
    }

    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for MemoryLease {
    fn drop(&mut self) {
        let mut used = self.budget.lock();
        *used = used.saturating_sub(self.bytes);
        drop(used);
        self.budget.freed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leases_never_exceed_the_budget_and_come_back() {
        let budget = Arc::new(MemoryBudget::new(100));
        let mut a = budget.lease(60).unwrap();
        assert!(budget.lease(41).is_none() && budget.lease(u64::MAX).is_none());
        a.resize(50);
        let b = budget.lease(50).unwrap();
        assert_eq!((budget.used(), budget.free()), (100, 0));
        assert!(!budget.wait_free(1, Duration::from_millis(5)));
        drop(b);
        assert!(budget.wait_free(50, Duration::ZERO));
        drop(a);
        assert_eq!(budget.used(), 0);
    }
}

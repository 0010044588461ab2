//! Slots for compiling output constraints. A schema can cost a second of work; so few are compiled at a time, a tenant has
//! at most half of the slots, and those that wait do so in the order of their arrival, until their deadline or until their
//! client leaves.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use starling_api::update::Failed;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, timeout_at};

/// Minimum number of slots: one for a tenant, and one for the others.
const MIN_SLOTS: usize = 2;

/// Slots, shared by all models of a server.
pub struct CompileSlots {
    all: Arc<Semaphore>,
    /// Slots that a tenant may hold or wait for at a time.
    share: usize,
    /// Shares of the tenants that compile or wait.
    tenants: Mutex<HashMap<Arc<str>, Weak<Semaphore>>>,
}

/// A slot, free again when it is dropped.
#[derive(Debug)]
pub struct CompileSlot {
    _all: OwnedSemaphorePermit,
    /// Keeps the share of the tenant while it is used.
    _share: OwnedSemaphorePermit,
}

impl CompileSlots {
    /// `n` slots, or the minimum.
    pub fn new(n: usize) -> CompileSlots {
        let n = n.max(MIN_SLOTS);
        CompileSlots { all: Arc::new(Semaphore::new(n)), share: n / 2, tenants: Mutex::default() }
    }

    /// Waits for a slot until `deadline`; `limit` is the time that the deadline leaves, for the error.
    ///
    /// # Errors
    /// If there is none in time.
    pub async fn acquire(&self, tenant: &Arc<str>, deadline: Instant, limit: Duration) -> Result<CompileSlot, Failed> {
        let late = |_| Failed::QueueTimeout(limit.as_secs_f64());
        let share = self.share_of(tenant);
        let wait = async move {
            let share = share.acquire_owned().await.map_err(|_| Failed::Shutdown)?;
            let all = Arc::clone(&self.all).acquire_owned().await.map_err(|_| Failed::Shutdown)?;
            Ok(CompileSlot { _all: all, _share: share })
        };
        timeout_at(deadline, wait).await.map_err(late)?
    }

    fn share_of(&self, tenant: &Arc<str>) -> Arc<Semaphore> {
        let mut tenants = self.tenants.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(share) = tenants.get(tenant).and_then(Weak::upgrade) {
            return share;
        }
        tenants.retain(|_, share| share.strong_count() > 0);
        let share = Arc::new(Semaphore::new(self.share));
        tenants.insert(Arc::clone(tenant), Arc::downgrade(&share));
        share
    }
}

/// Tells a compilation to stop when its request is dropped.
#[derive(Debug, Default)]
pub struct StopOnDrop(Arc<AtomicBool>);

impl StopOnDrop {
    pub fn flag(&self) -> Arc<AtomicBool> {
        Arc::clone(&self.0)
    }
}

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_secs(9);

    async fn acquire(slots: &CompileSlots, tenant: &str) -> Result<CompileSlot, Failed> {
        slots.acquire(&tenant.into(), Instant::now() + LIMIT, LIMIT).await
    }

    #[tokio::test(start_paused = true)]
    async fn a_tenant_leaves_slots_to_others() {
        for (n, share) in [(0, 1), (1, 1), (2, 1), (4, 2), (9, 4)] {
            let slots = CompileSlots::new(n);
            let mut held = Vec::new();
            for _ in 0..share {
                held.push(acquire(&slots, "a").await.expect("a slot"));
            }
            assert_eq!(acquire(&slots, "a").await.expect_err("no slot"), Failed::QueueTimeout(9.0));
            // one that waits takes nothing from others, and is forgotten with its client
            let inner = Arc::new(slots);
            let waiting = tokio::spawn({
                let slots = Arc::clone(&inner);
                async move { acquire(&slots, "a").await.map(drop) }
            });
            tokio::task::yield_now().await;
            let other = acquire(&inner, "b").await.expect("a slot");
            waiting.abort();
            let _ = waiting.await;
            held.pop();
            held.push(acquire(&inner, "a").await.expect("the slot that is free again"));
            drop((held, other));
            acquire(&inner, "c").await.expect("a slot");
            assert_eq!(inner.tenants.lock().expect("a lock").len(), 1, "shares that are not used are forgotten");
        }
    }

    #[test]
    fn a_dropped_request_stops_its_work() {
        let stop = StopOnDrop::default();
        let flag = stop.flag();
        assert!(!flag.load(Ordering::Relaxed));
        drop(stop);
        assert!(flag.load(Ordering::Relaxed));
    }
}

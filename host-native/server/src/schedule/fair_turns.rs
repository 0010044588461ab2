//! Work of which the server does little at a time, such as replays of receipts: tenants take turns, and each has a bounded
//! number of requests that wait.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use starling_api::error::ApiError;
use tokio::sync::oneshot;

/// `Retry-After` of a refusal.
const RETRY: Duration = Duration::from_secs(1);

/// The turns of one kind of work.
#[derive(Debug)]
pub struct FairTurns {
    limits: TurnLimits,
    inner: Mutex<Inner>,
}

#[derive(Debug, Clone, Copy)]
pub struct TurnLimits {
    /// Turns at a time.
    pub running: usize,
    /// Requests of a tenant that wait.
    pub waiting: usize,
}

#[derive(Debug, Default)]
struct Inner {
    running: usize,
    waiting: HashMap<Arc<str>, VecDeque<oneshot::Sender<Turn>>>,
    /// Tenants with waiting requests; the first has the next turn.
    order: VecDeque<Arc<str>>,
}

/// A turn; it ends when the value is dropped.
#[derive(Debug)]
pub struct Turn(Option<Arc<FairTurns>>);

/// A tenant has as many waiting requests as it may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{limit} requests of this kind wait for this tenant, expected fewer; try again later")]
pub struct TooManyWaiting {
    limit: usize,
}

impl From<TooManyWaiting> for ApiError {
    fn from(e: TooManyWaiting) -> ApiError {
        ApiError { retry: Some(RETRY), ..ApiError::new(429, "rate_limit_error", e.to_string()) }.code("tenant_requests")
    }
}

impl FairTurns {
    pub fn new(limits: TurnLimits) -> FairTurns {
        FairTurns { limits, inner: Mutex::default() }
    }

    /// Waits for a turn of a tenant. Dropping the future gives up.
    ///
    /// # Errors
    /// If too many requests of the tenant wait.
    pub async fn take(self: &Arc<Self>, tenant: &Arc<str>) -> Result<Turn, TooManyWaiting> {
        let turn = {
            let mut inner = self.lock();
            if inner.running < self.limits.running && inner.order.is_empty() {
                inner.running += 1;
                return Ok(Turn(Some(Arc::clone(self))));
            }
            let queue = inner.waiting.entry(Arc::clone(tenant)).or_default();
            queue.retain(|waiting| !waiting.is_closed());
            if queue.len() >= self.limits.waiting {
                return Err(TooManyWaiting { limit: self.limits.waiting });
            }
            let (sender, turn) = oneshot::channel();
            queue.push_back(sender);
            if !inner.order.contains(tenant) {
                inner.order.push_back(Arc::clone(tenant));
            }
            turn
        };
        // the sender is dropped with the last reference to `self` only
        turn.await.map_err(|_| TooManyWaiting { limit: self.limits.waiting })
    }

    /// Gives the turn that has ended to the next that waits.
    fn pass_on(self: &Arc<Self>) {
        loop {
            let next = {
                let mut inner = self.lock();
                let next = inner.next();
                if next.is_none() {
                    inner.running -= 1;
                }
                next
            };
            let Some(next) = next else { return };
            match next.send(Turn(Some(Arc::clone(self)))) {
                Ok(()) => return,
                // it has given up
                Err(mut turn) => turn.0 = None,
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    /// The first request of the tenant whose turn it is.
    fn next(&mut self) -> Option<oneshot::Sender<Turn>> {
        loop {
            let tenant = self.order.pop_front()?;
            let Some(queue) = self.waiting.get_mut(&tenant) else { continue };
            let first = queue.pop_front();
            if queue.is_empty() {
                self.waiting.remove(&tenant);
            } else {
                self.order.push_back(tenant);
            }
            if first.is_some() {
                return first;
            }
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        if let Some(turns) = self.0.take() {
            turns.pass_on();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::{Pin, pin};
    use std::task::{Context, Poll, Waker};

    use super::*;

    type Waiting<'a> = Pin<Box<dyn Future<Output = Result<Turn, TooManyWaiting>> + 'a>>;

    fn poll(waiting: &mut Waiting<'_>) -> Option<Result<Turn, TooManyWaiting>> {
        match waiting.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(turn) => Some(turn),
            Poll::Pending => None,
        }
    }

    #[test]
    fn a_flood_of_one_tenant_delays_another_by_one_turn() {
        let turns = Arc::new(FairTurns::new(TurnLimits { running: 1, waiting: 3 }));
        let (a, b): (Arc<str>, Arc<str>) = ("a".into(), "b".into());
        let first = poll(&mut (Box::pin(turns.take(&a)) as Waiting<'_>)).unwrap().unwrap();
        let mut flood: Vec<Waiting<'_>> = (0..3).map(|_| Box::pin(turns.take(&a)) as Waiting<'_>).collect();
        assert!(flood.iter_mut().all(|waiting| poll(waiting).is_none()));
        let refused = poll(&mut (Box::pin(turns.take(&a)) as Waiting<'_>)).unwrap();
        assert_eq!(refused.unwrap_err(), TooManyWaiting { limit: 3 });
        let mut other: Waiting<'_> = Box::pin(turns.take(&b));
        assert!(poll(&mut other).is_none());
        drop(first);
        let second = poll(&mut flood[0]).unwrap().unwrap();
        assert!(poll(&mut other).is_none());
        drop(second);
        let third = poll(&mut other).expect("the turn of b").unwrap();
        // one that has given up is passed over, and makes room
        drop(flood.remove(1));
        assert!(poll(&mut (Box::pin(turns.take(&a)) as Waiting<'_>)).is_none());
        drop(third);
        let fourth = poll(&mut flood[1]).expect("the last of a").unwrap();
        drop(fourth);
        assert_eq!(turns.lock().running, 0);
        let again = pin!(turns.take(&b));
        assert!(matches!(again.poll(&mut Context::from_waker(Waker::noop())), Poll::Ready(Ok(_))));
    }
}

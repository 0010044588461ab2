//! Responses that outlive their connection: one with `Idempotency-Key` is computed once, and a stream that was cut goes on from
//! the event that the client names in `Last-Event-ID`.
//!
//! Such a response is read by a task of its own into a log, and every connection reads the log. When room is short, responses of
//! the tenant that has most of it are forgotten: see [`share`].

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use axum::body::Bytes;
use axum::http::response;
use tokio::sync::watch;
use tokio::time::Instant;

use super::shared_log::SharedLog;
use crate::state::share;

/// Maximum responses that are kept, and of their bytes.
pub const MAX_RESPONSES: usize = 4096;
const MAX_BYTES: usize = 256 << 20;

/// A response, and its body as far as it has come.
pub struct Kept {
    pub head: response::Parts,
    pub body: Arc<SharedLog<Bytes>>,
}

/// A request with an idempotency key: its digest, and its response once the head is known.
pub struct Once {
    pub digest: [u8; 32],
    pub response: watch::Receiver<Option<Arc<Kept>>>,
    pub until: Instant,
}

/// A stream that may be resumed.
pub struct Stream {
    pub tenant: Arc<str>,
    pub response: Arc<Kept>,
    /// End of the time to resume it, once its last event has been written.
    pub until: Option<Instant>,
}

pub struct Inner {
    /// By tenant and key.
    pub once: HashMap<OnceKey, Once>,
    /// By ID.
    pub streams: HashMap<Arc<str>, Stream>,
    max_responses: usize,
    max_bytes: usize,
}

/// Tenant and key.
pub type OnceKey = (Arc<str>, String);

impl Default for Inner {
    fn default() -> Inner {
        let (once, streams) = (HashMap::new(), HashMap::new());
        Inner { once, streams, max_responses: MAX_RESPONSES, max_bytes: MAX_BYTES }
    }
}

/// A response that may be forgotten.
#[derive(Debug, Clone, PartialEq)]
enum Name {
    Once(OnceKey),
    Stream(Arc<str>),
}

/// The responses that are kept.
#[derive(Default)]
pub struct KeptResponses(Mutex<Inner>);

impl KeptResponses {
    pub fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Drops what has expired.
    pub fn expire(&self) {
        let now = Instant::now();
        let mut inner = self.lock();
        inner.once.retain(|_, once| once.until > now);
        inner.streams.retain(|_, stream| stream.until.is_none_or(|until| until > now));
        inner.shrink();
    }

    /// Number of responses that are kept, and their bytes.
    pub fn size(&self) -> (usize, usize) {
        let inner = self.lock();
        (inner.len(), inner.n_bytes())
    }
}

impl Once {
    /// The response, once its head is known.
    fn kept(&self) -> Option<Arc<Kept>> {
        self.response.borrow().clone()
    }
}

impl Inner {
    fn len(&self) -> usize {
        self.once.len() + self.streams.len()
    }

    fn n_bytes(&self) -> usize {
        self.all().map(|(_, _, n_bytes)| n_bytes).sum()
    }

    /// Name, tenant and bytes of each response, of those that are complete with the end of their time.
    fn all(&self) -> impl Iterator<Item = ((Name, Option<Instant>), &str, usize)> {
        let once = self.once.iter().map(|(key, once)| {
            let kept = once.kept();
            let until = kept.as_ref().filter(|kept| kept.body.is_closed()).map(|_| once.until);
            ((Name::Once(key.clone()), until), &*key.0, kept.map_or(0, |kept| kept.body.n_bytes()))
        });
        let streams = self.streams.iter().map(|(id, stream)| {
            ((Name::Stream(Arc::clone(id)), stream.until), &*stream.tenant, stream.response.body.n_bytes())
        });
        once.chain(streams)
    }

    fn remove(&mut self, name: &Name) {
        match name {
            Name::Once(key) => drop(self.once.remove(key)),
            Name::Stream(id) => drop(self.streams.remove(id)),
        }
    }

    /// Makes room for one more response of a tenant. Returns whether there is.
    pub fn make_room(&mut self, tenant: &str) -> bool {
        if self.len() < self.max_responses {
            return true;
        }
        let mut held = BTreeMap::from([(tenant, 1)]);
        self.all().for_each(|(_, tenant, _)| *held.entry(tenant).or_default() += 1);
        let complete = self.all().filter_map(|((name, until), tenant, _)| Some((name, tenant, until?)));
        let Some(name) = share::victim(complete, &held, tenant) else { return false };
        self.remove(&name);
        true
    }

    /// Forgets complete responses of tenants that have more than their share of the bytes, those first that expire first.
    fn shrink(&mut self) {
        while self.n_bytes() > self.max_bytes {
            let mut held: BTreeMap<&str, usize> = BTreeMap::new();
            self.all().for_each(|(_, tenant, n_bytes)| *held.entry(tenant).or_default() += n_bytes);
            let share = self.max_bytes / held.len().max(1);
            let has_more = |tenant: &str| held.get(tenant).is_some_and(|n_bytes| *n_bytes > share);
            let complete = self.all().filter(|(_, tenant, n_bytes)| *n_bytes > 0 && has_more(tenant));
            let complete = complete.filter_map(|((name, until), tenant, _)| Some((name, tenant, until?)));
            let Some(name) = share::victim(complete, &held, "") else { break };
            self.remove(&name);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use axum::body::Body;
    use axum::response::Response;

    use super::*;

    fn once(n_bytes: Option<usize>) -> Once {
        let head = Response::new(Body::empty()).into_parts().0;
        let body = SharedLog::new();
        if let Some(n_bytes) = n_bytes {
            body.push(Bytes::new(), n_bytes);
            body.close();
        }
        let response = watch::channel(Some(Arc::new(Kept { head, body }))).1;
        Once { digest: [0; 32], response, until: Instant::now() + Duration::from_secs(60) }
    }

    fn key(tenant: &str, key: usize) -> OnceKey {
        (tenant.into(), key.to_string())
    }

    fn n_of(inner: &Inner, tenant: &str) -> usize {
        inner.once.keys().filter(|(of, _)| &**of == tenant).count()
    }

    #[tokio::test]
    async fn keys_of_a_tenant_make_room_for_its_own() {
        let mut inner = Inner { max_responses: 10, ..Inner::default() };
        inner.once.insert(key("a", 0), once(Some(1)));
        for i in 0..50 {
            assert!(inner.make_room("b"), "{i}");
            inner.once.insert(key("b", i), once(Some(1)));
            assert_eq!((n_of(&inner, "a"), inner.len()), (1, (i + 2).min(10)), "{i}");
        }
        for i in 1..50 {
            assert!(inner.make_room("a"), "{i}");
            inner.once.insert(key("a", i), once(Some(1)));
        }
        assert_eq!((n_of(&inner, "a"), n_of(&inner, "b")), (5, 5));
        // requests that still run are not forgotten, and do not cost others theirs
        let mut inner = Inner { max_responses: 4, ..Inner::default() };
        inner.once.insert(key("a", 0), once(Some(1)));
        for i in 0..3 {
            assert!(inner.make_room("b"));
            inner.once.insert(key("b", i), once(None));
        }
        assert_eq!((inner.make_room("b"), n_of(&inner, "a")), (false, 1));
    }

    #[tokio::test]
    async fn large_responses_of_a_tenant_cost_no_other_its_keys() {
        let mut inner = Inner { max_bytes: 1000, ..Inner::default() };
        inner.once.insert(key("a", 0), once(Some(400)));
        for i in 0..9 {
            inner.once.insert(key("b", i), once(Some(400)));
        }
        inner.shrink();
        assert_eq!((n_of(&inner, "a"), n_of(&inner, "b"), inner.n_bytes()), (1, 1, 800));
        inner.once.insert(key("b", 10), once(None));
        inner.once.insert(key("b", 11), once(Some(900)));
        inner.shrink();
        assert!(n_of(&inner, "a") == 1 && inner.n_bytes() <= 1000);
    }
}

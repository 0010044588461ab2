//! The request queue between HTTP handlers and the engine threads: bounded queues behind one lock.
//!
//! Handlers enqueue requests and never wait for the engine; the engine thread takes them between two steps. Each thread
//! holds the lock only while it moves requests.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::{Duration, Instant};

use super::scheduler::{Flow, JobId, Limits, Refused, Scheduler};
use crate::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// A conversation to evict from the prefix cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrefixEviction {
    pub tokens: Vec<u32>,
    /// Cache salt of its requests.
    pub salt: u64,
}

/// Maximum pending evictions. Conversations beyond it stay in the cache until LRU eviction.
const MAX_EVICTIONS: usize = 4096;

/// Queues of a model's workers: prompts `P` and texts to embed `T`.
#[derive(Debug)]
pub struct Queue<P, T> {
    inner: Mutex<Waiting<P, T>>,
    wakeup: Condvar,
}

/// Contents of [`Queue`].
#[derive(Debug)]
pub struct Waiting<P, T> {
    pub prompts: Scheduler<P>,
    pub texts: Scheduler<T>,
    /// Ids of prompts whose clients disconnected; some may already be running.
    pub cancelled_prompts: Vec<Range<JobId>>,
    /// The same for texts.
    pub cancelled_texts: Vec<Range<JobId>>,
    /// Conversations to evict from the prefix cache of each worker.
    prefix_evictions: BTreeMap<u32, Vec<PrefixEviction>>,
    pub shutdown: Shutdown,
    /// Grows with each change that a sleeping worker must see.
    pub version: u64,
}

/// Phase of the server's shutdown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Shutdown {
    /// Not shutting down.
    None,
    /// New requests are refused; queued and running ones finish.
    Draining,
    /// Queued and running requests fail.
    Now,
}

/// Why a request was not enqueued.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Closed {
    #[error(transparent)]
    Refused(#[from] Refused),
    #[error("the server is shutting down")]
    Draining,
}

impl Closed {
    /// The label `reason` in metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Closed::Refused(refused) => refused.name(),
            Closed::Draining => "shutting_down",
        }
    }
}

impl<P, T> Queue<P, T> {
    /// `limits` hold for prompts. One request has up to `max_inputs` texts, so the limits of texts are that many times higher.
    pub fn new(limits: Limits, max_inputs: usize) -> Queue<P, T> {
        let (prompts, texts) = (Scheduler::new(limits), Scheduler::new(limits.times(max_inputs)));
        let waiting = Waiting {
            prompts,
            texts,
            cancelled_prompts: Vec::new(),
            cancelled_texts: Vec::new(),
            prefix_evictions: BTreeMap::new(),
            shutdown: Shutdown::None,
            version: 0,
        };
        Queue { inner: Mutex::new(waiting), wakeup: Condvar::new() }
    }

    /// Enqueues all of `jobs` or none. Each needs up to `tokens` tokens and may wait until `deadline`.
    ///
    /// # Errors
    /// If a limit is reached or the server is shutting down.
    pub fn generate(
        self: &Arc<Self>,
        flow: &Flow,
        tokens: usize,
        deadline: Instant,
        jobs: Vec<P>,
    ) -> Result<Ticket<P, T>, Closed> {
        let mut waiting = self.lock_open()?;
        let ids = waiting.prompts.enqueue(flow, tokens, deadline, jobs)?;
        self.wake(&mut waiting);
        Ok(Ticket { queue: Arc::clone(self), ids, are_texts: false })
    }

    /// As [`Queue::generate`], for texts to embed.
    ///
    /// # Errors
    /// If a limit is reached or the server is shutting down.
    pub fn embed(
        self: &Arc<Self>,
        flow: &Flow,
        tokens: usize,
        deadline: Instant,
        jobs: Vec<T>,
    ) -> Result<Ticket<P, T>, Closed> {
        let mut waiting = self.lock_open()?;
        let ids = waiting.texts.enqueue(flow, tokens, deadline, jobs)?;
        self.wake(&mut waiting);
        Ok(Ticket { queue: Arc::clone(self), ids, are_texts: true })
    }

    /// Asks all workers to evict conversations from their prefix caches.
    pub fn evict_prefixes(&self, conversations: impl IntoIterator<Item = PrefixEviction>) {
        let conversations: Vec<PrefixEviction> = conversations.into_iter().collect();
        if conversations.is_empty() {
            return;
        }
        let mut waiting = self.lock();
        for pending in waiting.prefix_evictions.values_mut() {
            let room = MAX_EVICTIONS.saturating_sub(pending.len());
            pending.extend(conversations.iter().take(room).cloned());
        }
        self.wake(&mut waiting);
    }

    /// Adds a worker to those that evict.
    pub fn add_worker(&self, id: u32) {
        self.lock().prefix_evictions.insert(id, Vec::new());
    }

    pub fn remove_worker(&self, id: u32) {
        self.lock().prefix_evictions.remove(&id);
    }

    /// Wakes all workers: the choice of workers may have changed.
    pub fn notify(&self) {
        self.wake(&mut self.lock());
    }

    /// Starts a phase of the shutdown; an earlier phase is ignored.
    pub fn shut_down(&self, phase: Shutdown) {
        let mut waiting = self.lock();
        waiting.shutdown = waiting.shutdown.max(phase);
        self.wake(&mut waiting);
    }

    /// Changes the limits; queued requests stay. See [`Queue::new`].
    pub fn set_limits(&self, limits: Limits, max_inputs: usize) {
        let mut waiting = self.lock();
        waiting.prompts.set_limits(limits);
        waiting.texts.set_limits(limits.times(max_inputs));
    }

    pub fn lock(&self) -> MutexGuard<'_, Waiting<P, T>> {
        // a panic leaves the queues valid: no statement under the lock leaves them inconsistent
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Blocks a worker until there is a change after `version`, at most for `timeout`.
    pub fn wait(&self, version: u64, timeout: Duration) {
        let waiting = self.lock();
        if waiting.version == version {
            drop(self.wakeup.wait_timeout(waiting, timeout));
        }
    }

    fn wake(&self, waiting: &mut Waiting<P, T>) {
        waiting.version += 1;
        self.wakeup.notify_all();
    }

    fn lock_open(&self) -> Result<MutexGuard<'_, Waiting<P, T>>, Closed> {
        let waiting = self.lock();
        if waiting.shutdown == Shutdown::None { Ok(waiting) } else { Err(Closed::Draining) }
    }
}

impl<P, T> Waiting<P, T> {
    /// Takes the conversations that a worker is to evict.
    pub fn take_prefix_evictions(&mut self, worker: u32) -> Vec<PrefixEviction> {
        self.prefix_evictions.get_mut(&worker).map(std::mem::take).unwrap_or_default()
    }
}

/// Jobs that were enqueued together. Dropping the ticket cancels those still queued.
#[derive(Debug)]
pub struct Ticket<P, T> {
    queue: Arc<Queue<P, T>>,
    ids: Range<JobId>,
    are_texts: bool,
}

impl<P, T> Drop for Ticket<P, T> {
    fn drop(&mut self) {
        let mut waiting = self.queue.lock();
        let Waiting { prompts, texts, cancelled_prompts, cancelled_texts, .. } = &mut *waiting;
        // an id in an empty queue is already running; its closed channel cancels it
        let (cancelled, n) = match self.are_texts {
            true => (cancelled_texts, texts.waiting()),
            false => (cancelled_prompts, prompts.waiting()),
        };
        if n > 0 {
            cancelled.push(self.ids.clone());
            waiting.version += 1;
        }
    }
}

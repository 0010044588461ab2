//! The request queue between HTTP handlers and the engine thread: bounded queues behind one lock.
//!
//! Handlers enqueue requests and never wait for the engine; the engine thread takes them between two steps. Each thread
//! holds the lock only while it moves requests.

use std::ops::Range;
use std::time::{Duration, Instant};

use super::scheduler::{Flow, JobId, Limits, Refused, Scheduler};
use super::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// A conversation to evict from the prefix cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Forget {
    pub tokens: Vec<u32>,
    /// Cache salt of its requests.
    pub salt: u64,
}

/// Maximum pending evictions. Conversations beyond it stay in the cache until LRU eviction.
const MAX_FORGET: usize = 4096;

/// Queues of the engine thread: prompts `P` and texts to embed `T`.
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
    /// Conversations to evict from the prefix cache.
    pub forget: Vec<Forget>,
    pub shutdown: Shutdown,
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
        let times = |n: usize| n.saturating_mul(max_inputs.max(1));
        let texts = Limits {
            high: times(limits.high),
            low: times(limits.low),
            tenant_requests: times(limits.tenant_requests),
            ..limits
        };
        let (prompts, texts) = (Scheduler::new(limits), Scheduler::new(texts));
        let waiting = Waiting {
            prompts,
            texts,
            cancelled_prompts: Vec::new(),
            cancelled_texts: Vec::new(),
            forget: Vec::new(),
            shutdown: Shutdown::None,
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
        self.wakeup.notify_one();
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
        self.wakeup.notify_one();
        Ok(Ticket { queue: Arc::clone(self), ids, are_texts: true })
    }

    /// Asks the engine thread to evict conversations from the prefix cache.
    pub fn forget(&self, conversations: impl IntoIterator<Item = Forget>) {
        let mut waiting = self.lock();
        let room = MAX_FORGET.saturating_sub(waiting.forget.len());
        waiting.forget.extend(conversations.into_iter().take(room));
        self.wakeup.notify_one();
    }

    /// Starts a phase of the shutdown; an earlier phase is ignored.
    pub fn shut_down(&self, phase: Shutdown) {
        let mut waiting = self.lock();
        waiting.shutdown = waiting.shutdown.max(phase);
        self.wakeup.notify_one();
    }

    pub fn lock(&self) -> MutexGuard<'_, Waiting<P, T>> {
        // a panic leaves the queues valid: no statement under the lock leaves them inconsistent
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Blocks the engine thread until there is work, at most for `timeout`.
    pub fn wait(&self, timeout: Duration) {
        let waiting = self.lock();
        let idle = waiting.prompts.waiting() == 0 && waiting.texts.waiting() == 0 && waiting.forget.is_empty();
        if idle && waiting.shutdown == Shutdown::None {
            drop(self.wakeup.wait_timeout(waiting, timeout));
        }
    }

    fn lock_open(&self) -> Result<MutexGuard<'_, Waiting<P, T>>, Closed> {
        let waiting = self.lock();
        if waiting.shutdown == Shutdown::None { Ok(waiting) } else { Err(Closed::Draining) }
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
        }
    }
}

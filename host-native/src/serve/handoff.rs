//! The hand-over of requests from HTTP handlers to the engine's thread: bounded queues behind one lock.
//!
//! Handlers put requests in and never wait for the engine; the engine's thread takes them between two steps. Nobody holds
//! the lock for longer than it takes to move some requests.

use std::ops::Range;
use std::time::{Duration, Instant};

use super::scheduler::{Flow, JobId, Limits, Refused, Scheduler};
use super::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// The cached pages of a conversation that is over.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Forget {
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// The salt they were cached with.
    pub salt: u64,
}

/// Conversations to forget that may wait; when there are more, the rest is left to the cache's own age.
const MAX_FORGET: usize = 4096;

/// What waits for the engine's thread: prompts `P` and texts to embed `T`.
#[derive(Debug)]
pub struct Queue<P, T> {
    inner: Mutex<Waiting<P, T>>,
    bell: Condvar,
}

/// The queues themselves.
#[derive(Debug)]
pub struct Waiting<P, T> {
    /// Prompts.
    pub prompts: Scheduler<P>,
    /// Texts to embed.
    pub texts: Scheduler<T>,
    /// Prompts whose clients are gone. They may have left the queue.
    pub cancelled_prompts: Vec<Range<JobId>>,
    /// Texts whose clients are gone.
    pub cancelled_texts: Vec<Range<JobId>>,
    /// Conversations to forget.
    pub forget: Vec<Forget>,
    /// How far the end has come.
    pub end: End,
}

/// How far the end of the server has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum End {
    /// Not at all.
    Open,
    /// Nothing new is taken; what is here is finished.
    Draining,
    /// What is here fails now.
    Now,
}

/// Why a request cannot enter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Closed {
    /// A limit.
    #[error(transparent)]
    Refused(#[from] Refused),
    /// The server ends.
    #[error("the server is shutting down")]
    Draining,
}

impl Closed {
    /// The name, for metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Closed::Refused(refused) => refused.name(),
            Closed::Draining => "shutting_down",
        }
    }
}

impl<P, T> Queue<P, T> {
    /// Empty queues. `limits` are for prompts; texts are many and small, so theirs are a multiple.
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
            end: End::Open,
        };
        Queue { inner: Mutex::new(waiting), bell: Condvar::new() }
    }

    /// Puts in answers to one prompt, of `tokens` each, all or none. They may wait until `deadline`.
    ///
    /// # Errors
    /// Why not.
    pub fn generate(
        self: &Arc<Self>,
        flow: &Flow,
        tokens: usize,
        deadline: Instant,
        jobs: Vec<P>,
    ) -> Result<Ticket<P, T>, Closed> {
        let mut waiting = self.open()?;
        let ids = waiting.prompts.offer(flow, tokens, deadline, jobs)?;
        self.bell.notify_one();
        Ok(Ticket { queue: Arc::clone(self), ids, are_texts: false })
    }

    /// Puts in texts to embed, of `tokens` each, all or none. They may wait until `deadline`.
    ///
    /// # Errors
    /// Why not.
    pub fn embed(
        self: &Arc<Self>,
        flow: &Flow,
        tokens: usize,
        deadline: Instant,
        jobs: Vec<T>,
    ) -> Result<Ticket<P, T>, Closed> {
        let mut waiting = self.open()?;
        let ids = waiting.texts.offer(flow, tokens, deadline, jobs)?;
        self.bell.notify_one();
        Ok(Ticket { queue: Arc::clone(self), ids, are_texts: true })
    }

    /// Lets go of what conversations have in the cache.
    pub fn forget(&self, conversations: impl IntoIterator<Item = Forget>) {
        let mut waiting = self.lock();
        let room = MAX_FORGET.saturating_sub(waiting.forget.len());
        waiting.forget.extend(conversations.into_iter().take(room));
        self.bell.notify_one();
    }

    /// Goes towards the end; there is no way back.
    pub fn end(&self, end: End) {
        let mut waiting = self.lock();
        waiting.end = waiting.end.max(end);
        self.bell.notify_one();
    }

    /// For the engine's thread: what waits. Nobody holds this lock for longer than it takes to move some requests.
    pub fn lock(&self) -> MutexGuard<'_, Waiting<P, T>> {
        // what is behind the lock is valid after every statement
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// For the engine's thread: sleeps until there is something to do, or for a time.
    pub fn sleep(&self, time: Duration) {
        let waiting = self.lock();
        let idle = waiting.prompts.waiting() == 0 && waiting.texts.waiting() == 0 && waiting.forget.is_empty();
        if idle && waiting.end == End::Open {
            drop(self.bell.wait_timeout(waiting, time));
        }
    }

    fn open(&self) -> Result<MutexGuard<'_, Waiting<P, T>>, Closed> {
        let waiting = self.lock();
        if waiting.end == End::Open { Ok(waiting) } else { Err(Closed::Draining) }
    }
}

/// Requests that were put in together. They are cancelled when it is dropped.
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
        // the engine's thread looks into the list only while something waits
        let (cancelled, n) = match self.are_texts {
            true => (cancelled_texts, texts.waiting()),
            false => (cancelled_prompts, prompts.waiting()),
        };
        if n > 0 {
            cancelled.push(self.ids.clone());
        }
    }
}

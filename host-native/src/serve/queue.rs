//! Messages between HTTP handlers and the engine thread: jobs, and the updates of each.
//!
//! The channel of a request has room for all of its updates, so the engine never waits for a client. Dropping the receiver
//! ([`Updates`]) cancels the request.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use starling::engine::Request;
pub use starling_api::update::{Failed, Update};
use tokio::sync::mpsc::{Receiver, Sender, channel};

use super::handoff;
pub use super::handoff::{Closed, Forget, Shutdown, Ticket};
use super::trace::{Stages, Trace};

pub type Queue = handoff::Queue<Job, TextJob>;

/// Sends updates to an HTTP handler, each with the index of its answer or text within the request.
pub type UpdateSender = Sender<(usize, Update)>;

/// One answer to a prompt.
#[derive(Debug)]
pub struct Job {
    /// `None` once the engine has it.
    pub request: Option<Box<Request>>,
    /// Index of the answer within its HTTP request.
    pub index: usize,
    pub to: UpdateSender,
    pub times: Times,
    /// Shared by all answers to the prompt; the others wait for the prefill by the one that `leads`.
    pub prompt: Arc<PromptKnown>,
    /// Whether this answer computes the prompt for all.
    pub leads: bool,
    /// Trace of the HTTP request.
    pub trace: Trace,
    pub stages: Stages,
}

impl Job {
    /// Sends an update; ignored if the client disconnected.
    pub fn send(&self, update: Update) {
        let _ = self.to.try_send((self.index, update));
    }

    /// Ends the trace of an answer that failed, or was cancelled (`None`).
    pub fn end_trace(&self, failed: Option<&Failed>) {
        self.stages.end(&self.trace, self.index, failed.map_or("cancelled", Failed::name));
    }
}

/// A text to embed.
#[derive(Debug)]
pub struct TextJob {
    /// Index of the text within its HTTP request.
    pub index: usize,
    pub tokens: Vec<u32>,
    /// Length of the vector, if shortened.
    pub dimensions: Option<usize>,
    pub to: UpdateSender,
    pub times: Times,
}

impl TextJob {
    /// Sends an update; ignored if the client disconnected.
    pub fn send(&self, update: Update) {
        let _ = self.to.try_send((self.index, update));
    }
}

/// Arrival and timeouts of a request.
#[derive(Debug, Clone, Copy)]
pub struct Times {
    /// Time of arrival.
    pub came: Instant,
    /// `queue_timeout`.
    pub queue: Duration,
    /// `request_timeout`.
    pub total: Duration,
}

impl Times {
    /// End of the time in the queue.
    pub fn deadline(&self) -> Instant {
        self.came + self.queue.min(self.total)
    }

    /// The timeout of a queued request, if it has expired.
    pub fn expired_in_queue(&self, now: Instant) -> Option<Failed> {
        let waited = now.saturating_duration_since(self.came);
        let expired = (waited > self.queue).then_some(Failed::QueueTimeout(self.queue.as_secs_f64()));
        expired.or_else(|| self.expired(now))
    }

    /// The timeout of a running request, if it has expired.
    pub fn expired(&self, now: Instant) -> Option<Failed> {
        let took = now.saturating_duration_since(self.came);
        (took > self.total).then_some(Failed::Timeout(self.total.as_secs_f64()))
    }
}

/// Whether answers that share a prompt may start: it is in the prefix cache, or the answer that computes it has ended.
#[derive(Debug, Default)]
pub struct PromptKnown(AtomicBool);

impl PromptKnown {
    pub fn set(&self) {
        self.0.store(true, Ordering::Release);
    }

    pub fn get(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// Receives the updates of one HTTP request, each with the index of its answer or text.
#[derive(Debug)]
pub struct Updates {
    receiver: Receiver<(usize, Update)>,
    /// Cancels queued jobs when it is dropped.
    ticket: Option<Ticket<Job, TextJob>>,
}

impl Updates {
    /// The next update; `None` if the engine thread has panicked.
    pub async fn recv(&mut self) -> Option<(usize, Update)> {
        self.receiver.recv().await
    }

    /// Poll form of [`Updates::recv`].
    pub fn poll_recv(&mut self, context: &mut Context<'_>) -> Poll<Option<(usize, Update)>> {
        self.receiver.poll_recv(context)
    }

    /// Makes the receiver own the ticket: dropping the receiver cancels the jobs.
    pub fn hold(&mut self, ticket: Ticket<Job, TextJob>) {
        self.ticket = Some(ticket);
    }
}

/// A channel with room for all updates of `n` answers or texts, each with at most `each` tokens.
pub fn updates(n: usize, each: usize) -> (UpdateSender, Updates) {
    let room = each.saturating_add(4).saturating_mul(n);
    let (to, receiver) = channel(room.min(tokio::sync::Semaphore::MAX_PERMITS));
    (to, Updates { receiver, ticket: None })
}

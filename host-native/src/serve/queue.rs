//! What goes from HTTP to the engine's thread and back: requests, and the updates of each.
//!
//! The channel of a request has room for all of its updates, so the engine never waits for a client. A request is
//! cancelled by dropping its receiver ([`Updates`]).

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use starling::engine::Request;
pub use starling_api::update::{Failed, Update};
use tokio::sync::mpsc::{Receiver, Sender, channel};

use super::handoff;
pub use super::handoff::{Closed, End, Forget, Ticket};
use super::trace::{Stages, Trace};

/// The queues of requests for the engine's thread.
pub type Queue = handoff::Queue<Job, TextJob>;

/// The way back to an HTTP request: updates with the number of the answer or text that they are about.
pub type Back = Sender<(usize, Update)>;

/// A prompt to be continued.
#[derive(Debug)]
pub struct Job {
    /// For the engine, which takes it.
    pub request: Option<Box<Request>>,
    /// Which answer of its HTTP request.
    pub index: usize,
    /// Where updates go.
    pub to: Back,
    /// When and how long.
    pub times: Times,
    /// Set when the prompt is in the cache, or will not come there. Other answers to the same prompt wait for it.
    pub prompt: Arc<PromptKnown>,
    /// Whether this is the answer that brings it there.
    pub leads: bool,
    /// The trace of its HTTP request, and where this answer is in it.
    pub trace: Trace,
    /// Its stages so far.
    pub stages: Stages,
}

impl Job {
    /// Says something about the request; its client may be gone.
    pub fn say(&self, update: Update) {
        let _ = self.to.try_send((self.index, update));
    }

    /// It ends without an answer: given up, or failed.
    pub fn over(&self, failed: Option<&Failed>) {
        self.stages.over(&self.trace, self.index, failed.map_or("cancelled", Failed::name));
    }
}

/// A text to be embedded.
#[derive(Debug)]
pub struct TextJob {
    /// Which text of its HTTP request.
    pub index: usize,
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// How many numbers are wanted.
    pub dimensions: Option<usize>,
    /// Where updates go.
    pub to: Back,
    /// When and how long.
    pub times: Times,
}

impl TextJob {
    /// Says something about the text; its client may be gone.
    pub fn say(&self, update: Update) {
        let _ = self.to.try_send((self.index, update));
    }
}

/// When a request came, and until when it may wait and take.
#[derive(Debug, Clone, Copy)]
pub struct Times {
    /// When it came.
    pub came: Instant,
    /// How long it may wait.
    pub queue: Duration,
    /// How long it may take in all.
    pub total: Duration,
}

impl Times {
    /// Until when it may wait.
    pub fn deadline(&self) -> Instant {
        self.came + self.queue.min(self.total)
    }

    /// Why a waiting request is over by now, if it is.
    pub fn over_waiting(&self, now: Instant) -> Option<Failed> {
        let waited = now.saturating_duration_since(self.came);
        let over = (waited > self.queue).then_some(Failed::QueueTimeout(self.queue.as_secs_f64()));
        over.or_else(|| self.over(now))
    }

    /// Why a running request is over by now, if it is.
    pub fn over(&self, now: Instant) -> Option<Failed> {
        let took = now.saturating_duration_since(self.came);
        (took > self.total).then_some(Failed::Timeout(self.total.as_secs_f64()))
    }
}

/// Whether the prompt that several answers share is in the cache.
#[derive(Debug, Default)]
pub struct PromptKnown(AtomicBool);

impl PromptKnown {
    /// It is, or never will be.
    pub fn set(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Whether nobody need wait for it.
    pub fn get(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// The receiver of the updates of one HTTP request: each with the number of its answer or text.
#[derive(Debug)]
pub struct Updates {
    receiver: Receiver<(usize, Update)>,
    /// Removes what still waits when the receiver is dropped.
    ticket: Option<Ticket<Job, TextJob>>,
}

impl Updates {
    /// The next update; `None` if the engine's thread has failed.
    pub async fn recv(&mut self) -> Option<(usize, Update)> {
        self.receiver.recv().await
    }

    /// The same, as a poll.
    pub fn poll_recv(&mut self, context: &mut Context<'_>) -> Poll<Option<(usize, Update)>> {
        self.receiver.poll_recv(context)
    }

    /// Cancels the requests of a ticket when this receiver is dropped.
    pub fn hold(&mut self, ticket: Ticket<Job, TextJob>) {
        self.ticket = Some(ticket);
    }
}

/// The channel of a request with `n` answers or texts, each of which has at most `each` updates between its start and its
/// end.
pub fn updates(n: usize, each: usize) -> (Back, Updates) {
    let room = each.saturating_add(4).saturating_mul(n);
    let (to, receiver) = channel(room.min(tokio::sync::Semaphore::MAX_PERMITS));
    (to, Updates { receiver, ticket: None })
}

//! Messages between HTTP handlers and the engine thread: jobs, and the updates of each.
//!
//! The channel of a request has room for all of its updates, so the engine never waits for a client. Dropping the receiver
//! ([`Updates`]) cancels the request.

use std::future::poll_fn;
use std::hash::{Hash, Hasher};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use starling::embed::Pooling;
use starling::engine::{FinishReason, Request};
use starling::receipt::Receipt;
pub use starling_api::update::{Failed, Update};
use tokio::sync::mpsc::{Receiver, Sender, channel};

use super::breaker::Trial;
use super::faults::Faults;
use super::handoff;
pub use super::handoff::{Closed, PrefixEviction, Shutdown, Ticket};
use crate::observe::trace::{Stages, Trace};
use crate::observe::usage::Usage;

pub type Queue = handoff::Queue<Job, TextJob>;

/// Sends updates to an HTTP handler, each with the index of its answer or text within the request.
pub type UpdateSender = Sender<(usize, Update)>;

/// One answer to a prompt.
#[derive(Debug)]
pub struct Job {
    pub group: Arc<SequenceGroup>,
    /// Index of the answer within its group.
    pub sequence: u64,
    /// The request, once the engine has given it back for lack of KV pages.
    pub refused: Option<Box<Request>>,
    /// Whether KV pages of the prompt were looked up on disk.
    pub is_looked_up: bool,
    /// What the client has received already, if a worker was lost.
    pub progress: Progress,
    /// ID of the HTTP request.
    pub request_id: Arc<str>,
    /// Index of the answer within its HTTP request.
    pub index: usize,
    pub to: UpdateSender,
    pub times: Deadlines,
    /// Trace of the HTTP request.
    pub trace: Trace,
    pub stages: Stages,
}

/// The part of an answer that has been sent. Another worker continues after it, with the same bytes.
#[derive(Debug, Default)]
pub struct Progress {
    /// Whether [`Update::Started`] has been sent.
    pub is_started: bool,
    /// Whether [`Update::Prefilled`] has been sent.
    pub is_prefilled: bool,
    /// Tokens whose updates have been sent.
    pub tokens: Vec<u32>,
    /// Next of `tokens` to be generated again rather than sent: a receipt needs the hidden states of all of them.
    pub n_repeated: usize,
    /// Tokens drafted, and those of them that were sampled.
    pub drafts: (usize, usize),
    pub faults: Faults,
}

impl Job {
    /// Whether the engine may have it now.
    pub fn is_ready(&self) -> bool {
        self.sequence == 0 || self.group.is_computed.load(Ordering::Acquire)
    }

    /// Takes the request to submit to the engine.
    pub fn request(&mut self) -> Box<Request> {
        let mut request = self.refused.take().unwrap_or_else(|| Box::new(self.group.request(self.sequence)));
        self.progress.n_repeated = 0;
        if !request.receipt {
            request.generated.clone_from(&self.progress.tokens);
            self.progress.n_repeated = self.progress.tokens.len();
        }
        request
    }

    /// Notes a generated token. Returns whether the client has it already.
    pub fn is_repeated(&mut self, token: u32) -> bool {
        let progress = &mut self.progress;
        if progress.n_repeated < progress.tokens.len() {
            progress.n_repeated += 1;
            return true;
        }
        progress.tokens.push(token);
        progress.n_repeated += 1;
        false
    }

    /// Sends the end of the answer, and the number of its draft tokens if the request has a prediction.
    pub fn send_done(&self, text: String, reason: FinishReason, n_tokens: usize, receipt: Option<Box<Receipt>>) {
        if !self.group.first.speculation.prediction.is_empty() {
            let (n_drafted, n_accepted) = self.progress.drafts;
            self.send(Update::Drafted { n_accepted, n_rejected: n_drafted - n_accepted });
        }
        self.send(Update::Done { text, reason, n_tokens, receipt });
    }

    /// Lets the other answers of the group start: their prompt has been computed, or the answer that computes it has ended.
    pub fn start_others(&self) {
        if self.sequence == 0 {
            self.group.is_computed.store(true, Ordering::Release);
        }
    }

    /// Sends an update; ignored if the client disconnected.
    pub fn send(&self, update: Update) {
        let _ = self.to.try_send((self.index, update));
    }

    /// The timeout of a queued answer, if it has expired. One that has run already has no time limit in the queue.
    pub fn expired_in_queue(&self, now: Instant) -> Option<Failed> {
        if self.progress.is_started { self.times.expired(now) } else { self.times.expired_in_queue(now) }
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
    /// `None` for the model's.
    pub pooling: Option<Pooling>,
    pub to: UpdateSender,
    pub times: Deadlines,
    /// ID of the HTTP request.
    pub request_id: Arc<str>,
    /// Times that the worker was lost while it embedded this text.
    pub n_faults: u32,
}

impl TextJob {
    /// Sends an update; ignored if the client disconnected.
    pub fn send(&self, update: Update) {
        let _ = self.to.try_send((self.index, update));
    }
}

/// Arrival and timeouts of a request.
#[derive(Debug, Clone, Copy)]
pub struct Deadlines {
    pub arrival: Instant,
    /// `queue_timeout`.
    pub queue: Duration,
    /// `request_timeout`.
    pub total: Duration,
    /// Whether an answer ends with what it has when `total` is over.
    pub partial: bool,
    /// Whether `total` is the request's own limit, shorter than the server's.
    pub is_own: bool,
}

impl Deadlines {
    /// End of the time in the queue.
    pub fn deadline(&self) -> Instant {
        self.arrival + self.queue.min(self.total)
    }

    /// The timeout of a queued request, if it has expired.
    pub fn expired_in_queue(&self, now: Instant) -> Option<Failed> {
        let waited = now.saturating_duration_since(self.arrival);
        let expired = (waited > self.queue).then_some(Failed::QueueTimeout(self.queue.as_secs_f64()));
        expired.or_else(|| self.expired(now))
    }

    /// The timeout of a running request, if it has expired.
    pub fn expired(&self, now: Instant) -> Option<Failed> {
        let took = now.saturating_duration_since(self.arrival);
        (took > self.total).then_some(Failed::Timeout(self.total.as_secs_f64()))
    }
}

/// The answers to one prompt. The first computes the prompt; the others start once it is in the prefix cache.
#[derive(Debug)]
pub struct SequenceGroup {
    /// The request of the first answer.
    first: Request,
    is_computed: AtomicBool,
    /// The worker that has the prompt in its cache; [`SequenceGroup::NO_WORKER`] before the first answer starts.
    worker: AtomicU32,
    prefix: OnceLock<Vec<u64>>,
}

impl SequenceGroup {
    const NO_WORKER: u32 = u32::MAX;

    pub fn new(first: Request) -> SequenceGroup {
        let worker = AtomicU32::new(SequenceGroup::NO_WORKER);
        SequenceGroup { first, is_computed: AtomicBool::new(false), worker, prefix: OnceLock::new() }
    }

    /// The worker of the first answer, which the others follow.
    pub fn worker(&self) -> Option<u32> {
        let id = self.worker.load(Ordering::Acquire);
        (id != SequenceGroup::NO_WORKER).then_some(id)
    }

    pub fn set_worker(&self, id: Option<u32>) {
        self.worker.store(id.unwrap_or(SequenceGroup::NO_WORKER), Ordering::Release);
    }

    /// The request of the first answer.
    pub fn first(&self) -> &Request {
        &self.first
    }

    /// Hashes of the prompt's prefixes of whole KV pages, the shortest first.
    pub fn prefix(&self) -> &[u64] {
        self.prefix.get_or_init(|| prefix_hashes(&self.first.tokens, self.first.cache_salt))
    }

    fn request(&self, sequence: u64) -> Request {
        let first = &self.first;
        // the prompt's log-probabilities are those of the first answer; one without tokens has nothing else
        let prompt_logprobs = first.prompt_logprobs && (sequence == 0 || first.max_tokens == Some(0));
        Request { sequence, prompt_logprobs, ..first.clone() }
    }
}

/// Hashes of the prefixes of whole KV pages. They choose a worker and nothing else, so a collision costs a cache miss.
fn prefix_hashes(tokens: &[u32], salt: u64) -> Vec<u64> {
    let mut hash = std::hash::DefaultHasher::new();
    salt.hash(&mut hash);
    let pages = tokens.chunks_exact(starling::kernels::attention::PAGE);
    pages
        .map(|page| {
            page.hash(&mut hash);
            hash.finish()
        })
        .collect()
}

type Observer = Box<dyn FnMut(&Update) + Send>;

/// Receives the updates of one HTTP request from the engine, each with the index of its answer or text.
pub struct EngineUpdates {
    receiver: Receiver<(usize, Update)>,
    usage: Arc<Usage>,
    /// Cancels queued jobs when it is dropped.
    ticket: Option<Ticket<Job, TextJob>>,
    /// Ends with the request: without an answer another may try the model.
    trial: Option<Trial>,
    /// Sees each update; dropped with the receiver.
    observer: Option<Observer>,
}

impl EngineUpdates {
    /// The next update; `None` if the model was unloaded by force.
    pub async fn recv(&mut self) -> Option<(usize, Update)> {
        poll_fn(|context| self.poll_recv(context)).await
    }

    /// Poll form of [`EngineUpdates::recv`].
    pub fn poll_recv(&mut self, context: &mut Context<'_>) -> Poll<Option<(usize, Update)>> {
        let Some(next) = ready!(self.receiver.poll_recv(context)) else { return Poll::Ready(None) };
        self.usage.note(&next.1);
        if let Some(observer) = &mut self.observer {
            observer(&next.1);
        }
        Poll::Ready(Some(next))
    }

    /// Calls `observer` with each update.
    pub fn observe(&mut self, observer: impl FnMut(&Update) + Send + 'static) {
        self.observer = Some(Box::new(observer));
    }

    /// Makes the request the trial of the model's circuit breaker.
    pub fn hold_trial(&mut self, trial: Option<Trial>) {
        self.trial = trial;
    }

    /// Makes the receiver own the ticket: dropping the receiver cancels the jobs.
    pub fn hold(&mut self, ticket: Ticket<Job, TextJob>) {
        self.ticket = Some(ticket);
    }
}

/// A channel with room for all updates of `n` answers or texts, each with at most `each` tokens, which are counted in `usage`.
pub fn updates(n: usize, each: usize, usage: Arc<Usage>) -> (UpdateSender, EngineUpdates) {
    let room = each.saturating_add(5).saturating_mul(n);
    let (to, receiver) = channel(room.min(tokio::sync::Semaphore::MAX_PERMITS));
    (to, EngineUpdates { receiver, usage, ticket: None, trial: None, observer: None })
}

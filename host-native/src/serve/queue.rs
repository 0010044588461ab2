//! The way from HTTP to the engine's thread: bounded queues of closed commands, and a channel back for each request.
//!
//! Handlers put commands in and never wait for the engine; the engine's thread takes them between two steps. A channel
//! back has room for everything its request can say, so the engine never waits for a client. That its receiver is gone
//! is how a request is given up.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use starling::engine::{FinishReason, Request, TokenLogprobs};
use starling::error::RequestError;
use starling::receipt::Receipt;
use tokio::sync::mpsc::{Receiver, Sender, channel};

use super::scheduler::{Flow, Limits, Refused, Scheduler};
use super::trace::{Stages, Trace};

/// What the engine's thread says of a request.
#[derive(Debug)]
pub enum Update {
    /// It has left the queue.
    Started,
    /// Its prompt was processed; so many of its tokens were found in the cache.
    Prefilled {
        /// Tokens found in the cache.
        n_cached: usize,
        /// Log-probabilities of its tokens after the first, if asked for.
        prompt: Vec<TokenLogprobs>,
    },
    /// A token was picked.
    Token {
        /// The token.
        token: u32,
        /// Text that is certain now.
        text: String,
        /// Natural logarithm of its probability, if asked for.
        logprob: f32,
        /// The most probable tokens with theirs, if asked for.
        top: Vec<(u32, f32)>,
    },
    /// The answer is complete.
    Done {
        /// Text that was held back.
        text: String,
        /// Why it ended.
        reason: FinishReason,
        /// Tokens picked.
        n_tokens: usize,
        /// If asked for.
        receipt: Option<Box<Receipt>>,
    },
    /// The vector of a text.
    Vector {
        /// Its numbers; none where they are not finite.
        vector: Option<Vec<f32>>,
    },
    /// There will be no more.
    Failed(Failed),
}

/// Why a request ended without an answer.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Failed {
    /// It waited too long.
    #[error("the request waited longer than {0} s")]
    QueueTimeout(f64),
    /// It took too long.
    #[error("the request took longer than {0} s")]
    Timeout(f64),
    /// The server ends.
    #[error("the server is shutting down")]
    Shutdown,
    /// The engine refuses it.
    #[error(transparent)]
    Request(#[from] RequestError),
}

impl Failed {
    /// The name, for traces.
    pub const fn name(&self) -> &'static str {
        match self {
            Failed::QueueTimeout(_) => "queue_timeout",
            Failed::Timeout(_) => "timeout",
            Failed::Shutdown => "shutting_down",
            Failed::Request(_) => "refused",
        }
    }
}

/// The way back to an HTTP request: updates with the number of the answer or text that they are about.
pub type Back = Sender<(usize, Update)>;

/// A prompt to be continued.
#[derive(Debug)]
pub struct Job {
    /// For the engine.
    pub request: Request,
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

/// What waits for the engine's thread.
pub struct Queue {
    inner: Mutex<Waiting>,
    bell: Condvar,
}

/// The queues themselves.
pub struct Waiting {
    /// Prompts.
    pub prompts: Scheduler<Job>,
    /// Texts to embed.
    pub texts: Scheduler<TextJob>,
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

impl Queue {
    /// Empty queues. `limits` are for prompts; texts are many and small, so theirs are a multiple.
    pub fn new(limits: Limits, max_inputs: usize) -> Queue {
        let times = |n: usize| n.saturating_mul(max_inputs.max(1));
        let texts = Limits {
            high: times(limits.high),
            low: times(limits.low),
            tenant_requests: times(limits.tenant_requests),
            ..limits
        };
        let (prompts, texts) = (Scheduler::new(limits), Scheduler::new(texts));
        let inner = Mutex::new(Waiting { prompts, texts, forget: Vec::new(), end: End::Open });
        Queue { inner, bell: Condvar::new() }
    }

    /// Puts in answers to one prompt, of `tokens` each, all or none.
    ///
    /// # Errors
    /// Why not.
    pub fn generate(&self, flow: &Flow, tokens: usize, jobs: Vec<Job>) -> Result<(), Closed> {
        let mut waiting = self.open()?;
        waiting.prompts.offer(flow, tokens, jobs)?;
        self.bell.notify_one();
        Ok(())
    }

    /// Puts in texts to embed, all or none.
    ///
    /// # Errors
    /// Why not.
    pub fn embed(&self, flow: &Flow, jobs: Vec<TextJob>) -> Result<(), Closed> {
        let mut waiting = self.open()?;
        let tokens = jobs.iter().map(|job| job.tokens.len()).sum::<usize>().div_ceil(jobs.len().max(1));
        waiting.texts.offer(flow, tokens, jobs)?;
        self.bell.notify_one();
        Ok(())
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
    pub fn lock(&self) -> MutexGuard<'_, Waiting> {
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

    fn open(&self) -> Result<MutexGuard<'_, Waiting>, Closed> {
        let waiting = self.lock();
        if waiting.end == End::Open { Ok(waiting) } else { Err(Closed::Draining) }
    }
}

/// The channel back of a request with `n` answers or texts, of which each says at most `each` things between its start
/// and its end.
pub fn updates(n: usize, each: usize) -> (Back, Receiver<(usize, Update)>) {
    let room = each.saturating_add(4).saturating_mul(n);
    channel(room.min(tokio::sync::Semaphore::MAX_PERMITS))
}

//! The engine's thread: takes requests from the queue, runs step after step, and tells each request what came of it.

use std::collections::BTreeMap;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use starling::embed::{Embedder, Pooling, Text};
use starling::engine::{Engine, Event, RequestId, TokenLogprobs};
use starling::error::RequestError;
use starling::kernels::Cpu;
use starling::kv::KvStats;

use super::handoff::Waiting;
use super::metrics::{Metrics, Outcome};
use super::queue::{Back, End, Failed, Forget, Job, Queue, TextJob, Update};
use crate::pool::ThreadPool;

/// How long the thread sleeps when there is nothing to do: it shows that it is alive more often than that.
const NAP: Duration = Duration::from_millis(200);
/// How often the account of pages is copied for those who ask.
const ACCOUNT: Duration = Duration::from_millis(50);

/// What the engine's thread lets others see, without waiting for it.
#[derive(Debug)]
pub struct Pulse {
    start: Instant,
    /// Milliseconds from `start` to the last sign of life.
    beat: AtomicU64,
    /// Whether the thread has ended.
    over: AtomicBool,
    /// Whether it has ended by a fault.
    failed: AtomicBool,
    /// Answers being made.
    pub running: AtomicUsize,
    /// Requests that have left the queue and wait for memory or for a prompt they share.
    pub held: AtomicUsize,
    kv: Mutex<KvStats>,
}

impl Pulse {
    /// Of a thread that is about to start.
    pub fn new() -> Pulse {
        Pulse {
            start: Instant::now(),
            beat: AtomicU64::new(0),
            over: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            running: AtomicUsize::new(0),
            held: AtomicUsize::new(0),
            kv: Mutex::new(KvStats::default()),
        }
    }

    /// How long ago the thread showed that it lives.
    pub fn age(&self) -> Duration {
        let now = self.start.elapsed();
        now.saturating_sub(Duration::from_millis(self.beat.load(Ordering::Relaxed)))
    }

    /// Whether the thread has ended.
    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::Acquire)
    }

    /// Whether a fault has ended it.
    pub fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// Memory of keys and values.
    pub fn kv(&self) -> KvStats {
        *self.kv.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn beat(&self) {
        self.beat.store(self.start.elapsed().as_millis() as u64, Ordering::Relaxed);
    }
}

/// The engine and what belongs to its thread.
pub struct Worker {
    /// For models that continue texts.
    pub engine: Option<Engine>,
    /// For texts to embed.
    pub embedder: Embedder,
    /// How vectors are made from states.
    pub pooling: Pooling,
    /// Instruction set.
    pub cpu: Cpu,
    /// Threads.
    pub pool: ThreadPool,
    /// Where requests come from.
    pub queue: Arc<Queue>,
    /// What others see.
    pub pulse: Arc<Pulse>,
    /// What is counted.
    pub metrics: Arc<Metrics>,
    /// Requests in the engine.
    running: BTreeMap<RequestId, Running>,
    /// Requests that have left the queue but not entered the engine, in order.
    held: Vec<(Arc<str>, Job)>,
    accounted: Option<Instant>,
}

/// A request in the engine.
struct Running {
    tenant: Arc<str>,
    job: Job,
    started: Instant,
    last_token: Option<Instant>,
    /// Log-probabilities of the prompt so far.
    prompt: Vec<TokenLogprobs>,
}

/// Why a request ends now, if it does: the server's end comes before its own.
fn why(end: End, late: Option<Failed>) -> Option<Failed> {
    (end == End::Now).then_some(Failed::Shutdown).or(late)
}

impl Worker {
    /// A worker without requests.
    pub fn new(
        (engine, embedder, pooling): (Option<Engine>, Embedder, Pooling),
        (cpu, pool): (Cpu, ThreadPool),
        (queue, pulse, metrics): (Arc<Queue>, Arc<Pulse>, Arc<Metrics>),
    ) -> Worker {
        let (running, held) = (BTreeMap::new(), Vec::new());
        Worker { engine, embedder, pooling, cpu, pool, queue, pulse, metrics, running, held, accounted: None }
    }

    /// Works until the end. A fault ends the thread, and all requests with it: their channels close.
    pub fn run(mut self) {
        let pulse = Arc::clone(&self.pulse);
        let queue = Arc::clone(&self.queue);
        let work = std::panic::AssertUnwindSafe(move || while self.turn() {});
        if std::panic::catch_unwind(work).is_err() {
            pulse.failed.store(true, Ordering::Release);
            tracing::error!("engine thread panicked: all requests fail; restart the server");
        }
        // who still waits is told by the closed channel
        queue.end(End::Now);
        let mut waiting = queue.lock();
        waiting.prompts.drain();
        waiting.texts.drain();
        drop(waiting);
        pulse.over.store(true, Ordering::Release);
    }

    /// One turn: the queue, a batch of texts, a step of answers. Says whether there is to be another.
    fn turn(&mut self) -> bool {
        self.pulse.beat();
        let end = self.clean_queue();
        self.give_up();
        self.admit();
        let texts = self.texts();
        let worked = !texts.is_empty() || self.engine.as_ref().is_some_and(|e| !e.is_idle());
        self.embed(texts);
        self.step();
        self.account(!worked);
        if worked {
            return true;
        }
        let waiting = self.queue.lock();
        let n = waiting.prompts.waiting() + waiting.texts.waiting() + self.held.len();
        drop(waiting);
        if end != End::Open && n == 0 {
            return false;
        }
        if n == 0 {
            self.queue.sleep(NAP);
        }
        true
    }

    /// Removes requests that were cancelled or waited too long from the queue, and forgets conversations.
    fn clean_queue(&mut self) -> End {
        let now = Instant::now();
        let mut waiting = self.queue.lock();
        let Waiting { prompts, texts, end, .. } = &mut *waiting;
        let end = *end;
        let (mut jobs, mut text_jobs) = match end {
            End::Now => (prompts.drain(), texts.drain()),
            _ => (prompts.expired(now), texts.expired(now)),
        };
        for id in mem::take(&mut waiting.cancelled_prompts).into_iter().flatten() {
            jobs.extend(waiting.prompts.remove(id));
        }
        for id in mem::take(&mut waiting.cancelled_texts).into_iter().flatten() {
            text_jobs.extend(waiting.texts.remove(id));
        }
        let forget = mem::take(&mut waiting.forget);
        drop(waiting);
        if let Some(engine) = &mut self.engine {
            for Forget { tokens, salt } in &forget {
                engine.forget(tokens, *salt);
            }
        }
        for job in jobs {
            let failed = self.failed(end, &job.to, job.times.over_waiting(now));
            job.prompt.set();
            job.over(failed.as_ref());
            failed.into_iter().for_each(|failed| job.say(Update::Failed(failed)));
        }
        for job in text_jobs {
            let failed = self.failed(end, &job.to, job.times.over_waiting(now));
            failed.into_iter().for_each(|failed| job.say(Update::Failed(failed)));
        }
        end
    }

    /// Why a request that left the queue fails, counted; `None` if its client is gone.
    fn failed(&self, end: End, to: &Back, late: Option<Failed>) -> Option<Failed> {
        let failed = why(end, late).filter(|_| !to.is_closed());
        match &failed {
            Some(failed) => self.metrics.failed(failed),
            None => self.metrics.outcomes(Outcome::Cancelled, 1),
        }
        failed
    }

    /// Ends requests in the engine, or at its door, whose client is gone, or whose time is up.
    fn give_up(&mut self) {
        let now = Instant::now();
        let end = self.queue.lock().end;
        let late = |job: &Job, late: Option<Failed>| why(end, late).filter(|_| !job.to.is_closed());
        let mut over = Vec::new();
        for (id, running) in &self.running {
            let failed = late(&running.job, running.job.times.over(now));
            if failed.is_some() || running.job.to.is_closed() {
                over.push((*id, failed));
            }
        }
        for (id, failed) in over {
            if let Some(engine) = &mut self.engine {
                engine.cancel(id);
            }
            if let Some(running) = self.running.remove(&id) {
                self.close(&running.tenant, &running.job, failed);
            }
        }
        let mut stay = Vec::new();
        for (tenant, job) in mem::take(&mut self.held) {
            let failed = late(&job, job.times.over_waiting(now));
            if failed.is_some() || job.to.is_closed() {
                self.close(&tenant, &job, failed);
            } else {
                stay.push((tenant, job));
            }
        }
        self.held = stay;
    }

    /// The end of a request without an answer: given up, or failed.
    fn close(&self, tenant: &Arc<str>, job: &Job, failed: Option<Failed>) {
        job.prompt.set();
        job.over(failed.as_ref());
        self.queue.lock().prompts.ended(tenant);
        match failed {
            None => self.metrics.outcomes(Outcome::Cancelled, 1),
            Some(why) => {
                self.metrics.failed(&why);
                job.say(Update::Failed(why));
            }
        }
    }

    /// Lets requests into the engine, as far as there is room. One that finds no memory waits at the door, and nobody
    /// overtakes it but answers to prompts that are known by now.
    fn admit(&mut self) {
        let Some(mut engine) = self.engine.take() else { return };
        let mut no_memory = false;
        let mut door = mem::take(&mut self.held).into_iter();
        while engine.active() < engine.options().max_seqs {
            let next = door.next().or_else(|| if no_memory { None } else { self.queue.lock().prompts.take() });
            let Some((tenant, mut job)) = next else { break };
            if no_memory || !(job.leads || job.prompt.get()) {
                self.held.push((tenant, job));
                continue;
            }
            let Some(request) = job.request.take() else { continue };
            match engine.try_submit(request) {
                Ok(id) => {
                    let started = Instant::now();
                    self.metrics.queue_time(started - job.times.came);
                    job.stages.taken(&job.trace, job.index);
                    job.say(Update::Started);
                    let running = Running { tenant, job, started, last_token: None, prompt: Vec::new() };
                    self.running.insert(id, running);
                }
                Err((RequestError::NoCapacity { .. }, request)) if engine.active() > 0 => {
                    no_memory = true;
                    job.request = Some(request);
                    self.held.push((tenant, job));
                }
                Err((e, _)) => self.close(&tenant, &job, Some(e.into())),
            }
        }
        self.held.extend(door);
        self.pulse.held.store(self.held.len(), Ordering::Relaxed);
        self.engine = Some(engine);
    }

    /// A batch of texts that wait.
    fn texts(&mut self) -> Vec<(Arc<str>, TextJob)> {
        let options = self.embedder.options();
        let (mut left, max_texts) = (options.batch_tokens, options.max_texts);
        let mut batch = Vec::new();
        let mut waiting = self.queue.lock();
        // the last one taken may be the first that does not fit: then it makes a batch with those after it
        while batch.len() < max_texts && left > 0 {
            let Some((tenant, job)) = waiting.texts.take() else { break };
            left = left.saturating_sub(job.tokens.len());
            batch.push((tenant, job));
        }
        batch
    }

    /// Embeds texts, in one batch or two.
    fn embed(&mut self, texts: Vec<(Arc<str>, TextJob)>) {
        let mut left = &texts[..];
        while !left.is_empty() {
            let n = self.embedder.fit(left.iter().map(|(_, job)| job.tokens.len())).max(1);
            let (batch, rest) = left.split_at(n);
            left = rest;
            let pooling = self.pooling;
            let texts: Vec<Text<'_>> = batch
                .iter()
                .map(|(_, job)| Text { tokens: &job.tokens, pooling, dimensions: job.dimensions, normalise: true })
                .collect();
            let result = self.embedder.embed(self.cpu, &self.pool, &texts, &mut |i, vector| {
                batch[i].1.say(Update::Vector { vector: vector.map(<[f32]>::to_vec) });
            });
            let tokens: usize = texts.iter().map(|text| text.tokens.len()).sum();
            self.metrics.embedded(batch.len(), tokens);
            if let Err(e) = result {
                for (_, job) in batch {
                    job.say(Update::Failed(e.clone().into()));
                }
            }
        }
        let mut waiting = self.queue.lock();
        texts.iter().for_each(|(tenant, _)| waiting.texts.ended(tenant));
    }

    /// One step of all answers.
    fn step(&mut self) {
        let Some(engine) = self.engine.as_mut().filter(|e| !e.is_idle()) else { return };
        let (running, metrics, queue) = (&mut self.running, &self.metrics, &self.queue);
        let begin = Instant::now();
        let n_running = engine.active();
        let mut rows = 0;
        // between events the engine picks
        let (mut forward, mut picks_from) = (Duration::ZERO, begin);
        let n = engine.step(self.cpu, &self.pool, &mut |event| match event {
            Event::Computed { .. } => {
                picks_from = Instant::now();
                forward = picks_from - begin;
            }
            Event::Preempted { .. } => metrics.preempted(),
            Event::Prompt { id, logprobs } => {
                let Some(r) = running.get_mut(&id) else { return };
                r.prompt.extend(logprobs);
            }
            Event::Prefilled { id, n_cached, n_prompt } => {
                let Some(r) = running.get_mut(&id) else { return };
                r.job.prompt.set();
                r.job.stages.prefilled(&r.job.trace, r.job.index, picks_from, (n_prompt, n_cached));
                metrics.prefilled(n_prompt, n_cached, r.started.elapsed());
                r.job.say(Update::Prefilled { n_cached, prompt: mem::take(&mut r.prompt) });
            }
            Event::Token { id, token, text, logprob, top } => {
                let Some(r) = running.get_mut(&id) else { return };
                let now = Instant::now();
                match r.last_token.replace(now) {
                    None => metrics.first_token(now - r.job.times.came),
                    Some(last) => {
                        rows += 1;
                        metrics.next_token(now - last);
                    }
                }
                r.job.stages.token(forward, mem::replace(&mut picks_from, now), now);
                r.job.say(Update::Token { token, text, logprob, top });
            }
            Event::Done { id, text, reason, n_tokens, receipt } => {
                let Some(r) = running.remove(&id) else { return };
                r.job.stages.over(&r.job.trace, r.job.index, reason.name());
                metrics.done(reason, n_tokens, r.job.times.came.elapsed());
                queue.lock().prompts.ended(&r.tenant);
                r.job.say(Update::Done { text, reason, n_tokens, receipt });
            }
        });
        metrics.step(n_running, n.saturating_sub(rows), begin.elapsed());
    }

    /// Lets others see how things stand.
    fn account(&mut self, idle: bool) {
        let active = self.engine.as_ref().map_or(0, Engine::active);
        self.pulse.running.store(active, Ordering::Relaxed);
        let now = Instant::now();
        if !idle && self.accounted.is_some_and(|at| now - at < ACCOUNT) {
            return;
        }
        self.accounted = Some(now);
        if let Some(engine) = &self.engine {
            *self.pulse.kv.lock().unwrap_or_else(PoisonError::into_inner) = engine.kv_stats();
        }
    }
}

//! The engine thread: takes jobs from the queue, runs engine steps, and sends each job its updates.

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
use super::queue::{Failed, Forget, Job, Queue, Shutdown, TextJob, Update, UpdateSender};
use super::scheduler::Queued;
use crate::pool::ThreadPool;

/// Maximum sleep of the idle thread; it bounds the age of the heartbeat.
const IDLE_WAIT: Duration = Duration::from_millis(200);
/// Interval at which the engine thread publishes the KV statistics while it works.
const KV_STATS_INTERVAL: Duration = Duration::from_millis(50);

/// State of the engine thread that other threads read without waiting for it.
#[derive(Debug)]
pub struct WorkerStatus {
    start: Instant,
    /// Milliseconds from `start` to the last turn of the loop.
    heartbeat: AtomicU64,
    /// Whether the thread has ended.
    ended: AtomicBool,
    /// Whether it has ended by a panic.
    failed: AtomicBool,
    /// Requests in the engine.
    pub running: AtomicUsize,
    kv: Mutex<KvStats>,
}

impl WorkerStatus {
    pub fn new() -> WorkerStatus {
        WorkerStatus {
            start: Instant::now(),
            heartbeat: AtomicU64::new(0),
            ended: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            running: AtomicUsize::new(0),
            kv: Mutex::new(KvStats::default()),
        }
    }

    /// Time since the last heartbeat.
    pub fn age(&self) -> Duration {
        let now = self.start.elapsed();
        now.saturating_sub(Duration::from_millis(self.heartbeat.load(Ordering::Relaxed)))
    }

    pub fn has_ended(&self) -> bool {
        self.ended.load(Ordering::Acquire)
    }

    /// Whether a panic has ended the thread.
    pub fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// The last published KV statistics.
    pub fn kv(&self) -> KvStats {
        *self.kv.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn beat(&self) {
        self.heartbeat.store(self.start.elapsed().as_millis() as u64, Ordering::Relaxed);
    }
}

/// State of the engine thread.
pub struct Worker {
    /// `None` for encoders, which only embed.
    pub engine: Option<Engine>,
    pub embedder: Embedder,
    pub pooling: Pooling,
    pub cpu: Cpu,
    pub pool: ThreadPool,
    pub queue: Arc<Queue>,
    pub status: Arc<WorkerStatus>,
    pub metrics: Arc<Metrics>,
    /// Jobs in the engine.
    running: BTreeMap<RequestId, Running>,
    kv_stats_published: Option<Instant>,
}

/// A job in the engine.
struct Running {
    tenant: Arc<str>,
    job: Job,
    started: Instant,
    last_token: Option<Instant>,
    /// Log-probabilities of the prompt so far.
    prompt: Vec<TokenLogprobs>,
}

/// Why a job fails now; a shutdown takes precedence over a timeout.
fn failure(shutdown: Shutdown, timeout: Option<Failed>) -> Option<Failed> {
    (shutdown == Shutdown::Now).then_some(Failed::Shutdown).or(timeout)
}

impl Worker {
    pub fn new(
        (engine, embedder, pooling): (Option<Engine>, Embedder, Pooling),
        (cpu, pool): (Cpu, ThreadPool),
        (queue, status, metrics): (Arc<Queue>, Arc<WorkerStatus>, Arc<Metrics>),
    ) -> Worker {
        let (running, kv_stats_published) = (BTreeMap::new(), None);
        Worker { engine, embedder, pooling, cpu, pool, queue, status, metrics, running, kv_stats_published }
    }

    /// Runs until the shutdown is complete. A panic ends the thread and fails all requests: their channels close.
    pub fn run(mut self) {
        let status = Arc::clone(&self.status);
        let queue = Arc::clone(&self.queue);
        let work = std::panic::AssertUnwindSafe(move || while self.turn() {});
        if std::panic::catch_unwind(work).is_err() {
            status.failed.store(true, Ordering::Release);
            tracing::error!("engine thread panicked: all requests fail and the server exits");
        }
        // dropping queued jobs closes their channels, which tells their handlers
        queue.shut_down(Shutdown::Now);
        let mut waiting = queue.lock();
        waiting.prompts.drain();
        waiting.texts.drain();
        drop(waiting);
        status.ended.store(true, Ordering::Release);
    }

    /// One turn of the loop: admission, a batch of texts, an engine step. Returns whether to continue.
    fn turn(&mut self) -> bool {
        self.status.beat();
        let shutdown = self.expire_queued();
        self.drop_cancelled();
        self.admit();
        let texts = self.take_texts();
        let worked = !texts.is_empty() || self.engine.as_ref().is_some_and(|e| !e.is_idle());
        self.embed(texts);
        self.step();
        self.publish_kv_stats(!worked);
        if worked {
            return true;
        }
        let waiting = self.queue.lock();
        let n = waiting.prompts.waiting() + waiting.texts.waiting();
        drop(waiting);
        if shutdown != Shutdown::None && n == 0 {
            return false;
        }
        if n == 0 {
            self.queue.wait(IDLE_WAIT);
        }
        true
    }

    /// Removes cancelled and expired jobs from the queue, and evicts closed sessions from the prefix cache.
    fn expire_queued(&mut self) -> Shutdown {
        let now = Instant::now();
        let mut waiting = self.queue.lock();
        let Waiting { prompts, texts, shutdown, .. } = &mut *waiting;
        let shutdown = *shutdown;
        let (mut jobs, mut text_jobs) = match shutdown {
            Shutdown::Now => (prompts.drain(), texts.drain()),
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
                engine.evict_prefix(tokens, *salt);
            }
        }
        for job in jobs {
            let failed = self.failed(shutdown, &job.to, job.times.expired_in_queue(now));
            job.start_others();
            job.end_trace(failed.as_ref());
            failed.into_iter().for_each(|failed| job.send(Update::Failed(failed)));
        }
        for job in text_jobs {
            let failed = self.failed(shutdown, &job.to, job.times.expired_in_queue(now));
            failed.into_iter().for_each(|failed| job.send(Update::Failed(failed)));
        }
        shutdown
    }

    /// Counts a job that was removed from the queue. Returns its error, or `None` if the client disconnected.
    fn failed(&self, shutdown: Shutdown, to: &UpdateSender, timeout: Option<Failed>) -> Option<Failed> {
        let failed = failure(shutdown, timeout).filter(|_| !to.is_closed());
        match &failed {
            Some(failed) => self.metrics.failed(failed),
            None => self.metrics.outcomes(Outcome::Cancelled, 1),
        }
        failed
    }

    /// Ends running jobs whose client disconnected or whose timeout expired.
    fn drop_cancelled(&mut self) {
        let now = Instant::now();
        let shutdown = self.queue.lock().shutdown;
        let failure = |job: &Job, timeout: Option<Failed>| failure(shutdown, timeout).filter(|_| !job.to.is_closed());
        let mut ended = Vec::new();
        for (id, running) in &self.running {
            let failed = failure(&running.job, running.job.times.expired(now));
            if failed.is_some() || running.job.to.is_closed() {
                ended.push((*id, failed));
            }
        }
        for (id, failed) in ended {
            if let Some(engine) = &mut self.engine {
                engine.cancel(id);
            }
            if let Some(running) = self.running.remove(&id) {
                self.close(&running.tenant, &running.job, failed);
            }
        }
    }

    /// Ends a job that failed, or was cancelled (`None`).
    fn close(&self, tenant: &Arc<str>, job: &Job, failed: Option<Failed>) {
        job.start_others();
        job.end_trace(failed.as_ref());
        self.queue.lock().prompts.release(tenant);
        match failed {
            None => self.metrics.outcomes(Outcome::Cancelled, 1),
            Some(failed) => {
                self.metrics.failed(&failed);
                job.send(Update::Failed(failed));
            }
        }
    }

    /// Submits jobs to the engine, up to `max_seqs`. A job that finds too few free KV pages goes back to the front of the
    /// queue, so that later jobs do not overtake it.
    fn admit(&mut self) {
        let Some(mut engine) = self.engine.take() else { return };
        while engine.active() < engine.options().max_seqs {
            let next = self.queue.lock().prompts.take(Job::is_ready);
            let Some(mut next) = next else { break };
            match engine.try_submit(next.job.request()) {
                Ok(id) => {
                    let Queued { tenant, mut job, .. } = next;
                    let started = Instant::now();
                    self.metrics.queue_time(started - job.times.came);
                    job.stages.taken(&job.trace, job.index);
                    job.send(Update::Started);
                    let running = Running { tenant, job, started, last_token: None, prompt: Vec::new() };
                    self.running.insert(id, running);
                }
                Err((RequestError::NoCapacity { .. }, request)) if engine.active() > 0 && !next.job.to.is_closed() => {
                    next.job.refused = Some(request);
                    self.queue.lock().prompts.put_back(next);
                    break;
                }
                Err((e, _)) => self.close(&next.tenant, &next.job, (!next.job.to.is_closed()).then(|| e.into())),
            }
        }
        self.engine = Some(engine);
    }

    /// Takes a batch of texts from the queue.
    fn take_texts(&mut self) -> Vec<(Arc<str>, TextJob)> {
        let options = self.embedder.options();
        let (mut left, max_texts) = (options.batch_tokens, options.max_texts);
        let mut batch = Vec::new();
        let mut waiting = self.queue.lock();
        // the last text may exceed the batch; `embed` splits it off into a second one
        while batch.len() < max_texts && left > 0 {
            let Some(Queued { tenant, job, .. }) = waiting.texts.take(|_| true) else { break };
            left = left.saturating_sub(job.tokens.len());
            batch.push((tenant, job));
        }
        batch
    }

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
                batch[i].1.send(Update::Vector { vector: vector.map(<[f32]>::to_vec) });
            });
            let tokens: usize = texts.iter().map(|text| text.tokens.len()).sum();
            self.metrics.embedded(batch.len(), tokens);
            if let Err(e) = result {
                for (_, job) in batch {
                    job.send(Update::Failed(e.clone().into()));
                }
            }
        }
        let mut waiting = self.queue.lock();
        texts.iter().for_each(|(tenant, _)| waiting.texts.release(tenant));
    }

    /// Runs one engine step and sends its events.
    fn step(&mut self) {
        let Some(engine) = self.engine.as_mut().filter(|e| !e.is_idle()) else { return };
        let (running, metrics, queue) = (&mut self.running, &self.metrics, &self.queue);
        let begin = Instant::now();
        let n_running = engine.active();
        let mut rows = 0;
        // the forward pass ends at `Computed`; between the later events the engine samples
        let (mut forward, mut sampling_since) = (Duration::ZERO, begin);
        let n = engine.step(self.cpu, &self.pool, &mut |event| match event {
            Event::Computed { .. } => {
                sampling_since = Instant::now();
                forward = sampling_since - begin;
            }
            Event::Preempted { .. } => metrics.preempted(),
            Event::Prompt { id, logprobs } => {
                let Some(r) = running.get_mut(&id) else { return };
                r.prompt.extend(logprobs);
            }
            Event::Prefilled { id, n_cached, n_prompt } => {
                let Some(r) = running.get_mut(&id) else { return };
                r.job.start_others();
                r.job.stages.prefilled(&r.job.trace, r.job.index, sampling_since, (n_prompt, n_cached));
                metrics.prefilled(n_prompt, n_cached, r.started.elapsed());
                r.job.send(Update::Prefilled { n_cached, prompt: mem::take(&mut r.prompt) });
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
                r.job.stages.token(forward, mem::replace(&mut sampling_since, now), now);
                r.job.send(Update::Token { token, text, logprob, top });
            }
            Event::Done { id, text, reason, n_tokens, receipt } => {
                let Some(r) = running.remove(&id) else { return };
                r.job.stages.end(&r.job.trace, r.job.index, reason.name());
                metrics.done(reason, r.job.times.came.elapsed());
                queue.lock().prompts.release(&r.tenant);
                r.job.send(Update::Done { text, reason, n_tokens, receipt });
            }
        });
        metrics.step(n_running, n.saturating_sub(rows), begin.elapsed());
    }

    /// Publishes running requests, and KV statistics at most every [`KV_STATS_INTERVAL`] unless idle.
    fn publish_kv_stats(&mut self, idle: bool) {
        let active = self.engine.as_ref().map_or(0, Engine::active);
        self.status.running.store(active, Ordering::Relaxed);
        let now = Instant::now();
        if !idle && self.kv_stats_published.is_some_and(|at| now - at < KV_STATS_INTERVAL) {
            return;
        }
        self.kv_stats_published = Some(now);
        if let Some(engine) = &self.engine {
            *self.status.kv.lock().unwrap_or_else(PoisonError::into_inner) = engine.kv_stats();
        }
    }
}

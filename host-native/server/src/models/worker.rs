//! A worker: an engine on its own thread. It takes jobs from the model's queue, runs engine steps, and sends each job its
//! updates.
//!
//! `admission.rs` has what it takes from the queue, `restart.rs` what follows a panic.

use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use starling::embed::EmbedderOptions;
use starling::engine::{Engine, Event, FinishReason};
use starling::error::MemoryError;
use starling::kv::KvStats;
use starling::receipt::Receipt;

use super::budget::MemoryLease;
use super::cores::Threads;
use super::disk_tier::{Saved, WorkerTier};
use super::engines::{Engines, Shared};
use super::restart::{FIRST_BACKOFF, message};
use super::status::{InjectedFault, Running, WorkerState, WorkerStatus};
use crate::observe::model_metrics::Outcome;
use crate::schedule::handoff::Waiting;
use crate::schedule::queue::{Failed, Job, PrefixEviction, Shutdown, TextJob, Update, UpdateSender};
use crate::schedule::scheduler::Queued;

/// Maximum sleep of the idle thread; it bounds the age of the heartbeat.
pub(super) const IDLE_WAIT: Duration = Duration::from_millis(200);
/// Interval at which the engine thread publishes the KV statistics while it works.
const KV_STATS_INTERVAL: Duration = Duration::from_millis(50);
/// Time to save new KV pages before cached ones are evicted, and at the end.
const SAVE_TIME: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(10));

/// State of a worker's thread.
pub struct Worker {
    pub(super) id: u32,
    pub(super) shared: Shared,
    pub(super) threads: Threads,
    pub(super) engines: Engines,
    pub(super) tier: Option<WorkerTier>,
    pub(super) status: Arc<WorkerStatus>,
    /// A job between queue and engine.
    pub(super) submitting: Option<Queued<Job>>,
    /// Texts that are embedded now and next.
    pub(super) texts: Vec<Queued<TextJob>>,
    /// Number of them in the batch that is computed.
    pub(super) n_batch: usize,
    /// Whether a batch is chosen or a layer of it computed now: a panic is theirs.
    pub(super) is_embedding: bool,
    kv_stats_published: Option<Instant>,
    /// KV statistics up to which the metrics have counted.
    pub(super) counted: KvStats,
    /// Takeovers of the jobs that this thread knows of.
    pub(super) takeovers: u64,
    pub(super) backoff: Duration,
    pub(super) last_fault: Option<Instant>,
    /// Whether an answer was completed since the engine was made.
    pub(super) has_answered: bool,
    /// The memory of the engine, and of the weights if it outlives all others.
    _memory: Vec<Arc<MemoryLease>>,
}

/// Why a job fails now; a shutdown takes precedence over a timeout.
fn failure(shutdown: Shutdown, timeout: Option<Failed>) -> Option<Failed> {
    (shutdown == Shutdown::Now).then_some(Failed::Shutdown).or(timeout)
}

impl Worker {
    /// Reserves the memory of a worker.
    ///
    /// # Errors
    /// If there is not enough.
    pub fn new(
        id: u32,
        shared: Shared,
        threads: Threads,
        memory: Vec<Arc<MemoryLease>>,
    ) -> Result<Worker, MemoryError> {
        let mut engines = Engines::new(&shared, &threads)?;
        let tier = shared.disk.clone().zip(engines.engine.as_mut());
        let tier = tier.and_then(|(disk, engine)| WorkerTier::new(disk, Arc::clone(&shared.queue), engine));
        let status = Arc::new(WorkerStatus::new(shared.max_seqs()));
        if let Some(engine) = &engines.engine {
            status.set_kv(engine.kv_stats());
        }
        Ok(Worker {
            id,
            shared,
            threads,
            engines,
            tier,
            status,
            submitting: None,
            texts: Vec::new(),
            n_batch: 0,
            is_embedding: false,
            kv_stats_published: None,
            counted: KvStats::default(),
            takeovers: 0,
            backoff: FIRST_BACKOFF,
            last_fault: None,
            has_answered: false,
            _memory: memory,
        })
    }

    pub fn status(&self) -> &Arc<WorkerStatus> {
        &self.status
    }

    /// The engine's options, as reduced to what the model supports.
    pub fn engine(&self) -> Option<&Engine> {
        self.engines.engine.as_ref()
    }

    pub fn embedder(&self) -> &EmbedderOptions {
        self.engines.embedder.options()
    }

    /// Runs until the shutdown is complete, or the worker has been drained.
    pub fn run(mut self) {
        while let Err(panic) = catch_unwind(AssertUnwindSafe(|| while self.turn() {})) {
            let fault: Arc<str> = message(&*panic).into();
            drop(panic);
            self.fault(&fault);
            if !self.restart() {
                break;
            }
        }
        self.save_all(SAVE_TIME.1);
        self.shared.queue.remove_worker(self.id);
        self.status.set_state(WorkerState::Ended);
        let is_last = self.shared.dispatcher.workers().iter().all(|worker| worker.status.has_ended());
        let mut waiting = self.shared.queue.lock();
        if is_last && waiting.shutdown != Shutdown::None {
            waiting.shutdown = Shutdown::Now;
            waiting.prompts.drain().iter().for_each(|job| job.send(Update::Failed(Failed::Shutdown)));
            waiting.texts.drain().iter().for_each(|job| job.send(Update::Failed(Failed::Shutdown)));
        }
    }

    /// One turn of the loop: admission, a batch of texts, an engine step. Returns whether to continue.
    fn turn(&mut self) -> bool {
        self.status.beat();
        self.drop_taken();
        let version = self.shared.queue.lock().version;
        let shutdown = self.expire_queued();
        self.drop_cancelled(shutdown);
        let drains = self.status.state() == WorkerState::Draining;
        let mut worked = self.import();
        if !drains {
            self.admit();
            self.take_texts();
        }
        worked |= !self.texts.is_empty() || self.engines.active() > 0;
        let begin = Instant::now();
        self.embed();
        self.step();
        if worked {
            self.status.add_busy(begin.elapsed());
        }
        worked |= self.save();
        self.publish_kv_stats(!worked);
        if worked {
            return true;
        }
        let waiting = self.shared.queue.lock();
        let n = waiting.prompts.waiting() + waiting.texts.waiting();
        drop(waiting);
        if drains || (shutdown != Shutdown::None && n == 0) {
            return false;
        }
        self.shared.queue.wait(version, IDLE_WAIT);
        true
    }

    /// Cancels what the engine still computes of jobs that a supervisor took away while a step stalled.
    fn drop_taken(&mut self) {
        let takeovers = self.status.takeovers();
        if mem::replace(&mut self.takeovers, takeovers) == takeovers {
            return;
        }
        let Some(options) = self.shared.engine else { return };
        // the prefix cache goes too; a stall is rare
        self.engines.engine = None;
        if let Ok(engine) = self.shared.new_engine(&self.threads, options) {
            self.shared.dispatcher.clear_cache(self.id);
            self.engines.engine = Some(engine);
            self.restart_tier();
            self.counted = KvStats::default();
        }
    }

    /// Removes cancelled and expired jobs from the queue, and evicts closed sessions from the prefix cache.
    fn expire_queued(&mut self) -> Shutdown {
        let now = Instant::now();
        let mut waiting = self.shared.queue.lock();
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
        let evictions = waiting.take_prefix_evictions(self.id);
        drop(waiting);
        self.evict(&evictions);
        for job in jobs {
            let timeout = job.expired_in_queue(now);
            let failed = self.failed(shutdown, &job.to, timeout);
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

    /// Evicts what others have asked for from the prefix cache.
    fn evict(&mut self, evictions: &[PrefixEviction]) {
        let (n, is_invalid, is_released) =
            (self.status.take_evictions(), self.status.take_invalidation(), self.status.take_release());
        if let Some((tier, engine)) = self.tier.as_mut().zip(self.engines.engine.as_mut()).filter(|_| is_invalid) {
            tier.invalidate(engine);
        } else if n > 0 || is_released {
            self.save_all(SAVE_TIME.0);
        }
        let Some(engine) = &mut self.engines.engine else { return };
        if let Some(command) = self.status.take_command() {
            command(engine);
            // a step comes before the next one
            self.shared.queue.notify();
        }
        engine.evict_cached(if is_invalid { usize::MAX } else { n });
        if is_released {
            engine.release_memory();
        }
        for PrefixEviction { tokens, salt } in evictions {
            engine.evict_prefix(tokens, *salt);
            if let Some(tier) = &self.tier {
                tier.forget(engine, tokens, *salt);
            }
        }
    }

    /// Counts a job that was removed from the queue. Returns its error, or `None` if the client disconnected.
    fn failed(&self, shutdown: Shutdown, to: &UpdateSender, timeout: Option<Failed>) -> Option<Failed> {
        let failed = failure(shutdown, timeout).filter(|_| !to.is_closed());
        match &failed {
            Some(failed) => self.shared.metrics.failed(failed),
            None => self.shared.metrics.outcomes(Outcome::Cancelled, 1),
        }
        failed
    }

    /// Ends running jobs whose client disconnected or whose timeout expired.
    fn drop_cancelled(&mut self, shutdown: Shutdown) {
        let now = Instant::now();
        let mut jobs = self.status.jobs();
        let has_ended = |running: &Running| {
            let job = &running.queued.job;
            job.to.is_closed() || failure(shutdown, job.times.expired(now)).is_some()
        };
        let ids: Vec<_> = jobs.iter().filter(|(_, running)| has_ended(running)).map(|(id, _)| *id).collect();
        let ended: Vec<_> = ids.into_iter().filter_map(|id| Some((id, jobs.remove(&id)?))).collect();
        drop(jobs);
        for (id, Running { queued, .. }) in ended {
            let failed = failure(shutdown, queued.job.times.expired(now)).filter(|_| !queued.job.to.is_closed());
            self.status.set_lacks_pages(false);
            let Some(engine) = &mut self.engines.engine else { continue };
            let is_partial = queued.job.times.partial && matches!(failed, Some(Failed::Timeout(_)));
            match engine.finish(id).filter(|_| is_partial && queued.job.progress.is_prefilled) {
                Some(Event::Done { text, reason, n_tokens, receipt, .. }) => {
                    self.done(queued, text, reason, (n_tokens, receipt));
                }
                _ => self.close(&queued, failed),
            }
        }
    }

    /// Ends a job with a complete answer.
    fn done(
        &self,
        queued: Queued<Job>,
        text: String,
        reason: FinishReason,
        (n_tokens, receipt): (usize, Option<Box<Receipt>>),
    ) {
        let job = &queued.job;
        job.stages.end(&job.trace, job.index, reason.name());
        self.shared.metrics.done(reason, job.times.arrival.elapsed());
        self.shared.queue.lock().prompts.release(&queued.tenant);
        job.send_done(text, reason, n_tokens, receipt);
    }

    /// Ends a job that failed, or was cancelled (`None`).
    pub(super) fn close(&self, queued: &Queued<Job>, failed: Option<Failed>) {
        let job = &queued.job;
        job.start_others();
        job.end_trace(failed.as_ref());
        self.shared.queue.lock().prompts.release(&queued.tenant);
        match failed {
            None => self.shared.metrics.outcomes(Outcome::Cancelled, 1),
            Some(failed) => {
                // once for a request of several answers
                if matches!(failed, Failed::Timeout(_)) && job.index == 0 && !job.times.is_own {
                    self.shared.breaker.deadline_missed(&queued.tenant, Instant::now());
                }
                self.shared.metrics.failed(&failed);
                job.send(Update::Failed(failed));
            }
        }
    }

    /// Imports KV pages that were read from disk. Returns whether there were some.
    fn import(&mut self) -> bool {
        let parts = self.tier.as_mut().zip(self.engines.engine.as_mut());
        parts.is_some_and(|(tier, engine)| tier.import(engine))
    }

    /// Hands new KV pages to the store on disk. Returns whether there are more that it has room for.
    fn save(&mut self) -> bool {
        let parts = self.tier.as_mut().zip(self.engines.engine.as_mut());
        parts.is_some_and(|(tier, engine)| tier.save_some(engine) == Saved::Some)
    }

    fn save_all(&mut self, limit: Duration) {
        if let Some((tier, engine)) = self.tier.as_mut().zip(self.engines.engine.as_mut()) {
            tier.save_all(engine, limit);
        }
    }

    pub(super) fn restart_tier(&mut self) {
        if let Some((tier, engine)) = self.tier.as_mut().zip(self.engines.engine.as_mut()) {
            tier.restart(engine);
        }
    }

    /// Runs one engine step and sends its events.
    fn step(&mut self) {
        let Some(engine) = self.engines.engine.as_mut().filter(|e| !e.is_idle()) else { return };
        raise_injected(&self.status, self.shared.stall_timeout);
        self.shared.batch.apply(engine);
        let (status, metrics, queue, cpu) = (&*self.status, &self.shared.metrics, &self.shared.queue, self.shared.cpu);
        let breaker = &self.shared.breaker;
        let tier = &mut self.tier;
        self.threads.run(|pool| {
            let begin = Instant::now();
            let n_running = engine.active();
            let mut rows = 0;
            let has_answered = &mut self.has_answered;
            // the forward pass ends at `Computed`; between the later events the engine samples
            let (mut forward, mut sampling_since) = (Duration::ZERO, begin);
            let n = engine.step(cpu, pool, &mut |event| match event {
                Event::Computed { .. } => {
                    sampling_since = Instant::now();
                    forward = sampling_since - begin;
                }
                Event::Preempted { .. } => metrics.preempted(),
                Event::Prompt { id, logprobs } => {
                    let mut jobs = status.jobs();
                    let Some(r) = jobs.get_mut(&id) else { return };
                    r.prompt.extend(logprobs);
                }
                Event::Prefilled { id, n_cached, n_prompt } => {
                    let mut jobs = status.jobs();
                    let Some(r) = jobs.get_mut(&id) else { return };
                    let job = &mut r.queued.job;
                    job.start_others();
                    if mem::replace(&mut job.progress.is_prefilled, true) {
                        return;
                    }
                    job.stages.prefilled(&job.trace, job.index, sampling_since, (n_prompt, n_cached));
                    metrics.prefilled(n_prompt, n_cached, r.started.elapsed());
                    job.send(Update::Prefilled { n_cached, prompt: mem::take(&mut r.prompt) });
                }
                Event::Token { id, token, text, logprob, top } => {
                    let mut jobs = status.jobs();
                    let Some(r) = jobs.get_mut(&id) else { return };
                    let (now, job) = (Instant::now(), &mut r.queued.job);
                    let last = r.last_token.replace(now);
                    rows += usize::from(last.is_some());
                    if job.is_repeated(token) {
                        return;
                    }
                    *has_answered |= job.progress.faults.acquit();
                    match last {
                        Some(last) => metrics.next_token(now - last),
                        None if job.progress.tokens.len() == 1 => metrics.first_token(now - job.times.arrival),
                        None => metrics.next_token(now - r.started),
                    }
                    job.stages.token(forward, mem::replace(&mut sampling_since, now), now);
                    job.send(Update::Token { token, text, logprob, top });
                }
                Event::Drafted { id, n_drafted, n_accepted } => {
                    // the rows of rejected tokens are no prompt tokens
                    rows += n_drafted - n_accepted;
                    metrics.drafted(n_drafted, n_accepted);
                    let mut jobs = status.jobs();
                    let Some(r) = jobs.get_mut(&id) else { return };
                    let drafts = &mut r.queued.job.progress.drafts;
                    *drafts = (drafts.0 + n_drafted, drafts.1 + n_accepted);
                }
                Event::Done { id, text, reason, n_tokens, receipt } => {
                    let Some(Running { mut queued, .. }) = status.jobs().remove(&id) else { return };
                    let job = &mut queued.job;
                    job.stages.end(&job.trace, job.index, reason.name());
                    metrics.done(reason, job.times.arrival.elapsed());
                    queue.lock().prompts.release(&queued.tenant);
                    if reason != FinishReason::NotFinite {
                        breaker.success(&queued.tenant);
                    }
                    *has_answered = true;
                    status.set_lacks_pages(false);
                    job.send_done(text, reason, n_tokens, receipt);
                }
            });
            let time = begin.elapsed();
            engine.record_step_time(time.as_secs_f32());
            metrics.step(n_running, n.saturating_sub(rows), time);
            if let Some(tier) = tier {
                tier.record_step(n.saturating_sub(rows), time);
            }
        });
    }

    /// Publishes running requests, and KV statistics at most every [`KV_STATS_INTERVAL`] unless idle.
    fn publish_kv_stats(&mut self, idle: bool) {
        if self.shared.engine.is_none() {
            return;
        }
        self.status.set_running(self.engines.active(), self.shared.max_seqs());
        let now = Instant::now();
        if !idle && self.kv_stats_published.is_some_and(|at| now - at < KV_STATS_INTERVAL) {
            return;
        }
        self.kv_stats_published = Some(now);
        if let Some(engine) = &self.engines.engine {
            let stats = engine.kv_stats();
            self.shared.metrics.kv_counted(&stats, &self.counted);
            self.counted = stats;
            self.status.set_kv(stats);
        }
    }
}

/// Raises a fault that a test has asked for.
pub fn raise_injected(status: &WorkerStatus, stall_timeout: Duration) {
    match status.take_injected() {
        Some(InjectedFault::Panic(message)) => std::panic::panic_any(message),
        Some(InjectedFault::Stall) => std::thread::sleep(stall_timeout + Duration::from_secs(1)),
        None => {}
    }
}

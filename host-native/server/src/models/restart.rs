//! What follows a panic in a worker.
//!
//! It ends the engine, not the thread: the jobs go back to the front of the queue with the tokens that were sent, the worker
//! makes a new engine, and returns when that answers a probe. Another worker, or this one, continues each answer after its last
//! token. As every engine computes the same bits, a client sees no difference. The jobs of the engine are suspects until each has
//! run alone, which ends the one that is to blame.

use std::mem;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use starling::error::MemoryError;
use starling::kv::KvStats;
use starling_host::clock::unix_now;

use super::engines::{Engines, Shared};
use super::status::WorkerState;
use super::worker::{IDLE_WAIT, Worker};
use crate::observe::failures::Failure;
use crate::schedule::queue::{Failed, Job, Shutdown, Update};
use crate::schedule::scheduler::Queued;

/// First wait before an engine is made again after a fault.
pub(super) const FIRST_BACKOFF: Duration = Duration::from_millis(50);
/// Last wait.
const MAX_BACKOFF: Duration = Duration::from_secs(30);
/// Time without a fault after which the wait is the first again.
const BACKOFF_RESET: Duration = Duration::from_secs(60);

impl Worker {
    /// After a panic: returns the jobs to the queue.
    pub(super) fn fault(&mut self, fault: &Arc<str>) {
        tracing::error!(model = &*self.shared.name, worker = self.id, "worker failed: {fault}; its requests continue");
        self.shared.metrics.worker_fault("panic");
        self.status.set_state(WorkerState::Restarting);
        let running: Vec<_> = mem::take(&mut *self.status.jobs()).into_values().map(|running| running.queued).collect();
        let n_texts = match (mem::take(&mut self.is_embedding), self.n_batch) {
            (false, _) => 0,
            // none was chosen yet
            (true, 0) => self.texts.len(),
            (true, n) => n,
        };
        // answers are not to blame for a fault of texts, nor texts for one of answers, nor what runs for one at a submission
        let (suspects, others) = match self.submitting.take() {
            Some(submitting) => (vec![submitting], running),
            None if n_texts > 0 => (Vec::new(), running),
            None => (running, Vec::new()),
        };
        let texts = self.texts[..n_texts].iter().map(|text| &text.tenant);
        let tenants = suspects.iter().map(|job| &job.tenant).chain(texts).map(Arc::clone).collect();
        self.shared.breaker.model_fault(tenants, Instant::now());
        requeue(&self.shared, self.id, others, None);
        requeue(&self.shared, self.id, suspects, Some(fault));
        self.put_back_texts(n_texts, fault);
        self.shared.queue.notify();
    }

    /// Makes a new engine, after a wait that doubles with each fault before an answer was completed. Returns whether the worker goes on.
    pub(super) fn restart(&mut self) -> bool {
        let is_new = self.has_answered || self.last_fault.is_none_or(|at| at.elapsed() > BACKOFF_RESET);
        self.has_answered = false;
        self.backoff = if is_new { FIRST_BACKOFF } else { (2 * self.backoff).min(MAX_BACKOFF) };
        self.last_fault = Some(Instant::now());
        self.shared.dispatcher.clear_cache(self.id);
        self.status.set_running(0, 0);
        self.engines.engine = None;
        let kv = self.status.kv();
        let free_bytes = kv.free_bytes + kv.cached_bytes + kv.in_use_bytes;
        self.status.set_kv(KvStats { in_use_bytes: 0, cached_bytes: 0, free_bytes, ..kv });
        if let Some(tier) = &mut self.tier {
            tier.reset();
        }
        loop {
            let until = Instant::now() + self.backoff;
            while Instant::now() < until {
                self.status.beat();
                let waiting = self.shared.queue.lock();
                let (shutdown, n) = (waiting.shutdown, waiting.prompts.waiting() + waiting.texts.waiting());
                drop(waiting);
                if shutdown == Shutdown::Now || (shutdown == Shutdown::Draining && n == 0) {
                    return false;
                }
                std::thread::sleep(IDLE_WAIT.min(until.saturating_duration_since(Instant::now())));
            }
            let (cpu, threads) = (self.shared.cpu, &self.threads);
            let engines = catch_unwind(AssertUnwindSafe(|| {
                let mut engines = Engines::new(&self.shared, threads)?;
                engines.probe(cpu, threads);
                Ok::<_, MemoryError>(engines)
            }));
            match engines {
                Ok(Ok(engines)) => {
                    self.engines = engines;
                    self.restart_tier();
                    (self.counted, self.takeovers) = (KvStats::default(), self.status.takeovers());
                    self.status.set_lacks_pages(false);
                    self.status.set_running(0, self.shared.max_seqs());
                    self.status.set_state(WorkerState::Healthy);
                    self.shared.queue.notify();
                    tracing::info!(model = &*self.shared.name, worker = self.id, "worker restarted");
                    return true;
                }
                Ok(Err(e)) => tracing::error!(worker = self.id, "worker not restarted: {e}"),
                Err(panic) => tracing::error!(worker = self.id, "worker not restarted: {}", message(&*panic)),
            }
            self.backoff = (2 * self.backoff).min(MAX_BACKOFF);
        }
    }
}

/// Returns the jobs of a lost worker to the front of the queue. A job that is to blame for the fault ends with an error;
/// without `fault` none of them is.
pub fn requeue(shared: &Shared, worker: u32, jobs: Vec<Queued<Job>>, fault: Option<&Arc<str>>) {
    let alone = jobs.len() == 1;
    let (mut n_resumed, mut waiting) = (0, shared.queue.lock());
    for mut queued in jobs {
        let job = &mut queued.job;
        job.group.set_worker(None);
        if let Some(fault) = fault
            && job.progress.faults.note(fault, worker, alone)
        {
            shared.failures.add(Failure {
                time: unix_now(),
                request_id: job.request_id.to_string(),
                model: shared.name.to_string(),
                worker,
                fault: fault.to_string(),
                tokens: job.progress.tokens.len(),
            });
            job.start_others();
            job.end_trace(Some(&Failed::Worker));
            shared.metrics.failed(&Failed::Worker);
            waiting.prompts.release(&queued.tenant);
            queued.job.send(Update::Failed(Failed::Worker));
            continue;
        }
        n_resumed += 1;
        let deadline = job.times.arrival + job.times.total;
        queued.extend_deadline(deadline);
        waiting.prompts.put_back(queued);
    }
    drop(waiting);
    shared.metrics.resumed(n_resumed);
}

pub(super) fn message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(ToString::to_string);
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "panic".into())
}

#[cfg(test)]
mod tests;

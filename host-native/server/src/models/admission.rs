//! What a worker takes from the queue. After a fault it runs the suspects alone, one after another, before anything else.

use std::mem;
use std::time::Instant;

use starling::error::RequestError;

use super::disk_tier::WorkerTier;
use super::status::Running;
use super::worker::Worker;
use crate::schedule::queue::{Job, Update};

impl Worker {
    /// Submits jobs to the engine, up to `max_seqs`. A job that finds too few free KV pages goes back to the front of the
    /// queue, so that later jobs do not overtake it.
    pub(super) fn admit(&mut self) {
        if self.shared.engine.is_none() {
            return;
        }
        if !self.prove_suspects() {
            return;
        }
        let max_seqs = self.shared.max_seqs();
        loop {
            let n_restoring = self.tier.as_ref().map_or(0, WorkerTier::n_restoring);
            if self.engines.active() + n_restoring >= max_seqs {
                break;
            }
            let (dispatcher, id, tier) = (&self.shared.dispatcher, self.id, &self.tier);
            let is_restoring = |job: &Job| tier.as_ref().is_some_and(|tier| tier.is_restoring(&job.group));
            let is_suspect = |job: &Job| job.progress.faults.suspect_of().is_some();
            let is_mine =
                |job: &Job| job.is_ready() && !is_suspect(job) && !is_restoring(job) && dispatcher.is_for(job, id);
            let next = self.shared.queue.lock().prompts.take(is_mine);
            let Some(next) = next else { break };
            self.submitting = Some(next);
            if self.restore() {
                continue;
            }
            if !self.submit() {
                break;
            }
            self.status.set_running(self.engines.active(), max_seqs);
        }
        let has_rest = self.shared.dispatcher.has_several() && self.shared.queue.lock().prompts.waiting() > 0;
        if has_rest {
            // what does not fit here may now go to another
            self.shared.queue.notify();
        }
    }

    /// Puts the job of `submitting` back into the queue if KV pages of its prompt are to be read from disk first. Returns
    /// whether it did.
    fn restore(&mut self) -> bool {
        let parts = self.tier.as_mut().zip(self.engines.engine.as_ref());
        let Some(((tier, engine), queued)) = parts.zip(self.submitting.as_mut()) else { return false };
        if !tier.begin(engine, &mut queued.job) {
            return false;
        }
        if let Some(queued) = self.submitting.take() {
            // the pages come to this worker
            self.shared.dispatcher.taken(&queued.job, self.id);
            self.shared.queue.lock().prompts.put_back(queued);
        }
        true
    }

    /// Runs one suspect of a fault alone, if there is one. Returns whether the worker may take other jobs now.
    ///
    /// A suspect is for the worker that was lost with it, for any other that has nothing else to do, and for all once that
    /// worker has ended.
    fn prove_suspects(&mut self) -> bool {
        let is_proving = |running: &Running| running.queued.job.progress.faults.suspect_of().is_some();
        if self.status.jobs().values().any(is_proving) {
            return false;
        }
        let is_idle = self.engines.active() == 0;
        if !self.shared.queue.lock().prompts.has_held(|job| self.is_my_suspect(job, is_idle)) {
            return true;
        }
        self.put_back_running();
        let next = self.shared.queue.lock().prompts.take_held(|job| self.is_my_suspect(job, is_idle));
        self.submitting = next;
        if self.submitting.is_some() && !self.restore() {
            self.submit();
        }
        self.status.set_running(self.engines.active(), self.shared.max_seqs());
        false
    }

    fn is_my_suspect(&self, job: &Job, is_idle: bool) -> bool {
        let Some(lost) = job.progress.faults.suspect_of() else { return false };
        let is_restoring = self.tier.as_ref().is_some_and(|tier| tier.is_restoring(&job.group));
        let is_mine = is_idle || lost == self.id || !self.shared.dispatcher.is_alive(lost);
        is_mine && job.is_ready() && !is_restoring
    }

    /// Returns the running jobs to the queue. Their pages stay in the prefix cache.
    fn put_back_running(&mut self) {
        let Some(engine) = &mut self.engines.engine else { return };
        let jobs = mem::take(&mut *self.status.jobs());
        let mut waiting = self.shared.queue.lock();
        for (id, Running { mut queued, .. }) in jobs {
            engine.cancel(id);
            let deadline = queued.job.times.arrival + queued.job.times.total;
            queued.extend_deadline(deadline);
            waiting.prompts.put_back(queued);
        }
    }

    /// Submits the job of `submitting`. Returns whether there may be room for another.
    fn submit(&mut self) -> bool {
        let (Some(next), Some(engine)) = (&mut self.submitting, &mut self.engines.engine) else { return false };
        let (request, is_closed) = (next.job.request(), next.job.to.is_closed());
        let result = engine.try_submit(request);
        let Some(mut queued) = self.submitting.take() else { return false };
        match result {
            Ok(id) => {
                self.shared.dispatcher.taken(&queued.job, self.id);
                let (started, job) = (Instant::now(), &mut queued.job);
                if !mem::replace(&mut job.progress.is_started, true) {
                    self.shared.metrics.queue_time(started - job.times.arrival);
                    job.stages.taken(&job.trace, job.index);
                    job.send(Update::Started);
                }
                let running = Running { queued, started, last_token: None, prompt: Vec::new() };
                self.status.jobs().insert(id, running);
                true
            }
            Err((RequestError::NoCapacity { .. }, request)) if self.engines.active() > 0 && !is_closed => {
                queued.job.refused = Some(request);
                self.status.set_lacks_pages(true);
                self.shared.queue.lock().prompts.put_back(queued);
                false
            }
            Err((e, _)) => {
                self.close(&queued, (!is_closed).then(|| e.into()));
                true
            }
        }
    }
}

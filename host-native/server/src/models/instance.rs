//! A loaded model: what a request needs of it.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Instant, SystemTime};

use sha2::{Digest, Sha256};
use starling::embed::{EmbedderOptions, Pooling};
use starling::engine::EngineOptions;
use starling::kernels::Cpu;
use starling::kv::KvStats;
use starling::model::Model;
use starling::tokenizer::DecodeOptions;
use starling_api::error::ApiError;
use starling_api::output::ModelSyntax;
use starling_host::error::Failure;
use starling_host::pool::{CpuSet, ThreadPool};
use starling_host::registry::ModelLock;
use starling_host::structure::Grammars;
use starling_host::template::ServedTemplate;

use super::actor::Instance;
use super::budget::{MemoryBudget, MemoryLease};
use super::cores::{SharedThreads, Threads};
use super::dispatch::Dispatcher;
use super::engines::Shared;
use super::error::PoolError;
use super::loading;
use super::restart::requeue;
use super::status::{WorkerHandle, WorkerState};
use super::worker::Worker;
use crate::config::{Live, Settings};
use crate::models::pressure::Pressure;
use crate::observe::metrics::Metrics;
use crate::observe::model_metrics::{self, ModelMetrics, Snapshot};
use crate::schedule::breaker::{Breaker, Trial};
use crate::schedule::fair_turns::FairTurns;
use crate::schedule::queue::{Queue, Shutdown};
use crate::schedule::scheduler::{Limits, Priority};
use crate::state::kv_disk::Namespace;
use crate::state::reuse::Computation;
use crate::state::sessions::{Conversation, Sessions};
use crate::state::slots::Slots;
use crate::state::store::SessionJournal;

/// Size and time of change of a file: different if it was replaced.
pub type FileStamp = (u64, SystemTime);

/// A loaded model. The weights are freed with the last reference and the last worker.
pub struct ModelInstance {
    /// Name in the API.
    pub name: Arc<str>,
    pub settings: Live<Settings>,
    pub model: Arc<Model>,
    /// SHA-256 of the model file.
    pub model_sha256: [u8; 32],
    /// OpenAI's `system_fingerprint`.
    pub fingerprint: String,
    pub template: ServedTemplate,
    /// Forms of calls and reasoning, by template and vocabulary.
    pub forms: ModelSyntax,
    pub grammars: Grammars,
    /// `None` for encoders, which only embed.
    pub engine: Option<EngineOptions>,
    /// KV pages of a worker.
    pub n_pages: usize,
    /// Namespace of its KV pages on disk.
    pub kv_namespace: Option<Namespace>,
    pub embedder: EmbedderOptions,
    /// How the vectors of a text's tokens become one, unless a request says otherwise.
    pub pooling: Pooling,
    pub cpu: Cpu,
    /// Compute threads of a worker.
    pub threads: usize,
    pub queue: Arc<Queue>,
    pub workers: Workers,
    pub breaker: Arc<Breaker>,
    pub metrics: Arc<ModelMetrics>,
    /// Metrics of the server.
    pub server_metrics: Arc<Metrics>,
    pub sessions: Arc<Sessions>,
    /// Writes the sessions (`--state-dir`).
    pub journal: Option<Arc<SessionJournal>>,
    pub slots: Arc<Slots>,
    /// Receipts are replayed one at a time.
    pub replay: Arc<FairTurns>,
    /// Time of the load in Unix time.
    pub created: u64,
    /// Where the model was loaded from.
    pub source: String,
    /// Files of the model and its draft model, and their size and time of change at the load.
    pub files: Vec<(PathBuf, Option<FileStamp>)>,
    pub pressure: Arc<Pressure>,
    /// Keep the files in the store.
    pub _locks: Vec<Arc<ModelLock>>,
    /// Weights, with those of the draft model, in the memory budget.
    pub weights: Arc<MemoryLease>,
}

impl ModelInstance {
    /// Settings of the model.
    pub fn settings(&self) -> Arc<Settings> {
        self.settings.get()
    }

    /// Values of the gauges. Does not wait for a worker.
    pub fn snapshot(&self) -> Snapshot {
        let waiting = self.queue.lock();
        let depth = Priority::ALL.map(|p| waiting.prompts.depth(p));
        let (held, texts) = (waiting.prompts.held(), waiting.texts.waiting());
        drop(waiting);
        let workers = self.workers.list();
        Snapshot {
            depth,
            texts,
            held,
            running: workers.iter().map(|worker| worker.status.running()).sum(),
            sessions: self.sessions.len(),
            kv: workers.iter().map(|worker| worker.status.kv()).fold(KvStats::default(), model_metrics::sum),
        }
    }

    /// Salt of the prefix cache: a hash of tenant and `cache_salt`, so that tenants never share pages.
    pub fn salt(&self, tenant: &str, salt: Option<&str>) -> u64 {
        let mut hash = Sha256::new();
        hash.update((tenant.len() as u64).to_le_bytes());
        hash.update(tenant);
        if let Some(salt) = salt {
            hash.update(salt);
        }
        let digest: [u8; 32] = hash.finalize().into();
        let mut first = [0; 8];
        first.copy_from_slice(&digest[..8]);
        u64::from_le_bytes(first)
    }

    /// All that can change a byte of a result, besides the request.
    pub fn computation(&self) -> Computation {
        let kv_type = self.engine.map(|engine| engine.kv_type);
        Computation::new(self.model_sha256, kv_type, [self.n_ctx(), self.embedder.n_ctx], self.pooling)
    }

    /// Context length in tokens.
    pub fn n_ctx(&self) -> usize {
        self.engine.map_or(self.embedder.n_ctx, |engine| engine.n_ctx)
    }

    /// The text of tokens, without control tokens.
    pub fn text(&self, tokens: &[u32]) -> String {
        let bytes = self.model.tokenizer.decode(tokens, DecodeOptions { skip_special: true });
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// A fault that keeps the model from answering, if all workers have it.
    pub fn fault(&self) -> Option<String> {
        let workers = self.workers.list();
        let stalled = |worker: &WorkerHandle| worker.status.age() > self.settings().stall_timeout;
        if workers.iter().any(|worker| !stalled(worker) && !worker.status.has_ended()) {
            return None;
        }
        let age = workers.iter().filter(|w| !w.status.has_ended()).map(|w| w.status.age()).min()?;
        let limit = self.settings().stall_timeout.as_secs_f64();
        Some(format!("engine stalled: no step of {} for {} s, stall-timeout {limit} s", self.name, age.as_secs()))
    }

    /// Lets a request of a tenant pass that the model's workers will answer, unless the circuit breaker is open.
    ///
    /// # Errors
    /// 503.
    pub fn admit(&self, tenant: &Arc<str>) -> Result<Option<Trial>, ApiError> {
        self.breaker.admit(tenant, Instant::now()).map_err(|wait| {
            let error = PoolError::Broken { name: Arc::clone(&self.name), wait };
            self.metrics.rejected(error.code());
            error.into()
        })
    }

    /// The row of a conversation in the state store.
    pub fn session_row(&self, salt: u64, conversation: &Conversation) -> Vec<u8> {
        SessionJournal::encode(&self.model_sha256, |tokens| self.text(tokens), salt, conversation)
    }

    /// Whether a file of the model was replaced since the load.
    pub fn is_outdated(&self) -> bool {
        self.files.iter().any(|(path, stamp)| loading::file_stamp(path) != *stamp)
    }
}

impl Instance for ModelInstance {
    fn set_settings(&self, settings: Settings) {
        self.queue.set_limits(limits(&settings), settings.max_inputs);
        self.workers.dispatcher().set_strategy(settings.strategy);
        self.workers.set_batch_limits(&settings);
        self.settings.set(settings);
    }

    fn publish(&self) {
        self.workers.publish(&self.metrics);
        self.metrics.set_loaded(true, self.model.weight_bytes());
        self.server_metrics.describe_cache(&self.name, self.n_pages);
    }

    fn withdraw(&self, reason: Option<&'static str>) {
        if let Some(reason) = reason {
            tracing::info!(model = &*self.name, reason, "model unloaded");
            self.metrics.unloaded(reason);
        }
        self.metrics.set_loaded(false, 0);
        self.metrics.set(&Snapshot { sessions: self.sessions.len(), ..Snapshot::default() });
    }

    fn is_busy(&self) -> bool {
        let snapshot = self.snapshot();
        snapshot.running + snapshot.texts + snapshot.depth.iter().sum::<usize>() > 0
    }
}

/// Limits of the queue.
pub fn limits(settings: &Settings) -> Limits {
    Limits {
        high: settings.queue_high,
        low: settings.queue_low(),
        tenant_requests: settings.tenant_requests,
        tenant_tokens: settings.tenant_tokens,
    }
}

impl Drop for ModelInstance {
    fn drop(&mut self) {
        // no request can come any more: the workers end
        self.queue.shut_down(Shutdown::Draining);
    }
}

/// Number of the compute threads of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ThreadCount {
    pub n: usize,
    /// Whether other models have the same ones.
    pub are_shared: bool,
}

/// Compute threads of each worker.
#[derive(Clone)]
pub enum ThreadPlan {
    /// Its own: their number, and the CPUs of each worker in turn, if they are pinned.
    Own(usize, Arc<[CpuSet]>),
    /// Those that models share, with the model's share of time.
    Shared(Arc<SharedThreads>, u32),
}

impl ThreadPlan {
    /// The CPUs of a worker, if it is pinned.
    fn cpus(&self, worker: u32) -> Option<&CpuSet> {
        match self {
            ThreadPlan::Own(_, cpus) => cpus.get(worker as usize % cpus.len().max(1)),
            ThreadPlan::Shared(..) => None,
        }
    }

    /// The threads of a worker.
    ///
    /// # Errors
    /// If the system cannot start a thread.
    pub fn threads(&self, worker: u32) -> Result<Threads, Failure> {
        Ok(match self {
            ThreadPlan::Own(n, _) => Threads::Own(ThreadPool::on(*n, self.cpus(worker))?),
            ThreadPlan::Shared(threads, share) => Threads::shared(threads, *share),
        })
    }
}

/// The workers of a model; they are added and removed while it serves.
pub struct Workers {
    shared: Shared,
    threads: ThreadPlan,
    budget: Arc<MemoryBudget>,
    weights: Arc<MemoryLease>,
    /// Bytes of a worker: KV cache, and that of the draft model.
    worker_bytes: u64,
    next_id: AtomicU32,
    /// Additions and removals happen one at a time.
    change: Mutex<()>,
}

/// Maximum number of workers of a model.
pub const MAX_WORKERS: usize = 64;

impl Workers {
    pub fn new(
        shared: Shared,
        threads: ThreadPlan,
        budget: &Arc<MemoryBudget>,
        weights: &Arc<MemoryLease>,
        worker_bytes: u64,
    ) -> Workers {
        Workers {
            shared,
            threads,
            budget: Arc::clone(budget),
            weights: Arc::clone(weights),
            worker_bytes,
            next_id: AtomicU32::new(0),
            change: Mutex::default(),
        }
    }

    pub fn list(&self) -> Vec<WorkerHandle> {
        self.shared.dispatcher.workers()
    }

    pub fn dispatcher(&self) -> &Dispatcher {
        &self.shared.dispatcher
    }

    /// Changes the maximum sequences and tokens of a batch, at most those at the start.
    pub fn set_batch_limits(&self, settings: &Settings) {
        self.shared.batch.set(settings);
        // what waited for a place may have one now
        self.shared.queue.notify();
    }

    /// From now on the workers count in the metrics of the model: it serves.
    pub fn publish(&self, metrics: &Arc<ModelMetrics>) {
        self.shared.metrics.publish(metrics);
    }

    /// The workers and their utilisation.
    pub fn utilisation(&self) -> Vec<(u32, f64)> {
        self.list().iter().map(|worker| (worker.id, worker.status.utilisation())).collect()
    }

    /// The compute threads of all workers.
    pub fn threads(&self) -> ThreadCount {
        match &self.threads {
            ThreadPlan::Own(n, _) => ThreadCount { n: n * self.list().len(), are_shared: false },
            ThreadPlan::Shared(threads, _) => ThreadCount { n: threads.count(), are_shared: true },
        }
    }

    /// Reacts to a level of memory pressure.
    pub fn relieve(&self, level: u8) {
        self.shared.batch.set_divisor(1 << level.min(2));
        if level == 0 {
            return;
        }
        for worker in self.list() {
            let kv = worker.status.kv();
            worker.status.evict_cached(kv.cached_bytes / kv.page_bytes.max(1) / 2);
            if level >= 2 {
                worker.status.release_memory();
            }
        }
        self.shared.queue.notify();
    }

    /// Asks all workers to evict their prefix caches, in memory and on disk.
    pub fn invalidate_caches(&self) {
        self.list().iter().for_each(|worker| worker.status.invalidate_cache());
        self.shared.queue.notify();
    }

    /// Makes a worker with the next id, and hands it to `inspect` before it runs.
    ///
    /// # Errors
    /// If there are [`MAX_WORKERS`], or memory or threads are short.
    pub fn add(&self, inspect: impl FnOnce(&Worker)) -> Result<WorkerHandle, Failure> {
        let _change = self.change.lock().unwrap_or_else(PoisonError::into_inner);
        if self.list().len() >= MAX_WORKERS {
            return Err(Failure::Usage(format!("{}: {MAX_WORKERS} workers, expected fewer", self.shared.name)));
        }
        let bytes = self.worker_bytes;
        let lease = self.budget.lease(bytes).ok_or_else(|| {
            let (free, limit) = (self.budget.free() >> 20, self.budget.limit() >> 20);
            Failure::Memory(format!(
                "a worker of {}: {} MiB, {free} of {limit} MiB are free",
                self.shared.name,
                bytes >> 20
            ))
        })?;
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let memory = vec![Arc::new(lease), Arc::clone(&self.weights)];
        let worker = Worker::new(id, self.shared.clone(), self.threads.threads(id)?, memory);
        let worker = worker.map_err(Failure::memory("KV cache"))?;
        inspect(&worker);
        let handle = WorkerHandle { id, status: Arc::clone(worker.status()) };
        self.shared.queue.add_worker(id);
        self.shared.dispatcher.add(handle.clone());
        let name = format!("starling-{}-{id}", self.shared.name);
        let thread = std::thread::Builder::new().name(name).spawn({
            let cpus = self.threads.cpus(id).cloned();
            move || {
                if let Some(cpus) = cpus {
                    cpus.pin();
                }
                worker.run();
            }
        });
        if let Err(e) = thread {
            self.shared.dispatcher.remove(id);
            self.shared.queue.remove_worker(id);
            return Err(e.into());
        }
        self.shared.queue.notify();
        Ok(handle)
    }

    /// Lets a worker finish its requests and end. Returns whether it exists; the last worker stays.
    ///
    /// # Errors
    /// If it is the last that takes requests.
    pub fn drain(&self, id: u32) -> Result<bool, Failure> {
        let _change = self.change.lock().unwrap_or_else(PoisonError::into_inner);
        let workers = self.list();
        let Some(worker) = workers.iter().find(|worker| worker.id == id) else { return Ok(false) };
        let goes_on = |state| !matches!(state, WorkerState::Draining | WorkerState::Ended);
        let others = workers.iter().filter(|other| other.id != id && goes_on(other.status.state()));
        if others.count() == 0 {
            return Err(Failure::Usage(format!(
                "worker {id} is the last of {}; unload the model instead",
                self.shared.name
            )));
        }
        worker.status.set_state(WorkerState::Draining);
        self.shared.queue.notify();
        Ok(true)
    }

    /// Removes ended workers, and moves the jobs of those that stall to others.
    pub fn supervise(&self) {
        let workers = self.list();
        for worker in &workers {
            if worker.status.has_ended() && workers.len() > 1 {
                self.shared.dispatcher.remove(worker.id);
            }
            let stalls =
                worker.status.age() > self.shared.stall_timeout && worker.status.state() == WorkerState::Healthy;
            let has_other = workers.iter().any(|o| o.id != worker.id && o.status.state() == WorkerState::Healthy);
            if !stalls || !has_other {
                continue;
            }
            let Some(jobs) = worker.status.take_jobs() else { continue };
            worker.status.set_state(WorkerState::Stalled);
            let (model, seconds) = (&*self.shared.name, self.shared.stall_timeout.as_secs_f64());
            tracing::error!(
                model,
                worker = worker.id,
                "worker stalled for {seconds} s; its requests continue elsewhere"
            );
            self.shared.metrics.worker_fault("stall");
            self.shared.dispatcher.clear_cache(worker.id);
            let fault: Arc<str> = format!("no step for {seconds} s").into();
            requeue(&self.shared, worker.id, jobs.into_iter().map(|running| running.queued).collect(), Some(&fault));
            self.shared.queue.notify();
        }
        let now: Vec<WorkerState> = self.list().iter().map(|worker| worker.status.state()).collect();
        for state in WorkerState::ALL {
            self.shared.metrics.set_workers(state.name(), now.iter().filter(|s| **s == state).count());
        }
    }

    /// Whether the threads of all workers have ended.
    pub fn have_ended(&self) -> bool {
        self.list().iter().all(|worker| worker.status.has_ended())
    }
}

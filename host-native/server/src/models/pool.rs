//! The pool of models: names, what is loaded, and the memory that they share.
//!
//! A request names a model and gets its [`ModelInstance`], which is loaded first if it is not. Where memory is short, the
//! least recently used idle models without `pin` are unloaded. Loads, unloads and swaps happen one at a time.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use starling_api::error::ApiError;
use starling_host::error::Failure;
use starling_host::load;
use starling_host::machine;
use starling_host::machine::Reading;
use tokio::sync::watch;

use super::budget::MemoryLease;
use super::header::{HeaderCache, ModelHeader};
use super::instance::ModelInstance;
use super::loading::{self, Identity, Resources};
use super::self_test::{SelfTest, SelfTestError};
use super::split;
use crate::config::value::{Bytes, LoadPolicy};
use crate::config::{Configuration, Live, ModelEntry, Settings};
use crate::guard::auth::seconds;
use crate::observe::model_metrics::{ModelMetrics, Snapshot};
use crate::schedule::breaker::{Breaker, BreakerLimits};
use crate::schedule::queue::Shutdown;
use crate::state::kv_disk::Namespace;
use crate::state::sessions::{Journal, SessionLimits, Sessions};
use crate::state::store::SessionJournal;

/// Time for the memory of an unloaded model to become free.
const FREE_TIMEOUT: Duration = Duration::from_secs(10);
/// Time after an unload in which freed memory is returned to the system.
const MEMORY_RETURN_TIME: Duration = Duration::from_secs(5);
/// Size of a block that the allocator takes from the system.
const LARGE_BLOCK: usize = 64 << 20;
/// Maximum number of models.
const MAX_MODELS: usize = 4096;

/// Whether a model is loaded.
#[derive(Clone)]
pub enum ModelState {
    /// Not loaded; a request may load it.
    Unloaded,
    Loading,
    Loaded(Arc<ModelInstance>),
    /// Its requests finish before another model takes its place; new ones wait.
    Draining,
    /// The last load failed; a request tries again.
    Failed(PoolError),
}

impl ModelState {
    /// The state's name in the API.
    pub const fn name(&self) -> &'static str {
        match self {
            ModelState::Unloaded => "unloaded",
            ModelState::Loading => "loading",
            ModelState::Loaded(_) => "loaded",
            ModelState::Draining => "draining",
            ModelState::Failed(_) => "failed",
        }
    }

    fn is_changing(&self) -> bool {
        matches!(self, ModelState::Loading | ModelState::Draining)
    }
}

/// A model of the pool.
pub struct Entry {
    pub name: Arc<str>,
    pub metrics: Arc<ModelMetrics>,
    pub sessions: Arc<Sessions>,
    /// Writes the sessions (`--state-dir`).
    pub journal: Option<Arc<SessionJournal>>,
    /// Namespaces of its KV pages on disk, of all loads.
    kv_namespaces: Arc<Mutex<Vec<Namespace>>>,
    /// Counts the loads for requests that failed by the model's fault.
    loads: Arc<Breaker>,
    /// Largest `batch_tokens` and `max_seqs` that may be set while the model serves: as configured.
    pub batch_capacity: usize,
    pub seqs_capacity: usize,
    header: HeaderCache,
    /// Whether the configuration has it, not an administrator or the directory of models.
    is_configured: AtomicBool,
    state: watch::Sender<ModelState>,
    entry: Mutex<ModelEntry>,
    last_used: Mutex<Instant>,
    /// Requests that wait for it to load.
    waiting: AtomicUsize,
}

impl Entry {
    pub fn state(&self) -> ModelState {
        self.state.borrow().clone()
    }

    /// The instance, if the model is loaded.
    pub fn instance(&self) -> Option<Arc<ModelInstance>> {
        match &*self.state.borrow() {
            ModelState::Loaded(instance) => Some(Arc::clone(instance)),
            _ => None,
        }
    }

    /// Whether the configuration has the model: then it goes when the configuration no longer has it.
    pub fn is_configured(&self) -> bool {
        self.is_configured.load(Ordering::Acquire)
    }

    /// Notes that the configuration has the model.
    pub fn set_configured(&self) {
        self.is_configured.store(true, Ordering::Release);
    }

    /// State of the circuit breaker: that of the loaded model, or else that of its loads.
    pub fn breaker_name(&self) -> &'static str {
        let of_instance = self.instance().map(|instance| instance.breaker.name());
        of_instance.filter(|name| *name != "closed").unwrap_or_else(|| self.loads.name())
    }

    /// Namespaces of its KV pages on disk, of all loads; none if it was never loaded.
    pub fn kv_namespaces(&self) -> Vec<Namespace> {
        self.kv_namespaces.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Settings of the model.
    pub fn settings(&self) -> Settings {
        self.lock().settings.clone()
    }

    /// Source, as `-m` takes it; `None` for the bundled model.
    pub fn source(&self) -> Option<PathBuf> {
        self.lock().args.model.clone()
    }

    /// What the model's file says; `None` if it is not on this machine or cannot be read. Reads the file.
    pub fn header(&self) -> Option<Arc<ModelHeader>> {
        let source = self.source()?;
        if source.is_file() { self.header.get(&source) } else { None }
    }

    /// Changes the settings: those that may change at run time take effect at once, others at the next load.
    pub fn set_settings(&self, settings: Settings) {
        self.lock().settings = settings.clone();
        if let Some(instance) = self.instance() {
            instance.set_settings(settings);
        }
    }

    /// Time since the last request.
    pub fn idle_time(&self) -> Duration {
        self.last_used.lock().unwrap_or_else(PoisonError::into_inner).elapsed()
    }

    fn touch(&self) {
        *self.last_used.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    fn lock(&self) -> MutexGuard<'_, ModelEntry> {
        self.entry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Unloads the model if no request uses it. Returns whether it did.
    fn unload_idle(&self, reason: &'static str) -> bool {
        let is_unloaded = self.state.send_if_modified(|state| {
            let is_idle = |i: &Arc<ModelInstance>| Arc::strong_count(i) == 1 && !i.is_busy();
            let is_idle = matches!(state, ModelState::Loaded(instance) if is_idle(instance));
            if is_idle {
                *state = ModelState::Unloaded;
            }
            is_idle
        });
        if is_unloaded {
            self.note_unload(reason);
        }
        is_unloaded
    }

    /// Gives requests an instance, which counts in the metrics from now on.
    fn serve(&self, instance: &Arc<ModelInstance>) {
        instance.workers.publish(&self.metrics);
        self.metrics.set_loaded(true, instance.model.weight_bytes());
        self.state.send_replace(ModelState::Loaded(Arc::clone(instance)));
    }

    fn note_unload(&self, reason: &'static str) {
        tracing::info!(model = &*self.name, reason, "model unloaded");
        self.metrics.unloaded(reason);
        self.metrics.set_loaded(false, 0);
        self.metrics.set(&Snapshot { sessions: self.sessions.len(), ..Snapshot::default() });
    }

    fn identity(&self) -> Identity {
        let (name, metrics) = (Arc::clone(&self.name), Arc::clone(&self.metrics));
        Identity {
            name,
            metrics,
            sessions: Arc::clone(&self.sessions),
            journal: self.journal.clone(),
            kv_namespaces: Arc::clone(&self.kv_namespaces),
            batch_capacity: self.batch_capacity,
            seqs_capacity: self.seqs_capacity,
        }
    }
}

/// How to replace a model.
#[derive(Debug, Clone, Default)]
pub struct SwapOptions {
    /// Finish the running requests and free the old model first: for models that do not fit into memory together.
    pub drain: bool,
    pub test: Option<SelfTest>,
}

/// Why a model was not loaded, unloaded or replaced.
#[derive(Debug, Clone, thiserror::Error)]
pub enum PoolError {
    #[error("the model `{found}` does not exist{}", near.as_ref().map_or_else(String::new, |near| format!("; did you mean `{near}`?")))]
    Unknown { found: String, near: Option<String> },
    #[error("model `{0}` is not loaded, and requests do not load models (--autoload=false)")]
    NotLoaded(Arc<str>),
    #[error(
        "model `{name}` had repeated faults and takes no requests for now (--breaker-faults); try again in {} s",
        seconds(*wait)
    )]
    Broken { name: Arc<str>, wait: Duration },
    #[error("model `{name}` is {state}; try again later")]
    Busy { name: Arc<str>, state: &'static str },
    #[error(
        "{waiting} requests wait for model `{name}` to load, expected fewer than {limit} (--load-queue); try again later"
    )]
    QueueFull { name: Arc<str>, waiting: usize, limit: usize },
    #[error("model `{name}` needs {needed} MiB, but {free} MiB of {limit} MiB (--memory) are free: {in_use}")]
    Memory { name: Arc<str>, needed: u64, free: u64, limit: u64, in_use: String },
    #[error("model `{name}` does not load: {cause}")]
    Load { name: Arc<str>, cause: Arc<Failure> },
    #[error("model `{name}` failed its self-test: {why}")]
    SelfTest { name: Arc<str>, why: SelfTestError },
}

impl From<PoolError> for ApiError {
    fn from(error: PoolError) -> ApiError {
        let message = error.for_clients();
        let code = error.code();
        match error {
            PoolError::Unknown { .. } => {
                let error = ApiError::new(404, starling_api::error::INVALID_REQUEST, message).code(code);
                ApiError { param: Some("model".into()), ..error }
            }
            PoolError::NotLoaded(_) => ApiError::new(409, starling_api::error::INVALID_REQUEST, message).code(code),
            PoolError::Broken { wait, .. } => {
                ApiError { retry: Some(wait), ..ApiError::unavailable(message).code(code) }
            }
            PoolError::Busy { .. } | PoolError::QueueFull { .. } => {
                ApiError { retry: Some(Duration::from_secs(2)), ..ApiError::unavailable(message).code(code) }
            }
            PoolError::Memory { .. } => {
                ApiError { retry: Some(Duration::from_secs(10)), ..ApiError::unavailable(message).code(code) }
            }
            PoolError::Load { cause, .. } if matches!(*cause, Failure::Memory(_)) => ApiError {
                retry: Some(Duration::from_secs(10)),
                ..ApiError::unavailable(message).code("not_enough_memory")
            },
            PoolError::Load { .. } | PoolError::SelfTest { .. } => ApiError::internal(message).code(code),
        }
    }
}

impl PoolError {
    /// The message for clients, without paths of the server.
    pub fn for_clients(&self) -> String {
        match self {
            PoolError::Load { name, cause } => format!("model `{name}` does not load: {}", cause.for_clients()),
            other => other.to_string(),
        }
    }

    /// The error for administrators, who know the paths.
    pub fn for_administrators(self) -> ApiError {
        let message = self.to_string();
        ApiError { message, ..self.into() }
    }

    /// Whether a load failed by the model itself: not by its path, the memory of the server, or a setting.
    fn is_models_fault(&self) -> bool {
        match self {
            PoolError::Load { cause, .. } => matches!(
                **cause,
                Failure::Model { .. } | Failure::Incomplete { .. } | Failure::DraftModel { .. } | Failure::Weights(_)
            ),
            PoolError::SelfTest { .. } => true,
            _ => false,
        }
    }

    /// The code of the error in the API, and the label `reason` in metrics.
    pub const fn code(&self) -> &'static str {
        match self {
            PoolError::Unknown { .. } => "model_not_found",
            PoolError::NotLoaded(_) => "model_not_loaded",
            PoolError::Broken { .. } => "model_unavailable",
            PoolError::Busy { .. } => "model_loading",
            PoolError::QueueFull { .. } => "load_queue_full",
            PoolError::Memory { .. } => "not_enough_memory",
            PoolError::Load { .. } => "model_load_failed",
            PoolError::SelfTest { .. } => "self_test_failed",
        }
    }
}

/// All models of the server.
pub struct ModelPool {
    configuration: Live<Configuration>,
    settings: Live<Settings>,
    resources: Arc<Resources>,
    entries: RwLock<Vec<Arc<Entry>>>,
    /// Bytes of the budget in use at the last look, and when they became fewer.
    memory: Mutex<(u64, Option<Instant>)>,
    /// Held during a load, unload or swap.
    change: tokio::sync::Mutex<()>,
}

impl ModelPool {
    /// The pool of the configured models; none is loaded.
    ///
    /// # Errors
    /// If two models have the same name, or the directory of models cannot be read.
    pub fn new(configuration: Configuration, resources: Arc<Resources>) -> Result<ModelPool, Failure> {
        let models = configuration.models.clone();
        let settings = Live::new(configuration.settings.clone());
        let (configuration, change) = (Live::new(configuration), tokio::sync::Mutex::default());
        let pool = ModelPool {
            configuration,
            settings,
            resources,
            entries: RwLock::default(),
            memory: Mutex::default(),
            change,
        };
        for entry in pool.change_models(models, &[], &[], || Ok(()))? {
            entry.set_configured();
        }
        if let Some(directory) = &pool.settings().models_dir {
            pool.scan(directory).map_err(|source| Failure::File { path: directory.clone(), source })?;
        }
        Ok(pool)
    }

    pub fn resources(&self) -> &Resources {
        &self.resources
    }

    pub fn configuration(&self) -> Arc<Configuration> {
        self.configuration.get()
    }

    /// Settings of the server.
    pub fn settings(&self) -> Arc<Settings> {
        self.settings.get()
    }

    /// All models, the default one first.
    pub fn entries(&self) -> Vec<Arc<Entry>> {
        self.read().clone()
    }

    /// The model of requests that name none: the first.
    pub fn default_entry(&self) -> Option<Arc<Entry>> {
        self.read().first().cloned()
    }

    /// The model of a name or alias; the default one without a name. Looks for new files in the directory of models.
    ///
    /// # Errors
    /// If there is none.
    pub fn find(&self, name: Option<&str>) -> Result<Arc<Entry>, PoolError> {
        let find = || self.read().iter().find(|entry| name.is_none_or(|name| has_name(entry, name))).cloned();
        if let Some(entry) = find() {
            return Ok(entry);
        }
        self.rescan();
        find().ok_or_else(|| self.unknown(name.unwrap_or_default()))
    }

    /// As [`ModelPool::find`]; a name that no model has, but versions of it (`NAME@1`, `NAME@2`), is that of one of them by
    /// weight, the same one for the same `key`.
    ///
    /// # Errors
    /// If there is none.
    pub fn find_version(&self, name: Option<&str>, key: &str) -> Result<Arc<Entry>, PoolError> {
        let Some(name) = name else { return self.find(None) };
        self.find(Some(name)).or_else(|e| {
            let versions = self.versions(name);
            let weighted = versions.iter().map(|entry| (&*entry.name, entry.settings().weight));
            let chosen = split::choose(weighted, key).map(str::to_string);
            chosen.map_or(Err(e), |chosen| self.find(Some(&chosen)))
        })
    }

    /// The versions of a name.
    pub fn versions(&self, name: &str) -> Vec<Arc<Entry>> {
        let is_version = |entry: &&Arc<Entry>| entry.name.rsplit_once('@').is_some_and(|(base, _)| base == name);
        self.read().iter().filter(is_version).cloned().collect()
    }

    /// Adds the models of new files in the directory of models.
    pub fn rescan(&self) {
        if let Some(directory) = &self.settings().models_dir
            && let Err(e) = self.scan(directory)
        {
            tracing::warn!("models-dir: {}: {e}", directory.display());
        }
    }

    fn unknown(&self, name: &str) -> PoolError {
        let known: Vec<Arc<str>> = self.read().iter().map(|entry| Arc::clone(&entry.name)).collect();
        let near = known.iter().map(|known| (strsim::jaro_winkler(known, name), known));
        let near = near.max_by(|a, b| a.0.total_cmp(&b.0)).filter(|(score, _)| *score > 0.6 || known.len() == 1);
        PoolError::Unknown { found: starling_api::error::quoted(name), near: near.map(|(_, name)| name.to_string()) }
    }

    /// The model of a request, loaded; `key` chooses among versions. A client that gives up does not end the load.
    ///
    /// # Errors
    /// If there is no such model, it is not loaded in time, or does not load.
    pub async fn acquire(
        self: &Arc<Self>,
        name: Option<&str>,
        key: &str,
        autoload: Option<bool>,
    ) -> Result<Arc<ModelInstance>, PoolError> {
        let entry = self.find_version(name, key)?;
        entry.touch();
        if let Some(instance) = entry.instance() {
            return Ok(instance);
        }
        let settings = self.settings();
        if !autoload.unwrap_or(settings.autoload) && !entry.state().is_changing() {
            return Err(PoolError::NotLoaded(Arc::clone(&entry.name)));
        }
        let waiting = Waiting::begin(&entry, settings.load_queue)?;
        let (pool, loading) = (Arc::clone(self), Arc::clone(&entry));
        let refused = |wait| PoolError::Broken { name: Arc::clone(&entry.name), wait };
        let trial = match entry.state().is_changing() {
            true => None,
            false => entry.loads.admit(&entry.name, Instant::now()).map_err(refused)?,
        };
        let load = tokio::spawn(async move {
            let result = pool.load(&loading).await;
            match &result {
                Ok(_) => loading.loads.success(&loading.name),
                Err(e) if e.is_models_fault() => loading.loads.model_fault(Vec::new(), Instant::now()),
                Err(_) => {}
            }
            drop(trial);
            result
        });
        let result = tokio::time::timeout(settings.load_wait, load).await;
        drop(waiting);
        match result {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => Err(load_panicked(&entry)),
            Err(_) => Err(PoolError::Busy { name: Arc::clone(&entry.name), state: entry.state().name() }),
        }
    }

    /// Loads a model unless it is loaded.
    ///
    /// # Errors
    /// If it does not fit into memory, or does not load.
    pub async fn load(self: &Arc<Self>, entry: &Arc<Entry>) -> Result<Arc<ModelInstance>, PoolError> {
        let _change = self.change.lock().await;
        if let Some(instance) = entry.instance() {
            return Ok(instance);
        }
        entry.state.send_replace(ModelState::Loading);
        let model = entry.lock().clone();
        let result = self.load_as(entry, model, true).await;
        match &result {
            Ok(instance) => entry.serve(instance),
            Err(e) => drop(entry.state.send_replace(ModelState::Failed(e.clone()))),
        }
        entry.touch();
        result
    }

    /// Loads a model before the server accepts requests.
    ///
    /// # Errors
    /// As the commands of one model have them.
    pub async fn load_at_start(self: &Arc<Self>, entry: &Arc<Entry>) -> Result<(), Failure> {
        match self.load(entry).await {
            Ok(_) => Ok(()),
            Err(PoolError::Load { cause, .. }) => {
                // the server ends: only the caller is to have the error
                entry.state.send_replace(ModelState::Unloaded);
                Err(Arc::try_unwrap(cause).unwrap_or_else(|cause| Failure::Usage(cause.to_string())))
            }
            Err(e) => Err(Failure::Memory(e.to_string())),
        }
    }

    /// Resolves the source of `model`, makes room, and loads it under the name of `entry`.
    async fn load_as(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        model: ModelEntry,
        may_unload: bool,
    ) -> Result<Arc<ModelInstance>, PoolError> {
        let start = Instant::now();
        let (pool, of) = (Arc::clone(self), Arc::clone(entry));
        let work = move || {
            let wrong = |e: Failure| PoolError::Load { name: Arc::clone(&of.name), cause: Arc::new(e) };
            let args = load::resolve(&model.args).map_err(wrong)?;
            let draft = loading::draft_args(&args, &model.settings).map_err(wrong)?;
            let needed = loading::estimate(&args, draft.as_ref(), &model.settings).map_err(wrong)?;
            let lease = pool.make_room(&of, needed, may_unload)?;
            loading::load(&model, (&args, draft.as_ref()), &of.identity(), &pool.resources, lease).map_err(wrong)
        };
        let result = tokio::task::spawn_blocking(work).await;
        let result = result.unwrap_or_else(|_| Err(load_panicked(entry)));
        entry.metrics.load_finished(result.is_ok(), start.elapsed());
        if let Err(e) = &result {
            tracing::error!(model = &*entry.name, "{e}");
        }
        result
    }

    /// Takes memory for a model, and unloads idle ones for it, the least recently used first.
    fn make_room(&self, entry: &Entry, needed: u64, may_unload: bool) -> Result<MemoryLease, PoolError> {
        let budget = &self.resources.budget;
        let mut others: Vec<Arc<Entry>> = self.entries();
        others.retain(|other| other.name != entry.name && !other.lock().settings.pin);
        others.sort_by_key(|other| std::cmp::Reverse(other.idle_time()));
        let mut others = others.into_iter().filter(|_| may_unload);
        loop {
            if let Some(lease) = budget.lease(needed) {
                return Ok(lease);
            }
            let Some(other) = others.next() else { break };
            if other.unload_idle("memory") {
                budget.wait_free(needed, FREE_TIMEOUT);
            }
        }
        let in_use = self.entries().into_iter().filter_map(|entry| {
            let instance = entry.instance()?;
            Some(format!("{} {} MiB", entry.name, instance.weights.bytes() >> 20))
        });
        let in_use: Vec<String> = in_use.collect();
        let in_use = if in_use.is_empty() { "no model is loaded".into() } else { in_use.join(", ") };
        let (needed, free, limit) = (needed.div_ceil(1 << 20), budget.free() >> 20, budget.limit() >> 20);
        Err(PoolError::Memory { name: Arc::clone(&entry.name), needed, free, limit, in_use })
    }

    /// Unloads a model: its requests finish first, unless `now`. Its name stays. Returns whether it was loaded.
    pub async fn unload(&self, entry: &Entry, now: bool) -> bool {
        let _change = self.change.lock().await;
        let Some(old) = entry.instance() else { return false };
        entry.state.send_replace(ModelState::Unloaded);
        if now {
            old.queue.shut_down(Shutdown::Now);
        }
        drop(old);
        entry.note_unload("request");
        true
    }

    /// Replaces the model of a name by that of another source, while the old one serves. If anything fails, the old one
    /// stays.
    ///
    /// # Errors
    /// If the new one does not fit, does not load, or fails its test.
    pub async fn swap(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        source: Option<PathBuf>,
        options: SwapOptions,
    ) -> Result<Arc<ModelInstance>, PoolError> {
        let _change = self.change.lock().await;
        let result = self.swap_locked(entry, source, options).await;
        entry.metrics.swap_finished(result.is_ok());
        match &result {
            Ok(new) => tracing::info!(model = &*entry.name, source = new.source, "model replaced"),
            Err(e) => tracing::error!(model = &*entry.name, "model not replaced, the old one stays: {e}"),
        }
        result
    }

    async fn swap_locked(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        source: Option<PathBuf>,
        options: SwapOptions,
    ) -> Result<Arc<ModelInstance>, PoolError> {
        let mut model = entry.lock().clone();
        let before = model.clone();
        if let Some(source) = source {
            model.args.model = Some(source);
        }
        let is_drained = options.drain && entry.instance().is_some();
        let mut old = entry.instance();
        if is_drained {
            detach_sessions(entry, old.take());
            self.drain(entry).await;
        }
        let new = match self.load_as(entry, model.clone(), true).await {
            Ok(new) => self.test(entry, new, options.test).await,
            Err(e) => Err(e),
        };
        match new {
            Ok(new) => {
                if old.as_ref().is_none_or(|old| old.model_sha256 != new.model_sha256) && !is_drained {
                    detach_sessions(entry, old.take());
                }
                *entry.lock() = model;
                entry.metrics.clear_recent();
                entry.serve(&new);
                Ok(new)
            }
            Err(e) if is_drained => {
                let old = self.load_as(entry, before, true).await;
                match old {
                    Ok(old) => entry.serve(&old),
                    Err(again) => drop(entry.state.send_replace(ModelState::Failed(again))),
                }
                Err(e)
            }
            Err(e) => Err(e),
        }
    }

    /// Waits until the requests of a model have finished and its memory is free; new ones wait for the next.
    async fn drain(&self, entry: &Arc<Entry>) {
        let ModelState::Loaded(old) = entry.state.send_replace(ModelState::Draining) else { return };
        let (freed, weights) = (Arc::downgrade(&old.weights), old.weights.bytes());
        drop(old);
        let budget = Arc::clone(&self.resources.budget);
        let deadline = Instant::now() + self.settings().request_timeout;
        let wait = move || {
            while freed.strong_count() > 0 && Instant::now() < deadline {
                budget.wait_free(weights, Duration::from_millis(20));
                std::thread::sleep(Duration::from_millis(5));
            }
        };
        let _ = tokio::task::spawn_blocking(wait).await;
    }

    /// Runs the self-test of a new instance, by default a few tokens.
    async fn test(
        &self,
        entry: &Entry,
        new: Arc<ModelInstance>,
        test: Option<SelfTest>,
    ) -> Result<Arc<ModelInstance>, PoolError> {
        match test.unwrap_or_default().run(&new).await {
            Ok(()) => Ok(new),
            Err(why) => Err(PoolError::SelfTest { name: Arc::clone(&entry.name), why }),
        }
    }

    /// Unloads models that have been idle for their `idle_timeout`, and looks after the workers of the others. Called
    /// about once a second.
    pub fn supervise(&self) {
        for entry in self.entries() {
            let settings = entry.settings();
            let is_idle = settings.idle_timeout.is_some_and(|limit| entry.idle_time() > limit) && !settings.pin;
            if is_idle && self.change.try_lock().is_ok() {
                entry.unload_idle("idle");
            }
            entry.metrics.set_breaker(entry.breaker_name());
            let Some(instance) = entry.instance() else { continue };
            if instance.is_busy() {
                entry.touch();
            }
            instance.workers.supervise();
        }
        self.relieve();
        self.return_memory();
    }

    /// Makes the allocator return the memory of unloaded models to the system. It does so when it frees a large block, a
    /// second after the memory became free.
    fn return_memory(&self) {
        let used = self.resources.budget.used();
        let mut last = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        if used < last.0 {
            *last = (used, Some(Instant::now()));
        }
        last.0 = used;
        if last.1.is_some_and(|freed| freed.elapsed() < MEMORY_RETURN_TIME) {
            drop(std::hint::black_box(Vec::<u8>::with_capacity(LARGE_BLOCK)));
        }
    }

    /// Reacts to memory pressure.
    fn relieve(&self) {
        let (pressure, budget) = (&self.resources.pressure, &self.resources.budget);
        let before = pressure.level();
        let reading = if self.settings().memory_pressure { machine::memory_reading() } else { Reading::default() };
        let level = pressure.update(reading, Instant::now());
        self.resources.metrics.set_memory(level, budget.used());
        if level != before {
            tracing::warn!(pressure = level, before, ?reading, "memory pressure has changed");
        }
        for entry in self.entries() {
            let is_unloaded = level >= 2 && !entry.settings().pin && entry.unload_idle("memory_pressure");
            if let Some(instance) = entry.instance().filter(|_| !is_unloaded) {
                instance.workers.relieve(level);
            }
        }
    }

    /// Closes the sessions of all models that have expired.
    pub fn expire_sessions(&self) {
        for entry in self.entries() {
            let expired = entry.sessions.expire(Instant::now());
            if expired.is_empty() {
                continue;
            }
            tracing::debug!(sessions = expired.len(), "sessions expired (--session-ttl)");
            if let Some(instance) = entry.instance() {
                instance.queue.evict_prefixes(expired);
            }
        }
    }

    /// Replaces the settings of the server and of models by name, all at once.
    pub fn set_settings(&self, server: Settings, models: Vec<(Arc<Entry>, Settings)>) {
        self.settings.set(server);
        for (entry, settings) in models {
            entry.set_settings(settings);
        }
    }

    /// Replaces the configuration that new files of the directory of models follow.
    pub fn set_configuration(&self, configuration: Configuration) {
        self.configuration.set(configuration);
    }

    /// Removes a model and its name; its requests finish. Returns whether it was loaded.
    pub async fn remove(&self, entry: &Arc<Entry>) -> bool {
        self.entries.write().unwrap_or_else(PoisonError::into_inner).retain(|other| !Arc::ptr_eq(other, entry));
        let was_loaded = self.unload(entry, false).await;
        if let Some(journal) = &entry.journal {
            journal.clear();
        }
        was_loaded
    }

    /// Adds a model, for an administrator or from the directory of models: a reload keeps it.
    ///
    /// # Errors
    /// If its name or an alias is taken.
    pub fn add(&self, entry: ModelEntry) -> Result<(), Failure> {
        self.change_models(vec![entry], &[], &[], || Ok(())).map(drop)
    }

    /// Adds and removes names of models, and calls `apply`, which makes their settings take effect: all of it, or nothing. Returns
    /// the new models.
    ///
    /// # Errors
    /// If a name or an alias would be taken twice, or `apply` fails.
    pub fn change_models(
        &self,
        new: Vec<ModelEntry>,
        gone: &[Arc<Entry>],
        settings: &[(Arc<Entry>, Settings)],
        apply: impl FnOnce() -> Result<(), Failure>,
    ) -> Result<Vec<Arc<Entry>>, Failure> {
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        let is_gone = |entry: &Arc<Entry>| gone.iter().any(|other| Arc::ptr_eq(other, entry));
        let mut names: BTreeMap<String, PathBuf> = BTreeMap::new();
        let mut take = |name: &str, aliases: &[String], path: &Path| {
            for name in std::iter::once(name).chain(aliases.iter().map(String::as_str)) {
                if let Some(other) = names.insert(name.into(), path.into()) {
                    let message =
                        format!("two models have the name `{name}`: {} and {}", path.display(), other.display());
                    return Err(Failure::Usage(format!("{message}; give one another name: --model NAME=SOURCE")));
                }
            }
            Ok(())
        };
        for entry in entries.iter().filter(|entry| !is_gone(entry)) {
            let new = settings.iter().find(|(other, _)| Arc::ptr_eq(other, entry)).map(|(_, new)| new.aliases.clone());
            take(&entry.name, &new.unwrap_or_else(|| entry.settings().aliases), &load::path(&entry.lock().args))?;
        }
        for entry in &new {
            take(&loading::model_name(entry), &entry.settings.aliases, &load::path(&entry.args))?;
        }
        apply()?;
        entries.retain(|entry| !is_gone(entry));
        let new: Vec<_> = new.into_iter().map(|entry| Arc::new(self.entry(entry))).collect();
        entries.extend(new.iter().cloned());
        Ok(new)
    }

    /// An unloaded model.
    fn entry(&self, entry: ModelEntry) -> Entry {
        let name = loading::model_name(&entry);
        let metrics = Arc::new(self.resources.metrics.model(&name));
        metrics.set_loaded(false, 0);
        let ttl = entry.settings.session_ttl;
        let journal = self.resources.state.as_ref().map(|store| Arc::new(SessionJournal::new(store, &name, ttl)));
        let removals = journal.clone().map(|journal| journal as Arc<dyn Journal>);
        let sessions = Arc::new(Sessions::new(session_limits(&entry.settings), removals));
        let loads = Arc::new(Breaker::new(BreakerLimits::new(&entry.settings)));
        Entry {
            name,
            metrics,
            sessions,
            journal,
            kv_namespaces: Arc::default(),
            loads,
            batch_capacity: entry.settings.batch_tokens.max(entry.settings.max_seqs),
            seqs_capacity: entry.settings.max_seqs,
            header: HeaderCache::default(),
            is_configured: AtomicBool::new(false),
            state: watch::Sender::new(ModelState::Unloaded),
            entry: Mutex::new(entry),
            last_used: Mutex::new(Instant::now()),
            waiting: AtomicUsize::new(0),
        }
    }

    /// Adds the models of a directory that are new.
    fn scan(&self, directory: &Path) -> std::io::Result<()> {
        let mut files = BTreeMap::new();
        for file in std::fs::read_dir(directory)?.take(MAX_MODELS) {
            let path = file?.path();
            let text = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            let shard = starling::gguf::ShardName::parse(text);
            let is_first = shard.as_ref().is_none_or(|shard| shard.number == 1);
            if text.ends_with(".gguf") && is_first && path.is_file() {
                files.insert(loading::name(&path), path);
            }
        }
        for (name, path) in files {
            let is_known = self.read().iter().any(|entry| has_name(entry, &name));
            if !is_known && self.add(ModelEntry::of_file(path.clone(), &self.configuration())).is_ok() {
                tracing::info!(model = name, "model found in models-dir");
            }
        }
        Ok(())
    }

    fn read(&self) -> std::sync::RwLockReadGuard<'_, Vec<Arc<Entry>>> {
        self.entries.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a model is to be loaded at the start.
    pub fn loads_at_start(entry: &Entry) -> bool {
        entry.lock().settings.load.unwrap_or(LoadPolicy::Startup) == LoadPolicy::Startup
    }
}

fn load_panicked(entry: &Entry) -> PoolError {
    let cause = Failure::Weights("the load panicked; see the log".into());
    PoolError::Load { name: Arc::clone(&entry.name), cause: Arc::new(cause) }
}

/// Keeps the conversations of an entry as text. Without its tokenizer, those that are tokens only are lost.
fn detach_sessions(entry: &Entry, old: Option<Arc<ModelInstance>>) {
    entry.sessions.detach(|tokens| old.as_ref().map_or_else(String::new, |old| old.text(tokens)));
}

fn has_name(entry: &Entry, name: &str) -> bool {
    &*entry.name == name || entry.lock().settings.aliases.iter().any(|alias| alias == name)
}

fn session_limits(settings: &Settings) -> SessionLimits {
    let bytes = |bytes: Bytes| usize::try_from(bytes.0).unwrap_or(usize::MAX);
    SessionLimits {
        ttl: settings.session_ttl,
        count: settings.max_sessions,
        bytes: bytes(settings.session_memory),
        total_bytes: bytes(settings.sessions_memory),
    }
}

/// A request that waits for its model, until it is dropped.
struct Waiting(Arc<Entry>);

impl Waiting {
    fn begin(entry: &Arc<Entry>, limit: usize) -> Result<Waiting, PoolError> {
        let waiting = entry.waiting.fetch_add(1, Ordering::AcqRel);
        let this = Waiting(Arc::clone(entry));
        if waiting >= limit {
            return Err(PoolError::QueueFull { name: Arc::clone(&entry.name), waiting, limit });
        }
        Ok(this)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::AcqRel);
    }
}

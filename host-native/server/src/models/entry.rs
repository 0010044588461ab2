//! A model of the pool: its name, and what outlives its instances.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::actor::{ModelActor, ModelState};
use super::error::PoolError;
use super::header::{HeaderCache, ModelHeader};
use super::instance::ModelInstance;
use super::loading::{self, Identity, Resources};
use crate::config::value::Bytes;
use crate::config::{ModelEntry, Settings};
use crate::observe::model_metrics::ModelMetrics;
use crate::schedule::breaker::{Breaker, BreakerLimits};
use crate::state::kv_disk::Namespace;
use crate::state::sessions::{Journal, SessionLimits, Sessions};
use crate::state::store::SessionJournal;

/// Whether a model is loaded.
pub type EntryState = ModelState<ModelInstance, PoolError>;

/// A model of the pool.
pub struct Entry {
    pub name: Arc<str>,
    pub metrics: Arc<ModelMetrics>,
    pub sessions: Arc<Sessions>,
    /// Writes the sessions (`--state-dir`).
    pub journal: Option<Arc<SessionJournal>>,
    /// Namespaces of its KV pages on disk, of all loads.
    kv_namespaces: Mutex<Vec<Namespace>>,
    /// Counts the loads for requests that failed by the model's fault.
    loads: Arc<Breaker>,
    /// Largest `batch_tokens` and `max_seqs` that may be set while the model serves: as configured.
    pub batch_capacity: usize,
    pub seqs_capacity: usize,
    header: HeaderCache,
    /// Whether the configuration has it, not an administrator or the directory of models.
    is_configured: AtomicBool,
    actor: ModelActor<ModelInstance, PoolError>,
    last_used: Mutex<Instant>,
    /// Requests that wait for it to load.
    waiting: AtomicUsize,
}

impl Entry {
    /// An unloaded model.
    pub fn new(entry: ModelEntry, resources: &Resources) -> Entry {
        let name = loading::model_name(&entry);
        let metrics = Arc::new(resources.metrics.model(&name));
        metrics.set_loaded(false, 0);
        let ttl = entry.settings.session_ttl;
        let journal = resources.state.as_ref().map(|store| Arc::new(SessionJournal::new(store, &name, ttl)));
        let removals = journal.clone().map(|journal| journal as Arc<dyn Journal>);
        let sessions = Arc::new(Sessions::new(session_limits(&entry.settings), removals));
        let loads = Arc::new(Breaker::new(BreakerLimits::new(&entry.settings)));
        Entry {
            name,
            metrics,
            sessions,
            journal,
            kv_namespaces: Mutex::default(),
            loads,
            batch_capacity: entry.settings.batch_tokens.max(entry.settings.max_seqs),
            seqs_capacity: entry.settings.max_seqs,
            header: HeaderCache::default(),
            is_configured: AtomicBool::new(false),
            actor: ModelActor::new(entry),
            last_used: Mutex::new(Instant::now()),
            waiting: AtomicUsize::new(0),
        }
    }

    pub fn state(&self) -> EntryState {
        self.actor.state()
    }

    /// The instance, if the model is loaded.
    pub fn instance(&self) -> Option<Arc<ModelInstance>> {
        self.actor.instance()
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
        self.actor.entry().settings.clone()
    }

    /// Source, as `-m` takes it; `None` for the bundled model.
    pub fn source(&self) -> Option<PathBuf> {
        self.actor.entry().args.model.clone()
    }

    /// What the model's file says; `None` if it is not on this machine or cannot be read. Reads the file.
    pub fn header(&self) -> Option<Arc<ModelHeader>> {
        let source = self.source()?;
        if source.is_file() { self.header.get(&source) } else { None }
    }

    /// Changes the settings: those that may change at run time take effect at once, others at the next load.
    pub fn set_settings(&self, settings: Settings) {
        self.actor.set_settings(settings);
    }

    /// Time since the last request.
    pub fn idle_time(&self) -> Duration {
        self.last_used.lock().unwrap_or_else(PoisonError::into_inner).elapsed()
    }

    pub fn touch(&self) {
        *self.last_used.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    /// Source and settings as they are now.
    pub fn entry(&self) -> Arc<ModelEntry> {
        self.actor.entry()
    }

    /// Whether the model has a name or alias.
    pub fn has_name(&self, name: &str) -> bool {
        &*self.name == name || self.entry().settings.aliases.iter().any(|alias| alias == name)
    }

    /// Its owner, who loads, unloads and replaces it.
    pub fn actor(&self) -> &ModelActor<ModelInstance, PoolError> {
        &self.actor
    }

    /// Counts the loads for requests that failed by the model's fault.
    pub fn loads(&self) -> &Arc<Breaker> {
        &self.loads
    }

    /// Notes where an instance keeps its KV pages on disk.
    pub fn note_namespace(&self, namespace: Namespace) {
        let mut known = self.kv_namespaces.lock().unwrap_or_else(PoisonError::into_inner);
        if !known.contains(&namespace) {
            known.push(namespace);
        }
    }

    /// What outlives a load.
    pub fn identity(&self) -> Identity {
        let (name, metrics) = (Arc::clone(&self.name), Arc::clone(&self.metrics));
        Identity {
            name,
            metrics,
            sessions: Arc::clone(&self.sessions),
            journal: self.journal.clone(),
            batch_capacity: self.batch_capacity,
            seqs_capacity: self.seqs_capacity,
        }
    }
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
pub struct Waiting(Arc<Entry>);

impl Waiting {
    /// # Errors
    /// If as many wait as may.
    pub fn begin(entry: &Arc<Entry>, limit: usize) -> Result<Waiting, PoolError> {
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

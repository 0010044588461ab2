//! Loads, unloads and swaps of the models of the pool.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use starling_host::error::Failure;
use starling_host::load;

use super::actor::{Change, ChangeError, Loader};
use super::budget::MemoryLease;
use super::entry::{Entry, Waiting};
use super::error::PoolError;
use super::instance::ModelInstance;
use super::loading;
use super::pool::ModelPool;
use super::self_test::SelfTest;
use crate::config::ModelEntry;
use crate::schedule::queue::Shutdown;

/// Time for the memory of an unloaded model to become free.
const FREE_TIMEOUT: Duration = Duration::from_secs(10);

/// How to replace a model.
#[derive(Debug, Clone, Default)]
pub struct SwapOptions {
    /// Finish the running requests and free the old model first: for models that do not fit into memory together.
    pub drain: bool,
    pub test: Option<SelfTest>,
}

impl ModelPool {
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
            false => entry.loads().admit(&entry.name, Instant::now()).map_err(refused)?,
        };
        let load = tokio::spawn(async move {
            let result = pool.load(&loading).await;
            match &result {
                Ok(_) => loading.loads().success(&loading.name),
                Err(e) if e.is_models_fault() => loading.loads().model_fault(Vec::new(), Instant::now()),
                Err(_) => {}
            }
            drop(trial);
            result
        });
        let result = tokio::time::timeout(settings.load_wait, load).await;
        drop(waiting);
        match result {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => Err(PoolError::load_panicked(&entry.name)),
            Err(_) => Err(PoolError::Busy { name: Arc::clone(&entry.name), state: entry.state().name() }),
        }
    }

    /// Loads a model unless it is loaded.
    ///
    /// # Errors
    /// If it was removed, does not fit into memory, or does not load.
    pub async fn load(self: &Arc<Self>, entry: &Arc<Entry>) -> Result<Arc<ModelInstance>, PoolError> {
        let result = self.change(entry, Change::Load, SelfTest::default()).await;
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
                entry.actor().forget_failure();
                Err(Arc::try_unwrap(cause).unwrap_or_else(|cause| Failure::Usage(cause.to_string())))
            }
            Err(e) => Err(Failure::Memory(e.to_string())),
        }
    }

    /// Unloads a model: its requests finish first, unless `now`. Its name stays. Returns whether it was loaded.
    pub async fn unload(&self, entry: &Entry, now: bool) -> bool {
        let old = entry.actor().unload("request").await;
        if let Some(old) = old.as_ref().filter(|_| now) {
            old.queue.shut_down(Shutdown::Now);
        }
        old.is_some()
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
        let change = Change::Swap { source, drain: options.drain };
        let result = self.change(entry, change, options.test.unwrap_or_default()).await;
        entry.metrics.swap_finished(result.is_ok());
        match &result {
            Ok(new) => tracing::info!(model = &*entry.name, source = new.source, "model replaced"),
            Err(e) => tracing::error!(model = &*entry.name, "model not replaced, the old one stays: {e}"),
        }
        result
    }

    /// Makes a change, whether the caller waits for it or not.
    async fn change(
        self: &Arc<Self>,
        entry: &Arc<Entry>,
        change: Change,
        test: SelfTest,
    ) -> Result<Arc<ModelInstance>, PoolError> {
        let loader = PoolLoader { pool: Arc::clone(self), entry: Arc::clone(entry), test };
        let is_swap = change != Change::Load;
        let done = tokio::spawn(async move {
            let result = loader.entry.actor().change(change, &loader).await;
            if is_swap && result.is_ok() {
                loader.entry.metrics.clear_recent();
            }
            result
        });
        match done.await {
            Ok(Ok(new)) => Ok(new),
            Ok(Err(ChangeError::Removed)) => Err(self.unknown(&entry.name)),
            Ok(Err(ChangeError::Failed(e))) => Err(e),
            Err(_) => Err(PoolError::load_panicked(&entry.name)),
        }
    }

    /// Takes memory for a model, and unloads idle ones for it, the least recently used first.
    pub(super) fn make_room(&self, entry: &Entry, needed: u64) -> Result<MemoryLease, PoolError> {
        let budget = &self.resources().budget;
        let mut others: Vec<Arc<Entry>> = self.entries();
        others.retain(|other| other.name != entry.name && !other.settings().pin);
        others.sort_by_key(|other| std::cmp::Reverse(other.idle_time()));
        let mut others = others.into_iter();
        loop {
            if let Some(lease) = budget.lease(needed) {
                return Ok(lease);
            }
            let Some(other) = others.next() else { break };
            if other.actor().unload_idle("memory") {
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
}

/// Loads a model of the pool.
struct PoolLoader {
    pool: Arc<ModelPool>,
    entry: Arc<Entry>,
    /// By default a few tokens.
    test: SelfTest,
}

impl Loader<ModelInstance, PoolError> for PoolLoader {
    /// Resolves the source, makes room, and loads.
    async fn load(&self, model: ModelEntry) -> Result<Arc<ModelInstance>, PoolError> {
        let _loads = self.pool.loads.lock().await;
        let start = Instant::now();
        let (pool, of) = (Arc::clone(&self.pool), Arc::clone(&self.entry));
        let work = move || {
            let wrong = |e: Failure| PoolError::Load { name: Arc::clone(&of.name), cause: Arc::new(e) };
            let args = load::resolve(&model.args).map_err(wrong)?;
            let draft = loading::draft_args(&args, &model.settings).map_err(wrong)?;
            let needed = loading::estimate(&args, draft.as_ref(), &model.settings).map_err(wrong)?;
            let lease = pool.make_room(&of, needed)?;
            let resources = pool.resources();
            let new = loading::load(&model, (&args, draft.as_ref()), of.identity(), resources, lease).map_err(wrong)?;
            // there may be pages on disk from now on
            new.kv_namespace.into_iter().for_each(|namespace| of.note_namespace(namespace));
            Ok(new)
        };
        let result = tokio::task::spawn_blocking(work).await;
        let result = result.unwrap_or_else(|_| Err(PoolError::load_panicked(&self.entry.name)));
        self.entry.metrics.load_finished(result.is_ok(), start.elapsed());
        if let Err(e) = &result {
            tracing::error!(model = &*self.entry.name, "{e}");
        }
        result
    }

    async fn test(&self, new: &Arc<ModelInstance>) -> Result<(), PoolError> {
        let tested = self.test.run(new).await;
        tested.map_err(|why| PoolError::SelfTest { name: Arc::clone(&self.entry.name), why })
    }

    fn replace(&self, old: Option<Arc<ModelInstance>>, new: &Arc<ModelInstance>) {
        if old.as_ref().is_none_or(|old| old.model_sha256 != new.model_sha256) {
            detach_sessions(&self.entry, old.as_ref());
        }
    }

    async fn adopt(&self, new: &Arc<ModelInstance>) {
        let (entry, sha256) = (Arc::clone(&self.entry), new.model_sha256);
        let restore = move || {
            if let Some(journal) = &entry.journal {
                journal.restore(&entry.sessions, &sha256);
            }
        };
        let _ = tokio::task::spawn_blocking(restore).await;
    }

    async fn drain(&self, old: Arc<ModelInstance>) {
        detach_sessions(&self.entry, Some(&old));
        let (freed, weights) = (Arc::downgrade(&old.weights), old.weights.bytes());
        drop(old);
        let budget = Arc::clone(&self.pool.resources().budget);
        let deadline = Instant::now() + self.pool.settings().request_timeout;
        let wait = move || {
            while freed.strong_count() > 0 && Instant::now() < deadline {
                budget.wait_free(weights, Duration::from_millis(20));
                std::thread::sleep(Duration::from_millis(5));
            }
        };
        let _ = tokio::task::spawn_blocking(wait).await;
    }
}

/// Keeps the conversations of an entry as text. Without its tokenizer, those that are tokens only are lost.
fn detach_sessions(entry: &Entry, old: Option<&Arc<ModelInstance>>) {
    entry.sessions.detach(|tokens| old.map_or_else(String::new, |old| old.text(tokens)));
}

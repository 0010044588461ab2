//! The pool of models: names, what is loaded, and the memory that they share.
//!
//! A request names a model and gets its [`super::instance::ModelInstance`], which is loaded first if it is not. Where memory is short, the
//! least recently used idle models without `pin` are unloaded. Models load one at a time.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard};
use std::time::Instant;

use starling_host::error::Failure;
use starling_host::load;

use super::entry::Entry;
use super::error::PoolError;
use super::loading::{self, Resources};
use super::split;
use crate::config::value::LoadPolicy;
use crate::config::{Configuration, Live, ModelEntry, Settings};

/// Maximum number of models.
const MAX_MODELS: usize = 4096;

/// All models of the server.
pub struct ModelPool {
    configuration: Live<Configuration>,
    settings: Live<Settings>,
    resources: Arc<Resources>,
    entries: RwLock<Vec<Arc<Entry>>>,
    /// Bytes of the budget in use at the last look, and when they became fewer.
    pub(super) memory: Mutex<(u64, Option<Instant>)>,
    /// Held during a load.
    pub(super) loads: tokio::sync::Mutex<()>,
}

impl ModelPool {
    /// The pool of the configured models; none is loaded.
    ///
    /// # Errors
    /// If two models have the same name, or the directory of models cannot be read.
    pub fn new(configuration: Configuration, resources: Arc<Resources>) -> Result<ModelPool, Failure> {
        let models = configuration.models.clone();
        let settings = Live::new(configuration.settings.clone());
        let (configuration, loads) = (Live::new(configuration), tokio::sync::Mutex::default());
        let pool = ModelPool {
            configuration,
            settings,
            resources,
            entries: RwLock::default(),
            memory: Mutex::default(),
            loads,
        };
        for entry in pool.change_models(models, &[], &[], || Ok(()))? {
            entry.set_configured();
        }
        if let Some(directory) = &pool.settings().models_dir {
            pool.scan(directory).map_err(|source| Failure::File { path: directory.clone(), source })?;
        }
        Ok(pool)
    }

    pub fn resources(&self) -> &Arc<Resources> {
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
        let find = || self.read().iter().find(|entry| name.is_none_or(|name| entry.has_name(name))).cloned();
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

    pub(super) fn unknown(&self, name: &str) -> PoolError {
        let known: Vec<Arc<str>> = self.read().iter().map(|entry| Arc::clone(&entry.name)).collect();
        let near = known.iter().map(|known| (strsim::jaro_winkler(known, name), known));
        let near = near.max_by(|a, b| a.0.total_cmp(&b.0)).filter(|(score, _)| *score > 0.6 || known.len() == 1);
        PoolError::Unknown { found: starling_api::error::quoted(name), near: near.map(|(_, name)| name.to_string()) }
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
        let was_loaded = entry.actor().remove("request").await.is_some();
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
            take(&entry.name, &new.unwrap_or_else(|| entry.settings().aliases), &load::path(&entry.entry().args))?;
        }
        for entry in &new {
            take(&loading::model_name(entry), &entry.settings.aliases, &load::path(&entry.args))?;
        }
        apply()?;
        entries.retain(|entry| !is_gone(entry));
        let new: Vec<_> = new.into_iter().map(|entry| Arc::new(Entry::new(entry, &self.resources))).collect();
        entries.extend(new.iter().cloned());
        Ok(new)
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
            let is_known = self.read().iter().any(|entry| entry.has_name(&name));
            if !is_known && self.add(ModelEntry::of_file(path.clone(), &self.configuration())).is_ok() {
                tracing::info!(model = name, "model found in models-dir");
            }
        }
        Ok(())
    }

    fn read(&self) -> RwLockReadGuard<'_, Vec<Arc<Entry>>> {
        self.entries.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a model is to be loaded at the start.
    pub fn loads_at_start(entry: &Entry) -> bool {
        entry.settings().load.unwrap_or(LoadPolicy::Startup) == LoadPolicy::Startup
    }
}

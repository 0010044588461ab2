//! Sources of models: from the text of `--model` to a file on disk.

pub mod download;
mod gguf_files;
mod http;
mod hub_cache;
pub mod names;
mod pace;
pub mod pull;
pub mod source;
pub mod store;

use std::env;
use std::path::{Path, PathBuf};

pub use download::DownloadError;
use gguf_files::find;
use hub_cache::HubCache;
use pull::{PullOptions, Puller, Watch};
use source::{RemoteSource, Selection};
pub use store::ModelLock;
use store::{Manifest, Store};

const DEFAULT_ENDPOINT: &str = "https://huggingface.co";

/// Finds the files of model sources: on disk, in the store, in the Hugging Face cache, which is only read, or by a
/// download into the store.
pub struct Registry {
    /// `None` if the environment names no directory and there is no home directory.
    hub_cache: Option<HubCache>,
    store: Option<Store>,
    /// Address of the hub.
    endpoint: String,
    token: Option<String>,
    /// Whether nothing is downloaded.
    offline: bool,
}

/// A model's file, and the lock that keeps it in the store.
#[derive(Debug)]
pub struct Resolved {
    /// The file; the first file if the model is split and the source does not name another.
    pub path: PathBuf,
    pub lock: Option<ModelLock>,
}

/// Why a source leads to no model file.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    #[error("{text:?}: expected hf:OWNER/REPO, optionally with :QUANT or /FILE.gguf, then @REVISION")]
    Syntax { text: String },
    #[error(
        "{source_text}: not in the store or the Hugging Face cache, and nothing is downloaded offline (STARLING_OFFLINE, HF_HUB_OFFLINE)"
    )]
    Offline { source_text: String },
    #[error("no directory for the store: set STARLING_HOME, XDG_CACHE_HOME or HOME")]
    NoStore,
    #[error(
        "{name}: no such file, and no model of this name in the store{}; `starling list` shows the store, `starling pull hf:OWNER/REPO:QUANT` downloads a model into it",
        near(near_name)
    )]
    Unknown { name: String, near_name: Option<String> },
    #[error("{}: found no GGUF model file", directory.display())]
    NoModel { directory: PathBuf },
    #[error("{}: no model file matches {wanted:?}; found: {}", directory.display(), found.join(", "))]
    NoMatch { directory: PathBuf, wanted: String, found: Vec<String> },
    #[error("{}: several model files fit, name one of: {}", directory.display(), found.join(", "))]
    Ambiguous { directory: PathBuf, found: Vec<String> },
    #[error("{}: this file of the split model is missing", path.display())]
    MissingShard { path: PathBuf },
    #[error("{}: more than {limit} entries, expected the directory of a model", directory.display())]
    TooLarge { directory: PathBuf, limit: usize },
    #[error("{url}: {why}")]
    Hub { url: String, why: names::NameError },
    #[error("{name:?}: expected a name of letters, digits and . _ - + : @")]
    Name { name: String },
    #[error("{name}: the store has a model of this name, of {source_text}; give another with --name")]
    NameTaken { name: String, source_text: String },
    #[error("{name}: in use by another process; --force removes its name anyway")]
    InUse { name: String },
    #[error("{source_text}: the server answered \"not modified\", but the store does not have the model; use --force")]
    Nothing { source_text: String },
    #[error("STARLING_STORE_QUOTA: {why}")]
    Quota { why: String },
    #[error("the store has {used} bytes in use, {needed} more exceed its quota of {quota} (STARLING_STORE_QUOTA)")]
    QuotaFull { needed: u64, used: u64, quota: u64 },
    #[error(transparent)]
    Download(#[from] DownloadError),
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: std::io::Error },
}

fn near(name: &Option<String>) -> String {
    name.as_ref().map_or_else(String::new, |name| format!("; did you mean {name}?"))
}

/// Downloads a model into the store of the environment, unless it is there. Returns its name and source.
///
/// # Errors
/// If the text is no remote source, there is no such model, the download fails, or the registry is offline.
pub fn pull(text: &str, watch: Watch<'_>) -> Result<(String, String), SourceError> {
    let source = RemoteSource::parse(text).transpose()?.ok_or_else(|| SourceError::Syntax { text: text.into() })?;
    let (model, _) = Registry::from_env()?.pull(&source, &PullOptions::default(), watch)?;
    Ok((model.name, model.source))
}

impl Registry {
    /// The registry with the store, cache, hub, token and mode that the environment names.
    ///
    /// # Errors
    /// If the quota of the store is no size.
    pub fn from_env() -> Result<Registry, SourceError> {
        let variable = |name| env::var(name).ok().filter(|value| !value.is_empty());
        let is_set = |name| variable(name).is_some_and(|value| !matches!(&*value, "0" | "false"));
        Ok(Registry {
            hub_cache: HubCache::from_env(),
            store: Store::from_env()?,
            endpoint: variable("HF_ENDPOINT").unwrap_or_else(|| DEFAULT_ENDPOINT.into()),
            token: variable("HF_TOKEN"),
            offline: is_set("STARLING_OFFLINE") || is_set("HF_HUB_OFFLINE"),
        })
    }

    /// Whether the store has a model of this name or source.
    pub fn is_stored(&self, text: &str) -> bool {
        self.store.as_ref().is_some_and(|store| store.find(text).is_some())
    }

    /// Downloads nothing from now on.
    pub fn set_offline(&mut self) {
        self.offline = true;
    }

    /// The file of a source. A path that leads to nothing is returned unchanged, unless it looks like a name of the store.
    ///
    /// # Errors
    /// If the source is malformed, leads to no file or to several, or the download fails.
    pub fn resolve(&self, source: &Path) -> Result<Resolved, SourceError> {
        let on_disk = |path: PathBuf| Ok(Resolved { path, lock: None });
        if source.is_dir() {
            return on_disk(find(source, &Selection::Default)?);
        }
        let Some(text) = source.to_str().filter(|_| !source.exists()) else { return on_disk(source.into()) };
        if let Some(model) = self.store.as_ref().and_then(|store| store.find(text)) {
            return self.open(&model);
        }
        match RemoteSource::parse(text).transpose()? {
            Some(remote) => {
                if let (RemoteSource::Hub(hub), Some(cache)) = (&remote, &self.hub_cache)
                    && let Some(snapshot) = cache.snapshot(hub)?
                {
                    return on_disk(find(&snapshot, &hub.selection)?);
                }
                let model = self.pull(&remote, &PullOptions::default(), &|_, _| {})?.0;
                self.open(&model)
            }
            None if names::is_name(text) && !text.ends_with(".gguf") => {
                let names = self.store.as_ref().map(Store::list).unwrap_or_default();
                let near = names.iter().map(|model| (strsim::jaro_winkler(&model.name, text), &model.name));
                let near = near.max_by(|a, b| a.0.total_cmp(&b.0)).filter(|(score, _)| *score > 0.7);
                Err(SourceError::Unknown { name: text.into(), near_name: near.map(|(_, name)| name.clone()) })
            }
            None => on_disk(source.into()),
        }
    }

    /// Downloads a model into the store unless it is there. Returns it, and whether it was downloaded.
    ///
    /// # Errors
    /// If there is no such model, the download fails, or the registry is offline.
    pub fn pull(
        &self,
        source: &RemoteSource,
        options: &PullOptions,
        watch: Watch<'_>,
    ) -> Result<(Manifest, bool), SourceError> {
        if self.offline {
            return Err(SourceError::Offline { source_text: source.to_string() });
        }
        let (store, token) = (self.store()?, self.token.as_deref());
        Puller { store, endpoint: &self.endpoint, token, watch }.pull(source, options)
    }

    pub fn open(&self, model: &Manifest) -> Result<Resolved, SourceError> {
        let (path, lock) = self.store()?.open(model)?;
        Ok(Resolved { path, lock: Some(lock) })
    }

    pub fn store(&self) -> Result<&Store, SourceError> {
        self.store.as_ref().ok_or(SourceError::NoStore)
    }
}

#[cfg(test)]
mod tests;

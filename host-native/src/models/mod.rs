//! Sources of models: from the text of `--model` to a file on disk.

mod gguf_files;
mod hub_cache;
mod source;

use std::path::{Path, PathBuf};

use gguf_files::find;
use hub_cache::HubCache;
use source::{HubSource, Selection};

/// Resolves model sources. Reads the file system only; nothing is downloaded or written.
pub struct Registry {
    /// `None` if the environment names no directory and there is no home directory.
    hub_cache: Option<HubCache>,
}

/// Why a source leads to no model file.
#[derive(Debug, thiserror::Error)]
pub enum SourceError {
    #[error("{text:?}: expected hf:OWNER/REPO, optionally with :QUANT or /FILE.gguf, then @REVISION")]
    Syntax { text: String },
    #[error(
        "{source_text}: not found in the Hugging Face cache at {}; download it with `hf download {repo}`",
        cache.display()
    )]
    NotCached { source_text: String, cache: PathBuf, repo: String },
    #[error("{source_text}: there is no Hugging Face cache: set HF_HUB_CACHE, HF_HOME or HOME")]
    NoCache { source_text: String },
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
    #[error("{}: {source}", path.display())]
    Io { path: PathBuf, source: std::io::Error },
}

impl Registry {
    /// The registry with the Hugging Face cache that the environment names.
    pub fn from_env() -> Registry {
        Registry { hub_cache: HubCache::from_env() }
    }

    /// The model file of a source; the first file if the model is split and the source does not name another.
    /// A path that is neither a directory nor `hf:…` is returned unchanged, whether it exists or not.
    ///
    /// # Errors
    /// If the source is malformed, leads to no file, or to several.
    pub fn resolve(&self, source: &Path) -> Result<PathBuf, SourceError> {
        if let Some(text) = source.to_str().filter(|text| text.starts_with("hf:") && !source.exists()) {
            let hub = HubSource::parse(text).ok_or_else(|| SourceError::Syntax { text: text.into() })?;
            let cache = self.hub_cache.as_ref().ok_or_else(|| SourceError::NoCache { source_text: text.into() })?;
            let snapshot = cache.snapshot(&hub)?.ok_or_else(|| SourceError::NotCached {
                source_text: text.into(),
                cache: cache.root().into(),
                repo: hub.repo_id(),
            })?;
            return find(&snapshot, &hub.selection);
        }
        if source.is_dir() { find(source, &Selection::Default) } else { Ok(source.into()) }
    }
}

#[cfg(test)]
mod tests;

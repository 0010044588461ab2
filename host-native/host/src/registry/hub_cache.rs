//! The cache of Hugging Face's own tools: `models--OWNER--REPO/{refs,snapshots}`. It is read, never written.

use std::env;
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use super::SourceError;
use super::source::HubSource;

/// Bytes read of a file in `refs`, which contains a commit: 40 hexadecimal digits.
const REF_BYTES: u64 = 64;

pub struct HubCache {
    root: PathBuf,
}

impl HubCache {
    /// The directory that huggingface_hub would use: `HF_HUB_CACHE`, `HF_HOME/hub`,
    /// `XDG_CACHE_HOME/huggingface/hub`, or `~/.cache/huggingface/hub`.
    pub fn from_env() -> Option<HubCache> {
        let variable = |name| env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let root = variable("HF_HUB_CACHE")
            .or_else(|| Some(variable("HF_HOME")?.join("hub")))
            .or_else(|| Some(variable("XDG_CACHE_HOME")?.join("huggingface/hub")))
            .or_else(|| Some(env::home_dir()?.join(".cache/huggingface/hub")))?;
        Some(HubCache { root })
    }

    #[cfg(test)]
    pub fn at(root: PathBuf) -> HubCache {
        HubCache { root }
    }

    /// The directory of a revision's files; `None` if the cache does not have it.
    pub fn snapshot(&self, source: &HubSource) -> Result<Option<PathBuf>, SourceError> {
        let repo = self.root.join(format!("models--{}--{}", source.owner, source.repo));
        let commit = match read_ref(&repo.join("refs").join(&source.revision))? {
            Some(commit) => commit,
            None => source.revision.clone(),
        };
        let snapshot = repo.join("snapshots").join(commit);
        Ok(snapshot.is_dir().then_some(snapshot))
    }
}

/// The commit in a file of `refs`; `None` if there is no such file.
fn read_ref(path: &Path) -> Result<Option<String>, SourceError> {
    let failed = |source| SourceError::Io { path: path.into(), source };
    if !path.is_file() {
        return Ok(None);
    }
    let mut commit = String::new();
    File::open(path).and_then(|file| file.take(REF_BYTES).read_to_string(&mut commit)).map_err(failed)?;
    let commit = commit.trim();
    if commit.len() != 40 || !commit.bytes().all(|b| b.is_ascii_hexdigit()) {
        let message = format!("found {commit:?}, expected a commit of 40 hexadecimal digits");
        return Err(failed(std::io::Error::new(ErrorKind::InvalidData, message)));
    }
    Ok(Some(commit.into()))
}

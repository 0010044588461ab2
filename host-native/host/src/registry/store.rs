//! The store of downloaded models.
//!
//! ```text
//! ROOT/blobs/SHA256                    content
//! ROOT/blobs/KEY.partial, KEY.parts    a download in progress, KEY is a hash of its URL; which parts of which version it has
//! ROOT/models/NAME/manifest.json       source, revision, files with their digests
//! ROOT/models/NAME/FILE.gguf           a hard link to the content
//! ROOT/models/NAME/lock                locked by those who use the model
//! ```

use std::env;
use std::fs::{self, File, OpenOptions, TryLockError};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use super::SourceError;
use super::download::write_atomically;
use super::names::{FileName, Sha256Hex, is_name};
use crate::bytes::Bytes;

/// A stored model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Manifest {
    /// Name in the store.
    pub name: String,
    /// What was pulled.
    pub source: String,
    /// Commit of the repository, or ETag of the file.
    pub revision: Option<String>,
    /// Time of the download, in seconds since 1970.
    pub created: u64,
    /// The first is the one to load.
    pub files: Vec<StoredFile>,
}

/// A file of a stored model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct StoredFile {
    pub name: FileName,
    pub sha256: Sha256Hex,
    pub size: u64,
}

impl Manifest {
    pub fn size(&self) -> u64 {
        self.files.iter().map(|file| file.size).sum()
    }
}

/// Use of a stored model: `rm` and the quota spare it until this is dropped.
#[derive(Debug)]
pub struct ModelLock {
    _file: File,
}

/// The store.
#[derive(Debug, Clone)]
pub struct Store {
    root: PathBuf,
    /// Maximum bytes of all models.
    quota: Option<u64>,
}

impl Store {
    /// The store of `STARLING_HOME`, `XDG_CACHE_HOME/starling` or `~/.cache/starling`, with `STARLING_STORE_QUOTA`.
    ///
    /// # Errors
    /// If the quota is no size.
    pub fn from_env() -> Result<Option<Store>, SourceError> {
        let variable = |name| env::var_os(name).filter(|value| !value.is_empty());
        let root = variable("STARLING_HOME").map(PathBuf::from);
        let root = root.or_else(|| Some(PathBuf::from(variable("XDG_CACHE_HOME")?).join("starling")));
        let root = root.or_else(|| Some(env::home_dir()?.join(".cache/starling")));
        let quota = variable("STARLING_STORE_QUOTA").map(|text| Bytes::parse(&text.to_string_lossy())).transpose();
        let quota = quota.map_err(|why| SourceError::Quota { why })?.map(|bytes| bytes.0);
        Ok(root.map(|root| Store { root, quota }))
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    pub fn blobs(&self) -> PathBuf {
        self.root.join("blobs")
    }

    pub fn directory(&self, name: &str) -> PathBuf {
        self.root.join("models").join(name)
    }

    /// Makes the directories.
    ///
    /// # Errors
    /// If they cannot be made.
    pub fn create(&self) -> Result<(), SourceError> {
        for path in [self.blobs(), self.root.join("models")] {
            fs::create_dir_all(&path).map_err(|source| SourceError::Io { path, source })?;
        }
        Ok(())
    }

    /// All models, by name.
    pub fn list(&self) -> Vec<Manifest> {
        let entries = fs::read_dir(self.root.join("models")).into_iter().flatten().flatten();
        let mut all: Vec<Manifest> = entries.filter_map(|entry| read_manifest(&entry.path())).collect();
        all.sort_by(|a, b| a.name.cmp(&b.name));
        all
    }

    /// The model of a name or source.
    pub fn find(&self, text: &str) -> Option<Manifest> {
        if is_name(text)
            && let Some(manifest) = read_manifest(&self.directory(text))
        {
            return Some(manifest);
        }
        self.list().into_iter().find(|manifest| manifest.source == text)
    }

    /// The first file of a model, and its lock. Notes the use.
    ///
    /// # Errors
    /// If the lock cannot be opened.
    pub fn open(&self, manifest: &Manifest) -> Result<(PathBuf, ModelLock), SourceError> {
        let directory = self.directory(&manifest.name);
        let path = directory.join("lock");
        let io = |source| SourceError::Io { path: path.clone(), source };
        let file = OpenOptions::new().write(true).create(true).truncate(false).open(&path).map_err(io)?;
        file.lock_shared().map_err(io)?;
        let _ = file.set_modified(SystemTime::now());
        let first = manifest.files.first().map(|file| file.name.as_str()).unwrap_or_default();
        Ok((directory.join(first), ModelLock { _file: file }))
    }

    /// Time of the last use.
    pub fn last_used(&self, name: &str) -> SystemTime {
        let used = fs::metadata(self.directory(name).join("lock")).and_then(|m| m.modified());
        used.unwrap_or(SystemTime::UNIX_EPOCH)
    }

    /// The blob of a digest.
    pub fn blob(&self, sha256: &Sha256Hex) -> PathBuf {
        self.blobs().join(sha256.as_str())
    }

    /// Adds a model whose blobs are complete. Of the model that had its name before, files and blobs that nothing refers to any
    /// more are removed.
    ///
    /// # Errors
    /// If a file cannot be linked or written.
    pub fn add(&self, manifest: &Manifest) -> Result<(), SourceError> {
        let directory = self.directory(&manifest.name);
        let io = |source| SourceError::Io { path: directory.clone(), source };
        let old = read_manifest(&directory);
        fs::create_dir_all(&directory).map_err(io)?;
        for file in &manifest.files {
            let (blob, link) = (self.blob(&file.sha256), directory.join(file.name.as_str()));
            if !blob.is_file() {
                return Err(SourceError::Io { path: blob, source: std::io::ErrorKind::NotFound.into() });
            }
            let _ = fs::remove_file(&link);
            fs::hard_link(&blob, &link).or_else(|_| std::os::unix::fs::symlink(&blob, &link)).map_err(io)?;
        }
        let text = serde_json::to_vec_pretty(manifest).map_err(|e| io(e.into()))?;
        write_atomically(&directory.join("manifest.json"), &text).map_err(io)?;
        for file in old.iter().flat_map(|old| &old.files) {
            if manifest.files.iter().all(|new| new.name != file.name) {
                let _ = fs::remove_file(directory.join(file.name.as_str()));
            }
        }
        if let Some(old) = &old {
            self.remove_blobs(old);
        }
        Ok(())
    }

    /// Removes the blobs of a model that is gone or replaced, except those that another has. Returns the bytes freed.
    fn remove_blobs(&self, gone: &Manifest) -> u64 {
        let left = self.list();
        let is_used =
            |sha256: &Sha256Hex| left.iter().flat_map(|other| &other.files).any(|file| file.sha256 == *sha256);
        let unused = gone.files.iter().filter(|file| !is_used(&file.sha256));
        unused.filter(|file| fs::remove_file(self.blob(&file.sha256)).is_ok()).map(|file| file.size).sum()
    }

    /// Removes a model, and the blobs that no other has. Returns the bytes freed.
    ///
    /// # Errors
    /// If a process uses it, unless `force`.
    pub fn remove(&self, manifest: &Manifest, force: bool) -> Result<u64, SourceError> {
        let directory = self.directory(&manifest.name);
        let io = |source| SourceError::Io { path: directory.clone(), source };
        if let Ok(lock) = File::open(directory.join("lock"))
            && !force
        {
            match lock.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => return Err(SourceError::InUse { name: manifest.name.clone() }),
                Err(TryLockError::Error(source)) => return Err(io(source)),
            }
        }
        fs::remove_dir_all(&directory).map_err(io)?;
        Ok(self.remove_blobs(manifest))
    }

    /// Makes room for `needed` bytes under the quota: removes models that no process uses, the least recently used first.
    ///
    /// # Errors
    /// If that is not enough.
    pub fn make_room(&self, needed: u64) -> Result<(), SourceError> {
        let Some(quota) = self.quota else { return Ok(()) };
        let mut all = self.list();
        all.sort_by_key(|manifest| self.last_used(&manifest.name));
        let mut used: u64 = all.iter().map(Manifest::size).sum();
        for manifest in all {
            if used.saturating_add(needed) <= quota {
                break;
            }
            if self.remove(&manifest, false).is_ok() {
                used -= manifest.size();
            }
        }
        if used.saturating_add(needed) > quota { Err(SourceError::QuotaFull { needed, used, quota }) } else { Ok(()) }
    }

    /// Waits until this process alone downloads `key`; the lock is released when the file is dropped.
    ///
    /// # Errors
    /// If the lock file cannot be made.
    pub fn lock_download(&self, key: &str) -> Result<File, SourceError> {
        let path = self.blobs().join(format!("{key}.lock"));
        let io = |source| SourceError::Io { path: path.clone(), source };
        let file = OpenOptions::new().write(true).create(true).truncate(false).open(&path).map_err(io)?;
        file.lock().map_err(io)?;
        Ok(file)
    }

    /// Deletes what interrupted downloads left, except of the last week, locks that nobody holds, and blobs that no model has.
    pub fn sweep(&self) {
        let week = std::time::Duration::from_secs(7 * 86_400);
        let all = self.list();
        let is_used = |name: &str| all.iter().flat_map(|model| &model.files).any(|file| file.sha256.as_str() == name);
        for entry in fs::read_dir(self.blobs()).into_iter().flatten().flatten() {
            let path = entry.path();
            let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
            let age = entry.metadata().and_then(|m| m.modified()).ok().and_then(|at| at.elapsed().ok());
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            let is_unused_blob = Sha256Hex::parse(name).is_ok() && !is_used(name);
            let is_left = matches!(extension, "partial" | "parts" | "lock") || is_unused_blob;
            if is_left && age.is_some_and(|age| age > week) {
                let _ = fs::remove_file(path);
            }
        }
    }
}

fn read_manifest(directory: &Path) -> Option<Manifest> {
    let manifest: Manifest = serde_json::from_slice(&fs::read(directory.join("manifest.json")).ok()?).ok()?;
    // what the file says must be the directory that it is in
    let is_own = directory.file_name().is_some_and(|name| name == manifest.name.as_str());
    (is_own && is_name(&manifest.name) && !manifest.files.is_empty()).then_some(manifest)
}

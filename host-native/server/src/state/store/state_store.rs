//! The store: rows are put, deleted, read and listed.

use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, PoisonError};
use std::thread::{Builder, JoinHandle};
use std::time::Duration;

use starling_host::clock::unix_millis;
use tokio::sync::oneshot;

use super::files::StateDirectory;
use super::index::PageOf;
use super::record;
use super::writer::{self, Job, Opener, Shared};
use super::{Cipher, Kind, OpenError, RowId, RowInfo, StateError};

#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Maximum bytes of a tenant's answers.
    pub answers_quota: u64,
    /// Maximum bytes that wait to be written; tenants share them.
    pub max_queued: usize,
    /// Labels of a row, by which pages are found, from its kind and value.
    pub labels: fn(Kind, &[u8]) -> Vec<u64>,
}

impl Default for Options {
    fn default() -> Self {
        Options { answers_quota: 64 << 20, max_queued: 64 << 20, labels: |_, _| Vec::new() }
    }
}

/// Rows that outlive the process. Dropping it writes what waits.
pub struct StateStore {
    shared: Arc<Shared>,
    jobs: Option<Sender<Job>>,
    thread: Option<JoinHandle<()>>,
}

/// A write that may not have happened yet.
#[derive(Debug)]
pub struct Written(oneshot::Receiver<Result<(), StateError>>);

impl Written {
    /// Waits until the write is durable.
    ///
    /// # Errors
    /// If it has failed. Then a row that was there before is unchanged.
    pub async fn durable(self) -> Result<(), StateError> {
        self.0.await.unwrap_or(Err(StateError::Ended))
    }

    /// [`Written::durable`] outside of asynchronous code.
    ///
    /// # Errors
    /// If the write has failed.
    #[cfg(test)]
    pub fn wait(self) -> Result<(), StateError> {
        self.0.blocking_recv().unwrap_or(Err(StateError::Ended))
    }
}

impl StateStore {
    /// Opens the state of a directory, reads all rows and checks them.
    ///
    /// # Errors
    /// If another process has the directory, the file is damaged, of another kind, or of another key.
    pub fn open(path: &Path, cipher: Cipher, options: Options) -> Result<StateStore, OpenError> {
        let directory = StateDirectory::open(path)?;
        let file = directory.file();
        let opener: Opener = Box::new(move || Ok(Box::new(directory.rows()?)));
        StateStore::with_opener(&file, opener, cipher, options)
    }

    /// [`StateStore::open`] with another way to the file, whose `path` errors name.
    pub(super) fn with_opener(
        path: &Path,
        opener: Opener,
        cipher: Cipher,
        options: Options,
    ) -> Result<StateStore, OpenError> {
        let shared = Arc::new(Shared::open(path, opener, cipher, options)?);
        let (jobs, queue) = channel();
        let inner = Arc::clone(&shared);
        let thread = Builder::new().name("starling-state".into()).spawn(move || writer::run(&inner, &queue));
        let thread = thread.map_err(|source| OpenError::Io { path: path.to_owned(), source })?;
        Ok(StateStore { shared, jobs: Some(jobs), thread: Some(thread) })
    }

    /// Writes a row in place of what has its ID. Does not wait. Writes happen in the order of the calls.
    pub fn put(&self, id: RowId, value: Vec<u8>, created: u64, expires: u64) -> Written {
        let info = RowInfo { created, expires, n_bytes: value.len() };
        if !self.shared.queued.add(&id.tenant, value.len(), self.shared.options.max_queued) {
            self.shared.counters.failed.fetch_add(1, Ordering::Relaxed);
            let (done, written) = oneshot::channel();
            let _ = done.send(Err(StateError::Busy));
            return Written(written);
        }
        self.send(|done| Job::Put { id, info, value, done })
    }

    /// Deletes a row, if it exists. Does not wait.
    pub fn delete(&self, id: RowId) -> Written {
        self.send(|done| Job::Delete { id, done })
    }

    /// Deletes the rows that have expired. Does not wait.
    pub fn purge(&self) {
        let now = unix_millis();
        let expired = self.shared.index().expired(now);
        expired.into_iter().for_each(|id| drop(self.send(|done| Job::Expire { id, now, done })));
    }

    /// Reads a row, on a blocking thread.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub async fn get(self: &Arc<Self>, id: RowId) -> Result<Option<Vec<u8>>, StateError> {
        let store = Arc::clone(self);
        let read = tokio::task::spawn_blocking(move || store.read(&id));
        read.await.unwrap_or(Err(StateError::Ended))
    }

    /// Reads a row; waits for the file.
    ///
    /// # Errors
    /// If the file cannot be read.
    pub fn read(&self, id: &RowId) -> Result<Option<Vec<u8>>, StateError> {
        if self.info(id).is_none() {
            return Ok(None);
        }
        let read = |what: &dyn std::fmt::Display| StateError::Read(what.to_string().into());
        let database = self.shared.database.read().unwrap_or_else(PoisonError::into_inner);
        let database = database.as_ref().ok_or_else(|| read(&"the file is not open"))?;
        let row = self.shared.cipher.row_key(&record::name(id));
        let Some(sealed) = writer::read_row(database.database(), &row).map_err(|e| read(&e))? else { return Ok(None) };
        let bytes = self.shared.cipher.open(&row, &sealed).map_err(|_| read(&"a row is damaged"))?;
        let (_, _, at) = record::decode(&bytes).map_err(|_| read(&"a row is malformed"))?;
        Ok(Some(bytes[at..].to_vec()))
    }

    /// Times and length of a row, unless it has expired.
    pub fn info(&self, id: &RowId) -> Option<RowInfo> {
        self.shared.index().get(id).filter(|info| info.expires > unix_millis())
    }

    /// The rows of a kind that have not expired, of a tenant or of all, in the order of tenants and IDs.
    pub fn list(&self, kind: Kind, tenant: Option<&str>) -> Vec<(RowId, RowInfo)> {
        let now = unix_millis();
        let mut rows = self.shared.index().list(kind, tenant);
        rows.retain(|(_, info)| info.expires > now);
        rows
    }

    /// A page of a tenant's answers of a kind, in the order of their creation; reads no value. `None` if the row of
    /// [`PageOf::after`] does not exist.
    pub fn page(&self, kind: Kind, tenant: &str, page: &PageOf<'_>) -> Option<Vec<RowId>> {
        self.shared.index().page(kind, tenant, page, unix_millis())
    }

    /// Number of rows of a kind, and the bytes of their values.
    pub fn size(&self, kind: Kind) -> (usize, u64) {
        self.shared.index().size(kind)
    }

    /// Rows written and deleted, and writes that failed.
    pub fn counts(&self) -> (u64, u64) {
        let counters = &self.shared.counters;
        (counters.written.load(Ordering::Relaxed), counters.failed.load(Ordering::Relaxed))
    }

    /// Waits until what was put before is written. Returns whether it was within `limit`.
    pub fn flush_within(&self, limit: Duration) -> bool {
        let (done, flushed) = channel();
        let sent = self.jobs.as_ref().is_some_and(|jobs| jobs.send(Job::Flush(done)).is_ok());
        sent && flushed.recv_timeout(limit).is_ok()
    }

    fn send(&self, job: impl FnOnce(oneshot::Sender<Result<(), StateError>>) -> Job) -> Written {
        let (done, written) = oneshot::channel();
        // without a writer the receiver finds the sender dropped
        if let Some(jobs) = &self.jobs {
            let _ = jobs.send(job(done));
        }
        Written(written)
    }
}

impl std::fmt::Debug for StateStore {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StateStore").field("cipher", &self.shared.cipher).finish_non_exhaustive()
    }
}

impl Drop for StateStore {
    fn drop(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

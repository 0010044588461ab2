//! The file of rows, and the thread that writes it.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, Sender};
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock};
use std::time::{Duration, Instant};

use redb::{
    Builder, Database, DatabaseError, ReadableDatabase, ReadableTable, StorageBackend, StorageError, TableDefinition,
};
use tokio::sync::oneshot;

use super::cipher::{KeyId, RowKey};
use super::index::Index;
use super::overlay::Overlay;
use super::queued::Queued;
use super::record;
use super::state_store::Options;
use super::{Cipher, OpenError, RowId, RowInfo, StateError};

/// Sealed rows by the hash of their name.
const ROWS: TableDefinition<'_, &[u8], &[u8]> = TableDefinition::new("starling rows");
/// Format version and key of the file.
const META: TableDefinition<'_, &str, &[u8]> = TableDefinition::new("starling state");
const FORMAT: &str = "format";
const VERSION: u32 = 1;
/// Memory for pages of the file.
const CACHE_BYTES: usize = 8 << 20;
/// Maximum rows of a transaction.
const MAX_BATCH: usize = 256;
/// Time after a failed write before the file is opened again; writes fail meanwhile.
const REOPEN_WAIT: Duration = Duration::from_secs(1);

/// Makes another file of a file.
type Wrap = fn(Box<dyn StorageBackend>) -> std::io::Result<Box<dyn StorageBackend>>;

/// Opens the file.
pub type Opener = Box<dyn Fn() -> std::io::Result<Box<dyn StorageBackend>> + Send + Sync>;

type Done = oneshot::Sender<Result<(), StateError>>;

pub enum Job {
    Put {
        id: RowId,
        info: RowInfo,
        value: Vec<u8>,
        done: Done,
    },
    Delete {
        id: RowId,
        done: Done,
    },
    /// Delete a row if it expires before `now`: it may have been put again since it was found.
    Expire {
        id: RowId,
        now: u64,
        done: Done,
    },
    Flush(Sender<()>),
}

#[derive(Debug, Default)]
pub struct Counters {
    pub written: AtomicU64,
    pub failed: AtomicU64,
}

/// The open file.
pub enum Open {
    /// To read and write.
    Writable(Database),
    /// To read only, after a failed write, until the file is opened again: see [`Overlay`].
    Readable(Database),
}

impl Open {
    pub fn database(&self) -> &Database {
        match self {
            Open::Writable(database) | Open::Readable(database) => database,
        }
    }
}

/// What the store and its thread share.
pub struct Shared {
    /// `None` if the file can be neither written nor read.
    pub database: RwLock<Option<Open>>,
    index: Mutex<Index>,
    pub cipher: Cipher,
    pub options: Options,
    /// Bytes that wait to be written.
    pub queued: Queued,
    pub counters: Counters,
    path: PathBuf,
    opener: Opener,
}

impl Shared {
    pub fn open(path: &Path, opener: Opener, cipher: Cipher, options: Options) -> Result<Shared, OpenError> {
        let mut shared = Shared {
            database: RwLock::default(),
            index: Mutex::default(),
            cipher,
            options,
            queued: Queued::default(),
            counters: Counters::default(),
            path: path.to_owned(),
            opener,
        };
        let (database, index) = shared.open_file(Ok, true)?;
        shared.database = RwLock::new(Some(Open::Writable(database)));
        shared.index = Mutex::new(index);
        Ok(shared)
    }

    pub fn index(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens the file, or what `wrap` makes of it, and reads all rows.
    fn open_file(&self, wrap: Wrap, is_checked: bool) -> Result<(Database, Index), OpenError> {
        // of a damaged file redb promises errors; were it to panic, that is one, too
        let opened = catch_unwind(AssertUnwindSafe(|| self.try_open(wrap, is_checked)));
        opened.unwrap_or_else(|_| Err(self.damaged("its pages contradict each other")))
    }

    fn try_open(&self, wrap: Wrap, is_checked: bool) -> Result<(Database, Index), OpenError> {
        let io = |source| OpenError::Io { path: self.path.clone(), source };
        let backend = (self.opener)().and_then(wrap).map_err(io)?;
        let is_new = backend.len().map_err(io)? == 0;
        let mut builder = Builder::new();
        builder.set_cache_size(CACHE_BYTES).set_check_integrity_on_open(is_checked);
        let database = builder.create_with_backend(Backend(backend)).map_err(|e| self.open_error(e))?;
        if is_new {
            self.write_format(&database).map_err(|e| self.storage_error(e))?;
        }
        self.check_format(&database)?;
        let index = self.read_rows(&database)?;
        Ok((database, index))
    }

    fn write_format(&self, database: &Database) -> Result<(), redb::Error> {
        let mut transaction = database.begin_write()?;
        transaction.set_two_phase_commit(true);
        transaction.open_table(META)?.insert(FORMAT, &self.format()[..])?;
        transaction.open_table(ROWS)?;
        Ok(transaction.commit()?)
    }

    /// Format version, whether rows are encrypted, and the ID of the key.
    fn format(&self) -> Vec<u8> {
        let key = self.cipher.key_id();
        [&VERSION.to_le_bytes()[..], &[u8::from(key.is_some())], &key.unwrap_or_default()].concat()
    }

    fn check_format(&self, database: &Database) -> Result<(), OpenError> {
        let path = || self.path.clone();
        let read = || -> Result<Option<Vec<u8>>, redb::Error> {
            let table = match database.begin_read()?.open_table(META) {
                Err(redb::TableError::TableDoesNotExist(_)) => return Ok(None),
                table => table?,
            };
            Ok(table.get(FORMAT)?.map(|format| format.value().to_vec()))
        };
        let foreign = || OpenError::Foreign { path: path() };
        let format = read().map_err(|e| self.storage_error(e))?.ok_or_else(foreign)?;
        let (version, rest) = format.split_first_chunk().ok_or_else(foreign)?;
        let found = u32::from_le_bytes(*version);
        if found != VERSION {
            return Err(OpenError::Version { path: path(), found, expected: VERSION });
        }
        let (is_encrypted, file) = rest.split_first().ok_or_else(foreign)?;
        let file: KeyId = file.try_into().map_err(|_| foreign())?;
        match (*is_encrypted != 0, self.cipher.key_id()) {
            (false, None) => Ok(()),
            (true, Some(given)) if given == file => Ok(()),
            (true, Some(given)) => Err(OpenError::WrongKey { path: path(), file, given }),
            (true, None) => Err(OpenError::NoKey { path: path(), file }),
            (false, Some(_)) => Err(OpenError::NotEncrypted { path: path() }),
        }
    }

    /// The index of all rows. Each is checked.
    fn read_rows(&self, database: &Database) -> Result<Index, OpenError> {
        let mut index = Index::default();
        let storage = |e: redb::Error| self.storage_error(e);
        let transaction = database.begin_read().map_err(|e| storage(e.into()))?;
        let table = match transaction.open_table(ROWS) {
            Err(redb::TableError::TableDoesNotExist(_)) => return Err(self.damaged("it has no rows")),
            table => table.map_err(|e| storage(e.into()))?,
        };
        for (n, entry) in table.iter().map_err(|e| storage(e.into()))?.enumerate() {
            let (key, sealed) = entry.map_err(|e| storage(e.into()))?;
            let wrong = || self.damaged(&format!("row {n} is not what was written"));
            let row: RowKey = key.value().try_into().map_err(|_| wrong())?;
            let bytes = self.cipher.open(&row, sealed.value()).map_err(|_| wrong())?;
            let (id, info, at) = record::decode(&bytes).map_err(|_| wrong())?;
            if self.cipher.row_key(&record::name(&id)) != row {
                return Err(wrong());
            }
            let labels = (self.options.labels)(id.kind, &bytes[at..]);
            index.insert(id.clone(), info);
            index.label(id, labels);
        }
        Ok(index)
    }

    fn damaged(&self, what: &str) -> OpenError {
        OpenError::Damaged { path: self.path.clone(), what: what.into() }
    }

    fn open_error(&self, error: DatabaseError) -> OpenError {
        match error {
            // it does not begin as the files of redb do
            DatabaseError::Storage(StorageError::Io(e)) if e.kind() == std::io::ErrorKind::InvalidData => {
                OpenError::Foreign { path: self.path.clone() }
            }
            DatabaseError::UpgradeRequired(_) => OpenError::Foreign { path: self.path.clone() },
            error => self.storage_error(error.into()),
        }
    }

    fn storage_error(&self, error: redb::Error) -> OpenError {
        match error {
            redb::Error::Io(source) if source.kind() != std::io::ErrorKind::UnexpectedEof => {
                OpenError::Io { path: self.path.clone(), source }
            }
            error => self.damaged(&error.to_string()),
        }
    }
}

/// The sealed row of a key.
pub fn read_row(database: &Database, row: &RowKey) -> Result<Option<Vec<u8>>, redb::Error> {
    let table = database.begin_read()?.open_table(ROWS)?;
    Ok(table.get(&row[..])?.map(|sealed| sealed.value().to_vec()))
}

/// Ends when all senders are gone and the queue is empty.
pub fn run(shared: &Shared, jobs: &Receiver<Job>) {
    let mut failed_at: Option<(Instant, StateError)> = None;
    while let Ok(first) = jobs.recv() {
        let mut batch = vec![first];
        batch.extend(jobs.try_iter().take(MAX_BATCH - 1));
        let recent = failed_at.as_ref().filter(|(at, _)| at.elapsed() < REOPEN_WAIT).map(|(_, e)| e.clone());
        let result = match recent {
            Some(error) => Err(error),
            None => write(shared, &batch).inspect_err(|error| failed_at = Some((Instant::now(), error.clone()))),
        };
        if result.is_ok() {
            failed_at = None;
        }
        finish(shared, batch, &result);
        if result.is_ok() {
            remove_oldest(shared);
        }
    }
}

/// Tells those who wait.
fn finish(shared: &Shared, batch: Vec<Job>, result: &Result<(), StateError>) {
    for job in batch {
        let done = match job {
            Job::Put { id, value, done, .. } => {
                shared.queued.remove(&id.tenant, value.len());
                done
            }
            Job::Delete { done, .. } | Job::Expire { done, .. } => done,
            Job::Flush(done) => {
                let _ = done.send(());
                continue;
            }
        };
        let counter = if result.is_ok() { &shared.counters.written } else { &shared.counters.failed };
        counter.fetch_add(1, Ordering::Relaxed);
        // nobody may wait
        let _ = done.send(result.clone());
    }
}

/// Deletes the oldest answers of tenants that have too many.
fn remove_oldest(shared: &Shared) {
    let over = shared.index().over_quota(shared.options.answers_quota);
    if over.is_empty() {
        return;
    }
    let delete = |id| Job::Delete { id, done: oneshot::channel().0 };
    let batch: Vec<Job> = over.into_iter().map(delete).collect();
    if let Err(e) = write(shared, &batch) {
        tracing::error!("{e}");
    }
}

/// Writes all rows of a batch in one transaction, or none. After a failure the file is opened anew: only it knows which rows it
/// has.
fn write(shared: &Shared, batch: &[Job]) -> Result<(), StateError> {
    let failed = |e: &dyn std::fmt::Display| {
        tracing::error!("state-dir: {} cannot be written: {e}", shared.path.display());
        StateError::Write(e.to_string().into())
    };
    let is_writable =
        matches!(&*shared.database.read().unwrap_or_else(PoisonError::into_inner), Some(Open::Writable(_)));
    if !is_writable {
        let opened = shared.open_file(Ok, false).map_err(|e| failed(&e))?;
        set_open(shared, Some((Open::Writable(opened.0), opened.1)));
    }
    if batch.iter().all(|job| matches!(job, Job::Flush(_))) {
        return Ok(());
    }
    let committed = {
        let database = shared.database.read().unwrap_or_else(PoisonError::into_inner);
        database.as_ref().map_or(Err(redb::Error::DatabaseClosed), |open| commit(shared, open.database(), batch))
    };
    if let Err(e) = committed {
        set_open(shared, None);
        read_on(shared);
        return Err(failed(&e));
    }
    Ok(())
}

/// Replaces the open file and the index of its rows; `None` closes it, and the index stays. Waits for those who read.
fn set_open(shared: &Shared, opened: Option<(Open, Index)>) {
    let mut open = shared.database.write().unwrap_or_else(PoisonError::into_inner);
    drop(open.take());
    if let Some((database, index)) = opened {
        *shared.index() = index;
        *open = Some(database);
    }
}

/// Opens the file to read, after a failed write: redb reads nothing more from a file that it could not write.
fn read_on(shared: &Shared) {
    match shared.open_file(|file| Ok(Box::new(Overlay::new(file)?)), false) {
        Ok((database, index)) => set_open(shared, Some((Open::Readable(database), index))),
        Err(e) => tracing::error!("state-dir: {e}"),
    }
}

fn commit(shared: &Shared, database: &Database, batch: &[Job]) -> Result<(), redb::Error> {
    let mut transaction = database.begin_write()?;
    // in one phase, a file whose last commit is damaged would open as it was before
    transaction.set_two_phase_commit(true);
    let mut changes: Vec<(&RowId, Option<RowInfo>)> = Vec::with_capacity(batch.len());
    let mut labels = Vec::new();
    {
        let mut table = transaction.open_table(ROWS)?;
        let key = |id: &RowId| shared.cipher.row_key(&record::name(id));
        for job in batch {
            let (id, info) = match job {
                Job::Put { id, info, value, .. } => {
                    let row = key(id);
                    let sealed = shared.cipher.seal(&row, &record::encode(id, info, value))?;
                    table.insert(&row[..], &sealed[..])?;
                    labels.push((id, (shared.options.labels)(id.kind, value)));
                    (id, Some(*info))
                }
                Job::Expire { id, now, .. } if !has_expired(shared, &changes, id, *now) => continue,
                Job::Delete { id, .. } | Job::Expire { id, .. } => {
                    table.remove(&key(id)[..])?;
                    (id, None)
                }
                Job::Flush(_) => continue,
            };
            changes.push((id, info));
        }
    }
    transaction.commit()?;
    let mut index = shared.index();
    for (id, info) in changes {
        match info {
            Some(info) => index.insert(id.clone(), info),
            None => index.remove(id),
        }
    }
    for (id, labels) in labels {
        index.label(id.clone(), labels);
    }
    Ok(())
}

/// Whether a row expires before `now`, after the changes of this transaction.
fn has_expired(shared: &Shared, changes: &[(&RowId, Option<RowInfo>)], id: &RowId, now: u64) -> bool {
    let changed = changes.iter().rev().find(|(other, _)| *other == id).map(|(_, info)| *info);
    changed.unwrap_or_else(|| shared.index().get(id)).is_some_and(|info| info.expires <= now)
}

/// A backend of any kind.
#[derive(Debug)]
struct Backend(Box<dyn StorageBackend>);

impl StorageBackend for Backend {
    fn len(&self) -> std::io::Result<u64> {
        self.0.len()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> std::io::Result<()> {
        self.0.read(offset, out)
    }

    fn set_len(&self, len: u64) -> std::io::Result<()> {
        self.0.set_len(len)
    }

    fn sync_data(&self) -> std::io::Result<()> {
        self.0.sync_data()
    }

    fn write(&self, offset: u64, data: &[u8]) -> std::io::Result<()> {
        self.0.write(offset, data)
    }

    fn close(&self) -> std::io::Result<()> {
        self.0.close()
    }
}

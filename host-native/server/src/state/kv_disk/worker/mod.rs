//! What the threads share.

pub(super) mod reader;
pub(super) mod scanner;
pub(super) mod writer;

use std::collections::HashSet;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use super::page_file::PageFormat;
use super::stats::Counters;
use super::table::Table;
use super::{Io, Options, PageKey, Stats};
use reader::ReadQueue;

pub(super) struct Shared {
    pub(super) io: Box<dyn Io>,
    pub(super) format: PageFormat,
    pub(super) options: Options,
    pub(super) index: Mutex<Index>,
    /// Bytes of the pages that wait to be written.
    pub(super) queued_bytes: AtomicUsize,
    pub(super) reads: ReadQueue,
    pub(super) counters: Counters,
    pub(super) is_scanned: AtomicBool,
    pub(super) is_closed: AtomicBool,
}

/// Never locked during I/O.
pub(super) struct Index {
    pub(super) table: Table,
    /// Pages that wait to be written.
    pub(super) queued: HashSet<PageKey>,
}

impl Shared {
    pub(super) fn new(io: Box<dyn Io>, format: PageFormat, options: Options) -> Shared {
        Shared {
            io,
            format,
            index: Mutex::new(Index { table: Table::new(options.holder_of), queued: HashSet::new() }),
            options,
            queued_bytes: AtomicUsize::new(0),
            reads: ReadQueue::default(),
            counters: Counters::default(),
            is_scanned: AtomicBool::new(false),
            is_closed: AtomicBool::new(false),
        }
    }

    pub(super) fn stats(&self) -> Stats {
        let index = lock(&self.index);
        let counters = &self.counters;
        Stats {
            pages: index.table.len() as u64,
            bytes: index.table.bytes(),
            queued_bytes: self.queued_bytes.load(Ordering::Relaxed) as u64,
            is_scanned: self.is_scanned.load(Ordering::Relaxed),
            hits: counters.hits.get(),
            misses: counters.misses.get(),
            written: counters.written.get(),
            dropped: counters.dropped.get(),
            durable_failed: counters.durable_failed.get(),
            evicted: counters.evicted.get(),
            io_errors: counters.io_errors.get(),
            refused: std::array::from_fn(|reason| counters.refused[reason].get()),
        }
    }

    /// Counts an error, unless the file is just gone.
    fn count_error(&self, result: io::Result<()>) {
        if result.is_err_and(|error| error.kind() != io::ErrorKind::NotFound) {
            self.counters.io_errors.add(1);
        }
    }
}

/// Locks although a thread has panicked: no change to what is shared is left half done.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Nanoseconds since 1970.
fn now() -> u64 {
    let elapsed = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(elapsed.as_nanos()).unwrap_or(u64::MAX)
}

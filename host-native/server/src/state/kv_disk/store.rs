//! The handle of the callers.

use std::hash::{BuildHasher, RandomState};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::page_file::{Checksum, MAX_PAGE, PageFormat};
use super::table::HolderOf;
use super::worker::reader::ReadRequest;
use super::worker::writer::{Job, Put};
use super::worker::{Shared, lock, reader, scanner, writer};
use super::{DirectoryIo, Io, Namespace, PageInfo, PageKey, Stats};

#[derive(Debug, Clone)]
pub struct Options {
    /// Maximum bytes of the files.
    pub quota: u64,
    /// Maximum bytes of a page, at most [`MAX_PAGE`].
    pub max_page: usize,
    /// Maximum bytes of the pages that wait to be written, at least `max_page`.
    pub max_queued: usize,
    /// Threads that read.
    pub readers: usize,
    /// Key of the checksums (BLAKE3), for directories that others can write. Without it they are CRC-32C.
    pub key: Option<[u8; 32]>,
    pub numerics_version: u32,
    /// Interval of the scans that find what other processes have written and removed. A scan
    /// of 100,000 files takes 0.4 s.
    pub rescan: Duration,
    /// Whom a page is for: each has a share of the quota.
    pub holder_of: HolderOf,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            quota: 16 << 30,
            max_page: 4 << 20,
            max_queued: 64 << 20,
            readers: 2,
            key: None,
            numerics_version: 0,
            rescan: Duration::from_secs(600),
            holder_of: |_| 0,
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("KV directory {}: {source}", path.display())]
    Directory { path: PathBuf, source: io::Error },
    #[error(
        "KV directory {}: owner {owner}, mode {mode:04o}, expected this user and no write permission for others; \
         `kv-disk-key-file` makes it usable", path.display()
    )]
    NotPrivate { path: PathBuf, owner: u32, mode: u32 },
    #[error("KV page limit {found} bytes, expected 1 to {MAX_PAGE}")]
    MaxPage { found: usize },
    #[error("KV disk threads: {source}")]
    Thread { source: io::Error },
}

/// KV pages in a directory. Dropping it writes the queued pages and answers the outstanding reads with `None`.
pub struct KvDisk {
    shared: Arc<Shared>,
    jobs: Option<Sender<Job>>,
    stop_scanner: Option<Sender<()>>,
    threads: Vec<JoinHandle<()>>,
}

impl KvDisk {
    /// Opens or makes a directory. The pages in it are found by a scan in the background.
    ///
    /// # Errors
    /// If the directory cannot be used, an option is out of range, or a thread cannot be started.
    pub fn open(directory: &Path, options: Options) -> Result<KvDisk, Error> {
        let io = DirectoryIo::open(directory, options.key.is_some())?;
        KvDisk::with_io(options, Box::new(io))
    }

    /// # Errors
    /// As [`open`](KvDisk::open).
    pub fn with_io(options: Options, io: Box<dyn Io>) -> Result<KvDisk, Error> {
        if options.max_page == 0 || options.max_page > MAX_PAGE {
            return Err(Error::MaxPage { found: options.max_page });
        }
        let format = PageFormat {
            checksum: Checksum::new(options.key.as_ref()),
            numerics_version: options.numerics_version,
            max_page: options.max_page,
        };
        let n_readers = options.readers.max(1);
        let shared = Arc::new(Shared::new(io, format, options));
        let (jobs, queued_jobs) = channel();
        let (stop_scanner, stop) = channel();
        // dropped on an error below, which ends the threads that have started
        let mut disk = KvDisk { shared, jobs: Some(jobs.clone()), stop_scanner: Some(stop_scanner), threads: vec![] };
        disk.spawn("kv-disk-write", move |shared| writer::run(shared, &queued_jobs, process_id()))?;
        for _ in 0..n_readers {
            disk.spawn("kv-disk-read", reader::run)?;
        }
        disk.spawn("kv-disk-scan", move |shared| scanner::run(shared, &jobs, &stop, process_id()))?;
        Ok(disk)
    }

    fn spawn(&mut self, name: &str, run: impl FnOnce(&Shared) + Send + 'static) -> Result<(), Error> {
        let shared = self.shared.clone();
        let thread = thread::Builder::new().name(name.to_owned()).spawn(move || run(&shared));
        self.threads.push(thread.map_err(|source| Error::Thread { source })?);
        Ok(())
    }

    /// Whether the page is known to be on disk.
    pub fn contains(&self, key: &PageKey) -> bool {
        lock(&self.shared.index).table.contains(key)
    }

    /// Number of leading keys whose pages are known to be on disk.
    pub fn longest_prefix(&self, keys: &[PageKey]) -> usize {
        let index = lock(&self.shared.index);
        keys.iter().take_while(|key| index.table.contains(key)).count()
    }

    /// Queues a page for writing. A key that is known or queued is not written again, unless `durable`.
    /// Returns false, and counts the page as dropped, if it is empty, too large, or the queue is full.
    ///
    /// A durable page is synced with its directory; `flush` waits for it, `Stats::durable_failed` counts failures.
    pub fn put(&self, key: PageKey, page: impl AsRef<[u8]> + Send + 'static, info: PageInfo, durable: bool) -> bool {
        let (shared, len) = (&*self.shared, page.as_ref().len());
        let file_len = (len + super::HEADER_LEN) as u64;
        if len == 0 || len > shared.options.max_page || file_len > shared.options.quota {
            shared.counters.dropped.add(1);
            return false;
        }
        let mut index = lock(&shared.index);
        if !durable && (index.table.contains(&key) || index.queued.contains(&key)) {
            return true;
        }
        let max_before = shared.options.max_queued.checked_sub(len);
        let add = |queued: usize| max_before.filter(|max| queued <= *max).map(|_| queued + len);
        if shared.queued_bytes.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).is_err() {
            shared.counters.dropped.add(1);
            return false;
        }
        index.queued.insert(key);
        // under the lock, so that the queue has the order of the changes to the index
        self.send(Job::Put(Put { key, page: Box::new(page), info, durable }));
        true
    }

    /// Reads pages on other threads and calls `reply` on one of them, with a page or `None` for each key. Files that
    /// are not valid pages of the key and namespace are deleted. The caller limits the number of keys: the pages of a
    /// request are in memory at the same time.
    pub fn read(
        &self,
        keys: Vec<PageKey>,
        namespace: Namespace,
        reply: impl FnOnce(Vec<Option<Vec<u8>>>) + Send + 'static,
    ) {
        self.shared.reads.push(Arc::new(ReadRequest::new(keys, namespace, Box::new(reply))));
    }

    /// Removes a page. Its file is deleted in the background, after the writes queued before.
    pub fn remove(&self, key: &PageKey) {
        let mut index = lock(&self.shared.index);
        index.table.forget(key);
        index.queued.remove(key);
        self.send(Job::Remove(*key));
    }

    /// Removes all pages of the directory, also those of other processes. Files are deleted in the background.
    pub fn clear(&self) {
        self.clear_if(|_| true);
    }

    /// Removes all pages of a namespace whose keys are of [`PageKey::new`], likewise.
    pub fn clear_namespace(&self, namespace: &Namespace) {
        let tag = namespace.tag();
        self.clear_if(move |key| key.has_tag(&tag));
    }

    /// Removes all pages for whose keys `is_cleared` holds, likewise.
    pub fn clear_if(&self, is_cleared: impl Fn(&PageKey) -> bool + Send + 'static) {
        let mut index = lock(&self.shared.index);
        index.table.forget_if(&is_cleared);
        index.queued.retain(|key| !is_cleared(key));
        self.send(Job::Clear(Box::new(is_cleared)));
    }

    /// Notes a use of pages, of the last key first, so that the pages of a prefix are evicted from its end. Sets no
    /// modification time.
    pub fn touch(&self, keys: &[PageKey]) {
        let mut index = lock(&self.shared.index);
        keys.iter().rev().for_each(|key| index.table.touch(key));
    }

    /// Number and bytes of the known pages of a namespace whose keys are of [`PageKey::new`].
    pub fn usage(&self, namespace: &Namespace) -> (u64, u64) {
        let tag = namespace.tag();
        lock(&self.shared.index).table.usage(|key| key.has_tag(&tag))
    }

    /// Bytes that can be queued for writing now.
    pub fn room(&self) -> usize {
        self.shared.options.max_queued.saturating_sub(self.shared.queued_bytes.load(Ordering::Relaxed))
    }

    /// Waits until everything queued before has been written and removed.
    #[cfg(test)]
    pub fn flush(&self) {
        self.flush_within(Duration::MAX);
    }

    /// Waits until everything queued before has been written and removed, at most for `limit`. Returns whether it was.
    pub fn flush_within(&self, limit: Duration) -> bool {
        let (done, is_done) = channel();
        self.send(Job::Flush(done));
        // disconnected: the writer has ended, and nothing is queued
        is_done.recv_timeout(limit) != Err(RecvTimeoutError::Timeout)
    }

    pub fn stats(&self) -> Stats {
        self.shared.stats()
    }

    /// Moving average of reads in bytes per second, from the first key taken by a reader to the reply.
    /// `None` before the first.
    pub fn measured_rate(&self) -> Option<f64> {
        self.shared.counters.rate.get()
    }

    fn send(&self, job: Job) {
        if let Some(jobs) = &self.jobs {
            // the writer ends after this sender only
            let _ = jobs.send(job);
        }
    }
}

impl Drop for KvDisk {
    fn drop(&mut self) {
        self.shared.reads.close();
        self.shared.is_closed.store(true, Ordering::Relaxed);
        self.stop_scanner = None;
        self.jobs = None;
        for thread in self.threads.drain(..) {
            // the last owner may be the reply of a read
            if thread.thread().id() != thread::current().id() {
                let _ = thread.join();
            }
        }
    }
}

/// Random number of this process, for the names of temporary files.
fn process_id() -> u64 {
    static ID: OnceLock<u64> = OnceLock::new();
    *ID.get_or_init(|| RandomState::new().hash_one(0))
}

//! KV pages between engines and disk: restores before a prompt is submitted, and writes pages after steps.
//!
//! ```text
//! queue ─► WorkerTier::begin ─► KvDisk::read ─► Inbox ─► WorkerTier::import ─► Engine::import_page ─► queue: may be taken
//! Engine::take_new_page ─► WorkerTier::save ─► KvDisk::put
//! ```
//!
//! A request whose pages are read stays in the queue, so cancellation, time limits and shutdown treat it as any other; only
//! [`WorkerTier::is_restoring`] keeps the worker from taking it. Pages are read on the store's threads and imported between
//! steps, a few at a time while streams run. A page that is missing or refused ends the restore: the engine computes the rest.

use std::collections::BTreeMap;
use std::mem;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use starling::engine::Engine;
use starling::kernels::NUMERICS_VERSION;
use starling::kernels::attention::PAGE;
use starling::kv::{NewPage, PageError};

use super::super::kv_disk::{self, KvDisk, MAX_PAGE, Namespace, PageInfo, PageKey};
use super::super::queue::{Job, Queue, SequenceGroup};

/// Maximum bytes and pages of one read. A worker has at most [`MAX_READS`] of them in memory.
const READ_BYTES: usize = 8 << 20;
const READ_PAGES: usize = 16;
const MAX_READS: usize = 4;
/// Time for imports or exports between steps: this share of the last step while requests run, and between limits.
const STEP_SHARE: u32 = 16;
const BUSY_TIME: (Duration, Duration) = (Duration::from_micros(500), Duration::from_millis(20));
const IDLE_TIME: Duration = Duration::from_millis(20);
/// One of so many restores that seem slower than prefill is done nevertheless, so that the rate of reads stays measured.
const PROBE_INTERVAL: u32 = 16;
/// Wait for room in the store's queue when a worker ends.
const ROOM_WAIT: Duration = Duration::from_millis(2);

/// The store of all models.
pub struct DiskTier {
    pub store: KvDisk,
    /// Pages read that an engine refused.
    refused: AtomicU64,
}

impl DiskTier {
    /// With a key, others may write the directory: files that were not made with the key are refused.
    ///
    /// # Errors
    /// If the directory cannot be used.
    pub fn open(directory: &Path, quota: u64, key: Option<&[u8]>) -> Result<DiskTier, kv_disk::Error> {
        let options = kv_disk::Options {
            quota,
            max_page: MAX_PAGE,
            key: key.map(|key| blake3::derive_key("starling 2026-11-28 kv-disk-key-file", key)),
            numerics_version: NUMERICS_VERSION,
            ..Default::default()
        };
        Ok(DiskTier { store: KvDisk::open(directory, options)?, refused: AtomicU64::new(0) })
    }

    pub fn refused(&self) -> u64 {
        self.refused.load(Ordering::Relaxed)
    }
}

/// Moving average of a rate: each measurement before has 7/8 of the weight of the next.
#[derive(Debug, Default)]
struct Rate {
    n: f64,
    seconds: f64,
}

impl Rate {
    fn add(&mut self, n: usize, time: Duration) {
        self.n = self.n * 0.875 + n as f64;
        self.seconds = self.seconds * 0.875 + time.as_secs_f64();
    }

    /// Seconds for `n` units; `None` before the first measurement.
    fn seconds(&self, n: usize) -> Option<f64> {
        (self.n > 0.0).then(|| n as f64 * self.seconds / self.n)
    }
}

/// Pages that were read: their restore, and the index of the first among its keys.
type Arrived = (u64, usize, Vec<Option<Vec<u8>>>);

/// A request whose pages are read.
struct Restore {
    id: u64,
    group: Weak<SequenceGroup>,
    keys: Vec<PageKey>,
    /// Keys whose read was requested.
    n_requested: usize,
    n_imported: usize,
    /// Pages that have arrived, by the index of their key. Reads may end in another order than they were requested.
    pages: BTreeMap<usize, Option<Vec<u8>>>,
    /// Reads requested and not yet arrived.
    n_reads: usize,
}

impl Restore {
    fn is_done(&self) -> bool {
        self.n_imported == self.keys.len() || self.group.strong_count() == 0
    }
}

/// Whether [`WorkerTier::save`] has saved all new pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Saved {
    All,
    /// The time was over.
    Some,
    /// The store's queue was full.
    NoRoom,
}

/// A worker's side of the pages on disk.
pub struct WorkerTier {
    tier: Arc<DiskTier>,
    queue: Arc<Queue>,
    namespace: Namespace,
    page_bytes: usize,
    restores: Vec<Restore>,
    next_id: u64,
    inbox: Arc<Mutex<Vec<Arrived>>>,
    /// A new page that found no room in the store's queue.
    unsaved: Option<NewPage>,
    /// Prompt tokens a second.
    prefill: Rate,
    /// Imported bytes a second.
    imports: Rate,
    last_step: Duration,
    n_declined: u32,
}

impl WorkerTier {
    /// `None` if a page of the model is too large for the store.
    pub fn new(tier: Arc<DiskTier>, queue: Arc<Queue>, engine: &mut Engine) -> Option<WorkerTier> {
        let page_bytes = engine.exported_page_bytes();
        if page_bytes > MAX_PAGE {
            tracing::warn!(
                "kv-disk: pages of this model have {page_bytes} bytes, expected at most {MAX_PAGE}: not kept on disk"
            );
            return None;
        }
        engine.track_new_pages(true);
        Some(WorkerTier {
            tier,
            queue,
            namespace: Namespace(engine.page_namespace()),
            page_bytes,
            restores: Vec::new(),
            next_id: 0,
            inbox: Arc::default(),
            unsaved: None,
            prefill: Rate::default(),
            imports: Rate::default(),
            last_step: Duration::ZERO,
            n_declined: 0,
        })
    }

    /// Requests that wait for pages. They occupy sequences of the engine, since they are to run next.
    pub fn n_restoring(&self) -> usize {
        self.restores.len()
    }

    pub fn is_restoring(&self, group: &Arc<SequenceGroup>) -> bool {
        self.restores.iter().any(|restore| std::ptr::eq(restore.group.as_ptr(), Arc::as_ptr(group)))
    }

    /// Starts to read the pages of a request, if some are on disk and reading them is faster than computing them. Returns
    /// whether it did. A request is looked up once.
    pub fn begin(&mut self, engine: &Engine, job: &mut Job) -> bool {
        let request = job.group.first();
        if mem::replace(&mut job.is_looked_up, true) || job.sequence != 0 || request.prompt_logprobs {
            return false;
        }
        let tokens = [&request.tokens[..], &job.progress.tokens].concat();
        let keys = engine.page_keys(&tokens, request.cache_salt);
        let n_cached = engine.n_cached_pages(&keys);
        let mut keys = self.disk_keys(&keys);
        let store = &self.tier.store;
        store.touch(&keys[..n_cached]);
        keys.drain(..n_cached);
        // before the directory is scanned any page may be there
        let n_on_disk = if store.stats().is_scanned { store.longest_prefix(&keys) } else { keys.len() };
        keys.truncate(n_on_disk.min(engine.kv_stats().n_pages));
        if keys.is_empty() || !self.is_faster(keys.len()) {
            return false;
        }
        self.next_id += 1;
        self.restores.push(Restore {
            id: self.next_id,
            group: Arc::downgrade(&job.group),
            keys,
            n_requested: 0,
            n_imported: 0,
            pages: BTreeMap::new(),
            n_reads: 0,
        });
        self.request_reads();
        true
    }

    fn disk_keys(&self, keys: &[starling::kv::PageKey]) -> Vec<PageKey> {
        keys.iter().map(|key| PageKey::new(&key.0, &self.namespace)).collect()
    }

    /// Whether reading and importing `n` pages, after those that others wait for, is expected to take less time than
    /// computing them. True until all rates are known.
    fn is_faster(&mut self, n: usize) -> bool {
        let before: usize = self.restores.iter().map(|restore| restore.keys.len() - restore.n_imported).sum();
        let bytes = (before + n) * self.page_bytes;
        let read = self.tier.store.measured_rate().map(|rate| bytes as f64 / rate);
        let (Some(read), Some(import), Some(prefill)) =
            (read, self.imports.seconds(bytes), self.prefill.seconds(n * PAGE))
        else {
            return true;
        };
        if read + import <= prefill {
            return true;
        }
        self.n_declined = (self.n_declined + 1) % PROBE_INTERVAL;
        self.n_declined == 0
    }

    /// Requests the next reads of the oldest restores.
    fn request_reads(&mut self) {
        let n_pages = (READ_BYTES / self.page_bytes).clamp(1, READ_PAGES);
        let mut free = MAX_READS;
        for restore in &mut self.restores {
            // pages that have arrived occupy as much memory as those being read
            free = free.saturating_sub(restore.n_reads + restore.pages.len().div_ceil(n_pages));
            while free > 0 && restore.n_requested < restore.keys.len() {
                let end = (restore.n_requested + n_pages).min(restore.keys.len());
                let first = restore.n_requested;
                let keys = restore.keys[first..end].to_vec();
                let (id, inbox, queue) = (restore.id, Arc::clone(&self.inbox), Arc::clone(&self.queue));
                self.tier.store.read(keys, self.namespace, move |pages| {
                    inbox.lock().unwrap_or_else(PoisonError::into_inner).push((id, first, pages));
                    queue.notify();
                });
                (restore.n_requested, restore.n_reads, free) = (end, restore.n_reads + 1, free - 1);
            }
        }
    }

    /// Imports pages that have arrived, for a part of a step's time. Returns whether there were some.
    pub fn import(&mut self, engine: &mut Engine) -> bool {
        if self.restores.is_empty() {
            return false;
        }
        for (id, first, pages) in mem::take(&mut *self.inbox.lock().unwrap_or_else(PoisonError::into_inner)) {
            if let Some(restore) = self.restores.iter_mut().find(|restore| restore.id == id) {
                restore.n_reads -= 1;
                restore.pages.extend((first..).zip(pages));
            }
        }
        let (begin, limit) = (Instant::now(), self.time_limit(engine));
        let (mut n_bytes, mut worked) = (0, false);
        for restore in &mut self.restores {
            while (n_bytes == 0 || begin.elapsed() < limit) && !restore.is_done() {
                let Some(page) = restore.pages.remove(&restore.n_imported) else { break };
                worked = true;
                let Some(page) = page else {
                    restore.keys.truncate(restore.n_imported);
                    break;
                };
                n_bytes += page.len();
                match engine.import_page(&page) {
                    Ok(()) => restore.n_imported += 1,
                    Err(error) => {
                        // the engine evicted the parent, or is full
                        if !matches!(error, PageError::Parent(_) | PageError::NoCapacity) {
                            tracing::warn!("kv-disk: {error}");
                            self.tier.refused.fetch_add(1, Ordering::Relaxed);
                            self.tier.store.remove(&restore.keys[restore.n_imported]);
                        }
                        restore.keys.truncate(restore.n_imported);
                    }
                }
            }
        }
        if n_bytes > 0 {
            self.imports.add(n_bytes, begin.elapsed());
        }
        let n = self.restores.len();
        self.restores.retain(|restore| !restore.is_done());
        self.request_reads();
        worked || self.restores.len() < n
    }

    /// Hands new pages to the store until `limit` is over.
    pub fn save(&mut self, engine: &mut Engine, limit: Duration) -> Saved {
        engine.publish_running();
        let (begin, store) = (Instant::now(), &self.tier.store);
        while let Some(page) = self.unsaved.take().or_else(|| engine.take_new_page()) {
            if store.room() < self.page_bytes {
                self.unsaved = Some(page);
                return Saved::NoRoom;
            }
            let key = PageKey::new(&page.key.0, &self.namespace);
            if !store.contains(&key)
                && let Some(bytes) = engine.export_page(&page.key)
            {
                let n_tokens = u32::try_from(page.n_tokens).unwrap_or(u32::MAX);
                store.put(key, bytes, PageInfo { namespace: self.namespace, n_tokens }, false);
            }
            if begin.elapsed() >= limit {
                return Saved::Some;
            }
        }
        Saved::All
    }

    /// Hands new pages to the store after a step, for a part of the step's time.
    pub fn save_some(&mut self, engine: &mut Engine) -> Saved {
        let limit = self.time_limit(engine);
        self.save(engine, limit)
    }

    /// Hands all new pages to the store; waits for room up to `limit`.
    pub fn save_all(&mut self, engine: &mut Engine, limit: Duration) {
        let end = Instant::now() + limit;
        while self.save(engine, end.saturating_duration_since(Instant::now())) == Saved::NoRoom && Instant::now() < end
        {
            thread::sleep(ROOM_WAIT);
        }
    }

    fn time_limit(&self, engine: &Engine) -> Duration {
        if engine.is_idle() { IDLE_TIME } else { (self.last_step / STEP_SHARE).clamp(BUSY_TIME.0, BUSY_TIME.1) }
    }

    /// Notes a step that computed `n_prompt` prompt tokens.
    pub fn record_step(&mut self, n_prompt: usize, time: Duration) {
        self.last_step = time;
        // in a step with a few of them, the other rows take the time
        if n_prompt >= PAGE {
            self.prefill.add(n_prompt, time);
        }
    }

    /// Removes the pages of a conversation from disk, except those still in memory, which others use.
    pub fn forget(&self, engine: &Engine, tokens: &[u32], salt: u64) {
        let keys = engine.page_keys(tokens, salt);
        let n_kept = engine.n_cached_pages(&keys);
        self.disk_keys(&keys[n_kept..]).iter().for_each(|key| self.tier.store.remove(key));
    }

    /// Removes all pages of the model from disk, and forgets those not yet saved.
    pub fn invalidate(&mut self, engine: &mut Engine) {
        self.reset();
        engine.track_new_pages(true);
        self.tier.store.clear_namespace(&self.namespace);
    }

    /// Ends all restores. Their requests are computed, by any worker.
    pub fn reset(&mut self) {
        self.restores.drain(..).filter_map(|restore| restore.group.upgrade()).for_each(|group| group.set_worker(None));
        self.unsaved = None;
    }

    /// After the engine was replaced.
    pub fn restart(&mut self, engine: &mut Engine) {
        self.reset();
        engine.track_new_pages(true);
    }
}

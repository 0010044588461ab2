//! KV pages, and snapshots of recurrent states, between engines and disk: restores before a prompt is submitted, and writes
//! after steps.
//!
//! ```text
//! queue ─► WorkerTier::begin ─► KvDisk::read ─► Inbox ─► WorkerTier::import ─► Engine::import_page ─► queue: may be taken
//! Engine::take_new_page, take_new_snapshot ─► WorkerTier::save ─► KvDisk::put
//! ```
//!
//! A request whose pages are read stays in the queue, so cancellation, time limits and shutdown treat it as any other; only
//! [`WorkerTier::is_restoring`] keeps the worker from taking it. Pages are read on the store's threads and imported between
//! steps, a few at a time while streams run. A page that is missing or refused ends the restore: the engine computes the rest.
//!
//! A prompt of a model with recurrent layers continues only from a snapshot. It is on disk in parts, each a file with a key
//! made from the key of its page. Such a restore ends with the last page whose snapshot is there, and with its parts.

use std::collections::{BTreeMap, VecDeque};
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

use crate::observe::metrics::{KvDiskValues, Metrics};
use crate::schedule::queue::{Job, Queue, SequenceGroup};
use crate::state::kv_disk::{self, KvDisk, MAX_PAGE, Namespace, PageInfo, PageKey, Refusal};

/// Maximum bytes and pages of one read. A worker has at most [`MAX_READS`] of them in memory.
const READ_BYTES: usize = 8 << 20;
const READ_PAGES: usize = 16;
const MAX_READS: usize = 4;
/// Bytes of a part of a snapshot, rounded down to whole records.
const PART_BYTES: usize = 2 << 20;
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

    /// Sets the metrics of the pages on disk.
    pub fn report(&self, metrics: &Metrics) {
        let stats = self.store.stats();
        let values = KvDiskValues {
            pages: stats.pages,
            bytes: stats.bytes,
            queued_bytes: stats.queued_bytes,
            hits: stats.hits,
            misses: stats.misses,
            written: stats.written,
            dropped: stats.dropped,
            evicted: stats.evicted,
            io_errors: stats.io_errors,
        };
        let reasons = Refusal::ALL.map(Refusal::name).into_iter().zip(stats.refused);
        metrics.set_kv_disk(&values, reasons.chain([("engine", self.refused())]));
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

/// Pages and parts that were read: their restore, and the index of the first among its keys.
type Arrived = (u64, usize, Vec<Option<Vec<u8>>>);

/// A request whose pages are read.
struct Restore {
    id: u64,
    group: Weak<SequenceGroup>,
    /// Pages, then the parts of the snapshot after the last of them.
    keys: Vec<PageKey>,
    n_pages: usize,
    /// Keys whose read was requested.
    n_requested: usize,
    n_imported: usize,
    /// Pages that have arrived, by the index of their key. Reads may end in another order than they were requested.
    pages: BTreeMap<usize, Option<Vec<u8>>>,
    /// Reads requested and not yet arrived.
    n_reads: usize,
}

impl Restore {
    /// Whether it ends with a snapshot.
    fn has_snapshot(&self) -> bool {
        self.keys.len() > self.n_pages
    }

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
    /// Bytes of a part of a snapshot, and number of parts; 0 parts for a model without recurrent layers.
    part_bytes: usize,
    n_parts: usize,
    inbox: Arc<Mutex<Vec<Arrived>>>,
    /// A new page that found no room in the store's queue.
    unsaved: Option<NewPage>,
    /// Parts of the last snapshot that are not yet in the store's queue.
    unsaved_parts: VecDeque<(PageKey, Vec<u8>, PageInfo)>,
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
        let part_bytes = (PART_BYTES / page_bytes).max(1) * page_bytes;
        Some(WorkerTier {
            part_bytes,
            n_parts: engine.exported_snapshot_bytes().div_ceil(part_bytes),
            unsaved_parts: VecDeque::new(),
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
        let (n_cached, n_resumable) = (engine.n_cached_pages(&keys), engine.n_resumable_pages(&keys));
        let mut keys = self.disk_keys(&keys);
        let store = &self.tier.store;
        store.touch(&keys[..n_cached]);
        // before the directory is scanned any page may be there
        let n_on_disk = if store.stats().is_scanned { store.longest_prefix(&keys[n_cached..]) } else { keys.len() };
        keys.truncate(n_cached + n_on_disk.min(engine.kv_stats().n_pages));
        let mut parts = Vec::new();
        if self.n_parts > 0 {
            let is_there = |key: &PageKey| self.part_keys(key).all(|part| store.contains(&part));
            let last = (n_resumable..keys.len()).rev().find(|i| is_there(&keys[*i]));
            keys.truncate(last.map_or(0, |i| i + 1));
            parts.extend(keys.last().into_iter().flat_map(|last| self.part_keys(last)));
        }
        let n_saved = keys.len().saturating_sub(n_resumable);
        // all of them may be in memory but their snapshot
        keys.drain(..n_cached.min(keys.len()));
        let bytes = keys.len() * self.page_bytes + parts.len() * self.part_bytes;
        if bytes == 0 || !self.is_faster(bytes, n_saved) {
            return false;
        }
        self.next_id += 1;
        let n_pages = keys.len();
        keys.extend(parts);
        self.restores.push(Restore {
            id: self.next_id,
            group: Arc::downgrade(&job.group),
            keys,
            n_pages,
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

    /// Keys of the parts of the snapshot after a page.
    fn part_keys(&self, page: &PageKey) -> impl Iterator<Item = PageKey> + use<> {
        let page = starling::kv::PageKey(page.0);
        (0..self.n_parts as u32).map(move |part| PageKey(page.snapshot_part(part).0))
    }

    /// Whether reading and importing so many bytes, after those that others wait for, is expected to take less time than
    /// computing `n` pages. True until all rates are known.
    fn is_faster(&mut self, bytes: usize, n: usize) -> bool {
        let left = |restore: &Restore| {
            let n_parts = restore.keys.len().saturating_sub(restore.n_pages.max(restore.n_imported));
            restore.n_pages.saturating_sub(restore.n_imported) * self.page_bytes + n_parts * self.part_bytes
        };
        let bytes = bytes + self.restores.iter().map(left).sum::<usize>();
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
        let [n_pages, n_parts] = [self.page_bytes, self.part_bytes].map(|n| (READ_BYTES / n).clamp(1, READ_PAGES));
        let mut free = MAX_READS;
        // the engine takes one snapshot at a time
        let mut snapshot_is_free = true;
        for restore in &mut self.restores {
            let takes_snapshot = restore.has_snapshot() && mem::take(&mut snapshot_is_free);
            let readable = if takes_snapshot { restore.keys.len() } else { restore.n_pages.min(restore.keys.len()) };
            // pages that have arrived occupy as much memory as those being read
            let n_arrived = restore.pages.len().div_ceil(if takes_snapshot { n_parts } else { n_pages });
            free = free.saturating_sub(restore.n_reads + n_arrived);
            while free > 0 && restore.n_requested < readable {
                let end = match restore.n_requested < restore.n_pages {
                    true => (restore.n_requested + n_pages).min(restore.n_pages.min(readable)),
                    false => (restore.n_requested + n_parts).min(readable),
                };
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
                let imported = match restore.n_imported < restore.n_pages {
                    true => engine.import_page(&page),
                    false => engine.import_pages(&page).map(drop),
                };
                match imported {
                    Ok(()) => restore.n_imported += 1,
                    Err(error) => {
                        // the engine evicted the parent, is full, or took another snapshot meanwhile
                        let is_part = restore.n_imported >= restore.n_pages;
                        let is_other = is_part && matches!(error, PageError::Position(_));
                        if !is_other && !matches!(error, PageError::Parent(_) | PageError::NoCapacity) {
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

    /// Hands new pages and snapshots to the store until `limit` is over.
    pub fn save(&mut self, engine: &mut Engine, limit: Duration) -> Saved {
        engine.publish_running();
        let begin = Instant::now();
        match self.save_pages(engine, limit) {
            Saved::All => self.save_snapshots(engine, limit.saturating_sub(begin.elapsed())),
            other => other,
        }
    }

    fn save_snapshots(&mut self, engine: &mut Engine, limit: Duration) -> Saved {
        let begin = Instant::now();
        loop {
            while let Some((key, part, info)) = self.unsaved_parts.pop_front() {
                if self.tier.store.room() < part.len() {
                    self.unsaved_parts.push_front((key, part, info));
                    return Saved::NoRoom;
                }
                self.tier.store.put(key, part, info, false);
                if begin.elapsed() >= limit {
                    return Saved::Some;
                }
            }
            let Some(page) = engine.take_new_snapshot() else { return Saved::All };
            let parts: Vec<PageKey> = self.part_keys(&PageKey::new(&page.key.0, &self.namespace)).collect();
            if parts.iter().all(|part| self.tier.store.contains(part)) {
                continue;
            }
            let n_tokens = u32::try_from(page.n_tokens).unwrap_or(u32::MAX);
            let info = PageInfo { namespace: self.namespace, n_tokens };
            let bytes = engine.export_snapshot(&page.key).unwrap_or_default();
            let parts = parts.into_iter().zip(bytes.chunks(self.part_bytes));
            self.unsaved_parts.extend(parts.map(|(key, part)| (key, part.to_vec(), info)));
        }
    }

    fn save_pages(&mut self, engine: &mut Engine, limit: Duration) -> Saved {
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
        for key in self.disk_keys(&keys[n_kept..]) {
            self.tier.store.remove(&key);
            self.part_keys(&key)
                .filter(|part| self.tier.store.contains(part))
                .for_each(|part| self.tier.store.remove(&part));
        }
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
        self.unsaved_parts.clear();
    }

    /// After the engine was replaced.
    pub fn restart(&mut self, engine: &mut Engine) {
        self.reset();
        engine.track_new_pages(true);
    }
}

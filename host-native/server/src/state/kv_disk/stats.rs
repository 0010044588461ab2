//! Counters, and the rate of reads.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::Refusal;
use super::worker::lock;

/// Counters since the start, and the current size.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stats {
    /// Known pages on disk.
    pub pages: u64,
    /// Bytes of their files.
    pub bytes: u64,
    /// Bytes of pages that wait to be written.
    pub queued_bytes: u64,
    /// The directory was scanned once.
    pub is_scanned: bool,
    /// Keys read.
    pub hits: u64,
    /// Keys not read: no file, refused, or an I/O error.
    pub misses: u64,
    /// Pages written.
    pub written: u64,
    /// Pages not written: too large, queue full, or an I/O error.
    pub dropped: u64,
    /// Pages put with `durable` whose write or sync failed.
    pub durable_failed: u64,
    /// Pages removed for the quota or for lack of disk space.
    pub evicted: u64,
    /// Failed calls of the file system.
    pub io_errors: u64,
    /// Files refused, by reason, in the order of [`Refusal::ALL`].
    pub refused: [u64; Refusal::ALL.len()],
}

impl Stats {
    #[cfg(test)]
    pub fn refused_total(&self) -> u64 {
        self.refused.iter().sum()
    }
}

#[derive(Default)]
pub(super) struct Counter(AtomicU64);

impl Counter {
    pub(super) fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    pub(super) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

#[derive(Default)]
pub(super) struct Counters {
    pub(super) hits: Counter,
    pub(super) misses: Counter,
    pub(super) written: Counter,
    pub(super) dropped: Counter,
    pub(super) durable_failed: Counter,
    pub(super) evicted: Counter,
    pub(super) io_errors: Counter,
    pub(super) refused: [Counter; Refusal::ALL.len()],
    pub(super) rate: ReadRate,
}

/// Moving average of the rate of read requests.
#[derive(Default)]
pub(super) struct ReadRate(Mutex<(f64, f64)>);

impl ReadRate {
    /// Adds a request. Each request before has 7/8 of the weight of the next.
    pub(super) fn add(&self, bytes: usize, time: Duration) {
        let mut sums = lock(&self.0);
        *sums = (sums.0 * 0.875 + bytes as f64, sums.1 * 0.875 + time.as_secs_f64());
    }

    /// Bytes per second, `None` before the first request.
    pub(super) fn get(&self) -> Option<f64> {
        let (bytes, seconds) = *lock(&self.0);
        (seconds > 0.0).then(|| bytes / seconds)
    }
}

//! The writer: a bounded queue and a thread.

use std::collections::VecDeque;
use std::io;
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant, SystemTime};

use super::chain::{Chain, Head, OpenError, Options};
use super::disk::{Disk, Files};
use super::record::Event;

/// Capacity of the queue; events beyond it are lost.
const QUEUE_EVENTS: usize = 4096;
/// Longest time between a write and its `fdatasync`: bounds what a power failure loses.
const SYNC_INTERVAL: Duration = Duration::from_secs(1);
/// Delay between attempts after a failed write.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// Delay and number of attempts while the log is being closed.
const CLOSE_RETRY_INTERVAL: Duration = Duration::from_millis(50);
const CLOSE_ATTEMPTS: u32 = 5;

/// An open audit log. Dropping it writes the queue.
pub struct AuditLog {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl AuditLog {
    /// Opens a log or creates it, with mode 0600, and continues its `seq` and hashes. An incomplete last line is cut
    /// off, which the event `recovered` reports.
    ///
    /// # Errors
    /// If another process writes it; the file is a link, not regular, or others can write it; the last line is invalid;
    /// or I/O fails.
    pub fn open(path: &Path, options: Options) -> Result<AuditLog, OpenError> {
        let failed = |source: io::Error| match source.kind() {
            io::ErrorKind::WouldBlock => OpenError::Locked { path: path.into() },
            _ => OpenError::File { path: path.into(), source },
        };
        let files = Files::open(path).map_err(failed)?;
        let chain = Chain::open(path, files, options)?;
        AuditLog::start(chain, QUEUE_EVENTS).map_err(failed)
    }

    /// `capacity`: events in the queue, at least 2.
    fn start<D: Disk + 'static>(mut chain: Chain<D>, capacity: usize) -> io::Result<AuditLog> {
        // item 1: the pending events of the opened log (`recovered`, `rotated`)
        let queue = Queue { accepted: 1, head: chain.head, ..Queue::default() };
        let shared =
            Arc::new(Shared { capacity, queue: Mutex::new(queue), work: Condvar::new(), done: Condvar::new() });
        let writer = Arc::clone(&shared);
        let thread = thread::Builder::new().name("audit".into()).spawn(move || writer.run(&mut chain))?;
        Ok(AuditLog { shared, thread: Some(thread) })
    }

    /// Queues an event. Does not wait for the disk: if the queue is full, the event is lost, and counted.
    pub fn record(&self, event: Event) {
        self.shared.record(SystemTime::now(), event);
    }

    /// Waits until the events recorded before are on the disk.
    ///
    /// # Errors
    /// The first failure during the wait. The events stay in the queue.
    pub fn flush(&self) -> io::Result<()> {
        let mut queue = self.shared.lock();
        let (target, failures) = (queue.accepted, queue.failures);
        queue.flush_target = queue.flush_target.max(target);
        self.shared.work.notify_one();
        while queue.synced < target {
            if queue.failures != failures {
                return Err(io::Error::other(queue.last_failure.clone().unwrap_or_default()));
            }
            if self.thread.as_ref().is_none_or(JoinHandle::is_finished) {
                return Err(io::Error::other("the writer thread has ended"));
            }
            let wait = self.shared.done.wait_timeout(queue, RETRY_INTERVAL);
            queue = wait.unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }

    /// Failed operations on files since the log was opened; each write is tried again.
    pub fn failures(&self) -> u64 {
        self.shared.lock().failures
    }

    /// Message of the last failure.
    pub fn last_failure(&self) -> Option<String> {
        self.shared.lock().last_failure.clone()
    }

    /// Events lost since the log was opened.
    pub fn lost(&self) -> u64 {
        self.shared.lock().lost
    }

    /// The last line written; its hash is an `expect_head` of [`super::verify()`].
    pub fn head(&self) -> Head {
        self.shared.lock().head
    }
}

impl Drop for AuditLog {
    fn drop(&mut self) {
        self.shared.lock().closing = true;
        self.shared.work.notify_one();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

struct Shared {
    capacity: usize,
    queue: Mutex<Queue>,
    /// Wakes the writer.
    work: Condvar,
    /// Wakes `flush`.
    done: Condvar,
}

#[derive(Default)]
struct Queue {
    events: VecDeque<(SystemTime, Event)>,
    /// Lost events without a `lost` event in the queue yet.
    unreported: u64,
    /// Items that came to the queue, that were written, and that are on the disk.
    accepted: u64,
    written: u64,
    synced: u64,
    /// `flush` wants this many items on the disk.
    flush_target: u64,
    closing: bool,
    head: Head,
    failures: u64,
    last_failure: Option<String>,
    lost: u64,
}

enum Task {
    Write(SystemTime, Event),
    Sync,
    Close,
}

/// What to do after a failure.
#[derive(PartialEq, Eq)]
enum Next {
    Retry,
    GiveUp,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn record(&self, time: SystemTime, event: Event) {
        let mut queue = self.lock();
        let needed = 1 + usize::from(queue.unreported > 0);
        if queue.events.len() + needed > self.capacity {
            queue.unreported += 1;
            queue.lost += 1;
            return;
        }
        if queue.unreported > 0 {
            let count = std::mem::take(&mut queue.unreported);
            queue.push(time, Event::Lost { count });
        }
        queue.push(time, event);
        drop(queue);
        self.work.notify_one();
    }

    /// Writes the queue until the log is closed.
    fn run(&self, chain: &mut Chain<impl Disk>) {
        let mut close_attempts = CLOSE_ATTEMPTS;
        let mut unsynced_since = Some(Instant::now());
        while let Err(e) = chain.write_pending() {
            if self.failed(&e, 0, &mut close_attempts) == Next::GiveUp {
                return;
            }
        }
        self.written(chain);
        loop {
            match self.next(unsynced_since) {
                Task::Write(time, event) => {
                    while let Err(e) = chain.append(time, &event) {
                        if self.failed(&e, 1, &mut close_attempts) == Next::GiveUp {
                            return;
                        }
                    }
                    self.written(chain);
                    unsynced_since.get_or_insert_with(Instant::now);
                }
                Task::Sync => match chain.disk.sync() {
                    Ok(()) => {
                        unsynced_since = None;
                        self.synced();
                    }
                    Err(e) => {
                        // writes go on: the next attempt is after the interval
                        unsynced_since = Some(Instant::now());
                        if self.sync_failed(&e, &mut close_attempts) == Next::GiveUp {
                            return;
                        }
                    }
                },
                Task::Close => return,
            }
        }
    }

    fn next(&self, unsynced_since: Option<Instant>) -> Task {
        let mut queue = self.lock();
        loop {
            let sync_in = unsynced_since.map(|since| SYNC_INTERVAL.saturating_sub(since.elapsed()));
            let flush = queue.flush_target > queue.synced && queue.written >= queue.flush_target;
            if sync_in.is_some_and(|wait| flush || wait.is_zero()) {
                return Task::Sync;
            }
            if let Some((time, event)) = queue.events.pop_front() {
                return Task::Write(time, event);
            }
            if queue.unreported > 0 {
                queue.accepted += 1;
                let count = std::mem::take(&mut queue.unreported);
                return Task::Write(SystemTime::now(), Event::Lost { count });
            }
            queue = match (queue.closing, sync_in) {
                (true, Some(_)) => return Task::Sync,
                (true, None) => return Task::Close,
                (false, Some(wait)) => {
                    let wait = self.work.wait_timeout(queue, wait);
                    wait.unwrap_or_else(PoisonError::into_inner).0
                }
                (false, None) => self.work.wait(queue).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }

    fn written(&self, chain: &mut Chain<impl Disk>) {
        let mut queue = self.lock();
        queue.written += 1;
        queue.head = chain.head;
        queue.failures += std::mem::take(&mut chain.failures);
        if let Some(failure) = chain.last_failure.take() {
            queue.last_failure = Some(failure);
        }
    }

    fn synced(&self) {
        let mut queue = self.lock();
        queue.synced = queue.written;
        self.done.notify_all();
    }

    fn count_failure(&self, error: &io::Error) -> MutexGuard<'_, Queue> {
        let mut queue = self.lock();
        queue.failures += 1;
        queue.last_failure = Some(error.to_string());
        queue.flush_target = 0;
        self.done.notify_all();
        queue
    }

    /// Counts a failure of the file system to sync; waits and gives up only when the log is being closed.
    fn sync_failed(&self, error: &io::Error, close_attempts: &mut u32) -> Next {
        let queue = self.count_failure(error);
        if queue.closing { self.wait_to_retry(queue, 0, close_attempts) } else { Next::Retry }
    }

    /// Counts a failed write of `n_events` (0 or 1) and waits.
    fn failed(&self, error: &io::Error, n_events: u64, close_attempts: &mut u32) -> Next {
        let queue = self.count_failure(error);
        self.wait_to_retry(queue, n_events, close_attempts)
    }

    /// Gives up when the log is being closed and no attempt is left: the event at hand and the queue are lost.
    fn wait_to_retry(&self, mut queue: MutexGuard<'_, Queue>, n_events: u64, close_attempts: &mut u32) -> Next {
        let closing = queue.closing;
        if closing {
            *close_attempts = close_attempts.saturating_sub(1);
            if *close_attempts == 0 {
                queue.lost += n_events + queue.events.len() as u64;
                queue.events.clear();
                return Next::GiveUp;
            }
        }
        let end = Instant::now() + if closing { CLOSE_RETRY_INTERVAL } else { RETRY_INTERVAL };
        loop {
            let wait = end.saturating_duration_since(Instant::now());
            if wait.is_zero() || queue.flush_target > queue.synced || queue.closing != closing {
                return Next::Retry;
            }
            queue = self.work.wait_timeout(queue, wait).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Queue {
    fn push(&mut self, time: SystemTime, event: Event) {
        self.accepted += 1;
        self.events.push_back((time, event));
    }
}

#[cfg(test)]
mod tests;

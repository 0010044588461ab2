//! State of a worker that other threads read without waiting for it.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use starling::engine::{Engine, RequestId, TokenLogprobs};
use starling::kv::KvStats;

use crate::observe::stats::Rate;
use crate::schedule::queue::Job;
use crate::schedule::scheduler::Queued;

/// Whether a worker takes requests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum WorkerState {
    /// Takes requests.
    Healthy,
    /// Finishes its requests and ends.
    Draining,
    /// A fault ended its engine; a new one is being made.
    Restarting,
    /// An engine step takes longer than `stall_timeout`.
    Stalled,
    /// Its thread has ended.
    Ended,
}

impl WorkerState {
    pub const ALL: [WorkerState; 5] = [
        WorkerState::Healthy,
        WorkerState::Draining,
        WorkerState::Restarting,
        WorkerState::Stalled,
        WorkerState::Ended,
    ];

    /// The state's name in the API, and the label `state` in metrics.
    pub const fn name(self) -> &'static str {
        match self {
            WorkerState::Healthy => "healthy",
            WorkerState::Draining => "draining",
            WorkerState::Restarting => "restarting",
            WorkerState::Stalled => "stalled",
            WorkerState::Ended => "ended",
        }
    }
}

/// A job in an engine.
#[derive(Debug)]
pub struct Running {
    pub queued: Queued<Job>,
    pub started: Instant,
    pub last_token: Option<Instant>,
    /// Log-probabilities of the prompt so far.
    pub prompt: Vec<TokenLogprobs>,
}

/// What a worker does with its engine between two steps.
pub type Command = Box<dyn FnOnce(&mut Engine) + Send>;

/// State of a worker.
pub struct WorkerStatus {
    start: Instant,
    /// Milliseconds from `start` to the last turn of the loop.
    heartbeat: AtomicU64,
    state: AtomicU8,
    /// Requests in the engine.
    running: AtomicUsize,
    /// Further requests that the engine has room for.
    slots: AtomicUsize,
    /// Whether the next request found too few free KV pages; false once a request has ended.
    lacks_pages: AtomicBool,
    kv: Mutex<KvStats>,
    /// Nanoseconds with work.
    busy: Rate,
    /// The jobs in the engine. A supervisor takes them from a worker that stalls.
    jobs: Mutex<BTreeMap<RequestId, Running>>,
    /// Number of times that the jobs were taken.
    takeovers: AtomicU64,
    /// Cached pages to evict.
    evictions: AtomicUsize,
    /// Work between two steps.
    commands: Mutex<VecDeque<Command>>,
    /// Whether to evict all cached pages, in memory and on disk.
    invalidation: AtomicBool,
    /// Whether to release the memory of the KV cache once the engine is idle.
    release: AtomicBool,
    /// Fault to raise, and the number of steps before it, for tests of failover.
    injected: Mutex<Option<(InjectedFault, u32)>>,
}

impl WorkerStatus {
    pub fn new(slots: usize) -> WorkerStatus {
        WorkerStatus {
            start: Instant::now(),
            heartbeat: AtomicU64::new(0),
            state: AtomicU8::new(WorkerState::Healthy as u8),
            running: AtomicUsize::new(0),
            slots: AtomicUsize::new(slots),
            lacks_pages: AtomicBool::new(false),
            kv: Mutex::new(KvStats::default()),
            busy: Rate::default(),
            jobs: Mutex::default(),
            takeovers: AtomicU64::new(0),
            evictions: AtomicUsize::new(0),
            commands: Mutex::default(),
            invalidation: AtomicBool::new(false),
            release: AtomicBool::new(false),
            injected: Mutex::default(),
        }
    }

    pub fn state(&self) -> WorkerState {
        let state = self.state.load(Ordering::Acquire);
        WorkerState::ALL.into_iter().find(|known| *known as u8 == state).unwrap_or(WorkerState::Ended)
    }

    /// Changes the state, unless the thread has ended or is to end.
    pub fn set_state(&self, to: WorkerState) {
        let _ = self.state.fetch_update(Ordering::AcqRel, Ordering::Acquire, |state| {
            let is_final = state == WorkerState::Ended as u8;
            let drains = state == WorkerState::Draining as u8 && to != WorkerState::Ended;
            (!is_final && !drains).then_some(to as u8)
        });
    }

    /// Time since the last heartbeat.
    pub fn age(&self) -> Duration {
        let now = self.start.elapsed();
        now.saturating_sub(Duration::from_millis(self.heartbeat.load(Ordering::Relaxed)))
    }

    pub fn beat(&self) {
        self.heartbeat.store(self.start.elapsed().as_millis() as u64, Ordering::Relaxed);
        if self.state() == WorkerState::Stalled {
            self.set_state(WorkerState::Healthy);
        }
    }

    /// Notes that the worker had work for some time.
    pub fn add_busy(&self, time: Duration) {
        self.busy.add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX));
    }

    /// Share of the last 10 s in which the worker had work, 0 to 1.
    pub fn utilisation(&self) -> f64 {
        // a step counts where it ends, so that one of several seconds can exceed the window
        (self.busy.per_second() / 1e9).min(1.0)
    }

    pub fn has_ended(&self) -> bool {
        self.state() == WorkerState::Ended
    }

    /// Whether it may be given a request now.
    pub fn has_room(&self) -> bool {
        let has_slot = self.slots.load(Ordering::Acquire) > 0 && !self.lacks_pages.load(Ordering::Acquire);
        has_slot && self.state() == WorkerState::Healthy
    }

    pub fn running(&self) -> usize {
        self.running.load(Ordering::Relaxed)
    }

    pub fn set_running(&self, running: usize, max_seqs: usize) {
        self.running.store(running, Ordering::Relaxed);
        self.slots.store(max_seqs.saturating_sub(running), Ordering::Release);
    }

    pub fn set_lacks_pages(&self, lacks_pages: bool) {
        self.lacks_pages.store(lacks_pages, Ordering::Release);
    }

    /// The last published KV statistics.
    pub fn kv(&self) -> KvStats {
        *self.kv.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn set_kv(&self, stats: KvStats) {
        *self.kv.lock().unwrap_or_else(PoisonError::into_inner) = stats;
    }

    pub fn jobs(&self) -> MutexGuard<'_, BTreeMap<RequestId, Running>> {
        self.jobs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the jobs of a worker that does not reach the end of its step, unless it is changing them right now.
    pub fn take_jobs(&self) -> Option<Vec<Running>> {
        let mut jobs = self.jobs.try_lock().ok()?;
        self.takeovers.fetch_add(1, Ordering::AcqRel);
        Some(std::mem::take(&mut *jobs).into_values().collect())
    }

    pub fn takeovers(&self) -> u64 {
        self.takeovers.load(Ordering::Acquire)
    }

    /// Asks the worker to evict up to `n` cached pages.
    pub fn evict_cached(&self, n: usize) {
        self.evictions.store(n, Ordering::Release);
    }

    /// Asks the worker to run a command between two steps.
    pub fn command(&self, command: Command) {
        self.commands.lock().unwrap_or_else(PoisonError::into_inner).push_back(command);
    }

    pub fn take_command(&self) -> Option<Command> {
        self.commands.lock().unwrap_or_else(PoisonError::into_inner).pop_front()
    }

    /// Asks the worker to evict all cached pages, in memory and on disk.
    pub fn invalidate_cache(&self) {
        self.invalidation.store(true, Ordering::Release);
    }

    pub fn take_invalidation(&self) -> bool {
        self.invalidation.swap(false, Ordering::AcqRel)
    }

    /// Asks the worker to release the memory of its KV cache if it is idle.
    pub fn release_memory(&self) {
        self.release.store(true, Ordering::Release);
    }

    pub fn take_release(&self) -> bool {
        self.release.swap(false, Ordering::AcqRel)
    }

    pub fn take_evictions(&self) -> usize {
        self.evictions.swap(0, Ordering::AcqRel)
    }

    /// Raises a fault after `n_steps` further steps.
    pub fn inject(&self, fault: InjectedFault, n_steps: u32) {
        *self.injected.lock().unwrap_or_else(PoisonError::into_inner) = Some((fault, n_steps));
    }

    /// The fault to raise in this step.
    pub fn take_injected(&self) -> Option<InjectedFault> {
        let mut injected = self.injected.lock().unwrap_or_else(PoisonError::into_inner);
        match &mut *injected {
            Some((_, n_steps)) if *n_steps > 0 => {
                *n_steps -= 1;
                None
            }
            _ => injected.take().map(|(fault, _)| fault),
        }
    }
}

/// A fault for tests of failover.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum InjectedFault {
    /// A panic with a message.
    Panic(String),
    /// A step that takes a second longer than `stall_timeout`.
    Stall,
}

/// A worker as others know it.
#[derive(Clone)]
pub struct WorkerHandle {
    pub id: u32,
    pub status: Arc<WorkerStatus>,
}

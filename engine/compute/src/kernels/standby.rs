//! Fork-join team: worker threads that run parts of the parallel regions of a leader. An idle worker spins, then
//! yields, then sleeps. The host starts the threads.

use core::hint;
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use core::time::Duration;
use std::sync::{Condvar, Mutex, PoisonError};
use std::{process, thread};

use super::crew::Crew;

/// WebAssembly has neither a pause instruction nor a yield.
const WASM: bool = cfg!(target_family = "wasm");
/// How often a worker polls the gate before it yields its core: some tens of microseconds, longer than the serial steps
/// between two operations of a token.
const SPINS: u32 = if WASM { 20_000 } else { 4_000 };
/// How often a worker yields before it sleeps: about a millisecond on an idle machine.
const YIELDS: u32 = if WASM { 0 } else { 1_000 };
/// How often a leader polls for workers still inside before it yields its core.
const LEADER_SPINS: u32 = if WASM { 10 * SPINS } else { SPINS };

/// A fork-join team: the leader and its worker threads.
#[derive(Default)]
pub struct Standby {
    crew: Crew,
    sleepers: AtomicUsize,
    ended: AtomicBool,
    lost: AtomicBool,
    lock: Mutex<()>,
    wakeup: Condvar,
}

impl Standby {
    /// A team without workers.
    pub const fn new() -> Standby {
        Standby {
            crew: Crew::new(),
            sleepers: AtomicUsize::new(0),
            ended: AtomicBool::new(false),
            lost: AtomicBool::new(false),
            lock: Mutex::new(()),
            wakeup: Condvar::new(),
        }
    }

    /// The loop of a worker thread: joins all parallel regions until [`Standby::end`].
    pub fn follow(&self) {
        let mut seen = 0;
        let mut idle = 0;
        while !self.ended.load(Ordering::Relaxed) {
            if self.crew.follow(&mut seen) {
                idle = 0;
            } else if idle < SPINS {
                hint::spin_loop();
                idle += 1;
            } else if idle < SPINS + YIELDS {
                thread::yield_now();
                idle += 1;
            } else {
                self.sleep();
                idle = 0;
            }
        }
    }

    /// [`Pool::broadcast`](crate::pool::Pool::broadcast) to the workers and the caller.
    ///
    /// # Panics
    /// If the work panicked on any thread, after all have left it.
    pub fn lead(&self, work: &(dyn Fn() + Sync)) {
        self.crew.lead(work, || self.wake(), |turns| self.wait(turns));
    }

    /// Makes all workers return from [`Standby::follow`].
    pub fn end(&self) {
        self.ended.store(true, Ordering::SeqCst);
        let _guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.wakeup.notify_all();
    }

    /// Records that a worker stopped without unwinding, maybe inside a region. A leader that waits for workers then
    /// aborts the process, as it might wait forever.
    pub fn report_lost_worker(&self) {
        self.lost.store(true, Ordering::SeqCst);
    }

    /// Whether [`Standby::report_lost_worker`] was called.
    pub fn has_lost_worker(&self) -> bool {
        self.lost.load(Ordering::SeqCst)
    }

    fn sleep(&self) {
        let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        // no lost wake-up: the leader opens the gate before it reads `sleepers`, this thread counts itself before it
        // reads the gate
        while !self.crew.is_open() && !self.ended.load(Ordering::SeqCst) {
            guard = self.wakeup.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    fn wake(&self) {
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            let _guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
            self.wakeup.notify_all();
        }
    }

    fn wait(&self, turns: u32) {
        if turns < LEADER_SPINS {
            return hint::spin_loop();
        }
        if self.has_lost_worker() {
            process::abort();
        }
        if WASM { thread::sleep(Duration::from_micros(10)) } else { thread::yield_now() }
    }
}

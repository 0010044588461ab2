//! Threads that stand by for a leader's operations: they spin a moment, then yield, then sleep. A host starts them; that
//! is all that is left of a thread pool.

use core::hint;
use core::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use core::time::Duration;
use std::sync::{Condvar, Mutex, PoisonError};
use std::{process, thread};

use super::crew::Crew;

/// WebAssembly can neither rest within a loop nor yield.
const WASM: bool = cfg!(target_family = "wasm");
/// Looks at the gate before a thread yields its core: some tens of microseconds, longer than the serial steps between
/// two operations of a token.
const SPINS: u32 = if WASM { 20_000 } else { 4_000 };
/// Times a thread yields before it sleeps: about a millisecond on an idle machine.
const YIELDS: u32 = if WASM { 0 } else { 1_000 };
/// Looks of a leader at those still inside before it lets others have its core.
const PATIENCE: u32 = if WASM { 10 * SPINS } else { SPINS };

/// Where a leader and the threads that help it meet.
#[derive(Default)]
pub struct Standby {
    crew: Crew,
    sleepers: AtomicUsize,
    ended: AtomicBool,
    lost: AtomicBool,
    lock: Mutex<()>,
    bell: Condvar,
}

impl Standby {
    /// Nobody yet.
    pub const fn new() -> Standby {
        Standby {
            crew: Crew::new(),
            sleepers: AtomicUsize::new(0),
            ended: AtomicBool::new(false),
            lost: AtomicBool::new(false),
            lock: Mutex::new(()),
            bell: Condvar::new(),
        }
    }

    /// The life of a thread that helps: takes part in all operations until [`Standby::end`].
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

    /// [`Pool::broadcast`](crate::pool::Pool::broadcast) to the threads that help, and the caller.
    ///
    /// # Panics
    /// If the work panicked on any thread; not before all have left it.
    pub fn lead(&self, work: &(dyn Fn() + Sync)) {
        self.crew.lead(work, || self.wake(), |turns| self.wait(turns));
    }

    /// Lets the threads go.
    pub fn end(&self) {
        self.ended.store(true, Ordering::SeqCst);
        let _guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.bell.notify_all();
    }

    /// Says that a thread has stopped without unwinding, maybe inside an operation: from then on a leader that waits
    /// for others ends the program, since it might wait forever.
    pub fn lose(&self) {
        self.lost.store(true, Ordering::SeqCst);
    }

    /// Whether a thread was lost.
    pub fn has_lost(&self) -> bool {
        self.lost.load(Ordering::SeqCst)
    }

    fn sleep(&self) {
        let mut guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        // the leader opens the gate, then looks for sleepers: either it sees this one, or this one sees the gate
        while !self.crew.is_open() && !self.ended.load(Ordering::SeqCst) {
            guard = self.bell.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    fn wake(&self) {
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            let _guard = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
            self.bell.notify_all();
        }
    }

    fn wait(&self, turns: u32) {
        if turns < PATIENCE {
            return hint::spin_loop();
        }
        if self.has_lost() {
            process::abort();
        }
        if WASM { thread::sleep(Duration::from_micros(10)) } else { thread::yield_now() }
    }
}

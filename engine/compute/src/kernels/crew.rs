//! Fork-join synchronisation: how worker threads join a parallel region of a leader. The part of a thread pool that
//! must be correct, without threads or clocks.
//!
//! The leader publishes a closure and opens a gate, runs the closure itself, closes the gate and waits for the workers
//! that entered. Workers enter while the gate is open; a worker that comes too late (it slept, or had no core) skips
//! the region, and nobody waits for it.
#![allow(unsafe_code)]

use core::mem;

use super::sync::{AtomicBool, AtomicU64, Ordering, UnsafeCell, spin_loop};

type Work<'a> = &'a (dyn Fn() + Sync);

/// The gate through which the workers of a leader join its parallel regions.
pub struct Crew {
    /// `epoch << 17 | workers inside << 1 | open`.
    pub(super) gate: AtomicU64,
    pub(super) work: UnsafeCell<Option<Work<'static>>>,
    pub(super) leading: AtomicBool,
    pub(super) panicked: AtomicBool,
}

// SAFETY: `work` is written only by the leader (at most one, by `leading`) while the gate is closed and no worker is
// inside, and read only by workers inside.
unsafe impl Sync for Crew {}
// SAFETY: the closure is gone (`lead` has returned) whenever the crew can be moved.
unsafe impl Send for Crew {}

const OPEN: u64 = 1;
const WORKER: u64 = 2;
const EPOCH: u64 = 1 << 17;

impl Crew {
    /// Runs `work` on this thread and on all workers that join: opens the gate, calls `wake`, works, closes the gate,
    /// and calls `wait` until the workers inside have left. If another thread is leading, runs `work` on this thread
    /// only.
    ///
    /// # Panics
    /// If `work` panicked on any thread, after all have left it.
    pub fn lead(&self, work: &(dyn Fn() + Sync), wake: impl FnOnce(), wait: impl FnMut(u32)) {
        if self.leading.swap(true, Ordering::Acquire) {
            return work();
        }
        // may be set by a region whose leader panicked too
        self.panicked.store(false, Ordering::Relaxed);
        // SAFETY: only the lifetime changes. `CloseGate` waits, also when unwinding, until no worker can use the
        // reference.
        let work: Work<'static> = unsafe { mem::transmute::<Work<'_>, Work<'static>>(work) };
        // SAFETY: this thread leads, the gate is closed and no worker is inside.
        self.work.with_mut(|slot| unsafe { *slot = Some(work) });
        self.gate.fetch_add(EPOCH | OPEN, Ordering::SeqCst);
        let close = CloseGate { crew: self, wait };
        wake();
        work();
        drop(close);
        if self.panicked.swap(false, Ordering::Relaxed) {
            panic!("a task panicked on a worker thread");
        }
    }

    /// Joins the open region, unless this worker has joined it already (`seen` is the epoch of its last one). Returns
    /// whether it did.
    pub fn follow(&self, seen: &mut u64) -> bool {
        let mut gate = self.gate.load(Ordering::SeqCst);
        loop {
            if gate & OPEN == 0 || gate / EPOCH == *seen {
                return false;
            }
            match self.gate.compare_exchange_weak(gate, gate + WORKER, Ordering::Acquire, Ordering::Relaxed) {
                Ok(_) => break,
                Err(now) => gate = now,
            }
        }
        *seen = gate / EPOCH;
        let inside = WorkerGuard { crew: self, done: false };
        // SAFETY: this worker is inside, so the leader keeps the closure alive and does not write.
        if let Some(work) = self.work.with(|slot| unsafe { *slot }) {
            work();
        }
        let mut inside = inside;
        inside.done = true;
        true
    }

    /// Whether workers are inside.
    fn has_workers(&self) -> bool {
        self.gate.load(Ordering::Acquire) % EPOCH / WORKER != 0
    }

    /// Whether a region is open.
    pub fn is_open(&self) -> bool {
        self.gate.load(Ordering::SeqCst) & OPEN != 0
    }
}

/// Closes the gate and waits for the workers inside.
struct CloseGate<'a, W: FnMut(u32)> {
    crew: &'a Crew,
    wait: W,
}

impl<W: FnMut(u32)> Drop for CloseGate<'_, W> {
    fn drop(&mut self) {
        self.crew.gate.fetch_and(!OPEN, Ordering::AcqRel);
        // waits even if `wait` panics
        let end = EndLeading(self.crew);
        let mut turns = 0;
        while end.0.has_workers() {
            (self.wait)(turns);
            turns = turns.saturating_add(1);
        }
    }
}

/// Waits until no worker is inside, then lets another thread lead.
struct EndLeading<'a>(&'a Crew);

impl Drop for EndLeading<'_> {
    fn drop(&mut self) {
        while self.0.has_workers() {
            spin_loop();
        }
        self.0.leading.store(false, Ordering::Release);
    }
}

/// A worker inside a region.
struct WorkerGuard<'a> {
    crew: &'a Crew,
    done: bool,
}

impl Drop for WorkerGuard<'_> {
    fn drop(&mut self) {
        if !self.done {
            self.crew.panicked.store(true, Ordering::Relaxed);
        }
        self.crew.gate.fetch_sub(WORKER, Ordering::Release);
    }
}

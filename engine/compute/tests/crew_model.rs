//! Model check of the fork-join gate: loom runs each case under all interleavings of a few preemptions, and with all
//! values that the memory orderings allow a load to return. Its cells report every access that is not ordered after the
//! last write.
// the orderings are the model's, not the machine's: one architecture is enough
#![cfg(target_arch = "x86_64")]
#![allow(unsafe_code)]

#[path = "../src/kernels/crew.rs"]
#[allow(dead_code, unreachable_pub, missing_docs)]
mod crew;

/// Loom's primitives in place of those of `core`.
mod sync {
    pub(super) use loom::cell::UnsafeCell;
    pub(super) use loom::hint::spin_loop;
    pub(super) use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering};

    use super::crew::Crew;

    impl Crew {
        pub(super) fn new() -> Crew {
            Crew {
                gate: AtomicU64::new(0),
                work: UnsafeCell::new(None),
                leading: AtomicBool::new(false),
                panicked: AtomicBool::new(false),
            }
        }
    }
}

use std::panic;

use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicUsize, Ordering};
use loom::thread;

use crew::Crew;

/// Runs a case under all interleavings in which threads are preempted at most `preemptions` times.
fn check(preemptions: usize, case: impl Fn() + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(preemptions);
    model.check(case);
}

/// Leads a region in which each thread reads what the leader wrote and writes a cell of its own, and reads all cells
/// afterwards. Returns how many threads took part.
fn lead(crew: &Crew, value: usize) -> usize {
    let input = UnsafeCell::new(0);
    let outputs = [(); 3].map(|()| UnsafeCell::new(0));
    let entered = AtomicUsize::new(0);
    // SAFETY: loom stops at an access that races with this one.
    input.with_mut(|p| unsafe { *p = value });
    let work = Shared(|| {
        let ticket = entered.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as above.
        let value = input.with(|p| unsafe { *p });
        // SAFETY: as above.
        outputs[ticket].with_mut(|p| unsafe { *p = value });
    });
    crew.lead(&|| work.call(), || (), |_| thread::yield_now());
    let n = entered.load(Ordering::Relaxed);
    for output in &outputs[..n] {
        // SAFETY: as above.
        assert_eq!(output.with(|p| unsafe { *p }), value);
    }
    n
}

/// A closure over loom's cells, which are not `Sync`.
struct Shared<F>(F);

// SAFETY: loom stops at a race.
unsafe impl<F> Sync for Shared<F> {}

impl<F: Fn()> Shared<F> {
    fn call(&self) {
        (self.0)();
    }
}

/// A worker that polls the gate `polls` times.
fn worker(crew: &Arc<Crew>, polls: usize) -> thread::JoinHandle<usize> {
    let crew = crew.clone();
    thread::spawn(move || {
        let (mut seen, mut joined) = (0, 0);
        for _ in 0..polls {
            joined += usize::from(crew.follow(&mut seen));
            thread::yield_now();
        }
        joined
    })
}

#[test]
fn a_worker_joins_each_of_two_regions_at_most_once() {
    check(5, || {
        let crew = Arc::new(Crew::new());
        let joined = worker(&crew, 2);
        let threads = [lead(&crew, 1), lead(&crew, 2)];
        assert!(threads.iter().all(|n| *n <= 2), "{threads:?}");
        assert_eq!(threads.iter().sum::<usize>(), 2 + joined.join().unwrap());
    });
}

#[test]
fn two_workers_join_a_region() {
    check(3, || {
        let crew = Arc::new(Crew::new());
        let workers = [worker(&crew, 1), worker(&crew, 1)];
        let threads = lead(&crew, 1);
        assert_eq!(threads, 1 + workers.into_iter().map(|w| w.join().unwrap()).sum::<usize>());
    });
}

#[test]
fn of_two_leaders_at_a_time_one_works_alone() {
    check(3, || {
        let crew = Arc::new(Crew::new());
        let joined = worker(&crew, 1);
        let other = {
            let crew = crew.clone();
            thread::spawn(move || lead(&crew, 1))
        };
        let threads = lead(&crew, 2) + other.join().unwrap();
        assert_eq!(threads, 2 + joined.join().unwrap());
    });
}

#[test]
fn a_panic_of_a_worker_reaches_the_leader() {
    check(5, || {
        let crew = Arc::new(Crew::new());
        let worker = {
            let crew = crew.clone();
            // `resume_unwind` prints nothing
            thread::spawn(move || panic::catch_unwind(panic::AssertUnwindSafe(|| crew.follow(&mut 0))).is_err())
        };
        let entered = AtomicUsize::new(0);
        let leader = thread::current().id();
        let work = || {
            entered.fetch_add(1, Ordering::Relaxed);
            if thread::current().id() != leader {
                panic::resume_unwind(Box::new(()));
            }
        };
        let led = panic::catch_unwind(panic::AssertUnwindSafe(|| crew.lead(&work, || (), |_| thread::yield_now())));
        let failed = worker.join().unwrap();
        assert_eq!(led.is_err(), failed);
        assert_eq!(entered.load(Ordering::Relaxed), 1 + usize::from(failed));
    });
}

//! A thread pool for tests.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};

use starling::kernels::crew::Crew;
use starling::pool::Pool;

/// A pool of the caller and spinning threads; on targets without threads the caller does all the work.
pub struct Threads {
    n: usize,
    crew: Arc<Crew>,
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Threads {
    /// `n` threads, the caller included.
    pub fn new(n: usize) -> Threads {
        let (crew, stop) = (Arc::new(Crew::new()), Arc::new(AtomicBool::new(false)));
        let spawned = if cfg!(target_family = "wasm") { 0 } else { n - 1 };
        let threads = (0..spawned).map(|_| {
            let (crew, stop) = (Arc::clone(&crew), Arc::clone(&stop));
            thread::spawn(move || {
                let mut seen = 0;
                while !stop.load(Ordering::Relaxed) {
                    if !crew.follow(&mut seen) {
                        thread::yield_now();
                    }
                }
            })
        });
        let threads = threads.collect();
        Threads { n, crew, stop, threads }
    }
}

impl Pool for Threads {
    fn threads(&self) -> usize {
        self.n
    }

    fn broadcast(&self, work: &(dyn Fn() + Sync)) {
        self.crew.lead(work, || {}, |_| thread::yield_now());
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for t in self.threads.drain(..) {
            // the leader has already seen a worker's panic
            let _ = t.join();
        }
    }
}

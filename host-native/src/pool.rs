//! Threads for the engine: they spin a moment for the next operation, then yield, then sleep.

use std::fs;
use std::num::NonZero;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{self, JoinHandle};

use starling::kernels::crew::Crew;
use starling::pool::Pool;

/// Looks at the gate before a thread yields its core: some tens of microseconds, longer than the serial steps between
/// two operations of a token.
const SPINS: u32 = 4_000;
/// Times a thread yields before it sleeps: about a millisecond on an idle machine.
const YIELDS: u32 = 1_000;

/// Threads of a pool, at most; the engine gives no work to more.
pub const MAX_THREADS: usize = 64;

/// The caller and `threads - 1` threads of its own.
pub struct ThreadPool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    crew: Crew,
    sleepers: AtomicUsize,
    stop: AtomicBool,
    lock: Mutex<()>,
    bell: Condvar,
}

impl ThreadPool {
    /// # Errors
    /// If the system gives no more threads.
    pub fn new(threads: usize) -> std::io::Result<ThreadPool> {
        let shared = Arc::new(Shared {
            crew: Crew::new(),
            sleepers: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            lock: Mutex::new(()),
            bell: Condvar::new(),
        });
        let mut pool = ThreadPool { shared, threads: Vec::new() };
        for i in 1..threads {
            let shared = Arc::clone(&pool.shared);
            let worker = thread::Builder::new().name(format!("starling-{i}")).spawn(move || shared.work())?;
            pool.threads.push(worker);
        }
        Ok(pool)
    }
}

impl Shared {
    fn work(&self) {
        let mut seen = 0;
        let mut idle = 0;
        while !self.stop.load(Ordering::Relaxed) {
            if self.crew.follow(&mut seen) {
                idle = 0;
            } else if idle < SPINS {
                std::hint::spin_loop();
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

    fn sleep(&self) {
        let mut guard = self.lock.lock().unwrap_or_else(|e| e.into_inner());
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        // the leader opens the gate, then looks for sleepers: either it sees this one, or this one sees the gate
        while !self.crew.is_open() && !self.stop.load(Ordering::SeqCst) {
            guard = self.bell.wait(guard).unwrap_or_else(|e| e.into_inner());
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    fn wake(&self) {
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            let _guard = self.lock.lock().unwrap_or_else(|e| e.into_inner());
            self.bell.notify_all();
        }
    }
}

impl Pool for ThreadPool {
    fn threads(&self) -> usize {
        self.threads.len() + 1
    }

    fn broadcast(&self, work: &(dyn Fn() + Sync)) {
        self.shared.crew.lead(
            work,
            || self.shared.wake(),
            |turns| if turns < SPINS { std::hint::spin_loop() } else { thread::yield_now() },
        );
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        {
            let _guard = self.shared.lock.lock().unwrap_or_else(|e| e.into_inner());
            self.shared.bell.notify_all();
        }
        for t in self.threads.drain(..) {
            // a worker's panic was already reported to the leader
            let _ = t.join();
        }
    }
}

/// Threads to use when none are asked for: physical cores, within the CPUs and the quota this process is allowed.
pub fn default_threads() -> usize {
    let (allowed, cores) = cpus();
    cores.map_or(allowed, |cores| allowed.min(cores)).clamp(1, MAX_THREADS)
}

/// CPUs that this process is allowed (cpuset, affinity and quota of its control group), and physical cores if known.
pub fn cpus() -> (usize, Option<usize>) {
    (thread::available_parallelism().map_or(1, NonZero::get), physical_cores())
}

/// Distinct cores among the online CPUs, on Linux.
fn physical_cores() -> Option<usize> {
    let mut cores = std::collections::BTreeSet::new();
    for entry in fs::read_dir("/sys/devices/system/cpu").ok()? {
        let topology = entry.ok()?.path().join("topology");
        // the list of sibling threads names the core, the same on each of them
        if let Ok(siblings) = fs::read_to_string(topology.join("thread_siblings_list")) {
            cores.insert(siblings);
        }
    }
    (!cores.is_empty()).then_some(cores.len())
}

#[cfg(test)]
mod tests {
    use super::*;
    use starling::kernels::tasks;
    use std::time::Duration;

    #[test]
    fn every_task_once_awake_or_asleep() {
        for threads in [1, 2, 3, 5] {
            let pool = ThreadPool::new(threads).unwrap();
            for round in 0..2_000 {
                let mut hits = vec![0u8; 37];
                tasks::chunks(&pool, &mut hits, 1, &|_, hit, _| hit[0] += 1);
                assert!(hits.iter().all(|&h| h == 1), "{threads} threads, round {round}");
                if round % 500 == 499 {
                    thread::sleep(Duration::from_millis(20));
                }
            }
        }
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let pool = ThreadPool::new(3).unwrap();
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            tasks::run(&pool, 64, &|i, _| assert!(i != 40, "task 40"));
        }));
        assert!(result.is_err());
        let mut hits = vec![0u8; 64];
        tasks::chunks(&pool, &mut hits, 1, &|_, hit, _| hit[0] += 1);
        assert!(hits.iter().all(|&h| h == 1));
    }
}

//! The threads that the command lends the engine.

use std::fs;
use std::num::NonZero;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use starling::kernels::standby::Standby;
pub use starling::pool::MAX_THREADS;
use starling::pool::Pool;

/// The caller and `threads - 1` threads of its own.
pub struct ThreadPool {
    standby: Arc<Standby>,
    threads: Vec<JoinHandle<()>>,
}

impl ThreadPool {
    /// # Errors
    /// If the system gives no more threads.
    pub fn new(threads: usize) -> std::io::Result<ThreadPool> {
        let mut pool = ThreadPool { standby: Arc::new(Standby::new()), threads: Vec::new() };
        for i in 1..threads {
            let standby = Arc::clone(&pool.standby);
            let thread = thread::Builder::new().name(format!("starling-{i}")).spawn(move || standby.follow())?;
            pool.threads.push(thread);
        }
        Ok(pool)
    }
}

impl Pool for ThreadPool {
    fn threads(&self) -> usize {
        self.threads.len() + 1
    }

    fn broadcast(&self, work: &(dyn Fn() + Sync)) {
        self.standby.lead(work);
    }
}

impl Drop for ThreadPool {
    fn drop(&mut self) {
        self.standby.end();
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

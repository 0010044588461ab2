//! The thread pool for the engine, and the default number of threads.

use std::collections::BTreeSet;
use std::fs;
use std::num::NonZero;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use starling::kernels::standby::Standby;
pub use starling::pool::MAX_THREADS;
use starling::pool::Pool;

/// The calling thread and `threads - 1` worker threads.
pub struct ThreadPool {
    standby: Arc<Standby>,
    threads: Vec<JoinHandle<()>>,
}

impl ThreadPool {
    /// # Errors
    /// If the system cannot start a thread.
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
            // the panic of a worker was already raised on the calling thread
            let _ = t.join();
        }
    }
}

/// Default number of threads: the physical cores that affinity and CPU quota allow.
pub fn default_threads() -> usize {
    let (allowed, cores) = cpus();
    cores.map_or(allowed, |cores| allowed.min(cores)).clamp(1, MAX_THREADS)
}

/// Number of NUMA nodes with CPUs, at least 1 (Linux). Source:
/// <https://docs.kernel.org/admin-guide/numastat.html>, directories of `/sys/devices/system/node`.
pub fn numa_nodes() -> usize {
    let list = fs::read_to_string("/sys/devices/system/node/has_cpu").unwrap_or_default();
    cpu_list(list.trim()).map_or(1, |nodes| nodes.len().max(1))
}

/// Number of CPUs that affinity, cpuset and quota allow, and the number of physical cores among them, if known.
pub fn cpus() -> (usize, Option<usize>) {
    (thread::available_parallelism().map_or(1, NonZero::get), physical_cores())
}

/// Physical cores among the CPUs that this process may run on (Linux). Source: proc_pid_status(5), and
/// <https://docs.kernel.org/admin-guide/cputopology.html>.
fn physical_cores() -> Option<usize> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let allowed = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?;
    distinct_cores(allowed.trim(), |cpu| {
        fs::read_to_string(format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")).ok()
    })
}

/// Physical cores among a CPU list such as `0-3,8`. CPUs with the same list of sibling threads share a core.
fn distinct_cores(cpus: &str, siblings: impl Fn(usize) -> Option<String>) -> Option<usize> {
    let cores: Option<BTreeSet<String>> = cpu_list(cpus)?.into_iter().map(siblings).collect();
    Some(cores?.len())
}

/// The numbers of a list such as `0-3,8`.
fn cpu_list(text: &str) -> Option<Vec<usize>> {
    let mut all = Vec::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        all.extend(first.parse::<usize>().ok()?..=last.parse().ok()?);
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use starling::kernels::tasks;
    use std::time::Duration;

    #[test]
    fn cores_are_counted_among_the_cpus_that_are_allowed() {
        // four cores of two threads each: CPU n and n + 4
        let siblings = |cpu: usize| (cpu < 8).then(|| format!("{},{}", cpu % 4, cpu % 4 + 4));
        for (cpus, cores) in [
            ("0-7", Some(4)),
            ("0-1,4-5", Some(2)),
            ("3,7", Some(1)),
            ("0,1,6", Some(3)),
            ("0-8", None),
            ("", None),
            ("a-b", None),
        ] {
            assert_eq!(distinct_cores(cpus, siblings), cores, "{cpus}");
        }
    }

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

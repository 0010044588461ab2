//! The thread pool for the engine, and the default number of threads.

use std::collections::BTreeSet;
use std::num::NonZero;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::{fmt, fs};

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
        ThreadPool::on(threads, None)
    }

    /// Threads that run on some CPUs only. The caller pins itself.
    ///
    /// # Errors
    /// If the system cannot start a thread.
    pub fn on(threads: usize, cpus: Option<&CpuSet>) -> std::io::Result<ThreadPool> {
        let mut pool = ThreadPool { standby: Arc::new(Standby::new()), threads: Vec::new() };
        for i in 1..threads {
            let (standby, cpus) = (Arc::clone(&pool.standby), cpus.cloned());
            let thread = thread::Builder::new().name(format!("starling-{i}")).spawn(move || {
                if let Some(cpus) = cpus {
                    cpus.pin();
                }
                standby.follow();
            })?;
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

/// CPUs that threads may run on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CpuSet(Vec<usize>);

impl CpuSet {
    /// Largest number of a CPU, as in Linux.
    const MAX: usize = 8191;

    /// A list such as `0-3,8`; `None` if it is none.
    pub fn parse(list: &str) -> Option<CpuSet> {
        let cpus = cpu_list(list)?;
        (!cpus.is_empty() && cpus.iter().all(|cpu| *cpu <= CpuSet::MAX)).then_some(CpuSet(cpus))
    }

    /// Number of physical cores; of CPUs, if the system does not tell.
    pub fn n_cores(&self) -> usize {
        distinct_cores(&self.0, thread_siblings).unwrap_or(self.0.len())
    }

    /// Lets the calling thread run on these CPUs only. Where that is not possible, it is logged, and the thread runs
    /// anywhere.
    pub fn pin(&self) {
        #[cfg(target_os = "linux")]
        {
            let mut cpus = rustix::thread::CpuSet::new();
            let known = self.0.iter().filter(|cpu| **cpu < rustix::thread::CpuSet::MAX_CPU);
            known.for_each(|cpu| cpus.set(*cpu));
            if let Err(e) = rustix::thread::sched_setaffinity(None, &cpus) {
                tracing::warn!("a thread cannot run on CPUs {self}: {e}; it runs on any");
            }
        }
    }
}

impl fmt::Display for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, range) in self.0.chunk_by(|a, b| a + 1 == *b).enumerate() {
            let comma = if i > 0 { "," } else { "" };
            match range {
                [first, .., last] => write!(f, "{comma}{first}-{last}")?,
                _ => write!(f, "{comma}{}", range[0])?,
            }
        }
        Ok(())
    }
}

/// CPUs that this process may use of each NUMA node that has some (Linux); none where a quota allows fewer CPUs than
/// affinity and cpuset do. Source: <https://docs.kernel.org/admin-guide/numastat.html>, directories of
/// `/sys/devices/system/node`.
pub fn numa_nodes() -> Vec<CpuSet> {
    let read = |path: &str| fs::read_to_string(format!("/sys/devices/system/node/{path}")).ok();
    let allowed = allowed_cpus().unwrap_or_default();
    if thread::available_parallelism().map_or(1, NonZero::get) < allowed.len() {
        return Vec::new();
    }
    let nodes = read("has_cpu").and_then(|list| cpu_list(list.trim())).unwrap_or_default();
    let cpus = nodes.into_iter().filter_map(|node| cpu_list(read(&format!("node{node}/cpulist"))?.trim()));
    of_nodes(cpus, &allowed)
}

/// The allowed CPUs of each node that has some.
fn of_nodes(nodes: impl Iterator<Item = Vec<usize>>, allowed: &[usize]) -> Vec<CpuSet> {
    let usable = nodes.map(|node| CpuSet(node.into_iter().filter(|cpu| allowed.contains(cpu)).collect()));
    usable.filter(|cpus| !cpus.0.is_empty()).collect()
}

/// Number of CPUs that affinity, cpuset and quota allow, and the number of physical cores among them, if known.
pub fn cpus() -> (usize, Option<usize>) {
    (thread::available_parallelism().map_or(1, NonZero::get), physical_cores())
}

/// Physical cores among the CPUs that this process may run on (Linux). Source: proc_pid_status(5), and
/// <https://docs.kernel.org/admin-guide/cputopology.html>.
fn physical_cores() -> Option<usize> {
    distinct_cores(&allowed_cpus()?, thread_siblings)
}

/// CPUs that this process may run on (Linux).
fn allowed_cpus() -> Option<Vec<usize>> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    cpu_list(status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:"))?.trim())
}

/// The CPUs that share a core with a CPU, as a list (Linux).
fn thread_siblings(cpu: usize) -> Option<String> {
    fs::read_to_string(format!("/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")).ok()
}

/// Physical cores among CPUs. CPUs with the same list of sibling threads share a core.
fn distinct_cores(cpus: &[usize], siblings: impl Fn(usize) -> Option<String>) -> Option<usize> {
    let cores: Option<BTreeSet<String>> = cpus.iter().copied().map(siblings).collect();
    Some(cores?.len())
}

/// Maximum numbers in a list.
const MAX_LIST: usize = 8192;

/// The numbers of a list such as `0-3,8`, in ascending order.
fn cpu_list(text: &str) -> Option<Vec<usize>> {
    let mut all = BTreeSet::new();
    for part in text.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last): (usize, usize) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
        if last.checked_sub(first)? > MAX_LIST || all.len() > MAX_LIST {
            return None;
        }
        all.extend(first..=last);
    }
    Some(all.into_iter().collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use starling::kernels::tasks;
    use std::time::Duration;

    #[test]
    fn nodes_have_only_cpus_that_are_allowed() {
        let nodes = || [vec![0, 1, 4, 5], vec![2, 3, 6, 7]].into_iter();
        let sets = |allowed: &[usize]| of_nodes(nodes(), allowed).iter().map(CpuSet::to_string).collect::<Vec<_>>();
        assert_eq!(sets(&[0, 1, 2, 3, 4, 5, 6, 7]), ["0-1,4-5", "2-3,6-7"]);
        assert_eq!(sets(&[1, 2]), ["1", "2"]);
        assert_eq!(sets(&[6, 7]), ["6-7"]);
        assert!(sets(&[]).is_empty());
    }

    #[test]
    fn threads_run_on_their_cpus() {
        let allowed = || {
            let status = fs::read_to_string("/proc/thread-self/status").unwrap();
            let list =
                status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap().trim().to_string();
            CpuSet::parse(&list).unwrap()
        };
        let one = CpuSet(allowed().0[..1].to_vec());
        let inner = one.clone();
        thread::spawn(move || {
            inner.pin();
            assert_eq!(allowed(), inner);
            let pool = ThreadPool::on(3, Some(&inner)).unwrap();
            let seen = std::sync::Mutex::new(Vec::new());
            // a thread that comes late finds nothing to do
            for _ in 0..20 {
                pool.broadcast(&|| {
                    seen.lock().unwrap().push(allowed());
                    thread::sleep(Duration::from_millis(1));
                });
            }
            assert!(seen.into_inner().unwrap().iter().all(|cpus| *cpus == inner));
        })
        .join()
        .unwrap();
        for (list, shown) in [("3,0-1,2,8", "0-3,8"), ("7", "7"), ("0,2,4-5", "0,2,4-5")] {
            assert_eq!(CpuSet::parse(list).unwrap().to_string(), shown);
        }
        for list in ["", "a", "3-1", "0-99999999", "1,,2", "9000", "0-18446744073709551615"] {
            assert_eq!(CpuSet::parse(list), None, "{list}");
        }
    }

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
            assert_eq!(cpu_list(cpus).and_then(|cpus| distinct_cores(&cpus, siblings)), cores, "{cpus}");
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

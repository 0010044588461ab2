//! Choice of the worker for a request.
//!
//! Requests of a model wait in one queue, in fair order. A worker with room asks for the next one; the strategy says
//! whether it goes to this worker or to another that has room too. So no worker is idle while a request waits for it
//! alone, and the order of the queue holds whatever the number of workers.

use std::collections::HashMap;
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::status::{WorkerHandle, WorkerState};
use crate::config::value::Strategy;
use crate::schedule::queue::{Job, SequenceGroup};

/// Maximum number of prefixes known of a worker.
const MAX_PREFIXES: usize = 1 << 16;

/// The workers of a model, and how one is chosen.
pub struct Dispatcher {
    inner: Mutex<Inner>,
    /// Number of workers.
    n: AtomicUsize,
}

struct Inner {
    strategy: Strategy,
    workers: Vec<Candidate>,
    /// Worker that was chosen last.
    last: u32,
}

struct Candidate {
    handle: WorkerHandle,
    prefixes: Prefixes,
}

/// What a worker looks like to a strategy.
#[derive(Debug, Clone, Copy)]
struct Load {
    id: u32,
    running: usize,
    free_bytes: usize,
    /// Pages of the request's prompt in the worker's prefix cache.
    cached_pages: usize,
}

impl Dispatcher {
    pub fn new(strategy: Strategy) -> Dispatcher {
        let inner = Inner { strategy, workers: Vec::new(), last: u32::MAX };
        Dispatcher { inner: Mutex::new(inner), n: AtomicUsize::new(0) }
    }

    pub fn strategy(&self) -> Strategy {
        self.lock().strategy
    }

    pub fn set_strategy(&self, strategy: Strategy) {
        self.lock().strategy = strategy;
    }

    pub fn add(&self, handle: WorkerHandle) {
        let mut inner = self.lock();
        inner.workers.push(Candidate { handle, prefixes: Prefixes::default() });
        self.n.store(inner.workers.len(), Relaxed);
    }

    pub fn remove(&self, id: u32) {
        let mut inner = self.lock();
        inner.workers.retain(|worker| worker.handle.id != id);
        self.n.store(inner.workers.len(), Relaxed);
    }

    /// All workers that have not been removed.
    pub fn workers(&self) -> Vec<WorkerHandle> {
        self.lock().workers.iter().map(|worker| worker.handle.clone()).collect()
    }

    /// Whether there is a choice.
    pub fn has_several(&self) -> bool {
        self.n.load(Relaxed) > 1
    }

    /// Whether a job goes to the worker `id`, which has room for it.
    pub fn is_for(&self, job: &Job, id: u32) -> bool {
        if !self.has_several() {
            return true;
        }
        let inner = self.lock();
        match job.group.worker().filter(|id| inner.is_alive(*id)) {
            // the prompt is in the cache of the worker of the first answer
            Some(worker) => worker == id,
            None => inner.choose(&job.group).is_none_or(|chosen| chosen == id),
        }
    }

    /// Whether a worker takes jobs, now or once it has restarted.
    pub fn is_alive(&self, id: u32) -> bool {
        self.lock().is_alive(id)
    }

    /// Notes that a worker has taken a job.
    pub fn taken(&self, job: &Job, id: u32) {
        job.group.set_worker(Some(id));
        let mut inner = self.lock();
        inner.last = id;
        if let Some(worker) = inner.workers.iter_mut().find(|worker| worker.handle.id == id) {
            worker.prefixes.insert(job.group.prefix());
        }
    }

    /// Forgets what a worker had in its cache.
    pub fn clear_cache(&self, id: u32) {
        if let Some(worker) = self.lock().workers.iter_mut().find(|worker| worker.handle.id == id) {
            worker.prefixes = Prefixes::default();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    /// A worker that drains or has ended takes nothing more.
    fn is_alive(&self, id: u32) -> bool {
        let goes_on = |state| !matches!(state, WorkerState::Draining | WorkerState::Ended);
        self.workers.iter().any(|worker| worker.handle.id == id && goes_on(worker.handle.status.state()))
    }

    fn choose(&self, group: &SequenceGroup) -> Option<u32> {
        let with_room = self.workers.iter().filter(|worker| worker.handle.status.has_room());
        let loads: Vec<Load> = with_room
            .map(|worker| {
                let kv = worker.handle.status.kv();
                Load {
                    id: worker.handle.id,
                    running: worker.handle.status.running(),
                    free_bytes: kv.free_bytes + kv.cached_bytes,
                    cached_pages: match self.strategy {
                        Strategy::PrefixAware => worker.prefixes.longest(group.prefix()),
                        _ => 0,
                    },
                }
            })
            .collect();
        choose(self.strategy, &loads, self.last)
    }
}

/// The worker of a request among those with room; `last` was chosen before. Equal workers are taken by their id.
fn choose(strategy: Strategy, loads: &[Load], last: u32) -> Option<u32> {
    let after = |id: u32| id.wrapping_sub(last.wrapping_add(1));
    let best = match strategy {
        Strategy::RoundRobin => loads.iter().min_by_key(|load| after(load.id)),
        Strategy::LeastLoaded => loads.iter().min_by_key(|load| (load.running, after(load.id))),
        Strategy::MemoryAware => loads.iter().min_by_key(|load| (std::cmp::Reverse(load.free_bytes), after(load.id))),
        Strategy::PrefixAware => {
            loads.iter().min_by_key(|load| (std::cmp::Reverse(load.cached_pages), load.running, after(load.id)))
        }
    };
    best.map(|load| load.id)
}

/// Prefixes that a worker has computed, with the time of their last use. The cache itself may have evicted some.
#[derive(Debug, Default)]
struct Prefixes {
    last_used: HashMap<u64, u64>,
    now: u64,
}

impl Prefixes {
    fn insert(&mut self, hashes: &[u64]) {
        self.now += 1;
        let now = self.now;
        self.last_used.extend(hashes.iter().map(|hash| (*hash, now)));
        if self.last_used.len() > MAX_PREFIXES {
            let mut ages: Vec<u64> = self.last_used.values().copied().collect();
            let (_, median, _) = ages.select_nth_unstable(MAX_PREFIXES / 2);
            let median = *median;
            self.last_used.retain(|_, used| *used > median);
        }
    }

    /// Number of the hashes up to the first that is unknown.
    fn longest(&self, hashes: &[u64]) -> usize {
        hashes.iter().take_while(|hash| self.last_used.contains_key(hash)).count()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::{any, prop, prop_assert, prop_assert_eq, proptest};
    use starling::engine::Request;

    use super::super::status::WorkerStatus;

    use super::*;

    fn loads() -> impl proptest::strategy::Strategy<Value = Vec<(usize, usize, usize)>> {
        prop::collection::vec((0usize..9, 0usize..9, 0usize..9), 1..6)
    }

    fn all(values: &[(usize, usize, usize)]) -> Vec<Load> {
        let load = |(id, v): (usize, &(usize, usize, usize))| Load {
            id: id as u32,
            running: v.0,
            free_bytes: v.1,
            cached_pages: v.2,
        };
        values.iter().enumerate().map(load).collect()
    }

    fn chosen(strategy: Strategy, loads: &[Load], last: u32) -> Load {
        let id = choose(strategy, loads, last).unwrap();
        *loads.iter().find(|load| load.id == id).unwrap()
    }

    const ROOM: usize = 4;

    fn handle(id: u32) -> WorkerHandle {
        WorkerHandle { id, status: Arc::new(WorkerStatus::new(ROOM)) }
    }

    fn dispatcher(strategy: Strategy, n: usize) -> Dispatcher {
        let dispatcher = Dispatcher::new(strategy);
        (0..n as u32).for_each(|id| dispatcher.add(handle(id)));
        dispatcher
    }

    fn group(token: u32) -> SequenceGroup {
        SequenceGroup::new(Request::new(vec![token; 40]))
    }

    fn strategies() -> impl proptest::strategy::Strategy<Value = Strategy> {
        use Strategy::{LeastLoaded, MemoryAware, PrefixAware, RoundRobin};
        prop::sample::select(vec![RoundRobin, LeastLoaded, MemoryAware, PrefixAware])
    }

    /// The workers that get `n` requests in turn, none of which ends.
    fn route(dispatcher: &Dispatcher, n: usize) -> Vec<Option<u32>> {
        let one = |i| {
            let mut inner = dispatcher.lock();
            let id = inner.choose(&group(i as u32))?;
            inner.last = id;
            let status = inner.workers.iter().find(|worker| worker.handle.id == id)?.handle.status.clone();
            status.set_running(status.running() + 1, ROOM);
            Some(id)
        };
        (0..n).map(one).collect()
    }

    proptest! {
        #[test]
        fn least_loaded_routing_takes_a_worker_with_the_fewest_requests(values in loads(), last in 0u32..6) {
            let loads = all(&values);
            let least = loads.iter().map(|load| load.running).min();
            prop_assert_eq!(Some(chosen(Strategy::LeastLoaded, &loads, last).running), least);
        }

        #[test]
        fn memory_aware_routing_takes_a_worker_with_the_most_free_memory(values in loads(), last in 0u32..6) {
            let loads = all(&values);
            let most = loads.iter().map(|load| load.free_bytes).max();
            prop_assert_eq!(Some(chosen(Strategy::MemoryAware, &loads, last).free_bytes), most);
        }

        #[test]
        fn prefix_aware_routing_takes_the_longest_prefix_then_the_least_loaded(values in loads(), last in 0u32..6) {
            let loads = all(&values);
            let best = loads.iter().map(|load| (std::cmp::Reverse(load.cached_pages), load.running)).min();
            let load = chosen(Strategy::PrefixAware, &loads, last);
            prop_assert_eq!(Some((std::cmp::Reverse(load.cached_pages), load.running)), best);
        }

        #[test]
        fn unhealthy_removal(strategy in strategies(), states in prop::collection::vec(any::<bool>(), 1..6)) {
            let dispatcher = dispatcher(strategy, states.len());
            for (worker, healthy) in dispatcher.workers().iter().zip(&states) {
                worker.status.set_state(if *healthy { WorkerState::Healthy } else { WorkerState::Restarting });
            }
            let healthy = states.iter().filter(|healthy| **healthy).count();
            let routed = route(&dispatcher, 2 * states.len() * ROOM);
            prop_assert!(routed.iter().flatten().all(|id| states[*id as usize]));
            // all that the healthy ones have room for, and no more
            prop_assert_eq!(routed.iter().flatten().count(), healthy * ROOM);
        }

        #[test]
        fn recovery_reinstatement(strategy in strategies(), n in 2usize..6, failed in 0u32..6) {
            let dispatcher = dispatcher(strategy, n);
            let failed = failed % n as u32;
            let workers = dispatcher.workers();
            workers[failed as usize].status.set_state(WorkerState::Restarting);
            prop_assert!(!route(&dispatcher, n).contains(&Some(failed)));
            workers[failed as usize].status.set_state(WorkerState::Healthy);
            prop_assert!(route(&dispatcher, n * ROOM).contains(&Some(failed)));
        }

        #[test]
        fn worker_count(changes in prop::collection::vec((any::<bool>(), 0u32..8), 0..40)) {
            let dispatcher = Dispatcher::new(Strategy::LeastLoaded);
            let mut expected = std::collections::BTreeSet::new();
            for (adds, id) in changes {
                if adds && expected.insert(id) {
                    dispatcher.add(handle(id));
                } else if !adds {
                    expected.remove(&id);
                    dispatcher.remove(id);
                }
                let found: std::collections::BTreeSet<u32> = dispatcher.workers().iter().map(|w| w.id).collect();
                prop_assert_eq!(&found, &expected);
                prop_assert_eq!(dispatcher.has_several(), expected.len() > 1);
            }
        }

        #[test]
        fn batch_completion(strategy in strategies(), n in 1usize..5, n_requests in 0usize..60) {
            let dispatcher = dispatcher(strategy, n);
            let (mut done, mut left) = (0, n_requests);
            while left > 0 {
                let routed = route(&dispatcher, left).into_iter().flatten().count();
                prop_assert!(routed > 0, "{left} requests wait, and no worker takes one");
                left -= routed;
                done += routed;
                // the batch ends
                dispatcher.workers().iter().for_each(|worker| worker.status.set_running(0, ROOM));
            }
            prop_assert_eq!(done, n_requests);
        }

        #[test]
        fn failure_isolation(strategy in strategies(), n in 2usize..5, failed in 0u32..5) {
            let dispatcher = dispatcher(strategy, n);
            let failed = failed % n as u32;
            route(&dispatcher, n * ROOM / 2);
            let workers = dispatcher.workers();
            let running = |id: usize| workers[id].status.running();
            let before: Vec<usize> = (0..n).map(running).collect();
            workers[failed as usize].status.set_state(WorkerState::Restarting);
            // its requests go to the others, whose own stay
            let routed = route(&dispatcher, before[failed as usize]);
            prop_assert!(routed.iter().all(|id| id.is_some_and(|id| id != failed)));
            for id in (0..n).filter(|id| *id != failed as usize) {
                let gained = routed.iter().filter(|to| **to == Some(id as u32)).count();
                prop_assert_eq!(running(id), before[id] + gained);
            }
        }

        #[test]
        fn round_robin_visits_every_worker_in_turn(n in 1usize..6, rounds in 1usize..4) {
            let loads = all(&vec![(0, 0, 0); n]);
            let mut last = u32::MAX;
            for i in 0..n * rounds {
                last = chosen(Strategy::RoundRobin, &loads, last).id;
                prop_assert_eq!(last as usize, i % n);
            }
        }
    }

    #[test]
    fn old_prefixes_are_dropped_and_new_ones_stay() {
        let mut prefixes = Prefixes::default();
        for i in 0..3 * MAX_PREFIXES as u64 / 4 {
            prefixes.insert(&[2 * i, 2 * i + 1]);
            assert!(prefixes.last_used.len() <= MAX_PREFIXES);
        }
        let last = 3 * MAX_PREFIXES as u64 / 2 - 2;
        assert_eq!((prefixes.longest(&[last, last + 1]), prefixes.longest(&[0, last])), (2, 0));
    }
}

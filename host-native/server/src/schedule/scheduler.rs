//! The queue of requests: limits, deadlines and the next request to start; policy without clocks, threads or HTTP.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;
use std::time::Instant;

use super::turns::Turns;
pub use super::turns::{Flow, JobId, Priority};
use crate::sync::Arc;

/// Limits of a queue. The tenant's limits are off at 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// High watermark: at this length new requests are refused.
    pub high: usize,
    /// Low watermark: at this length they are accepted again.
    pub low: usize,
    /// Requests of a tenant, queued and running.
    pub tenant_requests: usize,
    /// Tokens of a tenant's queued requests.
    pub tenant_tokens: usize,
}

impl Limits {
    /// Limits of a queue whose requests have up to `n` entries.
    pub fn times(self, n: usize) -> Limits {
        let times = |limit: usize| limit.saturating_mul(n.max(1));
        Limits { high: times(self.high), low: times(self.low), tenant_requests: times(self.tenant_requests), ..self }
    }

    /// Lowers `low` to less than `high`.
    fn ordered(self) -> Limits {
        Limits { low: self.low.min(self.high.saturating_sub(1)), ..self }
    }
}

/// The limit that a request exceeds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    #[error("the queue is full: {waiting} requests are waiting; try again later")]
    Full { waiting: usize },
    #[error(
        "{found} requests of this tenant are queued or running, expected fewer than {limit} (--tenant-requests); try again later"
    )]
    TenantRequests { found: usize, limit: usize },
    #[error(
        "this tenant would have {found} tokens queued with this request, expected at most {limit} (--tenant-tokens); try again later"
    )]
    TenantTokens { found: usize, limit: usize },
}

impl Refused {
    /// The label `reason` in metrics, and the error code.
    pub const fn name(self) -> &'static str {
        match self {
            Refused::Full { .. } => "queue_full",
            Refused::TenantRequests { .. } => "tenant_requests",
            Refused::TenantTokens { .. } => "tenant_tokens",
        }
    }
}

/// Queued requests. The cost of each call is at most logarithmic in their number.
#[derive(Debug)]
pub struct Scheduler<J> {
    limits: Limits,
    jobs: HashMap<JobId, Queued<J>>,
    next_id: JobId,
    /// Waiting requests, by [`Priority::index`].
    depth: [usize; 3],
    turns: Turns,
    /// Requests that had their turn and could not start; they come before all others, oldest first.
    held: BTreeSet<JobId>,
    /// Deadlines of the queued requests, earliest first.
    deadlines: BTreeSet<(Instant, JobId)>,
    tenants: BTreeMap<Arc<str>, TenantLoad>,
    /// Whether the high watermark was reached, and since then not the low one.
    shedding: bool,
    /// Requests removed since the last sweep of the queues.
    removed: usize,
    /// Entries visited so far: the cost of calls, for tests.
    visited: Cell<usize>,
}

impl<J> Queued<J> {
    /// Moves the deadline: a request that has run already no longer waits for its first turn.
    pub fn extend_deadline(&mut self, deadline: Instant) {
        self.deadline = deadline;
    }
}

/// A request with what the scheduler knows of it.
#[derive(Debug)]
pub struct Queued<J> {
    pub job: J,
    pub tenant: Arc<str>,
    id: JobId,
    priority: Priority,
    tokens: usize,
    deadline: Instant,
}

#[derive(Debug, Default, Clone, Copy)]
struct TenantLoad {
    waiting: usize,
    tokens: usize,
    running: usize,
}

/// Minimum number of removed requests before a sweep.
const MIN_SWEEP: usize = 64;

impl<J> Scheduler<J> {
    /// Lowers `limits.low` to less than `limits.high`.
    pub fn new(limits: Limits) -> Scheduler<J> {
        Scheduler {
            limits: limits.ordered(),
            jobs: HashMap::new(),
            next_id: 0,
            depth: [0; 3],
            turns: Turns::default(),
            held: BTreeSet::new(),
            deadlines: BTreeSet::new(),
            tenants: BTreeMap::new(),
            shedding: false,
            removed: 0,
            visited: Cell::new(0),
        }
    }

    /// Enqueues all of `jobs` or none, and returns their ids. Each needs up to `tokens` tokens and may wait until
    /// `deadline`.
    ///
    /// # Errors
    /// The limit that is reached.
    pub fn enqueue(
        &mut self,
        flow: &Flow,
        tokens: usize,
        deadline: Instant,
        jobs: Vec<J>,
    ) -> Result<Range<JobId>, Refused> {
        let (n, limits) = (jobs.len(), self.limits);
        if self.is_full() {
            return Err(Refused::Full { waiting: self.waiting() });
        }
        let mut load = self.tenants.get(&flow.tenant).copied().unwrap_or_default();
        let found = load.waiting + load.running;
        if limits.tenant_requests > 0 && found + n > limits.tenant_requests {
            return Err(Refused::TenantRequests { found, limit: limits.tenant_requests });
        }
        load.waiting += n;
        load.tokens = load.tokens.saturating_add(tokens.saturating_mul(n));
        if limits.tenant_tokens > 0 && load.tokens > limits.tenant_tokens {
            return Err(Refused::TenantTokens { found: load.tokens, limit: limits.tenant_tokens });
        }
        self.tenants.insert(Arc::clone(&flow.tenant), load);
        let first = self.next_id;
        for job in jobs {
            let (id, tenant, priority) = (self.next_id, Arc::clone(&flow.tenant), flow.priority);
            self.next_id += 1;
            self.jobs.insert(id, Queued { job, tenant, id, priority, tokens, deadline });
            self.deadlines.insert((deadline, id));
        }
        let ids = first..self.next_id;
        self.depth[flow.priority.index()] += n;
        self.turns.add(flow, ids.clone());
        self.shedding |= self.waiting() >= limits.high;
        Ok(ids)
    }

    /// Changes the limits. Requests beyond them stay queued.
    pub fn set_limits(&mut self, limits: Limits) {
        self.limits = limits.ordered();
        self.shedding = self.waiting() >= limits.high || (self.shedding && self.waiting() > self.limits.low);
    }

    /// Whether new requests are refused for the queue's length.
    pub fn is_full(&self) -> bool {
        self.shedding
    }

    /// Removes the next request that is ready and returns it. It counts as running until [`Scheduler::release`] or
    /// [`Scheduler::put_back`]. Requests that have their turn before they are ready are held.
    pub fn take(&mut self, is_ready: impl Fn(&J) -> bool) -> Option<Queued<J>> {
        let (jobs, visited) = (&self.jobs, &self.visited);
        let is_ready = |id: &JobId| jobs.get(id).is_some_and(|queued| is_ready(&queued.job));
        let id = match self.held.iter().copied().find(is_ready) {
            Some(id) => {
                self.held.remove(&id);
                id
            }
            None => loop {
                let id = self.turns.next(&mut |id| is_queued(jobs, visited, *id))?;
                if is_ready(&id) {
                    break id;
                }
                self.held.insert(id);
            },
        };
        let queued = self.unlink(id)?;
        self.tenants.entry(Arc::clone(&queued.tenant)).or_default().running += 1;
        Some(queued)
    }

    /// Whether one of the requests that were put back is `wanted`.
    pub fn has_held(&self, wanted: impl Fn(&J) -> bool) -> bool {
        self.held.iter().any(|id| self.jobs.get(id).is_some_and(|queued| wanted(&queued.job)))
    }

    /// As [`Scheduler::take`], of the requests that were put back only.
    pub fn take_held(&mut self, wanted: impl Fn(&J) -> bool) -> Option<Queued<J>> {
        // then `take` finds it before it gives a turn to any other
        if self.has_held(&wanted) { self.take(wanted) } else { None }
    }

    /// Returns a request that was taken and cannot start now to the front of the queue.
    pub fn put_back(&mut self, queued: Queued<J>) {
        let load = self.tenants.entry(Arc::clone(&queued.tenant)).or_default();
        load.running = load.running.saturating_sub(1);
        load.waiting += 1;
        load.tokens = load.tokens.saturating_add(queued.tokens);
        self.depth[queued.priority.index()] += 1;
        self.held.insert(queued.id);
        self.deadlines.insert((queued.deadline, queued.id));
        self.jobs.insert(queued.id, queued);
        self.shedding |= self.waiting() >= self.limits.high;
    }

    /// Ends the running state of a request that was taken.
    pub fn release(&mut self, tenant: &Arc<str>) {
        if let Some(load) = self.tenants.get_mut(tenant) {
            load.running = load.running.saturating_sub(1);
        }
        self.drop_idle_tenant(tenant);
    }

    /// Removes a request if it is still queued.
    pub fn remove(&mut self, id: JobId) -> Option<J> {
        let queued = self.unlink(id)?;
        if !self.held.remove(&id) {
            self.turns.removed(queued.priority);
        }
        self.drop_idle_tenant(&queued.tenant);
        self.removed += 1;
        if self.removed > self.jobs.len() + MIN_SWEEP {
            self.removed = 0;
            let (jobs, visited) = (&self.jobs, &self.visited);
            self.turns.sweep(&mut |id| is_queued(jobs, visited, *id));
        }
        Some(queued.job)
    }

    /// Removes the requests whose deadline is before `now`.
    pub fn expired(&mut self, now: Instant) -> Vec<J> {
        let mut expired = Vec::new();
        while let Some((deadline, id)) = self.deadlines.first().copied()
            && deadline < now
        {
            expired.extend(self.remove(id));
        }
        expired
    }

    /// Removes all requests.
    pub fn drain(&mut self) -> Vec<J> {
        let ids: Vec<JobId> = self.deadlines.iter().map(|(_, id)| *id).collect();
        ids.into_iter().filter_map(|id| self.remove(id)).collect()
    }

    pub fn waiting(&self) -> usize {
        self.jobs.len()
    }

    /// Waiting requests that had their turn.
    pub fn held(&self) -> usize {
        self.held.len()
    }

    pub fn depth(&self, priority: Priority) -> usize {
        self.depth[priority.index()]
    }

    /// Removes a request from all but `turns` and `held`.
    fn unlink(&mut self, id: JobId) -> Option<Queued<J>> {
        self.visited.set(self.visited.get() + 1);
        let queued = self.jobs.remove(&id)?;
        self.deadlines.remove(&(queued.deadline, id));
        self.depth[queued.priority.index()] -= 1;
        self.shedding &= self.waiting() > self.limits.low;
        if let Some(load) = self.tenants.get_mut(&queued.tenant) {
            load.waiting -= 1;
            load.tokens = load.tokens.saturating_sub(queued.tokens);
        }
        Some(queued)
    }

    /// Removes the counters of a tenant without requests.
    fn drop_idle_tenant(&mut self, tenant: &Arc<str>) {
        if self.tenants.get(tenant).is_some_and(|load| load.waiting + load.running == 0) {
            self.tenants.remove(tenant);
        }
    }
}

/// Whether a request is still queued.
fn is_queued<J>(jobs: &HashMap<JobId, Queued<J>>, visited: &Cell<usize>, id: JobId) -> bool {
    visited.set(visited.get() + 1);
    jobs.contains_key(&id)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use proptest::prelude::*;

    use super::*;

    const OPEN: Limits = Limits { high: usize::MAX, low: usize::MAX, tenant_requests: 0, tenant_tokens: 0 };

    fn flow(tenant: &str, session: Option<&str>, priority: Priority) -> Flow {
        Flow { tenant: tenant.into(), share: 1, session: session.map(Into::into), priority, rank: priority }
    }

    fn later() -> Instant {
        Instant::now() + Duration::from_secs(3600)
    }

    fn order<J>(s: &mut Scheduler<J>) -> Vec<J> {
        std::iter::from_fn(|| s.take(|_| true).map(|queued| queued.job)).collect()
    }

    #[test]
    fn requests_without_session_keep_their_order() {
        let mut s = Scheduler::new(OPEN);
        for i in 0..20 {
            s.enqueue(&flow("a", None, Priority::Normal), 1, later(), vec![i]).unwrap();
        }
        assert_eq!(order(&mut s), (0..20).collect::<Vec<_>>());
    }

    #[test]
    fn tenants_take_turns_by_share_and_their_sessions_too() {
        let mut s = Scheduler::new(OPEN);
        let mut big = flow("big", Some("x"), Priority::Normal);
        big.share = 3;
        s.enqueue(&big, 1, later(), (0..8).map(|i| ("big x", i)).collect()).unwrap();
        let small = flow("small", Some("y"), Priority::Normal);
        s.enqueue(&small, 1, later(), (0..3).map(|i| ("small y", i)).collect()).unwrap();
        s.enqueue(&flow("small", Some("z"), Priority::Normal), 1, later(), vec![("small z", 0)]).unwrap();
        let names: Vec<&str> = order(&mut s).into_iter().map(|(name, _)| name).collect();
        let b = "big x";
        assert_eq!(names, [b, b, b, "small y", b, b, b, "small z", b, b, "small y", "small y"]);
    }

    #[test]
    fn urgent_requests_come_first_and_none_starves() {
        let mut s = Scheduler::new(OPEN);
        for (priority, n) in [(Priority::Low, 4), (Priority::High, 80)] {
            s.enqueue(&flow("a", None, priority), 1, later(), vec![priority; n]).unwrap();
        }
        let order = order(&mut s);
        let low: Vec<usize> = (0..84).filter(|i| order[*i] == Priority::Low).collect();
        assert!(low[0] >= 8, "{low:?}");
        assert!(low.iter().zip(1..).all(|(at, i)| *at < 17 * i), "{low:?}");
    }

    #[test]
    fn rank_orders_the_requests_of_a_tenant_and_changes_nothing_for_others() {
        let tenants = |ranked: bool| {
            let mut s = Scheduler::new(OPEN);
            for i in 0..60 {
                let rank = Priority::ALL[if ranked { i % 3 } else { 1 }];
                let (a, b) = (flow("a", None, Priority::Normal), flow("b", None, Priority::Normal));
                s.enqueue(&Flow { rank, ..a }, 1, later(), vec![("a", rank)]).unwrap();
                s.enqueue(&b, 1, later(), vec![("b", Priority::Normal)]).unwrap();
            }
            order(&mut s)
        };
        let (ranked, plain) = (tenants(true), tenants(false));
        let names = |order: &[(&'static str, Priority)]| order.iter().map(|(name, _)| *name).collect::<Vec<_>>();
        assert_eq!(names(&ranked), names(&plain));
        // among its own, urgent requests come first and none starves
        let of_a: Vec<Priority> = ranked.iter().filter(|(name, _)| *name == "a").map(|(_, rank)| *rank).collect();
        let last = |priority| of_a.iter().rposition(|rank| *rank == priority).unwrap();
        assert!(
            last(Priority::High) < last(Priority::Normal) && last(Priority::Normal) < last(Priority::Low),
            "{of_a:?}"
        );
        assert!(of_a[..25].contains(&Priority::Low), "{of_a:?}");
    }

    #[test]
    fn requests_are_refused_from_the_high_watermark_to_the_low_one() {
        let mut s = Scheduler::new(Limits { high: 4, low: 2, ..OPEN });
        let flow = flow("a", None, Priority::Normal);
        for i in 0..4 {
            s.enqueue(&flow, 1, later(), vec![i]).unwrap();
        }
        assert_eq!(s.enqueue(&flow, 1, later(), vec![9]), Err(Refused::Full { waiting: 4 }));
        s.take(|_| true).unwrap();
        assert_eq!(s.enqueue(&flow, 1, later(), vec![9]), Err(Refused::Full { waiting: 3 }));
        s.take(|_| true).unwrap();
        s.enqueue(&flow, 1, later(), vec![9]).unwrap();
    }

    #[test]
    fn limits_of_a_tenant_are_its_own() {
        let mut s = Scheduler::new(Limits { tenant_requests: 2, tenant_tokens: 100, ..OPEN });
        let (a, b) = (flow("a", None, Priority::Normal), flow("b", None, Priority::Normal));
        s.enqueue(&a, 60, later(), vec![0]).unwrap();
        assert_eq!(s.enqueue(&a, 60, later(), vec![1]), Err(Refused::TenantTokens { found: 120, limit: 100 }));
        s.enqueue(&a, 40, later(), vec![1]).unwrap();
        assert_eq!(s.enqueue(&a, 0, later(), vec![2]), Err(Refused::TenantRequests { found: 2, limit: 2 }));
        s.enqueue(&b, 60, later(), vec![3]).unwrap();
        let tenant = s.take(|_| true).unwrap().tenant;
        assert_eq!(&*tenant, "a");
        // running ones still count
        assert!(s.enqueue(&a, 0, later(), vec![2]).is_err());
        s.release(&tenant);
        s.enqueue(&a, 0, later(), vec![2]).unwrap();
    }

    #[test]
    fn a_request_that_was_put_back_or_not_ready_comes_first() {
        let mut s = Scheduler::new(OPEN);
        s.enqueue(&flow("a", None, Priority::Low), 1, later(), vec![0, 1, 2]).unwrap();
        s.enqueue(&flow("b", None, Priority::High), 1, later(), vec![3]).unwrap();
        let high = s.take(|_| true).unwrap();
        assert_eq!(high.job, 3);
        s.put_back(high);
        // 0 and 1 have their turn before they are ready
        assert_eq!(s.take(|job| *job == 2).unwrap().job, 2);
        assert_eq!((s.waiting(), s.held(), s.depth(Priority::Low)), (3, 3, 2));
        s.enqueue(&flow("b", None, Priority::High), 1, later(), vec![4]).unwrap();
        assert_eq!(order(&mut s), [0, 1, 3, 4]);
    }

    /// Entries visited by 100 steps of the engine thread with `n` queued requests.
    fn visited_by_steps(n: usize, sessions: bool) -> usize {
        let mut s = Scheduler::new(OPEN);
        let mut ids = Vec::new();
        for i in 0..n {
            let (tenant, session) = ((i % 50).to_string(), i.to_string());
            let flow = flow(&tenant, sessions.then_some(&*session), Priority::ALL[i % 3]);
            ids.extend(s.enqueue(&flow, 1, later(), vec![i]).unwrap());
        }
        let before = s.visited.get();
        for step in 0..100 {
            assert!(s.expired(Instant::now()).is_empty());
            // cancel a queued request, and one that is no longer queued
            s.remove(ids[n / 2 + step]);
            s.remove(u64::MAX);
            s.take(|_| true).unwrap();
        }
        s.visited.get() - before
    }

    #[test]
    fn the_cost_of_a_step_does_not_depend_on_the_queue_length() {
        for sessions in [true, false] {
            assert_eq!(visited_by_steps(10_000, sessions), visited_by_steps(1000, sessions));
        }
        // ids of removed requests do not accumulate
        let mut s = Scheduler::new(OPEN);
        let flow = flow("a", None, Priority::Normal);
        for i in 0..10_000 {
            let ids = s.enqueue(&flow, 1, later(), vec![i]).unwrap();
            assert_eq!(s.remove(ids.start), Some(i));
        }
        assert!(s.visited.get() < 30_000, "{}", s.visited.get());
        assert!(s.turns.entries() <= MIN_SWEEP);
    }

    proptest! {
        /// After any operations: each request leaves once, counters are correct, and nothing remains.
        #[test]
        fn every_request_comes_out_once(
            operations in prop::collection::vec((0u8..9, 0usize..3, 0usize..4, 0usize..3, 1usize..4), 1..200),
            high in 1usize..30, low in 0usize..30,
        ) {
            let low = low.min(high - 1);
            let mut s = Scheduler::new(Limits { high, low, tenant_requests: 12, tenant_tokens: 90 });
            // ids and deadlines of the queued jobs
            let (mut inside, mut running, mut next) = (BTreeMap::new(), Vec::new(), 0u32);
            let mut closed = false;
            let start = Instant::now();
            for (kind, tenant, session, priority, n) in operations {
                match kind {
                    0..=3 => {
                        let session = ["x", "y", "z"].get(session).copied();
                        let flow = flow(["a", "b", "c"][tenant], session, Priority::ALL[priority]);
                        let jobs: Vec<u32> = (next..next + n as u32).collect();
                        let deadline = start + Duration::from_secs((u64::from(next) * 7) % 11);
                        let result = s.enqueue(&flow, 5, deadline, jobs.clone());
                        prop_assert_eq!(matches!(result, Err(Refused::Full { .. })), closed);
                        if let Ok(ids) = result {
                            inside.extend(jobs.into_iter().zip(ids.map(|id| (id, deadline))));
                            next += n as u32;
                        }
                    }
                    4 | 5 => {
                        let is_ready = |job: &u32| kind == 4 || job % 4 == session as u32;
                        let taken = s.take(is_ready);
                        prop_assert_eq!(taken.is_none(), !inside.keys().any(is_ready));
                        match taken {
                            Some(taken) if priority == 0 => {
                                s.put_back(taken);
                                closed &= inside.len() - 1 > low;
                            }
                            Some(taken) => {
                                prop_assert!(inside.remove(&taken.job).is_some());
                                running.push(taken.tenant);
                            }
                            None => {}
                        }
                    }
                    6 => {
                        let gone = |job: &u32| job % 5 == session as u32;
                        for (job, (id, _)) in inside.clone().into_iter().filter(|(job, _)| gone(job)) {
                            prop_assert_eq!((s.remove(id), s.remove(id)), (Some(job), None));
                        }
                        inside.retain(|job, _| !gone(job));
                    }
                    7 => {
                        let now = start + Duration::from_secs(n as u64);
                        let late: BTreeSet<u32> =
                            inside.iter().filter(|(_, (_, deadline))| *deadline < now).map(|(job, _)| *job).collect();
                        prop_assert_eq!(s.expired(now).into_iter().collect::<BTreeSet<_>>(), late.clone());
                        inside.retain(|job, _| !late.contains(job));
                    }
                    _ => if let Some(tenant) = running.pop() { s.release(&tenant) },
                }
                closed = (closed || inside.len() >= high) && inside.len() > low;
                prop_assert_eq!(s.waiting(), inside.len());
                prop_assert_eq!(s.waiting(), Priority::ALL.into_iter().map(|p| s.depth(p)).sum::<usize>());
                prop_assert_eq!(s.is_full(), closed);
            }
            while let Some(taken) = s.take(|_| true) {
                prop_assert!(inside.remove(&taken.job).is_some());
                s.release(&taken.tenant);
            }
            running.iter().for_each(|tenant| s.release(tenant));
            prop_assert!(inside.is_empty() && s.tenants.is_empty() && !s.is_full());
        }

        /// Tenants with queued requests of the same priority are at most one turn apart.
        #[test]
        fn equal_tenants_get_equal_turns(counts in prop::collection::vec(1usize..40, 2..6), sessions in 1usize..5) {
            let mut s = Scheduler::new(OPEN);
            for (t, count) in counts.iter().enumerate() {
                for i in 0..*count {
                    let session = (i % sessions).to_string();
                    s.enqueue(&flow(&t.to_string(), Some(&session), Priority::Normal), 1, later(), vec![t]).unwrap();
                }
            }
            let mut turns = vec![0; counts.len()];
            for tenant in order(&mut s) {
                turns[tenant] += 1;
                let waiting = || (0..counts.len()).filter(|t| turns[*t] < counts[*t]).map(|t| turns[t]);
                let ahead = waiting().max().unwrap_or(0) - waiting().min().unwrap_or(0);
                prop_assert!(ahead <= 1, "{turns:?} of {counts:?}");
            }
        }
    }
}

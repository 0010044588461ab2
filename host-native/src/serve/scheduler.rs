//! Who runs next, and who is not let in: policy without clocks, threads or HTTP.
//!
//! Three priorities take turns by weight, so that a low one waits but does not starve. Inside a priority, tenants take
//! turns by their shares, and inside a tenant its sessions, one request each. A request without a session counts as one
//! of its own, so such requests keep the order in which they came.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

/// How urgent a request is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub enum Priority {
    /// Before others.
    High,
    /// As most.
    #[default]
    Normal,
    /// When there is room.
    Low,
}

impl Priority {
    /// In the order of [`Priority::index`].
    pub const ALL: [Priority; 3] = [Priority::High, Priority::Normal, Priority::Low];

    /// The name.
    pub const fn name(self) -> &'static str {
        match self {
            Priority::High => "high",
            Priority::Normal => "normal",
            Priority::Low => "low",
        }
    }

    /// Its place in a list of all.
    pub const fn index(self) -> usize {
        self as usize
    }

    /// Turns among the priorities.
    const fn weight(self) -> i64 {
        match self {
            Priority::High => 16,
            Priority::Normal => 4,
            Priority::Low => 1,
        }
    }
}

/// Whose request this is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Flow {
    /// Who pays for it.
    pub tenant: Arc<str>,
    /// Turns of this tenant at a time.
    pub share: u32,
    /// The conversation it belongs to.
    pub session: Option<Arc<str>>,
    /// How urgent it is.
    pub priority: Priority,
}

/// Limits of a queue. A limit of 0 is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Waiting requests at which new ones are refused...
    pub high: usize,
    /// ... until no more than these wait.
    pub low: usize,
    /// Requests of a tenant, waiting and running.
    pub tenant_requests: usize,
    /// Tokens of a tenant's waiting requests.
    pub tenant_tokens: usize,
}

/// Why a request was not let in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    /// Too many wait.
    #[error("{waiting} requests are waiting; try again later")]
    Full {
        /// How many.
        waiting: usize,
    },
    /// Too many of this tenant.
    #[error("{found} requests of this tenant are waiting or running, the limit is {limit}; try again later")]
    TenantRequests {
        /// How many.
        found: usize,
        /// The limit.
        limit: usize,
    },
    /// Too many tokens of this tenant.
    #[error("{found} tokens of this tenant are waiting, with this request; the limit is {limit}; try again later")]
    TenantTokens {
        /// How many.
        found: usize,
        /// The limit.
        limit: usize,
    },
}

impl Refused {
    /// The name, for metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Refused::Full { .. } => "queue_full",
            Refused::TenantRequests { .. } => "tenant_requests",
            Refused::TenantTokens { .. } => "tenant_tokens",
        }
    }
}

/// Requests that wait, each with the tokens it may need.
#[derive(Debug)]
pub struct Scheduler<J> {
    limits: Limits,
    lanes: [Lane<J>; 3],
    tenants: BTreeMap<Arc<str>, Load>,
    waiting: usize,
    /// Whether the high watermark was reached, and the low one not yet again.
    shedding: bool,
}

/// What a tenant has here.
#[derive(Debug, Default, Clone, Copy)]
struct Load {
    waiting: usize,
    tokens: usize,
    running: usize,
}

/// The requests of one priority.
#[derive(Debug)]
struct Lane<J> {
    /// Those whose turn it is first.
    tenants: VecDeque<Tenant<J>>,
    waiting: usize,
    /// Turns owed, in parts of the sum of all weights.
    owed: i64,
}

#[derive(Debug)]
struct Tenant<J> {
    name: Arc<str>,
    /// Turns at a time, and those left of this time.
    share: u32,
    left: u32,
    sessions: VecDeque<Session<J>>,
}

#[derive(Debug)]
struct Session<J> {
    name: Option<Arc<str>>,
    jobs: VecDeque<(usize, J)>,
}

impl<J> Scheduler<J> {
    /// An empty queue. The low watermark is below the high one, whatever the limits say.
    pub fn new(limits: Limits) -> Scheduler<J> {
        let limits = Limits { low: limits.low.min(limits.high.saturating_sub(1)), ..limits };
        let lanes = [(); 3].map(|()| Lane { tenants: VecDeque::new(), waiting: 0, owed: 0 });
        Scheduler { limits, lanes, tenants: BTreeMap::new(), waiting: 0, shedding: false }
    }

    /// Takes all of `jobs`, of `tokens` each, or none.
    ///
    /// # Errors
    /// Which limit is reached.
    pub fn offer(&mut self, flow: &Flow, tokens: usize, jobs: Vec<J>) -> Result<(), Refused> {
        let (n, limits) = (jobs.len(), self.limits);
        if self.is_full() {
            return Err(Refused::Full { waiting: self.waiting });
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
        self.waiting += n;
        self.shedding |= self.waiting >= limits.high;
        self.lanes[flow.priority.index()].add(flow, tokens, jobs);
        Ok(())
    }

    /// Whether new requests are refused.
    pub fn is_full(&self) -> bool {
        self.shedding
    }

    /// The request whose turn it is; it counts as running until [`Scheduler::ended`]. Says its tenant.
    pub fn take(&mut self) -> Option<(Arc<str>, J)> {
        let busy = || Priority::ALL.into_iter().filter(|p| self.lanes[p.index()].waiting > 0);
        let sum: i64 = busy().map(Priority::weight).sum();
        // of equal ones the more urgent
        let next = busy().max_by_key(|p| (self.lanes[p.index()].owed + p.weight(), std::cmp::Reverse(*p)))?;
        for priority in Priority::ALL {
            let lane = &mut self.lanes[priority.index()];
            if lane.waiting > 0 {
                lane.owed += priority.weight();
            }
        }
        let lane = &mut self.lanes[next.index()];
        lane.owed -= sum;
        let (tenant, tokens, job) = lane.take()?;
        if lane.waiting == 0 {
            lane.owed = 0;
        }
        self.left(&tenant, tokens);
        self.tenants.entry(Arc::clone(&tenant)).or_default().running += 1;
        Some((tenant, job))
    }

    /// A request that was taken is over.
    pub fn ended(&mut self, tenant: &Arc<str>) {
        if let Some(load) = self.tenants.get_mut(tenant) {
            load.running = load.running.saturating_sub(1);
        }
        self.forget(tenant);
    }

    /// Takes out the requests that `gone` names.
    pub fn remove(&mut self, mut gone: impl FnMut(&J) -> bool) -> Vec<J> {
        let mut removed = Vec::new();
        for lane in &mut self.lanes {
            for tenant in &mut lane.tenants {
                for session in &mut tenant.sessions {
                    let (out, stay) = std::mem::take(&mut session.jobs).into_iter().partition(|(_, job)| gone(job));
                    let out: VecDeque<(usize, J)> = out;
                    session.jobs = stay;
                    removed.extend(out.into_iter().map(|(tokens, job)| (Arc::clone(&tenant.name), tokens, job)));
                }
                tenant.sessions.retain(|session| !session.jobs.is_empty());
            }
            lane.tenants.retain(|tenant| !tenant.sessions.is_empty());
            lane.waiting = lane.tenants.iter().flat_map(|t| &t.sessions).map(|s| s.jobs.len()).sum();
        }
        let account = |(tenant, tokens, job)| {
            self.left(&tenant, tokens);
            self.forget(&tenant);
            job
        };
        removed.into_iter().map(account).collect()
    }

    /// Requests that wait.
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// Requests of a priority that wait.
    pub fn depth(&self, priority: Priority) -> usize {
        self.lanes[priority.index()].waiting
    }

    /// A request waits no longer.
    fn left(&mut self, tenant: &Arc<str>, tokens: usize) {
        self.waiting -= 1;
        self.shedding &= self.waiting > self.limits.low;
        if let Some(load) = self.tenants.get_mut(tenant) {
            load.waiting -= 1;
            load.tokens = load.tokens.saturating_sub(tokens);
        }
    }

    /// Keeps no account of a tenant that has nothing here.
    fn forget(&mut self, tenant: &Arc<str>) {
        if self.tenants.get(tenant).is_some_and(|load| load.waiting + load.running == 0) {
            self.tenants.remove(tenant);
        }
    }
}

impl<J> Lane<J> {
    fn add(&mut self, flow: &Flow, tokens: usize, jobs: Vec<J>) {
        self.waiting += jobs.len();
        let at = self.tenants.iter().position(|t| t.name == flow.tenant).unwrap_or_else(|| {
            let (name, share) = (Arc::clone(&flow.tenant), flow.share.max(1));
            self.tenants.push_back(Tenant { name, share, left: share, sessions: VecDeque::new() });
            self.tenants.len() - 1
        });
        let sessions = &mut self.tenants[at].sessions;
        for job in jobs {
            let known = sessions.iter().position(|s| s.name.is_some() && s.name == flow.session);
            match known {
                Some(i) => sessions[i].jobs.push_back((tokens, job)),
                None => sessions.push_back(Session { name: flow.session.clone(), jobs: [(tokens, job)].into() }),
            }
        }
    }

    fn take(&mut self) -> Option<(Arc<str>, usize, J)> {
        let tenant = self.tenants.front_mut()?;
        let mut session = tenant.sessions.pop_front()?;
        let (tokens, job) = session.jobs.pop_front()?;
        if !session.jobs.is_empty() {
            tenant.sessions.push_back(session);
        }
        self.waiting -= 1;
        tenant.left -= 1;
        let name = Arc::clone(&tenant.name);
        if tenant.sessions.is_empty() {
            self.tenants.pop_front();
        } else if tenant.left == 0 {
            tenant.left = tenant.share;
            self.tenants.rotate_left(1);
        }
        Some((name, tokens, job))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    const OPEN: Limits = Limits { high: usize::MAX, low: usize::MAX, tenant_requests: 0, tenant_tokens: 0 };

    fn flow(tenant: &str, session: Option<&str>, priority: Priority) -> Flow {
        Flow { tenant: tenant.into(), share: 1, session: session.map(Into::into), priority }
    }

    fn order<J>(s: &mut Scheduler<J>) -> Vec<J> {
        std::iter::from_fn(|| s.take().map(|(_, job)| job)).collect()
    }

    #[test]
    fn requests_without_session_keep_their_order() {
        let mut s = Scheduler::new(OPEN);
        for i in 0..20 {
            s.offer(&flow("a", None, Priority::Normal), 1, vec![i]).unwrap();
        }
        assert_eq!(order(&mut s), (0..20).collect::<Vec<_>>());
    }

    #[test]
    fn tenants_take_turns_by_share_and_their_sessions_too() {
        let mut s = Scheduler::new(OPEN);
        let mut big = flow("big", Some("x"), Priority::Normal);
        big.share = 3;
        s.offer(&big, 1, (0..8).map(|i| ("big x", i)).collect()).unwrap();
        let small = flow("small", Some("y"), Priority::Normal);
        s.offer(&small, 1, (0..3).map(|i| ("small y", i)).collect()).unwrap();
        s.offer(&flow("small", Some("z"), Priority::Normal), 1, vec![("small z", 0)]).unwrap();
        let names: Vec<&str> = order(&mut s).into_iter().map(|(name, _)| name).collect();
        let b = "big x";
        assert_eq!(names, [b, b, b, "small y", b, b, b, "small z", b, b, "small y", "small y"]);
    }

    #[test]
    fn urgent_requests_come_first_and_none_starves() {
        let mut s = Scheduler::new(OPEN);
        for (priority, n) in [(Priority::Low, 4), (Priority::High, 80)] {
            s.offer(&flow("a", None, priority), 1, vec![priority; n]).unwrap();
        }
        let order = order(&mut s);
        let low: Vec<usize> = (0..84).filter(|i| order[*i] == Priority::Low).collect();
        assert!(low[0] >= 8, "{low:?}");
        assert!(low.iter().zip(1..).all(|(at, i)| *at < 17 * i), "{low:?}");
    }

    #[test]
    fn the_door_closes_at_the_high_mark_and_opens_at_the_low_one() {
        let mut s = Scheduler::new(Limits { high: 4, low: 2, ..OPEN });
        let flow = flow("a", None, Priority::Normal);
        for i in 0..4 {
            s.offer(&flow, 1, vec![i]).unwrap();
        }
        assert_eq!(s.offer(&flow, 1, vec![9]), Err(Refused::Full { waiting: 4 }));
        s.take().unwrap();
        assert_eq!(s.offer(&flow, 1, vec![9]), Err(Refused::Full { waiting: 3 }));
        s.take().unwrap();
        s.offer(&flow, 1, vec![9]).unwrap();
    }

    #[test]
    fn limits_of_a_tenant_are_its_own() {
        let mut s = Scheduler::new(Limits { tenant_requests: 2, tenant_tokens: 100, ..OPEN });
        let (a, b) = (flow("a", None, Priority::Normal), flow("b", None, Priority::Normal));
        s.offer(&a, 60, vec![0]).unwrap();
        assert_eq!(s.offer(&a, 60, vec![1]), Err(Refused::TenantTokens { found: 120, limit: 100 }));
        s.offer(&a, 40, vec![1]).unwrap();
        assert_eq!(s.offer(&a, 0, vec![2]), Err(Refused::TenantRequests { found: 2, limit: 2 }));
        s.offer(&b, 60, vec![3]).unwrap();
        let (tenant, _) = s.take().unwrap();
        assert_eq!(&*tenant, "a");
        // running ones still count
        assert!(s.offer(&a, 0, vec![2]).is_err());
        s.ended(&tenant);
        s.offer(&a, 0, vec![2]).unwrap();
    }

    proptest! {
        /// Whatever happens: nothing is lost, doubled or made up; counts are true; and at the end nothing is left.
        #[test]
        fn every_request_comes_out_once(
            operations in prop::collection::vec((0u8..8, 0usize..3, 0usize..4, 0usize..3, 1usize..4), 1..200),
            high in 1usize..30, low in 0usize..30,
        ) {
            let low = low.min(high - 1);
            let mut s = Scheduler::new(Limits { high, low, tenant_requests: 12, tenant_tokens: 90 });
            let (mut inside, mut running, mut next) = (BTreeSet::new(), Vec::new(), 0u32);
            let mut closed = false;
            for (kind, tenant, session, priority, n) in operations {
                match kind {
                    0..=3 => {
                        let session = ["x", "y", "z"].get(session).copied();
                        let flow = flow(["a", "b", "c"][tenant], session, Priority::ALL[priority]);
                        let jobs: Vec<u32> = (next..next + n as u32).collect();
                        let result = s.offer(&flow, 5, jobs.clone());
                        prop_assert_eq!(matches!(result, Err(Refused::Full { .. })), closed);
                        if result.is_ok() {
                            inside.extend(jobs);
                            next += n as u32;
                        }
                    }
                    4 | 5 => {
                        let taken = s.take();
                        prop_assert_eq!(taken.is_none(), inside.is_empty());
                        if let Some((tenant, job)) = taken {
                            prop_assert!(inside.remove(&job));
                            running.push(tenant);
                        }
                    }
                    6 => {
                        let gone = s.remove(|job| job % 5 == session as u32);
                        for job in gone {
                            prop_assert!(job % 5 == session as u32 && inside.remove(&job));
                        }
                        prop_assert!(inside.iter().all(|job| job % 5 != session as u32));
                    }
                    _ => if let Some(tenant) = running.pop() { s.ended(&tenant) },
                }
                closed = (closed || inside.len() >= high) && inside.len() > low;
                prop_assert_eq!(s.waiting(), inside.len());
                prop_assert_eq!(s.waiting(), Priority::ALL.into_iter().map(|p| s.depth(p)).sum::<usize>());
                prop_assert_eq!(s.is_full(), closed);
            }
            while let Some((tenant, job)) = s.take() {
                prop_assert!(inside.remove(&job));
                s.ended(&tenant);
            }
            running.iter().for_each(|tenant| s.ended(tenant));
            prop_assert!(inside.is_empty() && s.tenants.is_empty() && !s.is_full());
        }

        /// While several tenants have requests of the same priority waiting, none is more than one round ahead.
        #[test]
        fn equal_tenants_get_equal_turns(counts in prop::collection::vec(1usize..40, 2..6), sessions in 1usize..5) {
            let mut s = Scheduler::new(OPEN);
            for (t, count) in counts.iter().enumerate() {
                for i in 0..*count {
                    let session = (i % sessions).to_string();
                    s.offer(&flow(&t.to_string(), Some(&session), Priority::Normal), 1, vec![t]).unwrap();
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

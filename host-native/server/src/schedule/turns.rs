//! Whose turn it is: the order in which requests are scheduled.
//!
//! Three priorities share the engine by weighted round robin, so that none starves. Within a priority, tenants take turns
//! by their shares (weighted round robin). Within a tenant its ranks do as priorities do among tenants, and within a rank
//! its sessions, one request each. A request without a session counts as a session of its own, so such requests are first
//! in, first out.

use std::cmp::Reverse;
use std::collections::{HashMap, VecDeque};
use std::ops::Range;

pub use crate::priority::Priority;
use crate::sync::Arc;

/// What fairness looks at: requests of one flow are scheduled in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Flow {
    pub tenant: Arc<str>,
    /// Requests per turn of the tenant.
    pub share: u32,
    pub session: Option<Arc<str>>,
    /// Priority across tenants.
    pub priority: Priority,
    /// Priority among the tenant's requests of this priority.
    pub rank: Priority,
}

/// Never reused.
pub type JobId = u64;

/// The requests that have not had their turn.
#[derive(Debug, Default)]
pub struct Turns {
    /// By [`Priority::index`].
    queues: [PriorityQueue; 3],
    credits: Credits,
}

/// Smooth weighted round robin among priorities, by [`Priority::index`]: that with the highest credit is next.
#[derive(Debug, Default)]
struct Credits([i64; 3]);

impl Credits {
    /// The next of the priorities that are busy.
    fn next(&mut self, is_busy: impl Fn(Priority) -> bool) -> Option<Priority> {
        let Credits(credits) = self;
        let busy = Priority::ALL.into_iter().filter(|p| is_busy(*p));
        let sum: i64 = busy.clone().map(Priority::weight).sum();
        // ties go to the higher priority
        let next = busy.clone().max_by_key(|p| (credits[p.index()] + p.weight(), Reverse(*p)))?;
        busy.for_each(|p| credits[p.index()] += p.weight());
        credits[next.index()] -= sum;
        Some(next)
    }

    /// The last request of a priority leaves no credit to later ones.
    fn clear(&mut self, priority: Priority) {
        self.0[priority.index()] = 0;
    }
}

impl Turns {
    /// Puts requests of a flow behind those that it has.
    pub fn add(&mut self, flow: &Flow, ids: Range<JobId>) {
        self.queues[flow.priority.index()].add(flow, ids);
    }

    /// The request that has the next turn, among those that `is_queued` says are still there. It leaves.
    pub fn next(&mut self, is_queued: &mut impl FnMut(&JobId) -> bool) -> Option<JobId> {
        let Turns { queues, credits } = self;
        let next = credits.next(|priority| queues[priority.index()].waiting > 0)?;
        let queue = &mut queues[next.index()];
        queue.waiting -= 1;
        if queue.waiting == 0 {
            credits.clear(next);
        }
        queue.take(is_queued)
    }

    /// Counts a removed request. Its id stays until its turn or until [`Turns::sweep`].
    pub fn removed(&mut self, priority: Priority) {
        self.queues[priority.index()].waiting -= 1;
    }

    /// Drops the ids of removed requests.
    pub fn sweep(&mut self, is_queued: &mut impl FnMut(&JobId) -> bool) {
        self.queues.iter_mut().for_each(|queue| queue.sweep(is_queued));
    }

    /// Entries of the round robins of all tenants.
    #[cfg(test)]
    pub fn entries(&self) -> usize {
        let tenants = self.queues.iter().flat_map(|queue| queue.tenants.values());
        tenants.flat_map(|tenant| &tenant.ranks).map(|rank| rank.order.len()).sum()
    }
}

/// Requests of one priority. Ids of removed requests stay until their turn or until the next sweep.
#[derive(Debug, Default)]
struct PriorityQueue {
    tenants: HashMap<Arc<str>, Tenant>,
    /// Round robin of the tenants: the first has the turn.
    order: VecDeque<Arc<str>>,
    /// Requests, without removed ones.
    waiting: usize,
}

#[derive(Debug)]
struct Tenant {
    /// Requests per turn, and those left of this turn.
    share: u32,
    left: u32,
    /// By [`Priority::index`].
    ranks: [Rank; 3],
    credits: Credits,
}

/// Requests of a tenant that have the same priority among its own.
#[derive(Debug, Default)]
struct Rank {
    sessions: HashMap<Arc<str>, VecDeque<JobId>>,
    /// Round robin of the sessions: the first has the turn. Each named session occurs once.
    order: VecDeque<Entry>,
}

#[derive(Debug)]
enum Entry {
    Session(Arc<str>),
    /// A request without a session.
    Single(JobId),
}

impl PriorityQueue {
    fn add(&mut self, flow: &Flow, ids: Range<JobId>) {
        self.waiting += (ids.end - ids.start) as usize;
        let order = &mut self.order;
        let tenant = self.tenants.entry(Arc::clone(&flow.tenant)).or_insert_with(|| {
            order.push_back(Arc::clone(&flow.tenant));
            let share = flow.share.max(1);
            Tenant { share, left: share, ranks: Default::default(), credits: Credits::default() }
        });
        let rank = &mut tenant.ranks[flow.rank.index()];
        let Some(name) = &flow.session else {
            rank.order.extend(ids.map(Entry::Single));
            return;
        };
        let jobs = rank.sessions.entry(Arc::clone(name)).or_default();
        if jobs.is_empty() {
            rank.order.push_back(Entry::Session(Arc::clone(name)));
        }
        jobs.extend(ids);
    }

    /// The next id that is still queued.
    fn take(&mut self, is_queued: &mut impl FnMut(&JobId) -> bool) -> Option<JobId> {
        loop {
            let name = self.order.front()?;
            let tenant = self.tenants.get_mut(name)?;
            let id = tenant.take(is_queued);
            tenant.left -= u32::from(id.is_some());
            if id.is_none() || tenant.is_empty() {
                self.tenants.remove(name);
                self.order.pop_front();
            } else if tenant.left == 0 {
                tenant.left = tenant.share;
                self.order.rotate_left(1);
            }
            if id.is_some() {
                return id;
            }
        }
    }

    /// Drops the ids of removed requests.
    fn sweep(&mut self, is_queued: &mut impl FnMut(&JobId) -> bool) {
        self.tenants.values_mut().flat_map(|tenant| &mut tenant.ranks).for_each(|rank| rank.sweep(is_queued));
        self.tenants.retain(|_, tenant| !tenant.is_empty());
        let tenants = &self.tenants;
        self.order.retain(|name| tenants.contains_key(name));
    }
}

impl Tenant {
    fn is_empty(&self) -> bool {
        self.ranks.iter().all(|rank| rank.order.is_empty())
    }

    /// The next id that is still queued.
    fn take(&mut self, is_queued: &mut impl FnMut(&JobId) -> bool) -> Option<JobId> {
        let Tenant { ranks, credits, .. } = self;
        loop {
            let next = credits.next(|priority| !ranks[priority.index()].order.is_empty())?;
            let rank = &mut ranks[next.index()];
            let id = rank.take(is_queued);
            if rank.order.is_empty() {
                credits.clear(next);
            }
            if id.is_some() {
                return id;
            }
        }
    }
}

impl Rank {
    /// Drops the ids of removed requests.
    fn sweep(&mut self, is_queued: &mut impl FnMut(&JobId) -> bool) {
        self.sessions.retain(|_, jobs| {
            jobs.retain(&mut *is_queued);
            !jobs.is_empty()
        });
        let sessions = &self.sessions;
        self.order.retain(|session| match session {
            Entry::Session(name) => sessions.contains_key(name),
            Entry::Single(id) => is_queued(id),
        });
    }

    /// The next id that is still queued; its session moves to the end of the round robin.
    fn take(&mut self, is_queued: &mut impl FnMut(&JobId) -> bool) -> Option<JobId> {
        loop {
            match self.order.pop_front()? {
                Entry::Single(id) if is_queued(&id) => return Some(id),
                Entry::Single(_) => {}
                Entry::Session(name) => {
                    let jobs = self.sessions.get_mut(&name)?;
                    let id = std::iter::from_fn(|| jobs.pop_front()).find(&mut *is_queued);
                    if jobs.is_empty() {
                        self.sessions.remove(&name);
                    } else {
                        self.order.push_back(Entry::Session(name));
                    }
                    if id.is_some() {
                        return id;
                    }
                }
            }
        }
    }
}

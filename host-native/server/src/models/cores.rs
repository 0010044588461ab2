//! Compute threads of the engines: a set of its own for a model that asks for one, else one set that all models share.
//!
//! Models that share threads take turns: a turn is one engine step, and runs on all threads. The model that has used the
//! least time, divided by its share, goes next. So a slow model delays a fast one by at most one step, and no core runs
//! two engines at once, which would make each wait for the threads of the other. Which model runs when reaches no number.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use starling::pool::Pool;
use starling_host::pool::ThreadPool;

/// Threads that engines share.
pub struct SharedThreads {
    pool: ThreadPool,
    turns: Mutex<Turns>,
    released: Condvar,
}

/// Who runs, and how much time each has had.
#[derive(Debug, Default)]
struct Turns {
    is_taken: bool,
    users: Vec<User>,
    next_id: u64,
    /// Time used, divided by the share, of the user whose turn came last, before that turn.
    clock: f64,
}

#[derive(Debug)]
struct User {
    id: u64,
    share: f64,
    /// Time used, divided by the share, in seconds.
    used: f64,
    is_waiting: bool,
}

impl Turns {
    /// The waiting user that has used the least.
    fn next(&self) -> Option<u64> {
        let waiting = self.users.iter().filter(|user| user.is_waiting);
        waiting.min_by(|a, b| a.used.total_cmp(&b.used).then(a.id.cmp(&b.id))).map(|user| user.id)
    }

    fn user(&mut self, id: u64) -> Option<&mut User> {
        self.users.iter_mut().find(|user| user.id == id)
    }

    /// Begins to wait. A user that had no work gets no credit for that time.
    fn wait(&mut self, id: u64) {
        let clock = self.clock;
        if let Some(user) = self.user(id) {
            user.is_waiting = true;
            user.used = user.used.max(clock);
        }
    }

    /// Gives the turn to a waiting user.
    fn grant(&mut self, id: u64) {
        self.is_taken = true;
        if let Some(user) = self.user(id) {
            user.is_waiting = false;
            self.clock = user.used;
        }
    }

    fn charge(&mut self, id: u64, time: Duration) {
        if let Some(user) = self.user(id) {
            user.used += time.as_secs_f64() / user.share;
        }
    }
}

impl SharedThreads {
    pub fn new(pool: ThreadPool) -> SharedThreads {
        SharedThreads { pool, turns: Mutex::default(), released: Condvar::new() }
    }

    pub fn count(&self) -> usize {
        self.pool.threads()
    }

    fn lock(&self) -> MutexGuard<'_, Turns> {
        self.turns.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The compute threads of an engine.
pub enum Threads {
    Own(ThreadPool),
    Shared(Shared),
}

/// Use of shared threads by one engine, or by the load of one model.
pub struct Shared {
    threads: Arc<SharedThreads>,
    id: u64,
}

impl Threads {
    /// Joins the users of shared threads. `share` weights the time that this one gets.
    pub fn shared(threads: &Arc<SharedThreads>, share: u32) -> Threads {
        let mut turns = threads.lock();
        let id = turns.next_id;
        turns.next_id += 1;
        turns.users.push(User { id, share: f64::from(share.max(1)), used: 0.0, is_waiting: false });
        drop(turns);
        Threads::Shared(Shared { threads: Arc::clone(threads), id })
    }

    pub fn count(&self) -> usize {
        match self {
            Threads::Own(pool) => pool.threads(),
            Threads::Shared(shared) => shared.threads.pool.threads(),
        }
    }

    /// Runs one engine step on the threads, once it is this engine's turn.
    pub fn run<T>(&self, step: impl FnOnce(&ThreadPool) -> T) -> T {
        match self {
            Threads::Own(pool) => step(pool),
            Threads::Shared(shared) => {
                let _turn = shared.take_turn();
                step(&shared.threads.pool)
            }
        }
    }
}

/// Takes a turn for each parallel region, so that engine steps run between the regions of long work such as loading a model.
impl Pool for Threads {
    fn threads(&self) -> usize {
        self.count()
    }

    fn broadcast(&self, work: &(dyn Fn() + Sync)) {
        self.run(|pool| pool.broadcast(work));
    }
}

/// Exclusive use of shared threads until it is dropped, also by a panic.
struct Turn<'a> {
    shared: &'a Shared,
    start: Instant,
}

impl Shared {
    fn take_turn(&self) -> Turn<'_> {
        let mut turns = self.threads.lock();
        turns.wait(self.id);
        while turns.is_taken || turns.next() != Some(self.id) {
            turns = self.threads.released.wait(turns).unwrap_or_else(PoisonError::into_inner);
        }
        turns.grant(self.id);
        Turn { shared: self, start: Instant::now() }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut turns = self.shared.threads.lock();
        turns.is_taken = false;
        turns.charge(self.shared.id, self.start.elapsed());
        drop(turns);
        self.shared.threads.released.notify_all();
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.threads.lock().users.retain(|user| user.id != self.id);
        self.threads.released.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turns(shares: &[f64]) -> Turns {
        let user = |(id, share): (usize, &f64)| User { id: id as u64, share: *share, used: 0.0, is_waiting: false };
        Turns { users: shares.iter().enumerate().map(user).collect(), ..Turns::default() }
    }

    #[test]
    fn time_is_divided_by_shares_whatever_a_step_takes() {
        let mut turns = turns(&[1.0, 3.0]);
        let (mut time, step) = ([0.0; 2], [0.050, 0.002]);
        for _ in 0..20_000 {
            turns.wait(0);
            turns.wait(1);
            let id = turns.next().unwrap();
            turns.grant(id);
            turns.charge(id, Duration::from_secs_f64(step[id as usize]));
            time[id as usize] += step[id as usize];
        }
        let ratio = time[1] / time[0];
        assert!((2.9..3.1).contains(&ratio), "{time:?}");
    }

    #[test]
    fn idle_time_gives_no_credit() {
        let mut turns = turns(&[1.0, 1.0]);
        for _ in 0..1000 {
            turns.wait(0);
            turns.grant(0);
            turns.charge(0, Duration::from_secs(1));
        }
        let mut granted = [0; 2];
        for _ in 0..10 {
            turns.wait(0);
            turns.wait(1);
            let id = turns.next().unwrap();
            turns.grant(id);
            turns.charge(id, Duration::from_secs(1));
            granted[id as usize] += 1;
        }
        assert_eq!(granted, [5, 5]);
    }

    #[test]
    fn a_panic_ends_the_turn() {
        let threads = Arc::new(SharedThreads::new(ThreadPool::new(2).unwrap()));
        let (a, b) = (Threads::shared(&threads, 1), Threads::shared(&threads, 1));
        let fault = std::panic::AssertUnwindSafe(|| a.run(|_| panic!("a fault")));
        assert!(std::panic::catch_unwind(fault).is_err());
        assert_eq!(b.run(|pool| pool.threads()), 2);
        drop(a);
        assert_eq!(threads.lock().users.len(), 1);
    }
}

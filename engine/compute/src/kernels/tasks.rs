//! Work sharing: how the threads of a [`Pool`] share the tasks of one operation. Each task owns a disjoint part of the
//! output and never a part of a sum, so no assignment of tasks to threads can change a bit.
//!
//! A worker first takes the tasks of its own contiguous range from the front, for long sequential reads of weights,
//! then steals from the back of the other ranges.
#![allow(unsafe_code)]

use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use super::SharedOut;
use crate::pool::{MAX_THREADS, Pool};

/// Calls `task(i, worker)` exactly once for each `i` in `0..n`. No two calls at once have the same `worker`, which is
/// below `pool.threads()`.
pub fn run(pool: &dyn Pool, n: usize, task: &(dyn Fn(usize, usize) + Sync)) {
    match pool.threads().min(MAX_THREADS).min(n) {
        0 | 1 => (0..n).for_each(|i| task(i, 0)),
        workers @ ..=FEW_THREADS => share::<FEW_THREADS>(pool, workers, n, task),
        workers => share::<MAX_THREADS>(pool, workers, n, task),
    }
}

/// The task that the thread of task `i` of `n` is most likely to take next: the following one of its range.
pub(super) fn likely_next(i: usize, n: usize, threads: usize) -> Option<usize> {
    let workers = threads.min(MAX_THREADS).min(n).max(1);
    let worker = |i: usize| ((i + 1) * workers - 1) / n;
    (i + 1 < n && worker(i + 1) == worker(i)).then_some(i + 1)
}

/// Number of threads up to which the smaller array of ranges is used, which is quicker to initialise.
const FEW_THREADS: usize = 64;

/// [`run`] with at most `MOST` workers.
fn share<const MOST: usize>(pool: &dyn Pool, workers: usize, n: usize, task: &(dyn Fn(usize, usize) + Sync)) {
    let n = u32::try_from(n).expect("an operation must have fewer than 2^32 tasks");
    let start = |w: usize| (u64::from(n) * w as u64 / workers as u64) as u32;
    let ranges: [AtomicU64; MOST] =
        core::array::from_fn(|w| AtomicU64::new(if w < workers { pack(start(w), start(w + 1)) } else { 0 }));
    let tickets = AtomicUsize::new(0);
    pool.broadcast(&|| {
        let me = tickets.fetch_add(1, Ordering::Relaxed);
        if me >= workers {
            return;
        }
        while let Some(i) = take(&ranges[me], true) {
            task(i, me);
        }
        for other in (me + 1..workers).chain(0..me) {
            while let Some(i) = take(&ranges[other], false) {
                task(i, me);
            }
        }
    });
    // runs the tasks that a pool with fewer calls than threads left over
    for range in &ranges[..workers] {
        while let Some(i) = take(range, true) {
            task(i, 0);
        }
    }
}

fn pack(start: u32, end: u32) -> u64 {
    u64::from(start) << 32 | u64::from(end)
}

/// Takes one task from the front or back of a range.
fn take(range: &AtomicU64, front: bool) -> Option<usize> {
    let mut now = range.load(Ordering::Relaxed);
    loop {
        let (start, end) = ((now >> 32) as u32, now as u32);
        if start >= end {
            return None;
        }
        let (task, next) = if front { (start, pack(start + 1, end)) } else { (end - 1, pack(start, end - 1)) };
        match range.compare_exchange_weak(now, next, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => return Some(task as usize),
            Err(other) => now = other,
        }
    }
}

/// Calls `f(i, chunk, worker)` for each chunk of `len` elements of `out`; the last chunk may be shorter.
pub fn chunks<T: Send>(pool: &dyn Pool, out: &mut [T], len: usize, f: &(dyn Fn(usize, &mut [T], usize) + Sync)) {
    let (n, total) = (out.len().div_ceil(len), out.len());
    let out = SharedOut::new(out);
    run(pool, n, &|i, worker| {
        // SAFETY: `run` calls once per i, and chunks do not overlap.
        f(i, unsafe { out.slice(i * len, len.min(total - i * len)) }, worker);
    });
}

/// [`chunks`] over two slices with equally many chunks.
#[allow(clippy::type_complexity)]
pub fn chunks2<A: Send, B: Send>(
    pool: &dyn Pool,
    (a, a_len): (&mut [A], usize),
    (b, b_len): (&mut [B], usize),
    f: &(dyn Fn(usize, &mut [A], &mut [B]) + Sync),
) {
    let (n, a_total, b_total) = (a.len().div_ceil(a_len), a.len(), b.len());
    assert!(b.len().div_ceil(b_len) == n, "slices with different numbers of chunks");
    let (a, b) = (SharedOut::new(a), SharedOut::new(b));
    run(pool, n, &|i, _| {
        // SAFETY: `run` calls once per i, and chunks do not overlap.
        let (a, b) = unsafe {
            (a.slice(i * a_len, a_len.min(a_total - i * a_len)), b.slice(i * b_len, b_len.min(b_total - i * b_len)))
        };
        f(i, a, b);
    });
}

/// Calls `f(i, state)` for each i; each thread has its own state.
pub(super) fn with_state<T: Send>(pool: &dyn Pool, n: usize, states: &mut [T], f: &(dyn Fn(usize, &mut T) + Sync)) {
    assert!(states.len() >= pool.threads().clamp(1, MAX_THREADS), "fewer states than threads");
    let states = SharedOut::new(states);
    run(pool, n, &|i, worker| {
        // SAFETY: no two calls at once have the same worker.
        f(i, &mut unsafe { states.slice(worker, 1) }[0]);
    });
}

#[cfg(test)]
mod tests {
    use super::super::tests::Scoped;
    use super::*;
    use alloc::vec;
    use alloc::vec::Vec;

    #[test]
    fn likely_next_task_is_in_the_same_range() {
        for (n, threads) in [(1, 1), (7, 1), (7, 2), (5, 8), (64, 3), (1000, 7)] {
            let workers = threads.min(n);
            let ends: Vec<usize> = (1..=workers).map(|w| n * w / workers).collect();
            for i in 0..n {
                let next = (!ends.contains(&(i + 1))).then_some(i + 1);
                assert_eq!(likely_next(i, n, threads), next);
            }
        }
    }

    #[test]
    fn each_task_once() {
        for threads in [1, 2, 3, 7, FEW_THREADS + 6] {
            for n in [0, 1, 2, 5, 64, 1000] {
                let mut hits = vec![0u32; n];
                chunks(&Scoped(threads), &mut hits, 1, &|_, hit, worker| {
                    assert!(worker < threads);
                    hit[0] += 1;
                });
                assert!(hits.iter().all(|&h| h == 1));
            }
        }
    }
}

//! Parallelism as the engine sees it: the host brings the threads.

/// Threads of a pool that are given work, at most; more stay idle.
pub const MAX_THREADS: usize = if cfg!(target_family = "wasm") { 64 } else { 512 };

/// Threads that work on one operation at a time.
pub trait Pool: Sync {
    /// Threads that take part, at least 1.
    fn threads(&self) -> usize;

    /// Calls `work` on each thread, the caller's included, and returns when all calls have returned. The calls share
    /// the operation's tasks among themselves, so a thread that comes late finds less to do.
    fn broadcast(&self, work: &(dyn Fn() + Sync));
}

/// No threads but the caller's.
#[derive(Debug, Clone, Copy, Default)]
pub struct Inline;

impl Pool for Inline {
    fn threads(&self) -> usize {
        1
    }

    fn broadcast(&self, work: &(dyn Fn() + Sync)) {
        work();
    }
}

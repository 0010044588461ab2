//! Thread pools: the trait a host implements to lend its threads to the kernels.

/// Largest number of threads that get work; the others of a larger pool stay idle.
pub const MAX_THREADS: usize = if cfg!(target_family = "wasm") { 64 } else { 512 };

/// A pool of threads that work on one operation at a time.
pub trait Pool: Sync {
    /// Number of threads that take part, at least 1; the caller is one of them.
    fn threads(&self) -> usize;

    /// Calls `work` once on each thread, including the caller's, and returns when all calls have returned. The calls
    /// share the tasks of the operation among themselves, so a thread that starts late finds fewer tasks.
    fn broadcast(&self, work: &(dyn Fn() + Sync));
}

/// A pool without threads: the caller does all work.
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

//! Threads, in builds with shared memory: workers of the page that instantiate this module with the same memory and stay in
//! [`follow`].

use starling::kernels::standby::Standby;
use starling::pool::{Inline, MAX_THREADS, Pool};

use crate::session::Error;

/// One team for each memory. If several models compute at once, the first has the team and the others run on one thread.
static STANDBY: Standby = Standby::new();

/// A pool of the caller and the threads in [`follow`]; the number counts both.
struct Threads(usize);

impl Pool for Threads {
    fn threads(&self) -> usize {
        self.0
    }

    fn broadcast(&self, work: &(dyn Fn() + Sync)) {
        STANDBY.lead(work);
    }
}

/// A pool of `threads` threads with the caller.
///
/// # Errors
/// If it is more than the build or the engine supports.
pub(crate) fn pool(threads: usize) -> Result<Box<dyn Pool>, Error> {
    let most = if cfg!(feature = "threads") { MAX_THREADS } else { 1 };
    match threads {
        0 | 1 => Ok(Box::new(Inline)),
        n if n <= most => Ok(Box::new(Threads(n))),
        n => Err(Error::Option(format!("threads is {n}, expected at most {most} in this build"))),
    }
}

/// Runs parallel regions of the leader; does not return.
#[cfg(feature = "threads")]
pub(crate) fn follow() {
    STANDBY.follow();
}

/// Reports that a thread was ended by a trap.
#[cfg(feature = "threads")]
pub(crate) fn report_lost_worker() {
    STANDBY.report_lost_worker();
}

/// Why the module has stopped, if a thread is the reason.
#[cfg(any(feature = "bindgen", feature = "plain"))]
pub(crate) fn fault() -> Option<&'static str> {
    STANDBY.has_lost_worker().then_some("one of its threads was ended by a trap")
}

/// Panics on a thread in [`follow`]: hosts use it to test their recovery.
#[cfg(feature = "threads")]
pub(crate) fn panic_on_a_thread() {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;
    use std::time::Duration;

    let leader = thread::current().id();
    let helped = AtomicBool::new(false);
    STANDBY.lead(&|| {
        if thread::current().id() != leader {
            helped.store(true, Ordering::SeqCst);
            crate::crash::panic_on_request();
        }
        while !helped.load(Ordering::SeqCst) {
            thread::sleep(Duration::from_millis(1));
        }
    });
}

//! The threads that the page brings, in builds whose memory can be shared: workers with this module and its memory,
//! that stay in [`follow`] for as long as they live.

use starling::kernels::standby::Standby;
use starling::pool::{Inline, MAX_THREADS, Pool};

use crate::session::Error;

/// One for the memory: of several models the one that comes first has the others' help, which slows and changes nothing.
static STANDBY: Standby = Standby::new();

/// The caller, and threads in [`follow`].
struct Threads(usize);

impl Pool for Threads {
    fn threads(&self) -> usize {
        self.0
    }

    fn broadcast(&self, work: &(dyn Fn() + Sync)) {
        STANDBY.lead(work);
    }
}

/// A pool of so many threads, the caller's included.
///
/// # Errors
/// If this build, or the engine, has fewer.
pub(crate) fn pool(threads: usize) -> Result<Box<dyn Pool>, Error> {
    let most = if cfg!(feature = "threads") { MAX_THREADS } else { 1 };
    match threads {
        0 | 1 => Ok(Box::new(Inline)),
        n if n <= most => Ok(Box::new(Threads(n))),
        n => Err(Error::Option(format!("threads is {n}, this build has at most {most}"))),
    }
}

/// What a thread does that the page brings: it does not return.
#[cfg(feature = "threads")]
pub(crate) fn follow() {
    STANDBY.follow();
}

/// A thread was stopped by a trap.
#[cfg(feature = "threads")]
pub(crate) fn report_lost_worker() {
    STANDBY.report_lost_worker();
}

/// What there is to say of threads once the module has stopped.
#[cfg(any(feature = "bindgen", feature = "plain"))]
pub(crate) fn fault() -> Option<&'static str> {
    STANDBY.has_lost_worker().then_some("one of its threads was stopped")
}

/// Panics on a thread that helps, for programs that test how they go on after it.
#[cfg(feature = "threads")]
pub(crate) fn crash() {
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::thread;
    use std::time::Duration;

    let leader = thread::current().id();
    let helped = AtomicBool::new(false);
    STANDBY.lead(&|| {
        if thread::current().id() != leader {
            helped.store(true, Ordering::SeqCst);
            crate::crash::crash();
        }
        while !helped.load(Ordering::SeqCst) {
            thread::sleep(Duration::from_millis(1));
        }
    });
}

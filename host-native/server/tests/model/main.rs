//! Model checks of the data structures that the server's threads share: shuttle runs each case under many interleavings.

#[path = "../../src/priority.rs"]
#[allow(dead_code, unreachable_pub)]
mod priority;
mod schedule;
mod state;

/// Shuttle's locks in place of the standard library's.
mod sync {
    pub(crate) use shuttle::sync::{Arc, Condvar, Mutex, MutexGuard};
    pub(crate) use std::sync::PoisonError;
}

mod request_queue;
mod session_table;

/// Runs a case under random interleavings, and under those with few context switches (PCT).
fn check(case: impl Fn() + Send + Sync + Clone + 'static) {
    shuttle::check_random(case.clone(), 2000);
    shuttle::check_pct(case, 2000, 3);
}

fn main() {
    session_table::a_turn_sees_the_turns_since_the_last_close_and_no_others();
    request_queue::a_request_is_taken_or_cancelled_once_and_the_worker_wakes();
}

//! Locks of the modules that `tests/model` checks: there they are shuttle's, which tries the orders that threads can take.

pub use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

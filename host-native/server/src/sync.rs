//! Locks of `handoff`, `scheduler` and `sessions`. `tests/model` replaces this module with shuttle's locks.

pub use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

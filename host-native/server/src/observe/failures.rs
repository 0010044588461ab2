//! Record of requests that were ended because workers failed on them. It names requests and faults, and no text.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use serde::Serialize;
use utoipa::ToSchema;

/// Maximum number of entries; the oldest are dropped.
const MAX_FAILURES: usize = 256;

/// A request that ended without an answer, because two workers failed on it in the same way.
#[derive(Debug, Clone, Serialize, ToSchema)]
pub struct Failure {
    /// Unix time in seconds.
    pub time: u64,
    /// ID of the request.
    pub request_id: String,
    /// Model name.
    pub model: String,
    /// Worker that failed last.
    pub worker: u32,
    /// The fault.
    pub fault: String,
    /// Tokens that the client had received.
    pub tokens: usize,
}

/// The latest failures.
#[derive(Debug, Default)]
pub struct Failures(Mutex<VecDeque<Failure>>);

impl Failures {
    pub fn add(&self, failure: Failure) {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() == MAX_FAILURES {
            all.pop_front();
        }
        all.push_back(failure);
    }

    /// All entries, the oldest first.
    pub fn list(&self) -> Vec<Failure> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }
}

/// The record that all workers share.
pub type SharedFailures = Arc<Failures>;

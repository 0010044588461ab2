//! Signatures in a build without them: none is verified, and none is made.

use std::time::{Duration, SystemTime};

#[derive(Debug, Default)]
pub struct Policy {
    pub window: Duration,
    /// Stands for the other limits.
    pub others: (),
}

#[derive(Debug)]
pub struct Verifier(());

/// Has no value.
#[derive(Debug, Clone)]
enum Never {}

#[derive(Debug, Clone)]
pub struct Verified {
    pub key_id: String,
    never: Never,
}

impl Verifier {
    pub fn started_at(_: Policy, _: SystemTime) -> Verifier {
        Verifier(())
    }
}

impl Verified {
    pub fn check_body(&self, _: &[u8]) -> Result<(), String> {
        match self.never {}
    }
}

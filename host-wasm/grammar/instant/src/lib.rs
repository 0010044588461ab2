//! Stub of the `instant` crate, which is not maintained. `llguidance` measures its work with it; WebAssembly has no clock, and
//! no result may depend on one: all times are equal.
#![no_std]

use core::ops::Sub;
use core::time::Duration;

/// A point in time: all are equal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Instant;

impl Instant {
    /// The present.
    #[must_use]
    pub fn now() -> Instant {
        Instant
    }

    /// Zero.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        Duration::ZERO
    }

    /// The time since an earlier moment: none.
    #[must_use]
    pub fn duration_since(&self, _: Instant) -> Duration {
        Duration::ZERO
    }
}

impl Sub for Instant {
    type Output = Duration;

    fn sub(self, _: Instant) -> Duration {
        Duration::ZERO
    }
}

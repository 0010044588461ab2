//! A clock that stands still. `llguidance` measures how long its work takes; modules for browsers have no clock, nobody
//! there asks, and nothing that it finds out may depend on one. Takes the place of the crate of this name, which nobody
//! keeps any more.
#![no_std]

use core::ops::Sub;
use core::time::Duration;

/// A moment; there is only one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Instant;

impl Instant {
    /// This moment.
    #[must_use]
    pub fn now() -> Instant {
        Instant
    }

    /// The time since then: none.
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

//! The queue and what it consists of.

#[path = "../../../src/schedule/handoff.rs"]
#[allow(dead_code, unreachable_pub)]
pub(crate) mod handoff;
#[path = "../../../src/schedule/scheduler.rs"]
#[allow(dead_code, unreachable_pub)]
pub(crate) mod scheduler;
#[path = "../../../src/schedule/turns.rs"]
#[allow(dead_code, unreachable_pub)]
pub(crate) mod turns;

/// Stand-in for the queue of the server, from which the modules import this type.
pub(crate) mod queue {
    pub(crate) use super::handoff::PrefixEviction;
}

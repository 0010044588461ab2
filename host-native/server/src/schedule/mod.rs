//! Queues, turns and slots: who runs when.

pub mod breaker;
pub mod compile_slots;
pub mod fair_turns;
pub mod faults;
pub mod handoff;
pub mod offload;
pub mod queue;
pub mod scheduler;
pub mod turns;

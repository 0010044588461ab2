//! Metrics, traces, statistics.

pub mod callback;
pub mod failures;
pub mod metrics;
pub mod model_metrics;
pub mod stats;
pub mod trace;
pub mod usage;

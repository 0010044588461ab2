//! Metrics, traces, statistics.

pub mod callback;
pub mod failures;
pub mod log;
pub mod metrics;
pub mod model_metrics;
pub mod request_id;
pub mod response_end;
pub mod stats;
pub mod trace;
pub mod usage;

//! Mixture of experts: each token is routed to a few feed-forwards.

pub(crate) mod config;
mod forward;
mod route;
mod weights;

pub use config::{AdjugatesConfig, ExpertsConfig};
pub(crate) use forward::ExpertsOf;
pub(crate) use weights::{Experts, FUSED_EXPERTS, ROUTER, UP_EXPERTS};

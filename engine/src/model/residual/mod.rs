//! Orders of norms, sub-layers and residual sums.

pub(crate) mod altup;
mod attended;
pub(crate) mod batch;
pub(crate) mod block;
pub(crate) mod config;
mod hyper;
pub(crate) mod layer;
mod orders;
pub(crate) mod passes;
pub(crate) mod streams;

pub use config::ResidualConfig;
pub use hyper::HyperConfig;
pub use passes::PassEnd;

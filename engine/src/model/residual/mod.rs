//! Orders of norms, sub-layers and residual sums.

pub(crate) mod altup;
pub(crate) mod attended;
pub(crate) mod hyper;
pub(crate) mod orders;
pub(crate) mod passes;

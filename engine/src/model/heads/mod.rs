//! What reads the last hidden states.

pub(crate) mod classifier;
pub mod mtp;
pub(crate) mod projection;

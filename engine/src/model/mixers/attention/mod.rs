//! Attention over keys and values.

pub(crate) mod heads;
pub(crate) mod rope;
pub(crate) mod rotary;

//! Starling's own endpoints.

pub mod execute;
pub mod generate;

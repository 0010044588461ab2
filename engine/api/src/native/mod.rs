//! Starling's own endpoints.

pub mod execute;
pub mod generate;
pub mod tokenize;
pub mod verify;

//! Starling's own API.

pub mod execute;
pub mod generate;
pub mod health;
pub mod receipts;
pub mod server_stats;
pub mod tokenize;

//! Ollama's API.

pub mod embed;
pub mod generate;
pub mod models;
pub mod pull;

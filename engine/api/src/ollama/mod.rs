//! Ollama's API. Source: <https://github.com/ollama/ollama/blob/main/docs/api.md>.

pub mod embed;
pub mod error;
pub mod models;
pub mod request;
pub mod response;

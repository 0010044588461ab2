//! The interface over HTTP: one folder or file per vendor, and what they share.

pub mod anthropic;
pub mod common;
pub mod llama_server;
pub mod native;
pub mod ollama;
pub mod openai;
pub mod openapi;
pub mod page;
pub mod rerank;
pub mod router;
pub mod tei;

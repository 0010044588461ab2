//! The interface over HTTP: OpenAI's, and Starling's own beside it.

pub mod answer;
pub mod anthropic;
pub mod body;
pub mod chat;
pub mod completions;
pub mod embeddings;
pub mod error;
pub mod execute;
pub mod generate;
pub mod llama_server;
pub mod messages;
pub mod models;
pub mod ollama;
pub mod options;
pub mod params;
pub mod receipts;
pub mod responses;
pub mod slots;
pub mod sse;
pub mod stored;
pub mod structure;
pub mod submit;
pub mod tei;
pub mod text;
pub mod tokenize;
pub mod writes;

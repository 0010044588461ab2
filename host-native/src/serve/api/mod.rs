//! The interface over HTTP: OpenAI's, and Starling's own beside it.

pub mod answer;
pub mod body;
pub mod chat;
pub mod completions;
pub mod embeddings;
pub mod error;
pub mod execute;
pub mod fields;
pub mod generate;
pub mod messages;
pub mod models;
pub mod options;
pub mod params;
pub mod receipts;
pub mod slots;
pub mod sse;
pub mod structure;
pub mod submit;
pub mod tokenize;

//! OpenAI's endpoints.

pub mod chat;
pub mod completions;
pub mod embeddings;
pub mod models;
pub mod options;
pub mod response;
pub mod stored;

//! What is computed once and used again: answers, embeddings, and whole responses.

mod answers;
mod bytes_lru;
mod cache;
mod embeddings;
mod kept;
mod shared_log;

pub use answers::{Answers, Found, Reuse};
pub use embeddings::Embeddings;
pub use kept::{KeptResponses, keep};
pub use shared_log::Reader;

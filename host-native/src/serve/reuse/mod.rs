//! What is computed once and used again: answers, embeddings, and whole responses.

mod answer_file;
mod answers;
mod bytes_lru;
mod cache;
mod disk;
mod embeddings;
mod kept;
mod shared_log;

pub use answers::{AnswerReader, Answers, Found, Reuse};
pub use cache::ReuseKey;
pub use disk::AnswerDisk;
pub use embeddings::Embeddings;
pub use kept::{KeptResponses, keep};
pub use shared_log::Reader;

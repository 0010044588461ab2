//! What is computed once and used again: answers, embeddings, and whole responses.

mod answer_file;
mod answers;
mod bytes_lru;
mod cache;
mod disk;
mod embeddings;
mod kept;
mod key;
mod shared_log;
mod tenant_lru;

pub use answers::{AnswerReader, Answers, Found, Reuse};
pub use disk::AnswerDisk;
pub use embeddings::Embeddings;
pub use kept::{KeptResponses, keep};
pub use key::ReuseKey;
pub use shared_log::Reader;

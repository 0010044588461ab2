//! What is computed once and used again: answers, embeddings, and whole responses.

mod answer_file;
mod answers;
mod bytes_lru;
mod cache;
mod disk;
mod embeddings;
pub mod kept;
mod key;
pub mod shared_log;
mod tenant_lru;

pub use answers::{AnswerReader, Answers, Determined, Found, Reuse};
pub use disk::AnswerDisk;
pub use embeddings::Embeddings;
pub use kept::KeptResponses;
pub use key::{Computation, ReuseKey};

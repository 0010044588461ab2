//! OpenAI's endpoints.

pub mod chat;
pub mod completions;
pub mod options;
pub mod response;

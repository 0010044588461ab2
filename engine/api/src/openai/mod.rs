//! OpenAI's endpoints.

pub mod options;

//! Anthropic's Messages API. Source: <https://docs.claude.com/en/api/messages>.

pub mod error;
pub mod models;
pub mod request;
pub mod response;
mod system;

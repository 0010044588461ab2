//! Wire formats of Starling: OpenAI's endpoints and Starling's own, as pure functions.
//!
//! ```text
//! body ─ parse ─► request type ─ checks ─► starling::engine::Request
//! engine events ─ Update ─► Answer ─► response JSON          or  StreamWriter ─► EventSink (JSON chunks, SSE)
//! ```
//!
//! The crate has no sockets, files, clock, threads or entropy: hosts pass times, names and seeds. The server and the page
//! use the same functions, so that their answers cannot differ.

#![deny(unsafe_code)]

pub mod answer;
pub mod anthropic;
pub mod clock;
pub mod error;
mod fields;
pub mod infill;
pub mod input;
pub mod llama_server;
pub mod messages;
pub mod native;
pub mod ollama;
pub mod openai;
pub mod output;
pub mod parse;
pub mod parts;
pub mod pieces;
pub mod rerank;
pub mod responses;
pub mod shared;
pub mod stream;
pub mod structure;
pub mod tei;
pub mod tools;
pub mod update;
mod whole;

//! The HTTP server of Starling.
//!
//! ```text
//! http (connections) ─ gate (Host, key) ─ routes (checks, tokens) ─► queue ─► worker: Engine::step ─► channel ─► routes ─► client
//!                                                                      │
//!                                                                scheduler (policy)
//! ```
//!
//! A request passes through the files in this order: `http/listener.rs`, `http/gate.rs`, `routes/openai/chat.rs` (or another),
//! `routes/common/options.rs`, `routes/common/submit.rs`, `schedule/queue.rs` with `schedule/scheduler.rs`, `models/worker.rs`,
//! and back to `routes/common/answer.rs` or `routes/common/sse.rs`.

#![deny(unsafe_code)]
// a build without some parts does not use all that the others offer them
#![cfg_attr(
    not(all(feature = "signatures", feature = "state-store", feature = "text-policy")),
    allow(dead_code, unused_imports)
)]
// not published: items are documented where there is something to say, and `pub` means the crate where a module is private
#![allow(missing_docs, unreachable_pub)]

mod admin;
pub mod config;
mod guard;
mod http;
mod models;
mod observe;
mod priority;
mod routes;
mod run;
mod schedule;
mod server;
mod start;
mod state;
mod sync;

pub use guard::audit;
pub use run::{RunningServer, run};

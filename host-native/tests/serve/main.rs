//! The server as its clients see it.

mod answers;
mod connections;
mod equal;
mod limits;
mod server;
mod sessions;
mod structure;
mod traces;
mod wire;

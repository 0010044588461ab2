//! HTTP tests of `starling serve`, each against a server process of its own.

mod answers;
mod connections;
mod equal;
mod limits;
mod server;
mod sessions;
mod structure;
mod traces;
mod wire;

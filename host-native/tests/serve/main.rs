//! HTTP tests of `starling serve`, each against a server process of its own.

mod admin;
mod admin_client;
mod answers;
mod audit;
mod certificates;
mod chaos;
mod connections;
mod equal;
mod kv_disk;
mod limits;
mod manners;
mod models;
mod policy;
mod pressure;
mod reuse;
mod server;
mod sessions;
mod signed;
mod slots;
mod state;
mod structure;
mod swap;
mod traces;
mod vendors;
mod wire;
mod workers;

//! Connections, and what all requests pass: limits, authentication, bodies, errors.

pub mod access_log;
pub mod audited;
pub mod body;
pub mod connection;
pub mod connection_memory;
pub mod error;
pub mod gate;
pub mod lanes;
pub mod listener;
pub mod params;
pub mod pieces;
pub mod response_end;
pub mod signed;
pub mod time_limit;
pub mod tls;

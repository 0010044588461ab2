//! Connections, and what all requests pass: limits, authentication, bodies, errors.

pub mod access_log;
pub mod audited;
pub mod body;
pub mod caller;
pub mod connection;
pub mod error;
pub mod fields;
pub mod gate;
pub mod keep;
pub mod lanes;
pub mod listener;
pub mod notes;
pub mod params;
pub mod pieces;
#[cfg(feature = "signatures")]
pub mod signed;
#[cfg(not(feature = "signatures"))]
#[path = "unsigned.rs"]
pub mod signed;
pub mod time_limit;
pub mod tls;

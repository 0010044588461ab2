//! Append-only audit log: a hash chain in JSON lines.
//!
//! Each line is one JSON object that ends with a line feed (0x0A):
//! ```text
//! {"seq":N,"time":"RFC 3339, UTC, ms","event":"NAME",…fields…,"previous":"64 hex digits","hash":"64 hex digits"}
//! ```
//! - `seq` starts at 1 and grows by 1 per line, also across files.
//! - `previous` is the `hash` of the line before, also across files; 64 zeros if `seq` is 1.
//! - `hash` is the SHA-256, or with a key the HMAC-SHA-256, of the bytes of the line from `{` up to, not including,
//!   the last `,"hash":`. To check one line with other tools:
//! ```text
//! printf %s "${line%,\"hash\":*}" | openssl dgst -sha256
//! printf %s "${line%,\"hash\":*}" | openssl dgst -sha256 -mac HMAC -macopt hexkey:"$(cat KEYFILE)"
//! ```
//!
//! A file above the size limit is renamed to `NAME.000001`, `NAME.000002`, …; the first line of the file after it is
//! the event `rotated` with that number. `NAME.lock` is locked while a process writes.
//!
//! Three such logs are written: see `trail.rs`.
//!
//! Without a key, whoever can write the file can compute a new chain: keep the last `hash` elsewhere, and give it to
//! [`verify()`].

mod chain;
mod disk;
mod hash;
mod record;
mod refusals;
#[cfg(test)]
mod testing;
mod trail;
mod verify;
mod writer;

pub use chain::Options;
pub use hash::{Hash, Key};
pub use record::{Event, Refusal, Text};
pub use trail::{AuditTrail, others};
pub use verify::{Report, verify};

//! HTTP Message Signatures (RFC 9421) with `hmac-sha256`, `Content-Digest` (RFC 9530), and protection from replay.
//!
//! Requests: [`Verifier::verify`] checks the headers, then [`Verified::check_body`] the body when it has arrived.
//! Responses: [`sign_response`].
//!
//! Not supported: `@query-param`, the component parameters `sf`, `key`, `bs`, `tr` and `name`, and other algorithms.

mod base;
mod digest;
mod field;
mod replay;
mod sign;
mod verify;

pub use base::{Request, Response};
pub use digest::ContentDigest;
pub use replay::ReplayError;
pub use sign::{Parameters, SignError, SignatureHeaders, sign_response};
pub use verify::{Error, Policy, Verified, Verifier};

/// Bytes of the shortest secret: half the length of the HMAC (RFC 2104, section 3, discourages less than its length).
pub const MIN_SECRET_BYTES: usize = 16;

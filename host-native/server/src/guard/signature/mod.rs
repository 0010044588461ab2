//! HTTP Message Signatures (RFC 9421) with `hmac-sha256`, `Content-Digest` (RFC 9530), and protection from replay.
//!
//! Requests: [`Verifier::verify`] checks the headers, then [`Verified::check_body`] the body when it has arrived.
//! Responses: [`sign_response`].
//!
//! Not supported: `@query-param`, the component parameters `sf`, `key`, `bs`, `tr` and `name`, and other algorithms.

#[cfg(not(feature = "signatures"))]
mod absent;
#[cfg(feature = "signatures")]
mod base;
#[cfg(feature = "signatures")]
mod digest;
#[cfg(feature = "signatures")]
mod field;
#[cfg(feature = "signatures")]
mod replay;
#[cfg(feature = "signatures")]
mod sign;
#[cfg(feature = "signatures")]
mod verify;

#[cfg(not(feature = "signatures"))]
pub use absent::{Policy, Verified, Verifier};
#[cfg(feature = "signatures")]
pub use base::{Request, Response};
#[cfg(feature = "signatures")]
pub use digest::ContentDigest;
#[cfg(feature = "signatures")]
pub use replay::ReplayError;
#[cfg(feature = "signatures")]
pub use sign::{Parameters, SignError, SignatureHeaders, sign_response};
#[cfg(feature = "signatures")]
pub use verify::{Error, Policy, Verified, Verifier};

/// Bytes of the shortest secret: half the length of the HMAC (RFC 2104, section 3, discourages less than its length).
pub const MIN_SECRET_BYTES: usize = 16;

//! `POST /v1/verify`.

use serde::{Deserialize, Serialize};
use starling::receipt::Receipt;

use crate::parse_whole;

/// Request to verify a receipt.
#[derive(Debug, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct VerifyRequest {
    /// Receipt of an answer.
    #[cfg_attr(feature = "openapi", schema(value_type = Object))]
    pub receipt: Receipt,
}

parse_whole!(VerifyRequest);

/// Result of a verification.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct VerifyResponse {
    /// Whether this model gave that output to that request.
    pub verified: bool,
    /// Number of generated tokens.
    pub tokens: usize,
    /// Digest at the end of the receipt's hash chain.
    pub digest: String,
    /// Why the verification failed, with the first step that differs.
    pub reason: Option<String>,
}

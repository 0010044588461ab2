//! Signed requests and responses in a build without signatures: there are none.

use std::sync::Arc;

use axum::extract::Request;
use axum::http::uri::Scheme;
use axum::middleware::Next;
use axum::response::Response;
use starling_api::error::ApiError;

use crate::guard::auth::Keys;
use crate::guard::connection_memory::HeldMemory;
use crate::guard::signature::{Verified, Verifier};

#[derive(Clone)]
pub struct SignWith {
    pub key_id: String,
    pub secret: Arc<[u8]>,
    pub memory: Option<Arc<HeldMemory>>,
}

/// Signatures are ignored: a request needs another credential.
///
/// # Errors
/// None.
pub fn verify(_: &Verifier, _: &Keys, _: &Scheme, _: &mut Request) -> Result<Option<Verified>, ApiError> {
    Ok(None)
}

pub async fn sign(request: Request, next: Next) -> Response {
    next.run(request).await
}

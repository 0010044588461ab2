//! `POST /v1/verify`: replays the answer of a receipt.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use starling::error::RequestError;
use starling::pool::Inline;
use starling::receipt::{VerifyError, verify};
use starling_api::native::verify::{VerifyRequest, VerifyResponse};
use tokio::time::timeout;

use crate::http::body::Body;
use crate::http::error::{ApiError, ErrorBody, HttpError, json};
use crate::server::{Caller, Server};

/// Verify a receipt by replaying its answer.
///
/// # Errors
/// A wrong request, or a server that cannot answer now.
#[utoipa::path(post, path = "/v1/verify", tag = "Starling", request_body = VerifyRequest, responses(
    (status = 200, description = "Result of the verification", body = VerifyResponse),
    (status = "4XX", description = "The request is wrong", body = ErrorBody),
    (status = "5XX", description = "The server cannot answer now", body = ErrorBody),
))]
pub async fn verify_receipt(
    State(server): State<Arc<Server>>,
    caller: Caller,
    Body(body): Body<VerifyRequest>,
) -> Result<Response, HttpError> {
    let loaded = server.pool.entries().into_iter().filter_map(|entry| entry.instance());
    let instance = match loaded.into_iter().find(|instance| instance.model_sha256 == body.receipt.model.0) {
        Some(instance) => instance,
        None => server.model(None, None, &caller).await?,
    };
    let Some(sizes) = instance.engine else {
        let refused = instance.model.config.check_generates().err().unwrap_or(RequestError::Encoder);
        return Err(ApiError::refused(&refused, "receipt").into());
    };
    let receipt = body.receipt;
    let (tokens, digest) = (receipt.output.len(), receipt.digest.to_string());
    let n = receipt.request.prompt.len() + tokens;
    caller
        .identity
        .tenant
        .count_tokens(n, instance.settings().key_tokens)
        .inspect_err(|_| instance.metrics.rejected("key_tokens"))?;
    // memory for one replay at a time, beside the engine's own
    let turn = timeout(instance.settings().queue_timeout, instance.replay.take(&caller.identity.tenant.name)).await;
    let late = |_| ApiError::unavailable("other receipts are being checked; try again later").code("queue_timeout");
    let turn =
        turn.map_err(late)?.map_err(ApiError::from).inspect_err(|_| instance.metrics.rejected("tenant_requests"))?;
    let replay = tokio::task::spawn_blocking(move || {
        let _turn = turn;
        verify(&instance.model, &instance.model_sha256, instance.cpu, &Inline, sizes.n_ctx, &receipt)
    });
    let result = replay.await.map_err(|_| ApiError::internal("the replay has failed"))?;
    let reason = match result {
        Ok(()) => None,
        Err(VerifyError::Memory(_)) => return Err(ApiError::unavailable("not enough memory for the replay").into()),
        Err(e) => Some(e.to_string()),
    };
    let response = VerifyResponse { verified: reason.is_none(), tokens, digest, reason };
    Ok(json(StatusCode::OK, &response))
}

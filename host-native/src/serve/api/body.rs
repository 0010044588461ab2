//! Bodies of requests: JSON, bounded in size, depth and time.

use std::sync::Arc;

use axum::body::{Bytes, to_bytes};
use axum::extract::{FromRequest, Request};
use axum::http::{StatusCode, header};
use starling_api::parse::ParseBody;
use tokio::time::timeout;
use utoipa::ToSchema;

use super::super::connection::Peer;
use super::super::offload::offload;
use super::super::signature::Verified;
use super::super::state::{Caller, Server};
use super::error::{ApiError, HttpError, INVALID_REQUEST, quoted};
use super::fields;

/// The body of a request.
#[derive(Debug)]
pub struct Body<T>(pub T);

impl<T: ParseBody + ToSchema + Send + 'static> FromRequest<Arc<Server>> for Body<T> {
    type Rejection = HttpError;

    async fn from_request(request: Request, server: &Arc<Server>) -> Result<Self, HttpError> {
        let kind = request.headers().get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
        // a page in a browser may send text anywhere without asking, JSON only where it is allowed to
        let kind = kind.split(';').next().unwrap_or_default().trim();
        if !(kind.eq_ignore_ascii_case("application/json") || is_default(kind) && is_local_program(&request)) {
            let found =
                if kind.is_empty() { "no content type".into() } else { format!("content type {}", quoted(kind)) };
            let message = format!("found {found}, expected the header `Content-Type: application/json`");
            return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE.as_u16(), INVALID_REQUEST, message).into());
        }
        let signed = request.extensions().get::<Verified>().cloned();
        let caller = request.extensions().get::<Caller>().cloned();
        let bytes = read_body(server, request.into_body()).await?;
        if let Some(signed) = signed {
            signed.check_body(&bytes).map_err(|e| {
                let status = StatusCode::UNAUTHORIZED.as_u16();
                ApiError::new(status, "authentication_error", e.to_string()).code("invalid_digest")
            })?;
        }
        let are_refused = server.settings().refuse_unknown_fields;
        let len = bytes.len();
        let parse = move || {
            let unknown = fields::unknown::<T>(&bytes, are_refused);
            // a wrong field before a misspelt one: it is the same fault, told better
            T::parse_body(&bytes).and_then(|body| Ok((body, unknown?)))
        };
        let (body, unknown) = offload(len, parse).await??;
        if let Some(caller) = caller.filter(|_| !unknown.is_empty()) {
            let names = fields::header(&unknown);
            tracing::warn!(fields = names, "the request has unknown fields, which are ignored");
            let _ = caller.ignored.set(names);
        }
        Ok(Body(body))
    }
}

/// The content types of programs that were told none, such as curl with `--data`.
fn is_default(kind: &str) -> bool {
    kind.is_empty() || kind.eq_ignore_ascii_case("application/x-www-form-urlencoded")
}

/// Whether the request is from a program on this machine: browsers send one of these headers with each POST.
fn is_local_program(request: &Request) -> bool {
    let is_local = request.extensions().get::<Peer>().is_some_and(|peer| peer.address.to_canonical().is_loopback());
    is_local && !["origin", "sec-fetch-site"].iter().any(|name| request.headers().contains_key(*name))
}

/// The bytes of a body.
///
/// # Errors
/// If it is too large, takes too long, or is cut off.
pub async fn read_body(server: &Server, body: axum::body::Body) -> Result<Bytes, ApiError> {
    let limit = usize::try_from(server.settings().max_body.0).unwrap_or(usize::MAX);
    match timeout(server.settings().body_timeout, to_bytes(body, limit)).await {
        Ok(Ok(bytes)) => Ok(bytes),
        Ok(Err(e)) => Err(body_error(&*e.into_inner(), limit)),
        Err(_) => {
            let message = "the body of the request took too long";
            Err(ApiError::new(StatusCode::REQUEST_TIMEOUT.as_u16(), INVALID_REQUEST, message))
        }
    }
}

fn body_error(error: &(dyn std::error::Error + 'static), limit: usize) -> ApiError {
    if error.is::<http_body_util::LengthLimitError>() {
        let message = format!("the body of the request is larger than {limit} bytes");
        let status = StatusCode::PAYLOAD_TOO_LARGE.as_u16();
        return ApiError::new(status, INVALID_REQUEST, message).code("request_too_large");
    }
    ApiError::invalid("the body of the request did not arrive")
}

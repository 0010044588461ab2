//! Signed requests and responses: which key has signed a request, and the signature of its response.

use std::sync::Arc;
use std::time::SystemTime;

use axum::body::Body;
use axum::extract::Request;
use axum::http::uri::Scheme;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http_body_util::BodyExt;
use starling_api::error::ApiError;
use starling_host::clock::random_id;

use crate::guard::auth::Keys;
use crate::guard::connection_memory::HeldMemory;
use crate::guard::signature;
use crate::guard::signature::{
    ContentDigest, Error, Parameters, ReplayError, SignError, SignatureHeaders, Verified, Verifier, sign_response,
};
use crate::http::error::HttpError;

/// Content types of responses whose parts leave as they are made.
const STREAMS: [&str; 2] = ["text/event-stream", "application/x-ndjson"];
const SIGNATURE: &str = "signature";
/// Names the signature of a response.
const LABEL: &str = "starling";

/// The key that a response is to be signed with; an extension of the response.
#[derive(Clone)]
pub struct SignWith {
    pub key_id: String,
    pub secret: Arc<[u8]>,
    /// Of the request; a signed body is held whole.
    pub memory: Option<Arc<HeldMemory>>,
}

/// Verifies the signature of a request; `None` if it has none. The reader of the body checks it against [`Verified`], which
/// becomes an extension of the request.
///
/// # Errors
/// If the signature is invalid, was seen before, or is of an unknown key.
pub fn verify(
    verifier: &Verifier,
    keys: &Keys,
    scheme: &Scheme,
    request: &mut Request,
) -> Result<Option<Verified>, ApiError> {
    let headers = request.headers();
    if !headers.contains_key(SIGNATURE) && !headers.contains_key("signature-input") {
        return Ok(None);
    }
    let has_body = !hyper::body::Body::is_end_stream(request.body());
    let message = signature::Request { method: request.method(), uri: request.uri(), headers, scheme, has_body };
    let verified = verifier.verify(message, &|id| keys.secret(id), SystemTime::now()).map_err(refused)?;
    request.extensions_mut().insert(verified.clone());
    Ok(Some(verified))
}

/// 401, or 429 if the key has signed too many requests to remember.
fn refused(error: Error) -> ApiError {
    if let Error::Replay(ReplayError::Full { .. }) = error {
        let status = StatusCode::TOO_MANY_REQUESTS.as_u16();
        return ApiError::new(status, "rate_limit_error", error.to_string()).code("too_many_nonces");
    }
    let message = match &error {
        // which keys exist is nobody's business
        Error::UnknownKey { .. } | Error::Mismatch => {
            "the signature is not that of this request with a known key".into()
        }
        other => format!("signature: {other}"),
    };
    ApiError::new(StatusCode::UNAUTHORIZED.as_u16(), "authentication_error", message).code("invalid_signature")
}

/// Middleware outside of all that changes a body: signs responses that have [`SignWith`]. Streams are signed without a digest: it
/// would be known at their end only.
pub async fn sign(request: Request, next: Next) -> Response {
    let (method, uri) = (request.method().clone(), request.uri().clone());
    let signature = request.headers().get(SIGNATURE).cloned();
    let mut response = next.run(request).await;
    let Some(with) = response.extensions_mut().remove::<SignWith>() else { return response };
    let kind = response.headers().get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    if !STREAMS.iter().any(|stream| kind.starts_with(stream)) {
        let (mut parts, body) = response.into_parts();
        let bytes = match collect(body, with.memory.as_deref()).await {
            Ok(bytes) => bytes,
            Err(error) => return HttpError(error).into_response(),
        };
        if let Ok(digest) = ContentDigest::sha256(&bytes).header_value() {
            parts.headers.insert("content-digest", digest);
        }
        response = Response::from_parts(parts, Body::from(bytes));
    }
    match sign_head(&response, &method, &uri, signature, &with) {
        Ok(headers) => headers.insert_into(response.headers_mut()),
        Err(e) => tracing::error!("response not signed: {e}"),
    }
    response
}

/// The bytes of a body, which count as held.
///
/// # Errors
/// If the body fails, or there is too little memory.
async fn collect(mut body: Body, memory: Option<&HeldMemory>) -> Result<Vec<u8>, ApiError> {
    let mut bytes = Vec::new();
    while let Some(frame) = body.frame().await {
        let failed = |_| ApiError::internal("internal error: the response could not be signed");
        let Ok(data) = frame.map_err(failed)?.into_data() else { continue };
        if let Some(memory) = memory {
            memory.grow(data.len())?;
        }
        bytes.extend_from_slice(&data);
    }
    Ok(bytes)
}

fn sign_head(
    response: &Response,
    method: &Method,
    uri: &Uri,
    of_request: Option<HeaderValue>,
    with: &SignWith,
) -> Result<SignatureHeaders, SignError> {
    let headers: HeaderMap =
        of_request.into_iter().map(|value| (header::HeaderName::from_static(SIGNATURE), value)).collect();
    let request = signature::Request { method, uri, headers: &headers, scheme: &Scheme::HTTPS, has_body: false };
    let nonce = random_id("");
    let parameters = Parameters {
        label: LABEL,
        key_id: &with.key_id,
        created: SystemTime::now(),
        expires: None,
        nonce: Some(&nonce),
        tag: None,
    };
    let message = signature::Response { status: response.status(), headers: response.headers() };
    sign_response(message, request, &parameters, &with.secret)
}

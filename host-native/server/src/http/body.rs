//! Bodies of requests: JSON, bounded in size, depth and time.

use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::{FromRequest, Request};
use axum::http::{StatusCode, header};
use http_body_util::BodyExt;
use hyper::body::Body as HttpBody;
use starling_api::parse::ParseBody;
use tokio::time::{Instant, timeout_at};
use utoipa::ToSchema;

use super::error::{ApiError, HttpError, INVALID_REQUEST, quoted};
use super::fields;
use crate::config::Settings;
use crate::guard::connection_memory::{HeldMemory, parsed_bytes};
use crate::guard::peer::Peer;
use crate::guard::signature::Verified;
use crate::schedule::offload::offload;
use crate::server::{Caller, Server};

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
        let memory = caller.as_ref().map(|caller| &*caller.memory);
        let bytes = read_body(server, request.into_body(), memory).await?;
        if let Some(signed) = signed {
            signed.check_body(&bytes).map_err(|e| {
                let status = StatusCode::UNAUTHORIZED.as_u16();
                ApiError::new(status, "authentication_error", e.to_string()).code("invalid_digest")
            })?;
        }
        let are_refused = server.settings().refuse_unknown_fields;
        let len = bytes.len();
        if let Some(memory) = memory {
            memory.grow(parsed_bytes(&bytes)).map_err(ApiError::from)?;
        }
        let parse = move || {
            let unknown = fields::unknown::<T>(&bytes, are_refused);
            // a wrong field before a misspelt one: it is the same fault, told better
            T::parse_body(&bytes).and_then(|body| Ok((body, unknown?)))
        };
        let (body, unknown) = offload(len, parse).await??;
        if let Some(memory) = memory {
            memory.shrink(len);
        }
        if let Some(caller) = caller.filter(|_| !unknown.is_empty()) {
            let names = fields::header(&unknown);
            tracing::warn!(fields = names, "the request has unknown fields, which are ignored");
            let _ = caller.notes.ignored.set(names);
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

/// Time before [`Settings::body_rate`] is asked for.
const RATE_GRACE: Duration = Duration::from_secs(5);

/// When a body must have come further.
struct Pace {
    start: Instant,
    /// Of the whole body.
    limit: Duration,
    /// Bytes per second; 0: any.
    rate: u64,
}

impl Pace {
    fn new(settings: &Settings, start: Instant) -> Pace {
        Pace { start, limit: settings.body_timeout, rate: settings.body_rate.0 }
    }

    /// When the next byte after `received` ones must be there, and whether the rate asks for it rather than the time limit.
    fn deadline(&self, received: usize) -> (Instant, bool) {
        let end = self.start + self.limit;
        if self.rate == 0 {
            return (end, false);
        }
        let due = self.start + RATE_GRACE + Duration::from_secs_f64(received as f64 / self.rate as f64);
        if due < end { (due, true) } else { (end, false) }
    }
}

/// The bytes of a body. They count as held by `memory` as they arrive.
///
/// # Errors
/// If it is too large, takes too long, is cut off, or there is too little memory.
pub async fn read_body(
    server: &Server,
    mut body: axum::body::Body,
    memory: Option<&HeldMemory>,
) -> Result<Bytes, ApiError> {
    let settings = server.settings();
    let limit = usize::try_from(settings.max_body.0).unwrap_or(usize::MAX);
    let pace = Pace::new(&settings, Instant::now());
    if HttpBody::size_hint(&body).lower() > limit as u64 {
        return Err(too_large(limit));
    }
    let mut bytes = Vec::new();
    loop {
        let (deadline, is_rate) = pace.deadline(bytes.len());
        let frame = match timeout_at(deadline, body.frame()).await {
            Ok(None) => return Ok(bytes.into()),
            Ok(Some(frame)) => frame,
            Err(_) => return Err(too_slow(is_rate.then_some(pace.rate))),
        };
        let frame = frame.map_err(|_| ApiError::invalid("the body of the request did not arrive"))?;
        let Ok(data) = frame.into_data() else { continue };
        if data.len() > limit - bytes.len() {
            return Err(too_large(limit));
        }
        reserve(&mut bytes, data.len(), limit, memory)?;
        bytes.extend_from_slice(&data);
    }
}

/// Makes room for `more` bytes, and takes memory for it.
fn reserve(bytes: &mut Vec<u8>, more: usize, limit: usize, memory: Option<&HeldMemory>) -> Result<(), ApiError> {
    let (len, capacity) = (bytes.len(), bytes.capacity());
    if capacity - len >= more {
        return Ok(());
    }
    let wanted = (len + more).max(capacity + capacity / 2).min(limit);
    if let Some(memory) = memory {
        memory.grow(wanted - capacity)?;
    }
    bytes.reserve_exact(wanted - len);
    Ok(())
}

fn too_large(limit: usize) -> ApiError {
    let message = format!("the body of the request is larger than {limit} bytes");
    ApiError::new(StatusCode::PAYLOAD_TOO_LARGE.as_u16(), INVALID_REQUEST, message).code("request_too_large")
}

/// `rate` is the one that was asked for, in bytes per second; `None`: the time is over.
fn too_slow(rate: Option<u64>) -> ApiError {
    let status = StatusCode::REQUEST_TIMEOUT.as_u16();
    match rate {
        None => ApiError::new(status, INVALID_REQUEST, "the body of the request took too long"),
        Some(rate) => {
            let message = format!("the body of the request came slower than {rate} bytes per second (--body-rate)");
            ApiError::new(status, INVALID_REQUEST, message).code("body_too_slow")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guard::connection_memory::{ConnectionMemory, MemoryLimits};

    #[test]
    fn a_body_has_a_least_rate_after_some_time() {
        let start = Instant::now();
        let pace = Pace { start, limit: Duration::from_secs(30), rate: 1000 };
        let after = |received| (pace.deadline(received).0 - start, pace.deadline(received).1);
        assert_eq!(after(0), (RATE_GRACE, true));
        assert_eq!(after(2000), (RATE_GRACE + Duration::from_secs(2), true));
        assert_eq!(after(1 << 20), (pace.limit, false));
        let any = Pace { start, limit: Duration::from_secs(30), rate: 0 };
        assert_eq!(any.deadline(0), (start + any.limit, false));
    }

    #[test]
    fn memory_grows_with_what_has_arrived() {
        let limits = MemoryLimits { total: 1000, tenant: 1000, address: 1000 };
        let account = Arc::new(ConnectionMemory::new(limits));
        let memory = account.part(None, None);
        let mut bytes = Vec::new();
        for _ in 0..10 {
            reserve(&mut bytes, 50, 8000, Some(&memory)).unwrap();
            bytes.extend_from_slice(&[0; 50]);
            assert_eq!(account.n_bytes(), bytes.capacity());
            assert!(bytes.capacity() <= bytes.len() * 3 / 2);
        }
        assert_eq!(reserve(&mut bytes, 900, 8000, Some(&memory)).unwrap_err().code, Some("connection_memory"));
    }
}

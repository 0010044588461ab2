//! The audit record of a request: written when the last byte of its response has been taken, or the client has gone.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use axum::body::{Body, Bytes};
use axum::response::Response;
use hyper::body::{Frame, SizeHint};

use super::api::error::ErrorCode;
use super::audit::{AuditLog, Event, Text};
use super::state::Caller;

/// A response body that writes the record of its request when it is dropped.
struct AuditedBody {
    inner: Body,
    log: Arc<AuditLog>,
    caller: Caller,
    request_id: Arc<str>,
    endpoint: String,
    status: u16,
    code: Option<&'static str>,
    is_complete: bool,
}

/// Writes a record when the response has ended.
pub fn audited(
    response: Response,
    log: Arc<AuditLog>,
    caller: Caller,
    request_id: Arc<str>,
    endpoint: String,
) -> Response {
    let status = response.status().as_u16();
    let code = response.extensions().get::<ErrorCode>().map(|code| code.0);
    response.map(|inner| {
        let is_complete = hyper::body::Body::is_end_stream(&inner);
        Body::new(AuditedBody { inner, log, caller, request_id, endpoint, status, code, is_complete })
    })
}

impl Drop for AuditedBody {
    fn drop(&mut self) {
        let [prompt_tokens, cached_tokens, completion_tokens] = self.caller.usage.tokens().map(|n| n as u64);
        let outcome = match (self.code, self.caller.usage.outcome()) {
            (Some(code), _) => code,
            (None, Some(outcome)) => outcome,
            (None, None) if self.is_complete => "complete",
            (None, None) => "cancelled",
        };
        let took = self.caller.arrival.elapsed().as_millis();
        self.log.record(Event::Request {
            request_id: Text::from(&*self.request_id),
            key_id: self.caller.has_key.then(|| Text::from(&*self.caller.key_id)),
            tenant: Text::from(&*self.caller.tenant.name),
            model: Text::from(self.caller.model.get().map_or("", |name| name)),
            endpoint: Text::from(&*self.endpoint),
            prompt_tokens,
            cached_tokens,
            completion_tokens,
            status: self.status,
            outcome: Text::from(outcome),
            milliseconds: u64::try_from(took).unwrap_or(u64::MAX),
        });
    }
}

impl hyper::body::Body for AuditedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = ready!(Pin::new(&mut self.inner).poll_frame(context));
        self.is_complete |= frame.is_none() || self.inner.is_end_stream();
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

//! The audit record of a request: written when the last byte of its response has been taken, or the client has gone.

use std::sync::Arc;

use axum::response::Response;

use crate::guard::audit::{AuditTrail, Event, Text};
use crate::http::error::ErrorCode;
use crate::observe::response_end::on_end;
use crate::server::Caller;

/// Writes a record when the response has ended.
pub fn audited(
    response: Response,
    log: Arc<AuditTrail>,
    caller: Caller,
    request_id: Arc<str>,
    endpoint: String,
) -> Response {
    let status = response.status().as_u16();
    let code = response.extensions().get::<ErrorCode>().map(|error| error.code);
    on_end(response, move |end| {
        let [prompt_tokens, cached_tokens, completion_tokens] = caller.usage.tokens().map(|n| n as u64);
        let outcome = match (code, caller.usage.outcome()) {
            (Some(code), _) => code,
            (None, Some(outcome)) => outcome,
            (None, None) if end.is_complete => "complete",
            (None, None) => "cancelled",
        };
        let took = caller.arrival.elapsed().as_millis();
        log.record(Event::Request {
            request_id: Text::from(&*request_id),
            key_id: caller.identity.has_key.then(|| Text::from(&*caller.identity.key_id)),
            tenant: Text::from(&*caller.identity.tenant.name),
            model: Text::from(caller.notes.model.get().map_or("", |name| name)),
            endpoint: Text::from(&*endpoint),
            prompt_tokens,
            cached_tokens,
            completion_tokens,
            status,
            outcome: Text::from(outcome),
            milliseconds: u64::try_from(took).unwrap_or(u64::MAX),
        });
    })
}

//! The line of the access log, written when a response has ended.

use std::sync::Arc;
use std::time::Instant;

use axum::response::Response;
use tracing::Span;

use crate::http::error::{ErrorCode, INVALID_REQUEST};
use crate::observe::metrics::Metrics;
use crate::observe::response_end::on_end;
use crate::server::Caller;

/// Logs a request when the last byte of its response has been taken, or the client has gone. With `metrics` it counts for its
/// tenant.
pub fn logged(
    response: Response,
    span: Span,
    start: Instant,
    caller: Option<Caller>,
    metrics: Option<Arc<Metrics>>,
) -> Response {
    let status = response.status().as_u16();
    let error = response.extensions().get::<ErrorCode>().copied();
    on_end(response, move |end| {
        let _entered = span.enter();
        if let (Some(caller), Some(metrics)) = (&caller, &metrics) {
            let [prompt_tokens, _, tokens] = caller.usage.tokens();
            metrics.tenant(&caller.identity.tenant.name, prompt_tokens, tokens);
        }
        log(status, error, start, caller.as_ref(), end.is_complete);
    })
}

fn log(status: u16, error: Option<ErrorCode>, start: Instant, caller: Option<&Caller>, is_complete: bool) {
    let end = Instant::now();
    let ms = significant((end - start).as_secs_f64() * 1000.0);
    let usage = caller.map(|caller| &caller.usage);
    let counts = usage.map(|usage| usage.tokens()).filter(|[prompt_tokens, ..]| *prompt_tokens > 0);
    let [prompt_tokens, cached_tokens, tokens] = [0, 1, 2].map(|i| counts.map(|counts| counts[i]));
    let outcome = usage.and_then(|usage| usage.outcome());
    // a stream can fail after its head was sent
    let error = error.or_else(|| outcome.and_then(failed));
    let finish = match (outcome, error) {
        (Some(outcome), _) => Some(outcome),
        (None, Some(_)) => None,
        (None, None) if !is_complete => Some("cancelled"),
        (None, None) => counts.map(|_| "complete"),
    };
    let first = usage.and_then(|usage| usage.first_token()).filter(|_| counts.is_some());
    let first_token_ms = first.map(|first| significant((first - start).as_secs_f64() * 1000.0));
    let decode = first.map(|first| (end - first).as_secs_f64()).zip(tokens.filter(|n| *n > 1));
    let tokens_per_second = decode.map(|(seconds, n)| significant((n - 1) as f64 / seconds.max(1e-9)));
    let (code, class) = (error.map(|error| error.code), error.map(|error| error.class));
    // a level is a constant of each event
    macro_rules! finished {
        ($level:ident) => {
            tracing::$level!(
                status,
                ms,
                prompt_tokens,
                cached_tokens,
                tokens,
                first_token_ms,
                tokens_per_second,
                finish,
                error = code,
                error_class = class,
                "request finished"
            )
        };
    }
    match (status, class) {
        (500, _) | (_, Some(SERVER_ERROR)) => finished!(error),
        (501.., _) | (_, Some("service_unavailable" | "timeout_error")) => finished!(warn),
        _ => finished!(info),
    }
}

/// Class of faults of the server.
const SERVER_ERROR: &str = "server_error";

/// The error of an answer that ended so; `None` if it is none.
fn failed(outcome: &'static str) -> Option<ErrorCode> {
    let class = match outcome {
        "worker_failed" | "not_finite" => SERVER_ERROR,
        "queue_timeout" | "shutting_down" | "no_memory" => "service_unavailable",
        "timeout" => "timeout_error",
        "refused" | "constraint" => INVALID_REQUEST,
        _ => return None,
    };
    Some(ErrorCode { code: outcome, class })
}

/// A number with three significant digits, or all digits before the decimal point.
fn significant(x: f64) -> f64 {
    let digits = if x >= 100.0 {
        0
    } else if x >= 10.0 {
        1
    } else {
        2
    };
    let scale = f64::from(10_u32.pow(digits));
    (x * scale).round() / scale
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_three_digits() {
        let shown = [1234.5678, 99.96, 12.3456, 1.2345, 0.004].map(|x| significant(x).to_string());
        assert_eq!(shown, ["1235", "100", "12.3", "1.23", "0"]);
    }
}

//! The line of the access log, written when a response has ended.

use std::time::Instant;

use axum::response::Response;
use tracing::Span;

use super::response_end::on_end;
use super::state::Caller;

/// Logs a request when the last byte of its response has been taken, or the client has gone.
pub fn logged(response: Response, span: Span, start: Instant, caller: Option<Caller>) -> Response {
    let status = response.status().as_u16();
    on_end(response, move |end| {
        let _entered = span.enter();
        log(status, start, caller.as_ref(), end.is_complete);
    })
}

fn log(status: u16, start: Instant, caller: Option<&Caller>, is_complete: bool) {
    let end = Instant::now();
    let ms = significant((end - start).as_secs_f64() * 1000.0);
    let usage = caller.map(|caller| &caller.usage);
    let [prompt_tokens, cached_tokens, tokens] = usage.map(|usage| usage.tokens()).unwrap_or_default();
    let outcome = usage.and_then(|usage| usage.outcome());
    if prompt_tokens == 0 {
        let outcome = if is_complete { None } else { Some("cancelled") };
        return tracing::info!(status, ms, outcome, "request finished");
    }
    let first = usage.and_then(|usage| usage.first_token());
    let first_token_ms = first.map(|first| significant((first - start).as_secs_f64() * 1000.0));
    let decode = first.map(|first| (end - first).as_secs_f64()).filter(|_| tokens > 1);
    let tokens_per_second = decode.map(|seconds| significant((tokens - 1) as f64 / seconds.max(1e-9)));
    let finish = outcome.unwrap_or(if is_complete { "complete" } else { "cancelled" });
    tracing::info!(
        status,
        ms,
        prompt_tokens,
        cached_tokens,
        tokens,
        first_token_ms,
        tokens_per_second,
        finish,
        "request finished"
    );
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

//! `POST /execute`: the protocol by which an orchestrator gives a worker jobs.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::State;
use axum::response::Response;
use serde::{Deserialize, Serialize};
use starling::chat::Now;
use starling::engine::FinishReason;
use starling::tokenizer::EncodeOptions;
use utoipa::ToSchema;

use super::super::queue::Update;
use super::super::state::{App, Caller, unix_now};
use super::body::Body;
use super::error::{ApiError, ErrorBody, HttpError};
use super::messages::beside;
use super::options::{check_model, flow, limits, salt, sampling, seed};
use super::sse::{Events, ServerSentEvent, Writer, stream};
use super::submit::submit;
use starling_api::openai::options::{Logprobs, Options, RequestPlan};
use starling_api::parse::{ParseBody, parse};

/// A job.
#[derive(Debug, Deserialize, ToSchema)]
pub struct ExecuteRequest {
    /// Options of the answer.
    #[serde(flatten)]
    pub options: Options,
    /// The job itself.
    #[serde(flatten)]
    pub job: Execute,
}

/// A job by name.
#[derive(Debug, Deserialize, ToSchema)]
pub struct Execute {
    /// Its name.
    pub job_id: String,
    /// The text to continue.
    pub prompt: String,
}

impl ParseBody for ExecuteRequest {
    fn parse_body(json: &[u8]) -> Result<Self, ApiError> {
        Ok(ExecuteRequest { options: parse(json)?, job: parse(json)? })
    }
}

#[derive(Serialize)]
struct Started<'a> {
    job_id: &'a str,
    model: &'a str,
    seed: u64,
    /// When the job left the queue, as RFC 3339 writes it, in UTC.
    started_at: String,
}

/// Text and number of a token.
#[derive(Debug, Serialize, ToSchema)]
pub struct ExecuteToken {
    /// Text that is certain now.
    pub t: String,
    /// Which token of the answer.
    pub i: usize,
}

#[derive(Serialize)]
struct End {
    tokens_out: usize,
    decode_time_ms: u64,
    stop_reason: &'static str,
    stop_sequence_matched: Option<String>,
}

#[derive(Serialize)]
struct Failure<'a> {
    job_id: &'a str,
    code: &'a str,
    message: &'a str,
}

/// Runs a job.
///
/// # Errors
/// What is wrong with the request, or with the server now.
#[utoipa::path(post, path = "/execute", tag = "Starling", request_body = ExecuteRequest, responses(
    (status = 200, description = "Server-sent events: `started`, `token` for each token (`ExecuteToken`), `end` or `error`", content(
        (ServerSentEvent = "text/event-stream"),
    )),
    (status = "4XX", description = "The request is wrong, or too many wait", body = ErrorBody),
    (status = "5XX", description = "The server cannot answer now", body = ErrorBody),
))]
pub async fn execute(
    State(app): State<Arc<App>>,
    caller: Caller,
    Body(body): Body<ExecuteRequest>,
) -> Result<Response, HttpError> {
    let ExecuteRequest { options, job } = body;
    check_model(&app, options.model.as_deref())?;
    let (flow, seed) = (flow(&options, &caller)?, seed(&options, &app));
    let special = EncodeOptions { add_special: true, parse_special: false };
    let (model, prompt) = (Arc::clone(&app.model), job.prompt);
    let tokens = beside(prompt.len(), move || Ok(model.tokenizer.encode(&prompt, special))).await?;
    let sampling = sampling(&options, &app, Logprobs::default(), seed).await?;
    let cache_salt = salt(&options, &app, &caller)?;
    let plan = RequestPlan { sampling, constraint: None, prompt_logprobs: false, default_tokens: None, cache_salt };
    let request = options.request(&limits(&app), &plan, tokens, "prompt")?;
    let stops = request.stop.clone();
    let updates = submit(&app, &caller, &flow, vec![request], 1)?;
    let keep_alive = app.settings.sse_keep_alive;
    let writer = ExecuteWriter { app, job_id: job.job_id, seed, stops, first: None, n: 0 };
    Ok(stream(updates, writer, keep_alive))
}

struct ExecuteWriter {
    app: Arc<App>,
    job_id: String,
    seed: u64,
    stops: Vec<String>,
    /// When the first token came.
    first: Option<Instant>,
    n: usize,
}

impl Writer for ExecuteWriter {
    fn update(&mut self, _: usize, update: Update, events: &mut Events) -> bool {
        match update {
            Update::Started => {
                let (job_id, model) = (self.job_id.as_str(), self.app.model_name.as_str());
                events.named("started", &Started { job_id, model, seed: self.seed, started_at: rfc3339(unix_now()) });
            }
            Update::Token { text, .. } => {
                self.first.get_or_insert_with(Instant::now);
                events.named("token", &ExecuteToken { t: text, i: self.n });
                self.n += 1;
            }
            Update::Done { text, reason, n_tokens, .. } => {
                if !text.is_empty() {
                    events.named("token", &ExecuteToken { t: text, i: self.n });
                }
                let stop_reason = match reason {
                    FinishReason::StopToken(_) | FinishReason::Complete => "eos",
                    FinishReason::StopString(_) => "stop_sequence",
                    FinishReason::Length
                    | FinishReason::NotFinite
                    | FinishReason::NoMemory
                    | FinishReason::Constraint(_) => "max_tokens",
                };
                let stop_sequence_matched = match reason {
                    FinishReason::StopString(i) => self.stops.get(i).cloned(),
                    _ => None,
                };
                let decode_time_ms = self.first.map_or(0, |at| at.elapsed().as_millis() as u64);
                events.named("end", &End { tokens_out: n_tokens, decode_time_ms, stop_reason, stop_sequence_matched });
                return true;
            }
            _ => {}
        }
        false
    }

    fn failed(&mut self, error: &ApiError, events: &mut Events) {
        let (code, message) = (error.code.unwrap_or(error.kind), error.message.as_str());
        events.named("error", &Failure { job_id: &self.job_id, code, message });
    }
}

/// Seconds since 1970 as RFC 3339 writes them.
fn rfc3339(seconds: u64) -> String {
    let Now { year, month, day, hour, minute, second } = Now::from_unix(seconds.cast_signed());
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    #[test]
    fn times_are_as_rfc_3339_writes_them() {
        assert_eq!(super::rfc3339(951_827_696), "2000-02-29T12:34:56Z");
    }
}

//! `POST /execute`: jobs of an orchestrator.

use serde::{Deserialize, Serialize};
use starling::engine::FinishReason;

use crate::clock::{Clock, rfc3339};
use crate::error::{ApiError, ErrorBody};
use crate::openai::options::Options;
use crate::parse::{ParseBody, parse};
use crate::stream::{EventSink, StreamWriter, send};
use crate::update::Update;

/// Job.
#[derive(Debug, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ExecuteRequest {
    /// Generation options.
    #[serde(flatten)]
    pub options: Options,
    /// Job ID and prompt.
    #[serde(flatten)]
    pub job: JobFields,
}

/// Job ID and prompt.
#[derive(Debug, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct JobFields {
    /// Job ID.
    pub job_id: String,
    /// Prompt.
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
    /// When the job left the queue: RFC 3339, UTC.
    started_at: String,
}

/// Data of an event `token`.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ExecuteToken {
    /// New text.
    pub t: String,
    /// Index among the generated tokens.
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
struct JobError<'a> {
    job_id: &'a str,
    code: &'a str,
    message: &'a str,
}

/// How the events of a job are written.
#[derive(Debug, Clone)]
pub struct ExecutePlan {
    /// Job ID.
    pub job_id: String,
    /// Model name.
    pub model: String,
    /// Random seed in use.
    pub seed: u64,
    /// Stop strings of the request.
    pub stops: Vec<String>,
}

/// Writes the events of a job.
pub struct ExecuteWriter<C> {
    plan: ExecutePlan,
    clock: C,
    /// Time of the first token, by [`Clock::monotonic_ns`].
    first_token_ns: Option<u64>,
    n_tokens: usize,
}

impl<C: Clock> ExecuteWriter<C> {
    /// A writer of a job that has not started.
    pub fn new(plan: ExecutePlan, clock: C) -> ExecuteWriter<C> {
        ExecuteWriter { plan, clock, first_token_ns: None, n_tokens: 0 }
    }
}

impl<C: Clock> StreamWriter for ExecuteWriter<C> {
    fn update(&mut self, _: usize, update: Update, sink: &mut dyn EventSink) -> bool {
        match update {
            Update::Started => {
                let ExecutePlan { job_id, model, seed, .. } = &self.plan;
                let started_at = rfc3339(self.clock.unix_seconds());
                send(sink, Some("started"), &Started { job_id, model, seed: *seed, started_at });
            }
            Update::Token { text, .. } => {
                let clock = &self.clock;
                self.first_token_ns.get_or_insert_with(|| clock.monotonic_ns());
                send(sink, Some("token"), &ExecuteToken { t: text, i: self.n_tokens });
                self.n_tokens += 1;
            }
            Update::Done { text, reason, n_tokens, .. } => {
                if !text.is_empty() {
                    send(sink, Some("token"), &ExecuteToken { t: text, i: self.n_tokens });
                }
                let stop_reason = match reason {
                    FinishReason::StopToken(_) | FinishReason::Complete => "eos",
                    FinishReason::StopString(_) => "stop_sequence",
                    FinishReason::Length
                    | FinishReason::Deadline
                    | FinishReason::ContentFilter
                    | FinishReason::NotFinite
                    | FinishReason::NoMemory
                    | FinishReason::Constraint(_) => "max_tokens",
                };
                let stop_sequence_matched = match reason {
                    FinishReason::StopString(i) => self.plan.stops.get(i).cloned(),
                    _ => None,
                };
                let decode_time_ms =
                    self.first_token_ns.map_or(0, |at| self.clock.monotonic_ns().saturating_sub(at) / 1_000_000);
                let end = End { tokens_out: n_tokens, decode_time_ms, stop_reason, stop_sequence_matched };
                send(sink, Some("end"), &end);
                return true;
            }
            _ => {}
        }
        false
    }

    fn fail(&mut self, error: &ErrorBody, sink: &mut dyn EventSink) {
        let (code, message) = (error.error.code.unwrap_or(error.error.kind), error.error.message.as_str());
        send(sink, Some("error"), &JobError { job_id: &self.plan.job_id, code, message });
    }
}

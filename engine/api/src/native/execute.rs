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

/// Data of the event `end`.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ExecuteEnd {
    /// Generated tokens.
    pub tokens_out: usize,
    /// Time from the first token to the end, in milliseconds.
    pub decode_time_ms: u64,
    /// `EOS`, `STOP_SEQUENCE`, `MAX_TOKENS`, `DEADLINE` (the time limit of a request with `timeout_partial`), `NO_MEMORY`,
    /// `CONTENT_FILTER`, `CONSTRAINT` or `NOT_FINITE`.
    pub stop_reason: &'static str,
    /// Stop string that ended the answer, if one did.
    pub stop_sequence_matched: Option<String>,
}

/// Why a job ended, in the words of the orchestrator's protocol. Only an answer that used up its tokens is `MAX_TOKENS`.
fn stop_reason(reason: &FinishReason) -> &'static str {
    match reason {
        FinishReason::StopToken(_) | FinishReason::Complete => "EOS",
        FinishReason::StopString(_) => "STOP_SEQUENCE",
        FinishReason::Length => "MAX_TOKENS",
        FinishReason::Deadline => "DEADLINE",
        FinishReason::ContentFilter => "CONTENT_FILTER",
        FinishReason::NotFinite => "NOT_FINITE",
        FinishReason::NoMemory => "NO_MEMORY",
        FinishReason::Constraint(_) => "CONSTRAINT",
    }
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
                let stop_sequence_matched = match reason {
                    FinishReason::StopString(i) => self.plan.stops.get(i).cloned(),
                    _ => None,
                };
                let decode_time_ms =
                    self.first_token_ns.map_or(0, |at| self.clock.monotonic_ns().saturating_sub(at) / 1_000_000);
                let stop_reason = stop_reason(&reason);
                let end = ExecuteEnd { tokens_out: n_tokens, decode_time_ms, stop_reason, stop_sequence_matched };
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

#[cfg(test)]
mod tests {
    use serde_json::Value;
    use starling::sampler::ConstraintError;

    use super::*;
    use crate::parts::testing::{Events, updates};

    struct Stopped;
    impl Clock for Stopped {
        fn unix_seconds(&self) -> u64 {
            0
        }

        fn monotonic_ns(&self) -> u64 {
            0
        }
    }

    /// An orchestrator tells an answer that has its length from one that was cut for another reason.
    #[test]
    fn each_end_has_its_own_reason() {
        for (reason, word) in [
            (FinishReason::StopToken(5), "EOS"),
            (FinishReason::Complete, "EOS"),
            (FinishReason::StopString(0), "STOP_SEQUENCE"),
            (FinishReason::Length, "MAX_TOKENS"),
            (FinishReason::Deadline, "DEADLINE"),
            (FinishReason::NoMemory, "NO_MEMORY"),
            (FinishReason::ContentFilter, "CONTENT_FILTER"),
            (FinishReason::Constraint(ConstraintError::Failed), "CONSTRAINT"),
            (FinishReason::NotFinite, "NOT_FINITE"),
        ] {
            let plan = ExecutePlan { job_id: "j".into(), model: "m".into(), seed: 1, stops: vec!["x".into()] };
            let (mut writer, mut events) = (ExecuteWriter::new(plan, Stopped), Events::default());
            for update in updates(&["a"], reason) {
                writer.update(0, update, &mut events);
            }
            let (name, end) = events.0.last().expect("an event");
            assert_eq!((name.as_deref(), &end["stop_reason"]), (Some("end"), &Value::from(word)));
            assert_eq!(end["stop_sequence_matched"].as_str(), (word == "STOP_SEQUENCE").then_some("x"));
        }
    }
}

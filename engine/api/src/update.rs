//! Updates of a request: the engine's events as the writers of responses take them.

use starling::engine::{Event, FinishReason, RequestId, TokenLogprobs};
use starling::error::RequestError;
use starling::receipt::Receipt;
use starling::sampler::ConstraintError;

use crate::error::ApiError;

/// An update of one answer or embedding.
#[derive(Debug, Clone)]
pub enum Update {
    /// The request left the queue.
    Started,
    /// The prompt was processed.
    Prefilled {
        /// Prompt tokens found in the prefix cache.
        n_cached: usize,
        /// Log-probabilities of the prompt tokens after the first, if requested.
        prompt: Vec<TokenLogprobs>,
    },
    /// A token was sampled.
    Token {
        /// The token.
        token: u32,
        /// Text that is final now: complete characters, no beginning of a stop string.
        text: String,
        /// Log-probability of the token, if requested.
        logprob: f32,
        /// The most probable tokens and their log-probabilities, if requested.
        top: Vec<(u32, f32)>,
    },
    /// Draft tokens of the answer by speculative decoding; at most once, before the end.
    Drafted {
        /// Draft tokens that are in the answer.
        n_accepted: usize,
        /// Draft tokens that are not.
        n_rejected: usize,
    },
    /// The answer is complete.
    Done {
        /// Text held back until now.
        text: String,
        /// Why it ended.
        reason: FinishReason,
        /// Tokens sampled.
        n_tokens: usize,
        /// The receipt, if requested.
        receipt: Option<Box<Receipt>>,
    },
    /// The embedding of a text.
    Vector {
        /// Its values; `None` if they are not finite.
        vector: Option<Vec<f32>>,
    },
    /// The request failed; there are no more updates.
    Failed(Failed),
}

/// Why a request ended without an answer.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Failed {
    /// Queued for longer than the limit, in seconds.
    #[error("the request was queued for longer than {0} s (--queue-timeout); try again later")]
    QueueTimeout(f64),
    /// Took longer than the limit, in seconds.
    #[error("the request took longer than {0} s (its own timeout, or --request-timeout)")]
    Timeout(f64),
    /// The server shuts down.
    #[error("the server is shutting down")]
    Shutdown,
    /// Two workers failed in the same way while they computed the answer.
    #[error(
        "two workers failed in the same way while they computed this answer, so it is not tried again; see the server's log"
    )]
    Worker,
    /// The engine refused the request.
    #[error(transparent)]
    Request(#[from] RequestError),
}

impl Failed {
    /// Name for traces.
    pub const fn name(&self) -> &'static str {
        match self {
            Failed::QueueTimeout(_) => "queue_timeout",
            Failed::Timeout(_) => "timeout",
            Failed::Shutdown => "shutting_down",
            Failed::Worker => "worker_failed",
            Failed::Request(_) => "refused",
        }
    }
}

impl From<Failed> for ApiError {
    fn from(failed: Failed) -> ApiError {
        let message = failed.to_string();
        match failed {
            Failed::QueueTimeout(_) => ApiError::unavailable(message).code("queue_timeout"),
            Failed::Timeout(_) => ApiError::new(504, "timeout_error", message).code("request_timeout"),
            Failed::Shutdown => ApiError::unavailable(message).code("shutting_down"),
            Failed::Worker => ApiError::internal(message).code("worker_failed"),
            Failed::Request(e) => ApiError::refused(&e, "prompt"),
        }
    }
}

impl Update {
    /// The update of an engine event, and its request; `None` for events without one. Log-probabilities of the prompt are
    /// in events before, so the update has none.
    pub fn from_event(event: Event) -> Option<(RequestId, Update)> {
        match event {
            Event::Computed { .. } | Event::Preempted { .. } | Event::Prompt { .. } | Event::Drafted { .. } => None,
            Event::Prefilled { id, n_cached, .. } => Some((id, Update::Prefilled { n_cached, prompt: Vec::new() })),
            Event::Token { id, token, text, logprob, top } => Some((id, Update::Token { token, text, logprob, top })),
            Event::Done { id, text, reason, n_tokens, receipt } => {
                Some((id, Update::Done { text, reason, n_tokens, receipt }))
            }
        }
    }

    /// The error of an update that ends its request without an answer or embedding.
    pub fn error(&self) -> Option<ApiError> {
        let not_finite = || {
            let message = "the model's numbers are not finite with this prompt: its weights are faulty";
            ApiError::internal(message).code("not_finite")
        };
        match self {
            Update::Failed(failed) => Some(failed.clone().into()),
            Update::Vector { vector: None } => Some(not_finite()),
            Update::Done { reason: FinishReason::NotFinite, .. } => Some(not_finite()),
            Update::Done { reason: FinishReason::Constraint(e), .. } => Some(match e {
                ConstraintError::Failed => ApiError::internal(e.to_string()).code("grammar_failed"),
                _ => ApiError::invalid(e.to_string()).code("invalid_grammar"),
            }),
            _ => None,
        }
    }
}

//! Errors in OpenAI's form.

use std::sync::Arc;
use std::time::Duration;

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use starling::chat::ChatError;
use starling::error::RequestError;
use utoipa::ToSchema;

use super::super::auth::{TooFast, seconds};
use super::super::queue::{Closed, Failed};
use super::super::sessions::SessionError;

tokio::task_local! {
    /// The name of the request that this task answers.
    pub static REQUEST_ID: Arc<str>;
}

/// What is wrong, and how a client is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiError {
    /// Of the response.
    pub status: StatusCode,
    /// The kind of error.
    pub kind: &'static str,
    /// Its name, for programs.
    pub code: Option<&'static str>,
    /// The part of the request it is about.
    pub param: Option<String>,
    /// What is wrong, for people.
    pub message: String,
    /// When to try again.
    pub retry: Option<Duration>,
}

/// The body of an error.
#[derive(Debug, Serialize, ToSchema)]
pub struct ErrorBody {
    /// The error.
    pub error: ErrorObject,
}

/// An error, as OpenAI's clients know it.
#[derive(Debug, Serialize, ToSchema)]
pub struct ErrorObject {
    /// What is wrong.
    pub message: String,
    /// The kind of error.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// The part of the request it is about.
    pub param: Option<String>,
    /// Its name.
    pub code: Option<&'static str>,
    /// The request's name in the log.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
}

/// Characters of what a client sent, in an error.
pub const MAX_QUOTE: usize = 100;
/// Characters of an error's message: a bound for what is quoted by a library.
const MAX_MESSAGE: usize = 500;

/// What a client sent, as errors quote it.
pub fn quoted(text: &str) -> String {
    shortened(text.into(), MAX_QUOTE)
}

/// A text of at most about `max` characters: where it is longer, its middle is left out.
pub fn shortened(text: String, max: usize) -> String {
    let n = text.chars().count();
    if n <= max {
        return text;
    }
    let (head, tail) = (max * 2 / 3, max / 3);
    let first: String = text.chars().take(head).collect();
    let last: String = text.chars().skip(n - tail).collect();
    format!("{first}… ({} characters left out) …{last}", n - head - tail)
}

const INVALID: &str = "invalid_request_error";

impl ApiError {
    /// An error of that status and kind.
    pub fn new(status: StatusCode, kind: &'static str, message: impl Into<String>) -> ApiError {
        let message = shortened(message.into(), MAX_MESSAGE);
        ApiError { status, kind, code: None, param: None, message, retry: None }
    }

    /// The caller's fault.
    pub fn invalid(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::BAD_REQUEST, INVALID, message)
    }

    /// The caller's fault, in a part of the request.
    pub fn param(param: &str, message: impl Into<String>) -> ApiError {
        ApiError { param: Some(quoted(param)), ..ApiError::invalid(message) }
    }

    /// Something the API has and this server has not.
    pub fn unsupported(param: &str, message: impl Into<String>) -> ApiError {
        ApiError::param(param, message).code("unsupported_parameter")
    }

    /// The server's fault.
    pub fn internal(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", message)
    }

    /// The server cannot do it now.
    pub fn unavailable(message: impl Into<String>) -> ApiError {
        let error = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "service_unavailable", message);
        ApiError { retry: Some(Duration::from_secs(1)), ..error }
    }

    /// The same with a name.
    pub fn code(self, code: &'static str) -> ApiError {
        ApiError { code: Some(code), ..self }
    }

    /// A path that leads nowhere.
    pub fn no_path(method: &str, path: &str) -> ApiError {
        ApiError::new(StatusCode::NOT_FOUND, INVALID, format!("no such path: {} {}", quoted(method), quoted(path)))
            .code("unknown_url")
    }

    /// A model that is not served here.
    pub fn no_model(found: &str, known: &str) -> ApiError {
        let message = format!("the model `{}` does not exist; this server has `{known}`", quoted(found));
        let error = ApiError::new(StatusCode::NOT_FOUND, INVALID, message).code("model_not_found");
        ApiError { param: Some("model".into()), ..error }
    }

    /// The engine refuses a request; `param` is the part that holds the prompt.
    pub fn refused(error: &RequestError, param: &str) -> ApiError {
        let message = error.to_string();
        match error {
            RequestError::ContextLength { prompt, max_tokens, n_ctx } => {
                let message = format!(
                    "this model's maximum context length is {n_ctx} tokens, but {} were requested: {prompt} in the \
                     prompt and {max_tokens} in the answer",
                    prompt.saturating_add(*max_tokens)
                );
                ApiError::param(param, message).code("context_length_exceeded")
            }
            RequestError::TextLength { .. } => ApiError::param(param, message).code("context_length_exceeded"),
            RequestError::Option { name, .. } => ApiError::param(name, message),
            RequestError::NoCapacity { .. } => ApiError::unavailable(message),
            _ => ApiError::param(param, message),
        }
    }

    /// The body.
    pub fn body(&self) -> ErrorBody {
        let request_id = REQUEST_ID.try_with(ToString::to_string).ok();
        let ApiError { kind, code, param, message, .. } = self.clone();
        ErrorBody { error: ErrorObject { message, kind, param, code, request_id } }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = json(self.status, &self.body());
        let headers = response.headers_mut();
        if let Some(retry) = self.retry {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds(retry)));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

/// A response in JSON.
pub fn json<T: Serialize>(status: StatusCode, body: &T) -> Response {
    match serde_json::to_vec(body) {
        Ok(bytes) => (status, [(header::CONTENT_TYPE, "application/json")], bytes).into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

impl From<Closed> for ApiError {
    fn from(closed: Closed) -> ApiError {
        let message = closed.to_string();
        match closed {
            Closed::Draining => ApiError::unavailable(message).code("shutting_down"),
            Closed::Refused(refused) => {
                let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", message);
                ApiError { retry: Some(Duration::from_secs(1)), ..error }.code(refused.name())
            }
        }
    }
}

impl From<TooFast> for ApiError {
    fn from(e: TooFast) -> ApiError {
        let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", e.to_string());
        ApiError { retry: Some(e.wait), ..error }.code("rate_limit_exceeded")
    }
}

impl From<Failed> for ApiError {
    fn from(failed: Failed) -> ApiError {
        let message = failed.to_string();
        match failed {
            Failed::QueueTimeout(_) => ApiError::unavailable(message).code("queue_timeout"),
            Failed::Timeout(_) => {
                ApiError::new(StatusCode::GATEWAY_TIMEOUT, "timeout_error", message).code("request_timeout")
            }
            Failed::Shutdown => ApiError::unavailable(message).code("shutting_down"),
            Failed::Request(e) => ApiError::refused(&e, "prompt"),
        }
    }
}

impl From<ChatError> for ApiError {
    fn from(e: ChatError) -> ApiError {
        ApiError::param("messages", e.to_string()).code("chat_template")
    }
}

impl From<SessionError> for ApiError {
    fn from(e: SessionError) -> ApiError {
        match e {
            SessionError::Busy => {
                let error = ApiError::new(StatusCode::CONFLICT, INVALID, e.to_string());
                ApiError { param: Some("session_id".into()), ..error }.code("session_busy")
            }
            SessionError::TooLarge { .. } => ApiError::param("session_id", e.to_string()).code("session_too_large"),
            SessionError::NoMemory { .. } => {
                let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", e.to_string());
                ApiError { retry: Some(Duration::from_secs(1)), ..error }.code("session_memory")
            }
            SessionError::Full(_) => {
                let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", e.to_string());
                ApiError { retry: Some(Duration::from_secs(1)), ..error }.code("too_many_sessions")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_quote_little() {
        assert_eq!(quoted(&"é".repeat(100)), "é".repeat(100));
        let long = quoted(&format!("{}end", "é".repeat(1 << 20)));
        assert!(long.starts_with("éé") && long.ends_with("éend") && long.chars().count() < 150, "{long}");
        let error = ApiError::param(&"p".repeat(1 << 20), format!("expected a number, found {}", "x".repeat(1 << 20)));
        assert!(error.param.is_some_and(|param| param.len() < 200));
        assert!(error.message.starts_with("expected a number") && error.message.len() < 600, "{}", error.message);
    }
}

//! Errors of requests as HTTP responses.

use std::time::Duration;

use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use starling_api::anthropic;
use starling_api::anthropic::error::AnthropicErrorBody;
pub use starling_api::error::{ApiError, ErrorBody, INVALID_REQUEST, quoted};
use starling_api::ollama::error::OllamaError;
use starling_api::tei::TeiError;

use crate::config::value::seconds;
use crate::guard::auth::TooFast;
pub use crate::observe::request_id::{REQUEST_ID, request_id};
use crate::schedule::queue::Closed;
use crate::state::sessions::SessionError;

tokio::task_local! {
    /// The form of its errors.
    pub static ERROR_FORMAT: ErrorFormat;
}

/// The API whose form an error has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorFormat {
    OpenAi,
    Anthropic,
    Ollama,
    /// Text Embeddings Inference.
    Tei,
}

impl ErrorFormat {
    /// The form of errors of requests to `path` with these headers.
    pub fn of(path: &str, headers: &HeaderMap) -> ErrorFormat {
        match path {
            "/v1/messages" | "/v1/messages/count_tokens" => ErrorFormat::Anthropic,
            _ if path.starts_with("/v1/models") && headers.contains_key(ANTHROPIC_VERSION) => ErrorFormat::Anthropic,
            _ if path.starts_with("/api/") => ErrorFormat::Ollama,
            "/embed" | "/info" => ErrorFormat::Tei,
            _ => ErrorFormat::OpenAi,
        }
    }
}

/// Header of Anthropic's clients.
pub const ANTHROPIC_VERSION: &str = "anthropic-version";

/// Code and class of an error; an extension of its response. The class is OpenAI's error type.
#[derive(Debug, Clone, Copy)]
pub struct ErrorCode {
    pub code: &'static str,
    pub class: &'static str,
}

/// An [`ApiError`] as the error of a handler.
#[derive(Debug)]
pub struct HttpError(pub ApiError);

impl IntoResponse for HttpError {
    fn into_response(self) -> Response {
        let HttpError(error) = self;
        let status = StatusCode::from_u16(error.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let body = error.body(request_id());
        let mut response = match ERROR_FORMAT.try_with(|form| *form).unwrap_or(ErrorFormat::OpenAi) {
            ErrorFormat::OpenAi => json(status, &body),
            ErrorFormat::Anthropic => {
                let status = StatusCode::from_u16(anthropic::error::status(error.status)).unwrap_or(status);
                json(status, &AnthropicErrorBody::from(body))
            }
            ErrorFormat::Ollama => json(status, &OllamaError::from(body)),
            ErrorFormat::Tei => json(status, &TeiError::from(body)),
        };
        let code = error.code.unwrap_or(error.kind);
        response.extensions_mut().insert(ErrorCode { code, class: error.kind });
        let headers = response.headers_mut();
        if let Some(retry) = error.retry {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds(retry)));
        }
        if status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

impl From<ApiError> for HttpError {
    fn from(error: ApiError) -> HttpError {
        HttpError(error)
    }
}

impl From<Closed> for HttpError {
    fn from(error: Closed) -> HttpError {
        HttpError(error.into())
    }
}

impl From<TooFast> for HttpError {
    fn from(error: TooFast) -> HttpError {
        HttpError(error.into())
    }
}

impl From<SessionError> for HttpError {
    fn from(error: SessionError) -> HttpError {
        HttpError(error.into())
    }
}

/// A response in JSON.
pub fn json<T: Serialize>(status: StatusCode, body: &T) -> Response {
    match serde_json::to_vec(body) {
        Ok(bytes) => (status, [(header::CONTENT_TYPE, "application/json")], bytes).into_response(),
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

/// A response that names the tools that were skipped in the header `x-starling-skipped`.
pub fn with_skipped(mut response: Response, skipped: &[String]) -> Response {
    if !skipped.is_empty()
        && let Ok(value) = HeaderValue::from_str(&quoted(&skipped.join(", ")))
    {
        response.headers_mut().insert("x-starling-skipped", value);
    }
    response
}

impl From<Closed> for ApiError {
    fn from(closed: Closed) -> ApiError {
        let message = closed.to_string();
        match closed {
            Closed::Draining => ApiError::unavailable(message).code("shutting_down"),
            Closed::Refused(refused) => {
                let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS.as_u16(), "rate_limit_error", message);
                ApiError { retry: Some(Duration::from_secs(1)), ..error }.code(refused.name())
            }
        }
    }
}

impl From<TooFast> for ApiError {
    fn from(e: TooFast) -> ApiError {
        let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS.as_u16(), "rate_limit_error", e.to_string());
        ApiError { retry: Some(e.wait), ..error }.code("rate_limit_exceeded")
    }
}

impl From<SessionError> for ApiError {
    fn from(e: SessionError) -> ApiError {
        match e {
            SessionError::Busy => {
                let error = ApiError::new(StatusCode::CONFLICT.as_u16(), INVALID_REQUEST, e.to_string());
                ApiError { param: Some("session_id".into()), ..error }.code("session_busy")
            }
            SessionError::TooLarge { .. } => ApiError::param("session_id", e.to_string()).code("session_too_large"),
            SessionError::NoMemory { .. } => {
                let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS.as_u16(), "rate_limit_error", e.to_string());
                ApiError { retry: Some(Duration::from_secs(1)), ..error }.code("session_memory")
            }
            SessionError::Full(_) => {
                let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS.as_u16(), "rate_limit_error", e.to_string());
                ApiError { retry: Some(Duration::from_secs(1)), ..error }.code("too_many_sessions")
            }
        }
    }
}

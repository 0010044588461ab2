//! Errors of requests as HTTP responses.

use std::sync::Arc;
use std::time::Duration;

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
pub use starling_api::error::{ApiError, ErrorBody, INVALID_REQUEST, quoted};

use super::super::auth::{TooFast, seconds};
use super::super::queue::Closed;
use super::super::sessions::SessionError;

tokio::task_local! {
    /// ID of the request that this task answers.
    pub static REQUEST_ID: Arc<str>;
}

/// ID of the request that this task answers, for error bodies.
pub fn request_id() -> Option<String> {
    REQUEST_ID.try_with(ToString::to_string).ok()
}

/// The code of an error; an extension of its response.
#[derive(Debug, Clone, Copy)]
pub struct ErrorCode(pub &'static str);

/// An [`ApiError`] as the error of a handler.
#[derive(Debug)]
pub struct HttpError(pub ApiError);

impl IntoResponse for HttpError {
    fn into_response(self) -> Response {
        let HttpError(error) = self;
        let status = StatusCode::from_u16(error.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = json(status, &error.body(request_id()));
        response.extensions_mut().insert(ErrorCode(error.code.unwrap_or(error.kind)));
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

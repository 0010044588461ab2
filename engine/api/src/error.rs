//! Errors in OpenAI's form.

use std::time::Duration;

use serde::Serialize;
use starling::chat::ChatError;
use starling::error::RequestError;

/// An error of a request. A server sends it as a response with [`ApiError::body`], a stream as its last event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ApiError {
    /// HTTP status of the response.
    pub status: u16,
    /// OpenAI's error type, such as `invalid_request_error`.
    pub kind: &'static str,
    /// Error code for programs, such as `model_not_found`.
    pub code: Option<&'static str>,
    /// Path of the request field, such as `messages[0].role`.
    pub param: Option<String>,
    /// Message for people.
    pub message: String,
    /// Time after which the client may retry.
    pub retry: Option<Duration>,
}

/// Body of an error response.
#[derive(Debug, Clone, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ErrorBody {
    /// The error.
    pub error: ErrorObject,
}

/// Error in OpenAI's form.
#[derive(Debug, Clone, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ErrorObject {
    /// Message for people.
    pub message: String,
    /// Error type, such as `invalid_request_error`.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// Path of the request field that is wrong, such as `messages[0].role`.
    pub param: Option<String>,
    /// Error code for programs, such as `model_not_found`.
    pub code: Option<&'static str>,
    /// ID of the request in the server's log.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
}

/// Characters of a client's text that an error quotes, at most.
pub const MAX_QUOTE: usize = 100;
/// Characters of a message, at most: bounds what libraries quote.
const MAX_MESSAGE: usize = 500;

/// A client's text as errors quote it: at most about [`MAX_QUOTE`] characters.
pub fn quoted(text: &str) -> String {
    shortened(text.into(), MAX_QUOTE)
}

/// Cuts the middle out of a text longer than `max` characters.
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

/// OpenAI's error type of faults of the caller.
pub const INVALID_REQUEST: &str = "invalid_request_error";

impl ApiError {
    /// An error of the HTTP status `status` and OpenAI's error type `kind`.
    pub fn new(status: u16, kind: &'static str, message: impl Into<String>) -> ApiError {
        let message = shortened(message.into(), MAX_MESSAGE);
        ApiError { status, kind, code: None, param: None, message, retry: None }
    }

    /// 400: the request is wrong.
    pub fn invalid(message: impl Into<String>) -> ApiError {
        ApiError::new(400, INVALID_REQUEST, message)
    }

    /// 400: the field `param` of the request is wrong.
    pub fn param(param: &str, message: impl Into<String>) -> ApiError {
        ApiError { param: Some(quoted(param)), ..ApiError::invalid(message) }
    }

    /// 400: the field `param` asks for something that the API defines and Starling does not support.
    pub fn unsupported(param: &str, message: impl Into<String>) -> ApiError {
        ApiError::param(param, message).code("unsupported_parameter")
    }

    /// 500: a fault of the server.
    pub fn internal(message: impl Into<String>) -> ApiError {
        ApiError::new(500, "server_error", message)
    }

    /// 503: the server cannot answer now; retry after a second.
    pub fn unavailable(message: impl Into<String>) -> ApiError {
        let error = ApiError::new(503, "service_unavailable", message);
        ApiError { retry: Some(Duration::from_secs(1)), ..error }
    }

    /// The same error with a code.
    pub fn code(self, code: &'static str) -> ApiError {
        ApiError { code: Some(code), ..self }
    }

    /// 404: no endpoint has this path.
    pub fn no_path(method: &str, path: &str) -> ApiError {
        ApiError::new(404, INVALID_REQUEST, format!("no such path: {} {}", quoted(method), quoted(path)))
            .code("unknown_url")
    }

    /// The engine refuses a request; `param` is the field that holds the prompt.
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

    /// The JSON body; `request_id` is the ID of the request in the host's log.
    pub fn body(&self, request_id: Option<String>) -> ErrorBody {
        let ApiError { kind, code, param, message, .. } = self.clone();
        ErrorBody { error: ErrorObject { message, kind, param, code, request_id } }
    }
}

impl From<ChatError> for ApiError {
    fn from(e: ChatError) -> ApiError {
        ApiError::param("messages", e.to_string()).code("chat_template")
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

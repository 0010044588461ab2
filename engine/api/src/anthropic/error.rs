//! Errors in Anthropic's form. Source: <https://docs.claude.com/en/api/errors>.

use serde::Serialize;

use crate::error::ErrorBody;

/// Body of an error response, and data of an `error` event.
#[derive(Debug, Clone, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct AnthropicErrorBody {
    /// Always `error`.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// The error.
    pub error: AnthropicError,
    /// ID of the request in the server's log.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request_id: Option<String>,
}

/// Error in Anthropic's form.
#[derive(Debug, Clone, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct AnthropicError {
    /// Error type, such as `invalid_request_error` or `overloaded_error`.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// Message for people.
    pub message: String,
}

/// OpenAI's and Starling's error types, and Anthropic's for the same.
const KINDS: [(&str, &str); 6] = [
    ("authentication_error", "authentication_error"),
    ("permission_error", "permission_error"),
    ("rate_limit_error", "rate_limit_error"),
    ("service_unavailable", "overloaded_error"),
    ("timeout_error", "timeout_error"),
    ("server_error", "api_error"),
];

/// Anthropic's HTTP status of an error with this one: an overload is 529.
pub fn status(status: u16) -> u16 {
    if status == 503 { 529 } else { status }
}

impl From<ErrorBody> for AnthropicErrorBody {
    fn from(body: ErrorBody) -> AnthropicErrorBody {
        let error = body.error;
        let kind = match error.code {
            Some("model_not_found" | "unknown_url") => "not_found_error",
            Some("request_too_large") => "request_too_large",
            _ => KINDS.iter().find(|(known, _)| *known == error.kind).map_or("invalid_request_error", |(_, own)| own),
        };
        let error_object = AnthropicError { kind, message: error.message };
        AnthropicErrorBody { kind: "error", error: error_object, request_id: error.request_id }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::{ApiError, INVALID_REQUEST};

    #[test]
    fn errors_have_the_types_and_statuses_of_anthropic() {
        for (error, expected, kind) in [
            (ApiError::invalid("x"), 400, "invalid_request_error"),
            (ApiError::new(404, INVALID_REQUEST, "x").code("model_not_found"), 404, "not_found_error"),
            (ApiError::new(413, INVALID_REQUEST, "x").code("request_too_large"), 413, "request_too_large"),
            (ApiError::new(429, "rate_limit_error", "x").code("queue_full"), 429, "rate_limit_error"),
            (ApiError::internal("x"), 500, "api_error"),
            (ApiError::unavailable("x").code("memory_pressure"), 529, "overloaded_error"),
        ] {
            assert_eq!((status(error.status), AnthropicErrorBody::from(error.body(None)).error.kind), (expected, kind));
        }
    }
}

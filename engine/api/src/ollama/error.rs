//! Errors in Ollama's form.

use serde::Serialize;

use crate::error::ErrorBody;

/// Body of an error response, and the last line of a stream that fails.
#[derive(Debug, Clone, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct OllamaError {
    /// Message for people.
    pub error: String,
}

impl From<ErrorBody> for OllamaError {
    fn from(body: ErrorBody) -> OllamaError {
        OllamaError { error: body.error.message }
    }
}

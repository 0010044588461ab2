//! Text Embeddings Inference: `POST /embed` and `GET /info`.
//! Source: <https://huggingface.github.io/text-embeddings-inference/>.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::error::{ApiError, ErrorBody};
use crate::input::Input;
use crate::openai::embeddings::{EmbeddingRequest, Encoding};
use crate::parse_whole;

/// Error in the form of Text Embeddings Inference.
#[derive(Debug, Clone, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TeiError {
    /// Message for people.
    pub error: String,
    /// `Validation`, `Overloaded`, `Unhealthy`, `Backend` or `Tokenizer`.
    pub error_type: &'static str,
}

impl From<ErrorBody> for TeiError {
    fn from(body: ErrorBody) -> TeiError {
        let error_type = match body.error.kind {
            "rate_limit_error" | "service_unavailable" => "Overloaded",
            "server_error" | "timeout_error" => "Backend",
            _ => "Validation",
        };
        TeiError { error: body.error.message, error_type }
    }
}

/// Request of `POST /embed`.
#[derive(Debug, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TeiEmbedRequest {
    /// Text or token IDs, or a list of inputs.
    pub inputs: Input,
    /// Divide vectors by their length. Default: true, and only that is supported.
    pub normalize: Option<bool>,
    /// Cut texts that are too long, at their end. Default: false.
    pub truncate: Option<bool>,
    /// Side on which texts are cut: `Right`, the default; `Left` is not supported.
    pub truncation_direction: Option<TruncationDirection>,
    /// Prompt of the model's configuration; not supported.
    pub prompt_name: Option<String>,
    /// Number of dimensions to return, from the first. Default: all.
    #[cfg_attr(feature = "openapi", schema(minimum = 1))]
    pub dimensions: Option<usize>,
}

/// Side on which texts are cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub enum TruncationDirection {
    /// The end.
    #[serde(alias = "right")]
    Right,
    /// The beginning.
    #[serde(alias = "left")]
    Left,
}

parse_whole!(TeiEmbedRequest);

impl TeiEmbedRequest {
    /// The request for embeddings, and whether texts that are too long are cut.
    ///
    /// # Errors
    /// An option that is not supported.
    pub fn into_embedding(self) -> Result<(EmbeddingRequest, bool), ApiError> {
        if self.normalize == Some(false) {
            return Err(ApiError::unsupported("normalize", "normalize is false, expected true: vectors have length 1"));
        }
        if self.prompt_name.is_some() {
            return Err(ApiError::unsupported("prompt_name", "prompt_name: GGUF files name no prompts"));
        }
        let truncate = self.truncate == Some(true);
        if truncate && self.truncation_direction == Some(TruncationDirection::Left) {
            return Err(ApiError::unsupported("truncation_direction", "truncation_direction is Left, expected Right"));
        }
        let request = EmbeddingRequest {
            model: None,
            input: self.inputs,
            encoding_format: Some(Encoding::Float),
            dimensions: self.dimensions,
            user: None,
        };
        Ok((request, truncate))
    }
}

/// Response of `GET /info`.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TeiInfo {
    /// Name of the default model.
    pub model_id: String,
    /// SHA-256 of its file.
    pub model_sha: Option<String>,
    /// Always `gguf`: the file has several types.
    pub model_dtype: &'static str,
    /// Kind of the model.
    pub model_type: TeiModelType,
    /// Texts that wait at most.
    pub max_concurrent_requests: usize,
    /// Tokens of a text, at most.
    pub max_input_length: usize,
    /// Tokens of a batch, at most.
    pub max_batch_tokens: usize,
    /// Inputs of a request, at most.
    pub max_client_batch_size: usize,
    /// Version of Starling.
    pub version: &'static str,
}

/// Kind of a model.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum TeiModelType {
    /// Computes embeddings.
    Embedding {
        /// Pooling of token states.
        pooling: &'static str,
    },
    /// Ranks documents.
    Reranker {
        /// Names of the classes by index.
        id2label: BTreeMap<String, String>,
        /// Indices of the classes by name.
        label2id: BTreeMap<String, usize>,
    },
}

impl TeiModelType {
    /// A reranker with `n` classes.
    pub fn reranker(n: usize) -> TeiModelType {
        let label = |i: usize| format!("LABEL_{i}");
        TeiModelType::Reranker {
            id2label: (0..n).map(|i| (i.to_string(), label(i))).collect(),
            label2id: (0..n).map(|i| (label(i), i)).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parse::ParseBody;

    #[test]
    fn what_would_change_the_vectors_is_refused() {
        let parse = |json: &str| TeiEmbedRequest::parse_body(json.as_bytes()).and_then(TeiEmbedRequest::into_embedding);
        let (request, truncate) = parse(r#"{"inputs": ["a", "b"], "truncate": true, "normalize": true}"#).expect("ok");
        assert_eq!((request.input.len(), truncate), (2, true));
        for (json, param) in [
            (r#"{"inputs": "a", "normalize": false}"#, "normalize"),
            (r#"{"inputs": "a", "prompt_name": "query"}"#, "prompt_name"),
            (r#"{"inputs": "a", "truncate": true, "truncation_direction": "Left"}"#, "truncation_direction"),
            (r#"{"inputs": [1, "a"]}"#, "inputs"),
        ] {
            assert_eq!(parse(json).expect_err("an error").param.as_deref(), Some(param), "{json}");
        }
    }
}

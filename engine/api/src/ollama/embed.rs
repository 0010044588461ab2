//! `POST /api/embed` and `/api/embeddings`.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::input::Input;
use crate::openai::embeddings::{EmbeddingRequest, Encoding, VectorList};
use crate::parse_whole;
use crate::pieces::{JsonPieces, text};

/// Request of `POST /api/embed`.
#[derive(Debug, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct OllamaEmbedRequest {
    /// Model name.
    pub model: String,
    /// Text, or a list of texts.
    pub input: Input,
    /// Cut texts that are too long, at their end. Default: true, as in Ollama.
    pub truncate: Option<bool>,
    /// Number of dimensions to return, from the first. 0, the default: all.
    #[cfg_attr(feature = "openapi", schema(minimum = 0))]
    pub dimensions: Option<usize>,
    /// Accepted; the server's settings say when models are unloaded.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Object>))]
    pub keep_alive: Option<Value>,
}

/// Request of `POST /api/embeddings`, the older form.
#[derive(Debug, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct OllamaEmbeddingsRequest {
    /// Model name.
    pub model: String,
    /// Text.
    pub prompt: String,
}

parse_whole!(OllamaEmbedRequest, OllamaEmbeddingsRequest);

impl OllamaEmbedRequest {
    /// The request for embeddings, and whether texts that are too long are cut.
    pub fn into_embedding(self) -> (EmbeddingRequest, bool) {
        let request = EmbeddingRequest {
            model: Some(self.model),
            input: self.input,
            encoding_format: Some(Encoding::Float),
            dimensions: self.dimensions.filter(|n| *n > 0),
            user: None,
        };
        (request, self.truncate != Some(false))
    }
}

impl OllamaEmbeddingsRequest {
    /// The request for embeddings; a text that is too long is cut.
    pub fn into_embedding(self) -> EmbeddingRequest {
        EmbeddingRequest {
            model: Some(self.model),
            input: Input::Text(self.prompt),
            encoding_format: Some(Encoding::Float),
            dimensions: None,
            user: None,
        }
    }
}

/// Response of `POST /api/embed`.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct OllamaEmbedResponse {
    /// Model name.
    pub model: String,
    /// Vectors, in the order of the inputs.
    pub embeddings: Vec<Vec<f32>>,
    /// Time from the arrival of the request, in nanoseconds.
    pub total_duration: u64,
    /// Time until the model was loaded, in nanoseconds.
    pub load_duration: u64,
    /// Tokens of all inputs.
    pub prompt_eval_count: usize,
}

impl OllamaEmbedResponse {
    /// The response in pieces.
    pub fn pieces(model: &str, vectors: Vec<Vec<f32>>, total_duration: u64, n_tokens: usize) -> JsonPieces<VectorList> {
        let before = format!("{{\"model\":{},\"embeddings\":[", text(model));
        let end =
            format!("],\"total_duration\":{total_duration},\"load_duration\":0,\"prompt_eval_count\":{n_tokens}}}");
        VectorList::lists(vectors, before, end)
    }
}

/// Response of `POST /api/embeddings`.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct OllamaEmbeddingsResponse {
    /// Vector.
    pub embedding: Vec<f32>,
}

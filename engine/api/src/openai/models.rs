//! `GET /v1/models`, and llama-server's requests to load and unload a model.

use serde::{Deserialize, Serialize};

use crate::error::ApiError;
use crate::parse::{ParseBody, parse};

/// List of models.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ModelList {
    /// Always `list`.
    pub object: &'static str,
    /// The models, the default one first.
    pub data: Vec<ModelCard>,
}

/// Model. What is known only of a loaded model is missing before.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ModelCard {
    /// Model name.
    pub id: String,
    /// Always `model`.
    pub object: &'static str,
    /// Time when the server loaded the model, or started, in seconds since 1970.
    pub created: u64,
    /// Always `starling`.
    pub owned_by: &'static str,
    /// Further names of the model.
    pub aliases: Vec<String>,
    /// Whether the model is loaded.
    pub status: ModelStatus,
    /// What is known of a loaded model.
    #[serde(flatten)]
    pub loaded: Option<LoadedModel>,
}

/// Whether a model is loaded.
#[derive(Debug, Clone, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ModelStatus {
    /// `unloaded`, `loading`, `loaded`, `draining` or `failed`.
    pub value: &'static str,
    /// Why the last load failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// What is known of a loaded model.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LoadedModel {
    /// Context length of this server, in tokens.
    pub max_model_len: usize,
    /// Number of tokens of the vocabulary.
    pub vocab_size: usize,
    /// Dimensions of embeddings.
    pub embedding_length: usize,
    /// Whether the model generates text; false for models that only embed.
    pub generates: bool,
    /// SHA-256 of the model file.
    pub sha256: String,
    /// Sampling options that suit a chat with the model: those of the server's settings, of the model file, or else of
    /// `starling chat`.
    pub chat_sampling: ChatSampling,
}

/// Sampling options that suit a chat with a model.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ChatSampling {
    /// Sampling temperature.
    pub temperature: f32,
    /// Number of most probable tokens that are kept; 0 for all.
    pub top_k: u32,
    /// Total probability of the most probable tokens that are kept; 1 for all.
    pub top_p: f32,
    /// Fraction of the highest probability that a kept token has at least; 0 for all.
    pub min_p: f32,
    /// Repetition penalty; 1 for none.
    pub repetition_penalty: f32,
}

impl From<Vec<ModelCard>> for ModelList {
    fn from(data: Vec<ModelCard>) -> ModelList {
        ModelList { object: "list", data }
    }
}

/// Body of `POST /models/load` and `POST /models/unload` (llama-server).
#[derive(Debug, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ModelRequest {
    /// Model name.
    pub model: String,
}

impl ParseBody for ModelRequest {
    fn parse_body(json: &[u8]) -> Result<Self, ApiError> {
        parse(json)
    }
}

/// Response to `POST /models/load` and `POST /models/unload`.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ModelAccepted {
    /// Always true.
    pub success: bool,
}

/// An event of `GET /models/sse` (llama-server).
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ModelEvent {
    /// Model name.
    pub model: String,
    /// Always `status_change`.
    pub event: &'static str,
    /// The new state.
    pub data: ModelEventData,
}

/// State in a [`ModelEvent`].
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ModelEventData {
    /// As [`ModelStatus::value`].
    pub status: &'static str,
}

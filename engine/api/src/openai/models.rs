//! `GET /v1/models`.

use serde::Serialize;

/// List of models.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ModelList {
    /// Always `list`.
    pub object: &'static str,
    /// The models.
    pub data: Vec<ModelCard>,
}

/// Model.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ModelCard {
    /// Model name.
    pub id: String,
    /// Always `model`.
    pub object: &'static str,
    /// Time when the server loaded the model, in seconds since 1970.
    pub created: u64,
    /// Always `starling`.
    pub owned_by: &'static str,
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
}

impl From<ModelCard> for ModelList {
    fn from(card: ModelCard) -> ModelList {
        ModelList { object: "list", data: vec![card] }
    }
}

//! `GET /v1/models` for clients that send the header `anthropic-version`.

use serde::Serialize;

use crate::clock::rfc3339;

/// List of models.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct AnthropicModels {
    /// The models.
    pub data: Vec<AnthropicModel>,
    /// Always false: the list is complete.
    pub has_more: bool,
    /// ID of the first model.
    pub first_id: Option<String>,
    /// ID of the last model.
    pub last_id: Option<String>,
}

/// A model.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct AnthropicModel {
    /// Always `model`.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// Model name.
    pub id: String,
    /// Model name.
    pub display_name: String,
    /// Time when the server loaded the model, or started: RFC 3339.
    pub created_at: String,
}

impl AnthropicModel {
    /// A model of the name `id` that was loaded at `created`, in seconds since 1970.
    pub fn new(id: String, created: u64) -> AnthropicModel {
        AnthropicModel { kind: "model", display_name: id.clone(), id, created_at: rfc3339(created) }
    }
}

impl From<Vec<AnthropicModel>> for AnthropicModels {
    fn from(data: Vec<AnthropicModel>) -> AnthropicModels {
        let id = |model: Option<&AnthropicModel>| model.map(|model| model.id.clone());
        AnthropicModels { first_id: id(data.first()), last_id: id(data.last()), data, has_more: false }
    }
}

//! `GET /v1/models`.

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::Response;
use serde::Serialize;
use utoipa::ToSchema;

use super::super::state::App;
use super::error::{ErrorBody, HttpError, json};
use super::options::check_model;

/// The models of this server.
#[derive(Debug, Serialize, ToSchema)]
pub struct ModelList {
    /// `list`.
    pub object: &'static str,
    /// One.
    pub data: Vec<ModelCard>,
}

/// A model.
#[derive(Debug, Serialize, ToSchema)]
pub struct ModelCard {
    /// Its name.
    pub id: String,
    /// `model`.
    pub object: &'static str,
    /// When the server loaded it, in seconds since 1970.
    pub created: u64,
    /// `starling`.
    pub owned_by: &'static str,
    /// Tokens of its context here.
    pub max_model_len: usize,
    /// Tokens it knows.
    pub vocab_size: usize,
    /// Numbers of its vectors.
    pub embedding_length: usize,
    /// Whether it continues texts; otherwise it only embeds them.
    pub generates: bool,
    /// SHA-256 of its file.
    pub sha256: String,
}

fn card(app: &App) -> ModelCard {
    ModelCard {
        id: app.model_name.clone(),
        object: "model",
        created: app.created,
        owned_by: "starling",
        max_model_len: app.engine.as_ref().map_or(app.embedder.n_ctx, |e| e.n_ctx),
        vocab_size: app.model.config.n_vocab,
        embedding_length: app.model.n_embd_out(),
        generates: app.engine.is_some(),
        sha256: starling::receipt::Hex(app.model_sha256).to_string(),
    }
}

/// The models of this server: one.
#[utoipa::path(get, path = "/v1/models", tag = "OpenAI", responses(
    (status = 200, description = "The models", body = ModelList),
    (status = "4XX", description = "No key", body = ErrorBody),
))]
pub async fn models(State(app): State<Arc<App>>) -> Response {
    json(StatusCode::OK, &ModelList { object: "list", data: vec![card(&app)] })
}

/// A model.
///
/// # Errors
/// If it is not the one that is served.
#[utoipa::path(get, path = "/v1/models/{id}", tag = "OpenAI", params(("id" = String, Path, description = "Its name")),
    responses(
        (status = 200, description = "The model", body = ModelCard),
        (status = "4XX", description = "No such model, or no key", body = ErrorBody),
    ))]
pub async fn model(State(app): State<Arc<App>>, Path(id): Path<String>) -> Result<Response, HttpError> {
    check_model(&app, Some(&id))?;
    Ok(json(StatusCode::OK, &card(&app)))
}

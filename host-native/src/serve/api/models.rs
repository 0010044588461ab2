//! `GET /v1/models`.

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::Response;
use starling_api::openai::models::{ModelCard, ModelList};

use super::super::state::App;
use super::error::{ErrorBody, HttpError, json};
use super::options::check_model;

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

/// List the models of this server: one.
#[utoipa::path(get, path = "/v1/models", tag = "OpenAI", responses(
    (status = 200, description = "Models", body = ModelList),
    (status = "4XX", description = "No API key", body = ErrorBody),
))]
pub async fn models(State(app): State<Arc<App>>) -> Response {
    json(StatusCode::OK, &ModelList::from(card(&app)))
}

/// Get a model.
///
/// # Errors
/// A model that the server does not have.
#[utoipa::path(get, path = "/v1/models/{id}", tag = "OpenAI", params(("id" = String, Path, description = "Model name")),
    responses(
        (status = 200, description = "Model", body = ModelCard),
        (status = "4XX", description = "No such model, or no API key", body = ErrorBody),
    ))]
pub async fn model(State(app): State<Arc<App>>, Path(id): Path<String>) -> Result<Response, HttpError> {
    check_model(&app, Some(&id))?;
    Ok(json(StatusCode::OK, &card(&app)))
}

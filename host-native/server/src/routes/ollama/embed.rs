//! `POST /api/embed` and `/api/embeddings`.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use starling_api::ollama::embed::{
    OllamaEmbedRequest, OllamaEmbedResponse, OllamaEmbeddingsRequest, OllamaEmbeddingsResponse,
};
use starling_api::ollama::error::OllamaError;
use starling_api::ollama::request::model_name;

use crate::http::body::Body;
use crate::http::error::{HttpError, json};
use crate::http::pieces::json_pieces;
use crate::routes::openai::embeddings::embed_inputs;
use crate::server::{Caller, Server};

/// Create embeddings.
///
/// # Errors
/// A wrong request, or a server that cannot answer now.
#[utoipa::path(post, path = "/api/embed", tag = "Ollama", request_body = OllamaEmbedRequest, responses(
    (status = 200, description = "Embeddings", body = OllamaEmbedResponse),
    (status = "4XX", description = "The request is wrong, or too many requests are queued", body = OllamaError),
    (status = "5XX", description = "The server cannot answer now", body = OllamaError),
))]
pub async fn embed(
    State(server): State<Arc<Server>>,
    caller: Caller,
    Body(body): Body<OllamaEmbedRequest>,
) -> Result<Response, HttpError> {
    let model = body.model.clone();
    let (mut request, truncate) = body.into_embedding();
    request.model = Some(model_name(&model).into());
    let embedded = embed_inputs(&server, &caller, request, truncate).await?;
    let total_duration = u64::try_from(caller.arrival.elapsed().as_nanos()).unwrap_or(u64::MAX);
    let pieces = OllamaEmbedResponse::pieces(&model, embedded.vectors, total_duration, embedded.n_tokens);
    Ok(json_pieces(&caller.memory, pieces))
}

/// Create the embedding of a text (older form).
///
/// # Errors
/// A wrong request, or a server that cannot answer now.
#[utoipa::path(post, path = "/api/embeddings", tag = "Ollama", request_body = OllamaEmbeddingsRequest, responses(
    (status = 200, description = "Embedding", body = OllamaEmbeddingsResponse),
    (status = "4XX", description = "The request is wrong, or too many requests are queued", body = OllamaError),
    (status = "5XX", description = "The server cannot answer now", body = OllamaError),
))]
pub async fn embeddings(
    State(server): State<Arc<Server>>,
    caller: Caller,
    Body(body): Body<OllamaEmbeddingsRequest>,
) -> Result<Response, HttpError> {
    let mut request = body.into_embedding();
    request.model = request.model.map(|name| model_name(&name).to_string());
    let mut embedded = embed_inputs(&server, &caller, request, true).await?;
    let embedding = embedded.vectors.pop().unwrap_or_default();
    Ok(json(StatusCode::OK, &OllamaEmbeddingsResponse { embedding }))
}

//! Text Embeddings Inference: `POST /embed` and `GET /info`.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use starling::embed::Pooling;
use starling::receipt::Hex;
use starling_api::openai::embeddings::VectorList;
use starling_api::tei::{TeiEmbedRequest, TeiError, TeiInfo, TeiModelType};

use crate::http::body::Body;
use crate::http::error::{HttpError, json};
use crate::http::pieces::json_pieces;
use crate::routes::openai::embeddings::embed_inputs;
use crate::server::{Caller, Server};

/// Create embeddings.
///
/// # Errors
/// A wrong request, or a server that cannot answer now.
#[utoipa::path(post, path = "/embed", tag = "Text Embeddings Inference", request_body = TeiEmbedRequest, responses(
    (status = 200, description = "Vectors, in the order of the inputs", body = Vec<Vec<f32>>),
    (status = "4XX", description = "The request is wrong, or too many requests are queued", body = TeiError),
    (status = "5XX", description = "The server cannot answer now", body = TeiError),
))]
pub async fn embed(
    State(server): State<Arc<Server>>,
    caller: Caller,
    Body(body): Body<TeiEmbedRequest>,
) -> Result<Response, HttpError> {
    let (request, truncate) = body.into_embedding()?;
    let vectors = embed_inputs(&server, &caller, request, truncate).await?.vectors;
    Ok(json_pieces(&caller.memory, VectorList::lists(vectors, "[".into(), "]".into())))
}

/// Describe the default model.
///
/// # Errors
/// A model that does not load.
#[utoipa::path(get, path = "/info", tag = "Text Embeddings Inference", responses(
    (status = 200, description = "Model and limits", body = TeiInfo),
    (status = "4XX", description = "No API key", body = TeiError),
    (status = "5XX", description = "The model does not load", body = TeiError),
))]
pub async fn info(State(server): State<Arc<Server>>, caller: Caller) -> Result<Response, HttpError> {
    let instance = server.model(None, None, &caller).await?;
    let settings = instance.settings();
    let info = TeiInfo {
        model_id: instance.name.to_string(),
        model_sha: Some(Hex(instance.model_sha256).to_string()),
        model_dtype: "gguf",
        model_type: match instance.pooling {
            Pooling::Rank => TeiModelType::reranker(instance.model.n_classes()),
            pooling => TeiModelType::Embedding { pooling: pooling.name() },
        },
        max_concurrent_requests: settings.queue_high,
        max_input_length: instance.embedder.n_ctx,
        max_batch_tokens: instance.embedder.batch_tokens,
        max_client_batch_size: settings.max_inputs,
        version: env!("CARGO_PKG_VERSION"),
    };
    Ok(json(StatusCode::OK, &info))
}

//! `GET /v1/models`, and llama-server's requests to list, load, unload and watch models.

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body as HttpBody, Bytes};
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use http_body_util::BodyExt;
use http_body_util::channel::Channel;
use starling::sampler::SamplingOptions;
use starling_api::anthropic::models::{AnthropicModel, AnthropicModels};
use starling_api::openai::models::{
    ChatSampling, LoadedModel, ModelAccepted, ModelCard, ModelEvent, ModelEventData, ModelList, ModelRequest,
    ModelStatus,
};
use starling_api::stream::ServerSentEvent;

use crate::http::body::Body;
use crate::http::error::{ANTHROPIC_VERSION, ApiError, ErrorBody, HttpError, json};
use crate::http::params::PathParams;
use crate::models::actor::ModelState;
use crate::models::entry::{Entry, EntryState};
use crate::models::instance::ModelInstance;
use crate::routes::common::options::defaults;
use crate::server::{Caller, Server};

/// Interval at which the event stream looks for changes.
const EVENT_INTERVAL: Duration = Duration::from_millis(50);
/// Time without events after which the event stream sends a comment.
const EVENT_KEEP_ALIVE: u32 = 200;

/// The state of a model for clients.
pub fn status(state: &EntryState) -> ModelStatus {
    let error = if let ModelState::Failed(why) = state { Some(why.for_clients()) } else { None };
    ModelStatus { value: state.name(), error }
}

/// Sampling options of the chat page: the defaults of the model, else those of `starling chat`.
fn chat_sampling(instance: &ModelInstance) -> ChatSampling {
    let options = defaults(&instance.settings(), &instance.model).apply(SamplingOptions::default());
    ChatSampling {
        temperature: options.temperature,
        top_k: options.top_k,
        top_p: options.top_p,
        min_p: options.min_p,
        repetition_penalty: options.repeat_penalty,
    }
}

fn card(server: &Server, entry: &Entry) -> ModelCard {
    let state = entry.state();
    let instance = entry.instance();
    ModelCard {
        id: entry.name.to_string(),
        object: "model",
        created: instance.as_ref().map_or(server.created, |instance| instance.created),
        owned_by: "starling",
        aliases: entry.settings().aliases,
        status: status(&state),
        loaded: instance.map(|instance| LoadedModel {
            max_model_len: instance.n_ctx(),
            vocab_size: instance.model.config.n_vocab,
            embedding_length: instance.model.n_embd_out(),
            generates: instance.engine.is_some(),
            sha256: starling::receipt::Hex(instance.model_sha256).to_string(),
            chat_sampling: chat_sampling(&instance),
        }),
    }
}

/// List the models of this server, the default one first.
#[utoipa::path(get, path = "/v1/models", tag = "OpenAI", responses(
    (status = 200, description = "Models; in Anthropic's form (`AnthropicModels`) with the header `anthropic-version`", body = ModelList),
    (status = "4XX", description = "No API key", body = ErrorBody),
))]
pub async fn models(State(server): State<Arc<Server>>, headers: HeaderMap) -> Response {
    server.pool.rescan();
    let entries = server.pool.entries();
    let mut cards: Vec<ModelCard> = entries.iter().map(|entry| card(&server, entry)).collect();
    // a name that has versions only
    for entry in &entries {
        let Some((base, _)) = entry.name.rsplit_once('@') else { continue };
        if cards.iter().all(|card| card.id != base && !card.aliases.iter().any(|alias| alias == base)) {
            cards.push(ModelCard { id: base.into(), ..card(&server, entry) });
        }
    }
    if headers.contains_key(ANTHROPIC_VERSION) {
        let models: Vec<AnthropicModel> =
            cards.into_iter().map(|card| AnthropicModel::new(card.id, card.created)).collect();
        return json(StatusCode::OK, &AnthropicModels::from(models));
    }
    json(StatusCode::OK, &ModelList::from(cards))
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
pub async fn model(
    State(server): State<Arc<Server>>,
    headers: HeaderMap,
    PathParams(id): PathParams<String>,
) -> Result<Response, HttpError> {
    let entry = server.pool.find_version(Some(&id), "").map_err(ApiError::from)?;
    if headers.contains_key(ANTHROPIC_VERSION) {
        let created = card(&server, &entry).created;
        return Ok(json(StatusCode::OK, &AnthropicModel::new(id, created)));
    }
    Ok(json(StatusCode::OK, &ModelCard { id, ..card(&server, &entry) }))
}

/// Load a model. Responds at once; `/models` and `/models/sse` tell when it is loaded.
///
/// # Errors
/// No such model, or the caller may not manage models.
#[utoipa::path(post, path = "/models/load", tag = "llama-server", request_body = ModelRequest, responses(
    (status = 200, description = "The model is being loaded, or is loaded", body = ModelAccepted),
    (status = "4XX", description = "No such model, or not allowed", body = ErrorBody),
))]
pub async fn load(
    State(server): State<Arc<Server>>,
    caller: Caller,
    Body(body): Body<ModelRequest>,
) -> Result<Response, HttpError> {
    caller.identity.rights.check_loads(false)?;
    let entry = server.pool.find(Some(&body.model)).map_err(ApiError::from)?;
    let (pool, administrator) = (Arc::clone(&server.pool), server.administrator_of(&caller));
    tokio::spawn(async move {
        let error = pool.load(&entry).await.err().map(|e| e.to_string());
        administrator.log("load model", &entry.name, error.as_deref().map_or(Ok(()), Err));
    });
    Ok(json(StatusCode::OK, &ModelAccepted { success: true }))
}

/// Unload a model once its requests have finished.
///
/// # Errors
/// No such model, it is not loaded, or the caller may not manage models.
#[utoipa::path(post, path = "/models/unload", tag = "llama-server", request_body = ModelRequest, responses(
    (status = 200, description = "New requests no longer reach it", body = ModelAccepted),
    (status = "4XX", description = "No such model, not loaded, or not allowed", body = ErrorBody),
))]
pub async fn unload(
    State(server): State<Arc<Server>>,
    caller: Caller,
    Body(body): Body<ModelRequest>,
) -> Result<Response, HttpError> {
    let entry = server.pool.find(Some(&body.model)).map_err(ApiError::from)?;
    caller.identity.rights.check_loads(entry.settings().pin)?;
    let was_loaded = server.pool.unload(&entry, false).await;
    server.administrator_of(&caller).log("unload model", &entry.name, Ok(()));
    if !was_loaded {
        return Err(ApiError::invalid(format!("model `{}` is not loaded", entry.name)).code("model_not_loaded").into());
    }
    Ok(json(StatusCode::OK, &ModelAccepted { success: true }))
}

/// Watch models: an event for each change of a model's state.
#[utoipa::path(get, path = "/models/sse", tag = "llama-server", responses(
    (status = 200, description = "Server-sent events of `ModelEvent`, the current state of each model first", body = ServerSentEvent, content_type = "text/event-stream"),
    (status = "4XX", description = "No API key", body = ErrorBody),
))]
pub async fn events(State(server): State<Arc<Server>>) -> Response {
    let (mut sender, body) = Channel::<Bytes>::new(16);
    tokio::spawn(async move {
        let mut known: Vec<(Arc<str>, &'static str)> = Vec::new();
        let mut silence = 0;
        loop {
            let now: Vec<_> = server.pool.entries().iter().map(|e| (Arc::clone(&e.name), e.state().name())).collect();
            let changed: String = now.iter().filter(|state| !known.contains(state)).map(event).collect();
            known = now;
            silence = if changed.is_empty() { silence + 1 } else { 0 };
            let text = if silence == EVENT_KEEP_ALIVE { ": keep-alive\n\n".to_string() } else { changed };
            silence %= EVENT_KEEP_ALIVE;
            let is_closed = !text.is_empty() && sender.send_data(text.into()).await.is_err();
            if is_closed || server.is_draining() {
                return;
            }
            tokio::time::sleep(EVENT_INTERVAL).await;
        }
    });
    let headers = [(header::CONTENT_TYPE, "text/event-stream; charset=utf-8"), (header::CACHE_CONTROL, "no-cache")];
    // the channel must not be polled after its end
    (headers, HttpBody::new(body.map_err(|never| match never {}).fuse())).into_response()
}

fn event((model, status): &(Arc<str>, &'static str)) -> String {
    let event = ModelEvent { model: model.to_string(), event: "status_change", data: ModelEventData { status } };
    format!("data: {}\n\n", serde_json::to_string(&event).unwrap_or_default())
}

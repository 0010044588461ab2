//! Which path leads to which handler.

use std::sync::Arc;

use axum::Router;
use axum::extract::Request;
use axum::http::{HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::{from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::compression::CompressionLayer;
use tower_http::cors::{AllowOrigin, CorsLayer};

use super::llama_server::slots;
use super::native::{execute, generate, health, receipts, server_stats, tokenize};
use super::openai::{chat, completions, embeddings, models, responses, stored, stored_responses};
use super::{anthropic, llama_server, ollama, openapi, page, rerank, tei};
use crate::admin;
use crate::config::Settings;
use crate::guard::auth::Hosts;
use crate::http::error::{ApiError, HttpError, quoted};
use crate::http::gate::{Gate, gate};
use crate::http::keep::keep;
use crate::http::notes::carry_notes;
use crate::http::signed;
use crate::server::Server;

/// Which routes a listener has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Routes {
    All,
    /// Without `/admin`.
    Public,
    /// `/admin`, the probes, and the paths of other APIs that only change models.
    Admin,
}

pub fn router(server: &Arc<Server>, hosts: Hosts, which: Routes) -> Router {
    let probes = Router::new()
        .route("/health", get(health::health))
        .route("/healthz", get(health::live))
        .route("/livez", get(health::live))
        .route("/readyz", get(health::ready))
        .route("/ready", get(health::ready))
        .route("/metrics", get(health::metrics));
    let has_admin = which != Routes::Public && server.admin_keys.is_some();
    let routes = if has_admin { probes.merge(admin::routes()) } else { probes };
    let routes = routes.merge(managing_routes());
    let routes = if which == Routes::Admin { routes } else { routes.merge(public_routes()) };
    let routes =
        routes.fallback(not_found).method_not_allowed_fallback(method_not_allowed).with_state(Arc::clone(server));
    let takes_admin_keys = which != Routes::Public;
    let gate_state = Arc::new(Gate { server: Arc::clone(server), hosts, takes_admin_keys });
    let mut routes = routes
        .layer(CatchPanicLayer::custom(panicked))
        .layer(from_fn_with_state(Arc::clone(server), keep))
        .layer(from_fn(carry_notes))
        .layer(from_fn_with_state(gate_state, gate))
        .layer(CompressionLayer::new());
    if server.settings().sign_responses {
        routes = routes.layer(from_fn(signed::sign));
    }
    if let Some(cors) = cors(&server.settings()) {
        routes = routes.layer(cors);
    }
    routes
}

/// Paths of Ollama and llama-server by which the models of the server change.
fn managing_routes() -> Router<Arc<Server>> {
    Router::new()
        .route("/api/pull", post(ollama::pull::pull))
        .route("/api/copy", post(ollama::pull::copy))
        .route("/api/create", post(ollama::pull::create))
        .route("/api/delete", delete(ollama::pull::delete))
        .route("/models/load", post(models::load))
        .route("/models/unload", post(models::unload))
}

fn public_routes() -> Router<Arc<Server>> {
    Router::new()
        .route("/v1/chat/completions", post(chat::chat_completions).get(stored::list))
        .route(
            "/v1/chat/completions/{completion_id}",
            get(stored::retrieve).post(stored::change).delete(stored::delete),
        )
        .route("/v1/chat/completions/{completion_id}/messages", get(stored::messages))
        .route("/v1/completions", post(completions::completions))
        .route("/v1/responses", post(responses::responses))
        .route("/v1/responses/input_tokens", post(responses::input_tokens))
        .route("/v1/responses/{response_id}", get(stored_responses::retrieve).delete(stored_responses::delete))
        .route("/v1/responses/{response_id}/input_items", get(stored_responses::input_items))
        .route("/v1/embeddings", post(embeddings::embeddings))
        .route("/v1/models", get(models::models))
        .route("/v1/models/{*id}", get(models::model))
        .route("/v1/generate", post(generate::generate))
        .route("/v1/session/close", post(generate::close_session))
        .route("/v1/tokenize", post(tokenize::tokenize))
        .route("/v1/detokenize", post(tokenize::detokenize))
        .route("/v1/apply-template", post(tokenize::apply_template))
        .route("/v1/verify", post(receipts::verify_receipt))
        .route("/execute", post(execute::execute))
        // Anthropic
        .route("/v1/messages", post(anthropic::messages))
        .route("/v1/messages/count_tokens", post(anthropic::count_tokens))
        // Ollama
        .route("/api/chat", post(ollama::generate::chat))
        .route("/api/generate", post(ollama::generate::generate))
        .route("/api/embed", post(ollama::embed::embed))
        .route("/api/embeddings", post(ollama::embed::embeddings))
        .route("/api/tags", get(ollama::models::tags))
        .route("/api/ps", get(ollama::models::ps))
        .route("/api/version", get(ollama::models::version))
        .route("/api/show", post(ollama::models::show))
        // aliases
        .route("/generate", post(generate::generate))
        .route("/chat", post(chat::chat_completions))
        .route("/chat/completions", post(chat::chat_completions))
        .route("/responses", post(responses::responses))
        .route("/responses/input_tokens", post(responses::input_tokens))
        .route("/embeddings", post(embeddings::embeddings))
        // llama-server
        .route("/tokenize", post(llama_server::tokenize))
        .route("/detokenize", post(llama_server::detokenize))
        .route("/models", get(models::models))
        .route("/models/sse", get(models::events))
        .route("/completion", post(llama_server::completion))
        .route("/completions", post(llama_server::completion))
        .route("/infill", post(llama_server::infill))
        .route("/embedding", post(llama_server::embedding))
        .route("/apply-template", post(tokenize::apply_template_without_bos))
        .route("/props", get(llama_server::props))
        .route("/lora-adapters", get(llama_server::lora_adapters))
        .route("/v1/chat/completions/input_tokens", post(llama_server::chat_input_tokens))
        .route("/chat/completions/input_tokens", post(llama_server::chat_input_tokens))
        // Jina, Cohere, llama-server and Text Embeddings Inference
        .route("/v1/rerank", post(rerank::rerank))
        .route("/v2/rerank", post(rerank::rerank))
        .route("/v1/reranking", post(rerank::rerank))
        .route("/rerank", post(rerank::rerank))
        .route("/reranking", post(rerank::rerank))
        // Text Embeddings Inference
        .route("/embed", post(tei::embed))
        .route("/info", get(tei::info))
        .route("/slots", get(slots::list))
        .route("/slots/{id}", post(slots::act))
        .route("/server/stats", get(server_stats::stats))
        .route("/openapi.json", get(openapi::document))
        .route("/docs", get(openapi::docs))
        .route("/", get(page::page))
        .route("/assets/{name}", get(page::asset))
}

async fn not_found(request: Request) -> HttpError {
    ApiError::no_path(request.method().as_str(), request.uri().path()).into()
}

async fn method_not_allowed(request: Request) -> HttpError {
    let message = format!("{}: method {} not allowed", quoted(request.uri().path()), quoted(request.method().as_str()));
    let status = StatusCode::METHOD_NOT_ALLOWED.as_u16();
    ApiError::new(status, "invalid_request_error", message).code("method_not_allowed").into()
}

fn panicked(_: Box<dyn std::any::Any + Send>) -> Response {
    tracing::error!("request handler panicked");
    HttpError(ApiError::internal("internal error: the request handler panicked")).into_response()
}

/// Response headers that scripts of other origins may read, besides those that requests have too.
const EXPOSED: [&str; 8] = [
    "x-starling-model",
    "x-starling-skipped",
    "retry-after",
    "idempotent-replayed",
    "endpoint-load-metrics",
    "content-digest",
    "signature",
    "signature-input",
];

fn cors(settings: &Settings) -> Option<CorsLayer> {
    let origins = &settings.cors_origins;
    if origins.is_empty() {
        return None;
    }
    let origin = if origins.iter().any(|o| o == "*") {
        AllowOrigin::any()
    } else {
        AllowOrigin::list(origins.iter().filter_map(|o| o.parse::<HeaderValue>().ok()))
    };
    let own = [
        "x-request-id",
        "x-session-id",
        "x-starling-ignored-fields",
        "x-starling-unenforced",
        "api-key",
        "x-request-timeout",
    ]
    .map(HeaderName::from_static);
    let more = ["x-api-key", "anthropic-version", "anthropic-beta"].map(HeaderName::from_static);
    let headers = own.clone().into_iter().chain(more).chain([header::AUTHORIZATION, header::CONTENT_TYPE]);
    let seen = EXPOSED.map(HeaderName::from_static).into_iter().chain(own);
    let layer = CorsLayer::new().allow_origin(origin).allow_methods([Method::GET, Method::POST, Method::DELETE]);
    Some(layer.allow_headers(headers.collect::<Vec<_>>()).expose_headers(seen.collect::<Vec<_>>()))
}

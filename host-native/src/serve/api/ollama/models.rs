//! `GET /api/tags`, `/api/ps`, `/api/version` and `POST /api/show`.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use serde_json::{Map, Value, json};
use starling::receipt::Hex;
use starling_api::clock::rfc3339;
use starling_api::infill::Infill;
use starling_api::ollama::error::OllamaError;
use starling_api::ollama::models::{
    OLLAMA_VERSION, OllamaDetails, OllamaModel, OllamaModels, OllamaShow, OllamaShowRequest, OllamaVersion,
    parameter_size, quantization_level,
};
use starling_api::ollama::request::model_name;

use super::super::super::models::instance::ModelInstance;
use super::super::super::models::pool::Entry;
use super::super::super::state::{Caller, Server, unix_now};
use super::super::body::Body;
use super::super::error::{ApiError, HttpError, json};

/// Time until a model without an idle limit expires, for clients that expect a time.
const NEVER: Duration = Duration::from_secs(100 * 365 * 24 * 3600);

/// Version of the API.
#[utoipa::path(get, path = "/api/version", tag = "Ollama", responses(
    (status = 200, description = "Version", body = OllamaVersion),
    (status = "4XX", description = "No API key", body = OllamaError),
    (status = "5XX", description = "The server cannot answer now", body = OllamaError),
))]
pub async fn version() -> Response {
    json(StatusCode::OK, &OllamaVersion { version: OLLAMA_VERSION, starling: env!("CARGO_PKG_VERSION") })
}

/// List the models of this server.
#[utoipa::path(get, path = "/api/tags", tag = "Ollama", responses(
    (status = 200, description = "Models", body = OllamaModels),
    (status = "4XX", description = "No API key", body = OllamaError),
    (status = "5XX", description = "The server cannot answer now", body = OllamaError),
))]
pub async fn tags(State(server): State<Arc<Server>>) -> Response {
    server.pool.rescan();
    let models = server.pool.entries().iter().map(|entry| card(&server, entry)).collect();
    json(StatusCode::OK, &OllamaModels { models })
}

/// List the loaded models.
#[utoipa::path(get, path = "/api/ps", tag = "Ollama", responses(
    (status = 200, description = "Loaded models", body = OllamaModels),
    (status = "4XX", description = "No API key", body = OllamaError),
    (status = "5XX", description = "The server cannot answer now", body = OllamaError),
))]
pub async fn ps(State(server): State<Arc<Server>>) -> Response {
    let loaded = |entry: &Arc<Entry>| {
        let instance = entry.instance()?;
        let left = entry.settings().idle_timeout.map_or(NEVER, |limit| limit.saturating_sub(entry.idle_time()));
        Some(OllamaModel {
            context_length: Some(instance.n_ctx()),
            expires_at: Some(rfc3339(unix_now().saturating_add(left.as_secs()))),
            size_vram: Some(0),
            ..card(&server, entry)
        })
    };
    let models = server.pool.entries().iter().filter_map(loaded).collect();
    json(StatusCode::OK, &OllamaModels { models })
}

fn card(server: &Server, entry: &Entry) -> OllamaModel {
    let instance = entry.instance();
    let instance = instance.as_deref();
    OllamaModel {
        name: entry.name.to_string(),
        model: entry.name.to_string(),
        modified_at: rfc3339(instance.map_or(server.created, |instance| instance.created)),
        size: instance.map_or(0, |instance| instance.model.weight_bytes() as u64),
        digest: instance.map_or_else(String::new, |instance| Hex(instance.model_sha256).to_string()),
        details: details(instance),
        capabilities: instance.map_or_else(Vec::new, capabilities),
        context_length: None,
        expires_at: None,
        size_vram: None,
    }
}

/// What is known of a model; nothing if it is not loaded.
fn details(instance: Option<&ModelInstance>) -> OllamaDetails {
    let model = instance.map(|instance| &instance.model);
    let family = model.map_or("", |model| model.config.arch.name);
    OllamaDetails {
        parent_model: "",
        format: "gguf",
        family: family.into(),
        families: if family.is_empty() { Vec::new() } else { vec![family.into()] },
        parameter_size: model.map_or_else(String::new, |model| parameter_size(model.n_parameters)),
        quantization_level: quantization_level(model.and_then(|model| model.file_type)).into(),
    }
}

fn capabilities(instance: &ModelInstance) -> Vec<&'static str> {
    if instance.engine.is_none() || instance.model.n_classes() > 0 {
        return vec![if instance.model.n_classes() > 0 { "rerank" } else { "embedding" }];
    }
    let template = instance.template.source();
    let all = [
        ("completion", true),
        ("tools", template.contains("tools")),
        ("thinking", template.contains("enable_thinking") || template.contains("<think>")),
        ("insert", Infill::is_supported(&instance.model.tokenizer)),
    ];
    all.into_iter().filter_map(|(name, has)| has.then_some(name)).collect()
}

/// Show a model. An unloaded model is loaded.
///
/// # Errors
/// A model that the server does not have, or that does not load.
#[utoipa::path(post, path = "/api/show", tag = "Ollama", request_body = OllamaShowRequest, responses(
    (status = 200, description = "Model", body = OllamaShow),
    (status = "4XX", description = "No such model, or no API key", body = OllamaError),
    (status = "5XX", description = "The server cannot answer now", body = OllamaError),
))]
pub async fn show(
    State(server): State<Arc<Server>>,
    caller: Caller,
    Body(body): Body<OllamaShowRequest>,
) -> Result<Response, HttpError> {
    let name = model_name(&body.model);
    if name.is_empty() {
        return Err(ApiError::param("model", "model is empty").into());
    }
    let instance = server.model(Some(name), None, &caller).await?;
    let config = &instance.model.config;
    let family = config.arch.name;
    let key = |name: &str| format!("{family}.{name}");
    let info: [(String, Value); 9] = [
        ("general.architecture".into(), json!(family)),
        ("general.parameter_count".into(), json!(instance.model.n_parameters)),
        ("general.file_type".into(), json!(instance.model.file_type)),
        ("general.basename".into(), json!(instance.model.name)),
        (key("context_length"), json!(config.n_ctx_train)),
        (key("embedding_length"), json!(config.n_embd)),
        (key("block_count"), json!(config.n_layer() + config.n_nextn)),
        (key("attention.head_count"), json!(config.n_head())),
        (key("attention.head_count_kv"), json!(config.n_head_kv())),
    ];
    let show = OllamaShow {
        modelfile: format!("FROM {}\n", instance.name),
        template: instance.template.source().into(),
        parameters: String::new(),
        details: details(Some(&instance)),
        model_info: info.into_iter().filter(|(_, value)| !value.is_null()).collect::<Map<String, Value>>(),
        capabilities: capabilities(&instance),
        modified_at: rfc3339(instance.created),
    };
    Ok(json(StatusCode::OK, &show))
}

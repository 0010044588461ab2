//! `GET /api/tags`, `/api/ps`, `/api/version` and `POST /api/show`.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use serde_json::{Map, Value, json};
use starling::chat::{DEFAULT_TEMPLATE, builtin_template};
use starling::receipt::Hex;
use starling_api::clock::rfc3339;
use starling_api::infill::Infill;
use starling_api::ollama::error::OllamaError;
use starling_api::ollama::models::{
    OLLAMA_VERSION, OllamaDetails, OllamaModel, OllamaModels, OllamaShow, OllamaShowRequest, OllamaVersion,
    parameter_size, quantization_level,
};
use starling_api::ollama::request::model_name;
use starling_host::clock::unix_now;

use crate::http::body::Body;
use crate::http::error::{ApiError, HttpError, json};
use crate::models::entry::Entry;
use crate::models::header::{ModelHeader, ModelKind};
use crate::models::instance::ModelInstance;
use crate::schedule::offload::offload;
use crate::server::{Caller, Server};

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
///
/// # Errors
/// If the list panics.
#[utoipa::path(get, path = "/api/tags", tag = "Ollama", responses(
    (status = 200, description = "Models", body = OllamaModels),
    (status = "4XX", description = "No API key", body = OllamaError),
    (status = "5XX", description = "The server cannot answer now", body = OllamaError),
))]
pub async fn tags(State(server): State<Arc<Server>>) -> Result<Response, HttpError> {
    // headers of files that are not loaded are read
    let list = move || {
        server.pool.rescan();
        server.pool.entries().iter().map(|entry| card(&server, entry)).collect()
    };
    let models = offload(usize::MAX, list).await?;
    Ok(json(StatusCode::OK, &OllamaModels { models }))
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
    let known = Known::of(entry);
    let instance = entry.instance();
    OllamaModel {
        name: entry.name.to_string(),
        model: entry.name.to_string(),
        modified_at: rfc3339(instance.as_ref().map_or(server.created, |instance| instance.created)),
        size: known.as_ref().map_or(0, |known| known.bytes),
        digest: instance.map_or_else(String::new, |instance| Hex(instance.model_sha256).to_string()),
        details: details(known.as_ref()),
        capabilities: known.as_ref().map_or_else(Vec::new, Known::capabilities),
        context_length: None,
        expires_at: None,
        size_vram: None,
    }
}

/// What is known of a model: when it is loaded, or else by its file.
struct Known {
    family: &'static str,
    n_parameters: u64,
    file_type: Option<u32>,
    bytes: u64,
    kind: ModelKind,
    template: String,
    has_infill: bool,
}

impl Known {
    fn of(entry: &Entry) -> Option<Known> {
        if let Some(instance) = entry.instance() {
            return Some(Known::of_loaded(&instance));
        }
        let header = entry.header()?;
        let ModelHeader { family, n_parameters, file_type, bytes, kind, has_infill, .. } = *header;
        let template = match entry.settings().chat_template {
            // as at the load: the name of a built-in one, or a file
            Some(name) => {
                builtin_template(&name).map_or_else(|| std::fs::read_to_string(&name).ok(), |t| Some(t.into()))
            }
            None => header.template.clone(),
        };
        let template = template.unwrap_or_else(|| DEFAULT_TEMPLATE.into());
        Some(Known { family, n_parameters, file_type, bytes, kind, template, has_infill })
    }

    fn of_loaded(instance: &ModelInstance) -> Known {
        let model = &instance.model;
        let kind = match (model.n_classes() > 0, instance.engine.is_some()) {
            (true, _) => ModelKind::Ranks,
            (false, true) => ModelKind::Generates,
            (false, false) => ModelKind::Embeds,
        };
        Known {
            family: model.config.arch.name,
            n_parameters: model.n_parameters,
            file_type: model.file_type,
            bytes: model.weight_bytes() as u64,
            kind,
            template: instance.template.source().into(),
            has_infill: Infill::is_supported(&model.tokenizer),
        }
    }

    fn capabilities(&self) -> Vec<&'static str> {
        match self.kind {
            ModelKind::Ranks => return vec!["rerank"],
            ModelKind::Embeds => return vec!["embedding"],
            ModelKind::Generates => {}
        }
        let all = [
            ("completion", true),
            ("tools", self.template.contains("tools")),
            ("thinking", self.template.contains("enable_thinking") || self.template.contains("<think>")),
            ("insert", self.has_infill),
        ];
        all.into_iter().filter_map(|(name, has)| has.then_some(name)).collect()
    }
}

/// Nothing of a model of which nothing is known.
fn details(known: Option<&Known>) -> OllamaDetails {
    let family = known.map_or("", |known| known.family);
    OllamaDetails {
        parent_model: "",
        format: "gguf",
        family: family.into(),
        families: if family.is_empty() { Vec::new() } else { vec![family.into()] },
        parameter_size: known.map_or_else(String::new, |known| parameter_size(known.n_parameters)),
        quantization_level: quantization_level(known.and_then(|known| known.file_type)).into(),
    }
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
    let known = Known::of_loaded(&instance);
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
        details: details(Some(&known)),
        model_info: info.into_iter().filter(|(_, value)| !value.is_null()).collect::<Map<String, Value>>(),
        capabilities: known.capabilities(),
        modified_at: rfc3339(instance.created),
    };
    Ok(json(StatusCode::OK, &show))
}

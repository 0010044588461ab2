//! Models: list, add, load, unload, replace, remove.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use axum::Extension;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use serde::{Deserialize, Serialize};
use starling::receipt::Hex;
use utoipa::ToSchema;

use super::settings::entry_of;
use super::workers::{WorkerInfo, worker_info};
use crate::guard::administrator::Administrator;
use crate::http::body::Body;
use crate::http::error::{ApiError, ErrorBody, HttpError, json};
use crate::http::params::PathParams;
use crate::models::actor::ModelState;
use crate::models::changes::SwapOptions;
use crate::models::entry::Entry;
use crate::models::error::PoolError;
use crate::models::self_test::SelfTest;
use crate::server::Server;

/// A model, for administrators.
#[derive(Debug, Serialize, ToSchema)]
pub struct ModelInfo {
    /// Model name.
    name: String,
    /// Further names.
    aliases: Vec<String>,
    /// `unloaded`, `loading`, `loaded`, `draining` or `failed`.
    status: &'static str,
    /// Why the last load failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    /// Source: a path, a name, a URL or `hf:…`; null for the bundled model.
    #[schema(value_type = Option<String>)]
    source: Option<PathBuf>,
    /// Circuit breaker: `closed`, `open` or `half-open`.
    breaker: &'static str,
    /// Whether it is never unloaded for another or for being idle.
    pinned: bool,
    /// Seconds since the last request.
    idle_seconds: f64,
    /// What is known of a loaded model.
    #[serde(flatten)]
    loaded: Option<Loaded>,
}

/// A loaded model, for administrators.
#[derive(Debug, Serialize, ToSchema)]
pub struct Loaded {
    /// SHA-256 of the model file.
    sha256: String,
    /// Time of the load, in seconds since 1970.
    loaded_at: u64,
    /// Memory of the weights.
    weight_bytes: u64,
    /// Memory of the KV caches of all workers.
    kv_bytes: usize,
    /// Context length in tokens.
    context: usize,
    /// Requests in the engines.
    running: usize,
    /// Queued requests.
    waiting: usize,
    /// Open sessions.
    sessions: usize,
    /// The workers.
    workers: Vec<WorkerInfo>,
}

/// All models.
#[derive(Debug, Serialize, ToSchema)]
pub struct ModelInfos {
    /// The models, the default one first.
    models: Vec<ModelInfo>,
    /// Memory of all weights and KV caches.
    used_bytes: u64,
    /// Limit of that memory (`--memory`).
    limit_bytes: u64,
}

fn info(entry: &Entry) -> ModelInfo {
    let (state, settings) = (entry.state(), entry.settings());
    ModelInfo {
        name: entry.name.to_string(),
        aliases: settings.aliases,
        status: state.name(),
        error: if let ModelState::Failed(why) = &state { Some(why.to_string()) } else { None },
        source: entry.source(),
        breaker: entry.breaker_name(),
        pinned: settings.pin,
        idle_seconds: entry.idle_time().as_secs_f64(),
        loaded: entry.instance().map(|instance| {
            let snapshot = instance.snapshot();
            Loaded {
                sha256: Hex(instance.model_sha256).to_string(),
                loaded_at: instance.created,
                weight_bytes: instance.weights.bytes(),
                kv_bytes: snapshot.kv.reserved_bytes,
                context: instance.n_ctx(),
                running: snapshot.running,
                waiting: snapshot.depth.iter().sum(),
                sessions: snapshot.sessions,
                workers: instance.workers.list().iter().map(worker_info).collect(),
            }
        }),
    }
}

/// List all models
#[utoipa::path(get, path = "/admin/models", tag = "Administration", responses(
    (status = 200, description = "Models", body = ModelInfos),
))]
pub async fn list(State(server): State<Arc<Server>>) -> Response {
    server.pool.rescan();
    let budget = &server.pool.resources().budget;
    let models = server.pool.entries().iter().map(|entry| info(entry)).collect();
    json(StatusCode::OK, &ModelInfos { models, used_bytes: budget.used(), limit_bytes: budget.limit() })
}

/// Show a model
///
/// # Errors
/// If there is no such model.
#[utoipa::path(get, path = "/admin/models/{name}", tag = "Administration",
    params(("name" = String, Path, description = "Model name")),
    responses((status = 200, description = "Model", body = ModelInfo)))]
pub async fn show(
    State(server): State<Arc<Server>>,
    PathParams(name): PathParams<String>,
) -> Result<Response, HttpError> {
    Ok(json(StatusCode::OK, &info(&*find(&server, &name)?)))
}

/// A model to add.
#[derive(Debug, Deserialize, ToSchema)]
pub struct AddModel {
    /// Model name.
    name: String,
    /// Source: a path, a name, a URL or `hf:…`.
    #[schema(value_type = String)]
    source: PathBuf,
    /// Settings of the model, as in `[models.NAME]`.
    #[serde(default)]
    #[schema(value_type = Object)]
    settings: toml::Table,
    /// Load it now; otherwise the first request does.
    #[serde(default)]
    load: bool,
}

/// Add a model under a new name
///
/// # Errors
/// If the name is taken, a setting is invalid, or the model does not load.
#[utoipa::path(post, path = "/admin/models", tag = "Administration", request_body = AddModel, responses(
    (status = 200, description = "The model", body = ModelInfo),
    (status = "4XX", description = "The name is taken, or a setting is invalid", body = ErrorBody),
))]
pub async fn add(
    State(server): State<Arc<Server>>,
    Extension(administrator): Extension<Administrator>,
    Body(body): Body<AddModel>,
) -> Result<Response, HttpError> {
    let result = async {
        let entry = entry_of(&server.pool.configuration(), &body.name, body.source, &body.settings)?;
        server.pool.add(entry).map_err(|e| ApiError::invalid(e.to_string()).code("model_exists"))?;
        let entry = find(&server, &body.name)?;
        if body.load {
            server.pool.load(&entry).await.map_err(PoolError::for_administrators)?;
        }
        Ok::<_, ApiError>(entry)
    };
    let result = result.await;
    administrator.log("add model", &body.name, outcome(&result.as_ref().map_err(|e| e.message.clone())));
    Ok(json(StatusCode::OK, &info(&*result?)))
}

/// Remove a model and its name; its requests finish
///
/// # Errors
/// If there is no such model.
#[utoipa::path(delete, path = "/admin/models/{name}", tag = "Administration",
    params(("name" = String, Path, description = "Model name")),
    responses((status = 200, description = "Removed", body = Done)))]
pub async fn remove(
    State(server): State<Arc<Server>>,
    Extension(administrator): Extension<Administrator>,
    PathParams(name): PathParams<String>,
) -> Result<Response, HttpError> {
    let entry = find(&server, &name)?;
    server.pool.remove(&entry).await;
    administrator.log("remove model", &name, Ok(()));
    Ok(json(StatusCode::OK, &Done { done: true }))
}

/// Load a model; responds once it is loaded
///
/// # Errors
/// If there is no such model, it does not fit, or does not load.
#[utoipa::path(post, path = "/admin/models/{name}/load", tag = "Administration",
    params(("name" = String, Path, description = "Model name")),
    responses(
        (status = 200, description = "The model", body = ModelInfo),
        (status = "5XX", description = "It does not fit or does not load", body = ErrorBody),
    ))]
pub async fn load(
    State(server): State<Arc<Server>>,
    Extension(administrator): Extension<Administrator>,
    PathParams(name): PathParams<String>,
) -> Result<Response, HttpError> {
    let entry = find(&server, &name)?;
    let result = server.pool.load(&entry).await;
    administrator.log("load model", &name, outcome(&result.as_ref().map_err(ToString::to_string)));
    result.map_err(PoolError::for_administrators)?;
    Ok(json(StatusCode::OK, &info(&entry)))
}

/// How to unload a model.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Unload {
    /// End running requests; otherwise they finish.
    #[serde(default)]
    now: bool,
}

/// Unload a model; its name stays
///
/// # Errors
/// If there is no such model.
#[utoipa::path(post, path = "/admin/models/{name}/unload", tag = "Administration", request_body = Unload,
    params(("name" = String, Path, description = "Model name")),
    responses((status = 200, description = "Whether it was loaded", body = Done)))]
pub async fn unload(
    State(server): State<Arc<Server>>,
    Extension(administrator): Extension<Administrator>,
    PathParams(name): PathParams<String>,
    Body(body): Body<Unload>,
) -> Result<Response, HttpError> {
    let entry = find(&server, &name)?;
    let done = server.pool.unload(&entry, body.now).await;
    administrator.log("unload model", &name, Ok(()));
    Ok(json(StatusCode::OK, &Done { done }))
}

/// How to replace a model.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Swap {
    /// Source of the new model; without it, the old source is loaded again.
    #[schema(value_type = Option<String>)]
    source: Option<PathBuf>,
    /// What to do with the old model while the new one loads.
    #[serde(default)]
    strategy: SwapStrategy,
    /// Test that the new model has to pass.
    test: Option<SelfTest>,
    /// Whether to respond when the switch is done.
    wait: Option<bool>,
}

/// What to do with the old model while the new one loads.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum SwapStrategy {
    /// It serves on: both must fit into memory.
    #[default]
    Parallel,
    /// Its requests finish and its memory is freed first; new requests wait.
    Drain,
}

/// Result of a swap.
#[derive(Debug, Serialize, ToSchema)]
pub struct Swapped {
    /// Model name.
    name: String,
    /// SHA-256 of the new model file.
    sha256: String,
    /// Duration in seconds.
    seconds: f64,
}

/// Replace a model without a gap
///
/// # Errors
/// If the new model does not fit, does not load or fails its test: then the old one stays.
#[utoipa::path(post, path = "/admin/models/{name}/swap", tag = "Administration", request_body = Swap,
    params(("name" = String, Path, description = "Model name")),
    responses(
        (status = 200, description = "The new model serves", body = Swapped),
        (status = 202, description = "Accepted (`wait` is false)", body = Done),
        (status = "5XX", description = "The old model stays", body = ErrorBody),
    ))]
pub async fn swap(
    State(server): State<Arc<Server>>,
    Extension(administrator): Extension<Administrator>,
    PathParams(name): PathParams<String>,
    Body(body): Body<Swap>,
) -> Result<Response, HttpError> {
    let entry = find(&server, &name)?;
    let options = SwapOptions { drain: body.strategy == SwapStrategy::Drain, test: body.test };
    let pool = Arc::clone(&server.pool);
    let (start, source) = (Instant::now(), body.source);
    // goes on if the client disconnects
    let swap = tokio::spawn(async move {
        let result = pool.swap(&entry, source, options).await;
        administrator.log("swap model", &entry.name, outcome(&result.as_ref().map_err(ToString::to_string)));
        result
    });
    if body.wait == Some(false) {
        return Ok(json(StatusCode::ACCEPTED, &Done { done: false }));
    }
    let new = swap.await.map_err(|_| ApiError::internal("the swap panicked; see the log"))?;
    let new = new.map_err(PoolError::for_administrators)?;
    let sha256 = Hex(new.model_sha256).to_string();
    Ok(json(StatusCode::OK, &Swapped { name: new.name.to_string(), sha256, seconds: start.elapsed().as_secs_f64() }))
}

/// Whether an action is done.
#[derive(Debug, Serialize, ToSchema)]
pub struct Done {
    pub done: bool,
}

/// The model of a name.
pub fn find(server: &Server, name: &str) -> Result<Arc<Entry>, ApiError> {
    server.pool.find(Some(name)).map_err(ApiError::from)
}

fn outcome<T>(result: &Result<T, String>) -> Result<(), &str> {
    result.as_ref().map(drop).map_err(String::as_str)
}

/// The error of a model that is not loaded.
pub fn not_loaded(entry: &Entry) -> ApiError {
    PoolError::NotLoaded(Arc::clone(&entry.name)).into()
}

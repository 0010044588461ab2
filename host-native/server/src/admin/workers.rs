//! Workers: list, add, drain, and make fail.

use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::models::{Done, find, not_loaded};
use crate::guard::administrator::Administrator;
use crate::http::body::Body;
use crate::http::error::{ApiError, ErrorBody, HttpError, json};
use crate::http::params::PathParams;
use crate::models::instance::ModelInstance;
use crate::models::status::{InjectedFault, WorkerHandle};
use crate::server::Server;

/// A worker.
#[derive(Debug, Serialize, ToSchema)]
pub struct WorkerInfo {
    /// Its number.
    id: u32,
    /// `healthy`, `draining`, `restarting`, `stalled` or `ended`.
    state: &'static str,
    /// Requests in its engine.
    running: usize,
    /// Share of the last 10 s in which it had work, 0 to 1.
    utilisation: f64,
    /// Seconds since its last heartbeat.
    heartbeat_age: f64,
    /// Size of its KV cache.
    kv_bytes: usize,
    /// Bytes of that held by running requests.
    kv_in_use_bytes: usize,
    /// Bytes of that held by the prefix cache only.
    kv_cached_bytes: usize,
}

pub fn worker_info(worker: &WorkerHandle) -> WorkerInfo {
    let kv = worker.status.kv();
    WorkerInfo {
        id: worker.id,
        state: worker.status.state().name(),
        running: worker.status.running(),
        utilisation: worker.status.utilisation(),
        heartbeat_age: worker.status.age().as_secs_f64(),
        kv_bytes: kv.reserved_bytes,
        kv_in_use_bytes: kv.in_use_bytes,
        kv_cached_bytes: kv.cached_bytes,
    }
}

/// The workers of a model.
#[derive(Debug, Serialize, ToSchema)]
pub struct WorkerInfos {
    /// How the worker for a request is chosen.
    strategy: String,
    /// The workers.
    workers: Vec<WorkerInfo>,
}

/// The workers of a loaded model.
#[derive(Debug, Serialize, ToSchema)]
pub struct ModelWorkers {
    /// Model name.
    model: String,
    /// Its workers.
    #[serde(flatten)]
    workers: WorkerInfos,
}

/// The workers of all loaded models.
#[derive(Debug, Serialize, ToSchema)]
pub struct AllWorkers {
    /// The default model first.
    models: Vec<ModelWorkers>,
}

fn workers_of(instance: &ModelInstance) -> WorkerInfos {
    let strategy = instance.workers.dispatcher().strategy().name().into();
    WorkerInfos { strategy, workers: instance.workers.list().iter().map(worker_info).collect() }
}

/// List the workers of all loaded models
#[utoipa::path(get, path = "/admin/workers", tag = "Administration", responses(
    (status = 200, description = "Workers", body = AllWorkers),
))]
pub async fn all(State(server): State<Arc<Server>>) -> Response {
    let instances = server.pool.entries().into_iter().filter_map(|entry| entry.instance());
    let of = |instance: Arc<ModelInstance>| ModelWorkers {
        model: instance.name.to_string(),
        workers: workers_of(&instance),
    };
    json(StatusCode::OK, &AllWorkers { models: instances.map(of).collect() })
}

/// List the workers of a model
///
/// # Errors
/// If there is no such model, or it is not loaded.
#[utoipa::path(get, path = "/admin/models/{name}/workers", tag = "Administration",
    params(("name" = String, Path, description = "Model name")),
    responses((status = 200, description = "Workers", body = WorkerInfos)))]
pub async fn list(
    State(server): State<Arc<Server>>,
    PathParams(name): PathParams<String>,
) -> Result<Response, HttpError> {
    let entry = find(&server, &name)?;
    let instance = entry.instance().ok_or_else(|| not_loaded(&entry))?;
    Ok(json(StatusCode::OK, &workers_of(&instance)))
}

/// Add a worker
///
/// # Errors
/// If the model is not loaded, or memory is short.
#[utoipa::path(post, path = "/admin/models/{name}/workers", tag = "Administration",
    params(("name" = String, Path, description = "Model name")),
    responses(
        (status = 200, description = "The worker", body = WorkerInfo),
        (status = "4XX", description = "Not loaded, or not enough memory", body = ErrorBody),
    ))]
pub async fn add(
    State(server): State<Arc<Server>>,
    Extension(administrator): Extension<Administrator>,
    PathParams(name): PathParams<String>,
) -> Result<Response, HttpError> {
    let entry = find(&server, &name)?;
    let instance = entry.instance().ok_or_else(|| not_loaded(&entry))?;
    let added = tokio::task::spawn_blocking(move || instance.workers.add(|_| {})).await;
    let added = added.map_err(|_| ApiError::internal("adding the worker panicked; see the log"))?;
    let worker = added.map_err(|e| ApiError::unavailable(e.to_string()).code("not_enough_memory"));
    let error = worker.as_ref().err().map(|e: &ApiError| e.message.clone());
    administrator.log("add worker", &name, error.as_deref().map_or(Ok(()), Err));
    Ok(json(StatusCode::OK, &worker_info(&worker?)))
}

/// Remove a worker once its requests have finished
///
/// # Errors
/// If there is no such worker, or it is the last.
#[utoipa::path(delete, path = "/admin/models/{name}/workers/{id}", tag = "Administration",
    params(("name" = String, Path, description = "Model name"), ("id" = u32, Path, description = "Worker")),
    responses(
        (status = 200, description = "It takes no more requests", body = Done),
        (status = "4XX", description = "No such worker, or the last", body = ErrorBody),
    ))]
pub async fn drain(
    State(server): State<Arc<Server>>,
    Extension(administrator): Extension<Administrator>,
    PathParams((name, id)): PathParams<(String, u32)>,
) -> Result<Response, HttpError> {
    let entry = find(&server, &name)?;
    let instance = entry.instance().ok_or_else(|| not_loaded(&entry))?;
    let done = instance.workers.drain(id).map_err(|e| ApiError::invalid(e.to_string()).code("last_worker"))?;
    administrator.log("drain worker", &format!("{name}/{id}"), Ok(()));
    if done { Ok(json(StatusCode::OK, &Done { done })) } else { Err(no_worker(id).into()) }
}

/// A fault to raise.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Fail {
    fault: FaultKind,
    /// Engine steps before it.
    #[serde(default)]
    after_steps: u32,
    /// Message of the panic [default: injected fault].
    message: Option<String>,
}

/// Kinds of faults.
#[derive(Debug, Clone, Copy, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum FaultKind {
    /// The next engine step panics.
    Panic,
    /// The next engine step takes longer than `--stall-timeout`.
    Stall,
}

/// Make a worker fail in one of its next steps, with `--fault-injection`
///
/// # Errors
/// If there is no such worker, or faults may not be injected.
#[utoipa::path(post, path = "/admin/models/{name}/workers/{id}/fail", tag = "Administration", request_body = Fail,
    params(("name" = String, Path, description = "Model name"), ("id" = u32, Path, description = "Worker")),
    responses(
        (status = 200, description = "A step will fail", body = Done),
        (status = "4XX", description = "No such worker, or not allowed", body = ErrorBody),
    ))]
pub async fn fail(
    State(server): State<Arc<Server>>,
    Extension(administrator): Extension<Administrator>,
    PathParams((name, id)): PathParams<(String, u32)>,
    Body(body): Body<Fail>,
) -> Result<Response, HttpError> {
    super::check_fault_injection(&server)?;
    let entry = find(&server, &name)?;
    let instance = entry.instance().ok_or_else(|| not_loaded(&entry))?;
    let worker = instance.workers.list().into_iter().find(|worker| worker.id == id).ok_or_else(|| no_worker(id))?;
    let fault = match body.fault {
        FaultKind::Panic => InjectedFault::Panic(body.message.unwrap_or_else(|| "injected fault".into())),
        FaultKind::Stall => InjectedFault::Stall,
    };
    worker.status.inject(fault, body.after_steps);
    administrator.log("fail worker", &format!("{name}/{id}"), Ok(()));
    Ok(json(StatusCode::OK, &Done { done: true }))
}

fn no_worker(id: u32) -> ApiError {
    ApiError::new(404, "invalid_request_error", format!("there is no worker {id}")).code("worker_not_found")
}

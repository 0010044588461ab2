//! Probes, statistics and metrics. None of them waits for the engine thread.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::ToSchema;

use crate::guard::rights::Rights;
use crate::http::error::json;
use crate::models::actor::ModelState;
use crate::models::entry::Entry;
use crate::models::instance::ModelInstance;
use crate::models::pool::ModelPool;
use crate::models::pressure::MAX_LEVEL;
use crate::models::status::{WorkerHandle, WorkerState};
use crate::observe::metrics::of_tenant;
use crate::server::{Caller, Server};
use crate::state::store::Kind;

/// State of the server.
#[derive(Debug, Serialize, ToSchema)]
pub struct Health {
    /// `healthy`, `draining` or `failed`.
    pub status: &'static str,
    /// Whether the default model is loaded.
    pub model_loaded: bool,
    /// Name of the default model; empty if the server needs a key.
    pub model: String,
    /// State of each model; empty if the server needs a key.
    pub models: BTreeMap<String, &'static str>,
    /// Always `cpu`.
    pub memory_type: &'static str,
    /// Always 0: no GPU is used.
    pub vram_bytes: u64,
    /// Seconds since the server started.
    pub uptime_seconds: f64,
    /// Version of Starling.
    pub version: &'static str,
}

/// Result of a probe.
#[derive(Debug, Serialize, ToSchema)]
pub struct Probe {
    /// `ok`, or the reason of a failure.
    pub status: String,
}

/// State of the server, with model and version
#[utoipa::path(get, path = "/health", tag = "Health", responses(
    (status = 200, description = "Healthy", body = Health),
    (status = 503, description = "Shutting down, or the engine failed or stalled", body = Health),
))]
pub async fn health(State(server): State<Arc<Server>>) -> Response {
    let (status, code) = match fault(&server) {
        Some(_) => ("failed", StatusCode::SERVICE_UNAVAILABLE),
        None if server.is_draining() => ("draining", StatusCode::SERVICE_UNAVAILABLE),
        None => ("healthy", StatusCode::OK),
    };
    let model_loaded = server.pool.default_entry().is_some_and(|entry| entry.instance().is_some());
    let entries = named_entries(&server);
    let health = Health {
        status,
        model_loaded,
        model: entries.first().map(|entry| entry.name.to_string()).unwrap_or_default(),
        models: entries.iter().map(|entry| (entry.name.to_string(), entry.state().name())).collect(),
        memory_type: "cpu",
        vram_bytes: 0,
        uptime_seconds: server.start.elapsed().as_secs_f64(),
        version: env!("CARGO_PKG_VERSION"),
    };
    json(code, &health)
}

/// Liveness: whether the workers make progress
#[utoipa::path(get, path = "/livez", tag = "Health", responses(
    (status = 200, description = "Alive", body = Probe),
    (status = 503, description = "A model's workers have stalled; restart the server", body = Probe),
))]
pub async fn live(State(server): State<Arc<Server>>) -> Response {
    probe(fault(&server))
}

/// The models that a probe may name: none if the server needs a key, which probes do not have.
fn named_entries(server: &Server) -> Vec<Arc<Entry>> {
    if server.keys.get().are_needed() { Vec::new() } else { server.pool.entries() }
}

/// A reason of a failure; without the name in it, if the server needs a key.
fn reason(server: &Server, named: String, unnamed: &str) -> String {
    if server.keys.get().are_needed() { unnamed.into() } else { named }
}

/// Readiness of the server, and of each model.
#[derive(Debug, Serialize, ToSchema)]
pub struct Readiness {
    /// `ok`, or why the server accepts no requests.
    pub status: String,
    /// Memory pressure, 0 to 3; at 3 only requests of high priority are accepted.
    pub memory_pressure: u8,
    /// State of each model; empty if the server needs a key.
    pub models: BTreeMap<String, ModelReadiness>,
}

/// State of a model.
#[derive(Debug, Serialize, ToSchema)]
pub struct ModelReadiness {
    /// `unloaded`, `loading`, `loaded`, `draining` or `failed`.
    pub status: &'static str,
    /// Circuit breaker: `closed`, `open` or `half-open`.
    pub breaker: &'static str,
    /// Queued requests.
    pub waiting: usize,
    /// Workers that take requests.
    pub healthy_workers: usize,
}

fn model_readiness(entry: &Entry) -> ModelReadiness {
    let instance = entry.instance();
    let is_healthy = |worker: &WorkerHandle| worker.status.state() == WorkerState::Healthy;
    ModelReadiness {
        status: entry.state().name(),
        breaker: entry.breaker_name(),
        waiting: instance.as_ref().map_or(0, |instance| instance.snapshot().depth.iter().sum()),
        healthy_workers: instance.map_or(0, |i| i.workers.list().iter().filter(|worker| is_healthy(worker)).count()),
    }
}

/// Readiness: whether the server accepts requests
#[utoipa::path(get, path = "/readyz", tag = "Health", responses(
    (status = 200, description = "Ready", body = Readiness),
    (status = 503, description = "There is no model, the queue is full, memory is short, the server is shutting down, or workers have stalled", body = Readiness),
))]
pub async fn ready(State(server): State<Arc<Server>>) -> Response {
    let entries = server.pool.entries();
    let entries = if entries.is_empty() {
        // a file may have come into the directory of models
        server.pool.rescan();
        server.pool.entries()
    } else {
        entries
    };
    let instances: Vec<Arc<ModelInstance>> = entries.iter().filter_map(|entry| entry.instance()).collect();
    // a model that is full does not keep requests from the others
    let full = !instances.is_empty() && instances.iter().all(|instance| instance.queue.lock().prompts.is_full());
    let missing = || {
        let is_missing = |entry: &&Arc<Entry>| ModelPool::loads_at_start(entry) && entry.instance().is_none();
        let failed = entries.iter().find(|entry| matches!(entry.state(), ModelState::Failed(_)) && is_missing(entry));
        failed.map(|entry| reason(&server, format!("model {} does not load", entry.name), "a model does not load"))
    };
    let none = || entries.is_empty().then(|| "no model: --models-dir has no GGUF file, and --model names none".into());
    let draining = || server.is_draining().then(|| "draining".into());
    // free KV pages are no condition: the engine refuses a request that could never get enough, so pages become free
    let memory_pressure = server.pool.resources().pressure.level();
    let short = || (memory_pressure >= MAX_LEVEL).then(|| "memory is short".into());
    let full = || full.then(|| "queue full".into());
    let why = fault(&server).or_else(draining).or_else(none).or_else(full).or_else(short).or_else(missing);
    let code = if why.is_some() { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK };
    let models = named_entries(&server);
    let models = models.iter().map(|entry| (entry.name.to_string(), model_readiness(entry))).collect();
    json(code, &Readiness { status: why.unwrap_or_else(|| "ok".into()), memory_pressure, models })
}

fn probe(fault: Option<String>) -> Response {
    let code = if fault.is_some() { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK };
    json(code, &Probe { status: fault.unwrap_or_else(|| "ok".into()) })
}

/// A fault that only a restart of the server ends.
fn fault(server: &Server) -> Option<String> {
    let fault = server.pool.entries().iter().find_map(|entry| entry.instance()?.fault());
    fault.map(|fault| reason(server, fault, "engine stalled"))
}

/// Prometheus metrics; OpenMetrics if the client accepts it. A tenant sees the series of no other tenant
#[utoipa::path(get, path = "/metrics", tag = "Health", responses(
    (status = 200, description = "Metrics", content_type = "text/plain", body = String),
))]
pub async fn metrics(
    State(server): State<Arc<Server>>,
    caller: Option<Extension<Caller>>,
    headers: HeaderMap,
) -> Response {
    let accept = headers.get(header::ACCEPT).and_then(|a| a.to_str().ok()).unwrap_or_default();
    for entry in server.pool.entries() {
        if let Some(instance) = entry.instance() {
            entry.metrics.set(&instance.snapshot());
            entry.metrics.set_utilisation(&instance.workers.utilisation());
        } else {
            entry.metrics.set_utilisation(&[]);
        }
    }
    if let Some(log) = &server.audit {
        server.metrics.set_audit(log.lost(), log.failures());
    }
    if let Some(disk) = &server.pool.resources().disk {
        disk.report(&server.metrics);
    }
    if let Some(disk) = &server.answers.disk {
        let stats = disk.stats();
        server.metrics.set_answers_disk(stats.bytes, stats.refused.iter().sum(), stats.io_errors);
    }
    if let Some(store) = &server.pool.resources().state {
        for kind in Kind::ALL {
            server.metrics.set_state_rows(kind.name(), store.size(kind));
        }
        let (written, failed) = store.counts();
        server.metrics.set_state_writes(written, failed);
    }
    let (kind, text) = if accept.contains("application/openmetrics-text") {
        ("application/openmetrics-text; version=1.0.0; charset=utf-8", server.metrics.openmetrics())
    } else {
        ("text/plain; version=0.0.4; charset=utf-8", server.metrics.prometheus())
    };
    let text = match caller {
        Some(Extension(caller)) if caller.identity.rights == Rights::Use => {
            of_tenant(&text, &caller.identity.tenant.name)
        }
        _ => text,
    };
    ([(header::CONTENT_TYPE, kind)], text).into_response()
}

//! Probes, statistics and metrics. None of them waits for the engine thread.

use std::sync::Arc;

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::ToSchema;

use super::api::error::json;
use super::metrics::Snapshot;
use super::scheduler::Priority;
use super::state::App;
use super::stats::Totals;

/// State of the server.
#[derive(Debug, Serialize, ToSchema)]
pub struct Health {
    /// `healthy`, `draining` or `failed`.
    pub status: &'static str,
    /// Always true: the server accepts connections only once the model is loaded.
    pub model_loaded: bool,
    /// The model's name.
    pub model: String,
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
pub async fn health(State(app): State<Arc<App>>) -> Response {
    let (status, code) = match fault(&app) {
        Some(_) => ("failed", StatusCode::SERVICE_UNAVAILABLE),
        None if app.is_draining() => ("draining", StatusCode::SERVICE_UNAVAILABLE),
        None => ("healthy", StatusCode::OK),
    };
    let health = Health {
        status,
        model_loaded: true,
        model: app.model_name.clone(),
        memory_type: "cpu",
        vram_bytes: 0,
        uptime_seconds: app.start.elapsed().as_secs_f64(),
        version: env!("CARGO_PKG_VERSION"),
    };
    json(code, &health)
}

/// Liveness: whether the engine thread makes progress
#[utoipa::path(get, path = "/livez", tag = "Health", responses(
    (status = 200, description = "Alive", body = Probe),
    (status = 503, description = "The engine thread failed or stalled; restart the server", body = Probe),
))]
pub async fn live(State(app): State<Arc<App>>) -> Response {
    probe(fault(&app))
}

/// Readiness: whether the server accepts requests
#[utoipa::path(get, path = "/readyz", tag = "Health", responses(
    (status = 200, description = "Ready", body = Probe),
    (status = 503, description = "The queue is full, the server is shutting down, or the engine failed or stalled", body = Probe),
))]
pub async fn ready(State(app): State<Arc<App>>) -> Response {
    let full = app.queue.lock().prompts.is_full();
    let draining = || app.is_draining().then(|| "draining".into());
    // free KV pages are no condition: the engine refuses a request that could never get enough, so pages become free
    probe(fault(&app).or_else(draining).or_else(|| full.then(|| "queue full".into())))
}

fn probe(fault: Option<String>) -> Response {
    let code = if fault.is_some() { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK };
    json(code, &Probe { status: fault.unwrap_or_else(|| "ok".into()) })
}

/// A fault that only a restart of the server ends.
fn fault(app: &App) -> Option<String> {
    if app.worker.has_failed() {
        return Some("engine failed: its thread panicked".into());
    }
    let (age, limit) = (app.worker.age(), app.settings.stall_timeout);
    let stalled = age > limit && !app.worker.has_ended();
    stalled.then(|| format!("engine stalled: no step for {} s, stall-timeout {} s", age.as_secs(), limit.as_secs_f64()))
}

/// Current load and totals since the start.
#[derive(Debug, Serialize, ToSchema)]
pub struct Stats {
    /// The model's name.
    pub model: String,
    /// Seconds since the server started.
    pub uptime_seconds: f64,
    /// Compute threads.
    pub threads: usize,
    /// Instruction set of the kernels.
    pub isa: &'static str,
    /// Queued requests by priority.
    pub waiting: Depths,
    /// Queued requests that had their turn and wait for KV pages, or for the prefill of a prompt they share.
    pub held: usize,
    /// Requests in the engine's batch.
    pub running: usize,
    /// Queued texts to embed.
    pub texts_waiting: usize,
    /// Open sessions.
    pub sessions: usize,
    /// KV cache.
    pub kv: KvMemory,
    /// Totals and latencies.
    #[serde(flatten)]
    pub totals: Totals,
}

/// Queued requests.
#[derive(Debug, Serialize, ToSchema)]
pub struct Depths {
    /// High priority.
    pub high: usize,
    /// Normal priority.
    pub normal: usize,
    /// Low priority.
    pub low: usize,
}

/// Memory of the KV cache, and hits of the prefix cache.
#[derive(Debug, Serialize, ToSchema)]
pub struct KvMemory {
    /// Tokens per page.
    pub page_tokens: usize,
    /// Number of pages.
    pub pages: usize,
    /// Size of the cache in bytes.
    pub reserved_bytes: usize,
    /// Bytes that the operating system has committed: pages used at least once.
    pub committed_bytes: usize,
    /// Bytes of pages held by running requests.
    pub in_use_bytes: usize,
    /// Bytes of pages held by the prefix cache only.
    pub cached_bytes: usize,
    /// Bytes of free pages.
    pub free_bytes: usize,
    /// Unused bytes in pages held by running requests.
    pub fragmented_bytes: usize,
    /// Pages evicted from the prefix cache.
    pub evictions: u64,
    /// Pages found in the prefix cache.
    pub page_hits: u64,
    /// Pages looked up in the prefix cache and not found.
    pub page_misses: u64,
}

/// Current load, KV cache and latencies as JSON
#[utoipa::path(get, path = "/server/stats", tag = "Health", responses((status = 200, description = "Server statistics", body = Stats)))]
pub async fn stats(State(app): State<Arc<App>>) -> Response {
    let Snapshot { depth, texts, held, running, sessions, kv } = app.snapshot();
    let stats = Stats {
        model: app.model_name.clone(),
        uptime_seconds: app.start.elapsed().as_secs_f64(),
        threads: app.threads,
        isa: app.cpu.isa().name(),
        waiting: Depths {
            high: depth[Priority::High.index()],
            normal: depth[Priority::Normal.index()],
            low: depth[Priority::Low.index()],
        },
        held,
        running,
        texts_waiting: texts,
        sessions,
        kv: KvMemory {
            page_tokens: starling::kernels::attention::PAGE,
            pages: kv.n_pages,
            reserved_bytes: kv.reserved_bytes,
            committed_bytes: kv.committed_bytes,
            in_use_bytes: kv.in_use_bytes,
            cached_bytes: kv.cached_bytes,
            free_bytes: kv.free_bytes,
            fragmented_bytes: kv.fragmented_bytes,
            evictions: kv.evictions,
            page_hits: kv.hits,
            page_misses: kv.misses,
        },
        totals: app.metrics.totals(),
    };
    json(StatusCode::OK, &stats)
}

/// Prometheus metrics; OpenMetrics if the client accepts it
#[utoipa::path(get, path = "/metrics", tag = "Health", responses(
    (status = 200, description = "Metrics", content_type = "text/plain", body = String),
))]
pub async fn metrics(State(app): State<Arc<App>>, headers: HeaderMap) -> Response {
    let accept = headers.get(header::ACCEPT).and_then(|a| a.to_str().ok()).unwrap_or_default();
    let snapshot = app.snapshot();
    let (kind, text) = if accept.contains("application/openmetrics-text") {
        ("application/openmetrics-text; version=1.0.0; charset=utf-8", app.metrics.openmetrics(&snapshot))
    } else {
        ("text/plain; version=0.0.4; charset=utf-8", app.metrics.prometheus(&snapshot))
    };
    ([(header::CONTENT_TYPE, kind)], text).into_response()
}

/// Load in a response header (ORCA), in the requested format: `TEXT` or `JSON`; `None` for others.
pub fn orca(app: &App, format: &str) -> Option<String> {
    let Snapshot { depth, kv, .. } = app.snapshot();
    let usage = kv.in_use_bytes as f64 / kv.reserved_bytes.max(1) as f64;
    let waiting = depth.iter().sum::<usize>();
    match format.to_ascii_uppercase().as_str() {
        "TEXT" => Some(format!(
            "TEXT named_metrics.kv_cache_usage_perc={usage}, named_metrics.num_requests_waiting={waiting}"
        )),
        "JSON" => Some(format!(
            "JSON {{\"named_metrics\":{{\"kv_cache_usage_perc\":{usage},\"num_requests_waiting\":{waiting}}}}}"
        )),
        _ => None,
    }
}

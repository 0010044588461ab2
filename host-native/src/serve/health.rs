//! How the server is: answers that never wait for the engine's thread.

use std::sync::Arc;

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use utoipa::ToSchema;

use super::api::error::json;
use super::metrics::Snapshot;
use super::past::Past;
use super::scheduler::Priority;
use super::state::App;

/// How the server is.
#[derive(Debug, Serialize, ToSchema)]
pub struct Health {
    /// `healthy`, `draining` or `failed`.
    pub status: &'static str,
    /// Whether the model is loaded; before that the server does not answer.
    pub model_loaded: bool,
    /// The model's name.
    pub model: String,
    /// `cpu`.
    pub memory_type: &'static str,
    /// 0: there is none.
    pub vram_bytes: u64,
    /// Seconds since the start.
    pub uptime_seconds: f64,
    /// Starling's version.
    pub version: &'static str,
}

/// Whether something is so, and why not.
#[derive(Debug, Serialize, ToSchema)]
pub struct Probe {
    /// `ok`, or what is not.
    pub status: &'static str,
}

/// How the server is.
#[utoipa::path(get, path = "/health", tag = "Health", responses(
    (status = 200, description = "It works", body = Health),
    (status = 503, description = "It ends, or its engine has failed", body = Health),
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

/// Whether the engine's thread lives.
#[utoipa::path(get, path = "/livez", tag = "Health", responses(
    (status = 200, description = "It lives", body = Probe),
    (status = 503, description = "It does not; restart the server", body = Probe),
))]
pub async fn live(State(app): State<Arc<App>>) -> Response {
    probe(fault(&app))
}

/// Whether requests are welcome.
#[utoipa::path(get, path = "/readyz", tag = "Health", responses(
    (status = 200, description = "They are", body = Probe),
    (status = 503, description = "Not now", body = Probe),
))]
pub async fn ready(State(app): State<Arc<App>>) -> Response {
    let full = app.queue.lock().prompts.is_full();
    let reason = fault(&app).or(app.is_draining().then_some("draining")).or(full.then_some("queue full"));
    // one that waits for memory, with nobody running who could give some back, would wait for ever: `submit` refuses
    // it. So memory is there, or will be.
    probe(reason)
}

fn probe(fault: Option<&'static str>) -> Response {
    let code = if fault.is_some() { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK };
    json(code, &Probe { status: fault.unwrap_or("ok") })
}

/// Why the server should be restarted, if it should.
fn fault(app: &App) -> Option<&'static str> {
    if app.pulse.has_failed() {
        return Some("the engine has failed");
    }
    (app.pulse.age() > app.settings.stall_timeout && !app.pulse.is_over()).then_some("the engine does not go on")
}

/// How things stand, for people and dashboards.
#[derive(Debug, Serialize, ToSchema)]
pub struct Stats {
    /// The model's name.
    pub model: String,
    /// Seconds since the start.
    pub uptime_seconds: f64,
    /// Threads of the engine.
    pub threads: usize,
    /// Its instruction set.
    pub isa: &'static str,
    /// Waiting requests by priority.
    pub waiting: Depths,
    /// Requests that wait for memory or for a prompt that others bring.
    pub held: usize,
    /// Answers being made.
    pub running: usize,
    /// Texts that wait to be embedded.
    pub texts_waiting: usize,
    /// Open sessions.
    pub sessions: usize,
    /// Memory of keys and values.
    pub kv: KvMemory,
    /// What has been done.
    #[serde(flatten)]
    pub past: Past,
}

/// Waiting requests.
#[derive(Debug, Serialize, ToSchema)]
pub struct Depths {
    /// Of high priority.
    pub high: usize,
    /// Of normal priority.
    pub normal: usize,
    /// Of low priority.
    pub low: usize,
}

/// Bytes of keys and values, and what the prefix cache did.
#[derive(Debug, Serialize, ToSchema)]
pub struct KvMemory {
    /// Tokens of a page.
    pub page_tokens: usize,
    /// Pages.
    pub pages: usize,
    /// Bytes that may be used.
    pub reserved_bytes: usize,
    /// Bytes touched so far.
    pub committed_bytes: usize,
    /// Bytes that answers hold.
    pub in_use_bytes: usize,
    /// Bytes that only the prefix cache holds.
    pub cached_bytes: usize,
    /// Bytes that are free.
    pub free_bytes: usize,
    /// Bytes without tokens in pages that are held.
    pub fragmented_bytes: usize,
    /// Cached pages given away.
    pub evictions: u64,
    /// Pages found in the cache.
    pub page_hits: u64,
    /// Pages looked for and not found.
    pub page_misses: u64,
}

/// How things stand.
#[utoipa::path(get, path = "/server/stats", tag = "Health", responses((status = 200, description = "So", body = Stats)))]
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
        past: app.metrics.past(),
    };
    json(StatusCode::OK, &stats)
}

/// Metrics for Prometheus, in OpenMetrics where the client accepts it.
#[utoipa::path(get, path = "/metrics", tag = "Health", responses(
    (status = 200, description = "The metrics", content_type = "text/plain", body = String),
))]
pub async fn metrics(State(app): State<Arc<App>>, headers: HeaderMap) -> Response {
    let accept = headers.get(header::ACCEPT).and_then(|a| a.to_str().ok()).unwrap_or_default();
    let now = app.snapshot();
    let (kind, text) = if accept.contains("application/openmetrics-text") {
        ("application/openmetrics-text; version=1.0.0; charset=utf-8", app.metrics.openmetrics(&now))
    } else {
        ("text/plain; version=0.0.4; charset=utf-8", app.metrics.prometheus(&now))
    };
    ([(header::CONTENT_TYPE, kind)], text).into_response()
}

/// Load as a gateway reads it from a response (ORCA), in the form it asks for.
pub fn orca(app: &App, form: &str) -> Option<String> {
    let now = app.snapshot();
    let usage = now.kv.in_use_bytes as f64 / now.kv.reserved_bytes.max(1) as f64;
    let waiting = now.depth.iter().sum::<usize>() + now.held;
    match form.to_ascii_uppercase().as_str() {
        "TEXT" => Some(format!(
            "TEXT named_metrics.kv_cache_usage_perc={usage}, named_metrics.num_requests_waiting={waiting}"
        )),
        "JSON" => Some(format!(
            "JSON {{\"named_metrics\":{{\"kv_cache_usage_perc\":{usage},\"num_requests_waiting\":{waiting}}}}}"
        )),
        _ => None,
    }
}

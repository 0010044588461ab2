//! Readiness callback: reports to an orchestrator that the model is loaded.

use std::time::Duration;

use http_body_util::Full;
use hyper::body::Bytes;
use hyper::{Method, Request, header};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde::Serialize;

const MAX_ATTEMPTS: u32 = 8;
/// Time limit of one attempt.
const ATTEMPT_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum backoff between two attempts.
const MAX_WAIT: Duration = Duration::from_secs(30);

/// Body of the callback.
#[derive(Debug, Serialize)]
pub struct Ready {
    pub worker_id: String,
    /// Base URL of this server.
    pub uri: String,
    pub model: String,
    /// SHA-256 of the model file.
    pub model_sha256: String,
    /// Always `cpu`.
    pub memory_type: &'static str,
    /// Always 0: no GPU is used.
    pub vram_bytes: u64,
    /// Weights and KV cache.
    pub memory_bytes: u64,
}

/// POSTs `ready` until a response is successful, at most [`MAX_ATTEMPTS`] times with exponential backoff.
pub async fn report(url: String, ready: Ready, first_wait: Duration) {
    let body = serde_json::to_vec(&ready).unwrap_or_default();
    let client: Client<HttpConnector, Full<Bytes>> = Client::builder(TokioExecutor::new()).build_http();
    let mut wait = first_wait;
    for attempt in 1..=MAX_ATTEMPTS {
        let request =
            Request::builder().method(Method::POST).uri(&url).header(header::CONTENT_TYPE, "application/json");
        let request = match request.body(Full::new(Bytes::from(body.clone()))) {
            Ok(request) => request,
            Err(e) => return tracing::error!(url, "readiness callback: invalid URL: {e}; see --callback-url"),
        };
        let problem = match tokio::time::timeout(ATTEMPT_TIMEOUT, client.request(request)).await {
            Ok(Ok(response)) if response.status().is_success() => {
                return tracing::info!(url, attempt, "readiness callback delivered");
            }
            Ok(Ok(response)) => format!("found status {}, expected 2xx", response.status()),
            Ok(Err(e)) => e.to_string(),
            Err(_) => format!("no response within {} s", ATTEMPT_TIMEOUT.as_secs()),
        };
        tracing::warn!(url, attempt, "readiness callback failed: {problem}");
        if attempt < MAX_ATTEMPTS {
            tokio::time::sleep(wait).await;
            wait = (wait * 2).min(MAX_WAIT);
        }
    }
    tracing::error!(
        url,
        "readiness callback not delivered after {MAX_ATTEMPTS} attempts; the orchestrator does not know this worker"
    );
}

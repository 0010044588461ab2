//! Tells an orchestrator that this worker is ready.

use std::time::Duration;

use http_body_util::Full;
use hyper::body::Bytes;
use hyper::{Method, Request, header};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde::Serialize;

/// Times that it is tried.
const TRIES: u32 = 8;
/// How long an answer may take.
const LIMIT: Duration = Duration::from_secs(10);
/// Longest time between two tries.
const MAX_WAIT: Duration = Duration::from_secs(30);

/// What it is told.
#[derive(Debug, Serialize)]
pub struct Ready {
    /// This worker's name.
    pub worker_id: String,
    /// Where it is.
    pub uri: String,
    /// The model's name.
    pub model: String,
    /// SHA-256 of its file.
    pub model_sha256: String,
    /// `cpu`.
    pub memory_type: &'static str,
    /// 0: there is none.
    pub vram_bytes: u64,
    /// Bytes of weights, keys and values.
    pub memory_bytes: u64,
}

/// Reports until somebody has heard it, or for so many times; the log says which.
pub async fn report(url: String, ready: Ready, first_wait: Duration) {
    let body = serde_json::to_vec(&ready).unwrap_or_default();
    let client: Client<HttpConnector, Full<Bytes>> = Client::builder(TokioExecutor::new()).build_http();
    let mut wait = first_wait;
    for attempt in 1..=TRIES {
        let request =
            Request::builder().method(Method::POST).uri(&url).header(header::CONTENT_TYPE, "application/json");
        let request = match request.body(Full::new(Bytes::from(body.clone()))) {
            Ok(request) => request,
            Err(e) => return tracing::error!(url, "the callback URL is wrong: {e}"),
        };
        let problem = match tokio::time::timeout(LIMIT, client.request(request)).await {
            Ok(Ok(response)) if response.status().is_success() => {
                return tracing::info!(url, attempt, "the orchestrator knows this worker");
            }
            Ok(Ok(response)) => format!("status {}", response.status()),
            Ok(Err(e)) => e.to_string(),
            Err(_) => "no answer".into(),
        };
        tracing::warn!(url, attempt, "the callback has failed: {problem}");
        if attempt < TRIES {
            tokio::time::sleep(wait).await;
            wait = (wait * 2).min(MAX_WAIT);
        }
    }
    tracing::error!(url, "the callback is given up after {TRIES} tries");
}

//! Readiness callback: reports to an orchestrator that the model is loaded.

use std::time::Duration;

use backon::{ExponentialBuilder, Retryable};
use http_body_util::Full;
use hyper::body::Bytes;
use hyper::header::HeaderValue;
use hyper::{Request, Uri, header};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde::Serialize;

const MAX_ATTEMPTS: usize = 8;
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
    let uri: Uri = match url.parse() {
        Ok(uri) => uri,
        Err(e) => return tracing::error!(url, "readiness callback: invalid URL: {e}; see --callback-url"),
    };
    let body = Bytes::from(serde_json::to_vec(&ready).unwrap_or_default());
    let client: Client<HttpConnector, Full<Bytes>> = Client::builder(TokioExecutor::new()).build_http();
    let backoff = ExponentialBuilder::new().with_min_delay(first_wait).with_max_delay(MAX_WAIT);
    let deliver = || deliver(&client, &uri, &body);
    let delivered = deliver
        .retry(backoff.with_max_times(MAX_ATTEMPTS - 1))
        .notify(|problem, wait| tracing::warn!(url, "readiness callback failed: {problem}; retry in {wait:?}"))
        .await;
    match delivered {
        Ok(()) => tracing::info!(url, "readiness callback delivered"),
        Err(problem) => tracing::error!(
            url,
            "readiness callback not delivered after {MAX_ATTEMPTS} attempts: {problem}; the orchestrator does not know \
             this worker"
        ),
    }
}

/// POSTs `body` once. The error says what was found in place of a successful response.
async fn deliver(client: &Client<HttpConnector, Full<Bytes>>, uri: &Uri, body: &Bytes) -> Result<(), String> {
    let mut request = Request::post(uri.clone()).body(Full::new(body.clone())).map_err(|e| e.to_string())?;
    request.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    match tokio::time::timeout(ATTEMPT_TIMEOUT, client.request(request)).await {
        Ok(Ok(response)) if response.status().is_success() => Ok(()),
        Ok(Ok(response)) => Err(format!("found status {}, expected 2xx", response.status())),
        Ok(Err(e)) => Err(e.to_string()),
        Err(_) => Err(format!("no response within {} s", ATTEMPT_TIMEOUT.as_secs())),
    }
}

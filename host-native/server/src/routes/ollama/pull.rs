//! `POST /api/pull`, `/api/copy`, `/api/create` and `DELETE /api/delete`: changes of the models of the server.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::body::Body as HttpBody;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use http_body_util::BodyExt;
use http_body_util::channel::Channel;
use starling_api::ollama::error::OllamaError;
use starling_api::ollama::models::{
    OllamaCopyRequest, OllamaCreateRequest, OllamaDeleteRequest, OllamaProgress, OllamaPullRequest,
};
use starling_api::ollama::request::model_name;
use starling_host::registry;
use tokio::sync::{Semaphore, oneshot};

use crate::admin::settings::entry_of;
use crate::guard::administrator::Administrator;
use crate::http::body::Body;
use crate::http::error::{ApiError, HttpError, json, request_id};
use crate::server::{Caller, Server};

/// The source of a name as Ollama's clients write it: `hf.co/OWNER/REPO:QUANT` is `hf:OWNER/REPO:QUANT`.
fn source_of(name: &str) -> String {
    let hub = ["hf.co/", "huggingface.co/"].iter().find_map(|prefix| name.strip_prefix(prefix));
    hub.map_or_else(|| model_name(name).to_string(), |rest| format!("hf:{}", model_name(rest)))
}

/// Download a model into the store and add it to the server.
///
/// # Errors
/// A caller that may not, or a source that is none.
#[utoipa::path(post, path = "/api/pull", tag = "Ollama", request_body = OllamaPullRequest, responses(
    (status = 200, description = "Progress; unless `stream` is false, lines of JSON", content(
        (OllamaProgress = "application/json"), (OllamaProgress = "application/x-ndjson"),
    )),
    (status = "4XX", description = "Not allowed, or no such source", body = OllamaError),
    (status = "5XX", description = "The download failed", body = OllamaError),
))]
pub async fn pull(
    State(server): State<Arc<Server>>,
    caller: Caller,
    Body(body): Body<OllamaPullRequest>,
) -> Result<Response, HttpError> {
    caller.identity.rights.check_manages()?;
    if body.insecure == Some(true) {
        return Err(ApiError::unsupported("insecure", "insecure: downloads are always verified").into());
    }
    let known = server.pool.find(Some(model_name(&body.model))).is_ok();
    let source = source_of(&body.model);
    let bytes = Arc::new(PulledBytes::default());
    let watched = Arc::clone(&bytes);
    let administrator = server.administrator_of(&caller);
    let work = async move {
        if known {
            return Ok(());
        }
        let pulled = download(source.clone(), watched).await;
        let result = pulled.and_then(|(name, source)| add(&server, &name, source.into()));
        log(&administrator, "pull model", &source, &result);
        result
    };
    if body.stream == Some(false) {
        work.await?;
        return Ok(json(StatusCode::OK, &OllamaProgress::new("success")));
    }
    Ok(progress("pulling manifest", bytes, work))
}

/// Maximum downloads at once; further ones wait.
const MAX_PULLS: usize = 4;
static PULLS: Semaphore = Semaphore::const_new(MAX_PULLS);

/// Downloads a model on a thread of its own: a hub that sends nothing must not hold the blocking threads, on which the server
/// does everything else. Returns the model's name and source.
async fn download(source: String, bytes: Arc<PulledBytes>) -> Result<(String, String), ApiError> {
    let failed = |_| ApiError::internal("the download panicked; see the log");
    let turn = PULLS.acquire().await.map_err(|_| ApiError::internal("no more downloads"))?;
    let (sender, pulled) = oneshot::channel();
    let work = move || {
        // also if the client leaves
        let _turn = turn;
        let _ = sender.send(registry::pull(&source, &|n, total| bytes.add(n, total)));
    };
    let thread = std::thread::Builder::new().name("starling-pull".into()).spawn(work);
    thread.map_err(|e| ApiError::unavailable(format!("no thread for the download: {e}")))?;
    pulled.await.map_err(failed)?.map_err(|e| ApiError::param("model", e.to_string()).code("pull_failed"))
}

/// Bytes of a download; a total of 0 is not known.
#[derive(Default)]
struct PulledBytes {
    completed: AtomicU64,
    total: AtomicU64,
}

impl PulledBytes {
    /// Counts `n` more of `total` bytes.
    fn add(&self, n: u64, total: u64) {
        self.completed.fetch_add(n, Ordering::Relaxed);
        self.total.store(total, Ordering::Relaxed);
    }

    /// The line about them; `None` before the download begins.
    fn line(&self) -> Option<OllamaProgress> {
        let [completed, total] = [&self.completed, &self.total].map(|n| n.load(Ordering::Relaxed));
        let total = Some(total).filter(|total| *total > 0);
        let line = OllamaProgress { total, completed: Some(completed), ..OllamaProgress::new("pulling") };
        (total.is_some() || completed > 0).then_some(line)
    }
}

/// Time between two lines about a download.
const INTERVAL: Duration = Duration::from_millis(250);

/// Lines of a response: `first`, the bytes so far, then the result of `work`.
fn progress(
    first: &'static str,
    bytes: Arc<PulledBytes>,
    work: impl Future<Output = Result<(), ApiError>> + Send + 'static,
) -> Response {
    let (mut sender, body) = Channel::<axum::body::Bytes, std::convert::Infallible>::new(4);
    let id = request_id();
    tokio::spawn(async move {
        let line = |value: Result<Vec<u8>, serde_json::Error>| {
            let mut line = value.unwrap_or_default();
            line.push(b'\n');
            line.into()
        };
        if sender.send_data(line(serde_json::to_vec(&OllamaProgress::new(first)))).await.is_err() {
            return;
        }
        let mut work = std::pin::pin!(work);
        let mut last = None;
        let result = loop {
            let done = tokio::time::timeout(INTERVAL, &mut work).await.ok();
            let now = bytes.line();
            let completed = now.as_ref().and_then(|line| line.completed);
            if completed != last {
                last = completed;
                // a download goes on if the client leaves
                let _ = sender.send_data(line(serde_json::to_vec(&now))).await;
            }
            if let Some(result) = done {
                break result;
            }
        };
        let last = match result {
            Ok(()) => serde_json::to_vec(&OllamaProgress::new("success")),
            Err(e) => serde_json::to_vec(&OllamaError::from(e.body(id))),
        };
        let _ = sender.send_data(line(last)).await;
    });
    // the channel must not be polled after its end
    let body = HttpBody::new(body.map_err(|never| match never {}).fuse());
    ([(header::CONTENT_TYPE, "application/x-ndjson")], body).into_response()
}

/// Logs what was done to a model.
fn log(administrator: &Administrator, action: &str, model: &str, result: &Result<(), ApiError>) {
    administrator.log(action, model, result.as_ref().copied().map_err(|e| e.message.as_str()));
}

/// Adds a model under a name; the first request loads it.
fn add(server: &Server, name: &str, source: std::path::PathBuf) -> Result<(), ApiError> {
    let entry = entry_of(&server.pool.configuration(), name, source, &toml::Table::new())?;
    server.pool.add(entry).map_err(|e| ApiError::invalid(e.to_string()).code("model_exists"))
}

/// Gives a model another name.
fn copy_model(server: &Server, from: &str, name: &str) -> Result<(), ApiError> {
    let entry = server.pool.find(Some(model_name(from)))?;
    let Some(source) = entry.source() else {
        return Err(ApiError::unsupported("source", "source: the bundled model has no file to name"));
    };
    add(server, model_name(name), source)
}

/// Give a model another name.
///
/// # Errors
/// A caller that may not, no such model, or a name that is taken.
#[utoipa::path(post, path = "/api/copy", tag = "Ollama", request_body = OllamaCopyRequest, responses(
    (status = 200, description = "The model has the name too"),
    (status = "4XX", description = "Not allowed, no such model, or the name is taken", body = OllamaError),
    (status = "5XX", description = "The server cannot answer now", body = OllamaError),
))]
pub async fn copy(
    State(server): State<Arc<Server>>,
    caller: Caller,
    Body(body): Body<OllamaCopyRequest>,
) -> Result<StatusCode, HttpError> {
    caller.identity.rights.check_manages()?;
    let result = copy_model(&server, &body.source, &body.destination);
    log(&server.administrator_of(&caller), "copy model", &body.destination, &result);
    result?;
    Ok(StatusCode::OK)
}

/// Give a model another name. Everything else that a Modelfile may say is refused.
///
/// # Errors
/// A caller that may not, a field that is not supported, no such model, or a name that is taken.
#[utoipa::path(post, path = "/api/create", tag = "Ollama", request_body = OllamaCreateRequest, responses(
    (status = 200, description = "Progress; unless `stream` is false, lines of JSON", content(
        (OllamaProgress = "application/json"), (OllamaProgress = "application/x-ndjson"),
    )),
    (status = "4XX", description = "Not allowed, not supported, or the name is taken", body = OllamaError),
    (status = "5XX", description = "The server cannot answer now", body = OllamaError),
))]
pub async fn create(
    State(server): State<Arc<Server>>,
    caller: Caller,
    Body(body): Body<OllamaCreateRequest>,
) -> Result<Response, HttpError> {
    caller.identity.rights.check_manages()?;
    let result = copy_model(&server, body.source()?, &body.model);
    log(&server.administrator_of(&caller), "create model", &body.model, &result);
    result?;
    if body.stream == Some(false) {
        return Ok(json(StatusCode::OK, &OllamaProgress::new("success")));
    }
    Ok(progress("using existing layer", Arc::default(), async { Ok(()) }))
}

/// Remove a model from the server. Its file stays in the store.
///
/// # Errors
/// A caller that may not, or no such model.
#[utoipa::path(delete, path = "/api/delete", tag = "Ollama", request_body = OllamaDeleteRequest, responses(
    (status = 200, description = "The model is removed"),
    (status = "4XX", description = "Not allowed, or no such model", body = OllamaError),
    (status = "5XX", description = "The server cannot answer now", body = OllamaError),
))]
pub async fn delete(
    State(server): State<Arc<Server>>,
    caller: Caller,
    Body(body): Body<OllamaDeleteRequest>,
) -> Result<StatusCode, HttpError> {
    caller.identity.rights.check_manages()?;
    let entry = server.pool.find(Some(model_name(&body.model))).map_err(ApiError::from)?;
    server.pool.remove(&entry).await;
    log(&server.administrator_of(&caller), "remove model", &entry.name, &Ok(()));
    Ok(StatusCode::OK)
}

#[cfg(test)]
mod tests {
    #[test]
    fn names_of_the_hub_are_sources() {
        for (name, source) in [
            ("hf.co/a/b:Q4_K_M", "hf:a/b:Q4_K_M"),
            ("huggingface.co/a/b:latest", "hf:a/b"),
            ("hf:a/b", "hf:a/b"),
            ("https://host/x.gguf", "https://host/x.gguf"),
        ] {
            assert_eq!(super::source_of(name), source);
        }
    }
}

//! llama-server's slot calls: `GET /slots`, and saving, restoring and erasing the KV cache of a slot.

use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use serde::{Deserialize, Serialize};
use starling::engine::Engine;
use starling_api::parse::{ParseBody, parse};
use starling_host::error::Failure;
use starling_host::session_file::{self, Conversation};
use utoipa::{IntoParams, ToSchema};

use crate::http::body::Body;
use crate::http::error::{ApiError, ErrorBody, HttpError, json};
use crate::http::params::{PathParams, QueryParams};
use crate::models::instance::ModelInstance;
use crate::schedule::queue::PrefixEviction;
use crate::server::{Caller, Server};
use crate::state::slots::{Slot, directory_of, file_path};

/// Bytes of pages imported between two steps.
const IMPORT_BYTES: usize = 4 << 20;

/// Time for a worker to reach the end of its step.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(60);

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct ListQuery {
    /// Model name.
    model: Option<String>,
}

#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct SlotQuery {
    /// `save`, `restore` or `erase`.
    action: String,
    /// Model name.
    model: Option<String>,
}

/// A slot.
#[derive(Debug, Serialize, ToSchema)]
pub struct SlotInfo {
    id: usize,
    /// Context length in tokens.
    n_ctx: usize,
    /// Whether a request of the slot is queued or running.
    is_processing: bool,
    /// Tokens of its last conversation, if that is of the caller's tenant.
    n_tokens: usize,
}

/// File of a slot.
#[derive(Debug, Default, Deserialize, ToSchema)]
pub struct SlotFile {
    /// Name of a file in `--slot-save-path`; not for `erase`.
    #[serde(default)]
    filename: String,
    /// Model name.
    model: Option<String>,
}

impl ParseBody for SlotFile {
    fn parse_body(bytes: &[u8]) -> Result<Self, ApiError> {
        parse(if bytes.is_empty() { b"{}" } else { bytes })
    }
}

/// What was done.
#[derive(Debug, Default, Serialize, ToSchema)]
pub struct SlotDone {
    id_slot: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    filename: Option<String>,
    /// Tokens saved.
    #[serde(skip_serializing_if = "Option::is_none")]
    n_saved: Option<usize>,
    /// Bytes of their KV pages.
    #[serde(skip_serializing_if = "Option::is_none")]
    n_written: Option<usize>,
    /// Tokens restored.
    #[serde(skip_serializing_if = "Option::is_none")]
    n_restored: Option<usize>,
    /// Bytes of their KV pages.
    #[serde(skip_serializing_if = "Option::is_none")]
    n_read: Option<usize>,
    /// Tokens erased.
    #[serde(skip_serializing_if = "Option::is_none")]
    n_erased: Option<usize>,
    timings: SlotTimings,
}

/// Milliseconds.
#[derive(Debug, Default, Serialize, ToSchema)]
pub struct SlotTimings {
    #[serde(skip_serializing_if = "Option::is_none")]
    save_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    restore_ms: Option<f64>,
}

/// List the slots of a model
///
/// # Errors
/// If there is no such model.
#[utoipa::path(get, path = "/slots", tag = "llama-server", params(ListQuery), responses(
    (status = 200, description = "Slots", body = [SlotInfo]),
    (status = "4XX", description = "No such model", body = ErrorBody),
))]
pub async fn list(
    State(server): State<Arc<Server>>,
    caller: Caller,
    QueryParams(query): QueryParams<ListQuery>,
) -> Result<Response, HttpError> {
    let instance = server.model(query.model.as_deref(), None, &caller).await?;
    let slots = instance.slots.list(&caller.identity.tenant.name).into_iter().enumerate();
    let slots = slots.map(|(id, slot)| SlotInfo {
        id,
        n_ctx: instance.n_ctx(),
        is_processing: slot.n_running > 0,
        n_tokens: slot.tokens.len(),
    });
    Ok(json(StatusCode::OK, &slots.collect::<Vec<_>>()))
}

/// Save, restore or erase the KV cache of a slot
///
/// # Errors
/// No such model, slot or file, a file of another model or tenant, or no `--slot-save-path`.
#[utoipa::path(post, path = "/slots/{id}", tag = "llama-server", request_body = SlotFile,
    params(("id" = usize, Path, description = "Slot"), SlotQuery), responses(
    (status = 200, description = "Done", body = SlotDone),
    (status = "4XX", description = "No such model, slot or file, or the file cannot be restored", body = ErrorBody),
    (status = "5XX", description = "The file cannot be written", body = ErrorBody),
))]
pub async fn act(
    State(server): State<Arc<Server>>,
    caller: Caller,
    PathParams(id): PathParams<usize>,
    QueryParams(query): QueryParams<SlotQuery>,
    Body(body): Body<SlotFile>,
) -> Result<Response, HttpError> {
    let model = query.model.as_deref().or(body.model.as_deref());
    let instance = server.model(model, None, &caller).await?;
    let last = instance.slots.len().saturating_sub(1);
    let no_slot = || ApiError::param("id", format!("slot {id}, expected 0 to {last} (--max-seqs)"));
    let slot = instance.slots.get(id, &caller.identity.tenant.name).ok_or_else(no_slot)?;
    let path = || -> Result<PathBuf, ApiError> {
        let settings = server.settings();
        let directory = settings.slot_save_path.as_deref();
        let directory = directory.ok_or_else(|| {
            ApiError::new(501, "not_supported_error", "the server saves no slots; start it with --slot-save-path")
        })?;
        file_path(&directory_of(directory, &caller.identity.tenant.name), &body.filename).ok_or_else(|| {
            ApiError::param("filename", "expected the name of a file: no path, at most 200 bytes, no leading dot")
        })
    };
    let done = match query.action.as_str() {
        "save" => save(instance, &caller, (id, slot), path()?, server.settings().slot_save_size.0).await?,
        "restore" => restore(instance, &caller, id, path()?).await?,
        "erase" => erase(&instance, &caller, (id, slot)),
        other => {
            let message = format!("action {other:?}, expected save, restore or erase");
            return Err(ApiError::param("action", message).into());
        }
    };
    let filename = (!body.filename.is_empty()).then_some(body.filename);
    Ok(json(StatusCode::OK, &SlotDone { id_slot: id, filename, ..done }))
}

async fn save(
    instance: Arc<ModelInstance>,
    caller: &Caller,
    (id, slot): (usize, Slot),
    path: PathBuf,
    limit: u64,
) -> Result<SlotDone, ApiError> {
    let begin = Instant::now();
    if slot.tokens.is_empty() {
        return Err(ApiError::param("id", format!("slot {id} has no conversation")));
    }
    let mut pages = Vec::new();
    for worker in 0..instance.workers.list().len() {
        let tokens = slot.tokens.clone();
        let found = with_engine(&instance, worker, move |engine| engine.export_pages(&tokens, slot.salt)).await?;
        pages = if found.len() > pages.len() { found } else { pages };
    }
    let (n_saved, n_written) = (slot.tokens.len(), pages.len());
    let sha256 = instance.model_sha256;
    let tenant = caller.identity.tenant.name.to_string();
    blocking(move || {
        let private = std::fs::DirBuilder::new().mode(0o700).recursive(true).create(path.parent().unwrap_or(&path));
        private.map_err(|e| ApiError::internal(format!("the directory of slots: {}", e.kind())))?;
        let sum = others_bytes(&path).saturating_add(pages.len() as u64);
        if sum > limit {
            let message =
                format!("with this file the slots would have {sum} bytes, expected at most {limit} (--slot-save-size)");
            return Err(ApiError::new(413, "invalid_request_error", message).code("slots_full"));
        }
        if let Ok((other, _)) = session_file::read(&path, &sha256)
            && !other.tokens.is_empty()
            && other.tenant != tenant
        {
            return Err(foreign());
        }
        let conversation =
            Conversation { tokens: slot.tokens, tenant, cache_salt: slot.salt, ..Conversation::new(&sha256) };
        session_file::write(&path, &conversation, &pages)
            .map_err(|e| ApiError::internal(format!("the slot was not written: {}", e.for_clients())))
    })
    .await?;
    let timings = SlotTimings { save_ms: Some(begin.elapsed().as_secs_f64() * 1e3), ..SlotTimings::default() };
    Ok(SlotDone { n_saved: Some(n_saved), n_written: Some(n_written), timings, ..SlotDone::default() })
}

/// Bytes of the other files beside a file.
fn others_bytes(path: &Path) -> u64 {
    let entries = path.parent().and_then(|directory| std::fs::read_dir(directory).ok()).into_iter().flatten().flatten();
    let others = entries.filter(|entry| entry.path() != path).filter_map(|entry| entry.metadata().ok());
    others.filter(std::fs::Metadata::is_file).map(|file| file.len()).sum()
}

async fn restore(
    instance: Arc<ModelInstance>,
    caller: &Caller,
    id: usize,
    path: PathBuf,
) -> Result<SlotDone, ApiError> {
    let begin = Instant::now();
    let (sha256, tenant) = (instance.model_sha256, caller.identity.tenant.name.to_string());
    let (conversation, pages) = blocking(move || {
        let wrong = |e: &Failure| ApiError::param("filename", e.for_clients());
        if !path.exists() {
            return Err(ApiError::new(404, "invalid_request_error", "no such file").code("file_not_found"));
        }
        let (conversation, pages) = session_file::read(&path, &sha256).map_err(|e| wrong(&e))?;
        if conversation.tenant == tenant { Ok((conversation, Arc::new(pages))) } else { Err(foreign()) }
    })
    .await?;
    let mut n_tokens = 0;
    for worker in 0..instance.workers.list().len() {
        let (mut at, mut imported) = (0, 0);
        while at < pages.len() {
            let part = Arc::clone(&pages);
            // a page that is refused ends the restore: the engine computes the rest
            let import = move |engine: &mut Engine| {
                let page = engine.exported_page_bytes();
                let end = (at + (IMPORT_BYTES / page).max(1) * page).min(part.len());
                engine.import_pages(&part[at..end]).map(|n| (n, end)).ok()
            };
            let Some((n, end)) = with_engine(&instance, worker, import).await? else { break };
            (at, imported) = (end, imported + n);
        }
        n_tokens = n_tokens.max(imported);
    }
    instance.slots.set(id, &caller.identity.tenant.name, conversation.tokens, conversation.cache_salt);
    let timings = SlotTimings { restore_ms: Some(begin.elapsed().as_secs_f64() * 1e3), ..SlotTimings::default() };
    Ok(SlotDone { n_restored: Some(n_tokens), n_read: Some(pages.len()), timings, ..SlotDone::default() })
}

fn erase(instance: &ModelInstance, caller: &Caller, (id, slot): (usize, Slot)) -> SlotDone {
    let n_erased = slot.tokens.len();
    if n_erased > 0 {
        instance.slots.set(id, &caller.identity.tenant.name, Vec::new(), 0);
        instance.queue.evict_prefixes([PrefixEviction { tokens: slot.tokens, salt: slot.salt }]);
    }
    SlotDone { n_erased: Some(n_erased), ..SlotDone::default() }
}

fn foreign() -> ApiError {
    ApiError::new(403, "permission_error", "the file is of another tenant").code("not_allowed")
}

/// Runs `work` between two steps of a worker.
async fn with_engine<T: Send + 'static>(
    instance: &ModelInstance,
    worker: usize,
    work: impl FnOnce(&mut Engine) -> T + Send + 'static,
) -> Result<T, ApiError> {
    let gone = || ApiError::unavailable("the worker has ended; try again later");
    let workers = instance.workers.list();
    let (reply, result) = tokio::sync::oneshot::channel();
    workers.get(worker).ok_or_else(gone)?.status.command(Box::new(move |engine| {
        let _ = reply.send(work(engine));
    }));
    instance.queue.notify();
    tokio::time::timeout(COMMAND_TIMEOUT, result).await.ok().and_then(Result::ok).ok_or_else(gone)
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|_| ApiError::internal("internal error: reading or writing the slot panicked"))?
}

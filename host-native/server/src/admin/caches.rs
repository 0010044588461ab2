//! Caches: statistics, and eviction.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::models::{Done, find};
use crate::guard::administrator::Administrator;
use crate::http::body::Body;
use crate::http::error::{ApiError, ErrorBody, HttpError, INVALID_REQUEST, json, quoted};
use crate::http::params::PathParams;
use crate::models::entry::Entry;
use crate::server::Server;
use crate::state::kv_disk::{Refusal, Stats};

/// Caches of a model.
#[derive(Debug, Serialize, ToSchema)]
pub struct CacheInfo {
    /// Model name.
    model: String,
    /// Size of the KV caches of all workers.
    kv_bytes: usize,
    /// Bytes held by running requests.
    in_use_bytes: usize,
    /// Bytes held by the prefix cache only.
    cached_bytes: usize,
    /// Pages found in the prefix cache.
    page_hits: u64,
    /// Pages looked up in the prefix cache and not found.
    page_misses: u64,
    /// Pages evicted.
    evictions: u64,
    /// Open sessions.
    sessions: usize,
    /// KV pages on disk, and their bytes.
    disk_pages: u64,
    disk_bytes: u64,
}

/// What is kept of results.
#[derive(Debug, Serialize, ToSchema)]
pub struct KeptInfo {
    /// `answers` (--response-cache), `embeddings` (--embedding-cache), or `responses` (--resume-window, Idempotency-Key).
    name: &'static str,
    /// Results that are kept.
    entries: usize,
    /// Their memory.
    bytes: usize,
}

/// Caches of all loaded models, and results that are kept.
#[derive(Debug, Serialize, ToSchema)]
pub struct CacheInfos {
    caches: Vec<CacheInfo>,
    kept: Vec<KeptInfo>,
    /// The KV pages of all models on disk (`--kv-disk`).
    #[serde(skip_serializing_if = "Option::is_none")]
    kv_disk: Option<DiskInfo>,
    /// Answers on disk (`--response-cache-disk`); each is a page.
    #[serde(skip_serializing_if = "Option::is_none")]
    answers_disk: Option<DiskInfo>,
}

/// KV pages or answers on disk.
#[derive(Debug, Serialize, ToSchema)]
pub struct DiskInfo {
    /// Known pages, of models that are not loaded too.
    pages: u64,
    /// Bytes of their files.
    bytes: u64,
    /// Maximum bytes of the files.
    max_bytes: u64,
    /// Bytes of the pages that wait to be written.
    queued_bytes: u64,
    /// Whether the directory was read completely once.
    is_scanned: bool,
    /// Pages read.
    hits: u64,
    /// Pages not read: missing, refused or failed.
    misses: u64,
    /// Pages written.
    written: u64,
    /// Pages not written: too large, queue full or failed.
    dropped: u64,
    /// Pages removed for the size limit or for lack of space.
    evicted: u64,
    /// Failed file system calls.
    io_errors: u64,
    /// Pages refused, by reason.
    refused: BTreeMap<&'static str, u64>,
}

impl DiskInfo {
    /// `by_engine` is the number of pages that the engine refused.
    fn new(stats: Stats, by_engine: u64, max_bytes: u64) -> DiskInfo {
        let Stats {
            pages,
            bytes,
            queued_bytes,
            is_scanned,
            hits,
            misses,
            written,
            dropped,
            evicted,
            io_errors,
            refused,
            durable_failed: _,
        } = stats;
        let refused = Refusal::ALL.map(Refusal::name).into_iter().zip(refused);
        let refused = refused.chain([("engine", by_engine)]).filter(|(_, n)| *n > 0).collect();
        DiskInfo {
            pages,
            bytes,
            max_bytes,
            queued_bytes,
            is_scanned,
            hits,
            misses,
            written,
            dropped,
            evicted,
            io_errors,
            refused,
        }
    }
}

/// Caches of all loaded models
#[utoipa::path(get, path = "/admin/caches", tag = "Administration", responses((status = 200, description = "Caches", body = CacheInfos)))]
pub async fn list(State(server): State<Arc<Server>>) -> Response {
    let instances = server.pool.entries().into_iter().filter_map(|entry| entry.instance());
    let disk = server.pool.resources().disk.as_deref();
    let caches = instances.map(|instance| {
        let snapshot = instance.snapshot();
        let usage = disk.zip(instance.kv_namespace).map(|(disk, namespace)| disk.store.usage(&namespace));
        let (disk_pages, disk_bytes) = usage.unwrap_or_default();
        CacheInfo {
            model: instance.name.to_string(),
            kv_bytes: snapshot.kv.reserved_bytes,
            in_use_bytes: snapshot.kv.in_use_bytes,
            cached_bytes: snapshot.kv.cached_bytes,
            page_hits: snapshot.kv.hits,
            page_misses: snapshot.kv.misses,
            evictions: snapshot.kv.evictions,
            sessions: snapshot.sessions,
            disk_pages,
            disk_bytes,
        }
    });
    let kept = [
        ("answers", server.answers.kept.size()),
        ("embeddings", server.embeddings.kept.size()),
        ("responses", server.kept.size()),
    ];
    let kept = kept.map(|(name, (entries, bytes))| KeptInfo { name, entries, bytes });
    let settings = server.settings();
    let kv_disk = disk.map(|disk| DiskInfo::new(disk.store.stats(), disk.refused(), settings.kv_disk_size.0));
    let answers = server.answers.disk.as_ref();
    let answers_disk = answers.map(|disk| DiskInfo::new(disk.stats(), 0, settings.response_cache_disk_size.0));
    json(StatusCode::OK, &CacheInfos { caches: caches.collect(), kept: kept.into(), kv_disk, answers_disk })
}

/// What to evict.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Invalidate {
    /// Model name; all models without one.
    model: Option<String>,
    /// Tenant; all tenants without one. The prefix cache does not know tenants.
    tenant: Option<String>,
    /// `etag` of an answer.
    key: Option<String>,
}

/// Forget results that are kept: `answers` or `embeddings`; or evict the prefix cache: `prefix`
///
/// # Errors
/// If there is no such cache or model.
#[utoipa::path(post, path = "/admin/caches/{name}/invalidate", tag = "Administration", request_body = Invalidate,
    params(("name" = String, Path, description = "answers, embeddings or prefix")),
    responses(
        (status = 200, description = "Done", body = Done),
        (status = "4XX", description = "There is no such cache or model", body = ErrorBody),
    )
)]
pub async fn invalidate_one(
    State(server): State<Arc<Server>>,
    PathParams(name): PathParams<String>,
    Extension(administrator): Extension<Administrator>,
    Body(body): Body<Invalidate>,
) -> Result<Response, HttpError> {
    if let Some(model) = &body.model {
        find(&server, model)?;
    }
    let (model, tenant) = (body.model.as_deref(), body.tenant.as_deref());
    let forgotten = match &*name {
        "answers" => server.answers.invalidate(model, tenant, body.key.as_deref()),
        "embeddings" => server.embeddings.kept.invalidate(model, tenant, None),
        "prefix" => {
            let entries = match model {
                Some(name) => vec![find_known(&server, name)?],
                None => server.pool.entries(),
            };
            invalidate_prefixes(&server, &entries, model.is_none());
            entries.len()
        }
        _ => {
            let message = format!("found the cache {}, expected answers, embeddings or prefix", quoted(&name));
            return Err(ApiError::new(404, "invalid_request_error", message).code("no_such_cache").into());
        }
    };
    administrator.log("invalidate cache", &format!("{name}: {forgotten} entries"), Ok(()));
    Ok(json(StatusCode::OK, &Done { done: true }))
}

/// Evict the prefix cache, in memory and on disk, and forget results that are kept; running requests keep their pages
///
/// # Errors
/// If there is no such model.
#[utoipa::path(post, path = "/admin/caches/invalidate", tag = "Administration", request_body = Invalidate, responses(
    (status = 200, description = "The workers evict before their next step", body = Done),
))]
pub async fn invalidate(
    State(server): State<Arc<Server>>,
    Extension(administrator): Extension<Administrator>,
    Body(body): Body<Invalidate>,
) -> Result<Response, HttpError> {
    let entries = match &body.model {
        Some(name) => vec![find_known(&server, name)?],
        None => server.pool.entries(),
    };
    invalidate_prefixes(&server, &entries, body.model.is_none());
    server.answers.invalidate(body.model.as_deref(), body.tenant.as_deref(), body.key.as_deref());
    server.embeddings.kept.invalidate(body.model.as_deref(), body.tenant.as_deref(), None);
    administrator.log("invalidate caches", body.model.as_deref().unwrap_or("all models"), Ok(()));
    Ok(json(StatusCode::OK, &Done { done: true }))
}

/// The entry of a model. Its pages on disk are known once it was loaded.
fn find_known(server: &Server, name: &str) -> Result<Arc<Entry>, ApiError> {
    let entry = find(server, name)?;
    if server.pool.resources().disk.is_some() && entry.kv_namespaces().is_empty() {
        let message = format!(
            "{name} was not loaded since the start, so its KV pages on disk are not known; load it, or invalidate all models"
        );
        return Err(ApiError::new(StatusCode::CONFLICT.as_u16(), INVALID_REQUEST, message).code("model_not_loaded"));
    }
    Ok(entry)
}

/// Evicts the prefix caches of models, in memory and on disk.
fn invalidate_prefixes(server: &Server, entries: &[Arc<Entry>], is_all: bool) {
    let disk = server.pool.resources().disk.as_deref();
    for entry in entries {
        if let Some(instance) = entry.instance() {
            instance.workers.invalidate_caches();
        }
        if let Some(disk) = disk {
            entry.kv_namespaces().iter().for_each(|namespace| disk.store.clear_namespace(namespace));
        }
    }
    if let Some(disk) = disk.filter(|_| is_all) {
        // of models that are not loaded too
        disk.store.clear();
    }
}

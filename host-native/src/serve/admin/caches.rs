//! Caches: statistics, and eviction.

use std::sync::Arc;

use axum::Extension;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::response::Response;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::super::api::body::Body;
use super::super::api::error::{ApiError, ErrorBody, HttpError, json, quoted};
use super::super::state::Server;
use super::Administrator;
use super::models::{Done, find};

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
}

/// Caches of all loaded models
#[utoipa::path(get, path = "/admin/caches", tag = "Administration", responses((status = 200, description = "Caches", body = CacheInfos)))]
pub async fn list(State(server): State<Arc<Server>>) -> Response {
    let instances = server.pool.entries().into_iter().filter_map(|entry| entry.instance());
    let caches = instances.map(|instance| {
        let snapshot = instance.snapshot();
        CacheInfo {
            model: instance.name.to_string(),
            kv_bytes: snapshot.kv.reserved_bytes,
            in_use_bytes: snapshot.kv.in_use_bytes,
            cached_bytes: snapshot.kv.cached_bytes,
            page_hits: snapshot.kv.hits,
            page_misses: snapshot.kv.misses,
            evictions: snapshot.kv.evictions,
            sessions: snapshot.sessions,
        }
    });
    let kept = [
        ("answers", server.answers.size()),
        ("embeddings", server.embeddings.size()),
        ("responses", server.kept.size()),
    ];
    let kept = kept.map(|(name, (entries, bytes))| KeptInfo { name, entries, bytes });
    json(StatusCode::OK, &CacheInfos { caches: caches.collect(), kept: kept.into() })
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
    Path(name): Path<String>,
    Extension(administrator): Extension<Administrator>,
    Body(body): Body<Invalidate>,
) -> Result<Response, HttpError> {
    if let Some(model) = &body.model {
        find(&server, model)?;
    }
    let (model, tenant) = (body.model.as_deref(), body.tenant.as_deref());
    let forgotten = match &*name {
        "answers" => server.answers.invalidate(model, tenant, body.key.as_deref()),
        "embeddings" => server.embeddings.invalidate(model, tenant),
        "prefix" => {
            let is_meant = |name: &str| model.is_none_or(|model| model == name);
            let entries = server.pool.entries().into_iter().filter(|entry| is_meant(&entry.name));
            entries.filter_map(|entry| entry.instance()).map(|instance| instance.workers.evict_caches()).count()
        }
        _ => {
            let message = format!("found the cache {}, expected answers, embeddings or prefix", quoted(&name));
            return Err(ApiError::new(404, "invalid_request_error", message).code("no_such_cache").into());
        }
    };
    administrator.log("invalidate cache", &format!("{name}: {forgotten} entries"), Ok(()));
    Ok(json(StatusCode::OK, &Done { done: true }))
}

/// Evict the prefix cache and forget results that are kept; running requests keep their pages
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
        Some(name) => vec![find(&server, name)?],
        None => server.pool.entries(),
    };
    entries.iter().filter_map(|entry| entry.instance()).for_each(|instance| instance.workers.evict_caches());
    server.answers.invalidate(body.model.as_deref(), body.tenant.as_deref(), body.key.as_deref());
    server.embeddings.invalidate(body.model.as_deref(), body.tenant.as_deref());
    administrator.log("invalidate caches", body.model.as_deref().unwrap_or("all models"), Ok(()));
    Ok(json(StatusCode::OK, &Done { done: true }))
}

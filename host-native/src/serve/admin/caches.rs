//! Caches: statistics, and eviction.

use std::sync::Arc;

use axum::Extension;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::super::api::body::Body;
use super::super::api::error::{HttpError, json};
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

/// Caches of all loaded models.
#[derive(Debug, Serialize, ToSchema)]
pub struct CacheInfos {
    caches: Vec<CacheInfo>,
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
    json(StatusCode::OK, &CacheInfos { caches: caches.collect() })
}

/// What to evict.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Invalidate {
    /// Model name; all models without one.
    model: Option<String>,
}

/// Evict the prefix cache; running requests keep their pages
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
    administrator.log("invalidate caches", body.model.as_deref().unwrap_or("all models"), Ok(()));
    Ok(json(StatusCode::OK, &Done { done: true }))
}

//! Drain and undrain of the server, and reload of its settings.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::Extension;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::models::Done;
use super::reload::{Reloaded, reload as reload_settings};
use crate::guard::administrator::Administrator;
use crate::http::body::Body;
use crate::http::error::{ApiError, ErrorBody, HttpError, json};
use crate::models::pressure::MAX_LEVEL;
use crate::server::Server;

/// Refuse new requests; running ones finish. `/readyz` fails.
#[utoipa::path(post, path = "/admin/drain", tag = "Administration", responses((status = 200, description = "Drains", body = Done)))]
pub async fn drain(State(server): State<Arc<Server>>, Extension(administrator): Extension<Administrator>) -> Response {
    server.drained.store(true, Ordering::Release);
    administrator.log("drain server", "", Ok(()));
    json(StatusCode::OK, &Done { done: true })
}

/// Accept requests again
#[utoipa::path(post, path = "/admin/undrain", tag = "Administration", responses((status = 200, description = "Accepts requests", body = Done)))]
pub async fn undrain(
    State(server): State<Arc<Server>>,
    Extension(administrator): Extension<Administrator>,
) -> Response {
    server.drained.store(false, Ordering::Release);
    administrator.log("undrain server", "", Ok(()));
    json(StatusCode::OK, &Done { done: true })
}

/// A level of memory pressure.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Level {
    /// 0 to 3; null: that of the machine.
    level: Option<u8>,
}

/// Set the level of memory pressure, with `--fault-injection`
///
/// # Errors
/// If faults may not be injected, or the level is out of range.
#[utoipa::path(post, path = "/admin/pressure", tag = "Administration", request_body = Level, responses(
    (status = 200, description = "The level is in effect", body = Done),
    (status = "4XX", description = "Not allowed, or out of range", body = ErrorBody),
))]
pub async fn pressure(
    State(server): State<Arc<Server>>,
    Extension(administrator): Extension<Administrator>,
    Body(body): Body<Level>,
) -> Result<Response, HttpError> {
    super::check_fault_injection(&server)?;
    if body.level.is_some_and(|level| level > MAX_LEVEL) {
        return Err(ApiError::param("level", format!("level is out of range, expected 0 to {MAX_LEVEL}")).into());
    }
    server.pool.resources().pressure.force(body.level);
    let pool = Arc::clone(&server.pool);
    tokio::task::spawn_blocking(move || pool.supervise())
        .await
        .map_err(|_| ApiError::internal("supervision panicked"))?;
    administrator.log("set memory pressure", "", Ok(()));
    Ok(json(StatusCode::OK, &Done { done: true }))
}

/// State of the audit log.
#[derive(Debug, Serialize, ToSchema)]
pub struct AuditState {
    /// Number of the last line.
    seq: u64,
    /// Its hash. Kept elsewhere, it shows later whether lines were removed at the end.
    hash: String,
    /// Events that were lost because the disk was too slow or full.
    lost: u64,
    /// Failures to write.
    failures: u64,
    /// The last failure.
    last_failure: Option<String>,
}

/// Last line of the audit log
///
/// # Errors
/// If the server has no audit log, or it cannot be written.
#[utoipa::path(get, path = "/admin/audit", tag = "Administration", responses(
    (status = 200, description = "The last line, on disk", body = AuditState),
    (status = "4XX", description = "There is no audit log", body = ErrorBody),
    (status = "5XX", description = "The log cannot be written", body = ErrorBody),
))]
pub async fn audit(State(server): State<Arc<Server>>) -> Result<Response, HttpError> {
    let missing = || ApiError::new(404, "invalid_request_error", "the server has no audit log (--audit-log)");
    let log = server.audit.clone().ok_or_else(|| missing().code("no_audit_log"))?;
    let flushed = {
        let log = Arc::clone(&log);
        tokio::task::spawn_blocking(move || log.flush()).await
    };
    if let Ok(Err(e)) = &flushed {
        return Err(ApiError::unavailable(format!("audit log: {e}")).code("audit_log_failed").into());
    }
    let head = log.head();
    let state = AuditState {
        seq: head.seq,
        hash: head.hash.to_string(),
        lost: log.lost(),
        failures: log.failures(),
        last_failure: log.last_failure(),
    };
    Ok(json(StatusCode::OK, &state))
}

/// Read settings file and keys again, as on SIGHUP
///
/// # Errors
/// If a file is invalid: nothing has changed.
#[utoipa::path(post, path = "/admin/reload", tag = "Administration", responses(
    (status = 200, description = "What has changed", body = Reloaded),
    (status = "4XX", description = "A file is invalid; nothing has changed", body = ErrorBody),
))]
pub async fn reload(
    State(server): State<Arc<Server>>,
    Extension(administrator): Extension<Administrator>,
) -> Result<Response, HttpError> {
    let result = reload_settings(&server).await;
    let error = result.as_ref().err().map(ToString::to_string);
    administrator.log("reload settings", "", error.as_deref().map_or(Ok(()), Err));
    let reloaded = result.map_err(|e| ApiError::invalid(e.to_string()).code("invalid_settings"))?;
    Ok(json(StatusCode::OK, &reloaded))
}

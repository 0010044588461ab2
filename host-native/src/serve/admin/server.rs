//! Drain and undrain of the server, and reload of its settings.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use axum::Extension;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;

use super::super::api::error::{ApiError, ErrorBody, HttpError, json};
use super::super::state::Server;
use super::Administrator;
use super::models::Done;
use super::reload::{Reloaded, reload as reload_settings};

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

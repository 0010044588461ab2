//! `/admin/*`: models, workers, settings, caches and failures, for administrators.
//!
//! The interface exists only with `--admin-key-file`; its keys are those of administrators and no API keys. With
//! `--admin-listen` it is not on the public listener.

pub mod caches;
pub mod failures;
pub mod models;
mod reload;
pub mod server;
pub mod settings;
pub mod workers;

use std::sync::Arc;

use axum::Router;
use axum::routing::{delete, get, post};
use starling_api::error::ApiError;
use starling_api::parse::{ParseBody, parse};

use crate::server::Server;
pub use reload::reload;

/// The routes of the interface.
pub fn routes() -> Router<Arc<Server>> {
    Router::new()
        .route("/admin/models", get(models::list).post(models::add))
        .route("/admin/models/{name}", get(models::show).delete(models::remove))
        .route("/admin/models/{name}/load", post(models::load))
        .route("/admin/models/{name}/unload", post(models::unload))
        .route("/admin/models/{name}/swap", post(models::swap))
        .route("/admin/workers", get(workers::all))
        .route("/admin/models/{name}/workers", get(workers::list).post(workers::add))
        .route("/admin/models/{name}/workers/{id}", delete(workers::drain))
        .route("/admin/models/{name}/workers/{id}/fail", post(workers::fail))
        .route("/admin/drain", post(server::drain))
        .route("/admin/undrain", post(server::undrain))
        .route("/admin/pressure", post(server::pressure))
        .route("/admin/reload", post(server::reload))
        .route("/admin/config", get(settings::show).patch(settings::patch))
        .route("/admin/caches", get(caches::list))
        .route("/admin/caches/invalidate", post(caches::invalidate))
        .route("/admin/caches/{name}/invalidate", post(caches::invalidate_one))
        .route("/admin/failures", get(failures::list))
        .route("/admin/audit", get(server::audit))
}

macro_rules! bodies {
    ($($kind:ty),*) => {$(
        impl ParseBody for $kind {
            fn parse_body(json: &[u8]) -> Result<Self, ApiError> {
                parse(if json.is_empty() { b"{}" } else { json })
            }
        }
    )*};
}

bodies!(
    models::AddModel,
    models::Swap,
    models::Unload,
    workers::Fail,
    caches::Invalidate,
    server::Level,
    settings::Changes
);

/// Whether tests may make the server fail.
///
/// # Errors
/// 403.
fn check_fault_injection(server: &Server) -> Result<(), ApiError> {
    if server.settings().fault_injection {
        return Ok(());
    }
    let message = "faults may not be injected; start the server with --fault-injection";
    Err(ApiError::new(403, "permission_error", message).code("not_allowed"))
}

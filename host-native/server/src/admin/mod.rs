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

use crate::guard::audit::{AuditTrail, Event, Text};
use crate::guard::auth::ANYONE;
use crate::server::{Caller, Server};
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

/// Name of the administrator that sent a request; the middleware adds it to the request's extensions.
#[derive(Clone)]
pub struct Administrator {
    pub name: Arc<str>,
    audit: Option<Arc<AuditTrail>>,
}

impl Administrator {
    pub fn new(name: Arc<str>, server: &Server) -> Administrator {
        Administrator { name, audit: server.audit.clone() }
    }

    /// Whoever changes models by the paths of Ollama and llama-server: the administrator of the key, or a client on this machine.
    pub fn of_caller(caller: &Caller, server: &Server) -> Administrator {
        let name = &caller.tenant.name;
        Administrator::new(if **name == *ANYONE { "(local)".into() } else { Arc::clone(name) }, server)
    }

    /// A signal, or a change of the settings file.
    pub fn system(server: &Server) -> Administrator {
        Administrator::new("(system)".into(), server)
    }

    /// Records an action in the audit log.
    pub fn record(&self, action: &str, target: &str, error: Option<&str>) {
        let Some(log) = &self.audit else { return };
        let (administrator, error) = (Text::from(&*self.name), error.map(Text::from));
        log.record(Event::Admin { administrator, action: action.into(), target: target.into(), error });
    }

    /// Logs an action. `target` names what it was done to.
    pub fn log(&self, action: &str, target: &str, result: Result<(), &str>) {
        self.record(action, target, result.err());
        // `target` is the module in each line of the log
        match result {
            Ok(()) => tracing::info!(administrator = &*self.name, action, object = target, "administration"),
            Err(error) => {
                tracing::warn!(administrator = &*self.name, action, object = target, error, "administration failed");
            }
        }
    }
}

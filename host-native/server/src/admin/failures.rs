//! The record of requests that were ended because workers failed on them.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use serde::Serialize;
use utoipa::ToSchema;

use crate::http::error::json;
use crate::observe::failures::Failure;
use crate::server::Server;

/// The latest failures.
#[derive(Debug, Serialize, ToSchema)]
pub struct FailureList {
    /// The oldest first, at most 256.
    failures: Vec<Failure>,
}

/// Requests that ended because two workers failed on them
#[utoipa::path(get, path = "/admin/failures", tag = "Administration", responses(
    (status = 200, description = "Failures", body = FailureList),
))]
pub async fn list(State(server): State<Arc<Server>>) -> Response {
    json(StatusCode::OK, &FailureList { failures: server.failures.list() })
}

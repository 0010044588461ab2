//! The caller of a request as an argument of handlers.

use std::sync::Arc;

use axum::extract::FromRequestParts;
use axum::http::request::Parts;

use super::error::{ApiError, HttpError};
use crate::server::{Caller, Server};

impl FromRequestParts<Arc<Server>> for Caller {
    type Rejection = HttpError;

    async fn from_request_parts(parts: &mut Parts, _: &Arc<Server>) -> Result<Self, HttpError> {
        let caller = parts.extensions.get::<Caller>().cloned();
        caller.ok_or_else(|| ApiError::internal("internal error: the middleware set no caller").into())
    }
}

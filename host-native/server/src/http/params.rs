//! Parameters in the path and the query of a request, with errors in JSON.

use axum::extract::{FromRequestParts, Path, Query};
use axum::http::request::Parts;
use serde::de::DeserializeOwned;

use super::error::{ApiError, HttpError};

/// Parameters of the query.
#[derive(Debug)]
pub struct QueryParams<T>(pub T);

/// Parameters in the path.
#[derive(Debug)]
pub struct PathParams<T>(pub T);

impl<T: DeserializeOwned, S: Send + Sync> FromRequestParts<S> for QueryParams<T> {
    type Rejection = HttpError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, HttpError> {
        let query = Query::from_request_parts(parts, state).await;
        query.map(|Query(value)| QueryParams(value)).map_err(|e| ApiError::invalid(e.body_text()).into())
    }
}

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for PathParams<T> {
    type Rejection = HttpError;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, HttpError> {
        let path = Path::from_request_parts(parts, state).await;
        path.map(|Path(value)| PathParams(value)).map_err(|e| ApiError::invalid(e.body_text()).into())
    }
}

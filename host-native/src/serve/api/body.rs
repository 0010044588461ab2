//! Bodies of requests: JSON, bounded in size, depth and time.

use std::sync::Arc;

use axum::body::to_bytes;
use axum::extract::{FromRequest, Request};
use axum::http::{StatusCode, header};
use serde::de::DeserializeOwned;
use tokio::time::timeout;

use super::super::offload::offload;
use super::super::state::App;
use super::error::{ApiError, MAX_QUOTE, quoted, shortened};

/// A body that can be read from JSON. The same bytes may be read as several parts of one type: an error in any names
/// its field.
pub trait Read: Sized {
    /// Reads it.
    ///
    /// # Errors
    /// What is wrong, and where.
    fn read(json: &[u8]) -> Result<Self, ApiError>;
}

/// The body of a request.
#[derive(Debug)]
pub struct Body<T>(pub T);

impl<T: Read + Send + 'static> FromRequest<Arc<App>> for Body<T> {
    type Rejection = ApiError;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self, ApiError> {
        let kind = request.headers().get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
        // a page in a browser may send text anywhere without asking, JSON only where it is allowed to
        let kind = kind.split(';').next().unwrap_or_default().trim();
        if !kind.eq_ignore_ascii_case("application/json") {
            let message = format!("found content type {:?}, expected application/json", quoted(kind));
            return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "invalid_request_error", message));
        }
        let limit = usize::try_from(app.settings.max_body.0).unwrap_or(usize::MAX);
        let body = timeout(app.settings.body_timeout, to_bytes(request.into_body(), limit)).await;
        let bytes = match body {
            Ok(Ok(bytes)) => bytes,
            Ok(Err(e)) => return Err(unread(&*e.into_inner(), limit)),
            Err(_) => {
                let message = "the body of the request took too long";
                return Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, "invalid_request_error", message));
            }
        };
        offload(bytes.len(), move || T::read(&bytes)).await?.map(Body)
    }
}

fn unread(error: &(dyn std::error::Error + 'static), limit: usize) -> ApiError {
    if error.is::<http_body_util::LengthLimitError>() {
        let message = format!("the body of the request is larger than {limit} bytes");
        return ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "invalid_request_error", message);
    }
    ApiError::invalid("the body of the request did not arrive")
}

/// Reads JSON; an error names the field.
///
/// # Errors
/// What is wrong, and where.
pub fn parse<T: DeserializeOwned>(json: &[u8]) -> Result<T, ApiError> {
    let mut deserializer = serde_json::Deserializer::from_slice(json);
    let value = serde_path_to_error::deserialize(&mut deserializer).map_err(|e| {
        let path = e.path().to_string();
        let inner = e.into_inner();
        let text = inner.to_string();
        if !inner.is_data() {
            return ApiError::invalid(format!("the body is not JSON: {text}"));
        }
        let what = text.rsplit_once(" at line ").map_or(text.as_str(), |(what, _)| what);
        // it has what was found, and then what was expected
        let what = shortened(what.into(), 2 * MAX_QUOTE);
        if path == "." { ApiError::invalid(what) } else { ApiError::param(&path, format!("{}: {what}", quoted(&path))) }
    })?;
    deserializer.end().map_err(|e| ApiError::invalid(format!("the body is not JSON: {e}")))?;
    Ok(value)
}

/// Bodies that are one part.
#[macro_export]
macro_rules! read_whole {
    ($($kind:ty),*) => {$(
        impl $crate::serve::api::body::Read for $kind {
            fn read(json: &[u8]) -> Result<Self, $crate::serve::api::error::ApiError> {
                $crate::serve::api::body::parse(json)
            }
        }
    )*};
}

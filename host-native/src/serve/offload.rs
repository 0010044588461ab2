//! Work that may run long, kept off the threads that serve connections.

use super::api::error::ApiError;

/// Work on fewer bytes than this, or on fewer values, runs where it is asked for.
const LARGE: usize = 4 << 10;

/// Does work on `size` bytes or values: here if they are few, else on one of the threads for blocking work, of which
/// there are as many as can run at a time.
///
/// # Errors
/// If the work panics.
pub async fn offload<T: Send + 'static>(size: usize, work: impl FnOnce() -> T + Send + 'static) -> Result<T, ApiError> {
    if size < LARGE {
        return Ok(work());
    }
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|_| ApiError::internal("internal error: preparing the request or response panicked"))
}

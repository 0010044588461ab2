//! Moves long work from the HTTP threads to blocking threads.

use starling_api::error::ApiError;

/// Minimum size, in bytes or values, of work that is moved.
const LARGE: usize = 4 << 10;

/// Runs `work` on `size` bytes or values: on the calling thread if `size` is below [`LARGE`], else on a blocking thread.
/// Their number is bounded by the number of CPUs; further work waits.
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

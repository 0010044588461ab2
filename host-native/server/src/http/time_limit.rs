//! Time limits that requests set for themselves: the field `timeout` and a header, in seconds. The server's limits stay.

use std::future::Future;
use std::sync::PoisonError;
use std::time::Duration;

use axum::http::HeaderMap;
use starling_api::update::Failed;

use crate::config::Settings;
use crate::http::error::ApiError;
use crate::schedule::queue::Deadlines;
use crate::server::Caller;

/// Header with the time limit of a request.
pub const HEADER: &str = "x-request-timeout";

impl Caller {
    /// Notes the time limit of the header, if there is one.
    ///
    /// # Errors
    /// A value that is no time.
    pub fn limit_time_by_header(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        let Some(value) = headers.get(HEADER) else { return Ok(()) };
        let seconds = value.to_str().ok().and_then(|text| text.trim().parse().ok());
        self.note_limit(HEADER, seconds.unwrap_or(f64::NAN))
    }

    /// Notes the time limit of the field `timeout`, if there is one. Of several limits the smallest counts.
    ///
    /// # Errors
    /// A value that is no time.
    pub fn limit_time(&self, timeout: Option<f64>) -> Result<(), ApiError> {
        timeout.map_or(Ok(()), |seconds| self.note_limit("timeout", seconds))
    }

    fn note_limit(&self, name: &str, seconds: f64) -> Result<(), ApiError> {
        let wrong = || ApiError::param(name, format!("{name}: expected a number of seconds above 0"));
        if seconds.is_nan() || seconds <= 0.0 {
            return Err(wrong());
        }
        // a time that is too long for the type is no limit
        let new = Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX);
        let mut limit = self.time_limit.lock().unwrap_or_else(PoisonError::into_inner);
        *limit = Some(limit.map_or(new, |known| known.min(new)));
        Ok(())
    }

    /// Arrival and limits of the request. An answer ends with what it has at the time limit if `partial`.
    pub fn deadlines(&self, settings: &Settings, partial: bool) -> Deadlines {
        let own = *self.time_limit.lock().unwrap_or_else(PoisonError::into_inner);
        let own = own.filter(|own| *own < settings.request_timeout);
        let total = own.unwrap_or(settings.request_timeout);
        Deadlines { arrival: self.arrival, queue: settings.queue_timeout, total, partial, is_own: own.is_some() }
    }

    /// Waits for `work` within the time limit of the request itself.
    ///
    /// # Errors
    /// If it is over.
    pub async fn within_time<T>(&self, work: impl Future<Output = T>) -> Result<T, ApiError> {
        let limit = *self.time_limit.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(limit) = limit else { return Ok(work.await) };
        let left = limit.saturating_sub(self.arrival.elapsed());
        let over = |_| ApiError::from(Failed::Timeout(limit.as_secs_f64()));
        tokio::time::timeout(left, work).await.map_err(over)
    }
}

//! Why a model is not available.

use std::sync::Arc;
use std::time::Duration;

use starling_api::error::ApiError;
use starling_host::error::Failure;

use super::self_test::SelfTestError;
use crate::config::value::seconds;

/// Why a model was not loaded, unloaded or replaced.
#[derive(Debug, Clone, thiserror::Error)]
pub enum PoolError {
    #[error("the model `{found}` does not exist{}", near.as_ref().map_or_else(String::new, |near| format!("; did you mean `{near}`?")))]
    Unknown { found: String, near: Option<String> },
    #[error("model `{0}` is not loaded, and requests do not load models (--autoload=false)")]
    NotLoaded(Arc<str>),
    #[error(
        "model `{name}` had repeated faults and takes no requests for now (--breaker-faults); try again in {} s",
        seconds(*wait)
    )]
    Broken { name: Arc<str>, wait: Duration },
    #[error("model `{name}` is {state}; try again later")]
    Busy { name: Arc<str>, state: &'static str },
    #[error(
        "{waiting} requests wait for model `{name}` to load, expected fewer than {limit} (--load-queue); try again later"
    )]
    QueueFull { name: Arc<str>, waiting: usize, limit: usize },
    #[error("model `{name}` needs {needed} MiB, but {free} MiB of {limit} MiB (--memory) are free: {in_use}")]
    Memory { name: Arc<str>, needed: u64, free: u64, limit: u64, in_use: String },
    #[error("model `{name}` does not load: {cause}")]
    Load { name: Arc<str>, cause: Arc<Failure> },
    #[error("model `{name}` failed its self-test: {why}")]
    SelfTest { name: Arc<str>, why: SelfTestError },
}

impl From<PoolError> for ApiError {
    fn from(error: PoolError) -> ApiError {
        let message = error.for_clients();
        let code = error.code();
        match error {
            PoolError::Unknown { .. } => {
                let error = ApiError::new(404, starling_api::error::INVALID_REQUEST, message).code(code);
                ApiError { param: Some("model".into()), ..error }
            }
            PoolError::NotLoaded(_) => ApiError::new(409, starling_api::error::INVALID_REQUEST, message).code(code),
            PoolError::Broken { wait, .. } => {
                ApiError { retry: Some(wait), ..ApiError::unavailable(message).code(code) }
            }
            PoolError::Busy { .. } | PoolError::QueueFull { .. } => {
                ApiError { retry: Some(Duration::from_secs(2)), ..ApiError::unavailable(message).code(code) }
            }
            PoolError::Memory { .. } => {
                ApiError { retry: Some(Duration::from_secs(10)), ..ApiError::unavailable(message).code(code) }
            }
            PoolError::Load { cause, .. } if matches!(*cause, Failure::Memory(_)) => ApiError {
                retry: Some(Duration::from_secs(10)),
                ..ApiError::unavailable(message).code("not_enough_memory")
            },
            PoolError::Load { .. } | PoolError::SelfTest { .. } => ApiError::internal(message).code(code),
        }
    }
}

impl PoolError {
    /// The message for clients, without paths of the server.
    pub fn for_clients(&self) -> String {
        match self {
            PoolError::Load { name, cause } => format!("model `{name}` does not load: {}", cause.for_clients()),
            other => other.to_string(),
        }
    }

    /// The error for administrators, who know the paths.
    pub fn for_administrators(self) -> ApiError {
        let message = self.to_string();
        ApiError { message, ..self.into() }
    }

    /// Whether a load failed by the model itself: not by its path, the memory of the server, or a setting.
    pub fn is_models_fault(&self) -> bool {
        match self {
            PoolError::Load { cause, .. } => matches!(
                **cause,
                Failure::Model { .. } | Failure::Incomplete { .. } | Failure::DraftModel { .. } | Failure::Weights(_)
            ),
            PoolError::SelfTest { .. } => true,
            _ => false,
        }
    }

    /// The load of a model panicked.
    pub fn load_panicked(name: &Arc<str>) -> PoolError {
        let cause = Failure::Weights("the load panicked; see the log".into());
        PoolError::Load { name: Arc::clone(name), cause: Arc::new(cause) }
    }

    /// The code of the error in the API, and the label `reason` in metrics.
    pub const fn code(&self) -> &'static str {
        match self {
            PoolError::Unknown { .. } => "model_not_found",
            PoolError::NotLoaded(_) => "model_not_loaded",
            PoolError::Broken { .. } => "model_unavailable",
            PoolError::Busy { .. } => "model_loading",
            PoolError::QueueFull { .. } => "load_queue_full",
            PoolError::Memory { .. } => "not_enough_memory",
            PoolError::Load { .. } => "model_load_failed",
            PoolError::SelfTest { .. } => "self_test_failed",
        }
    }
}

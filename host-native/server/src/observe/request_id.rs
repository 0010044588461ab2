//! The ID of the request that a task answers.

use std::sync::Arc;

tokio::task_local! {
    /// ID of the request that this task answers.
    pub static REQUEST_ID: Arc<str>;
}

/// ID of the request that this task answers, for error bodies.
pub fn request_id() -> Option<String> {
    REQUEST_ID.try_with(ToString::to_string).ok()
}

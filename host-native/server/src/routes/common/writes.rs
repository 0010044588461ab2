//! Writes into the state store that a response waits for.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};

use tokio::sync::oneshot;

use crate::http::error::ApiError;
use crate::state::store::StateError;

type Outcome = Result<(), StateError>;

/// Writes of a request that must be durable before the end of its response. They go on if the client leaves.
#[derive(Clone, Default)]
pub struct Writes(Arc<Mutex<Vec<oneshot::Receiver<Outcome>>>>);

impl Writes {
    /// Runs a write.
    pub fn add(&self, write: impl Future<Output = Outcome> + Send + 'static) {
        let (done, outcome) = oneshot::channel();
        tokio::spawn(async move {
            // nobody may wait any more
            let _ = done.send(write.await);
        });
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(outcome);
    }

    /// Takes the writes so far; `None` without any.
    pub fn take(&self) -> Option<PendingWrites> {
        let writes = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        (!writes.is_empty()).then_some(PendingWrites(writes))
    }

    /// Waits until the writes so far are durable.
    ///
    /// # Errors
    /// 503 if one has failed.
    pub async fn durable(&self) -> Result<(), ApiError> {
        match self.take() {
            Some(writes) => writes.await,
            None => Ok(()),
        }
    }
}

/// Ends when all writes are durable, or one has failed.
pub struct PendingWrites(Vec<oneshot::Receiver<Outcome>>);

impl Future for PendingWrites {
    type Output = Result<(), ApiError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        while let Some(last) = self.0.last_mut() {
            let outcome = ready!(Pin::new(last).poll(context)).unwrap_or(Err(StateError::Ended));
            self.0.pop();
            if let Err(e) = outcome {
                return Poll::Ready(Err(state_error(&e)));
            }
        }
        Poll::Ready(Ok(()))
    }
}

/// 503: the state store does not work.
pub fn state_error(error: &StateError) -> ApiError {
    ApiError::unavailable(error.to_string()).code("state_unavailable")
}

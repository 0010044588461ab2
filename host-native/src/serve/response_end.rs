//! Does something when a response has ended.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use axum::body::{Body, Bytes};
use axum::response::Response;
use hyper::body::{Body as _, Frame, SizeHint};

/// Calls `end` when the last byte of the response has been taken, with true, or the client has gone, with false.
pub fn on_end(response: Response, end: impl FnOnce(bool) + Send + Unpin + 'static) -> Response {
    response.map(|inner| {
        let is_complete = inner.is_end_stream();
        Body::new(EndingBody { inner, is_complete, end: Some(end) })
    })
}

struct EndingBody<F: FnOnce(bool)> {
    inner: Body,
    is_complete: bool,
    /// `None` once it was called.
    end: Option<F>,
}

impl<F: FnOnce(bool)> Drop for EndingBody<F> {
    fn drop(&mut self) {
        if let Some(end) = self.end.take() {
            end(self.is_complete);
        }
    }
}

impl<F: FnOnce(bool) + Unpin> hyper::body::Body for EndingBody<F> {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = ready!(Pin::new(&mut self.inner).poll_frame(context));
        self.is_complete |= frame.is_none() || self.inner.is_end_stream();
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

//! Does something when a response has ended.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use axum::body::{Body, Bytes};
use axum::response::Response;
use hyper::body::{Body as _, Frame, SizeHint};

/// How a response ended.
#[derive(Debug, Clone, Copy)]
pub struct End {
    /// Whether the last byte was taken; otherwise the client has gone.
    pub is_complete: bool,
    /// Bytes of the body that were taken.
    pub n_bytes: usize,
}

/// Calls `end` when the last byte of the response has been taken, or the client has gone.
pub fn on_end(response: Response, end: impl FnOnce(End) + Send + Unpin + 'static) -> Response {
    response.map(|inner| {
        let so_far = End { is_complete: inner.is_end_stream(), n_bytes: 0 };
        Body::new(EndingBody { inner, so_far, end: Some(end) })
    })
}

struct EndingBody<F: FnOnce(End)> {
    inner: Body,
    so_far: End,
    /// `None` once it was called.
    end: Option<F>,
}

impl<F: FnOnce(End)> Drop for EndingBody<F> {
    fn drop(&mut self) {
        if let Some(end) = self.end.take() {
            end(self.so_far);
        }
    }
}

impl<F: FnOnce(End) + Unpin> hyper::body::Body for EndingBody<F> {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = ready!(Pin::new(&mut self.inner).poll_frame(context));
        if let Some(Ok(frame)) = &frame {
            self.so_far.n_bytes += frame.data_ref().map_or(0, Bytes::len);
        }
        self.so_far.is_complete |= frame.is_none() || self.inner.is_end_stream();
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

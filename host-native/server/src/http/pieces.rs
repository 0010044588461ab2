//! Responses of unbounded size: written piece by piece as the client reads them.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::body::{Body, Bytes};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use hyper::body::Frame;

use crate::guard::connection_memory::HeldMemory;

/// A response up to this size is written whole.
const WHOLE: usize = 64 << 10;

struct PieceBody<I> {
    first: Option<Bytes>,
    rest: I,
    /// What the pieces are written from counts as held until the last was taken.
    _memory: Arc<HeldMemory>,
}

impl<I: Iterator<Item = Vec<u8>> + Unpin> hyper::body::Body for PieceBody<I> {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let next = self.first.take().or_else(|| self.rest.next().map(Bytes::from));
        Poll::Ready(next.map(|piece| Ok(Frame::data(piece))))
    }
}

/// A response of JSON in pieces, of which only one is in memory at a time.
pub fn json_pieces<I>(memory: &Arc<HeldMemory>, mut pieces: I) -> Response
where
    I: Iterator<Item = Vec<u8>> + Send + Unpin + 'static,
{
    let kind = [(header::CONTENT_TYPE, "application/json")];
    let mut first = Vec::new();
    while first.len() <= WHOLE {
        match pieces.next() {
            Some(piece) if first.is_empty() => first = piece,
            Some(piece) => first.extend_from_slice(&piece),
            None => return (kind, first).into_response(),
        }
    }
    let body = PieceBody { first: Some(first.into()), rest: pieces, _memory: Arc::clone(memory) };
    (kind, Body::new(body)).into_response()
}

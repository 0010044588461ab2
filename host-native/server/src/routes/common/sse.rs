//! Streams as server-sent events or lines of JSON.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use http_body_util::BodyExt;
use hyper::body::Frame;
use starling_api::stream::{EventBuffer, Framing, StreamWriter};
use tokio::time::{Instant, Sleep, sleep};

use super::submit::Updates;
use super::writes::{PendingWrites, Writes};
use crate::http::error::{ApiError, REQUEST_ID, request_id};

struct Stream<W> {
    updates: Updates,
    writer: W,
    framing: Framing,
    over: bool,
    /// Idle time after which a comment is sent; zero for never.
    keep_alive: Duration,
    silence: Pin<Box<Sleep>>,
    /// ID of the request, for errors.
    id: Arc<str>,
    /// Index of the next event.
    next_index: usize,
    /// Writes that must be durable before the last events.
    writes: Writes,
    /// The last events, while they wait for that.
    held: Option<(PendingWrites, EventBuffer)>,
}

/// A streaming response. Its head is sent at once. A comment is sent whenever nothing else was sent for `keep_alive`, also
/// while the request is queued, so that proxies with an idle limit keep the connection. Errors from here on are events.
pub fn stream<W: StreamWriter + Send + Unpin + 'static>(updates: Updates, writer: W, keep_alive: Duration) -> Response {
    stream_with_writes(updates, writer, keep_alive, Writes::default())
}

/// As [`stream`]; the events of the last update are sent once the `writes` that the writer has added are durable.
pub fn stream_with_writes<W: StreamWriter + Send + Unpin + 'static>(
    updates: Updates,
    writer: W,
    keep_alive: Duration,
    writes: Writes,
) -> Response {
    response(updates, writer, Framing::ServerSentEvents, (keep_alive, writes))
}

/// A streaming response of JSON lines, as [`stream`] but without comments.
pub fn json_lines<W: StreamWriter + Send + Unpin + 'static>(updates: Updates, writer: W) -> Response {
    response(updates, writer, Framing::JsonLines, (Duration::ZERO, Writes::default()))
}

fn response<W: StreamWriter + Send + Unpin + 'static>(
    updates: Updates,
    writer: W,
    framing: Framing,
    (keep_alive, writes): (Duration, Writes),
) -> Response {
    let id = REQUEST_ID.try_with(Arc::clone).unwrap_or_else(|_| "".into());
    let (silence, over, next_index, held) = (Box::pin(sleep(keep_alive)), false, 0, None);
    let stream = Stream { updates, writer, framing, over, keep_alive, silence, id, next_index, writes, held };
    let kind = match framing {
        Framing::ServerSentEvents => "text/event-stream; charset=utf-8",
        Framing::JsonLines => "application/x-ndjson",
    };
    let headers = [(header::CONTENT_TYPE, kind), (header::CACHE_CONTROL, "no-cache")];
    // proxies that buffer would hold the pieces back
    let accel = [("x-accel-buffering", "no")];
    (headers, accel, Body::new(stream.map_err(|never| match never {}))).into_response()
}

/// 500: the engine thread has panicked.
pub fn engine_failed() -> ApiError {
    ApiError::internal("the engine has failed; the server must be restarted").code("engine_failed")
}

/// A frame is sent once it has this many bytes.
const MAX_FRAME: usize = 16 << 10;

impl<W: StreamWriter + Send + Unpin + 'static> hyper::body::Body for Stream<W> {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let id = Arc::clone(&self.id);
        REQUEST_ID.sync_scope(id, || self.next(context)).map(|bytes| Some(Ok(Frame::data(bytes?))))
    }
}

impl<W: StreamWriter + Send + Unpin + 'static> Stream<W> {
    /// A buffer for the next events.
    fn events(&self, next_index: usize) -> EventBuffer {
        match self.framing {
            Framing::ServerSentEvents => EventBuffer::with_ids(self.updates.stream_id(), next_index),
            Framing::JsonLines => EventBuffer::json_lines(),
        }
    }

    fn fail(&mut self, error: &ApiError, events: &mut EventBuffer) {
        self.writer.fail(&error.body(request_id()), events);
        self.over = true;
    }

    /// The next bytes; `None` is the end.
    fn next(&mut self, context: &mut Context<'_>) -> Poll<Option<Bytes>> {
        let this = self;
        if let Some((writes, _)) = &mut this.held {
            let outcome = ready!(Pin::new(writes).poll(context));
            let Some((_, mut events)) = this.held.take() else { return Poll::Ready(None) };
            if let Err(error) = outcome {
                events = this.events(this.next_index);
                this.fail(&error, &mut events);
            }
            return Poll::Ready(Some(events.into_bytes().into()));
        }
        if this.over {
            return Poll::Ready(None);
        }
        let mut events = this.events(this.next_index);
        // everything there is goes out at once
        while !this.over && events.n_bytes() < MAX_FRAME {
            match this.updates.poll_recv(context) {
                Poll::Ready(Some((index, update))) => match update.error() {
                    Some(error) => this.fail(&error, &mut events),
                    None => {
                        let mut last = this.events(events.next_index());
                        this.over = this.writer.update(index, update, &mut last);
                        match if this.over { this.writes.take() } else { None } {
                            Some(writes) => this.held = Some((writes, last)),
                            None => events.append(last),
                        }
                    }
                },
                Poll::Ready(None) => this.fail(&engine_failed(), &mut events),
                Poll::Pending if events.n_bytes() > 0 => break,
                Poll::Pending if this.keep_alive.is_zero() => return Poll::Pending,
                Poll::Pending => {
                    ready!(this.silence.as_mut().poll(context));
                    if !this.writer.keep_alive(&mut events) {
                        events.comment("keep-alive");
                    }
                }
            }
        }
        if events.n_bytes() == 0 {
            return if this.held.is_some() { this.next(context) } else { Poll::Ready(None) };
        }
        this.next_index = events.next_index();
        this.silence.as_mut().reset(Instant::now() + this.keep_alive);
        Poll::Ready(Some(events.into_bytes().into()))
    }
}

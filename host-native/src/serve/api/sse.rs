//! Answers in pieces: server-sent events, as OpenAI's clients read them.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::header;
use axum::response::{IntoResponse, Response};
use http_body_util::BodyExt;
use hyper::body::Frame;
use serde::Serialize;
use tokio::time::{Instant, Sleep, sleep};
use utoipa::ToSchema;

use super::super::queue::Update;
use super::answer::fault;
use super::error::{ApiError, REQUEST_ID, request_id};
use super::submit::Updates;

/// An event, as the standard has it.
#[derive(Debug, Serialize, ToSchema)]
pub struct ServerSentEvent {
    /// Its name, on paths that are not OpenAI's.
    pub event: Option<String>,
    /// JSON: a piece of the answer, or an error; on OpenAI's paths at the end `[DONE]`.
    pub data: String,
}

/// Events on their way out.
#[derive(Debug, Default)]
pub struct Events {
    bytes: Vec<u8>,
}

impl Events {
    /// An event of JSON, which has no line ends.
    pub fn json<T: Serialize>(&mut self, data: &T) {
        self.bytes.extend_from_slice(b"data: ");
        // data of our own types, written to memory
        if serde_json::to_writer(&mut self.bytes, data).is_err() {
            self.bytes.extend_from_slice(b"null");
        }
        self.bytes.extend_from_slice(b"\n\n");
    }

    /// An event with a name.
    pub fn named<T: Serialize>(&mut self, name: &str, data: &T) {
        self.bytes.extend_from_slice(b"event: ");
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(b'\n');
        self.json(data);
    }

    /// A line that clients leave out.
    fn comment(&mut self, text: &str) {
        self.bytes.extend_from_slice(format!(": {text}\n\n").as_bytes());
    }

    /// The event that ends a stream of OpenAI's.
    pub fn done(&mut self) {
        self.bytes.extend_from_slice(b"data: [DONE]\n\n");
    }
}

/// Turns updates into events.
pub trait Writer: Send + Unpin + 'static {
    /// An update of an answer, none that [`fault`] finds. Says whether the stream is over.
    fn update(&mut self, index: usize, update: Update, events: &mut Events) -> bool;

    /// There will be no more, because of this.
    fn failed(&mut self, error: &ApiError, events: &mut Events) {
        events.json(&error.body(request_id()));
        events.done();
    }
}

struct Stream<W> {
    updates: Updates,
    writer: W,
    over: bool,
    /// Time after which a comment is sent where there is nothing else; none if it is zero.
    keep_alive: Duration,
    silence: Pin<Box<Sleep>>,
    /// The request's name, for errors.
    id: Arc<str>,
}

/// A response whose head is sent at once: while the request waits in the queue, and whenever nothing else is sent for
/// `keep_alive`, the client gets comments, so that proxies with a limit on idle connections keep it. Errors from here on
/// are events.
pub fn stream<W: Writer>(updates: Updates, writer: W, keep_alive: Duration) -> Response {
    let id = REQUEST_ID.try_with(Arc::clone).unwrap_or_else(|_| "".into());
    let stream = Stream { updates, writer, over: false, keep_alive, silence: Box::pin(sleep(keep_alive)), id };
    let headers = [(header::CONTENT_TYPE, "text/event-stream; charset=utf-8"), (header::CACHE_CONTROL, "no-cache")];
    // proxies that buffer would hold the pieces back
    let accel = [("x-accel-buffering", "no")];
    (headers, accel, Body::new(stream.map_err(|never| match never {}))).into_response()
}

/// The engine's thread has ended by a fault.
pub fn engine_failed() -> ApiError {
    ApiError::internal("the engine has failed; the server must be restarted").code("engine_failed")
}

/// Bytes of a frame, at most, before it is sent.
const FRAME: usize = 16 << 10;

impl<W: Writer> hyper::body::Body for Stream<W> {
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

impl<W: Writer> Stream<W> {
    fn fail(&mut self, error: &ApiError, events: &mut Events) {
        self.writer.failed(error, events);
        self.over = true;
    }

    /// The next bytes; `None` is the end.
    fn next(&mut self, context: &mut Context<'_>) -> Poll<Option<Bytes>> {
        let this = self;
        if this.over {
            return Poll::Ready(None);
        }
        let mut events = Events::default();
        // everything there is goes out at once
        while !this.over && events.bytes.len() < FRAME {
            match this.updates.poll_recv(context) {
                Poll::Ready(Some((index, update))) => match fault(&update) {
                    Some(error) => this.fail(&error, &mut events),
                    None => this.over = this.writer.update(index, update, &mut events),
                },
                Poll::Ready(None) => this.fail(&engine_failed(), &mut events),
                Poll::Pending if !events.bytes.is_empty() => break,
                Poll::Pending if this.keep_alive.is_zero() => return Poll::Pending,
                Poll::Pending => {
                    ready!(this.silence.as_mut().poll(context));
                    events.comment("keep-alive");
                }
            }
        }
        if events.bytes.is_empty() {
            return Poll::Ready(None);
        }
        this.silence.as_mut().reset(Instant::now() + this.keep_alive);
        Poll::Ready(Some(events.bytes.into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// A client that reads events as the standard says gets the texts back, however the bytes are cut.
        #[test]
        fn events_carry_any_text(texts in prop::collection::vec(".*|\\PC*[\r\n\u{2028}]\\PC*", 0..8), cut in 1usize..9) {
            let mut events = Events::default();
            texts.iter().for_each(|text| events.json(text));
            events.done();
            let mut read = Vec::new();
            let mut buffer = Vec::new();
            for piece in events.bytes.chunks(cut) {
                buffer.extend_from_slice(piece);
                while let Some(end) = buffer.windows(2).position(|pair| pair == b"\n\n") {
                    let event: Vec<u8> = buffer.drain(..end + 2).collect();
                    let event = String::from_utf8(event).unwrap();
                    // one field, on one line
                    prop_assert_eq!(event.trim_end().lines().count(), 1);
                    read.push(event.strip_prefix("data: ").unwrap().trim_end_matches('\n').to_string());
                }
            }
            prop_assert!(buffer.is_empty());
            prop_assert_eq!(read.pop().unwrap(), "[DONE]");
            let back: Vec<String> = read.iter().map(|json| serde_json::from_str(json).unwrap()).collect();
            prop_assert_eq!(back, texts);
        }
    }
}

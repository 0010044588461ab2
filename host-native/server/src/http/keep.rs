//! Middleware that answers from kept responses, and keeps those that are to be kept.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use http_body_util::BodyExt;
use hyper::body::Frame;
use sha2::{Digest, Sha256};
use starling_api::error::ApiError;
use tokio::sync::watch;
use tokio::time::{Instant, timeout};
use tracing::Instrument;

use super::body::read_body;
use super::error::{HttpError, REQUEST_ID};
use crate::observe::trace::Trace;
use crate::server::{Caller, Server};
use crate::state::reuse::kept::{Kept, MAX_RESPONSES, Once, OnceKey, Stream};
use crate::state::reuse::shared_log::{Reader, SharedLog};

const IDEMPOTENCY_KEY: &str = "idempotency-key";
const LAST_EVENT_ID: &str = "last-event-id";
/// Maximum length of an idempotency key.
const MAX_KEY: usize = 255;

/// Middleware: answers from kept responses, and keeps those that are to be kept.
pub async fn keep(State(server): State<Arc<Server>>, request: Request, next: Next) -> Response {
    let Some(caller) = request.extensions().get::<Caller>().cloned().filter(|_| request.method() == Method::POST)
    else {
        return next.run(request).await;
    };
    let settings = server.settings();
    if caller.stream_id.is_some()
        && let Some(last) = request.headers().get(LAST_EVENT_ID)
    {
        return resume(&server, &caller, last).unwrap_or_else(|error| HttpError(error).into_response());
    }
    match request.headers().get(IDEMPOTENCY_KEY).cloned() {
        Some(key) if !settings.idempotency_window.is_zero() => {
            once(&server, &caller, &key, request, next).await.unwrap_or_else(|error| HttpError(error).into_response())
        }
        _ => {
            let response = next.run(request).await;
            let is_stream = is_event_stream(response.headers());
            match caller.stream_id.clone().filter(|_| is_stream) {
                Some(id) => keep_stream(&server, &caller, id, response),
                None => response,
            }
        }
    }
}

fn is_event_stream(headers: &HeaderMap) -> bool {
    let kind = headers.get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    kind.is_some_and(|kind| kind.starts_with("text/event-stream"))
}

/// The response to the first request with this key, now or when it comes.
async fn once(
    server: &Arc<Server>,
    caller: &Caller,
    key: &HeaderValue,
    request: Request,
    next: Next,
) -> Result<Response, ApiError> {
    let invalid =
        || ApiError::invalid(format!("the header {IDEMPOTENCY_KEY}: expected 1 to {MAX_KEY} printable characters"));
    let text = key.to_str().ok().filter(|key| !key.is_empty() && key.len() <= MAX_KEY).ok_or_else(invalid)?;
    let key = (Arc::clone(&caller.identity.tenant.name), text.to_string());
    let (parts, body) = request.into_parts();
    let bytes = read_body(server, body, Some(&caller.memory)).await?;
    let digest: [u8; 32] =
        Sha256::new_with_prefix(parts.uri.to_string()).chain_update([0]).chain_update(&bytes).finalize().into();
    let (first, mut response) = {
        let mut inner = server.kept.lock();
        let known = inner.once.get(&key).filter(|once| once.until > Instant::now());
        match known.map(|once| (once.digest == digest, once.response.clone())) {
            Some((false, _)) => {
                let message = "this Idempotency-Key came with another request before";
                return Err(ApiError::new(409, "invalid_request_error", message).code("idempotency_mismatch"));
            }
            Some((true, response)) => (None, response),
            None if !inner.make_room(&key.0) => {
                let message = format!("{MAX_RESPONSES} responses are kept for Idempotency-Key; try again later");
                return Err(ApiError::unavailable(message).code("too_many_keys"));
            }
            None => {
                let (sender, receiver) = watch::channel(None);
                let until = Instant::now() + server.settings().idempotency_window;
                inner.once.insert(key.clone(), Once { digest, response: receiver.clone(), until });
                (Some(sender), receiver)
            }
        }
    };
    let is_first = first.is_some();
    if let Some(sender) = first {
        let request = Request::from_parts(parts, Body::from(bytes));
        let server = Arc::clone(server);
        let id = REQUEST_ID.try_with(Arc::clone).unwrap_or_else(|_| "".into());
        let run = async move { run_once(&server, key, request, next, sender).await };
        // the work goes on when the client has gone
        tokio::spawn(Trace::current().scope(REQUEST_ID.scope(id, run.instrument(tracing::Span::current()))));
    }
    let lost = || ApiError::internal("internal error: the request with this Idempotency-Key was lost");
    let kept = response.wait_for(Option::is_some).await.ok().and_then(|kept| kept.clone()).ok_or_else(lost)?;
    let mut response = kept.response();
    if !is_first {
        response.headers_mut().insert("idempotent-replayed", HeaderValue::from_static("true"));
    }
    Ok(response)
}

/// Runs a request to its end. A response that asks to try again is given to those that wait for it, and not kept.
async fn run_once(
    server: &Arc<Server>,
    key: OnceKey,
    request: Request,
    next: Next,
    sender: watch::Sender<Option<Arc<Kept>>>,
) {
    let response = next.run(request).await;
    let status = response.status();
    let is_final = !status.is_server_error()
        && ![StatusCode::TOO_MANY_REQUESTS, StatusCode::REQUEST_TIMEOUT, StatusCode::CONFLICT].contains(&status);
    let (head, body) = response.into_parts();
    let kept = Arc::new(Kept { head, body: SharedLog::new() });
    if !is_final {
        server.kept.lock().once.remove(&key);
    }
    sender.send_replace(Some(Arc::clone(&kept)));
    read_all(body, &kept.body).await;
}

impl Kept {
    /// The whole response, from its beginning.
    fn response(&self) -> Response {
        self.from(0, Bytes::new())
    }

    /// The response from the piece `from` of its body, after `first`.
    fn from(&self, from: usize, first: Bytes) -> Response {
        let first = Some(first).filter(|first| !first.is_empty());
        let body = Body::new(LogBody { reader: self.body.reader(from), first });
        Response::from_parts(self.head.clone(), body)
    }
}

async fn read_all(mut body: Body, log: &SharedLog<Bytes>) {
    while let Some(Ok(frame)) = body.frame().await {
        if let Ok(data) = frame.into_data() {
            let n_bytes = data.len();
            log.push(data, n_bytes);
        }
    }
    log.close();
}

/// Reads a stream into a log, from which its client reads, and can go on reading after a cut.
fn keep_stream(server: &Arc<Server>, caller: &Caller, id: Arc<str>, response: Response) -> Response {
    let (head, body) = response.into_parts();
    let kept = Arc::new(Kept { head, body: SharedLog::new() });
    let tenant = Arc::clone(&caller.identity.tenant.name);
    let stream = Stream { tenant, response: Arc::clone(&kept), until: None };
    let window = server.settings().resume_window;
    {
        let mut inner = server.kept.lock();
        if !inner.make_room(&stream.tenant) {
            // it cannot be resumed
            return Response::from_parts(kept.head.clone(), body);
        }
        inner.streams.insert(Arc::clone(&id), stream);
    }
    let response = kept.response();
    let server = Arc::clone(server);
    tokio::spawn(async move {
        let log = &kept.body;
        let given_up = async {
            loop {
                log.unread().await;
                // no client resumed it
                if timeout(window, log.read()).await.is_err() {
                    return;
                }
            }
        };
        tokio::select! {
            () = read_all(body, log) => {}
            () = given_up => log.close(),
        }
        let mut inner = server.kept.lock();
        if let Some(stream) = inner.streams.get_mut(&id) {
            stream.until = Some(Instant::now() + window);
        }
    });
    response
}

/// The rest of a stream after the event `STREAM:INDEX`.
fn resume(server: &Server, caller: &Caller, last: &HeaderValue) -> Result<Response, ApiError> {
    let gone = || {
        let message = "this stream is not known, or the time to resume it is over (--resume-window)";
        ApiError::new(410, "invalid_request_error", message).code("stream_gone")
    };
    let last = last.to_str().map_err(|_| gone())?;
    let (id, _) = last.rsplit_once(':').ok_or_else(gone)?;
    let kept = {
        let inner = server.kept.lock();
        let stream =
            inner.streams.get(id).filter(|stream| stream.tenant == caller.identity.tenant.name).ok_or_else(gone)?;
        Arc::clone(&stream.response)
    };
    let needle = format!("id: {last}\n");
    for (i, piece) in kept.body.items().iter().enumerate() {
        let Some(at) = find(piece, needle.as_bytes()) else { continue };
        let end = find(&piece[at..], b"\n\n").map_or(piece.len(), |end| at + end + 2);
        return Ok(kept.from(i + 1, piece.slice(end..)));
    }
    Err(gone())
}

fn find(bytes: &[u8], what: &[u8]) -> Option<usize> {
    bytes.windows(what.len()).position(|window| window == what)
}

/// A body that reads a log.
struct LogBody {
    reader: Reader<Bytes>,
    first: Option<Bytes>,
}

impl hyper::body::Body for LogBody {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        if let Some(first) = self.first.take() {
            return Poll::Ready(Some(Ok(Frame::data(first))));
        }
        Poll::Ready(ready!(self.reader.poll_next(context)).map(|data| Ok(Frame::data(data))))
    }
}

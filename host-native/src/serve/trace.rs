//! Traces: when each request was at which stage, as OpenTelemetry's spans and in the log.
//!
//! ```text
//! gateway ─┬─ grammar           what the answer has to be, if a request says so
//!          ├─ tokenize          templates and tokenizers
//!          ├─ queue             until the engine takes it
//!          ├─ prefill           the prompt
//!          ├─ decode, sample    tokens: the forward pass, and the picks; `busy_ms` is the request's steps, the rest waiting
//!          └─ stream            the response on its way to the client
//! ```
//!
//! A stage is measured where it happens and becomes a span when it is over, so that the engine's thread only reads a
//! clock. Spans have names, times and numbers of tokens, and never a text of a request.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context as Waker, Poll};
use std::time::{Duration, Instant, SystemTime};

use axum::body::{Body, Bytes};
use axum::http::HeaderMap;
use hyper::body::{Frame, SizeHint};
use opentelemetry::propagation::TextMapPropagator;
use opentelemetry::trace::{Span as _, SpanKind, Status, TraceContextExt, Tracer as _, TracerProvider as _};
use opentelemetry::{Context, KeyValue, Value};
use opentelemetry_http::hyper::HyperClient;
use opentelemetry_http::{HeaderExtractor, HttpClient, HttpError};
use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{SdkTracer, SdkTracerProvider};
use tokio::runtime::Handle;

use super::config::Settings;
use crate::error::Failure;

/// How long a batch of spans may take on its way.
const EXPORT_LIMIT: Duration = Duration::from_secs(10);
/// How long the last spans may take when the server ends.
const LAST_SPANS: Duration = Duration::from_secs(2);

tokio::task_local! {
    /// The trace of the request that this task answers.
    static CURRENT: Trace;
}

/// Where spans go, if they go anywhere.
#[derive(Debug, Default)]
pub struct Exporter {
    to: Option<(SdkTracerProvider, SdkTracer)>,
}

impl Exporter {
    /// As the settings say. Batches are sent by tasks of `runtime`.
    ///
    /// # Errors
    /// If the address is none.
    pub fn new(settings: &Settings, runtime: &Handle) -> Result<Exporter, Failure> {
        let Some(endpoint) = settings.otlp_endpoint.as_deref().filter(|url| !url.is_empty()) else {
            return Ok(Exporter::default());
        };
        let wrong = |e: &dyn std::fmt::Display| Failure::Usage(format!("otlp-endpoint: found {endpoint}, {e}"));
        let base = endpoint.trim_end_matches('/');
        if !base.starts_with("http://") {
            return Err(wrong(&"expected an http URL such as http://localhost:4318"));
        }
        // as OTEL_EXPORTER_OTLP_ENDPOINT: the collector's address, to which the kind of data is added
        let url = if base.ends_with("/v1/traces") { base.to_string() } else { format!("{base}/v1/traces") };
        let client =
            OnRuntime { runtime: runtime.clone(), client: HyperClient::with_default_connector(EXPORT_LIMIT, None) };
        let exporter = SpanExporter::builder()
            .with_http()
            .with_http_client(client)
            .with_protocol(Protocol::HttpBinary)
            .with_endpoint(url)
            .with_timeout(EXPORT_LIMIT)
            .build()
            .map_err(|e| wrong(&e))?;
        let name = |key: &str, of: &str| KeyValue::new(key.to_string(), of.to_string());
        let mut resource = Resource::builder().with_attribute(name("service.version", env!("CARGO_PKG_VERSION")));
        if std::env::var_os("OTEL_SERVICE_NAME").is_none() {
            resource = resource.with_service_name("starling");
        }
        if let Some(id) = &settings.worker_id {
            resource = resource.with_attribute(name("service.instance.id", id));
        }
        let provider =
            SdkTracerProvider::builder().with_resource(resource.build()).with_batch_exporter(exporter).build();
        let tracer = provider.tracer("starling");
        Ok(Exporter { to: Some((provider, tracer)) })
    }

    /// Begins the trace of a request; a client's own (W3C `traceparent`) goes on. `log` is its span in the log.
    pub fn begin(&self, headers: &HeaderMap, log: &tracing::Span, attributes: Vec<KeyValue>) -> Trace {
        let (came, time) = (Instant::now(), SystemTime::now());
        let exported = self.to.as_ref().map(|(_, tracer)| {
            let parent = TraceContextPropagator::new().extract_with_context(&Context::new(), &HeaderExtractor(headers));
            let builder = tracer.span_builder("gateway").with_kind(SpanKind::Server).with_start_time(time);
            let span = builder.with_attributes(attributes).start_with_context(tracer, &parent);
            log.record("trace_id", tracing::field::display(span.span_context().trace_id()));
            Exported { tracer: tracer.clone(), context: parent.with_span(span), time }
        });
        Trace(Some(Arc::new(Inner { log: log.clone(), came, exported })))
    }

    /// Sends what is left.
    pub fn end(&self) {
        let Some((provider, _)) = &self.to else { return };
        if let Err(e) = provider.shutdown_with_timeout(LAST_SPANS) {
            tracing::warn!("trace export: the last spans were lost: {e}");
        }
    }
}

/// Sends from the exporter's thread by the runtime's, where sockets and timers work.
#[derive(Debug)]
struct OnRuntime {
    runtime: Handle,
    client: HyperClient,
}

#[async_trait::async_trait]
impl HttpClient for OnRuntime {
    async fn send_bytes(&self, request: hyper::Request<Bytes>) -> Result<hyper::Response<Bytes>, HttpError> {
        let client = self.client.clone();
        self.runtime.spawn(async move { client.send_bytes(request).await }).await?
    }
}

/// The trace of a request, shared by all who work on it.
#[derive(Debug, Clone, Default)]
pub struct Trace(Option<Arc<Inner>>);

#[derive(Debug)]
struct Inner {
    log: tracing::Span,
    /// The request's arrival, by both clocks.
    came: Instant,
    exported: Option<Exported>,
}

#[derive(Debug)]
struct Exported {
    tracer: SdkTracer,
    /// With the span `gateway`.
    context: Context,
    time: SystemTime,
}

impl Trace {
    /// Of the request that this task answers.
    pub fn current() -> Trace {
        CURRENT.try_with(Clone::clone).unwrap_or_default()
    }

    /// Runs a task that answers this request.
    pub async fn scope<F: Future>(self, task: F) -> F::Output {
        CURRENT.scope(self, task).await
    }

    /// A stage that is over, and what is to be known of it.
    pub fn stage(&self, name: &'static str, start: Instant, end: Instant, attributes: &[(&'static str, Number)]) {
        let Some(inner) = &self.0 else { return };
        let ms = end.saturating_duration_since(start).as_secs_f64() * 1000.0;
        tracing::debug!(parent: &inner.log, stage = name, ms, "stage");
        let Some(Exported { tracer, context, .. }) = &inner.exported else { return };
        let attributes = attributes.iter().map(|(key, value)| KeyValue::new(*key, Value::from(*value)));
        let span = tracer.span_builder(name).with_start_time(inner.time(start)).with_attributes(attributes);
        span.start_with_context(tracer, context).end_with_timestamp(inner.time(end));
    }

    /// Something to be known of the request, in the log too.
    pub fn record(&self, key: &'static str, value: &str) {
        let Some(inner) = &self.0 else { return };
        inner.log.record(key, value);
        if let Some(exported) = &inner.exported {
            exported.context.span().set_attribute(KeyValue::new(key, value.to_string()));
        }
    }

    /// The response begins: it is on its way until its body has gone, and then the request is over.
    pub fn send(self, response: axum::response::Response) -> axum::response::Response {
        let Some(inner) = &self.0 else { return response };
        if let Some(exported) = &inner.exported {
            let (span, status) = (exported.context.span(), response.status());
            span.set_attribute(KeyValue::new("http.response.status_code", i64::from(status.as_u16())));
            if status.is_server_error() {
                span.set_status(Status::error(status.canonical_reason().unwrap_or_default()));
            }
        }
        let start = Instant::now();
        response.map(|body| Body::new(Sent { body, trace: self, start, bytes: 0 }))
    }
}

impl Inner {
    fn time(&self, at: Instant) -> SystemTime {
        self.exported.as_ref().map_or(SystemTime::UNIX_EPOCH, |e| e.time + at.saturating_duration_since(self.came))
    }
}

/// A number, or a name that the server has given.
#[derive(Debug, Clone, Copy)]
pub enum Number {
    /// How many.
    Count(usize),
    /// How long.
    Time(Duration),
    /// Which.
    Name(&'static str),
}

impl From<Number> for Value {
    fn from(number: Number) -> Value {
        match number {
            Number::Count(n) => Value::I64(i64::try_from(n).unwrap_or(i64::MAX)),
            Number::Time(time) => Value::F64(time.as_secs_f64() * 1000.0),
            Number::Name(name) => Value::from(name),
        }
    }
}

/// A body that notes when it has gone.
struct Sent {
    body: Body,
    trace: Trace,
    start: Instant,
    bytes: usize,
}

impl hyper::body::Body for Sent {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(mut self: Pin<&mut Self>, waker: &mut Waker<'_>) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(waker);
        if let Poll::Ready(Some(Ok(frame))) = &frame {
            self.bytes += frame.data_ref().map_or(0, Bytes::len);
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for Sent {
    fn drop(&mut self) {
        let end = Instant::now();
        self.trace.stage("stream", self.start, end, &[("bytes", Number::Count(self.bytes))]);
        let inner = self.trace.0.as_ref();
        if let Some((inner, exported)) = inner.and_then(|inner| Some((inner, inner.exported.as_ref()?))) {
            exported.context.span().end_with_timestamp(inner.time(end));
        }
    }
}

/// The stages of an answer in the engine.
#[derive(Debug)]
pub struct Stages {
    /// Since when it waits.
    queued: Instant,
    /// When the engine has taken it, when its prompt was done, when its last token came.
    taken: Option<Instant>,
    prefilled: Option<Instant>,
    last: Option<Instant>,
    /// When the first token was picked, and the time of all forward passes and picks.
    first_pick: Option<Instant>,
    forward: Duration,
    picks: Duration,
    n_tokens: usize,
}

impl Stages {
    /// Of an answer that begins to wait.
    pub fn new() -> Stages {
        Stages {
            queued: Instant::now(),
            taken: None,
            prefilled: None,
            last: None,
            first_pick: None,
            forward: Duration::ZERO,
            picks: Duration::ZERO,
            n_tokens: 0,
        }
    }

    /// The engine takes it.
    pub fn taken(&mut self, trace: &Trace, index: usize) {
        let now = Instant::now();
        self.taken = Some(now);
        trace.stage("queue", self.queued, now, &[("index", Number::Count(index))]);
    }

    /// Its prompt is done.
    pub fn prefilled(&mut self, trace: &Trace, index: usize, at: Instant, (n_prompt, n_cached): (usize, usize)) {
        self.prefilled = Some(at);
        let attributes = [("index", index), ("prompt_tokens", n_prompt), ("cached_tokens", n_cached)];
        trace.stage("prefill", self.taken.unwrap_or(at), at, &attributes.map(|(key, n)| (key, Number::Count(n))));
    }

    /// A token was picked from `start` to `end`, after a forward pass of `forward`.
    pub fn token(&mut self, forward: Duration, start: Instant, end: Instant) {
        if self.first_pick.is_some() {
            self.forward += forward;
        }
        self.first_pick.get_or_insert(start);
        self.last = Some(end);
        self.picks += end.saturating_duration_since(start);
        self.n_tokens += 1;
    }

    /// It is over, with all tokens or before.
    pub fn over(&self, trace: &Trace, index: usize, reason: &'static str) {
        let (now, index, reason) = (Instant::now(), ("index", Number::Count(index)), ("reason", Number::Name(reason)));
        match (self.taken, self.prefilled) {
            (None, _) => trace.stage("queue", self.queued, now, &[index, reason]),
            (Some(taken), None) => trace.stage("prefill", taken, now, &[index, reason]),
            (_, Some(prefilled)) => {
                let tokens = ("tokens", Number::Count(self.n_tokens));
                let end = self.last.unwrap_or(now);
                let busy = |time| ("busy_ms", Number::Time(time));
                trace.stage("decode", prefilled, end, &[index, tokens, busy(self.forward), reason]);
                if let Some(first) = self.first_pick {
                    trace.stage("sample", first, end, &[index, tokens, busy(self.picks)]);
                }
            }
        }
    }
}

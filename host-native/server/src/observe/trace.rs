//! Traces: the stages of each request as OpenTelemetry spans and log events.
//!
//! ```text
//! gateway ─┬─ grammar           compiling the schema or grammar
//!          ├─ tokenize          chat template and tokenizer
//!          ├─ queue             until the engine admits the request
//!          ├─ prefill           the prompt
//!          ├─ decode, sample    forward passes, and sampling; `busy_ms` is the time in them, without the pauses between
//!          └─ stream            sending the response
//! ```
//!
//! A span is created when its stage has ended, from two instants, so that the engine thread only reads the clock. Spans
//! contain names, times and token counts, and no text of a request.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use axum::body::Bytes;
use axum::http::HeaderMap;
use opentelemetry::propagation::TextMapPropagator;
use opentelemetry::trace::{Span as _, SpanKind, Status, TraceContextExt, Tracer as _, TracerProvider as _};
use opentelemetry::{Context, KeyValue, Value};
use opentelemetry_http::hyper::HyperClient;
use opentelemetry_http::{HeaderExtractor, HttpClient, HttpError};
use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{SdkTracer, SdkTracerProvider};
use starling_host::error::Failure;
use tokio::runtime::Handle;

use crate::config::Settings;
use crate::observe::response_end::on_end;

/// Time limit of one export request.
const EXPORT_TIMEOUT: Duration = Duration::from_secs(10);
/// Time limit of the last export at shutdown.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(2);

tokio::task_local! {
    /// Trace of the request that the task handles.
    static CURRENT: Trace;
}

/// Exports spans to `otlp_endpoint`, if it is set.
#[derive(Debug, Default)]
pub struct Exporter {
    to: Option<(SdkTracerProvider, SdkTracer)>,
}

impl Exporter {
    /// # Errors
    /// If `otlp_endpoint` is not an http URL.
    pub fn new(settings: &Settings, runtime: &Handle) -> Result<Exporter, Failure> {
        let Some(endpoint) = settings.otlp_endpoint.as_deref().filter(|url| !url.is_empty()) else {
            return Ok(Exporter::default());
        };
        let wrong = |e: &dyn std::fmt::Display| Failure::Usage(format!("otlp-endpoint: found {endpoint}, {e}"));
        let base = endpoint.trim_end_matches('/');
        if !base.starts_with("http://") {
            return Err(wrong(&"expected an http URL such as http://localhost:4318"));
        }
        // like OTEL_EXPORTER_OTLP_ENDPOINT: a base URL, to which the signal's path is appended
        let url = if base.ends_with("/v1/traces") { base.to_string() } else { format!("{base}/v1/traces") };
        let client = RuntimeClient {
            runtime: runtime.clone(),
            client: HyperClient::with_default_connector(EXPORT_TIMEOUT, None),
        };
        let exporter = SpanExporter::builder()
            .with_http()
            .with_http_client(client)
            .with_protocol(Protocol::HttpBinary)
            .with_endpoint(url)
            .with_timeout(EXPORT_TIMEOUT)
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

    /// Starts the trace of a request, as a child of the client's (W3C `traceparent`) if there is one. `log` is the
    /// request's log span.
    pub fn begin(&self, headers: &HeaderMap, log: &tracing::Span, attributes: Vec<KeyValue>) -> Trace {
        let (received, time) = (Instant::now(), SystemTime::now());
        let exported = self.to.as_ref().map(|(_, tracer)| {
            let parent = TraceContextPropagator::new().extract_with_context(&Context::new(), &HeaderExtractor(headers));
            let builder = tracer.span_builder("gateway").with_kind(SpanKind::Server).with_start_time(time);
            let span = builder.with_attributes(attributes).start_with_context(tracer, &parent);
            log.record("trace_id", tracing::field::display(span.span_context().trace_id()));
            Exported { tracer: tracer.clone(), context: parent.with_span(span), time }
        });
        Trace(Some(Arc::new(Inner { log: log.clone(), received, exported })))
    }

    /// Exports the remaining spans.
    pub fn end(&self) {
        let Some((provider, _)) = &self.to else { return };
        if let Err(e) = provider.shutdown_with_timeout(SHUTDOWN_TIMEOUT) {
            tracing::warn!("trace export: the last spans were lost: {e}");
        }
    }
}

/// HTTP client of the exporter: its own thread has no runtime for sockets and timers, so requests run on the server's.
#[derive(Debug)]
struct RuntimeClient {
    runtime: Handle,
    client: HyperClient,
}

#[async_trait::async_trait]
impl HttpClient for RuntimeClient {
    async fn send_bytes(&self, request: hyper::Request<Bytes>) -> Result<hyper::Response<Bytes>, HttpError> {
        let client = self.client.clone();
        self.runtime.spawn(async move { client.send_bytes(request).await }).await?
    }
}

/// The trace of a request; clones share it. The default records nothing.
#[derive(Debug, Clone, Default)]
pub struct Trace(Option<Arc<Inner>>);

#[derive(Debug)]
struct Inner {
    log: tracing::Span,
    /// Arrival of the request.
    received: Instant,
    exported: Option<Exported>,
}

#[derive(Debug)]
struct Exported {
    tracer: SdkTracer,
    /// Contains the span `gateway`.
    context: Context,
    /// Arrival of the request.
    time: SystemTime,
}

impl Trace {
    /// The trace of the request that this task handles.
    pub fn current() -> Trace {
        CURRENT.try_with(Clone::clone).unwrap_or_default()
    }

    /// Makes this the current trace of `task`.
    pub async fn scope<F: Future>(self, task: F) -> F::Output {
        CURRENT.scope(self, task).await
    }

    /// Records a stage that has ended.
    pub fn stage(&self, name: &'static str, start: Instant, end: Instant, attributes: &[(&'static str, Number)]) {
        let Some(inner) = &self.0 else { return };
        let ms = end.saturating_duration_since(start).as_secs_f64() * 1000.0;
        tracing::debug!(parent: &inner.log, stage = name, ms, "stage");
        let Some(Exported { tracer, context, .. }) = &inner.exported else { return };
        let attributes = attributes.iter().map(|(key, value)| KeyValue::new(*key, Value::from(*value)));
        let span = tracer.span_builder(name).with_start_time(inner.time(start)).with_attributes(attributes);
        span.start_with_context(tracer, context).end_with_timestamp(inner.time(end));
    }

    /// Sets an attribute of the request's span and a field of its log span.
    pub fn record(&self, key: &'static str, value: &str) {
        let Some(inner) = &self.0 else { return };
        inner.log.record(key, value);
        if let Some(exported) = &inner.exported {
            exported.context.span().set_attribute(KeyValue::new(key, value.to_string()));
        }
    }

    /// Sends the response: the stage `stream` and the trace end with it.
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
        on_end(response, move |sent| {
            let end = Instant::now();
            self.stage("stream", start, end, &[("bytes", Number::Count(sent.n_bytes))]);
            if let Some((inner, exported)) = self.0.as_ref().and_then(|inner| Some((inner, inner.exported.as_ref()?))) {
                exported.context.span().end_with_timestamp(inner.time(end));
            }
        })
    }
}

impl Inner {
    fn time(&self, at: Instant) -> SystemTime {
        self.exported.as_ref().map_or(SystemTime::UNIX_EPOCH, |e| e.time + at.saturating_duration_since(self.received))
    }
}

/// Value of a span attribute: no text of a request.
#[derive(Debug, Clone, Copy)]
pub enum Number {
    Count(usize),
    Time(Duration),
    Name(&'static str),
}

impl From<Number> for Value {
    fn from(attribute: Number) -> Value {
        match attribute {
            Number::Count(n) => Value::I64(i64::try_from(n).unwrap_or(i64::MAX)),
            Number::Time(time) => Value::F64(time.as_secs_f64() * 1000.0),
            Number::Name(name) => Value::from(name),
        }
    }
}

/// Times of the stages of one answer in the engine.
#[derive(Debug)]
pub struct Stages {
    queued: Instant,
    /// Admission to the engine.
    taken: Option<Instant>,
    prefilled: Option<Instant>,
    /// Last token.
    last: Option<Instant>,
    /// Start of the first sampling; then the total time of forward passes and of sampling.
    first_sampling: Option<Instant>,
    forward: Duration,
    sampling: Duration,
    n_tokens: usize,
}

impl Stages {
    /// Of an answer that is enqueued now.
    pub fn new() -> Stages {
        Stages {
            queued: Instant::now(),
            taken: None,
            prefilled: None,
            last: None,
            first_sampling: None,
            forward: Duration::ZERO,
            sampling: Duration::ZERO,
            n_tokens: 0,
        }
    }

    /// The engine admits the answer.
    pub fn taken(&mut self, trace: &Trace, index: usize) {
        let now = Instant::now();
        self.taken = Some(now);
        trace.stage("queue", self.queued, now, &[("index", Number::Count(index))]);
    }

    /// The prefill ended at `at`.
    pub fn prefilled(&mut self, trace: &Trace, index: usize, at: Instant, (n_prompt, n_cached): (usize, usize)) {
        self.prefilled = Some(at);
        let attributes = [("index", index), ("prompt_tokens", n_prompt), ("cached_tokens", n_cached)];
        trace.stage("prefill", self.taken.unwrap_or(at), at, &attributes.map(|(key, n)| (key, Number::Count(n))));
    }

    /// A token was sampled from `start` to `end`, after a forward pass of duration `forward`.
    pub fn token(&mut self, forward: Duration, start: Instant, end: Instant) {
        if self.first_sampling.is_some() {
            self.forward += forward;
        }
        self.first_sampling.get_or_insert(start);
        self.last = Some(end);
        self.sampling += end.saturating_duration_since(start);
        self.n_tokens += 1;
    }

    /// Records the last stages of an answer that ended for `reason`.
    pub fn end(&self, trace: &Trace, index: usize, reason: &'static str) {
        let (now, index, reason) = (Instant::now(), ("index", Number::Count(index)), ("reason", Number::Name(reason)));
        match (self.taken, self.prefilled) {
            (None, _) => trace.stage("queue", self.queued, now, &[index, reason]),
            (Some(taken), None) => trace.stage("prefill", taken, now, &[index, reason]),
            (_, Some(prefilled)) => {
                let tokens = ("tokens", Number::Count(self.n_tokens));
                let end = self.last.unwrap_or(now);
                let busy = |time| ("busy_ms", Number::Time(time));
                trace.stage("decode", prefilled, end, &[index, tokens, busy(self.forward), reason]);
                if let Some(first) = self.first_sampling {
                    trace.stage("sample", first, end, &[index, tokens, busy(self.sampling)]);
                }
            }
        }
    }
}

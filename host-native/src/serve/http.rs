//! Routes, the accept loop, and connections.

use std::convert::Infallible;
use std::net::IpAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::Request;
use axum::http::{HeaderName, HeaderValue, Method, StatusCode, header};
use axum::middleware::{from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{delete, get, post};
use hyper::body::Incoming;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tower::Service;
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::compression::CompressionLayer;
use tower_http::cors::{AllowOrigin, CorsLayer};

use super::api::error::{ApiError, HttpError, quoted};
use super::api::{
    anthropic, chat, completions, embeddings, execute, generate, llama_server, models, ollama, receipts, rerank,
    responses, slots, stored, stored_responses, tei, tokenize,
};
use super::auth::Hosts;
use super::config::{Live, Settings};
use super::connection::{Activity, Peer, ResponseBody, StreamExecutor, WriteTimeout};
use super::gate::{Gate, gate, is_reserved};
use super::lanes::{Lanes, RESERVE_TIMEOUT, too_many_connections};
use super::state::Server;
use super::{admin, health, openapi, page, reuse, server_stats, signed, tls};

/// Which routes a listener has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Routes {
    All,
    /// Without `/admin`.
    Public,
    /// `/admin`, the probes, and the paths of other APIs that only change models.
    Admin,
}

pub fn router(server: &Arc<Server>, hosts: Hosts, which: Routes) -> Router {
    let probes = Router::new()
        .route("/health", get(health::health))
        .route("/healthz", get(health::live))
        .route("/livez", get(health::live))
        .route("/readyz", get(health::ready))
        .route("/ready", get(health::ready))
        .route("/metrics", get(health::metrics));
    let has_admin = which != Routes::Public && server.admin_keys.is_some();
    let routes = if has_admin { probes.merge(admin::routes()) } else { probes };
    let routes = routes.merge(managing_routes());
    let routes = if which == Routes::Admin { routes } else { routes.merge(public_routes()) };
    let routes =
        routes.fallback(not_found).method_not_allowed_fallback(method_not_allowed).with_state(Arc::clone(server));
    let takes_admin_keys = which != Routes::Public;
    let gate_state = Arc::new(Gate { server: Arc::clone(server), hosts, takes_admin_keys });
    let mut routes = routes
        .layer(CatchPanicLayer::custom(panicked))
        .layer(from_fn_with_state(Arc::clone(server), reuse::keep))
        .layer(from_fn_with_state(gate_state, gate))
        .layer(CompressionLayer::new());
    if server.settings().sign_responses {
        routes = routes.layer(from_fn(signed::sign));
    }
    if let Some(cors) = cors(&server.settings()) {
        routes = routes.layer(cors);
    }
    routes
}

/// Paths of Ollama and llama-server by which the models of the server change.
fn managing_routes() -> Router<Arc<Server>> {
    Router::new()
        .route("/api/pull", post(ollama::pull::pull))
        .route("/api/copy", post(ollama::pull::copy))
        .route("/api/create", post(ollama::pull::create))
        .route("/api/delete", delete(ollama::pull::delete))
        .route("/models/load", post(models::load))
        .route("/models/unload", post(models::unload))
}

fn public_routes() -> Router<Arc<Server>> {
    Router::new()
        .route("/v1/chat/completions", post(chat::chat_completions).get(stored::list))
        .route(
            "/v1/chat/completions/{completion_id}",
            get(stored::retrieve).post(stored::change).delete(stored::delete),
        )
        .route("/v1/chat/completions/{completion_id}/messages", get(stored::messages))
        .route("/v1/completions", post(completions::completions))
        .route("/v1/responses", post(responses::responses))
        .route("/v1/responses/input_tokens", post(responses::input_tokens))
        .route("/v1/responses/{response_id}", get(stored_responses::retrieve).delete(stored_responses::delete))
        .route("/v1/responses/{response_id}/input_items", get(stored_responses::input_items))
        .route("/v1/embeddings", post(embeddings::embeddings))
        .route("/v1/models", get(models::models))
        .route("/v1/models/{*id}", get(models::model))
        .route("/v1/generate", post(generate::generate))
        .route("/v1/session/close", post(generate::close_session))
        .route("/v1/tokenize", post(tokenize::tokenize))
        .route("/v1/detokenize", post(tokenize::detokenize))
        .route("/v1/apply-template", post(tokenize::apply_template))
        .route("/v1/verify", post(receipts::verify_receipt))
        .route("/execute", post(execute::execute))
        // Anthropic
        .route("/v1/messages", post(anthropic::messages))
        .route("/v1/messages/count_tokens", post(anthropic::count_tokens))
        // Ollama
        .route("/api/chat", post(ollama::generate::chat))
        .route("/api/generate", post(ollama::generate::generate))
        .route("/api/embed", post(ollama::embed::embed))
        .route("/api/embeddings", post(ollama::embed::embeddings))
        .route("/api/tags", get(ollama::models::tags))
        .route("/api/ps", get(ollama::models::ps))
        .route("/api/version", get(ollama::models::version))
        .route("/api/show", post(ollama::models::show))
        // aliases
        .route("/generate", post(generate::generate))
        .route("/chat", post(chat::chat_completions))
        .route("/chat/completions", post(chat::chat_completions))
        .route("/responses", post(responses::responses))
        .route("/responses/input_tokens", post(responses::input_tokens))
        .route("/embeddings", post(embeddings::embeddings))
        // llama-server
        .route("/tokenize", post(llama_server::tokenize))
        .route("/detokenize", post(llama_server::detokenize))
        .route("/models", get(models::models))
        .route("/models/sse", get(models::events))
        .route("/completion", post(llama_server::completion))
        .route("/completions", post(llama_server::completion))
        .route("/infill", post(llama_server::infill))
        .route("/embedding", post(llama_server::embedding))
        .route("/apply-template", post(tokenize::apply_template_without_bos))
        .route("/props", get(llama_server::props))
        .route("/lora-adapters", get(llama_server::lora_adapters))
        .route("/v1/chat/completions/input_tokens", post(llama_server::chat_input_tokens))
        .route("/chat/completions/input_tokens", post(llama_server::chat_input_tokens))
        // Jina, Cohere, llama-server and Text Embeddings Inference
        .route("/v1/rerank", post(rerank::rerank))
        .route("/v2/rerank", post(rerank::rerank))
        .route("/v1/reranking", post(rerank::rerank))
        .route("/rerank", post(rerank::rerank))
        .route("/reranking", post(rerank::rerank))
        // Text Embeddings Inference
        .route("/embed", post(tei::embed))
        .route("/info", get(tei::info))
        .route("/slots", get(slots::list))
        .route("/slots/{id}", post(slots::act))
        .route("/server/stats", get(server_stats::stats))
        .route("/openapi.json", get(openapi::document))
        .route("/docs", get(openapi::docs))
        .route("/", get(page::page))
        .route("/assets/{name}", get(page::asset))
}

async fn not_found(request: Request) -> HttpError {
    ApiError::no_path(request.method().as_str(), request.uri().path()).into()
}

async fn method_not_allowed(request: Request) -> HttpError {
    let message = format!("{}: method {} not allowed", quoted(request.uri().path()), quoted(request.method().as_str()));
    let status = StatusCode::METHOD_NOT_ALLOWED.as_u16();
    ApiError::new(status, "invalid_request_error", message).code("method_not_allowed").into()
}

fn panicked(_: Box<dyn std::any::Any + Send>) -> Response {
    tracing::error!("request handler panicked");
    HttpError(ApiError::internal("internal error: the request handler panicked")).into_response()
}

/// Response headers that scripts of other origins may read, besides those that requests have too.
const EXPOSED: [&str; 8] = [
    "x-starling-model",
    "x-starling-skipped",
    "retry-after",
    "idempotent-replayed",
    "endpoint-load-metrics",
    "content-digest",
    "signature",
    "signature-input",
];

fn cors(settings: &Settings) -> Option<CorsLayer> {
    let origins = &settings.cors_origins;
    if origins.is_empty() {
        return None;
    }
    let origin = if origins.iter().any(|o| o == "*") {
        AllowOrigin::any()
    } else {
        AllowOrigin::list(origins.iter().filter_map(|o| o.parse::<HeaderValue>().ok()))
    };
    let own = [
        "x-request-id",
        "x-session-id",
        "x-starling-ignored-fields",
        "x-starling-unenforced",
        "api-key",
        "x-request-timeout",
    ]
    .map(HeaderName::from_static);
    let more = ["x-api-key", "anthropic-version", "anthropic-beta"].map(HeaderName::from_static);
    let headers = own.clone().into_iter().chain(more).chain([header::AUTHORIZATION, header::CONTENT_TYPE]);
    let seen = EXPOSED.map(HeaderName::from_static).into_iter().chain(own);
    let layer = CorsLayer::new().allow_origin(origin).allow_methods([Method::GET, Method::POST, Method::DELETE]);
    Some(layer.allow_headers(headers.collect::<Vec<_>>()).expose_headers(seen.collect::<Vec<_>>()))
}

pub struct Listener {
    pub tcp: TcpListener,
    pub tls: Option<Arc<Live<TlsAcceptor>>>,
}

/// A TCP or TLS stream.
trait ByteStream: AsyncRead + AsyncWrite + Unpin + Send {}
impl<T: AsyncRead + AsyncWrite + Unpin + Send> ByteStream for T {}

/// Time for the last bytes of a connection that is closed, once no request is in progress.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Bytes of bodies that a client may send ahead on an HTTP/2 connection. They are in memory before any request is known.
const HTTP2_WINDOW: u32 = 256 << 10;

/// Accepts connections until `stop`; returns once all of them are closed, or when `now` is set.
pub async fn serve(
    Listener { tcp, tls }: Listener,
    routes: Router,
    settings: &Settings,
    mut stop: watch::Receiver<bool>,
    mut now: watch::Receiver<bool>,
) {
    let listener = Arc::new(Connections::new(settings, tls.clone(), false));
    let reserve = Arc::new(Connections::new(settings, tls, true));
    let lanes = Lanes::new(settings);
    loop {
        let (stream, address) = tokio::select! {
            accepted = accept(&tcp) => accepted,
            _ = stop.wait_for(|stop| *stop) => break,
        };
        let Some((permit, share, is_reserve)) = lanes.acquire(address) else {
            tracing::debug!(
                "connection of {address} closed: too many connections (--max-connections, --max-connections-per-address)"
            );
            continue;
        };
        let (listener, routes, stop) =
            (Arc::clone(if is_reserve { &reserve } else { &listener }), routes.clone(), stop.clone());
        tokio::spawn(async move {
            listener.connection(stream, address, routes, stop).await;
            drop((permit, share));
        });
    }
    drop(tcp);
    tokio::select! {
        () = lanes.closed() => {}
        _ = now.wait_for(|now| *now) => {}
    }
}

/// Shared by all connections.
struct Connections {
    builder: auto::Builder<StreamExecutor>,
    /// Replaced when the settings are reloaded: certificates are renewed without a restart.
    tls: Option<Arc<Live<TlsAcceptor>>>,
    /// For a TLS handshake, and for a connection without a request in progress.
    idle_timeout: Duration,
    write_timeout: Duration,
    /// Whether only probes and administrators are served.
    is_reserve: bool,
}

impl Connections {
    /// `is_reserve`: for connections beyond the limits, which have little time.
    fn new(settings: &Settings, tls: Option<Arc<Live<TlsAcceptor>>>, is_reserve: bool) -> Connections {
        let least = |timeout: Duration| if is_reserve { timeout.min(RESERVE_TIMEOUT) } else { timeout };
        let (idle_timeout, write_timeout) = (least(settings.header_timeout), least(settings.write_timeout));
        let mut builder = auto::Builder::new(StreamExecutor { limit: write_timeout });
        let max_header = usize::try_from(settings.max_header.0).unwrap_or(usize::MAX);
        // without a timer hyper ignores its timeouts
        builder.http1().timer(TokioTimer::new()).header_read_timeout(idle_timeout).max_buf_size(max_header);
        builder.http1().keep_alive(!is_reserve);
        builder.http2().timer(TokioTimer::new()).keep_alive_interval(settings.header_timeout);
        builder.http2().initial_stream_window_size(HTTP2_WINDOW).initial_connection_window_size(HTTP2_WINDOW);
        builder.http2().max_header_list_size(u32::try_from(max_header).unwrap_or(u32::MAX));
        Connections { builder, tls, idle_timeout, write_timeout, is_reserve }
    }

    /// Serves a connection until it is closed, idle for `idle_timeout`, or `stop` is set and its requests are done.
    async fn connection(&self, stream: TcpStream, address: IpAddr, routes: Router, mut stop: watch::Receiver<bool>) {
        // Nagle's algorithm would delay small events
        let _ = stream.set_nodelay(true);
        let activity = Activity::new();
        let stream = WriteTimeout::new(stream, self.write_timeout, activity.clone());
        let mut peer = Peer { address, certificate: None };
        let stream: Box<dyn ByteStream> = match &self.tls {
            None => Box::new(stream),
            Some(tls) => match timeout(self.idle_timeout, tls.get().accept(stream)).await {
                Ok(Ok(stream)) => {
                    let certificates = stream.get_ref().1.peer_certificates();
                    peer.certificate = certificates.and_then(|chain| chain.first()).map(tls::names);
                    Box::new(stream)
                }
                Ok(Err(e)) => return tracing::debug!("TLS handshake with {address}: {e}"),
                Err(_) => return,
            },
        };
        let (requests, is_reserve) = (activity.clone(), self.is_reserve);
        let service = hyper::service::service_fn(move |request: hyper::Request<Incoming>| {
            let busy = requests.busy();
            let mut request = request.map(axum::body::Body::new);
            request.extensions_mut().insert(peer.clone());
            let is_refused = is_reserve && !is_reserved(request.uri().path());
            let mut routes = routes.clone();
            async move {
                let response = if is_refused { too_many_connections() } else { routes.call(request).await? };
                Ok::<_, Infallible>(response.map(|body| ResponseBody::new(body, busy)))
            }
        });
        let mut connection = pin!(self.builder.serve_connection(TokioIo::new(stream), service));
        // errors of a connection are mostly the client's: no warning
        let log = |e| tracing::debug!("connection: {e}");
        tokio::select! {
            result = &mut connection => return result.unwrap_or_else(log),
            () = activity.idle(self.idle_timeout) => tracing::debug!("connection closed: idle for {} s (--header-timeout)", self.idle_timeout.as_secs_f64()),
            _ = stop.wait_for(|stop| *stop) => {}
        }
        connection.as_mut().graceful_shutdown();
        tokio::select! {
            result = &mut connection => result.unwrap_or_else(log),
            () = activity.idle(CLOSE_TIMEOUT) => {}
        }
    }
}

async fn accept(listener: &TcpListener) -> (TcpStream, IpAddr) {
    loop {
        match listener.accept().await {
            Ok((stream, address)) => return (stream, address.ip()),
            Err(e) => {
                // out of file descriptors, or the client disconnected: go on, without a busy loop
                tracing::warn!("cannot accept a connection: {e}");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

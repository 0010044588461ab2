//! Middleware of all requests: request id, Host check, authentication, rate limit, tracing, response headers.

use std::net::IpAddr;
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use axum::extract::{Request, State};
use axum::http::uri::Scheme;
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use opentelemetry::KeyValue;
use starling_host::clock::random_id;
use tracing::Instrument;

use super::access_log::logged;
use super::audited::audited;
use super::notes::notes;
use super::signed::{self, SignWith};
use crate::guard::audit::{Event, Refusal};
use crate::guard::auth::{Credential, Hosts};
use crate::guard::connection_memory::HeldMemory;
use crate::guard::peer::Peer;
use crate::guard::rights::Rights;
use crate::http::error::{ApiError, ERROR_FORMAT, ErrorFormat, HttpError, REQUEST_ID, quoted};
use crate::observe::response_end::on_end;
use crate::observe::trace::Trace;
use crate::server::{Caller, Server};

/// Maximum length of a client's `x-request-id`.
const MAX_ID: usize = 128;

/// Paths without authentication: load balancers probe them, and they reveal nothing about requests.
const PUBLIC_PATHS: [&str; 5] = ["/health", "/healthz", "/livez", "/readyz", "/ready"];

/// Prometheus metrics.
const METRICS: &str = "/metrics";
/// Beginning of the paths of administrators.
const ADMIN_PREFIX: &str = "/admin/";
/// A response up to this size counts for nothing, in bytes: every connection has buffers of that size, and no answer of usual
/// length is lost for lack of memory.
const SMALL_RESPONSE: usize = 32 << 10;

/// The pages and the description of the interface: the same on every server. A page asks for the key that its requests
/// need.
const ASSETS: [&str; 3] = ["/", "/docs", "/openapi.json"];
/// Beginning of the paths of the page's files.
const ASSETS_PREFIX: &str = "/assets/";

/// Paths of other APIs by which administrators change, load and unload the models of the server, and the metrics, which tell
/// them of all tenants.
const MANAGING_PATHS: [&str; 9] = [
    "/api/chat",
    "/api/copy",
    "/api/create",
    "/api/delete",
    "/api/generate",
    "/api/pull",
    "/metrics",
    "/models/load",
    "/models/unload",
];

/// Headers that must not be repeated: a proxy in front could use one value and the server the other.
const UNIQUE_HEADERS: [&str; 13] = [
    "host",
    "authorization",
    "api-key",
    "x-api-key",
    "signature-input",
    "signature",
    "idempotency-key",
    "last-event-id",
    "content-type",
    "x-session-id",
    "x-request-timeout",
    "x-gateway-inference-fairness-id",
    "x-gateway-inference-objective",
];

/// State of the middleware.
pub struct Gate {
    pub server: Arc<Server>,
    pub hosts: Hosts,
    /// Whether the keys of administrators are accepted: not on the public listener if they have one of their own.
    pub takes_admin_keys: bool,
}

/// Checks a request, passes it on, and completes its response.
pub async fn gate(State(gate): State<Arc<Gate>>, request: Request, next: Next) -> Response {
    let start = Instant::now();
    let id = request_id(request.headers());
    let method = request.method().clone();
    let path = request.uri().path().to_string();
    let form = ErrorFormat::of(&path, request.headers());
    let session = request.headers().get("x-session-id").cloned();
    let orca_format =
        request.headers().get("endpoint-load-metrics-format").and_then(|f| f.to_str().ok()).map(str::to_string);
    let empty = tracing::field::Empty; // recorded later
    let span = tracing::info_span!("request", request_id = %id, %method, %path, tenant = empty, session = empty, trace_id = empty);
    let is_probe = PUBLIC_PATHS.contains(&path.as_str()) || path == METRICS;
    let attributes = || {
        let pairs = [("http.request.method", method.as_str()), ("url.path", path.as_str()), ("request_id", &*id)];
        pairs.map(|(key, value)| KeyValue::new(key, value.to_string())).into()
    };
    let trace =
        if is_probe { Trace::default() } else { gate.server.exporter.begin(request.headers(), &span, attributes()) };
    let address = request.extensions().get::<Peer>().map(|peer| peer.address);
    let (caller, sign_with) = (OnceLock::new(), OnceLock::new());
    let inner = async {
        match check(&gate, request) {
            Ok(mut request) => {
                let memory = match request.extensions().get::<Caller>() {
                    Some(known) => {
                        let _ = caller.set(known.clone());
                        Arc::clone(&known.memory)
                    }
                    None => Arc::new(gate.server.memory.part(None, address)),
                };
                if let Some(with) = request.extensions_mut().remove::<SignWith>() {
                    let _ = sign_with.set(with);
                }
                let response = next.run(request).await;
                if is_reserved(&path) && path != METRICS { response } else { held(response, memory) }
            }
            Err(error) => {
                refused(&gate.server, &error, address, &path);
                HttpError(error).into_response()
            }
        }
    };
    let inner = trace.clone().scope(inner.instrument(span.clone()));
    let inner = ERROR_FORMAT.scope(form, inner);
    let mut response = REQUEST_ID.scope(Arc::clone(&id), inner).await;
    let (status, notes) = (response.status(), notes(&response));
    gate.server.metrics.response(status.as_u16());
    let headers = response.headers_mut();
    if let Ok(value) = HeaderValue::from_str(&id) {
        headers.insert("x-request-id", value);
    }
    let caller: Option<Caller> = caller.into_inner();
    let memory = caller.as_ref().map(|caller| Arc::clone(&caller.memory));
    if let Some(model) = notes.model.get().and_then(|name| HeaderValue::from_str(name).ok()) {
        headers.insert("x-starling-model", model);
    }
    if let Some(ignored) = notes.ignored.get().and_then(|names| HeaderValue::from_str(names).ok()) {
        headers.insert("x-starling-ignored-fields", ignored);
    }
    if let Some(unenforced) = notes.unenforced.get().and_then(|names| HeaderValue::from_str(names).ok()) {
        headers.insert("x-starling-unenforced", unenforced);
    }
    if let Some(session) = session {
        headers.insert("x-session-id", session);
    }
    if let Some(found) = notes.found.get() {
        headers.insert(header::AGE, HeaderValue::from(found.age));
        if let Ok(etag) = HeaderValue::from_str(&format!("\"{}\"", found.etag)) {
            headers.insert(header::ETAG, etag);
        }
    }
    if let Some(value) = orca_format.and_then(|format| gate.server.orca(&format)).and_then(|text| text.parse().ok()) {
        headers.insert("endpoint-load-metrics", value);
    }
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    if gate.server.is_draining() {
        headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
    }
    if is_probe {
        let _entered = span.enter();
        tracing::debug!(status = status.as_u16(), ms = start.elapsed().as_millis() as u64, "request finished");
    } else {
        let counts = (method == Method::POST).then(|| Arc::clone(&gate.server.metrics));
        response = logged(response, span, start, caller.clone(), counts);
    }
    if let Some(with) = sign_with.into_inner() {
        response.extensions_mut().insert(SignWith { memory, ..with });
    }
    if let (Some(log), Some(caller)) = (&gate.server.audit, caller.filter(|_| is_audited(&method, &path))) {
        let endpoint = if method == Method::POST { path } else { format!("{method} {path}") };
        response = audited(response, Arc::clone(log), caller, id, endpoint);
    }
    trace.send(response)
}

/// Whether a request is in the audit log: what computes or changes something, and what reads stored answers.
fn is_audited(method: &Method, path: &str) -> bool {
    let is_stored = ["/v1/responses", "/v1/chat/completions"].iter().any(|stored| path.starts_with(stored));
    !matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS) || *method == Method::GET && is_stored
}

/// A response that is in memory counts as held until its client has taken it.
fn held(response: Response, memory: Arc<HeldMemory>) -> Response {
    let n_bytes = hyper::body::Body::size_hint(response.body()).exact().unwrap_or(0);
    let n_bytes = usize::try_from(n_bytes).unwrap_or(usize::MAX);
    if n_bytes <= SMALL_RESPONSE {
        return response;
    }
    match memory.grow(n_bytes) {
        Ok(()) => on_end(response, move |_| drop(memory)),
        Err(refused) => HttpError(refused.into()).into_response(),
    }
}

/// Whether a path is of probes or administrators, for whom connections are kept back.
pub fn is_reserved(path: &str) -> bool {
    PUBLIC_PATHS.contains(&path) || path == METRICS || path.starts_with(ADMIN_PREFIX)
}

/// Whether a request that computes nothing counts for `key-requests`: it reads or writes what is stored.
fn costs(method: &Method, path: &str) -> bool {
    let is_stored =
        ["/v1/chat/completions", "/v1/responses/", "/models/sse"].iter().any(|stored| path.starts_with(stored));
    method == Method::DELETE || method == Method::GET && is_stored
}

/// Records a request without a valid credential, or with one that may not do it.
fn refused(server: &Server, error: &ApiError, address: Option<IpAddr>, path: &str) {
    let is_refused =
        [StatusCode::UNAUTHORIZED, StatusCode::FORBIDDEN].iter().any(|status| status.as_u16() == error.status);
    if let Some(log) = server.audit.as_ref().filter(|_| is_refused) {
        let reason = error.code.unwrap_or(error.kind);
        log.record(Event::Refused(Refusal::new(reason, address, path, error.status)));
    }
}

/// The client's `x-request-id` if it is short printable ASCII, else a new id.
fn request_id(headers: &HeaderMap) -> Arc<str> {
    let given = headers.get("x-request-id").and_then(|id| id.to_str().ok());
    let valid = given.filter(|id| !id.is_empty() && id.len() <= MAX_ID && id.bytes().all(|b| b.is_ascii_graphic()));
    valid.map_or_else(|| random_id("req-").into(), Into::into)
}

fn check(gate: &Gate, mut request: Request) -> Result<Request, ApiError> {
    let server = &gate.server;
    for name in UNIQUE_HEADERS {
        let n = request.headers().get_all(name).iter().count();
        if n > 1 {
            let message = format!("found {n} `{name}` headers, expected at most one");
            return Err(ApiError::invalid(message).code("duplicate_header"));
        }
    }
    let host = request.headers().get(header::HOST).and_then(|host| host.to_str().ok());
    let host = host.or_else(|| request.uri().authority().map(axum::http::uri::Authority::as_str));
    if !gate.hosts.allow(host) {
        let found = host.map_or_else(|| "no Host header".into(), |host| format!("Host {}", quoted(host)));
        let message =
            format!("{found} is not accepted by this server; start it with --allowed-hosts NAME to accept it");
        let status = StatusCode::FORBIDDEN.as_u16();
        return Err(ApiError::new(status, "invalid_request_error", message).code("unknown_host"));
    }
    let path = request.uri().path();
    let is_asset = (ASSETS.contains(&path) || path.starts_with(ASSETS_PREFIX)) && request.method() == Method::GET;
    if is_asset || PUBLIC_PATHS.contains(&path) || path == METRICS && server.settings().metrics_without_key {
        return Ok(request);
    }
    let mut keys = KEY_HEADERS.iter().filter(|name| request.headers().contains_key(**name));
    if let (Some(first), Some(second)) = (keys.next(), keys.next()) {
        let message = format!("found both headers `{first}` and `{second}`, expected one of them");
        return Err(ApiError::invalid(message).code("duplicate_header"));
    }
    let peer = request.extensions().get::<Peer>().cloned();
    let is_admin = path.starts_with(ADMIN_PREFIX);
    let admin_keys = server.admin_keys.as_ref().filter(|_| gate.takes_admin_keys);
    let keys = match admin_keys {
        Some(keys) if is_admin => keys.get(),
        // nothing tells whether a key would be that of an administrator
        None if is_admin => return Err(ApiError::no_path(request.method().as_str(), path)),
        _ => server.keys.get(),
    };
    let scheme = if server.tls.is_some() { Scheme::HTTPS } else { Scheme::HTTP };
    let signed = signed::verify(&server.verifier, &keys, &scheme, &mut request)
        .inspect_err(|_| server.metrics.rejected("invalid_signature"))?;
    let settings = server.settings();
    if signed.is_none() && settings.require_signature {
        server.metrics.rejected("no_signature");
        let message = "expected a signed request: the headers `signature-input` and `signature` (RFC 9421)";
        let error = ApiError::new(StatusCode::UNAUTHORIZED.as_u16(), "authentication_error", message);
        return Err(error.code("no_signature"));
    }
    if let Some(signed) = signed.as_ref().filter(|_| settings.sign_responses)
        && let Some(secret) = keys.secret(&signed.key_id)
    {
        let key_id = signed.key_id.clone();
        request.extensions_mut().insert(SignWith { key_id, secret, memory: None });
    }
    let credential = match &signed {
        Some(signed) => Some(Credential::Signature(&signed.key_id)),
        None => credential(request.headers(), peer.as_ref()),
    };
    if is_admin {
        let administrator = credential.and_then(|credential| keys.client(Some(credential)));
        let administrator = administrator.ok_or_else(|| {
            server.metrics.rejected("no_admin_key");
            let message = "expected the key of an administrator (--admin-key-file) in `Authorization: Bearer KEY`";
            let status = StatusCode::UNAUTHORIZED.as_u16();
            ApiError::new(status, "authentication_error", message).code("invalid_admin_key")
        })?;
        let administrator = server.administrator(Arc::clone(&administrator.tenant.name));
        request.extensions_mut().insert(administrator);
        return Ok(request);
    }
    let administrators = admin_keys.filter(|_| MANAGING_PATHS.contains(&request.uri().path()));
    let administrator = administrators.and_then(|keys| keys.get().client(Some(credential?)));
    let has_admin_keys = server.admin_keys.is_some();
    let rights = match administrator {
        Some(_) => Rights::Manage,
        None => Rights::without_key(&settings, &keys, has_admin_keys, peer.as_ref(), request.headers()),
    };
    let client = match administrator.or_else(|| keys.client(credential)) {
        Some(client) => client,
        None => {
            server.metrics.rejected("no_key");
            let message = match credential {
                Some(Credential::Certificate(_)) => "the client certificate is of no client of this server",
                Some(_) => "unknown API key",
                None => {
                    "found no API key, expected the header `Authorization: Bearer KEY`, `api-key: KEY` or `x-api-key: KEY`"
                }
            };
            let error = ApiError::new(StatusCode::UNAUTHORIZED.as_u16(), "authentication_error", message);
            return Err(error.code("invalid_api_key"));
        }
    };
    Trace::current().record("tenant", &client.tenant.name);
    let computes = request.method() == Method::POST;
    if computes && server.is_draining() {
        server.metrics.rejected("shutting_down");
        return Err(ApiError::unavailable("the server is shutting down").code("shutting_down"));
    }
    if computes || costs(request.method(), request.uri().path()) {
        let counted = client.tenant.count_request(settings.key_requests);
        counted.inspect_err(|_| server.metrics.rejected("key_requests"))?;
    }
    let address = peer.as_ref().map(|peer| peer.address);
    let max_priority = keys.max_priority(&client);
    let mut caller = Caller::new(client, server, address, request.headers(), request.uri().query());
    caller.identity.rights = rights;
    caller.identity.max_priority = max_priority;
    caller.limit_time_by_header(request.headers())?;
    request.extensions_mut().insert(caller);
    Ok(request)
}

/// What a request shows of its sender: a key, or else the certificate of its connection.
fn credential<'a>(headers: &'a HeaderMap, peer: Option<&'a Peer>) -> Option<Credential<'a>> {
    let certificate = || peer?.certificate.as_deref().map(Credential::Certificate);
    key(headers).map(Credential::Key).or_else(certificate)
}

/// Headers with an API key: `Authorization: Bearer` (OpenAI), `api-key` (Azure), `x-api-key` (Anthropic).
const KEY_HEADERS: [&str; 3] = ["authorization", "api-key", "x-api-key"];

/// The API key of a request, from one of [`KEY_HEADERS`].
fn key(headers: &HeaderMap) -> Option<&str> {
    if let Some(value) = headers.get(header::AUTHORIZATION) {
        let (scheme, key) = value.to_str().ok()?.split_once(' ')?;
        return scheme.eq_ignore_ascii_case("bearer").then_some(key.trim());
    }
    headers.get("api-key").or_else(|| headers.get("x-api-key"))?.to_str().ok()
}

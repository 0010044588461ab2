//! HTTP client of the registry: redirects by hand, so that a token never reaches another host.

use std::io::Read;
use std::time::Duration;

use reqwest::blocking::{Client, Response};
use reqwest::header::{AUTHORIZATION, CONTENT_TYPE, IF_NONE_MATCH, LOCATION, RANGE};
use reqwest::{StatusCode, Url};

/// Redirects followed for one request.
const MAX_REDIRECTS: usize = 10;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);
/// Time for a part of a file; what has arrived by then is kept.
const PART_TIMEOUT: Duration = Duration::from_secs(600);
/// Bytes of an error response that are quoted.
const MAX_QUOTE: usize = 200;
/// Maximum size of a response that is read whole.
const MAX_TEXT: u64 = 8 << 20;

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
pub enum HttpError {
    #[error("{url}: {why}")]
    Connection { url: String, why: String },
    #[error("{url}: status {status}{}", quote(body))]
    Status { url: String, status: u16, body: String },
    #[error("{url}: status {status}: this model is gated or private: accept its terms at {page} and set HF_TOKEN")]
    Gated { url: String, status: u16, page: String },
    #[error("{url}: more than {MAX_REDIRECTS} redirects")]
    Redirects { url: String },
    #[error("{url}: found content type {found:?}{}, expected {expected}", quote(body))]
    ContentType { url: String, found: String, expected: &'static str, body: String },
    #[error("{0}: expected an https URL, or http to this machine")]
    Insecure(String),
}

impl HttpError {
    /// Whether the same request may succeed later.
    pub fn is_temporary(&self) -> bool {
        match self {
            HttpError::Connection { .. } => true,
            HttpError::Status { status, .. } => matches!(status, 408 | 429 | 500..),
            _ => false,
        }
    }
}

fn quote(body: &str) -> String {
    let line: String = body.split_whitespace().collect::<Vec<_>>().join(" ").chars().take(MAX_QUOTE).collect();
    if line.is_empty() { String::new() } else { format!(": {line}") }
}

/// Options of a request.
#[derive(Debug, Clone, Copy, Default)]
pub struct Options<'a> {
    pub token: Option<&'a str>,
    /// First byte, and one after the last.
    pub range: Option<(u64, u64)>,
    pub etag: Option<&'a str>,
}

/// A client with the system's certificates and the proxies of the environment.
pub struct Http(Client);

impl Http {
    /// # Errors
    /// If the system's certificates cannot be read.
    pub fn new() -> Result<Http, HttpError> {
        crate::tls_provider::install();
        let agent = concat!("starling/", env!("CARGO_PKG_VERSION"));
        let client = Client::builder().user_agent(agent).redirect(reqwest::redirect::Policy::none());
        let client = client.connect_timeout(CONNECT_TIMEOUT).timeout(None).build();
        client.map(Http).map_err(|e| HttpError::Connection { url: "HTTP client".into(), why: causes(&e) })
    }

    /// Sends GET and follows redirects. A response with status 200, 206 or 304.
    ///
    /// # Errors
    /// Any other status, or none.
    pub fn get(&self, url: &str, options: Options<'_>) -> Result<Response, HttpError> {
        let wrong = |why: String| HttpError::Connection { url: url.into(), why };
        let first = Url::parse(url).map_err(|e| wrong(e.to_string()))?;
        check(&first)?;
        let mut at = first.clone();
        for _ in 0..=MAX_REDIRECTS {
            let mut request = self.0.get(at.clone());
            if let Some(token) = options.token.filter(|_| at.origin() == first.origin()) {
                request = request.header(AUTHORIZATION, format!("Bearer {token}"));
            }
            if let Some((from, to)) = options.range {
                request = request.timeout(PART_TIMEOUT).header(RANGE, format!("bytes={from}-{}", to.saturating_sub(1)));
            }
            if let Some(etag) = options.etag {
                request = request.header(IF_NONE_MATCH, etag);
            }
            let response = request.send().map_err(|e| wrong(causes(&e)))?;
            let status = response.status();
            if matches!(status, StatusCode::OK | StatusCode::PARTIAL_CONTENT | StatusCode::NOT_MODIFIED) {
                return Ok(response);
            }
            let location = response.headers().get(LOCATION).and_then(|to| to.to_str().ok());
            match location.filter(|_| status.is_redirection()) {
                Some(to) => {
                    at = at.join(to).map_err(|e| wrong(format!("redirect to {to:?}: {e}")))?;
                    check(&at)?;
                }
                None => return Err(failed(url, response)),
            }
        }
        Err(HttpError::Redirects { url: url.into() })
    }

    /// The body of a response in JSON.
    ///
    /// # Errors
    /// As [`Http::get`], or if it is something else.
    pub fn json(&self, url: &str, token: Option<&str>) -> Result<serde_json::Value, HttpError> {
        let response = self.get(url, Options { token, ..Options::default() })?;
        let kind = content_type(&response);
        let mut text = String::new();
        let read = response.take(MAX_TEXT).read_to_string(&mut text);
        read.map_err(|e| HttpError::Connection { url: url.into(), why: e.to_string() })?;
        let expected = "JSON of the hub's API";
        let other = |_| HttpError::ContentType { url: url.into(), found: kind, expected, body: text.clone() };
        serde_json::from_str(&text).map_err(other)
    }
}

pub fn content_type(response: &Response) -> String {
    let kind = response.headers().get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    kind.unwrap_or_default().to_string()
}

fn check(url: &Url) -> Result<(), HttpError> {
    let is_local = matches!(url.host_str(), Some("localhost" | "127.0.0.1" | "[::1]"));
    let is_allowed = url.scheme() == "https" || (url.scheme() == "http" && is_local);
    if is_allowed { Ok(()) } else { Err(HttpError::Insecure(url.to_string())) }
}

fn failed(url: &str, response: Response) -> HttpError {
    let (status, url) = (response.status().as_u16(), url.to_string());
    let mut body = Vec::new();
    let _ = response.take(4 * MAX_QUOTE as u64).read_to_end(&mut body);
    let body = String::from_utf8_lossy(&body).into_owned();
    if matches!(status, 401 | 403) {
        let page = url.split("/resolve/").next().unwrap_or(&url).replace("/api/models/", "/");
        let page = page.split("/revision/").next().unwrap_or_default().to_string();
        return HttpError::Gated { url, status, page };
    }
    HttpError::Status { url, status, body }
}

/// An error with its causes.
fn causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(e) = cause {
        text = format!("{text}: {e}");
        cause = e.source();
    }
    text
}

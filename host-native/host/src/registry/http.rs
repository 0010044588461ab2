//! HTTP client of the registry: redirects by hand, so that a token never reaches another host.

use std::env;
use std::net::IpAddr;
use std::time::Duration;

use reqwest::blocking::{Client, Response};
use reqwest::header::{AUTHORIZATION, CONTENT_TYPE, IF_NONE_MATCH, IF_RANGE, LOCATION, RANGE};
use reqwest::{StatusCode, Url};

use super::pace::{STALL_TIMEOUT, read_all};

/// Redirects followed for one request.
const MAX_REDIRECTS: usize = 10;
const CONNECT_TIMEOUT: Duration = Duration::from_secs(20);
/// Bytes of an error response that are quoted.
const MAX_QUOTE: usize = 200;
/// Maximum size of a response that is read whole.
const MAX_TEXT: usize = 8 << 20;

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
    #[error("{url}: redirects to this machine ({to}), which no other host may do")]
    RedirectsHere { url: String, to: String },
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
    /// The range is wanted only of this version of the file, by its `ETag` or `Last-Modified`; else the whole file.
    pub if_range: Option<&'a str>,
}

/// A client with the system's certificates and the proxies of the environment.
pub struct Http {
    client: Client,
    /// Time without a byte after which a connection is given up.
    pub stall_timeout: Duration,
}

impl Http {
    /// # Errors
    /// If the system's certificates cannot be read.
    pub fn new() -> Result<Http, HttpError> {
        crate::tls_provider::install();
        let agent = concat!("starling/", env!("CARGO_PKG_VERSION"));
        let client = Client::builder().user_agent(agent).redirect(reqwest::redirect::Policy::none());
        // as in huggingface_hub
        let seconds = env::var("HF_HUB_DOWNLOAD_TIMEOUT").ok().and_then(|text| text.parse().ok()).filter(|n| *n > 0);
        let stall_timeout = seconds.map_or(STALL_TIMEOUT, Duration::from_secs);
        // of this client, the timeout is that of the response's head and of each read of its body
        let client = client.connect_timeout(CONNECT_TIMEOUT).timeout(stall_timeout).build();
        let client = client.map_err(|e| HttpError::Connection { url: "HTTP client".into(), why: causes(&e) })?;
        Ok(Http { client, stall_timeout })
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
            let mut request = self.client.get(at.clone());
            if let Some(token) = options.token.filter(|_| at.origin() == first.origin()) {
                request = request.header(AUTHORIZATION, format!("Bearer {token}"));
            }
            if let Some((from, to)) = options.range {
                request = request.header(RANGE, format!("bytes={from}-{}", to.saturating_sub(1)));
            }
            if let Some(version) = options.if_range.filter(|_| options.range.is_some()) {
                request = request.header(IF_RANGE, version);
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
                    if is_local(&at) && !is_local(&first) {
                        return Err(HttpError::RedirectsHere { url: url.into(), to: at.to_string() });
                    }
                }
                None => return Err(failed(url, response, self.stall_timeout)),
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
        let bytes = read_all(response, MAX_TEXT, self.stall_timeout);
        let bytes = bytes.map_err(|e| HttpError::Connection { url: url.into(), why: e.to_string() })?;
        let text = String::from_utf8_lossy(&bytes);
        let expected = "JSON of the hub's API";
        let other = |_| HttpError::ContentType { url: url.into(), found: kind, expected, body: text.to_string() };
        serde_json::from_str(&text).map_err(other)
    }
}

pub fn content_type(response: &Response) -> String {
    let kind = response.headers().get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    kind.unwrap_or_default().to_string()
}

/// Whether a URL names this machine, as far as its text tells.
fn is_local(url: &Url) -> bool {
    let host = url.host_str().unwrap_or_default();
    match host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>().map(|address| address.to_canonical()) {
        Ok(address) => address.is_loopback() || address.is_unspecified(),
        Err(_) => host == "localhost" || host.ends_with(".localhost"),
    }
}

fn check(url: &Url) -> Result<(), HttpError> {
    let is_allowed = url.scheme() == "https" || (url.scheme() == "http" && is_local(url));
    if is_allowed { Ok(()) } else { Err(HttpError::Insecure(url.to_string())) }
}

fn failed(url: &str, response: Response, stall_timeout: Duration) -> HttpError {
    let (status, url) = (response.status().as_u16(), url.to_string());
    let body = read_all(response, 4 * MAX_QUOTE, stall_timeout).unwrap_or_default();
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

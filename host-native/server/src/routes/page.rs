//! The page: that of `web/demo`, with the server's API in place of the engine in the browser.

use std::sync::LazyLock;

use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use sha2::{Digest, Sha256};
use starling::receipt::Hex;

use crate::http::error::{ApiError, HttpError};
use crate::http::params::PathParams;

/// Nothing from other origins, no inline scripts or styles, no frames.
const CONTENT_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src \
                              'self' data:; base-uri 'none'; form-action 'self'; frame-ancestors 'none'";

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const JAVASCRIPT: &str = "text/javascript; charset=utf-8";

/// A file of the page.
struct File {
    name: &'static str,
    content_type: &'static str,
    text: &'static str,
    /// Weak, because responses are compressed on the way.
    etag: String,
}

/// A file of `web/demo/assets`, by default under its own name.
macro_rules! file {
    ($content_type:ident, $path:literal) => {
        file!($content_type, $path, $path)
    };
    ($content_type:ident, $path:literal, $name:literal) => {{
        let text = include_str!(concat!("../../../../web/demo/assets/", $path));
        let digest: [u8; 32] = Sha256::digest(text).into();
        File { name: $name, content_type: $content_type, text, etag: format!("W/\"{}\"", Hex(digest)) }
    }};
}

static PAGE: LazyLock<File> = LazyLock::new(|| file!(HTML, "../index.html"));

static ASSETS: LazyLock<[File; 18]> = LazyLock::new(|| {
    [
        file!(JAVASCRIPT, "backend-server.js", "backend.js"),
        file!(JAVASCRIPT, "chat.js"),
        file!(JAVASCRIPT, "dom.js"),
        file!(JAVASCRIPT, "highlight.js"),
        file!(JAVASCRIPT, "layout.js"),
        file!(JAVASCRIPT, "markdown.js"),
        file!(JAVASCRIPT, "marked.js"),
        file!(JAVASCRIPT, "page.js"),
        file!(JAVASCRIPT, "purify.js"),
        file!(JAVASCRIPT, "sampling.js"),
        file!(JAVASCRIPT, "store.js"),
        file!(CSS, "style.css"),
        file!(JAVASCRIPT, "theme.js"),
        file!(JAVASCRIPT, "tokens.js"),
        file!(JAVASCRIPT, "tree.js"),
        file!(JAVASCRIPT, "verify.js"),
        file!(JAVASCRIPT, "wire.js"),
        file!(CSS, "work.css"),
    ]
});

/// The response with a file, or 304 to a browser that has it.
fn respond(file: &'static File, headers: &HeaderMap) -> Response {
    let known = headers.get(header::IF_NONE_MATCH).and_then(|tags| tags.to_str().ok()).unwrap_or_default();
    let common = [
        (header::ETAG, file.etag.as_str()),
        (header::CACHE_CONTROL, "no-cache"),
        (header::CONTENT_SECURITY_POLICY, CONTENT_POLICY),
    ];
    if known.contains(&file.etag) {
        return (StatusCode::NOT_MODIFIED, common).into_response();
    }
    (common, [(header::CONTENT_TYPE, file.content_type)], file.text).into_response()
}

/// `GET /`: the page; for Ollama's clients, which probe it, a text
pub async fn page(headers: HeaderMap) -> Response {
    let agent = headers.get(header::USER_AGENT).and_then(|agent| agent.to_str().ok()).unwrap_or_default();
    if agent.starts_with("ollama") {
        return "Ollama is running".into_response();
    }
    respond(&PAGE, &headers)
}

/// `GET /assets/{name}`: a file of the page
///
/// # Errors
/// No such file.
pub async fn asset(PathParams(name): PathParams<String>, headers: HeaderMap) -> Result<Response, HttpError> {
    let file = ASSETS.iter().find(|file| file.name == name);
    let file = file.ok_or_else(|| ApiError::no_path("GET", &format!("/assets/{name}")))?;
    Ok(respond(file, &headers))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn all_files_are_embedded() {
        let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/../../web/demo/assets");
        let entries = std::fs::read_dir(directory).unwrap();
        let mut found: BTreeSet<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        // sent as backend.js, in place of the demo's
        assert!(found.remove("backend-server.js"));
        assert_eq!(ASSETS.iter().map(|file| file.name.to_string()).collect::<BTreeSet<_>>(), found);
    }
}

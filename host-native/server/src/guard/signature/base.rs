//! Components of messages, and the signature base (RFC 9421, section 2).

use std::fmt;

use axum::http::header::HOST;
use axum::http::uri::Scheme;
use axum::http::{HeaderMap, HeaderName, Method, StatusCode, Uri};
use sfv::{BareItem, InnerList, Item, ItemSerializer, ListSerializer, StringRef, key_ref};

use super::field::excerpt;

/// Most components in a signature.
const MAX_COMPONENTS: usize = 64;
const DERIVED: [&str; 8] =
    ["@authority", "@method", "@path", "@query", "@request-target", "@scheme", "@status", "@target-uri"];

/// A request as the client sent it: with the URI before any router changed it.
#[derive(Debug, Clone, Copy)]
pub struct Request<'a> {
    pub method: &'a Method,
    pub uri: &'a Uri,
    pub headers: &'a HeaderMap,
    /// Used if the URI has none, as in HTTP/1.1.
    pub scheme: &'a Scheme,
    /// Whether a body follows, even an empty one; then `content-digest` has to be signed.
    pub has_body: bool,
}

/// A response before it is signed.
#[derive(Debug, Clone, Copy)]
pub struct Response<'a> {
    pub status: StatusCode,
    pub headers: &'a HeaderMap,
}

/// What is signed: a request, or a response with its request.
#[derive(Clone, Copy)]
pub(super) enum Message<'a> {
    Request(Request<'a>),
    Response(Response<'a>, Request<'a>),
}

/// A component that a signature covers: a derived one (`@method`) or a header field.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Component {
    name: String,
    /// `;req`: of the request, in the signature of a response.
    of_request: bool,
}

/// The signature base cannot be built.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum BaseError {
    #[error("component {component}: expected a string, optionally with the parameter \"req\"")]
    NotAComponent { component: String },
    #[error("component {name:?}: expected a header name in lower case or one of {}", DERIVED.join(", "))]
    Name { name: String },
    #[error("component {component}: covered twice")]
    Twice { component: Component },
    #[error("component {component}: this message has none")]
    Absent { component: Component },
    #[error("component {component}: found control or non-ASCII characters")]
    Characters { component: Component },
    #[error("found {found} components, expected at most {MAX_COMPONENTS}")]
    Many { found: usize },
}

impl Component {
    /// # Errors
    /// If the name is no supported derived component and no header name in lower case.
    pub fn new(name: &str) -> Result<Component, BaseError> {
        let is_field = || {
            let no_upper_case = !name.bytes().any(|b| b.is_ascii_uppercase());
            no_upper_case && HeaderName::from_bytes(name.as_bytes()).is_ok()
        };
        if DERIVED.contains(&name) || is_field() {
            return Ok(Component { name: name.into(), of_request: false });
        }
        Err(BaseError::Name { name: excerpt(name) })
    }

    /// The same component of the request, for the signature of a response.
    #[must_use]
    pub fn of_request(self) -> Component {
        Component { of_request: true, ..self }
    }

    pub fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn parse(item: &Item) -> Result<Component, BaseError> {
        let wrong = || {
            let text = ItemSerializer::new().bare_item(&item.bare_item).parameters(&item.params).finish();
            BaseError::NotAComponent { component: excerpt(&text) }
        };
        let name = item.bare_item.as_string().ok_or_else(wrong)?;
        let component = Component::new(name.as_str())?;
        match item.params.as_slice().iter().map(|(key, value)| (key.as_str(), value)).collect::<Vec<_>>()[..] {
            [] => Ok(component),
            [("req", BareItem::Boolean(true))] => Ok(component.of_request()),
            _ => Err(wrong()),
        }
    }

    pub(super) fn item(&self) -> Result<Item, BaseError> {
        let name = StringRef::from_str(&self.name).map_err(|_| BaseError::Name { name: excerpt(&self.name) })?;
        let mut item = Item::new(name);
        if self.of_request {
            item.params.insert(key_ref("req").to_owned(), true.into());
        }
        Ok(item)
    }
}

/// As in the signature base: `"@method";req`.
impl fmt::Display for Component {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\"{}", self.name, if self.of_request { ";req" } else { "" })
    }
}

/// Components of `Signature-Input`.
///
/// # Errors
/// If one is unknown or occurs twice, or there are too many.
pub(super) fn components(list: &InnerList) -> Result<Vec<Component>, BaseError> {
    if list.items.len() > MAX_COMPONENTS {
        return Err(BaseError::Many { found: list.items.len() });
    }
    let mut components = Vec::with_capacity(list.items.len());
    for item in &list.items {
        let component = Component::parse(item)?;
        if components.contains(&component) {
            return Err(BaseError::Twice { component });
        }
        components.push(component);
    }
    Ok(components)
}

/// The signature base: one line `IDENTIFIER: VALUE` per component, then `"@signature-params": LIST` without a line
/// feed.
///
/// # Errors
/// If the message has not a component, or its value has characters that the base cannot hold.
pub(super) fn signature_base(message: &Message<'_>, list: &InnerList) -> Result<String, BaseError> {
    let mut base = String::new();
    for component in components(list)? {
        let value = value(message, &component).ok_or_else(|| BaseError::Absent { component: component.clone() })?;
        if !value.bytes().all(|b| matches!(b, b' '..=b'~' | b'\t')) {
            return Err(BaseError::Characters { component });
        }
        base += &format!("{component}: {value}\n");
    }
    Ok(base + "\"@signature-params\": " + &serialize(list))
}

/// A list with its parameters, as in `Signature-Input` and `@signature-params`.
pub(super) fn serialize(list: &InnerList) -> String {
    let mut text = String::new();
    let mut serializer = ListSerializer::with_buffer(&mut text);
    let mut inner = serializer.inner_list();
    inner.items(&list.items);
    let _ = inner.finish().parameters(&list.params);
    text
}

fn value(message: &Message<'_>, component: &Component) -> Option<String> {
    let name = component.name.as_str();
    match (message, component.of_request) {
        (Message::Request(request), false) | (Message::Response(_, request), true) => request_value(request, name),
        (Message::Response(response, _), false) if name == "@status" => Some(response.status.as_str().into()),
        (Message::Response(response, _), false) => field_value(response.headers, name),
        (Message::Request(_), true) => None,
    }
}

fn request_value(request: &Request<'_>, name: &str) -> Option<String> {
    let uri = request.uri;
    // empty only in the authority form of CONNECT
    let path = Some(uri.path()).filter(|path| !path.is_empty());
    let query = uri.query().map(|query| format!("?{query}")).unwrap_or_default();
    Some(match name {
        "@method" => request.method.as_str().into(),
        "@scheme" => scheme(request).as_str().to_ascii_lowercase(),
        "@authority" => authority(request)?,
        "@path" => path?.into(),
        "@query" if query.is_empty() => "?".into(),
        "@query" => query,
        "@target-uri" => format!("{}://{}{}{query}", scheme(request), authority(request)?, path?),
        // origin form, as no requests to proxies are served
        "@request-target" if request.method == Method::CONNECT => authority(request)?,
        "@request-target" => format!("{}{query}", path?),
        name => return field_value(request.headers, name),
    })
}

fn scheme<'a>(request: &Request<'a>) -> &'a Scheme {
    request.uri.scheme().unwrap_or(request.scheme)
}

/// Host and port in lower case, without the default port. `None` if there is no single one.
fn authority(request: &Request<'_>) -> Option<String> {
    let mut hosts = request.headers.get_all(HOST).iter();
    let host = hosts.next().map(|value| value.to_str());
    if hosts.next().is_some() {
        return None;
    }
    let found = match (request.uri.authority(), host) {
        (Some(authority), _) => authority.as_str(),
        (None, Some(Ok(host))) => host.trim(),
        (None, _) => return None,
    };
    if found.is_empty() || found.contains('@') {
        return None;
    }
    let found = found.to_ascii_lowercase();
    let default_port = if *scheme(request) == Scheme::HTTPS { ":443" } else { ":80" };
    Some(found.strip_suffix(default_port).unwrap_or(&found).into())
}

/// All lines of a field, joined by commas. Bytes that are not UTF-8 become U+FFFD, which the base refuses.
fn field_value(headers: &HeaderMap, name: &str) -> Option<String> {
    if name.starts_with('@') || !headers.contains_key(name) {
        return None;
    }
    let lines = headers.get_all(name).iter().map(|value| String::from_utf8_lossy(value.as_bytes()));
    Some(lines.map(|line| line.trim_matches([' ', '\t']).to_owned()).collect::<Vec<_>>().join(", "))
}

#[cfg(test)]
mod tests;

//! Signatures of requests and responses.

use std::time::{SystemTime, UNIX_EPOCH};

use axum::http::header::InvalidHeaderValue;
use axum::http::{HeaderMap, HeaderValue};
use hmac::{Hmac, KeyInit, Mac};
use sfv::{BareItem, DictSerializer, InnerList, Integer, KeyRef, StringRef, key_ref};
use sha2::Sha256;

use super::MIN_SECRET_BYTES;
use super::base::{BaseError, Component, Message, Request, Response, serialize, signature_base};
use super::digest::CONTENT_DIGEST;

/// Parameters of a signature.
#[derive(Debug, Clone, Copy)]
pub struct Parameters<'a> {
    /// Key in `Signature` and `Signature-Input`: lower-case letters, digits, `_-.*`.
    pub label: &'a str,
    pub key_id: &'a str,
    pub created: SystemTime,
    pub expires: Option<SystemTime>,
    pub nonce: Option<&'a str>,
    /// Application that the signature is for.
    pub tag: Option<&'a str>,
}

/// Headers of a signed message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SignatureHeaders {
    pub signature_input: HeaderValue,
    pub signature: HeaderValue,
}

/// A message cannot be signed.
#[derive(Debug, thiserror::Error)]
pub enum SignError {
    #[error(transparent)]
    Base(#[from] BaseError),
    #[error("parameter {name}: {error}")]
    Parameter { name: &'static str, error: String },
    #[error("found a secret of {found} bytes, expected at least {MIN_SECRET_BYTES}")]
    ShortSecret { found: usize },
    #[error(transparent)]
    Header(#[from] InvalidHeaderValue),
}

impl SignatureHeaders {
    /// Replaces the headers of the same names.
    pub fn insert_into(self, headers: &mut HeaderMap) {
        headers.insert("signature-input", self.signature_input);
        headers.insert("signature", self.signature);
    }
}

/// Headers of a response that its signature covers, if it has them.
const RESPONSE_HEADERS: [&str; 2] = ["content-type", CONTENT_DIGEST];

/// Signs a response: `@status`, its [`RESPONSE_HEADERS`], and of its request `@method`, `@path` and `signature`, if it has
/// one, so that the response belongs to this request.
///
/// # Errors
/// If a parameter has other characters than printable ASCII, or the secret is short.
pub fn sign_response(
    response: Response<'_>,
    request: Request<'_>,
    parameters: &Parameters<'_>,
    secret: &[u8],
) -> Result<SignatureHeaders, SignError> {
    let own = RESPONSE_HEADERS.into_iter().filter(|name| response.headers.contains_key(*name));
    let mut components = ["@status"].into_iter().chain(own).map(Component::new).collect::<Result<Vec<_>, _>>()?;
    let signature = request.headers.contains_key("signature").then_some("signature");
    for name in ["@method", "@path"].into_iter().chain(signature) {
        components.push(Component::new(name)?.of_request());
    }
    sign(&Message::Response(response, request), &components, parameters, secret)
}

/// Signs these components of a request, as a client does, with the fields of its headers.
///
/// # Errors
/// As [`sign_response`]; if the message has not a component.
#[cfg(test)]
pub fn sign_request(
    request: Request<'_>,
    components: &[Component],
    parameters: &Parameters<'_>,
    secret: &[u8],
) -> Result<SignatureHeaders, SignError> {
    sign(&Message::Request(request), components, parameters, secret)
}

/// The components of a request that [`super::Verifier`] requires.
///
/// # Errors
/// Never; the constructor of components is passed on.
pub fn request_components(request: &Request<'_>) -> Result<Vec<Component>, BaseError> {
    let query = request.uri.query().map(|_| "@query");
    let digest = request.has_body.then_some(CONTENT_DIGEST);
    ["@method", "@path"].into_iter().chain(query).chain(digest).map(Component::new).collect()
}

fn sign(
    message: &Message<'_>,
    components: &[Component],
    parameters: &Parameters<'_>,
    secret: &[u8],
) -> Result<SignatureHeaders, SignError> {
    if secret.len() < MIN_SECRET_BYTES {
        return Err(SignError::ShortSecret { found: secret.len() });
    }
    let invalid = |name| move |e: sfv::Error| SignError::Parameter { name, error: e.to_string() };
    let label = KeyRef::from_str(parameters.label).map_err(invalid("label"))?;
    let items = components.iter().map(Component::item).collect::<Result<Vec<_>, _>>()?;
    let mut list = InnerList::new(items);
    let string = |name, text| Ok::<BareItem, SignError>(StringRef::from_str(text).map_err(invalid(name))?.into());
    list.params.insert(key_ref("created").to_owned(), seconds("created", parameters.created)?);
    if let Some(expires) = parameters.expires {
        list.params.insert(key_ref("expires").to_owned(), seconds("expires", expires)?);
    }
    if let Some(nonce) = parameters.nonce {
        list.params.insert(key_ref("nonce").to_owned(), string("nonce", nonce)?);
    }
    list.params.insert(key_ref("keyid").to_owned(), string("keyid", parameters.key_id)?);
    if let Some(tag) = parameters.tag {
        list.params.insert(key_ref("tag").to_owned(), string("tag", tag)?);
    }
    let base = signature_base(message, &list)?;
    let short = |_| SignError::ShortSecret { found: secret.len() };
    let mac = Hmac::<Sha256>::new_from_slice(secret).map_err(short)?.chain_update(&base).finalize().into_bytes();
    let mut signature = String::new();
    let _ = DictSerializer::with_buffer(&mut signature).bare_item(label, &mac[..]);
    Ok(SignatureHeaders {
        signature_input: HeaderValue::try_from(format!("{label}={}", serialize(&list)))?,
        signature: HeaderValue::try_from(signature)?,
    })
}

fn seconds(name: &'static str, time: SystemTime) -> Result<BareItem, SignError> {
    let invalid = |error: String| SignError::Parameter { name, error };
    let seconds = time.duration_since(UNIX_EPOCH).map_err(|e| invalid(e.to_string()))?.as_secs();
    Ok(Integer::try_from(seconds).map_err(|_| invalid(format!("{seconds} s is out of range")))?.into())
}

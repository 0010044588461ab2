//! Verification of signed requests.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use hmac::{Hmac, KeyInit, Mac};
use sfv::{BareItem, InnerList, ListEntry};
use sha2::Sha256;

use super::MIN_SECRET_BYTES;
use super::base::{BaseError, Component, Message, Request, components, signature_base};
use super::digest::{CONTENT_DIGEST, ContentDigest, DigestError};
use super::field::{FieldError, dictionary, excerpt};
use super::replay::{ReplayCache, ReplayError};

const ALGORITHM: &str = "hmac-sha256";
/// Bytes of the longest nonce and key ID.
const MAX_STRING_BYTES: usize = 256;

/// Requirements on the signatures of requests.
#[derive(Debug, Clone)]
pub struct Policy {
    /// Largest difference between `created` and the clock, in whole seconds.
    pub window: Duration,
    /// Nonces of one key in memory, each for up to twice the window; 32 to 64 bytes each.
    pub max_nonces_per_key: usize,
    /// The signature with this label is verified, or with `None` the only one.
    pub label: Option<String>,
    /// The signature with this tag is verified, or with `None` the only one.
    pub tag: Option<String>,
    /// Components besides those that are always required, such as `@authority` if a secret is used with several hosts.
    pub required: Vec<Component>,
}

impl Default for Policy {
    fn default() -> Policy {
        let window = Duration::from_secs(300);
        Policy { window, max_nonces_per_key: 65_536, label: None, tag: None, required: Vec::new() }
    }
}

/// Verifies requests, each once.
pub struct Verifier {
    policy: Policy,
    replay: ReplayCache,
}

/// A request with a valid signature. Its body is not verified yet.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use = "the body has to be checked"]
pub struct Verified {
    pub key_id: String,
    pub label: String,
    /// Seconds since the Unix epoch.
    pub created: u64,
    pub nonce: String,
    pub covered: Vec<Component>,
    pub content_digest: Option<ContentDigest>,
}

/// A request is refused: the client's fault, except [`ReplayError::Full`] (try again later) and `ShortSecret` (the key
/// table). Names at most 64 characters of what the client sent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Field(#[from] FieldError),
    #[error("found the signatures {found:?}, expected one{}", expected(.label, .tag))]
    Labels { found: Vec<String>, label: Option<String>, tag: Option<String> },
    #[error("{header}: {label}: expected {expected}")]
    Member { header: &'static str, label: String, expected: &'static str },
    #[error(transparent)]
    Base(#[from] BaseError),
    #[error("the signature does not cover {component}")]
    NotCovered { component: Component },
    #[error("signature parameter {name}: found {found}, expected {expected}")]
    Parameter { name: &'static str, found: String, expected: String },
    #[error(
        "created at {created}, but the clock of the server is at {now}; expected a difference of at most {window} s"
    )]
    OutsideWindow { created: u64, now: u64, window: u64 },
    #[error("expired at {expires}, and the clock of the server is at {now}")]
    Expired { expires: u64, now: u64 },
    #[error("unknown key ID {key_id:?}")]
    UnknownKey { key_id: String },
    #[error("the secret of the key {key_id:?} has {found} bytes, expected at least {MIN_SECRET_BYTES}")]
    ShortSecret { key_id: String, found: usize },
    #[error("the signature is not that of this request with the secret of its key")]
    Mismatch,
    #[error(transparent)]
    Replay(#[from] ReplayError),
    #[error(transparent)]
    Digest(#[from] DigestError),
}

fn expected(label: &Option<String>, tag: &Option<String>) -> String {
    let label = label.iter().map(|label| format!(" with the label {label:?}"));
    label.chain(tag.iter().map(|tag| format!(" with the tag {tag:?}"))).collect()
}

impl Verifier {
    /// A verifier that knows no nonces. A request from before a restart can be replayed while it is in the window:
    /// see [`Verifier::started_at`].
    #[cfg(test)]
    pub fn new(policy: Policy) -> Verifier {
        Verifier { replay: ReplayCache::new(policy.max_nonces_per_key), policy }
    }

    /// Also refuses requests created at `start` or before: nothing else tells whether they were seen before a restart.
    /// Clients whose clocks are slow by n seconds are refused for n seconds.
    pub fn started_at(policy: Policy, start: SystemTime) -> Verifier {
        let until = seconds(start).saturating_add(policy.window.as_secs());
        Verifier { replay: ReplayCache::new(policy.max_nonces_per_key).forgotten_until(until), policy }
    }

    /// Verifies the signature of a request: it covers `@method`, `@path`, `@query` if the URI has a query, and
    /// `content-digest` if there is a body; it has the parameters `created`, `nonce` and `keyid`; and it is fresh. The
    /// nonce is used up if all else is valid. `secret`: from key ID to secret.
    ///
    /// # Errors
    /// Why the request is refused.
    pub fn verify(
        &self,
        request: Request<'_>,
        secret: &dyn Fn(&str) -> Option<Arc<[u8]>>,
        now: SystemTime,
    ) -> Result<Verified, Error> {
        let inputs = dictionary(request.headers, "signature-input")?;
        let signatures = dictionary(request.headers, "signature")?;
        let (label, list) = self.select(&inputs)?;
        let covered = components(list)?;
        self.check_covered(&request, &covered)?;
        let parameters = SignatureParameters::parse(list)?;
        let now = seconds(now);
        parameters.check_time(now, self.policy.window.as_secs())?;
        let SignatureParameters { created, key_id, nonce, .. } = parameters;
        let has_digest = covered.iter().any(|component| component.name() == CONTENT_DIGEST);
        let content_digest = has_digest.then(|| ContentDigest::parse(request.headers)).transpose()?;

        let signature = match signatures.get(label) {
            Some(ListEntry::Item(item)) => item.bare_item.as_byte_sequence(),
            _ => None,
        };
        let no_signature =
            || Error::Member { header: "Signature", label: excerpt(label), expected: "a signature as :BASE64:" };
        let signature = signature.ok_or_else(no_signature)?;
        let secret = secret(key_id).ok_or_else(|| Error::UnknownKey { key_id: excerpt(key_id) })?;
        let short = || Error::ShortSecret { key_id: excerpt(key_id), found: secret.len() };
        if secret.len() < MIN_SECRET_BYTES {
            return Err(short());
        }
        let base = signature_base(&Message::Request(request), list)?;
        let mac = Hmac::<Sha256>::new_from_slice(&secret).map_err(|_| short())?.chain_update(&base);
        // in constant time
        mac.verify_slice(signature).map_err(|_| Error::Mismatch)?;

        let forget_after = created.saturating_add(self.policy.window.as_secs());
        self.replay.consume(key_id, nonce, forget_after, now)?;
        Ok(Verified {
            key_id: key_id.into(),
            label: label.into(),
            created,
            nonce: nonce.into(),
            covered,
            content_digest,
        })
    }

    /// The only signature with the label and tag of the policy.
    fn select<'a>(&self, inputs: &'a sfv::Dictionary) -> Result<(&'a str, &'a InnerList), Error> {
        let Policy { label, tag, .. } = &self.policy;
        let has_tag = |entry: &ListEntry, tag: &str| {
            let ListEntry::InnerList(list) = entry else { return false };
            list.params.get("tag").and_then(BareItem::as_string).is_some_and(|found| found.as_str() == tag)
        };
        let mut candidates = inputs.iter().filter(|(key, entry)| {
            label.as_deref().is_none_or(|label| key.as_str() == label)
                && tag.as_deref().is_none_or(|tag| has_tag(entry, tag))
        });
        let (Some((key, entry)), None) = (candidates.next(), candidates.next()) else {
            let found = inputs.keys().take(8).map(|key| excerpt(key.as_str())).collect();
            return Err(Error::Labels { found, label: label.clone(), tag: tag.clone() });
        };
        match entry {
            ListEntry::InnerList(list) => Ok((key.as_str(), list)),
            ListEntry::Item(_) => {
                let expected = "a list of components in parentheses";
                Err(Error::Member { header: "Signature-Input", label: excerpt(key.as_str()), expected })
            }
        }
    }

    fn check_covered(&self, request: &Request<'_>, covered: &[Component]) -> Result<(), Error> {
        let always = super::sign::request_components(request)?;
        match always.iter().chain(&self.policy.required).find(|component| !covered.contains(component)) {
            Some(component) => Err(Error::NotCovered { component: component.clone() }),
            None => Ok(()),
        }
    }
}

impl Verified {
    /// # Errors
    /// If the body has not the digest that was signed, or is not empty without one.
    pub fn check_body(&self, body: &[u8]) -> Result<(), DigestError> {
        match &self.content_digest {
            Some(digest) => digest.check(body),
            None if body.is_empty() => Ok(()),
            None => Err(DigestError::UnexpectedBody { n_bytes: body.len() }),
        }
    }
}

struct SignatureParameters<'a> {
    created: u64,
    expires: Option<u64>,
    key_id: &'a str,
    nonce: &'a str,
}

impl<'a> SignatureParameters<'a> {
    /// Other parameters are signed too, and ignored.
    fn parse(list: &'a InnerList) -> Result<SignatureParameters<'a>, Error> {
        let created = time(list, "created")?.ok_or_else(|| wrong(list, "created", "seconds since the Unix epoch"))?;
        if list.params.get("alg").is_some_and(|alg| alg.as_string().is_none_or(|alg| alg.as_str() != ALGORITHM)) {
            return Err(wrong(list, "alg", "\"hmac-sha256\""));
        }
        let (key_id, nonce) = (string(list, "keyid")?, string(list, "nonce")?);
        Ok(SignatureParameters { created, expires: time(list, "expires")?, key_id, nonce })
    }

    fn check_time(&self, now: u64, window: u64) -> Result<(), Error> {
        if self.created.abs_diff(now) > window {
            return Err(Error::OutsideWindow { created: self.created, now, window });
        }
        match self.expires {
            Some(expires) if expires < now => Err(Error::Expired { expires, now }),
            _ => Ok(()),
        }
    }
}

fn time(list: &InnerList, name: &'static str) -> Result<Option<u64>, Error> {
    let Some(value) = list.params.get(name) else { return Ok(None) };
    let seconds = value.as_integer().and_then(|value| u64::try_from(value).ok());
    seconds.map(Some).ok_or_else(|| wrong(list, name, "seconds since the Unix epoch"))
}

fn string<'a>(list: &'a InnerList, name: &'static str) -> Result<&'a str, Error> {
    let value = list.params.get(name).and_then(BareItem::as_string).map(|value| value.as_str());
    value.filter(|value| (1..=MAX_STRING_BYTES).contains(&value.len())).ok_or_else(|| {
        let expected = format!("a string of 1 to {MAX_STRING_BYTES} characters");
        wrong(list, name, &expected)
    })
}

fn wrong(list: &InnerList, name: &'static str, expected: &str) -> Error {
    let text = |value| sfv::ItemSerializer::new().bare_item(value).finish();
    let found = list.params.get(name).map_or_else(|| "none".into(), |value| excerpt(&text(value)));
    Error::Parameter { name, found, expected: expected.into() }
}

/// Seconds since the Unix epoch.
fn seconds(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests;

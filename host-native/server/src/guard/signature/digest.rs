//! `Content-Digest` (RFC 9530): SHA-256 and SHA-512 of a body.

use axum::http::{HeaderMap, HeaderValue};
use sfv::{DictSerializer, ListEntry, key_ref};
use sha2::{Digest, Sha256, Sha512};
use subtle::ConstantTimeEq;

use super::field::{FieldError, dictionary};

pub(super) const CONTENT_DIGEST: &str = "content-digest";

/// Digests of a body, at least one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ContentDigest {
    sha256: Option<[u8; 32]>,
    sha512: Option<[u8; 64]>,
}

/// `Content-Digest` is invalid, or is not that of the body.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DigestError {
    #[error(transparent)]
    Field(#[from] FieldError),
    #[error("Content-Digest: {algorithm}: expected {expected} bytes as :BASE64:")]
    Value { algorithm: &'static str, expected: usize },
    #[error("Content-Digest: found no known algorithm, expected sha-256 or sha-512")]
    NoKnownAlgorithm,
    #[error("Content-Digest: {algorithm} is not that of the body of {n_bytes} bytes")]
    Mismatch { algorithm: &'static str, n_bytes: usize },
    #[error("found a body of {n_bytes} bytes, expected none without Content-Digest")]
    UnexpectedBody { n_bytes: usize },
}

impl ContentDigest {
    /// The SHA-256 of a body.
    pub fn sha256(body: &[u8]) -> ContentDigest {
        ContentDigest { sha256: Some(Sha256::digest(body).into()), sha512: None }
    }

    /// The SHA-512 of a body.
    #[cfg(test)]
    pub fn sha512(body: &[u8]) -> ContentDigest {
        ContentDigest { sha256: None, sha512: Some(Sha512::digest(body).into()) }
    }

    /// Parses the header; other algorithms are ignored.
    ///
    /// # Errors
    /// If the header is missing or invalid, a digest has another length, or there is neither SHA-256 nor SHA-512.
    pub fn parse(headers: &HeaderMap) -> Result<ContentDigest, DigestError> {
        let fields = dictionary(headers, CONTENT_DIGEST)?;
        let sha256 = fields.get("sha-256").map(|entry| bytes(entry, "sha-256")).transpose()?;
        let sha512 = fields.get("sha-512").map(|entry| bytes(entry, "sha-512")).transpose()?;
        if sha256.is_none() && sha512.is_none() {
            return Err(DigestError::NoKnownAlgorithm);
        }
        Ok(ContentDigest { sha256, sha512 })
    }

    /// # Errors
    /// If one of the digests is not that of the body.
    pub fn check(&self, body: &[u8]) -> Result<(), DigestError> {
        let n_bytes = body.len();
        if self.sha256.is_some_and(|digest| !bool::from(digest[..].ct_eq(&Sha256::digest(body)[..]))) {
            return Err(DigestError::Mismatch { algorithm: "sha-256", n_bytes });
        }
        if self.sha512.is_some_and(|digest| !bool::from(digest[..].ct_eq(&Sha512::digest(body)[..]))) {
            return Err(DigestError::Mismatch { algorithm: "sha-512", n_bytes });
        }
        Ok(())
    }

    /// Value of the header.
    ///
    /// # Errors
    /// Never; the constructor of header values is passed on.
    pub fn header_value(&self) -> Result<HeaderValue, axum::http::header::InvalidHeaderValue> {
        let mut text = String::new();
        let mut fields = DictSerializer::with_buffer(&mut text);
        if let Some(digest) = &self.sha256 {
            let _ = fields.bare_item(key_ref("sha-256"), &digest[..]);
        }
        if let Some(digest) = &self.sha512 {
            let _ = fields.bare_item(key_ref("sha-512"), &digest[..]);
        }
        HeaderValue::try_from(text)
    }
}

fn bytes<const N: usize>(entry: &ListEntry, algorithm: &'static str) -> Result<[u8; N], DigestError> {
    let bytes = match entry {
        ListEntry::Item(item) => item.bare_item.as_byte_sequence(),
        ListEntry::InnerList(_) => None,
    };
    bytes.and_then(|bytes| bytes.try_into().ok()).ok_or(DigestError::Value { algorithm, expected: N })
}

#[cfg(test)]
mod tests {
    use super::*;

    const BODY: &[u8] = b"{\"hello\": \"world\"}\n";
    const SHA_256: &str = "sha-256=:RK/0qy18MlBSVnWgjwz6lZEWjP/lF5HF9bvEF8FabDg=:";
    const SHA_512: &str =
        "sha-512=:YMAam51Jz/jOATT6/zvHrLVgOYTGFy1d6GJiOHTohq4yP+pgk4vf2aCsyRZOtw8MjkM7iw7yZ/WkppmM44T3qg==:";
    const EMPTY: &str = "sha-256=:47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=:";

    fn parse(text: &str) -> Result<ContentDigest, DigestError> {
        let headers = [(CONTENT_DIGEST.parse().unwrap(), text.parse().unwrap())];
        ContentDigest::parse(&HeaderMap::from_iter(headers))
    }

    /// RFC 9530, sections 2 and B.1, B.2.
    #[test]
    fn examples_of_rfc_9530() {
        assert_eq!(parse(SHA_256), Ok(ContentDigest::sha256(BODY)));
        assert_eq!(parse(SHA_512), Ok(ContentDigest::sha512(BODY)));
        assert_eq!(ContentDigest::sha256(BODY).header_value().unwrap(), SHA_256);
        assert_eq!(ContentDigest::sha512(BODY).header_value().unwrap(), SHA_512);
        assert_eq!(ContentDigest::sha256(b"").header_value().unwrap(), EMPTY);
        let both = parse(&format!("{SHA_256}, {SHA_512}")).unwrap();
        assert_eq!(both.check(BODY), Ok(()));
        assert_eq!(both.header_value().unwrap(), format!("{SHA_256}, {SHA_512}"));
        assert_eq!(parse(EMPTY).unwrap().check(b""), Ok(()));
    }

    #[test]
    fn other_bodies_are_refused() {
        let mismatch = |algorithm, n_bytes| Err(DigestError::Mismatch { algorithm, n_bytes });
        assert_eq!(parse(SHA_256).unwrap().check(&BODY[1..]), mismatch("sha-256", 18));
        assert_eq!(parse(SHA_512).unwrap().check(b""), mismatch("sha-512", 0));
        let other = parse(&format!("{EMPTY}, {SHA_512}")).unwrap();
        assert_eq!((other.check(BODY), other.check(b"")), (mismatch("sha-256", 19), mismatch("sha-512", 0)));
    }

    #[test]
    fn unknown_algorithms_are_ignored() {
        assert_eq!(parse(&format!("md5=:AA==:, {SHA_256};x=1, unixsum=7")), Ok(ContentDigest::sha256(BODY)));
        assert_eq!(parse("md5=:AA==:"), Err(DigestError::NoKnownAlgorithm));
        for wrong in ["sha-256=:AA==:", "sha-256=x", "sha-256", "sha-256=(:AA==:)", "sha-256=::"] {
            assert_eq!(parse(wrong), Err(DigestError::Value { algorithm: "sha-256", expected: 32 }), "{wrong}");
        }
        for wrong in ["", "sha-256=:?:", "SHA-256=:AA==:", &format!("{SHA_256}, {EMPTY}")] {
            assert!(matches!(parse(wrong), Err(DigestError::Field(_))), "{wrong}");
        }
        assert!(matches!(ContentDigest::parse(&HeaderMap::new()), Err(DigestError::Field(FieldError::Missing { .. }))));
    }
}

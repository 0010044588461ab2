//! Header fields that are dictionaries of structured fields (RFC 9651).

use std::convert::Infallible;

use axum::http::HeaderMap;
use sfv::visitor::{DictionaryVisitor, EntryVisitor};
use sfv::{Dictionary, KeyRef, Parser};

/// Bytes of the longest field, all of its lines together.
const MAX_FIELD_BYTES: usize = 8192;

/// A header field is missing or invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FieldError {
    #[error("the header {name} is missing")]
    Missing { name: &'static str },
    #[error("the header {name} has {found} bytes, expected at most {MAX_FIELD_BYTES}")]
    Long { name: &'static str, found: usize },
    #[error("the header {name} is no dictionary of structured fields: {error}")]
    Invalid { name: &'static str, error: String },
}

/// Parses all lines of a field. Unlike RFC 9651, a key that occurs twice is an error: signer and verifier must not
/// take different values.
///
/// # Errors
/// If the field is missing, empty, too long, or invalid.
pub(super) fn dictionary(headers: &HeaderMap, name: &'static str) -> Result<Dictionary, FieldError> {
    let mut text = Vec::new();
    for value in headers.get_all(name) {
        if !text.is_empty() {
            text.extend_from_slice(b", ");
        }
        text.extend_from_slice(value.as_bytes());
    }
    if text.len() > MAX_FIELD_BYTES {
        return Err(FieldError::Long { name, found: text.len() });
    }
    let parsed = Parser::new(&text).parse_dictionary_with_visitor(UniqueKeys(Dictionary::new()));
    let dictionary = parsed.map_err(|e| FieldError::Invalid { name, error: e.to_string() })?;
    if dictionary.is_empty() {
        return Err(FieldError::Missing { name });
    }
    Ok(dictionary)
}

/// At most 64 characters of a text from a client, for an error.
pub(super) fn excerpt(text: &str) -> String {
    text.chars().take(64).collect()
}

struct UniqueKeys(Dictionary);

#[derive(Debug, thiserror::Error)]
#[error("found the key {0:?} twice")]
struct DuplicateKey(String);

impl<'de> DictionaryVisitor<'de> for UniqueKeys {
    type Out = Dictionary;
    type Error = DuplicateKey;

    fn entry(&mut self, key: &'de KeyRef) -> Result<impl EntryVisitor<'de>, DuplicateKey> {
        if self.0.contains_key(key) {
            return Err(DuplicateKey(excerpt(key.as_str())));
        }
        DictionaryVisitor::entry(&mut self.0, key).map_err(|e: Infallible| match e {})
    }

    fn finish(self) -> Result<Dictionary, DuplicateKey> {
        Ok(self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(lines: &[&str]) -> Result<Dictionary, FieldError> {
        let mut headers = HeaderMap::new();
        for line in lines {
            headers.append("signature", line.parse().unwrap());
        }
        dictionary(&headers, "signature")
    }

    #[test]
    fn lines_are_combined_and_keys_unique() {
        assert_eq!(parse(&["a=1", "b=2, c"]).unwrap().len(), 3);
        for lines in [&["a=1, a=2"][..], &["a=1", "b", "a=1"], &["a=(1)", "a"]] {
            let FieldError::Invalid { error, .. } = parse(lines).unwrap_err() else { panic!("{lines:?}") };
            assert!(error.contains("\"a\" twice"), "{error}");
        }
        assert!(matches!(parse(&[]), Err(FieldError::Missing { .. })));
        assert!(matches!(parse(&[""]), Err(FieldError::Missing { .. })));
        for wrong in ["A=1", "a=", "a=1,", "a=\"", "a=:?:", "a b", "é=1"] {
            assert!(matches!(parse(&[wrong]), Err(FieldError::Invalid { .. })), "{wrong}");
        }
        assert!(matches!(parse(&[&"a".repeat(8193)]), Err(FieldError::Long { found: 8193, .. })));
    }
}

//! Parses request bodies. An error names the field by its path.

use serde::de::DeserializeOwned;

use crate::error::{ApiError, MAX_QUOTE, quoted, shortened};
use crate::whole::Whole;

/// A request type that can be parsed from a JSON body. A type with flattened parts parses the same bytes once for each
/// part: through `serde(flatten)`, the path of a wrong field would be lost.
pub trait ParseBody: Sized {
    /// Parses the body.
    ///
    /// # Errors
    /// The first field that is wrong, by its path.
    fn parse_body(json: &[u8]) -> Result<Self, ApiError>;
}

/// Parses JSON. Integers may be written as floats (`5.0`).
///
/// # Errors
/// The first field that is wrong, by its path.
pub fn parse<T: DeserializeOwned>(json: &[u8]) -> Result<T, ApiError> {
    let mut deserializer = serde_json::Deserializer::from_slice(json);
    let value = serde_path_to_error::deserialize(Whole(&mut deserializer)).map_err(|e| {
        let path = e.path().to_string();
        let inner = e.into_inner();
        let text = inner.to_string();
        if !inner.is_data() {
            return ApiError::invalid(format!("the body is not JSON: {text}"));
        }
        let what = text.rsplit_once(" at line ").map_or(text.as_str(), |(what, _)| what);
        // serde's message has what was found and what was expected
        let what = shortened(what.into(), 2 * MAX_QUOTE);
        if path == "." { ApiError::invalid(what) } else { ApiError::param(&path, format!("{}: {what}", quoted(&path))) }
    })?;
    deserializer.end().map_err(|e| ApiError::invalid(format!("the body is not JSON: {e}")))?;
    Ok(value)
}

/// Implements [`ParseBody`](crate::parse::ParseBody) for types without flattened parts.
#[macro_export]
macro_rules! parse_whole {
    ($($kind:ty),*) => {$(
        impl $crate::parse::ParseBody for $kind {
            fn parse_body(json: &[u8]) -> Result<Self, $crate::error::ApiError> {
                $crate::parse::parse(json)
            }
        }
    )*};
}

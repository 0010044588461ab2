//! Strings that the chunks of a stream share.

use std::sync::Arc;

use serde::Serialize;

/// A string that is shared by the chunks of a stream; serialised as the string.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedStr(pub Arc<str>);

impl Serialize for SharedStr {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

impl From<&str> for SharedStr {
    fn from(text: &str) -> SharedStr {
        SharedStr(text.into())
    }
}

//! Strings that many chunks of a stream share.

use std::sync::Arc;

use serde::Serialize;

/// A shared string.
#[derive(Debug, Clone)]
pub struct Name(pub Arc<str>);

impl Serialize for Name {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

/// Makes a string shared.
pub fn shared(text: &str) -> Name {
    Name(text.into())
}

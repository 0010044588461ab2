//! Sizes in settings and arguments.

use bytesize::ByteSize;

/// A size in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Bytes(pub u64);

impl Bytes {
    /// # Errors
    /// What was found and what was expected.
    pub fn parse(text: &str) -> Result<Bytes, String> {
        let expected = || format!("found {text:?}, expected a size in bytes, such as 4194304, 512MiB or 4GB");
        let text = text.trim();
        // a letter alone is a binary unit too
        let binary = if text.ends_with(['K', 'M', 'G', 'T']) { format!("{text}iB") } else { text.into() };
        // a size that overflows parses as the maximum
        let size = binary.parse().ok().filter(|ByteSize(n)| *n < u64::MAX);
        size.map(|ByteSize(n)| Bytes(n)).ok_or_else(expected)
    }
}

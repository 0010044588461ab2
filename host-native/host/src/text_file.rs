//! Files of text.

use std::fs;
use std::path::Path;

use crate::error::Failure;

/// The text of a file, which must be UTF-8.
///
/// # Errors
/// If it cannot be read, or where it is not UTF-8.
pub fn text_file(path: &Path) -> Result<String, Failure> {
    let bytes = fs::read(path).map_err(|source| Failure::File { path: path.into(), source })?;
    utf8(&path.display().to_string(), bytes)
}

/// Decodes UTF-8; `name` is the source in the error.
///
/// # Errors
/// The position of the first invalid byte.
pub fn utf8(name: &str, bytes: Vec<u8>) -> Result<String, Failure> {
    String::from_utf8(bytes).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        Failure::Usage(format!("{name}: invalid UTF-8 at byte {at}; expected text in UTF-8"))
    })
}

//! What can go wrong: [`LoadError`] is the file's fault, [`RequestError`] the caller's.
//!
//! Variants carry data, so that hosts can map them to exit codes, HTTP statuses and JavaScript errors.

use alloc::string::String;
use alloc::vec::Vec;

use thiserror::Error;

/// A model file that cannot be used, and why.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The container is malformed at a byte offset.
    #[error("GGUF: {what} at byte {at}: found {found}, expected {expected}")]
    Gguf {
        /// Absolute byte offset in the file.
        at: u64,
        /// The thing being read, e.g. `tensor count`, `length of key`.
        what: &'static str,
        /// What the file holds.
        found: String,
        /// What would be right.
        expected: String,
    },
    /// A metadata key is missing, of the wrong type or out of range.
    #[error("metadata `{key}`: found {found}, expected {expected}")]
    Metadata {
        /// The key.
        key: String,
        /// What the file holds (`nothing` if the key is missing).
        found: String,
        /// What would be right.
        expected: String,
    },
    /// A tensor is missing, or has the wrong shape, type or contents.
    #[error("tensor `{name}`: found {found}, expected {expected}")]
    Tensor {
        /// The tensor's name.
        name: String,
        /// What the file holds (`nothing` if it is missing).
        found: String,
        /// What would be right.
        expected: String,
    },
    /// Something valid that this engine does not do.
    #[error("unsupported {what} `{found}`; known: {}", known.join(", "))]
    Unsupported {
        /// The kind of thing, e.g. `architecture`, `tensor type`.
        what: &'static str,
        /// The name in the file.
        found: String,
        /// The names that would work.
        known: Vec<&'static str>,
    },
    /// The model needs more memory than its budget allows.
    #[error("needs {needed} bytes for {what}, the limit is {limit}")]
    TooLarge {
        /// What the memory is for.
        what: &'static str,
        /// Bytes needed.
        needed: u64,
        /// Bytes allowed.
        limit: u64,
    },
}

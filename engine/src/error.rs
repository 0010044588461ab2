//! What can go wrong: [`LoadError`] is the file's fault, [`RequestError`] the caller's.
//!
//! Variants carry data, so that hosts can map them to exit codes, HTTP statuses and JavaScript errors.

use alloc::collections::TryReserveError;
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

/// Memory to run a model in that is not there, or that it may not have.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// There is not enough.
    #[error("not enough memory")]
    Exhausted(#[from] TryReserveError),
    /// The model's file asks for more than [`Model::max_scratch_bytes`](crate::model::Model::max_scratch_bytes).
    #[error("batches of {rows} tokens take {needed} bytes of working memory, the limit is {limit}")]
    Limit {
        /// Tokens of a batch.
        rows: usize,
        /// Bytes needed.
        needed: usize,
        /// Bytes allowed.
        limit: usize,
    },
}

/// A request that cannot be taken, and why. Nothing was computed.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum RequestError {
    /// There is nothing to continue.
    #[error("the prompt is empty")]
    EmptyPrompt,
    /// Prompt and answer do not fit the context.
    #[error("{prompt} prompt tokens and {max_tokens} to generate do not fit the context of {n_ctx} tokens")]
    ContextLength {
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens to generate, at least.
        max_tokens: usize,
        /// Tokens that fit.
        n_ctx: usize,
    },
    /// The model sees whole texts at once: it embeds, and continues nothing.
    #[error("the model is an encoder: it embeds texts and cannot continue them")]
    Encoder,
    /// There is nothing to embed.
    #[error("the text has no tokens")]
    EmptyText,
    /// A text to be embedded does not fit.
    #[error("the text has {tokens} tokens, the context {n_ctx} and a batch {batch_tokens}")]
    TextLength {
        /// Tokens of the text.
        tokens: usize,
        /// Tokens that a text may have.
        n_ctx: usize,
        /// Tokens that a batch may have.
        batch_tokens: usize,
    },
    /// A token id that the model does not have.
    #[error("token {token} at position {at} is not one of the model's {n_vocab}")]
    Token {
        /// The id.
        token: u32,
        /// Where it stands.
        at: usize,
        /// Ids end here.
        n_vocab: usize,
    },
    /// An option is out of range.
    #[error("{name} is {found}, expected {expected}")]
    Option {
        /// The option.
        name: &'static str,
        /// What was given.
        found: String,
        /// What would be right.
        expected: &'static str,
    },
    /// All sequences or pages are taken by others; try again later.
    #[error("no capacity for {what} now: {needed} needed, {free} free")]
    NoCapacity {
        /// What is short.
        what: &'static str,
        /// How much the request needs.
        needed: usize,
        /// How much there is.
        free: usize,
    },
}

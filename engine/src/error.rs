//! Errors of loading and of requests: [`LoadError`] is the file's fault, [`RequestError`] the caller's.
//!
//! Variants carry data, so that hosts can map them to exit codes, HTTP statuses and JavaScript errors.

use alloc::collections::TryReserveError;
use alloc::string::String;
use alloc::vec::Vec;

use thiserror::Error;

/// Why a model file cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The container is malformed at a byte offset.
    #[error("GGUF: {what} at byte {at}: found {found}, expected {expected}")]
    Gguf {
        /// Absolute byte offset in the file.
        at: u64,
        /// The field being read, e.g. `tensor count`, `metadata key`.
        what: &'static str,
        /// The field's value in the file.
        found: String,
        /// The values that the format allows.
        expected: String,
    },
    /// A metadata key is missing, of the wrong type or out of range.
    #[error("metadata `{key}`: found {found}, expected {expected}")]
    Metadata {
        /// Full name of the key, with the architecture's prefix.
        key: String,
        /// The value in the file; `nothing` if the key is missing.
        found: String,
        /// The values that the engine accepts.
        expected: String,
    },
    /// A required tensor is missing.
    #[error("tensor `{name}` is missing: models of this architecture need it")]
    MissingTensor {
        /// Name of the tensor.
        name: String,
    },
    /// A tensor has the wrong shape, type or contents, or conflicts with another.
    #[error("tensor `{name}`: found {found}, expected {expected}")]
    Tensor {
        /// Name of the tensor.
        name: String,
        /// The tensor's shape, type or contents in the file.
        found: String,
        /// The shape, type or contents that the engine accepts.
        expected: String,
    },
    /// The file uses a valid feature that this engine does not implement.
    #[error("unsupported {what} `{found}`; known: {}", known.join(", "))]
    Unsupported {
        /// The kind of feature, e.g. `architecture`, `tensor type`.
        what: &'static str,
        /// Its name in the file.
        found: String,
        /// The names that the engine implements.
        known: Vec<&'static str>,
    },
    /// A memory allocation failed while the model was loaded.
    #[error("not enough memory for {what}: the allocation of {needed} bytes failed")]
    OutOfMemory {
        /// What the memory is for.
        what: &'static str,
        /// Bytes of the allocation.
        needed: u64,
    },
}

/// Why working memory or KV memory could not be allocated.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// The allocator returned no memory.
    #[error("not enough memory")]
    Exhausted(#[from] TryReserveError),
    /// The model needs more working memory than [`Model::max_scratch_bytes`](crate::model::Model::max_scratch_bytes).
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

/// Why a model cannot draft for another.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum DraftModelError {
    /// One of the models is an encoder.
    #[error("an encoder generates no text, expected two models that do")]
    Encoder,
    /// The vocabularies differ in size.
    #[error("the draft model has a vocabulary of {draft} tokens, expected {target}, as the model has")]
    VocabularySize {
        /// Size of the draft model's vocabulary.
        draft: usize,
        /// Size of the model's.
        target: usize,
    },
    /// A token differs.
    #[error(
        "token {id} of the draft model is \"{}\", expected \"{}\", as in the model: their vocabularies must be the same",
        draft.escape_ascii(),
        target.escape_ascii()
    )]
    Token {
        /// The token id.
        id: u32,
        /// Its bytes in the draft model.
        draft: Vec<u8>,
        /// Its bytes in the model.
        target: Vec<u8>,
    },
    /// There is not enough memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// Why a request was refused. Nothing was computed.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum RequestError {
    /// The prompt has no tokens.
    #[error("the prompt is empty, expected at least one token")]
    EmptyPrompt,
    /// Prompt and generated tokens exceed the context.
    #[error(
        "{prompt} prompt tokens and {max_tokens} to generate do not fit the context of {n_ctx} tokens: \
         shorten one of them or use a larger context"
    )]
    ContextLength {
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens to generate; 1 if the request sets no limit.
        max_tokens: usize,
        /// Tokens that a sequence may have.
        n_ctx: usize,
    },
    /// The model is an encoder (bidirectional attention), which cannot generate.
    #[error("the model is an encoder: it embeds texts and cannot generate any")]
    Encoder,
    /// The model generates by diffusion, which an engine does not do ([`crate::diffusion`]).
    #[error(
        "the model fills in masked tokens by diffusion, expected a model that continues a text token by token: `starling run` \
         generates with this one"
    )]
    Diffusion,
    /// The text to embed has no tokens.
    #[error("the text has no tokens, expected at least one")]
    EmptyText,
    /// The text to embed exceeds the context or a batch.
    #[error("the text has {tokens} tokens, expected at most {} (context {n_ctx}, batch {batch_tokens})", n_ctx.min(batch_tokens))]
    TextLength {
        /// Tokens of the text.
        tokens: usize,
        /// Tokens that a text may have.
        n_ctx: usize,
        /// Tokens that a batch may have.
        batch_tokens: usize,
    },
    /// A token id is outside the vocabulary.
    #[error("token id {token} at index {at}, expected an id below {n_vocab} (the size of the vocabulary)")]
    Token {
        /// The token id.
        token: u32,
        /// Its index among the tokens given.
        at: usize,
        /// Size of the vocabulary.
        n_vocab: usize,
    },
    /// An option is out of range.
    #[error("{name} is {found}, expected {expected}")]
    Option {
        /// Name of the option.
        name: &'static str,
        /// The value given.
        found: String,
        /// The values allowed.
        expected: &'static str,
    },
    /// Other requests hold the sequences, KV pages or batch rows that this one needs.
    #[error("no capacity for {what}: {needed} needed, {free} available")]
    NoCapacity {
        /// The resource that is short.
        what: &'static str,
        /// Units that the request needs.
        needed: usize,
        /// Units that are available.
        free: usize,
    },
}

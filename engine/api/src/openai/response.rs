//! The common part of completion responses and chunks.

use serde::Serialize;
use sha2::{Digest, Sha256};
use starling::kernels::NUMERICS_VERSION;
use starling::receipt::Hex;

use crate::answer::Usage;
use crate::shared::SharedStr;

/// Completion, or a chunk of one.
#[derive(Debug, Clone, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CompletionResponse<C> {
    /// ID of the completion; all its chunks have the same.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub id: SharedStr,
    /// Object type, such as `chat.completion`.
    pub object: &'static str,
    /// Time of creation, in seconds since 1970.
    pub created: u64,
    /// Model name.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub model: SharedStr,
    /// Choices, those of the first prompt first; in a chunk, the new parts of some of them.
    pub choices: Vec<C>,
    /// Token counts; in a stream only in the last chunk, if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Usage>))]
    pub usage: Option<Option<Usage>>,
    /// Fingerprint of the model file, the engine and its numerics: equal fingerprints have equal outputs.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub system_fingerprint: SharedStr,
    /// Random seed that was used.
    pub seed: u64,
    /// Session ID, if the request has one.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
    pub session_id: Option<SharedStr>,
}

/// The fields that a host determines, the same for all chunks of a response.
#[derive(Debug, Clone)]
pub struct ResponseHead {
    /// ID of the completion.
    pub id: SharedStr,
    /// Seconds since 1970.
    pub created: u64,
    /// Model name.
    pub model: SharedStr,
    /// Fingerprint of the model file, the engine and its numerics.
    pub system_fingerprint: SharedStr,
    /// Random seed in use.
    pub seed: u64,
    /// Session ID.
    pub session_id: Option<SharedStr>,
}

impl<C> CompletionResponse<C> {
    /// A response of the type `object` without choices.
    pub fn new(head: ResponseHead, object: &'static str) -> CompletionResponse<C> {
        let ResponseHead { id, created, model, system_fingerprint, seed, session_id } = head;
        CompletionResponse {
            id,
            object,
            created,
            model,
            choices: Vec::new(),
            usage: None,
            system_fingerprint,
            seed,
            session_id,
        }
    }
}

/// OpenAI's `system_fingerprint`: a hash of all that an answer depends on besides its request, which is the model (by the
/// SHA-256 of its file), the version, and the version of the numerics.
pub fn system_fingerprint(model: &[u8; 32]) -> String {
    let hash = Sha256::new_with_prefix(model).chain_update(env!("CARGO_PKG_VERSION"));
    let digest: [u8; 32] = hash.chain_update(NUMERICS_VERSION.to_le_bytes()).finalize().into();
    let mut short = [0; 8];
    short.copy_from_slice(&digest[..8]);
    format!("fp_{}", Hex(short))
}

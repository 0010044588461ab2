//! What models that generate by diffusion need to know.

use crate::error::LoadError;
use crate::gguf::{Gguf, Value};

/// Metadata of a model that generates by diffusion (Dream, LLaDA, RND1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DiffusionConfig {
    /// The token that stands for one to be generated (`tokenizer.ggml.mask_token_id`).
    pub mask: Option<u32>,
    /// Whether the logits of a token are those at the position before it (`diffusion.shift_logits`).
    pub shifted: bool,
}

impl DiffusionConfig {
    pub(crate) fn read(gguf: &Gguf<'_>, n_vocab: usize) -> Result<DiffusionConfig, LoadError> {
        let key = "tokenizer.ggml.mask_token_id";
        let mask = gguf.u32(key)?;
        if let Some(mask) = mask.filter(|mask| *mask as usize >= n_vocab) {
            let (found, expected) = (alloc::format!("{mask}"), alloc::format!("a token id below {n_vocab}"));
            return Err(LoadError::Metadata { key: key.into(), found, expected });
        }
        let key = "diffusion.shift_logits";
        let shifted = match gguf.get(key) {
            // older converters wrote text
            Some(Value::Str(text)) => *text == b"true",
            _ => gguf.bool(key)?.unwrap_or(true),
        };
        Ok(DiffusionConfig { mask, shifted })
    }
}

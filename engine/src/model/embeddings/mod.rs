//! Embeddings of tokens, and what is beside them.

pub(crate) mod ngrams;
pub(crate) mod per_layer;
pub(crate) mod tokens;

pub use ngrams::NgramConfig;

use crate::error::LoadError;
use crate::math::sqrt;
use crate::model::family::Family;
use crate::model::keys::{Keys, MAX_WIDTH};

/// Embeddings of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct EmbeddingConfig {
    /// Factor on token embeddings.
    pub scale: f32,
    /// Whether embeddings are normalised without weights.
    pub plain_norm: bool,
    /// Whether the model has learned position embeddings.
    pub learned_positions: bool,
    /// Width of the embeddings that each layer has of its own; 0 for none.
    pub per_layer: usize,
    /// Whether `layer_output_scale` is the factor of the token's embedding, which is added after each layer.
    pub skips: bool,
    /// Embeddings of n-grams, if the model has them.
    pub ngrams: Option<NgramConfig>,
}

impl EmbeddingConfig {
    /// Reads the embeddings of a model of width `n_embd`; `has_positions` if it has RoPE or ALiBi.
    pub(crate) fn read(
        keys: &Keys<'_, '_>,
        family: &Family,
        (n_embd, n_layer): (usize, usize),
        has_positions: bool,
    ) -> Result<EmbeddingConfig, LoadError> {
        let scale = if family.embeddings_by_width { sqrt(n_embd as f32) } else { 1.0 };
        let name = "embedding_length_per_layer_input";
        Ok(EmbeddingConfig {
            scale: keys.optional("embedding_scale")?.unwrap_or(scale),
            plain_norm: false,
            learned_positions: !has_positions,
            per_layer: match keys.u32(name)? {
                None => 0,
                width => keys.in_range(name, width, 0..=MAX_WIDTH / n_layer as u32)?,
            },
            skips: false,
            ngrams: None,
        })
    }
}

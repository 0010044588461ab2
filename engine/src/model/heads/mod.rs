//! What reads the last hidden states: logits, classification, projections of embeddings, multi-token prediction.

pub(crate) mod classifier;
pub(crate) mod diffusion;
pub(crate) mod mtp;
pub(crate) mod output;
pub(crate) mod projection;

use crate::error::LoadError;
use crate::model::family::{Family, HeadKind, Mtp};
use crate::model::keys::Keys;

/// Heads of a model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OutputConfig {
    /// Factor on logits.
    pub scale: f32,
    /// tanh soft cap on logits (Gemma 2).
    pub soft_cap: Option<f32>,
    /// What the classification head computes besides its products.
    pub classifier: HeadKind,
    /// Pooling of token states to an embedding, as numbered in the file ([`crate::embed::Pooling`]).
    pub pooling_type: Option<u32>,
    /// Pooling before the classification head, likewise.
    pub classifier_pooling: Option<u32>,
    /// What multi-token prediction reads.
    pub mtp: Mtp,
}

impl OutputConfig {
    pub(crate) fn read(keys: &Keys<'_, '_>, family: &Family) -> Result<OutputConfig, LoadError> {
        let scale = keys.optional("logit_scale")?.unwrap_or(1.0);
        Ok(OutputConfig {
            scale: if family.divided_logits { 1.0 / scale } else { scale },
            soft_cap: keys.optional("final_logit_softcapping")?,
            classifier: family.head,
            pooling_type: keys.u32("pooling_type")?,
            classifier_pooling: keys.u32("classifier.pooling_type")?,
            mtp: family.mtp,
        })
    }
}

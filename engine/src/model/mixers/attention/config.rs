//! Attention: what the metadata tell about it.

use alloc::vec::Vec;

use super::distances::DistanceConfig;
use super::heads::{self, HeadConfig, TemperatureConfig};
use super::rotary::{RopeConfig, ScalingKind};
use crate::error::LoadError;
use crate::kernels::attention::{AttentionWindow, Compressor};
use crate::kernels::rope::RopeStyle;
use crate::model::family::Family;
use crate::model::keys::Keys;
use crate::model::mixers::compressed::config::CompressedConfig;
use crate::model::mixers::indexer::config::{IndexerConfig, Selection};

/// Attention of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionConfig {
    /// The RoPE variants; layers refer to them by index.
    pub ropes: Vec<RopeConfig>,
    /// Which elements of a head RoPE pairs; `None` without RoPE.
    pub style: Option<RopeStyle>,
    /// Slopes of ALiBi, one per query head.
    pub alibi: Option<Vec<f32>>,
    /// Biases on scores by the distance of tokens, if the model has them.
    pub distances: Option<DistanceConfig>,
    /// Factor on queries by position.
    pub temperature: Option<TemperatureConfig>,
    /// tanh soft cap on scores (Gemma 2).
    pub soft_cap: Option<f32>,
    /// Limit of the absolute values of queries, keys and values.
    pub qkv_limit: Option<f32>,
    /// Factor on the output.
    pub value_scale: f32,
    /// Whether each query head is followed by a gate, whose sigmoid multiplies the output.
    pub gated_queries: bool,
    /// Whether heads are normalised after RoPE instead of before.
    pub rope_before_norm: bool,
    /// Whether heads of layers with RoPE are normalised without weights.
    pub plain_head_norms: bool,
    /// Whether values are normalised without weights, head by head.
    pub plain_value_norm: bool,
    /// Whether layers without a value projection use the keys, before their norm and RoPE, as values.
    pub values_from_keys: bool,
    /// Activation of the gate on outputs.
    pub output_gate: OutputGate,
    /// Indexers of sparse attention, if the model has any.
    pub indexer: Option<IndexerConfig>,
    /// Attention with compressed keys, if the model has it.
    pub compressed: Option<CompressedConfig>,
}

/// Attention of a layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayerAttention {
    /// The heads; zero in layers without attention.
    pub heads: HeadConfig,
    /// Window of a token.
    pub window: AttentionWindow,
    /// Index in [`AttentionConfig::ropes`]; `None` for a layer without RoPE.
    pub rope: Option<usize>,
    /// Factor on scores.
    pub scale: f32,
    /// The positions that are read.
    pub selection: Selection,
    /// Positions of a block whose indexer keys are averaged.
    pub index_ratio: usize,
    /// The blocks of positions that have a compressed key.
    pub compressor: Option<Compressor>,
    /// Index of the layer's keys and values in KV pages.
    pub kv_layer: usize,
    /// Whether the layer computes these keys and values. If not, it reads those of an earlier layer.
    pub owns_kv: bool,
}

/// Activation of the gate on attention outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OutputGate {
    /// The logistic function.
    Sigmoid,
    /// `ln(1 + exp(x))`.
    Softplus,
}

impl AttentionConfig {
    /// Reads what does not depend on the layers.
    pub(crate) fn read(
        keys: &Keys<'_, '_>,
        family: &Family,
        style: Option<RopeStyle>,
        ropes: Vec<RopeConfig>,
        n_ctx_train: usize,
    ) -> Result<AttentionConfig, LoadError> {
        let original_context = ropes.iter().find_map(|r| r.scaling).map_or(n_ctx_train, |s| s.original_context);
        Ok(AttentionConfig {
            temperature: heads::temperature(keys, original_context)?,
            ropes,
            style,
            alibi: None,
            distances: None,
            soft_cap: keys.optional("attn_logit_softcapping")?,
            qkv_limit: keys.optional("attention.clamp_kqv")?,
            value_scale: keys.optional("attention.value_scale")?.unwrap_or(1.0),
            gated_queries: family.gated_queries,
            rope_before_norm: family.rope_before_norm,
            plain_head_norms: false,
            plain_value_norm: false,
            values_from_keys: false,
            output_gate: OutputGate::Sigmoid,
            indexer: None,
            compressed: None,
        })
    }

    /// Rows of the query projection of a layer: queries, and their gates if there are any.
    pub(crate) fn q_rows(&self, heads: &HeadConfig) -> usize {
        heads.q_width() * if self.gated_queries { 2 } else { 1 }
    }

    /// Largest number of pairs that a RoPE variant rotates.
    pub(crate) fn rope_pairs(&self) -> usize {
        self.ropes.iter().map(|rope| rope.n_rot / 2).max().unwrap_or(0)
    }

    /// Whether there are frequency divisors for short and for long contexts.
    pub(crate) fn is_longrope(&self) -> bool {
        self.ropes.iter().any(|r| r.scaling.is_some_and(|s| s.kind == ScalingKind::LongRope))
    }
}

impl LayerAttention {
    /// Whether the layer has a window.
    pub(crate) fn is_local(&self) -> bool {
        self.window.left != usize::MAX
    }

    /// Number of layers of KV pages that attention writes, beside the keys of an indexer.
    pub(crate) fn kv_layers(&self) -> usize {
        // compressed keys and what they are made of, and the same of the indexer that selects overlapping blocks
        1 + self.compressor.map_or(0, |blocks| if blocks.overlaps { 4 } else { 2 })
    }
}

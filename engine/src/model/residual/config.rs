//! Residual streams: what the metadata tell about them.

use super::hyper::config::HyperConfig;
use crate::error::LoadError;
use crate::model::family::Family;
use crate::model::keys::{Keys, MAX_LAYERS};

/// Most streams that are kept.
pub(super) const MAX_KEPT: usize = 63;

/// Residual streams of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct ResidualConfig {
    /// Factor on the outputs of attention and feed-forward.
    pub scale: f32,
    /// Whether attention and feed-forward of all layers read the same residual stream (GPT-NeoX).
    pub parallel: bool,
    /// Whether norms follow the residual sums, `x = norm(x + attention(x))`, and there is no final norm.
    pub post_norm: bool,
    /// Whether the residual stream of a block is the output of its norm:
    /// `x = residual_scale * norm(x) + attention(norm(x))`.
    pub normed: bool,
    /// Whether the norms of attention and feed-forward have each other's names, where both exist.
    pub swapped_norms: bool,
    /// Whether the first layer may lack the norm before attention.
    pub optional_first_norm: bool,
    /// Epsilon of norms after attention and feed-forward, if it is not that of the others.
    pub post_norm_eps: Option<f32>,
    /// Number of residual streams of AltUp; 0 without.
    pub n_altup: usize,
    /// Layers after which the residual stream is kept for all later ones; 0 if it is not.
    pub block: usize,
    /// Hyper-connections, if the model has them.
    pub hyper: Option<HyperConfig>,
}

impl ResidualConfig {
    pub(crate) fn read(keys: &Keys<'_, '_>, family: &Family, n_layer: usize) -> Result<ResidualConfig, LoadError> {
        Ok(ResidualConfig {
            scale: keys.optional("residual_scale")?.unwrap_or(1.0),
            parallel: keys.bool("use_parallel_residual")?.unwrap_or(false),
            post_norm: family.post_norm,
            normed: false,
            swapped_norms: false,
            optional_first_norm: false,
            post_norm_eps: None,
            n_altup: 0,
            block: attended_layers(keys, n_layer)?,
            hyper: HyperConfig::read(keys)?,
        })
    }

    /// Numbers of residual streams that are kept before layer `i`, and before its feed-forward.
    pub(crate) fn kept(&self, i: usize) -> [usize; 2] {
        match self.block {
            0 => [0, 0],
            block => [i.div_ceil(block), i / block + 1],
        }
    }

    /// Whether the connections of the streams have the norms of the inputs of sub-layers.
    pub(crate) fn has_gated_streams(&self) -> bool {
        self.hyper.is_some_and(|hyper| hyper.rank.is_some())
    }
}

/// Reads the number of layers after which the residual stream is kept; 0 if it is not.
fn attended_layers(keys: &Keys<'_, '_>, n_layer: usize) -> Result<usize, LoadError> {
    let name = "attn_res.block_size";
    match keys.u32(name)? {
        None | Some(0) => Ok(0),
        block => keys.in_range(name, block, n_layer.div_ceil(MAX_KEPT) as u32..=MAX_LAYERS),
    }
}

//! Sizes and constants of hyper-connections.

use crate::error::LoadError;
use crate::math::exp;
use crate::model::keys::{Keys, MAX_WIDTH};

/// Streams at most: beyond any known model.
pub(super) const MAX_STREAMS: usize = 16;

/// Sizes and constants of a model's hyper-connections.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct HyperConfig {
    /// Number of streams.
    pub n: usize,
    /// Added to weights.
    pub(super) eps: f64,
    /// Factor of the weights of outputs, and what is added to them.
    pub(super) magnitude: f64,
    pub(super) write_eps: f64,
    /// Divisions of columns, if streams are mixed.
    pub(super) sinkhorn: Option<usize>,
    /// Rank of the gates, if each element has one ([`gated`](super::gated)).
    pub(crate) rank: Option<usize>,
}

impl HyperConfig {
    /// Reads the configuration of a model that has hyper-connections.
    pub(crate) fn read(keys: &Keys<'_, '_>) -> Result<Option<HyperConfig>, LoadError> {
        let name = "hyper_connection.count";
        let Some(n) = keys.u32(name)? else { return Ok(None) };
        let n = keys.in_range(name, Some(n), 2..=MAX_STREAMS as u32)?;
        let eps = f64::from(keys.f32("hyper_connection.epsilon")?.unwrap_or(1e-6));
        let magnitude = keys.f32("hyper_connection.magnitude")?.map(f64::from);
        let iterations = "hyper_connection.sinkhorn_iterations";
        let sinkhorn = keys.u32(iterations)?;
        let sinkhorn = sinkhorn.map(|n| keys.in_range(iterations, Some(n), 1..=1000)).transpose()?;
        let write_eps = if magnitude.is_some() { eps } else { 0.0 };
        let low_rank = "hyper_connection.low_rank";
        let rank = keys.u32(low_rank)?;
        let rank = rank.map(|rank| keys.in_range(low_rank, Some(rank), 1..=MAX_WIDTH)).transpose()?;
        Ok(Some(HyperConfig { n, eps, magnitude: magnitude.unwrap_or(2.0), write_eps, sinkhorn, rank }))
    }

    /// Weights of a sub-layer: of reads, of writes, and of the mix.
    pub(super) fn n_weights(&self) -> usize {
        self.n * if self.sinkhorn.is_some() { 2 + self.n } else { 2 }
    }

    /// Scales of these.
    pub(super) fn n_scales(&self) -> usize {
        if self.sinkhorn.is_some() { 3 } else { 2 }
    }
}

pub(super) fn logistic(x: f64) -> f64 {
    1.0 / (1.0 + exp(-x))
}

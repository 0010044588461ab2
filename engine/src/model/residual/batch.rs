//! The residual streams of a batch, and what else lives as long as it.

use alloc::vec::Vec;

use super::config::ResidualConfig;
use crate::model::budget::Budget;
use crate::model::embeddings::per_layer::LayerEmbeddingRows;
use crate::model::mixers::MixerBatch;

/// Memory of a batch.
pub(crate) struct Batch {
    /// (rows, n_embd): the residual stream.
    pub(crate) x: Vec<f32>,
    pub(crate) mixers: MixerBatch,
    /// The tokens.
    pub(crate) tokens: Vec<u32>,
    /// Embeddings of the layers.
    pub(crate) layer_embeddings: LayerEmbeddingRows,
    /// (rows, n_embd): embeddings of the tokens, where layers add them again.
    pub(crate) embeddings: Vec<f32>,
    pub(super) streams: Streams,
}

/// Residual streams beside the usual one.
pub(super) struct Streams {
    /// (rows, streams, n_embd) of AltUp or hyper-connections.
    pub(super) all: Vec<f32>,
    /// The same: memory for the next streams of hyper-connections.
    pub(super) next: Vec<f32>,
    /// (kept streams, rows, n_embd) that later layers read.
    pub(super) kept: Vec<f32>,
    /// (rows, n_embd): low and high state of nested cycles.
    pub(super) low: Vec<f32>,
    pub(super) high: Vec<f32>,
}

impl Batch {
    /// For `n` rows of a model of width `d` and `n_layer` layers; `has_cycles` if these are nested.
    pub(crate) fn new(
        c: &ResidualConfig,
        (n, d, n_layer): (usize, usize, usize),
        has_cycles: bool,
        (mixers, layer_embeddings, has_skips): (MixerBatch, LayerEmbeddingRows, bool),
        budget: &mut Budget,
    ) -> Batch {
        let hyper = c.hyper.map_or(0, |hyper| hyper.n);
        let cycles = if has_cycles { n } else { 0 };
        Batch {
            x: budget.zeros(&[n, d]),
            mixers,
            tokens: budget.zeros(&[n]),
            layer_embeddings,
            embeddings: budget.zeros(&[if has_skips { n } else { 0 }, d]),
            streams: Streams {
                all: budget.zeros(&[n, hyper.max(c.n_altup), d]),
                next: budget.zeros(&[n, hyper, d]),
                kept: budget.zeros(&[c.kept(n_layer - 1)[1], n, d]),
                low: budget.zeros(&[cycles, d]),
                high: budget.zeros(&[cycles, d]),
            },
        }
    }
}

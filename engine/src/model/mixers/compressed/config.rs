//! Sizes of attention with compressed keys.

use core::iter;

use crate::kernels::attention::{Compressor, KvHeads};
use crate::kernels::panel::PANEL;

/// Sizes of attention with compressed keys, the same in all layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CompressedConfig {
    /// Elements that queries are projected from.
    pub q_rank: usize,
    /// Trailing elements of queries and keys that RoPE rotates.
    pub n_rot: usize,
    /// Groups of heads whose outputs are projected together, and rows of their projections.
    pub groups: usize,
    /// Rows of the projection of a group.
    pub rank: usize,
    /// Query heads of the indexer, and elements of its keys.
    pub index_heads: usize,
    /// Elements of the indexer's keys.
    pub index_dim: usize,
    /// Blocks that the indexer selects.
    pub top_k: usize,
}

/// Selections per token.
pub(crate) const LISTS: usize = 1;

/// Heads whose value is the key, which is not stored twice if the layout allows.
fn shared_heads(dim: usize) -> KvHeads {
    if dim.is_multiple_of(PANEL) { KvHeads::latent(dim, dim) } else { KvHeads::separate(1, dim, dim) }
}

/// What a layer with keys of `dim` elements has in KV pages, from its `kv_layer` on: keys; compressed keys, and the values and gates that they are made
/// of; the same of the indexer.
pub(crate) fn kv_layers(
    c: &CompressedConfig,
    dim: usize,
    compressor: Option<Compressor>,
) -> impl Iterator<Item = KvHeads> {
    let blocks = compressor.map(|block| [shared_heads(dim), KvHeads::exact(block.heads(), dim)]);
    let index = compressor.filter(|block| block.overlaps);
    let index = index.map(|block| [KvHeads::separate(1, c.index_dim, 0), KvHeads::exact(block.heads(), c.index_dim)]);
    iter::once(shared_heads(dim)).chain(blocks.into_iter().flatten()).chain(index.into_iter().flatten())
}

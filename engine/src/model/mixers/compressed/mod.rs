//! Attention with compressed keys (DeepSeek-V4). All query heads have one key, which is its own value:
//!
//! ```text
//! q[h] = rope(plain_norm((W_qb norm(W_qa x))[h]));  k = rope(norm(W_kv x))     RoPE rotates the last elements
//! v = W_ckv x;  g = W_cg x + A[pos mod ratio]
//! c[j] = rope(norm(sum_t softmax_t(g[t]) v[t]))                      over the positions t of block j; RoPE at its start
//! o[h] = rope^-1(attention(q[h], k in the window, c of the whole blocks up to the token, sink[h]))
//! y = W_ob concat_g (W_oa[g] o[heads of group g])
//! ```
//!
//! A layer has no blocks, blocks of 4 positions, or of 128. Those of 4 overlap: they are made of the block before, too, each
//! position having one value and gate for its own block and one for the next. An indexer selects `top_k` of them. It
//! has compressed keys of its own, made in the same way:
//!
//! ```text
//! i[h] = rope((W_iq norm(W_qa x))[h]);  s[j] = sum_h (W_w x)[h] * max(i[h] . d[j], 0)
//! ```
//!
//! Values and gates of all positions stand in KV pages as f32, and c[j] at the last position of block j. So what a page
//! holds depends only on the tokens up to its own, and any cut of a sequence continues as the whole.

pub(crate) mod config;
mod forward;
mod read;

use alloc::boxed::Box;
use alloc::vec;
use alloc::vec::Vec;

use super::attention::config::LayerAttention;
use super::attention::heads::HeadConfig;
use super::latent::per_head_size;
use crate::error::LoadError;
use crate::kernels::attention::Compressor;
use crate::kernels::panel::Matrix;
use crate::model::linear::{Linear, LinearGroup, Norm, padded};
use crate::model::memory::Size;
use crate::model::tensors::{Declared, LinearName, Loaded, Name, NormName, Shape, matrix, values, vector};

pub use config::CompressedConfig;
pub(crate) use config::kv_layers;
pub(crate) use read::read;

const SINKS: Name = Name::weight("attn_sinks");
const Q_DOWN: LinearName = LinearName("attn_q_a");
const Q_DOWN_NORM: NormName = NormName("attn_q_a_norm");
const Q_UP: LinearName = LinearName("attn_q_b");
const KV: LinearName = LinearName("attn_kv");
const KV_NORM: NormName = NormName("attn_kv_a_norm");
const GROUPS: Name = Name::weight("attn_output_a");
const OUTPUT: LinearName = LinearName("attn_output_b");
const BLOCKS: BlockNames = BlockNames {
    values: LinearName("attn_compressor_kv"),
    gates: LinearName("attn_compressor_gate"),
    bias: Name::weight("attn_compressor_ape"),
    norm: NormName("attn_compressor_norm"),
};
const INDEX_BLOCKS: BlockNames = BlockNames {
    values: LinearName("indexer_compressor_kv"),
    gates: LinearName("indexer_compressor_gate"),
    bias: Name::weight("indexer_compressor_ape"),
    norm: NormName("indexer_compressor_norm"),
};
const HEAD_WEIGHTS: LinearName = LinearName("indexer.proj");
const INDEX_QUERIES: LinearName = LinearName("indexer.attn_q_b");
/// A tensor that only layers with compressed keys have.
pub(crate) const MARKER: Name = KV.weight();

/// Names of what makes compressed keys.
struct BlockNames {
    values: LinearName,
    gates: LinearName,
    bias: Name,
    norm: NormName,
}

impl BlockNames {
    /// Declares them for keys of `dim` elements.
    fn tensors(&self, t: &mut Declared<'_>, block: Compressor, dim: usize, d: usize) {
        let width = block.heads() / 2 * dim;
        t.required(self.values.weight(), matrix(width, d));
        t.required(self.gates.weight(), matrix(width, d));
        t.required(self.bias, values(width, block.ratio));
        t.required(self.norm.weight(), vector(dim));
    }
}

/// Weights that make compressed keys.
struct Blocks {
    compressor: Compressor,
    /// Values and gates of a position (heads / 2 * dim, n_embd).
    input: LinearGroup,
    /// (ratio, heads / 2 * dim): added to the gates, by position in the block.
    gate_bias: Vec<f32>,
    /// Norm of the keys (dim).
    norm: Norm,
}

impl Blocks {
    /// Elements of a key.
    fn dim(&self) -> usize {
        self.norm.width
    }

    fn load(compressor: Compressor, t: &mut Loaded<'_>, names: &BlockNames) -> Result<Blocks, LoadError> {
        Ok(Blocks {
            compressor,
            input: LinearGroup::separate(vec![t.linear(names.values)?, t.linear(names.gates)?]),
            gate_bias: t.required(names.bias)?,
            norm: t.required_norm(names.norm)?,
        })
    }

    /// Floats of a row: values and gates, keys.
    fn parts(&self) -> [usize; 2] {
        [self.input.stride, self.dim()]
    }

    fn size(&self, n: usize) -> Size {
        Size::rows(n, self.parts()).and(self.input.size(n))
    }
}

/// Weights of an indexer of compressed keys.
struct BlockIndexer {
    blocks: Blocks,
    /// Factors of the heads (n_head, n_embd).
    weights: Linear,
    /// Queries (n_head * dim, q_rank).
    query: Linear,
}

/// Weights of attention with compressed keys.
pub(crate) struct CompressedWeights {
    heads: HeadConfig,
    /// What queries are projected from, and keys (q_rank, n_embd), (key_dim, n_embd).
    input: LinearGroup,
    query_norm: Norm,
    /// (n_head * key_dim, q_rank)
    query: Linear,
    /// Norm of query heads, whose weights are 1.
    head_norm: Norm,
    key_norm: Norm,
    /// (n_head)
    sinks: Vec<f32>,
    /// One per group of heads (rank, heads of the group * key_dim).
    groups: Vec<Matrix>,
    /// (n_embd, groups * rank)
    output: Linear,
    blocks: Option<Box<Blocks>>,
    indexer: Option<Box<BlockIndexer>>,
}

impl BlockIndexer {
    /// Floats of a row: factors of the heads, queries.
    fn parts(&self) -> [usize; 2] {
        [padded(self.weights.w.rows()), padded(self.query.w.rows())]
    }

    /// The keys are made before anything else.
    fn size(&self, n: usize) -> Size {
        let queries = Size::rows(n, self.parts()).and(self.weights.size(n).or(self.query.size(n)));
        self.blocks.size(n).or(queries)
    }
}

impl CompressedWeights {
    /// Declares the tensors of a layer of a model of width `d`.
    pub(crate) fn tensors(t: &mut Declared<'_>, c: &CompressedConfig, layer: &LayerAttention, d: usize) {
        let heads = layer.heads;
        t.required(SINKS, vector(heads.n_head));
        t.required(Q_DOWN.weight(), matrix(c.q_rank, d));
        t.required(Q_DOWN_NORM.weight(), vector(c.q_rank));
        t.required(Q_UP.weight(), matrix(heads.q_width(), c.q_rank));
        t.required(KV.weight(), matrix(heads.key_dim, d));
        t.required(KV_NORM.weight(), vector(heads.key_dim));
        // the matrices of the groups, one after another or in a dimension of their own
        let (n, rows, k) = (c.groups, c.rank, heads.q_width() / c.groups);
        t.required_by(GROUPS, move |dims| match dims[2] > 1 {
            true => Shape::Matrices { n, rows, k },
            false => Shape::Stacked { n, rows, k },
        });
        t.required(OUTPUT.weight(), matrix(d, c.groups * c.rank));
        if let Some(block) = layer.compressor {
            BLOCKS.tensors(t, block, heads.key_dim, d);
            if block.overlaps {
                t.required(HEAD_WEIGHTS.weight(), matrix(c.index_heads, d));
                t.required(INDEX_QUERIES.weight(), matrix(c.index_heads * c.index_dim, c.q_rank));
                INDEX_BLOCKS.tensors(t, block, c.index_dim, d);
            }
        }
    }

    /// Takes the tensors of a layer.
    pub(crate) fn load(t: &mut Loaded<'_>, layer: &LayerAttention) -> Result<CompressedWeights, LoadError> {
        let inputs = vec![t.linear(Q_DOWN)?, t.linear(KV)?];
        let blocks = match layer.compressor {
            None => None,
            Some(c) => Some(Blocks::load(c, t, &BLOCKS)?.into()),
        };
        let indexer = match layer.compressor.filter(|c| c.overlaps) {
            None => None,
            Some(c) => Some(Box::new(BlockIndexer {
                blocks: Blocks::load(c, t, &INDEX_BLOCKS)?,
                weights: t.linear(HEAD_WEIGHTS)?,
                query: t.linear(INDEX_QUERIES)?,
            })),
        };
        Ok(CompressedWeights {
            heads: layer.heads,
            input: LinearGroup::separate(inputs),
            query_norm: t.required_norm(Q_DOWN_NORM)?,
            query: t.linear(Q_UP)?,
            head_norm: Norm::plain(layer.heads.key_dim),
            key_norm: t.required_norm(KV_NORM)?,
            sinks: t.required(SINKS)?,
            groups: t.required_matrices(GROUPS)?,
            output: t.linear(OUTPUT)?,
            blocks,
            indexer,
        })
    }

    pub(crate) fn matrices(&self) -> Vec<&Matrix> {
        self.inputs().chain([&self.query.w, &self.output.w]).chain(&self.groups).chain(self.index_query()).collect()
    }

    /// The matrices that read the input of the layer.
    fn inputs(&self) -> impl Iterator<Item = &Matrix> {
        let index = self.indexer.iter().flat_map(|i| i.blocks.input.matrices().chain([&i.weights.w]));
        self.input.matrices().chain(self.blocks.iter().flat_map(|b| b.input.matrices())).chain(index)
    }

    fn index_query(&self) -> Option<&Matrix> {
        self.indexer.as_ref().map(|i| &i.query.w)
    }

    /// Floats of a row: inputs, queries, outputs of heads, of groups.
    fn parts(&self) -> [usize; 4] {
        let rank = self.groups.first().map_or(0, |w| padded(w.rows()));
        [self.input.stride, padded(self.heads.q_width()), self.heads.out_width(), self.groups.len() * rank]
    }

    /// Temporaries of `n` rows.
    pub(crate) fn size(&self, n: usize) -> Size {
        let blocks = self.blocks.as_ref().map_or(Size::NONE, |blocks| blocks.size(n));
        let index = self.indexer.as_ref().map_or(Size::NONE, |indexer| indexer.size(n));
        let products = self.input.size(n).or(self.query.size(n)).or(self.output.size(n));
        let then = products.or(per_head_size(&self.groups, n)).or(blocks).or(index);
        Size::rows(n, self.parts()).and(then)
    }
}

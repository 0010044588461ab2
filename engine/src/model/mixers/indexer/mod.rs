//! Indexers of sparse attention, which select the positions that a token attends to (`kernels/attention/select.rs`):
//!
//! ```text
//! q[h] = rope((W_q c)[h]);  k = rope(layer_norm(W_k x));  w = W_w x      one key for all heads; c: compressed queries
//! q[h] = rope(norm((W_q x)[h]));  k = rope(norm(W_k x))                  for each KV head h (MiniMax-M3)
//! q[h] = rope(norm((W_q x)[h]));  k = rope(norm(mean of W_k x))          one key for each block (Qwen4-Exp)
//! ```
//!
//! The transform that implementations apply to queries and keys before they quantise them (Hadamard) is left out, and a
//! common factor of the weights too: neither changes the order of scores.

pub(crate) mod config;
mod read;

use alloc::vec;
use alloc::vec::Vec;

use super::attention::batch::AttentionBatch;
use super::attention::config::{AttentionConfig, LayerAttention};
use super::blocks::BlockKeys;
use crate::error::LoadError;
use crate::kernels::act::Floats;
use crate::kernels::attention::{
    self, Attention, Indexer, KvMemory, KvRows, MAX_GROUP, MAX_HEAD_DIM, Selected, SelectionScratch, mean_key,
};
use crate::kernels::norm::{NormKind, NormWeights, norm_in_place};
use crate::kernels::panel::Matrix;
use crate::kernels::rope::{RopeStyle, Rotation, rope};
use crate::model::family::IndexerKind;
use crate::model::linear::{Linear, LinearGroup, Norm, padded};
use crate::model::memory::{Size, Stack};
use crate::model::pass::Pass;
use crate::model::tensors::{Declared, LinearName, Loaded, Name, NormName, matrix, values, vector};

pub use config::{IndexerConfig, Selection};
pub(crate) use read::read;

/// The factors of heads that have none.
const EQUAL_WEIGHTS: [f32; MAX_GROUP] = [1.0; MAX_GROUP];

const KEY_NORM: NormName = NormName("indexer.k_norm");
const HEAD_WEIGHTS: LinearName = LinearName("indexer.proj");
const KEYS: LinearName = LinearName("indexer.attn_k");
const QUERIES: LinearName = LinearName("indexer.attn_q_b");
const POOL_GATE: LinearName = LinearName("indexer_compressor_gate");
const POOL_BIAS: Name = Name::weight("indexer_compressor_ape");
const INPUT_QUERIES: LinearName = LinearName("indexer.q_proj");
const INPUT_KEYS: LinearName = LinearName("indexer.k_proj");
const QUERY_NORM: NormName = NormName("indexer.q_norm");

/// Beginning of the names of tensors that layers without an indexer of their own do not use.
pub(crate) const PREFIX: &str = "indexer.";

/// Weights of an indexer.
pub(crate) struct IndexerWeights {
    /// Keys (key_dim, n_embd); gates of keys that are pooled (key_dim, n_embd); then the factors of the heads (n_head,
    /// n_embd), or queries (n_head * key_dim, n_embd).
    input: LinearGroup,
    /// (ratio, key_dim): added to the gates, by position in the block.
    gate_bias: Option<Vec<f32>>,
    /// Queries from compressed ones (n_head * key_dim, q_rank).
    query: Option<Linear>,
    key_norm: Norm,
    /// Norm of query heads.
    query_norm: Option<Norm>,
}

impl IndexerWeights {
    /// Declares the tensors of a layer of a model of width `d`, whose compressed queries have `q_rank` elements.
    pub(crate) fn tensors(t: &mut Declared<'_>, c: &IndexerConfig, q_rank: Option<usize>, d: usize) {
        let (dim, width) = (c.key_dim, c.n_head * c.key_dim);
        t.required(KEY_NORM.weight(), vector(dim));
        match c.kind {
            IndexerKind::Lightning { .. } => {
                t.required(KEY_NORM.bias(), vector(dim));
                t.required(HEAD_WEIGHTS.weight(), matrix(c.n_head, d));
                t.required(KEYS.weight(), matrix(dim, d));
                t.required(QUERIES.weight(), matrix(width, q_rank.unwrap_or(0)));
                if let Some(pool) = c.pool {
                    t.required(POOL_GATE.weight(), matrix(dim, d));
                    t.required(POOL_BIAS, values(dim, pool.ratio));
                }
            }
            IndexerKind::Blocks | IndexerKind::Means => {
                t.required(INPUT_QUERIES.weight(), matrix(width, d));
                t.required(INPUT_KEYS.weight(), matrix(dim, d));
                t.required(QUERY_NORM.weight(), vector(dim));
            }
        }
    }

    /// Takes the tensors of a layer.
    pub(crate) fn load(t: &mut Loaded<'_>, c: &IndexerConfig) -> Result<IndexerWeights, LoadError> {
        let ([keys, others], query, query_norm) = match c.kind {
            IndexerKind::Lightning { .. } => ([KEYS, HEAD_WEIGHTS], Some(t.linear(QUERIES)?), None),
            IndexerKind::Blocks | IndexerKind::Means => {
                ([INPUT_KEYS, INPUT_QUERIES], None, Some(t.required_norm(QUERY_NORM)?))
            }
        };
        let mut inputs = vec![t.linear(keys)?, t.linear(others)?];
        let mut gate_bias = None;
        if c.pool.is_some() {
            inputs.insert(1, t.linear(POOL_GATE)?);
            gate_bias = Some(t.required(POOL_BIAS)?);
        }
        let (input, key_norm) = (LinearGroup::separate(inputs), t.required_norm(KEY_NORM)?);
        Ok(IndexerWeights { input, gate_bias, query, key_norm, query_norm })
    }

    pub(crate) fn matrices(&self) -> impl Iterator<Item = &Matrix> {
        self.input.matrices().chain(self.query.iter().map(|l| &l.w))
    }

    /// Floats of a row: inputs, queries from compressed ones, keys of blocks.
    fn parts(&self) -> [usize; 3] {
        let query = self.query.as_ref().map_or(0, |l| padded(l.w.rows()));
        [self.input.stride, query, self.key_norm.width]
    }

    /// Temporaries of `n` rows.
    pub(crate) fn size(&self, n: usize) -> Size {
        let query = self.query.as_ref().map_or(Size::NONE, |query| query.size(n));
        Size::rows(n, self.parts()).and(self.input.size(n).or(query))
    }
}

/// What an indexer reads: the input of the layer, and compressed queries of latent attention.
pub(crate) struct IndexInput<'x> {
    pub(crate) x: &'x [f32],
    pub(crate) compressed: Floats<'x>,
}

impl IndexerWeights {
    /// Selects the positions that a layer attends to. Writes the keys to `memory`.
    pub(crate) fn run(
        &self,
        pass: &Pass<'_, '_>,
        (c, l): (&AttentionConfig, &LayerAttention),
        IndexInput { x, compressed }: IndexInput<'_>,
        (s, memory): (&mut AttentionBatch, &mut KvMemory),
        stack: &mut Stack<'_>,
    ) {
        let (w, rows, n) = (self, pass.rows, pass.n);
        let (Some(config), Selection::Own { kv_layer }) = (&c.indexer, l.selection) else { return };
        let (key_dim, stride, width) = (config.key_dim, w.input.stride, config.n_head * config.key_dim);
        let mut stack = stack.scope();
        let stack = &mut stack;
        let [input, queries, pooled] = stack.rows(n, w.parts());
        rows.linear_group(&w.input, x, input, stack);
        let second = w.input.part_starts[w.input.part_starts.len() - 1];
        let style = match config.kind {
            IndexerKind::Lightning { pairs, .. } => pairs,
            IndexerKind::Blocks | IndexerKind::Means => c.style.unwrap_or(RopeStyle::NeoX),
        };
        let rotates_end = matches!(config.kind, IndexerKind::Lightning { at_end: true, .. });
        let rotate = |r: usize, x: &mut [f32]| {
            let (cos, sin) = s.turns(l, r);
            let first = if rotates_end { key_dim - 2 * cos.len() } else { 0 };
            for head in x.chunks_exact_mut(key_dim) {
                rope(rows.cpu, Rotation { style, cos, sin, scale: 1.0 }, &mut head[first..], key_dim - first);
            }
        };
        rows.each(input, stride, &|r, row| {
            let (key, others) = row.split_at_mut(second);
            let key = &mut key[..key_dim];
            match config.kind {
                IndexerKind::Lightning { .. } => {
                    let (w, b) = (&w.key_norm.weight[..], w.key_norm.bias.as_deref());
                    norm_in_place(rows.cpu, &NormWeights { kind: NormKind::Layer, eps: config.norm_eps, w, b }, key);
                }
                IndexerKind::Blocks => rows.norm_heads(&w.key_norm, key),
                // after the mean
                IndexerKind::Means => {}
            }
            if config.kind != IndexerKind::Means {
                rotate(r, key);
            }
            if let Some(norm) = &w.query_norm {
                rows.norm_heads(norm, &mut others[..width]);
                rotate(r, &mut others[..width]);
            }
        });
        let kv = pass.kv.layers()[kv_layer];
        let block_keys = |ratio| BlockKeys { keys: kv, made_of: pass.kv.layers()[kv_layer + 1], ratio };
        match (config.pool, &w.gate_bias) {
            (Some(pool), Some(bias)) => {
                pass.bias_gates((input, stride), w.input.part_starts[1], bias, pool.ratio);
                let (of, keys) = (block_keys(pool.ratio), &mut pooled[..n * key_dim]);
                pass.write_block_keys(of, (input, stride), (keys, key_dim), s, memory, &|memory, pages, pos, key| {
                    pool.compress(&of.made_of, memory, pages, pos, key);
                });
            }
            _ if config.kind == IndexerKind::Means => {
                let of = block_keys(l.index_ratio);
                w.average_keys(pass, (c, of), input, s, memory, &mut pooled[..n * key_dim]);
            }
            _ => {
                let kv_rows = KvRows { x: input, stride, k_at: 0, v_at: 0, slots: &s.slots };
                attention::write_kv(rows.cpu, rows.pool, &kv, kv_rows, memory);
            }
        }
        let (q, q_stride, weights) = match &w.query {
            Some(linear) => {
                let q_stride = padded(width);
                let queries = &mut queries[..n * q_stride];
                rows.matrix(&linear.w, linear.bias.as_deref(), compressed, queries, stack);
                rows.each(queries, q_stride, &|r, row| rotate(r, &mut row[..width]));
                (&*queries, q_stride, Some(Floats { x: &input[second..], stride }))
            }
            None => {
                let together = config.kind == IndexerKind::Means;
                (&input[second..], stride, together.then_some(Floats { x: &EQUAL_WEIGHTS, stride: 0 }))
            }
        };
        let q = Floats { x: q, stride: q_stride };
        let attention = Attention::causal(kv, memory, config.n_head, q, pass.spans);
        let indexer = Indexer { attention, weights, rule: config.rule_of(l.index_ratio) };
        indexer.run(rows.cpu, rows.pool, &mut s.threads, &mut s.selection);
    }

    /// Writes the means of the blocks' keys, normalised and rotated.
    fn average_keys(
        &self,
        pass: &Pass<'_, '_>,
        (c, of): (&AttentionConfig, BlockKeys),
        input: &[f32],
        s: &AttentionBatch,
        memory: &mut KvMemory,
        means: &mut [f32],
    ) {
        let (w, rows, dim) = (self, pass.rows, self.key_norm.width);
        let style = c.style.unwrap_or(RopeStyle::NeoX);
        let rotary = c.indexer.and_then(|indexer| s.rotary.get(indexer.mean_rope));
        let stride = w.input.stride;
        pass.write_block_keys(of, (input, stride), (means, dim), s, memory, &|memory, pages, pos, key| {
            let start = pos + 1 - of.ratio;
            mean_key(&of.made_of, memory, pages, start..pos + 1, key);
            rows.norm_heads(&w.key_norm, key);
            if let Some(rotary) = rotary {
                let mut turns = [[0.0; MAX_HEAD_DIM / 2]; 2];
                let [cos, sin] = turns.each_mut().map(|turns| &mut turns[..rotary.pairs()]);
                rotary.at(start, cos, sin);
                rope(rows.cpu, Rotation { style, cos, sin, scale: 1.0 }, key, dim);
            }
        });
    }
}

/// The selected positions of a layer, the last that were computed.
pub(crate) fn selected(of: Selection, s: &SelectionScratch) -> Option<Selected<'_>> {
    match of {
        Selection::All => None,
        Selection::Own { .. } | Selection::Previous => Some(s.selected()),
    }
}

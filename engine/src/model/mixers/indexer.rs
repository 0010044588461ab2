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

use alloc::format;
use alloc::vec;
use alloc::vec::Vec;
use core::iter;

use crate::error::LoadError;
use crate::gguf::Gguf;
use crate::kernels::act::Floats;
use crate::kernels::attention::{
    self, Attention, Compressor, Indexer, KvHeads, KvMemory, KvRows, MAX_GROUP, MAX_HEAD_DIM, Selected, SelectionRule,
    SelectionScratch, mean_key,
};
use crate::kernels::norm::{NormKind, NormWeights, norm_in_place};
use crate::kernels::panel::Matrix;
use crate::kernels::rope::{RopeStyle, Rotation, rope};
use crate::model::config::Config;
use crate::model::family::IndexerKind;
use crate::model::keys::Keys;
use crate::model::keys::MAX_CONTEXT;
use crate::model::loader::LoadedTensors;
use crate::model::mixers::MixerKind;
use crate::model::mixers::attention::LayerAttention;
use crate::model::mixers::attention::layers::LayerPart;
use crate::model::mixers::attention::rotary::RopeConfig;
use crate::model::mixers::blocks::BlockKeys;
use crate::model::residual::orders::ForwardPass;
use crate::model::roles::{Part, Scope, TensorRow, matrix, values, vector};
use crate::model::scratch::AttentionScratch;
use crate::model::weights::{Linear, LinearGroup, Norm, linear, padded, required_norm};

/// Epsilon of the LayerNorm of keys, if the file does not state it.
const KEY_NORM_EPS: f32 = 1e-6;

/// Most positions of a block that has one key.
const MAX_RATIO: u32 = 64;

/// The factors of heads that have none.
const EQUAL_WEIGHTS: [f32; MAX_GROUP] = [1.0; MAX_GROUP];

/// Sizes of the indexers of a model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct IndexerConfig {
    /// What the heads select, and the pairs that RoPE rotates.
    pub kind: IndexerKind,
    /// Number of query heads.
    pub n_head: usize,
    /// Elements of a query or key.
    pub key_dim: usize,
    /// How many positions are selected.
    pub rule: SelectionRule,
    /// Epsilon of the LayerNorm of keys.
    pub norm_eps: f32,
    /// Blocks of positions that have one key, made of theirs.
    pub pool: Option<Compressor>,
    /// Index in [`Config::ropes`] of the rotation of means, which has no sections.
    mean_rope: usize,
}

impl IndexerConfig {
    /// What a layer has in KV pages: keys; and what pooled keys are made of.
    pub(crate) fn kv_heads(self) -> impl Iterator<Item = KvHeads> {
        let pool = self.pool.map(|pool| KvHeads::exact(pool.heads(), self.key_dim));
        let means = (self.kind == IndexerKind::Means).then(|| KvHeads::exact(1, self.key_dim));
        iter::once(KvHeads::separate(1, self.key_dim, 0)).chain(pool).chain(means)
    }

    /// How many positions a layer selects. Of blocks with one key, `top_k` positions and as many as may follow the last block.
    fn rule_of(&self, layer: &LayerAttention) -> SelectionRule {
        let shared = layer.index_ratio;
        SelectionRule { top_k: self.rule.top_k + shared - 1, shared, ..self.rule }
    }

    /// Selections per token: one for all KV heads, or one for each.
    pub fn lists(&self) -> usize {
        if self.kind == IndexerKind::Blocks { self.n_head } else { 1 }
    }
}

/// The positions that a layer attends to, of those in its window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Selection {
    /// All.
    All,
    /// Those that its own indexer selects, whose keys are at this index in KV pages.
    Own {
        /// Index of the keys in KV pages.
        kv_layer: usize,
    },
    /// Those that the layer before it attends to.
    Previous,
}

/// Reads the sizes of the indexers, and which layers have one: those that the file lists, or those with the tensors.
pub(crate) fn read(
    keys: &Keys<'_, '_>,
    kind: Option<IndexerKind>,
    shards: &[Gguf<'_>],
    layers: &mut [LayerPart<'_>],
    ropes: &mut Vec<RopeConfig>,
) -> Result<Option<IndexerConfig>, LoadError> {
    let Some(kind) = kind else { return Ok(None) };
    let rotated = ropes.iter().map(|rope| rope.n_rot).max().unwrap_or(0);
    let ratios = match kind {
        IndexerKind::Means => keys.per_layer_u32("attention.compress_ratios", layers.len())?,
        _ => None,
    };
    let n_head = keys.size("attention.indexer.head_count", 1..=MAX_GROUP as u32)?;
    let key_dim = keys.size("attention.indexer.key_length", 1..=MAX_HEAD_DIM as u32)?;
    if rotated > key_dim {
        return Err(keys.wrong(
            "attention.indexer.key_length",
            key_dim,
            format!("at least {rotated}, as RoPE rotates"),
        ));
    }
    let top_k = keys.size("attention.indexer.top_k", 1..=MAX_CONTEXT)?;
    let (block, local) = match kind {
        IndexerKind::Lightning { .. } | IndexerKind::Means => (1, 0),
        IndexerKind::Blocks => {
            let local = keys.u32("attention.indexer.local_blocks")?;
            (
                keys.size("attention.indexer.block_size", 1..=MAX_CONTEXT)?,
                keys.in_range("attention.indexer.local_blocks", local, 0..=top_k as u32)?,
            )
        }
    };
    let types = "attention.indexer.types";
    let listed = if keys.has(types) { Some(keys.pattern(types, layers.len(), 0)?) } else { None };
    let is_lightning = matches!(kind, IndexerKind::Lightning { .. });
    let marker = if is_lightning { "indexer.attn_k.weight" } else { "indexer.k_proj.weight" };
    let mut selects = false;
    for (i, layer) in layers.iter_mut().enumerate() {
        let (block, mixer) = (layer.block, layer.mixer);
        let layer = &mut *layer.attention;
        let has_tensors = || shards.iter().any(|gguf| gguf.tensor(&format!("blk.{block}.{marker}")).is_some());
        let has_indexer = listed.as_ref().map_or_else(has_tensors, |listed| listed[i]);
        let is_sparse = match kind {
            IndexerKind::Lightning { .. } => mixer == MixerKind::Latent && layer.window.left == usize::MAX,
            IndexerKind::Blocks => has_indexer,
            IndexerKind::Means => {
                let ratio = ratios.as_ref().map_or(0, |ratios| ratios[i]);
                let ratio = keys.in_range("attention.compress_ratios", Some(ratio), 0..=MAX_RATIO)?;
                layer.index_ratio = ratio.max(1);
                mixer == MixerKind::Attention && ratio > 0
            }
        };
        layer.selection = match (is_sparse, has_indexer) {
            (false, _) => continue,
            (true, true) => Selection::Own { kv_layer: 0 },
            (true, false) if selects && kind != IndexerKind::Means => Selection::Previous,
            (true, false) => return Err(LoadError::MissingTensor { name: format!("blk.{block}.{marker}") }),
        };
        selects = true;
        if kind == IndexerKind::Blocks && layer.heads.n_head_kv != n_head {
            let expected = format!("attention.head_count_kv, {}", layer.heads.n_head_kv);
            return Err(keys.wrong("attention.indexer.head_count", n_head, expected));
        }
        if is_lightning && layer.heads.latent.is_none_or(|latent| latent.q_rank.is_none()) {
            return Err(keys.wrong("attention.q_lora_rank", "nothing", "a number"));
        }
    }
    let eps = match kind {
        IndexerKind::Lightning { at_end: true, .. } => "attention.layer_norm_rms_epsilon",
        _ => "attention.layer_norm_epsilon",
    };
    let norm_eps = keys.positive(eps, KEY_NORM_EPS)?;
    let pool = pool(keys, top_k)?;
    let (every, whole_blocks) = (pool.map_or(1, |pool| pool.ratio), pool.is_some());
    let rule = SelectionRule { top_k: top_k / every, block, local, every, whole_blocks, shared: 1 };
    let mean_rope = if kind == IndexerKind::Means && selects { unsectioned(ropes) } else { 0 };
    Ok(Some(IndexerConfig { kind, n_head, key_dim, rule, norm_eps, pool, mean_rope })
        .filter(|_| selects || kind != IndexerKind::Means))
}

/// The index of the first RoPE variant with all pairs rotated.
fn unsectioned(ropes: &mut Vec<RopeConfig>) -> usize {
    let Some(first) = ropes.first() else { return 0 };
    let all = RopeConfig { unrotated: Vec::new(), ..first.clone() };
    ropes.iter().position(|rope| *rope == all).unwrap_or_else(|| {
        ropes.push(all);
        ropes.len() - 1
    })
}

/// Blocks of positions that have one key.
fn pool(keys: &Keys<'_, '_>, top_k: usize) -> Result<Option<Compressor>, LoadError> {
    let name = "attention.indexer.kpool";
    let Some(ratio) = keys.u32(name)? else { return Ok(None) };
    let ratio = keys.in_range(name, Some(ratio), 2..=MAX_RATIO)?;
    if !top_k.is_multiple_of(ratio) {
        return Err(keys.wrong("attention.indexer.top_k", top_k, format!("a multiple of kpool, {ratio}")));
    }
    let tail = "attention.indexer.kpool_select_tail";
    if keys.bool(tail)? != Some(true) {
        return Err(keys.wrong(tail, false, "true: a token must attend to its own position"));
    }
    Ok(Some(Compressor { ratio, overlaps: false }))
}

/// The indexer of a layer that has one.
fn sizes(c: &Scope<'_>) -> Option<IndexerConfig> {
    c.attention.indexer.filter(|_| matches!(c.layer.attention.selection, Selection::Own { .. }))
}

fn of_lightning(c: &Scope<'_>) -> Option<IndexerConfig> {
    sizes(c).filter(|config| matches!(config.kind, IndexerKind::Lightning { .. }))
}

fn of_pool(c: &Scope<'_>) -> Option<Compressor> {
    of_lightning(c)?.pool
}

fn of_input_queries(c: &Scope<'_>) -> Option<IndexerConfig> {
    sizes(c).filter(|config| matches!(config.kind, IndexerKind::Blocks | IndexerKind::Means))
}

/// The tensors of a layer with an indexer.
pub(crate) const TENSORS: &[TensorRow] = &[
    TensorRow::new("indexer.k_norm.weight", |c, _| vector(sizes(c)?.key_dim)).of(&[(Part::Indexer, 0)]),
    TensorRow::new("indexer.k_norm.bias", |c, _| vector(of_lightning(c)?.key_dim)).of(&[(Part::Indexer, 0)]),
    TensorRow::new("indexer.proj.weight", |c, _| matrix(of_lightning(c)?.n_head, c.n_embd)).of(&[(Part::Indexer, 0)]),
    TensorRow::new("indexer.attn_k.weight", |c, _| matrix(of_lightning(c)?.key_dim, c.n_embd))
        .of(&[(Part::Indexer, 0)]),
    TensorRow::new("indexer.attn_q_b.weight", |c, _| {
        let config = of_lightning(c)?;
        matrix(config.n_head * config.key_dim, c.layer.attention.heads.latent?.q_rank?)
    })
    .of(&[(Part::Indexer, 0)]),
    TensorRow::new("indexer_compressor_gate.weight", |c, _| {
        of_pool(c)?;
        matrix(of_lightning(c)?.key_dim, c.n_embd)
    })
    .of(&[(Part::Indexer, 0)]),
    TensorRow::new("indexer_compressor_ape.weight", |c, _| values(of_lightning(c)?.key_dim, of_pool(c)?.ratio))
        .of(&[(Part::Indexer, 0)]),
    TensorRow::new("indexer.q_proj.weight", |c, _| {
        let config = of_input_queries(c)?;
        matrix(config.n_head * config.key_dim, c.n_embd)
    })
    .of(&[(Part::Indexer, 0)]),
    TensorRow::new("indexer.k_proj.weight", |c, _| matrix(of_input_queries(c)?.key_dim, c.n_embd))
        .of(&[(Part::Indexer, 0)]),
    TensorRow::new("indexer.q_norm.weight", |c, _| vector(of_input_queries(c)?.key_dim)).of(&[(Part::Indexer, 0)]),
];

/// Weights of an indexer.
pub struct IndexerWeights {
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
    /// Takes the tensors of layer `i`, if it has an indexer.
    pub(crate) fn load(c: &Config, tensors: &mut LoadedTensors, i: usize) -> Result<Option<IndexerWeights>, LoadError> {
        let name = |part: &str| format!("blk.{i}.indexer.{part}");
        let (Some(config), Selection::Own { .. }) = (&c.attention.indexer, c.block(i).attention.selection) else {
            return Ok(None);
        };
        let (inputs, query, query_norm) = match config.kind {
            IndexerKind::Lightning { .. } => (["attn_k", "proj"], Some(linear(tensors, &name("attn_q_b"))?), None),
            IndexerKind::Blocks | IndexerKind::Means => {
                (["k_proj", "q_proj"], None, Some(required_norm(tensors, &name("q_norm"))?))
            }
        };
        let [keys, others] = inputs.map(|part| linear(tensors, &name(part)));
        let mut inputs = vec![keys?, others?];
        let compressor = |part: &str| format!("blk.{i}.indexer_compressor_{part}");
        let mut gate_bias = None;
        if config.pool.is_some() {
            inputs.insert(1, linear(tensors, &compressor("gate"))?);
            gate_bias = Some(tensors.required(&compressor("ape.weight"))?);
        }
        let (input, key_norm) = (LinearGroup::separate(inputs), required_norm(tensors, &name("k_norm"))?);
        Ok(Some(IndexerWeights { input, gate_bias, query, key_norm, query_norm }))
    }

    pub(crate) fn matrices(&self) -> impl Iterator<Item = &Matrix> {
        self.input.matrices().chain(self.query.iter().map(|l| &l.w))
    }

    /// The input projections, floats of a row, and columns of the projection of queries.
    pub(crate) fn widths(&self) -> (Vec<&Matrix>, usize, usize) {
        let query = self.query.as_ref().map_or((0, 0), |l| (padded(l.w.rows()), l.w.k()));
        let pooled = self.key_norm.width;
        (self.input.matrices().collect(), self.input.stride + query.0 + pooled, query.1)
    }
}

/// What an indexer reads: the input of the layer, and compressed queries of latent attention.
pub(crate) struct IndexInput<'x> {
    pub(crate) x: &'x [f32],
    pub(crate) compressed: Floats<'x>,
}

impl ForwardPass<'_, '_> {
    /// Selects the positions that layer `i` attends to, if it has an indexer. Writes the indexer's keys to `memory`.
    pub(crate) fn select(
        &self,
        i: usize,
        IndexInput { x, compressed }: IndexInput<'_>,
        s: &mut AttentionScratch,
        memory: &mut KvMemory,
        words: &mut [u32],
    ) {
        let (c, rows, n) = (&self.model.config, self.rows, self.n);
        let (Some(w), Some(config), Selection::Own { kv_layer }) =
            (&self.model.layer(i).indexer, &c.attention.indexer, c.layers[i].attention.selection)
        else {
            return;
        };
        let (key_dim, stride, width) = (config.key_dim, w.input.stride, config.n_head * config.key_dim);
        let mut memory_of_rows = core::mem::take(&mut s.index_rows);
        let (input, queries) = memory_of_rows.split_at_mut(n * stride);
        let n_queries = w.query.as_ref().map_or(0, |query| n * padded(query.w.rows()));
        let (queries, pooled) = queries.split_at_mut(n_queries);
        rows.linear_group(&w.input, x, input, words);
        let second = w.input.part_starts[w.input.part_starts.len() - 1];
        let style = match config.kind {
            IndexerKind::Lightning { pairs, .. } => pairs,
            IndexerKind::Blocks | IndexerKind::Means => c.attention.style.unwrap_or(RopeStyle::NeoX),
        };
        let rotates_end = matches!(config.kind, IndexerKind::Lightning { at_end: true, .. });
        let rotate = |r: usize, x: &mut [f32]| {
            let (cos, sin) = s.turns(c, i, r);
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
        let kv = self.kv.layers()[kv_layer];
        let block_keys = |ratio| BlockKeys { keys: kv, made_of: self.kv.layers()[kv_layer + 1], ratio };
        match (config.pool, &w.gate_bias) {
            (Some(pool), Some(bias)) => {
                self.bias_gates((input, stride), w.input.part_starts[1], bias, pool.ratio);
                let (of, keys) = (block_keys(pool.ratio), &mut pooled[..n * key_dim]);
                self.write_block_keys(of, (input, stride), (keys, key_dim), s, memory, &|memory, pages, pos, key| {
                    pool.compress(&of.made_of, memory, pages, pos, key);
                });
            }
            _ if config.kind == IndexerKind::Means => {
                let of = block_keys(c.layers[i].attention.index_ratio);
                self.average_keys(of, w, input, s, memory, &mut pooled[..n * key_dim]);
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
                rows.matrix(&linear.w, linear.bias.as_deref(), compressed, queries, words);
                rows.each(queries, q_stride, &|r, row| rotate(r, &mut row[..width]));
                (&*queries, q_stride, Some(Floats { x: &input[second..], stride }))
            }
            None => {
                let together = config.kind == IndexerKind::Means;
                (&input[second..], stride, together.then_some(Floats { x: &EQUAL_WEIGHTS, stride: 0 }))
            }
        };
        let q = Floats { x: q, stride: q_stride };
        let attention = Attention::causal(kv, memory, config.n_head, q, self.spans);
        let indexer = Indexer { attention, weights, rule: config.rule_of(&c.layers[i].attention) };
        indexer.run(rows.cpu, rows.pool, &mut s.threads, &mut s.selection);
        s.index_rows = memory_of_rows;
    }

    /// Writes the means of the blocks' keys, normalised and rotated.
    fn average_keys(
        &self,
        of: BlockKeys,
        w: &IndexerWeights,
        input: &[f32],
        s: &AttentionScratch,
        memory: &mut KvMemory,
        means: &mut [f32],
    ) {
        let (rows, c, dim) = (self.rows, &self.model.config, w.key_norm.width);
        let style = c.attention.style.unwrap_or(RopeStyle::NeoX);
        let rotary = c.attention.indexer.and_then(|indexer| s.rotary.get(indexer.mean_rope));
        let stride = w.input.stride;
        self.write_block_keys(of, (input, stride), (means, dim), s, memory, &|memory, pages, pos, key| {
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

    /// The selected positions of layer `i`, the last that were computed.
    pub(crate) fn selected<'s>(&self, i: usize, s: &'s SelectionScratch) -> Option<Selected<'s>> {
        match self.model.config.layers[i].attention.selection {
            Selection::All => None,
            Selection::Own { .. } | Selection::Previous => Some(s.selected()),
        }
    }
}

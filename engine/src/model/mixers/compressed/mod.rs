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

mod forward;

use alloc::boxed::Box;
use alloc::format;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;
use core::iter;

use crate::error::LoadError;
use crate::gguf::Gguf;
use crate::kernels::attention::{AttentionWindow, Compressor, KvHeads, MAX_GROUP, MAX_HEAD_DIM};
use crate::kernels::panel::{Matrix, PANEL};
use crate::math::sqrt;
use crate::model::family::Family;
use crate::model::keys::Keys;
use crate::model::keys::{MAX_CONTEXT, MAX_WIDTH};
use crate::model::loader::LoadedTensors;
use crate::model::mixers::LayerKind;
use crate::model::mixers::MixerKind;
use crate::model::mixers::attention::layers::LayerPart;
use crate::model::mixers::attention::rotary::{RopeConfig, Scaling};
use crate::model::mixers::attention::{HeadConfig, LayerAttention};
use crate::model::roles::{Layout, Part, Role, Scope, TensorRow, matrix, values, vector};
use crate::model::rows::packed_words;
use crate::model::weights::{Linear, LinearGroup, Norm, linear, missing, padded, required_norm};

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

/// The ratio of layers with overlapping blocks and an indexer, and that of the others.
const RATIOS: [u32; 2] = [4, 128];

/// Reads the sizes, the ratios of the layers and their RoPE variants: of layers without blocks, and of those with.
pub(crate) fn read(
    keys: &Keys<'_, '_>,
    family: &Family,
    n_ctx_train: usize,
    layers: &mut [LayerPart<'_>],
    ropes: &mut Vec<RopeConfig>,
) -> Result<Option<CompressedConfig>, LoadError> {
    let Some(heads) = layers.iter().find(|l| l.mixer == MixerKind::Compressed).map(|l| l.attention.heads) else {
        return Ok(None);
    };
    if heads.n_head_kv != 1 {
        return Err(keys.wrong("attention.head_count_kv", heads.n_head_kv, "1"));
    }
    if heads.key_dim != heads.value_dim {
        let expected = format!("{}, the value of key_length", heads.key_dim);
        return Err(keys.wrong("attention.value_length", heads.value_dim, expected));
    }
    let index_dim = keys.size("attention.indexer.key_length", 1..=MAX_HEAD_DIM as u32)?;
    let name = "rope.dimension_count";
    let n_rot = keys.u32(name)?.or(Some(heads.key_dim as u32));
    let n_rot = keys.in_range(name, n_rot, 2..=heads.key_dim.min(index_dim) as u32)?;
    if !n_rot.is_multiple_of(2) {
        return Err(keys.wrong(name, n_rot, "an even number"));
    }
    let groups = keys.size("attention.output_group_count", 1..=heads.n_head as u32)?;
    if !heads.n_head.is_multiple_of(groups) {
        let expected = format!("a divisor of head_count, {}", heads.n_head);
        return Err(keys.wrong("attention.output_group_count", groups, expected));
    }
    let window = keys.size("attention.sliding_window", 1..=MAX_CONTEXT)?;
    let name = "attention.compress_ratios";
    let ratios = keys.u32_array(name)?.unwrap_or_default();
    if ratios.len() < layers.len() {
        let found = format!("an array of {} elements", ratios.len());
        return Err(keys.wrong(name, found, format!("{} numbers, one per layer", layers.len())));
    }
    let bases =
        [keys.above("rope.freq_base", 1.0, 10_000.0)?, keys.above("attention.compress_rope_freq_base", 1.0, 0.0)?];
    // rotated vectors keep their magnitude
    let scaling = Scaling { attn_factor: 1.0, magnitude: 1.0, ..Scaling::read(keys, n_ctx_train, family)? };
    let variants = [(bases[0], None), (bases[1], Some(scaling))];
    let variant = |(base, scaling)| RopeConfig { base, scaling, n_rot, unrotated: Vec::new() };
    *ropes = variants.map(variant).into();
    for (LayerPart { attention: layer, .. }, ratio) in layers.iter_mut().zip(ratios) {
        layer.compressor = match ratio {
            0 => None,
            ratio if RATIOS.contains(&ratio) => {
                Some(Compressor { ratio: ratio as usize, overlaps: ratio == RATIOS[0] })
            }
            ratio => return Err(keys.wrong(name, ratio, format!("0, {} or {}", RATIOS[0], RATIOS[1]))),
        };
        layer.rope = Some(usize::from(layer.compressor.is_some()));
        layer.window = AttentionWindow { left: window - 1, right: 0, chunk: usize::MAX };
        layer.scale = 1.0 / sqrt(heads.key_dim as f32);
    }
    Ok(Some(CompressedConfig {
        q_rank: keys.size("attention.q_lora_rank", 1..=MAX_WIDTH)?,
        n_rot,
        groups,
        rank: keys.size("attention.output_lora_rank", 1..=MAX_WIDTH / groups as u32)?,
        index_heads: keys.size("attention.indexer.head_count", 1..=MAX_GROUP as u32)?,
        index_dim,
        top_k: keys.size("attention.indexer.top_k", 1..=MAX_CONTEXT)?,
    }))
}

/// Whether layer `n_layer` predicts further tokens, where the metadata says so. Files without that layer keep the key.
pub(crate) fn has_mtp(kinds: &[LayerKind], shards: &[Gguf<'_>], n_layer: usize) -> bool {
    let is_compressed = kinds.iter().any(|kind| kind.mixer == MixerKind::Compressed);
    !is_compressed || crate::model::mixers::has(shards, &format!("blk.{n_layer}.nextn.eh_proj.weight"))
}

/// Heads whose value is the key, which is not stored twice if the layout allows.
fn shared_heads(dim: usize) -> KvHeads {
    if dim.is_multiple_of(PANEL) { KvHeads::latent(dim, dim) } else { KvHeads::separate(1, dim, dim) }
}

/// What a layer has in KV pages, from its `kv_layer` on: keys; compressed keys, and the values and gates that they are made
/// of; the same of the indexer.
pub(crate) fn kv_layers(c: &CompressedConfig, layer: &LayerAttention) -> impl Iterator<Item = KvHeads> {
    let dim = layer.heads.key_dim;
    let blocks = layer.compressor.map(|block| [shared_heads(dim), KvHeads::exact(block.heads(), dim)]);
    let index = layer.compressor.filter(|block| block.overlaps);
    let index = index.map(|block| [KvHeads::separate(1, c.index_dim, 0), KvHeads::exact(block.heads(), c.index_dim)]);
    iter::once(shared_heads(dim)).chain(blocks.into_iter().flatten()).chain(index.into_iter().flatten())
}

const ALL: &[Layout] = &[(Part::Compressed, 0)];

/// Sizes of the model and heads of the layer.
fn sizes(c: &Scope<'_>) -> Option<(CompressedConfig, HeadConfig)> {
    Some((c.attention.compressed?, c.layer.attention.heads))
}

/// Rows of the values of a position, and positions of a block, for keys of `dim` elements.
fn block(c: &Scope<'_>, dim: usize) -> Option<(usize, usize)> {
    let block = c.layer.attention.compressor?;
    Some((block.heads() / 2 * dim, block.ratio))
}

/// The same of the indexer.
fn index_block(c: &Scope<'_>) -> Option<(usize, usize)> {
    c.layer.attention.compressor.filter(|block| block.overlaps)?;
    block(c, c.attention.compressed?.index_dim)
}

/// The tensors of a layer.
pub(crate) const TENSORS: &[TensorRow] = &[
    TensorRow::new("attn_sinks.weight", |c, _| vector(sizes(c)?.1.n_head)).of(ALL),
    TensorRow::new("attn_q_a.weight", |c, _| matrix(sizes(c)?.0.q_rank, c.n_embd)).of(ALL),
    TensorRow::new("attn_q_a_norm.weight", |c, _| vector(sizes(c)?.0.q_rank)).of(ALL),
    TensorRow::new("attn_q_b.weight", |c, _| matrix(sizes(c)?.1.q_width(), sizes(c)?.0.q_rank)).of(ALL),
    TensorRow::new("attn_kv.weight", |c, _| matrix(sizes(c)?.1.key_dim, c.n_embd)).of(ALL),
    TensorRow::new("attn_kv_a_norm.weight", |c, _| vector(sizes(c)?.1.key_dim)).of(ALL),
    // the matrices of the groups, one after another or in a dimension of their own
    TensorRow::new("attn_output_a.weight", |c, dims| {
        let (config, heads) = sizes(c)?;
        let (n, rows, k) = (config.groups, config.rank, heads.q_width() / config.groups);
        Some(if dims[2] > 1 { Role::Matrices { n, rows, k } } else { Role::Stacked { n, rows, k } })
    })
    .of(ALL),
    TensorRow::new("attn_output_b.weight", |c, _| matrix(c.n_embd, sizes(c)?.0.groups * sizes(c)?.0.rank)).of(ALL),
    TensorRow::new("attn_compressor_kv.weight", |c, _| matrix(block(c, c.layer.attention.heads.key_dim)?.0, c.n_embd))
        .of(ALL),
    TensorRow::new("attn_compressor_gate.weight", |c, _| {
        matrix(block(c, c.layer.attention.heads.key_dim)?.0, c.n_embd)
    })
    .of(ALL),
    TensorRow::new("attn_compressor_ape.weight", |c, _| {
        let (width, ratio) = block(c, c.layer.attention.heads.key_dim)?;
        values(width, ratio)
    })
    .of(ALL),
    TensorRow::new("attn_compressor_norm.weight", |c, _| {
        c.layer.attention.compressor?;
        vector(c.layer.attention.heads.key_dim)
    })
    .of(ALL),
    TensorRow::new("indexer.proj.weight", |c, _| {
        index_block(c)?;
        matrix(c.attention.compressed?.index_heads, c.n_embd)
    })
    .of(ALL),
    TensorRow::new("indexer.attn_q_b.weight", |c, _| {
        index_block(c)?;
        let config = c.attention.compressed?;
        matrix(config.index_heads * config.index_dim, config.q_rank)
    })
    .of(ALL),
    TensorRow::new("indexer_compressor_kv.weight", |c, _| matrix(index_block(c)?.0, c.n_embd)).of(ALL),
    TensorRow::new("indexer_compressor_gate.weight", |c, _| matrix(index_block(c)?.0, c.n_embd)).of(ALL),
    TensorRow::new("indexer_compressor_ape.weight", |c, _| {
        let (width, ratio) = index_block(c)?;
        values(width, ratio)
    })
    .of(ALL),
    TensorRow::new("indexer_compressor_norm.weight", |c, _| {
        index_block(c)?;
        vector(c.attention.compressed?.index_dim)
    })
    .of(ALL),
];

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

    fn load(
        compressor: Compressor,
        tensors: &mut LoadedTensors,
        name: &dyn Fn(&str) -> String,
    ) -> Result<Blocks, LoadError> {
        let inputs = vec![linear(tensors, &name("kv"))?, linear(tensors, &name("gate"))?];
        Ok(Blocks {
            compressor,
            input: LinearGroup::separate(inputs),
            gate_bias: tensors.required(&name("ape.weight"))?,
            norm: required_norm(tensors, &name("norm"))?,
        })
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
pub struct CompressedWeights {
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

impl CompressedWeights {
    /// Takes the tensors of layer `i`.
    pub(crate) fn load(
        layer: &LayerAttention,
        tensors: &mut LoadedTensors,
        i: usize,
    ) -> Result<CompressedWeights, LoadError> {
        let name = |part: &str| format!("blk.{i}.{part}");
        let inputs = vec![linear(tensors, &name("attn_q_a"))?, linear(tensors, &name("attn_kv"))?];
        let dim = layer.heads.key_dim;
        let groups = name("attn_output_a.weight");
        let blocks = match layer.compressor {
            None => None,
            Some(c) => Some(Blocks::load(c, tensors, &|part| name(&format!("attn_compressor_{part}")))?.into()),
        };
        let indexer = match layer.compressor.filter(|c| c.overlaps) {
            None => None,
            Some(c) => Some(Box::new(BlockIndexer {
                blocks: Blocks::load(c, tensors, &|part| name(&format!("indexer_compressor_{part}")))?,
                weights: linear(tensors, &name("indexer.proj"))?,
                query: linear(tensors, &name("indexer.attn_q_b"))?,
            })),
        };
        Ok(CompressedWeights {
            heads: layer.heads,
            input: LinearGroup::separate(inputs),
            query_norm: required_norm(tensors, &name("attn_q_a_norm"))?,
            query: linear(tensors, &name("attn_q_b"))?,
            head_norm: Norm::plain(dim),
            key_norm: required_norm(tensors, &name("attn_kv_a_norm"))?,
            sinks: tensors.required(&name("attn_sinks.weight"))?,
            groups: tensors.matrices(&groups).ok_or_else(|| missing(&groups))?,
            output: linear(tensors, &name("attn_output_b"))?,
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

    /// Floats of a row: queries, outputs of heads, of groups.
    fn parts(&self) -> [usize; 3] {
        let rank = self.groups.first().map_or(0, |w| padded(w.rows()));
        [padded(self.heads.q_width()), self.heads.out_width(), self.groups.len() * rank]
    }

    /// The input projections, floats of a row of [`StepScratch::wide`], and words of packed activations of the others.
    pub(crate) fn widths(&self) -> (Vec<&Matrix>, usize, usize) {
        let of_blocks = |b: &Blocks| b.input.stride + b.dim();
        let blocks = self.blocks.as_ref().map_or(0, |b| of_blocks(b));
        let index = self
            .indexer
            .as_ref()
            .map_or(0, |i| of_blocks(&i.blocks) + padded(i.weights.w.rows()) + padded(i.query.w.rows()));
        let wide = self.parts().into_iter().chain([blocks, index]).fold(self.input.stride, usize::saturating_add);
        let packed = [
            packed_words(1, 1, self.query.w.k()),
            packed_words(1, self.groups.len(), self.groups.first().map_or(0, Matrix::k)),
            packed_words(1, 1, self.output.w.k()),
        ];
        (self.inputs().collect(), wide, packed.into_iter().max().unwrap_or(0))
    }
}

//! Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) in its absorbed form, the same for prompts and answers:
//!
//! ```text
//! q[h] = (W_q x)[h] or (W_qb norm(W_qa x))[h]        (nope, rope) elements
//! c, r = W_kva x;  c = norm(c);  r = rope(r)         the key of all heads: (rank, rope) elements; c is its value too
//! k[h] = (W_kb[h] q[h].nope, rope(q[h].rope))        the query in the space of the keys
//! y = W_o concat_h (W_vb[h] attention(k[h], (c, r), c))
//! ```
//!
//! Files have `W_kb` and `W_vb` apart, or in one matrix, whose rows of a head are the transpose of `W_kb[h]`, then
//! `W_vb[h]`.

use alloc::format;
use alloc::vec;
use alloc::vec::Vec;

use crate::error::LoadError;
use crate::kernels::act::Floats;
use crate::kernels::attention::{self, Attention, KvMemory, KvRows, MAX_GROUP, MAX_HEAD_DIM, MAX_LATENT_DIM};
use crate::kernels::elementwise::scale;
use crate::kernels::matmul::{MatmulJob, products};
use crate::kernels::panel::{Matrix, PANEL};
use crate::kernels::rope::{RopeStyle, Rotation, rope};
use crate::model::config::LayerConfig;
use crate::model::forward::Stage;
use crate::model::keys::Keys;
use crate::model::keys::MAX_WIDTH;
use crate::model::loader::LoadedTensors;
use crate::model::mixers::attention::HeadConfig;
use crate::model::mixers::indexer::IndexInput;
use crate::model::residual::orders::{ForwardPass, SubLayerRows, activate_gates, gate_heads};
use crate::model::roles::{Layout, Part, Role, Scope, TensorRow, matrix, vector};
use crate::model::rows::{PackedColumns, columns, packed_words};
use crate::model::scratch::{AttentionScratch, StepScratch, zeros};
use crate::model::weights::{Linear, LinearGroup, Norm, linear, norm, padded, required_norm};
use crate::quant::Dtype;

/// Sizes of latent attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LatentHeads {
    /// Elements that queries are projected from, if not from the input.
    pub q_rank: Option<usize>,
    /// Elements of a query that are projected into the space of the keys.
    pub nope: usize,
    /// Elements of a query and key after these, which RoPE rotates.
    pub rope: usize,
    /// Elements of a head's output.
    pub value: usize,
}

impl LatentHeads {
    /// Elements of a query before its projection.
    pub fn query(&self) -> usize {
        self.nope + self.rope
    }
}

/// Keys of the sizes of layers with a window, which may differ, and of all layers.
const RANK: [&str; 2] = ["attention.kv_lora_rank_swa", "attention.kv_lora_rank"];
const ROPE: [&str; 2] = ["rope.dimension_count_swa", "rope.dimension_count"];
const QUERY: [&str; 3] = ["attention.key_length_mla_swa", "attention.key_length_mla", "attention.key_length"];
const VALUE: [&str; 3] = ["attention.value_length_mla_swa", "attention.value_length_mla", "attention.value_length"];

/// Reads the heads of a layer of a model of width `n_embd`; `local` if the layer has a window.
pub(crate) fn heads(keys: &Keys<'_, '_>, n_embd: usize, n_head: u32, local: bool) -> Result<HeadConfig, LoadError> {
    let n_head = keys.in_range("attention.head_count", Some(n_head), 1..=MAX_GROUP as u32)?;
    let given = |names: &[&'static str]| {
        let names = &names[usize::from(!local)..];
        names.iter().copied().find(|name| keys.has(name)).unwrap_or(names[names.len() - 1])
    };
    let rank_name = given(&RANK);
    let rank = keys.size(rank_name, 1..=MAX_HEAD_DIM as u32)?;
    if !rank.is_multiple_of(PANEL) {
        return Err(keys.wrong(rank_name, rank, format!("a multiple of {PANEL}")));
    }
    let rope = keys.size(given(&ROPE), 0..=(MAX_LATENT_DIM - MAX_HEAD_DIM) as u32)?;
    // without the sizes of expanded heads, the others are meant
    let size = |names: &[&'static str]| {
        let given = given(names);
        let size = keys.u32(given)?.or(Some((n_embd / n_head) as u32));
        Ok::<_, LoadError>((given, keys.in_range(given, size, 1..=MAX_WIDTH / n_head as u32)?))
    };
    let (name, query) = size(&QUERY)?;
    let (_, value) = size(&VALUE)?;
    if query <= rope {
        return Err(keys.wrong(name, query, format!("more than rope.dimension_count, {rope}")));
    }
    let q_rank = match keys.u32("attention.q_lora_rank")? {
        None | Some(0) => None,
        v => Some(keys.in_range("attention.q_lora_rank", v, 1..=MAX_WIDTH)?),
    };
    let latent = Some(LatentHeads { q_rank, nope: query - rope, rope, value });
    Ok(HeadConfig { n_head, n_head_kv: 1, key_dim: rank + rope, value_dim: rank, latent })
}

const INPUT: &[Layout] = &[(Part::LatentInput, 0)];
const COMPRESSED: &[Layout] = &[(Part::LatentQuery, 0)];
const DIRECT: &[Layout] = &[(Part::LatentQuery, 1)];
const FUSED: &[Layout] = &[(Part::LatentHeads, 0)];
const SPLIT: &[Layout] = &[(Part::LatentHeads, 1)];
const TWO_QUERIES: (&str, &str) = ("attn_q_a", "either one projection of queries or two");
const FUSED_HEADS: (&str, &str) = ("attn_kv_b", "either the fused or the separate tensors");

fn sizes(c: &Scope<'_>) -> Option<(HeadConfig, LatentHeads)> {
    let heads = c.layer.attention.heads;
    Some((heads, heads.latent?))
}

/// The tensors of a layer.
pub(crate) const TENSORS: &[TensorRow] = &[
    TensorRow::new("attn_q_a.weight", |c, _| matrix(sizes(c)?.1.q_rank?, c.n_embd)).of(COMPRESSED),
    TensorRow::new("attn_q_a_norm.weight", |c, _| vector(sizes(c)?.1.q_rank?)).of(COMPRESSED),
    TensorRow::new("attn_q_b.weight", |c, _| {
        let (heads, latent) = sizes(c)?;
        matrix(heads.n_head * latent.query(), latent.q_rank?)
    })
    .of(COMPRESSED),
    TensorRow::new("attn_q.weight", |c, _| {
        let (heads, latent) = sizes(c)?;
        matrix(heads.n_head * latent.query(), c.n_embd)
    })
    .of(DIRECT)
    .excludes(TWO_QUERIES),
    TensorRow::new("attn_kv_a_mqa.weight", |c, _| matrix(sizes(c)?.0.key_dim, c.n_embd)).of(INPUT),
    TensorRow::new("attn_kv_a_norm.weight", |c, _| vector(sizes(c)?.0.value_dim)).of(INPUT),
    TensorRow::new("attn_kv_b.weight", |c, _| {
        let (heads, latent) = sizes(c)?;
        Some(Role::Stacked { n: heads.n_head, rows: latent.nope + latent.value, k: heads.value_dim })
    })
    .of(FUSED),
    TensorRow::new("attn_k_b.weight", |c, _| {
        let (heads, latent) = sizes(c)?;
        Some(Role::Matrices { n: heads.n_head, rows: heads.value_dim, k: latent.nope })
    })
    .of(SPLIT)
    .excludes(FUSED_HEADS),
    TensorRow::new("attn_v_b.weight", |c, _| {
        let (heads, latent) = sizes(c)?;
        Some(Role::Matrices { n: heads.n_head, rows: latent.value, k: heads.value_dim })
    })
    .of(SPLIT)
    .excludes(FUSED_HEADS),
    // of the rotated part, before the rotation
    TensorRow::new("attn_k_norm.weight", |c, _| vector(sizes(c)?.1.rope)),
    TensorRow::new("attn_sinks.weight", |c, _| vector(sizes(c)?.0.n_head)),
    // a gate per head or per element
    TensorRow::new("attn_gate.weight", |c, dims| {
        let (heads, latent) = sizes(c)?;
        let is_per_head = dims[1] == heads.n_head as u64;
        matrix(heads.n_head * if is_per_head { 1 } else { latent.value }, c.n_embd)
    }),
    TensorRow::new("attn_output.weight", |c, _| {
        let (heads, latent) = sizes(c)?;
        matrix(c.n_embd, heads.n_head * latent.value)
    })
    .of(&[(Part::AttnOutput, 0)]),
];

/// Weights of latent attention.
pub struct LatentWeights {
    heads: HeadConfig,
    sizes: LatentHeads,
    /// Queries, or what they are projected from; keys (rank + rope, n_embd); gates of heads, if there are any (n_head,
    /// n_embd).
    input: LinearGroup,
    /// Norm and projection of compressed queries (n_head * (nope + rope), q_rank).
    query: Option<(Norm, Linear)>,
    /// Norm of the latent part of keys (rank).
    key_norm: Norm,
    /// Norm of the rotated part of keys (rope).
    rope_norm: Option<Norm>,
    /// (rank, nope), one per head.
    query_to_key: Vec<Matrix>,
    /// One per head; the last `value` rows project the head's output, (rows, rank).
    to_value: Vec<Matrix>,
    /// (n_embd, n_head * value)
    output: Linear,
    /// Attention sinks (n_head).
    sinks: Option<Vec<f32>>,
}

impl LatentWeights {
    /// Takes the tensors of layer `i`.
    pub(crate) fn load(
        layer: &LayerConfig,
        sizes: LatentHeads,
        tensors: &mut LoadedTensors,
        i: usize,
    ) -> Result<LatentWeights, LoadError> {
        let name = |part: &str| format!("blk.{i}.{part}");
        let is_compressed = tensors.has(&name("attn_q_a.weight"));
        let query = if is_compressed {
            Some((required_norm(tensors, &name("attn_q_a_norm"))?, linear(tensors, &name("attn_q_b"))?))
        } else {
            None
        };
        let query_input = linear(tensors, &name(if is_compressed { "attn_q_a" } else { "attn_q" }))?;
        let mut matrices = |part: &str| {
            let name = name(part);
            tensors.matrices(&name).ok_or(LoadError::MissingTensor { name })
        };
        let (query_to_key, to_value) = match matrices("attn_kv_b.weight") {
            Ok(fused) => {
                let transposed = fused.iter().map(|w| transposed(w, sizes.nope)).collect::<Result<_, _>>()?;
                (transposed, fused)
            }
            Err(_) => (matrices("attn_k_b.weight")?, matrices("attn_v_b.weight")?),
        };
        let mut inputs = vec![query_input, linear(tensors, &name("attn_kv_a_mqa"))?];
        if tensors.has(&name("attn_gate.weight")) {
            inputs.push(linear(tensors, &name("attn_gate"))?);
        }
        Ok(LatentWeights {
            heads: layer.attention.heads,
            sizes,
            input: LinearGroup::separate(inputs),
            query,
            key_norm: required_norm(tensors, &name("attn_kv_a_norm"))?,
            rope_norm: norm(tensors, &name("attn_k_norm"))?,
            query_to_key,
            to_value,
            output: linear(tensors, &name("attn_output"))?,
            sinks: tensors.optional(&name("attn_sinks.weight")),
        })
    }

    pub(crate) fn matrices(&self) -> Vec<&Matrix> {
        let linears = self.query.iter().map(|(_, l)| &l.w).chain([&self.output.w]);
        self.input.matrices().chain(linears).chain(&self.query_to_key).chain(&self.to_value).collect()
    }

    /// Rows of the projection of a head's output, whole panels.
    fn value_rows(&self) -> usize {
        self.to_value.first().map_or(0, |w| padded(w.rows()))
    }

    /// Floats of a row: queries, queries in the space of keys, outputs in that space, outputs.
    fn parts(&self) -> [usize; 4] {
        let n = self.heads.n_head;
        let query = if self.query.is_some() { padded(n * self.sizes.query()) } else { 0 };
        [query, self.heads.q_width(), self.heads.out_width(), n * self.value_rows()]
    }

    /// The input projections, floats of a row of [`StepScratch::wide`], and words of packed activations of the others.
    pub(crate) fn widths(&self) -> (Vec<&Matrix>, usize, usize) {
        let wide = self.parts().into_iter().fold(self.input.stride, usize::saturating_add);
        let n = self.heads.n_head;
        let packed = [
            packed_words(1, 1, self.sizes.q_rank.unwrap_or(0)),
            packed_words(1, n, self.sizes.nope),
            packed_words(1, n, self.heads.value_dim),
            packed_words(1, 1, self.output.w.k()),
        ];
        (self.input.matrices().collect(), wide, packed.into_iter().max().unwrap_or(0))
    }
}

/// The first `n` rows of a matrix as columns, in f32.
fn transposed(w: &Matrix, n: usize) -> Result<Matrix, LoadError> {
    let k = w.k();
    let needed = (4 * k * n) as u64;
    let no_memory = |_| LoadError::OutOfMemory { what: "the weights", needed };
    let (mut row, mut bytes) = (vec![0.0; k], zeros::<u8>(&[4, k, n]).map_err(no_memory)?);
    for column in 0..n {
        w.row(column, &mut row);
        for (x, bytes) in row.iter().zip(bytes.chunks_exact_mut(4 * n)) {
            bytes[4 * column..][..4].copy_from_slice(&x.to_le_bytes());
        }
    }
    Matrix::from_rows(Dtype::F32, k, n, &bytes).map_err(no_memory)
}

impl ForwardPass<'_, '_> {
    /// `y = attention(x)` of layer `i`. Writes keys to `memory`.
    pub(crate) fn latent_attention(
        &mut self,
        (i, m): (usize, &LatentWeights),
        SubLayerRows { x, y }: SubLayerRows<'_>,
        s: &mut AttentionScratch,
        memory: &mut KvMemory,
        StepScratch { wide, words, .. }: &mut StepScratch,
    ) {
        let (n, rows, stride, at) = (self.n, self.rows, m.input.stride, Some(i));
        let k_at = m.input.part_starts[1];
        let [query, key_query, latent_out, out] = m.parts();
        let (input, rest) = wide.split_at_mut(n * stride);
        let (queries, rest) = rest.split_at_mut(n * query);
        let (key_queries, rest) = rest.split_at_mut(n * key_query);
        let (latent_outs, rest) = rest.split_at_mut(n * latent_out);
        let outs = &mut rest[..n * out];

        rows.linear_group(&m.input, x, input, words);
        if let Some((norm, linear)) = &m.query {
            rows.each(input, stride, &|_, row| rows.norm_heads(norm, &mut row[..norm.width]));
            let x = Floats { x: input, stride };
            rows.matrix(&linear.w, linear.bias.as_deref(), x, queries, words);
        }
        self.select(i, IndexInput { x, compressed: Floats { x: input, stride } }, s, memory, words);
        self.rotate_latent_keys(i, m, input, s);
        let key_dim = m.heads.key_dim;
        self.trace_stage(Stage::K, at, &mut columns(input, stride, k_at, key_dim));
        let (queries, q_stride) = if m.query.is_some() { (&*queries, query) } else { (&*input, stride) };
        self.trace_stage(Stage::Q, at, &mut columns(queries, q_stride, 0, m.heads.n_head * m.sizes.query()));
        per_head(self, &m.query_to_key, (queries, q_stride, m.sizes.query()), (key_queries, key_dim), words);
        self.rotate_latent_queries(i, m, (queries, q_stride), key_queries, s);
        self.trace_stage(Stage::Rope, at, &mut columns(key_queries, key_query, 0, key_query));

        let config = &self.model.config.layers[i].attention;
        let kv = self.kv.layers()[config.kv_layer];
        let kv_rows = KvRows { x: input, stride, k_at, v_at: k_at, slots: &s.slots };
        attention::write_kv(rows.cpu, rows.pool, &kv, kv_rows, memory);
        let attention = Attention {
            kv,
            memory,
            n_head: m.heads.n_head,
            window: config.window,
            soft_cap: self.model.config.attention.soft_cap,
            alibi: None,
            bias: None,
            sinks: m.sinks.as_deref(),
            selected: self.selected(i, &s.selection),
            q: key_queries,
            q_stride: key_query,
            spans: self.spans,
        };
        if cfg!(feature = "trace") && self.trace.is_some() {
            self.trace_stage(Stage::Scores, at, &mut attention.scores(rows.cpu).iter().map(Vec::as_slice));
        }
        attention.run(rows.cpu, rows.pool, latent_outs, &mut s.threads, &mut s.parts);
        let rank = m.heads.value_dim;
        per_head(self, &m.to_value, (latent_outs, latent_out, rank), (outs, m.value_rows()), words);
        self.join_heads(m, input, outs);
        self.trace_stage(Stage::AttnOut, at, &mut columns(outs, out, 0, m.output.w.k()));
        rows.matrix(&m.output.w, m.output.bias.as_deref(), Floats { x: outs, stride: out }, y, words);
    }

    /// Moves the outputs of the heads together: they are padded to whole panels, and fused ones begin with the rows of
    /// the keys. Applies the gates, if there are any.
    fn join_heads(&self, m: &LatentWeights, input: &mut [f32], outs: &mut [f32]) {
        let (rows, act, stride) = (self.rows, self.model.config.attention.output_gate, m.input.stride);
        let (n, value, width) = (m.heads.n_head, m.sizes.value, m.value_rows());
        let first = m.to_value.first().map_or(0, Matrix::rows) - value;
        let gates = m.input.part_starts.get(2).copied();
        let n_gates = m.input.linears.last().map_or(0, |(l, _)| l.w.rows());
        if let Some(at) = gates {
            rows.each(input, stride, &|_, row| activate_gates(rows.cpu, act, &mut row[at..at + n_gates]));
        }
        let input = &*input;
        rows.each(outs, n * width, &|r, row| {
            for h in 0..n {
                row.copy_within(h * width + first..h * width + first + value, h * value);
            }
            if let Some(at) = gates {
                gate_heads(rows.cpu, &mut row[..n * value], &input[r * stride + at..][..n_gates], value);
            }
        });
    }

    /// Normalises the latent part of the keys and rotates the rest, in place.
    fn rotate_latent_keys(&self, i: usize, m: &LatentWeights, input: &mut [f32], s: &AttentionScratch) {
        let (rows, c, k_at) = (self.rows, &self.model.config, m.input.part_starts[1]);
        let style = c.attention.style.unwrap_or(RopeStyle::Interleaved);
        rows.each(input, m.input.stride, &|r, row| {
            let (latent, rotated) = row[k_at..k_at + m.heads.key_dim].split_at_mut(m.heads.value_dim);
            rows.norm_heads(&m.key_norm, latent);
            if let Some(norm) = &m.rope_norm {
                rows.norm_heads(norm, rotated);
            }
            let (cos, sin) = s.turns(c, i, r);
            rope(rows.cpu, Rotation { style, cos, sin, scale: 1.0 }, rotated, m.sizes.rope);
        });
    }

    /// Completes the queries in the space of the keys by the rotated parts, and scales them.
    fn rotate_latent_queries(
        &self,
        i: usize,
        m: &LatentWeights,
        (queries, q_stride): (&[f32], usize),
        key_queries: &mut [f32],
        s: &AttentionScratch,
    ) {
        let (rows, c) = (self.rows, &self.model.config);
        let style = c.attention.style.unwrap_or(RopeStyle::Interleaved);
        let LatentHeads { nope, rope: n_rope, .. } = m.sizes;
        rows.each(key_queries, m.heads.q_width(), &|r, row| {
            let queries = queries[r * q_stride..].chunks_exact(m.sizes.query());
            let (cos, sin) = s.turns(c, i, r);
            for (head, query) in row.chunks_exact_mut(m.heads.key_dim).zip(queries) {
                let rotated = &mut head[m.heads.value_dim..];
                rotated.copy_from_slice(&query[nope..]);
                rope(rows.cpu, Rotation { style, cos, sin, scale: 1.0 }, rotated, n_rope);
            }
            scale(rows.cpu, row, s.query_scale(c, i, r));
        });
    }
}

/// `out[h] = w[h] x[h]` for each head; heads of `x` and `out` are `width` floats apart, which is at least the rows of a
/// matrix in whole panels.
pub(crate) fn per_head(
    pass: &ForwardPass<'_, '_>,
    w: &[Matrix],
    (x, stride, head): (&[f32], usize, usize),
    (out, width): (&mut [f32], usize),
    words: &mut [u32],
) {
    let rows = pass.rows;
    let mut packed = PackedColumns::new(words);
    let job = |(h, w)| {
        let x = Floats { x: &x[h * head..pass.n * stride], stride };
        MatmulJob { w, x: packed.of(&rows, w, x, h), out_column: 0, out_row: h * width }
    };
    let jobs: Vec<MatmulJob<'_>> = w.iter().enumerate().map(job).collect();
    products(rows.cpu, rows.pool, &jobs, out, w.len() * width);
}

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

use alloc::vec;
use alloc::vec::Vec;

use super::attention::batch::AttentionBatch;
use super::attention::config::{AttentionConfig, LayerAttention, OutputGate};
use super::attention::forward::{activate_gates, gate_heads};
use super::attention::heads::HeadConfig;
use super::attention::latent_heads::LatentHeads;
use super::attention::weights::OUTPUT;
use super::indexer::{self, IndexInput, IndexerWeights};
use crate::error::LoadError;
use crate::kernels::act::Floats;
use crate::kernels::attention::{self, Attention, KvMemory, KvRows};
use crate::kernels::elementwise::scale;
use crate::kernels::matmul::{MatmulJob, products};
use crate::kernels::panel::Matrix;
use crate::kernels::rope::{RopeStyle, Rotation, rope};
use crate::model::budget::zeros;
use crate::model::linear::{Linear, LinearGroup, Norm, padded};
use crate::model::memory::{Size, Stack};
use crate::model::pass::{LayerAt, Pass, Stage, SubLayerRows};
use crate::model::rows::{PackedColumns, RowOps, columns};
use crate::model::tensors::{Declared, LinearName, Loaded, Name, NormName, Shape, matrix, vector};
use crate::quant::Dtype;

const Q_DOWN: LinearName = LinearName("attn_q_a");
const Q_DOWN_NORM: NormName = NormName("attn_q_a_norm");
const Q_UP: LinearName = LinearName("attn_q_b");
const Q: LinearName = LinearName("attn_q");
const KV: LinearName = LinearName("attn_kv_a_mqa");
const KV_NORM: NormName = NormName("attn_kv_a_norm");
const KV_UP: Name = Name::weight("attn_kv_b");
const K_UP: Name = Name::weight("attn_k_b");
const V_UP: Name = Name::weight("attn_v_b");
const K_NORM: NormName = NormName("attn_k_norm");
const SINKS: Name = Name::weight("attn_sinks");
const GATE: LinearName = LinearName("attn_gate");
/// A tensor that only layers with latent attention have.
pub(crate) const MARKER: Name = KV.weight();

/// Weights of latent attention.
pub(crate) struct LatentWeights {
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
    /// Declares the tensors of a layer of a model of width `d`.
    pub(crate) fn tensors(t: &mut Declared<'_>, heads: HeadConfig, sizes: LatentHeads, d: usize) {
        let (n, rank) = (heads.n_head, heads.value_dim);
        t.required(KV.weight(), matrix(heads.key_dim, d));
        t.required(KV_NORM.weight(), vector(rank));
        let direct = matrix(n * sizes.query(), d);
        if t.has(Q_DOWN.weight()) {
            let q_rank = sizes.q_rank.unwrap_or(0);
            t.required(Q_DOWN.weight(), matrix(q_rank, d));
            t.required(Q_DOWN_NORM.weight(), vector(q_rank));
            t.required(Q_UP.weight(), matrix(n * sizes.query(), q_rank));
            t.excluded(Q.weight(), direct, (Q_DOWN.weight(), "either one projection of queries or two"));
        } else {
            t.required(Q.weight(), direct);
        }
        let (k_up, v_up) =
            (Shape::Matrices { n, rows: rank, k: sizes.nope }, Shape::Matrices { n, rows: sizes.value, k: rank });
        if t.has(KV_UP) {
            t.required(KV_UP, Shape::Stacked { n, rows: sizes.nope + sizes.value, k: rank });
            let rule = (KV_UP, "either the fused or the separate tensors");
            t.excluded(K_UP, k_up, rule);
            t.excluded(V_UP, v_up, rule);
        } else {
            t.required(K_UP, k_up);
            t.required(V_UP, v_up);
        }
        // of the rotated part, before the rotation
        t.optional(K_NORM.weight(), vector(sizes.rope));
        t.optional(SINKS, vector(n));
        // a gate per head or per element
        t.optional_by(GATE.weight(), move |dims| matrix(n * if dims[1] == n as u64 { 1 } else { sizes.value }, d));
        t.required(OUTPUT.weight(), matrix(d, n * sizes.value));
        t.optional(OUTPUT.bias(), vector(d));
    }

    /// Takes the tensors of a layer.
    pub(crate) fn load(t: &mut Loaded<'_>, heads: HeadConfig, sizes: LatentHeads) -> Result<LatentWeights, LoadError> {
        let is_compressed = t.has(Q_DOWN.weight());
        let query = if is_compressed { Some((t.required_norm(Q_DOWN_NORM)?, t.linear(Q_UP)?)) } else { None };
        let query_input = t.linear(if is_compressed { Q_DOWN } else { Q })?;
        let (query_to_key, to_value) = match t.matrices(KV_UP) {
            Some(fused) => {
                let transposed = fused.iter().map(|w| transposed(w, sizes.nope)).collect::<Result<_, _>>()?;
                (transposed, fused)
            }
            None => (t.required_matrices(K_UP)?, t.required_matrices(V_UP)?),
        };
        let mut inputs = vec![query_input, t.linear(KV)?];
        inputs.extend(t.optional_linear(GATE)?);
        Ok(LatentWeights {
            heads,
            sizes,
            input: LinearGroup::separate(inputs),
            query,
            key_norm: t.required_norm(KV_NORM)?,
            rope_norm: t.norm(K_NORM)?,
            query_to_key,
            to_value,
            output: t.linear(OUTPUT)?,
            sinks: t.optional(SINKS),
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

    /// Floats of a row: inputs, queries, queries in the space of keys, outputs in that space, outputs.
    fn parts(&self) -> [usize; 5] {
        let n = self.heads.n_head;
        let query = if self.query.is_some() { padded(n * self.sizes.query()) } else { 0 };
        [self.input.stride, query, self.heads.q_width(), self.heads.out_width(), n * self.value_rows()]
    }

    /// Temporaries of `n` rows, and of the indexer, if there is one.
    pub(crate) fn size(&self, n: usize, indexer: Option<&IndexerWeights>) -> Size {
        let indexer = indexer.map_or(Size::NONE, |indexer| indexer.size(n));
        let query = self.query.as_ref().map_or(Size::NONE, |(_, linear)| linear.size(n));
        let heads = [per_head_size(&self.query_to_key, n), per_head_size(&self.to_value, n)];
        let products = self.input.size(n).or(query).or(self.output.size(n)).or(Size::any(heads)).or(indexer);
        Size::rows(n, self.parts()).and(products)
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

impl LatentWeights {
    /// `y = attention(x)`. Writes keys to `memory`. The indexer, if there is one, selects the positions that are read.
    pub(crate) fn run(
        &self,
        pass: &mut Pass<'_, '_>,
        (at, c, l): (LayerAt, &AttentionConfig, &LayerAttention),
        indexer: Option<&IndexerWeights>,
        SubLayerRows { x, y }: SubLayerRows<'_>,
        (s, memory): (&mut AttentionBatch, &mut KvMemory),
        stack: &mut Stack<'_>,
    ) {
        let (n, rows, stride, at) = (pass.n, pass.rows, self.input.stride, Some(at.index));
        let k_at = self.input.part_starts[1];
        let [_, query, key_query, latent_out, out] = self.parts();
        let [input, queries, key_queries, latent_outs, outs] = stack.rows(n, self.parts());

        rows.linear_group(&self.input, x, input, stack);
        if let Some((norm, linear)) = &self.query {
            rows.each(input, stride, &|_, row| rows.norm_heads(norm, &mut row[..norm.width]));
            let x = Floats { x: input, stride };
            rows.matrix(&linear.w, linear.bias.as_deref(), x, queries, stack);
        }
        if let Some(indexer) = indexer {
            let input = IndexInput { x, compressed: Floats { x: input, stride } };
            indexer.run(pass, (c, l), input, (&mut *s, &mut *memory), stack);
        }
        self.rotate_keys(pass.rows, (c, l), input, s);
        let key_dim = self.heads.key_dim;
        pass.trace_stage(Stage::K, at, &mut columns(input, stride, k_at, key_dim));
        let (queries, q_stride) = if self.query.is_some() { (&*queries, query) } else { (&*input, stride) };
        pass.trace_stage(Stage::Q, at, &mut columns(queries, q_stride, 0, self.heads.n_head * self.sizes.query()));
        per_head(pass, &self.query_to_key, (queries, q_stride, self.sizes.query()), (key_queries, key_dim), stack);
        self.rotate_queries(pass.rows, (c, l), (queries, q_stride), key_queries, s);
        pass.trace_stage(Stage::Rope, at, &mut columns(key_queries, key_query, 0, key_query));

        let kv = pass.kv.layers()[l.kv_layer];
        let kv_rows = KvRows { x: input, stride, k_at, v_at: k_at, slots: &s.slots };
        attention::write_kv(rows.cpu, rows.pool, &kv, kv_rows, memory);
        let attention = Attention {
            kv,
            memory,
            n_head: self.heads.n_head,
            window: l.window,
            soft_cap: c.soft_cap,
            alibi: None,
            bias: None,
            sinks: self.sinks.as_deref(),
            selected: indexer::selected(l.selection, &s.selection),
            q: key_queries,
            q_stride: key_query,
            spans: pass.spans,
        };
        if pass.traces_scores() {
            pass.trace_stage(Stage::Scores, at, &mut attention.scores(rows.cpu).iter().map(Vec::as_slice));
        }
        attention.run(rows.cpu, rows.pool, latent_outs, &mut s.threads, &mut s.parts);
        let rank = self.heads.value_dim;
        per_head(pass, &self.to_value, (latent_outs, latent_out, rank), (outs, self.value_rows()), stack);
        self.join_heads(pass.rows, c.output_gate, input, outs);
        pass.trace_stage(Stage::AttnOut, at, &mut columns(outs, out, 0, self.output.w.k()));
        rows.matrix(&self.output.w, self.output.bias.as_deref(), Floats { x: outs, stride: out }, y, stack);
    }

    /// Moves the outputs of the heads together: they are padded to whole panels, and fused ones begin with the rows of
    /// the keys. Applies the gates, if there are any.
    fn join_heads(&self, rows: RowOps<'_>, act: OutputGate, input: &mut [f32], outs: &mut [f32]) {
        let stride = self.input.stride;
        let (n, value, width) = (self.heads.n_head, self.sizes.value, self.value_rows());
        let first = self.to_value.first().map_or(0, Matrix::rows) - value;
        let gates = self.input.part_starts.get(2).copied();
        let n_gates = self.input.linears.last().map_or(0, |(l, _)| l.w.rows());
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
    fn rotate_keys(
        &self,
        rows: RowOps<'_>,
        (c, l): (&AttentionConfig, &LayerAttention),
        input: &mut [f32],
        s: &AttentionBatch,
    ) {
        let k_at = self.input.part_starts[1];
        let style = c.style.unwrap_or(RopeStyle::Interleaved);
        rows.each(input, self.input.stride, &|r, row| {
            let (latent, rotated) = row[k_at..k_at + self.heads.key_dim].split_at_mut(self.heads.value_dim);
            rows.norm_heads(&self.key_norm, latent);
            if let Some(norm) = &self.rope_norm {
                rows.norm_heads(norm, rotated);
            }
            let (cos, sin) = s.turns(l, r);
            rope(rows.cpu, Rotation { style, cos, sin, scale: 1.0 }, rotated, self.sizes.rope);
        });
    }

    /// Completes the queries in the space of the keys by the rotated parts, and scales them.
    fn rotate_queries(
        &self,
        rows: RowOps<'_>,
        (c, l): (&AttentionConfig, &LayerAttention),
        (queries, q_stride): (&[f32], usize),
        key_queries: &mut [f32],
        s: &AttentionBatch,
    ) {
        let style = c.style.unwrap_or(RopeStyle::Interleaved);
        let LatentHeads { nope, rope: n_rope, .. } = self.sizes;
        rows.each(key_queries, self.heads.q_width(), &|r, row| {
            let queries = queries[r * q_stride..].chunks_exact(self.sizes.query());
            let (cos, sin) = s.turns(l, r);
            for (head, query) in row.chunks_exact_mut(self.heads.key_dim).zip(queries) {
                let rotated = &mut head[self.heads.value_dim..];
                rotated.copy_from_slice(&query[nope..]);
                rope(rows.cpu, Rotation { style, cos, sin, scale: 1.0 }, rotated, n_rope);
            }
            scale(rows.cpu, row, s.query_scale(c, l, r));
        });
    }
}

/// `out[h] = w[h] x[h]` for each head; heads of `x` and `out` are `width` floats apart, which is at least the rows of a
/// matrix in whole panels.
pub(crate) fn per_head(
    pass: &Pass<'_, '_>,
    w: &[Matrix],
    (x, stride, head): (&[f32], usize, usize),
    (out, width): (&mut [f32], usize),
    stack: &mut Stack<'_>,
) {
    let rows = pass.rows;
    let mut stack = stack.scope();
    let mut packed = PackedColumns::new(stack.words(per_head_size(w, pass.n).words));
    let job = |(h, w)| {
        let x = Floats { x: &x[h * head..pass.n * stride], stride };
        MatmulJob { w, x: packed.of(&rows, w, x, h), out_column: 0, out_row: h * width }
    };
    let jobs: Vec<MatmulJob<'_>> = w.iter().enumerate().map(job).collect();
    products(rows.cpu, rows.pool, &jobs, out, w.len() * width);
}

/// Temporaries of [`per_head`] for `n` rows.
pub(crate) fn per_head_size(w: &[Matrix], n: usize) -> Size {
    Size::packed(n, w.len(), w.first().map_or(0, Matrix::k))
}

//! Attention with compressed keys: the steps of a batch.

use alloc::vec::Vec;

use crate::kernels::Cpu;
use crate::kernels::act::Floats;
use crate::kernels::attention::{
    self, Attention, AttentionWindow, Indexer, KvMemory, KvRows, MAX_HEAD_DIM, SelectionRule, attend_jointly,
};
use crate::kernels::elementwise::scale;
use crate::kernels::rope::{RopeStyle, Rotation, rope};
use crate::model::forward::Stage;
use crate::model::mixers::blocks::BlockKeys;
use crate::model::mixers::compressed::{BlockIndexer, Blocks, CompressedWeights};
use crate::model::mixers::latent::per_head;
use crate::model::residual::orders::{ForwardPass, SubLayerRows};
use crate::model::rows::columns;
use crate::model::scratch::{AttentionScratch, StepScratch};
use crate::model::weights::padded;

/// The first `len` floats of memory that shrinks by them.
fn take<'m>(rest: &mut &'m mut [f32], len: usize) -> &'m mut [f32] {
    let (taken, left) = core::mem::take(rest).split_at_mut(len);
    *rest = left;
    taken
}

/// Changes the sign of the second element of each pair: before and after a rotation, that turns it around.
fn mirror(style: RopeStyle, x: &mut [f32]) {
    let half = x.len() / 2;
    match style {
        RopeStyle::Interleaved => x.iter_mut().skip(1).step_by(2).for_each(|x| *x = -*x),
        RopeStyle::NeoX => x[half..].iter_mut().for_each(|x| *x = -*x),
    }
}

/// RoPE of the last elements of heads.
#[derive(Clone, Copy)]
struct Tails {
    cpu: Cpu,
    style: RopeStyle,
}

impl Tails {
    /// Rotates heads of `dim` elements by these cosines and sines.
    fn rotate(self, (cos, sin): (&[f32], &[f32]), heads: &mut [f32], dim: usize) {
        let n_rot = 2 * cos.len();
        for head in heads.chunks_exact_mut(dim) {
            let rotation = Rotation { style: self.style, cos, sin, scale: 1.0 };
            rope(self.cpu, rotation, &mut head[dim - n_rot..], n_rot);
        }
    }

    /// Rotates them back.
    fn rotate_back(self, (cos, sin): (&[f32], &[f32]), heads: &mut [f32], dim: usize) {
        let n_rot = 2 * cos.len();
        let mirror_all = |heads: &mut [f32]| {
            heads.chunks_exact_mut(dim).for_each(|head| mirror(self.style, &mut head[dim - n_rot..]));
        };
        mirror_all(heads);
        self.rotate((cos, sin), heads, dim);
        mirror_all(heads);
    }
}

impl ForwardPass<'_, '_> {
    /// Whether scores are reported.
    fn traces(&self) -> bool {
        cfg!(feature = "trace") && self.trace.is_some()
    }

    fn tails(&self) -> Tails {
        Tails { cpu: self.rows.cpu, style: self.model.config.attention.style.unwrap_or(RopeStyle::Interleaved) }
    }

    /// `y = attention(x)` of layer `i`. Writes keys, and what compressed keys are made of, to `memory`.
    pub(crate) fn compressed_attention(
        &mut self,
        (i, m): (usize, &CompressedWeights),
        SubLayerRows { x, y }: SubLayerRows<'_>,
        s: &mut AttentionScratch,
        memory: &mut KvMemory,
        StepScratch { wide, words, .. }: &mut StepScratch,
    ) {
        let (n, rows, stride, at, c) = (self.n, self.rows, m.input.stride, Some(i), &self.model.config);
        let (dim, k_at, tails) = (m.heads.key_dim, m.input.part_starts[1], self.tails());
        let config = &c.layers[i].attention;
        let [q_stride, out_stride, group_stride] = m.parts();
        let mut rest = &mut wide[..];
        let input = take(&mut rest, n * stride);
        let queries = take(&mut rest, n * q_stride);
        let out = take(&mut rest, n * out_stride);
        let projected = take(&mut rest, n * group_stride);

        rows.linear_group(&m.input, x, input, words);
        rows.each(input, stride, &|r, row| {
            rows.norm_heads(&m.query_norm, &mut row[..m.query_norm.width]);
            let key = &mut row[k_at..k_at + dim];
            rows.norm_heads(&m.key_norm, key);
            tails.rotate(s.turns(c, i, r), key, dim);
        });
        let compressed = Floats { x: &*input, stride };
        rows.matrix(&m.query.w, m.query.bias.as_deref(), compressed, queries, words);
        self.trace_stage(Stage::Q, at, &mut columns(queries, q_stride, 0, m.heads.q_width()));
        self.trace_stage(Stage::K, at, &mut columns(input, stride, k_at, dim));
        rows.each(queries, q_stride, &|r, row| {
            let heads = &mut row[..m.heads.q_width()];
            rows.norm_heads(&m.head_norm, heads);
            tails.rotate(s.turns(c, i, r), heads, dim);
            scale(rows.cpu, heads, config.scale);
        });
        let keys = columns(input, stride, k_at, dim);
        self.trace_stage(Stage::Rope, at, &mut columns(queries, q_stride, 0, m.heads.q_width()).chain(keys));
        let layers = &self.kv.layers()[config.kv_layer..];
        let kv_rows = KvRows { x: input, stride, k_at, v_at: k_at, slots: &s.slots };
        attention::write_kv(rows.cpu, rows.pool, &layers[0], kv_rows, memory);
        if let Some(blocks) = &m.blocks {
            self.compress((i, blocks, 1), x, s, memory, (&mut rest, words));
        }
        if let Some(indexer) = &m.indexer {
            self.select_blocks((i, indexer), (x, compressed), s, memory, (&mut rest, words));
        }
        let of_window = Attention {
            kv: layers[0],
            memory,
            n_head: m.heads.n_head,
            window: config.window,
            soft_cap: None,
            alibi: None,
            bias: None,
            sinks: Some(&m.sinks),
            selected: None,
            q: queries,
            q_stride,
            spans: self.spans,
        };
        let mut scores = if self.traces() { of_window.scores(rows.cpu) } else { Vec::new() };
        match config.compressor {
            None => of_window.run(rows.cpu, rows.pool, out, &mut s.threads, &mut s.parts),
            Some(compressor) => {
                let of_blocks = Attention { kv: layers[1], window: AttentionWindow::CAUSAL, ..of_window };
                if m.indexer.is_none() {
                    let rule = SelectionRule { every: compressor.ratio, ..SelectionRule::ALL };
                    let weights = Some(Floats { x: &[], stride: 1 });
                    let indexer = Indexer { attention: of_blocks, weights, rule };
                    indexer.run(rows.cpu, rows.pool, &mut s.threads, &mut s.selection);
                }
                let of_blocks = Attention { selected: Some(s.selection.selected()), ..of_blocks };
                if self.traces() {
                    scores.iter_mut().zip(of_blocks.scores(rows.cpu)).for_each(|(all, more)| all.extend(more));
                }
                attend_jointly(&[of_window, of_blocks], rows.cpu, rows.pool, out, &mut s.threads);
            }
        }
        if self.traces() {
            self.trace_stage(Stage::Scores, at, &mut scores.iter().map(Vec::as_slice));
        }
        rows.each(out, out_stride, &|r, row| tails.rotate_back(s.turns(c, i, r), row, dim));
        self.trace_stage(Stage::AttnOut, at, &mut columns(out, out_stride, 0, out_stride));
        let (rank, width) = (m.groups[0].rows(), group_stride / m.groups.len());
        per_head(self, &m.groups, (out, out_stride, out_stride / m.groups.len()), (projected, width), words);
        if width > rank {
            rows.each(projected, group_stride, &|_, row| {
                (1..m.groups.len()).for_each(|g| row.copy_within(g * width..g * width + rank, g * rank));
            });
        }
        let x = Floats { x: projected, stride: group_stride };
        rows.matrix(&m.output.w, m.output.bias.as_deref(), x, y, words);
    }

    /// Computes values and gates of the rows and the keys of the blocks that end with them, and writes both to `memory`: the
    /// keys at KV layer `kv_layer` of those of layer `i`, values and gates at the next one.
    fn compress(
        &self,
        (i, m, kv_layer): (usize, &Blocks, usize),
        x: &[f32],
        s: &AttentionScratch,
        memory: &mut KvMemory,
        (rest, words): (&mut &mut [f32], &mut [u32]),
    ) {
        let (n, rows, stride, c) = (self.n, self.rows, m.input.stride, &self.model.config);
        let (dim, gate_at) = (m.dim(), m.input.part_starts[1]);
        let (input, keys) = (take(rest, n * stride), take(rest, n * dim));
        let Some(rotary) = c.layers[i].attention.rope.map(|variant| &s.rotary[variant]) else { return };
        rows.linear_group(&m.input, x, input, words);
        self.bias_gates((input, stride), gate_at, &m.gate_bias, m.compressor.ratio);
        let layers = &self.kv.layers()[c.layers[i].attention.kv_layer + kv_layer..];
        let of = BlockKeys { keys: layers[0], made_of: layers[1], ratio: m.compressor.ratio };
        let tails = self.tails();
        self.write_block_keys(of, (input, stride), (keys, dim), s, memory, &|memory, pages, pos, key| {
            m.compressor.compress(&of.made_of, memory, pages, pos, key);
            rows.norm_heads(&m.norm, key);
            let mut turns = [[0.0; MAX_HEAD_DIM / 2]; 2];
            let [cos, sin] = turns.each_mut().map(|turns| &mut turns[..rotary.pairs()]);
            rotary.at(m.compressor.start(pos), cos, sin);
            tails.rotate((cos, sin), key, dim);
        });
    }

    /// Selects the blocks that the rows attend to; `compressed` is what queries are projected from.
    fn select_blocks(
        &self,
        (i, m): (usize, &BlockIndexer),
        (x, compressed): (&[f32], Floats<'_>),
        s: &mut AttentionScratch,
        memory: &mut KvMemory,
        (rest, words): (&mut &mut [f32], &mut [u32]),
    ) {
        let (n, rows, c, dim, tails) = (self.n, self.rows, &self.model.config, m.blocks.dim(), self.tails());
        let Some(config) = &c.attention.compressed else { return };
        self.compress((i, &m.blocks, 3), x, s, memory, (rest, words));
        let (stride, q_stride) = (padded(m.weights.w.rows()), padded(m.query.w.rows()));
        let (weights, queries) = (take(rest, n * stride), take(rest, n * q_stride));
        rows.linear(&m.weights, x, weights, words);
        rows.matrix(&m.query.w, m.query.bias.as_deref(), compressed, queries, words);
        rows.each(queries, q_stride, &|r, row| {
            tails.rotate(s.turns(c, i, r), &mut row[..config.index_heads * dim], dim);
        });
        let kv = self.kv.layers()[c.layers[i].attention.kv_layer + 3];
        let queries = Floats { x: queries, stride: q_stride };
        let attention = Attention::causal(kv, memory, config.index_heads, queries, self.spans);
        let weights = Some(Floats { x: weights, stride });
        let rule = SelectionRule { top_k: config.top_k, every: m.blocks.compressor.ratio, ..SelectionRule::ALL };
        Indexer { attention, weights, rule }.run(rows.cpu, rows.pool, &mut s.threads, &mut s.selection);
    }
}

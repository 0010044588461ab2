//! Attention with compressed keys: the steps of a batch.

use alloc::vec::Vec;

use super::{BlockIndexer, Blocks, CompressedWeights};
use crate::kernels::Cpu;
use crate::kernels::act::Floats;
use crate::kernels::attention::{
    self, Attention, AttentionWindow, Indexer, KvMemory, KvRows, MAX_HEAD_DIM, SelectionRule, attend_jointly,
};
use crate::kernels::elementwise::scale;
use crate::kernels::rope::{RopeStyle, Rotation, rope};
use crate::model::memory::Stack;
use crate::model::mixers::attention::batch::AttentionBatch;
use crate::model::mixers::attention::config::{AttentionConfig, LayerAttention};
use crate::model::mixers::blocks::BlockKeys;
use crate::model::mixers::latent::per_head;
use crate::model::pass::{LayerAt, Pass, Stage, SubLayerRows};
use crate::model::rows::columns;

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

impl CompressedWeights {
    /// `y = attention(x)`. Writes keys, and what compressed keys are made of, to `memory`.
    pub(crate) fn run(
        &self,
        pass: &mut Pass<'_, '_>,
        (at, c, l): (LayerAt, &AttentionConfig, &LayerAttention),
        SubLayerRows { x, y }: SubLayerRows<'_>,
        (s, memory): (&mut AttentionBatch, &mut KvMemory),
        stack: &mut Stack<'_>,
    ) {
        let (n, rows, stride, at) = (pass.n, pass.rows, self.input.stride, Some(at.index));
        let (dim, k_at) = (self.heads.key_dim, self.input.part_starts[1]);
        let tails = Tails { cpu: rows.cpu, style: c.style.unwrap_or(RopeStyle::Interleaved) };
        let [_, q_stride, out_stride, group_stride] = self.parts();
        let [input, queries, out, projected] = stack.rows(n, self.parts());

        rows.linear_group(&self.input, x, input, stack);
        rows.each(input, stride, &|r, row| {
            rows.norm_heads(&self.query_norm, &mut row[..self.query_norm.width]);
            let key = &mut row[k_at..k_at + dim];
            rows.norm_heads(&self.key_norm, key);
            tails.rotate(s.turns(l, r), key, dim);
        });
        let compressed = Floats { x: &*input, stride };
        rows.matrix(&self.query.w, self.query.bias.as_deref(), compressed, queries, stack);
        pass.trace_stage(Stage::Q, at, &mut columns(queries, q_stride, 0, self.heads.q_width()));
        pass.trace_stage(Stage::K, at, &mut columns(input, stride, k_at, dim));
        rows.each(queries, q_stride, &|r, row| {
            let heads = &mut row[..self.heads.q_width()];
            rows.norm_heads(&self.head_norm, heads);
            tails.rotate(s.turns(l, r), heads, dim);
            scale(rows.cpu, heads, l.scale);
        });
        let keys = columns(input, stride, k_at, dim);
        pass.trace_stage(Stage::Rope, at, &mut columns(queries, q_stride, 0, self.heads.q_width()).chain(keys));
        let layers = &pass.kv.layers()[l.kv_layer..];
        let kv_rows = KvRows { x: input, stride, k_at, v_at: k_at, slots: &s.slots };
        attention::write_kv(rows.cpu, rows.pool, &layers[0], kv_rows, memory);
        if let Some(blocks) = &self.blocks {
            blocks.run(pass, (l, 1, tails), x, (&*s, &mut *memory), stack);
        }
        if let Some(indexer) = &self.indexer {
            indexer.run(pass, (c, l, tails), (x, compressed), (&mut *s, &mut *memory), stack);
        }
        let of_window = Attention {
            kv: layers[0],
            memory,
            n_head: self.heads.n_head,
            window: l.window,
            soft_cap: None,
            alibi: None,
            bias: None,
            sinks: Some(&self.sinks),
            selected: None,
            q: queries,
            q_stride,
            spans: pass.spans,
        };
        let mut scores = if pass.traces_scores() { of_window.scores(rows.cpu) } else { Vec::new() };
        match l.compressor {
            None => of_window.run(rows.cpu, rows.pool, out, &mut s.threads, &mut s.parts),
            Some(compressor) => {
                let of_blocks = Attention { kv: layers[1], window: AttentionWindow::CAUSAL, ..of_window };
                if self.indexer.is_none() {
                    let rule = SelectionRule { every: compressor.ratio, ..SelectionRule::ALL };
                    let weights = Some(Floats { x: &[], stride: 1 });
                    let indexer = Indexer { attention: of_blocks, weights, rule };
                    indexer.run(rows.cpu, rows.pool, &mut s.threads, &mut s.selection);
                }
                let of_blocks = Attention { selected: Some(s.selection.selected()), ..of_blocks };
                if pass.traces_scores() {
                    scores.iter_mut().zip(of_blocks.scores(rows.cpu)).for_each(|(all, more)| all.extend(more));
                }
                attend_jointly(&[of_window, of_blocks], rows.cpu, rows.pool, out, &mut s.threads);
            }
        }
        if pass.traces_scores() {
            pass.trace_stage(Stage::Scores, at, &mut scores.iter().map(Vec::as_slice));
        }
        rows.each(out, out_stride, &|r, row| tails.rotate_back(s.turns(l, r), row, dim));
        pass.trace_stage(Stage::AttnOut, at, &mut columns(out, out_stride, 0, out_stride));
        let (rank, width) = (self.groups[0].rows(), group_stride / self.groups.len());
        per_head(pass, &self.groups, (out, out_stride, out_stride / self.groups.len()), (projected, width), stack);
        if width > rank {
            rows.each(projected, group_stride, &|_, row| {
                (1..self.groups.len()).for_each(|g| row.copy_within(g * width..g * width + rank, g * rank));
            });
        }
        let x = Floats { x: projected, stride: group_stride };
        rows.matrix(&self.output.w, self.output.bias.as_deref(), x, y, stack);
    }
}

impl Blocks {
    /// Computes values and gates of the rows and the keys of the blocks that end with them, and writes both to `memory`: the
    /// keys at KV layer `kv_layer` of those of the layer, values and gates at the next one.
    fn run(
        &self,
        pass: &Pass<'_, '_>,
        (l, kv_layer, tails): (&LayerAttention, usize, Tails),
        x: &[f32],
        (s, memory): (&AttentionBatch, &mut KvMemory),
        stack: &mut Stack<'_>,
    ) {
        let (rows, stride) = (pass.rows, self.input.stride);
        let (dim, gate_at) = (self.dim(), self.input.part_starts[1]);
        let mut stack = stack.scope();
        let [input, keys] = stack.rows(pass.n, self.parts());
        let Some(rotary) = l.rope.map(|variant| &s.rotary[variant]) else { return };
        rows.linear_group(&self.input, x, input, &mut stack);
        pass.bias_gates((input, stride), gate_at, &self.gate_bias, self.compressor.ratio);
        let layers = &pass.kv.layers()[l.kv_layer + kv_layer..];
        let of = BlockKeys { keys: layers[0], made_of: layers[1], ratio: self.compressor.ratio };
        pass.write_block_keys(of, (input, stride), (keys, dim), s, memory, &|memory, pages, pos, key| {
            self.compressor.compress(&of.made_of, memory, pages, pos, key);
            rows.norm_heads(&self.norm, key);
            let mut turns = [[0.0; MAX_HEAD_DIM / 2]; 2];
            let [cos, sin] = turns.each_mut().map(|turns| &mut turns[..rotary.pairs()]);
            rotary.at(self.compressor.start(pos), cos, sin);
            tails.rotate((cos, sin), key, dim);
        });
    }
}

impl BlockIndexer {
    /// Selects the blocks that the rows attend to; `compressed` is what queries are projected from.
    fn run(
        &self,
        pass: &Pass<'_, '_>,
        (c, l, tails): (&AttentionConfig, &LayerAttention, Tails),
        (x, compressed): (&[f32], Floats<'_>),
        (s, memory): (&mut AttentionBatch, &mut KvMemory),
        stack: &mut Stack<'_>,
    ) {
        let (rows, dim) = (pass.rows, self.blocks.dim());
        let Some(config) = &c.compressed else { return };
        self.blocks.run(pass, (l, 3, tails), x, (&*s, &mut *memory), stack);
        let mut stack = stack.scope();
        let [stride, q_stride] = self.parts();
        let [weights, queries] = stack.rows(pass.n, self.parts());
        rows.linear(&self.weights, x, weights, &mut stack);
        rows.matrix(&self.query.w, self.query.bias.as_deref(), compressed, queries, &mut stack);
        rows.each(queries, q_stride, &|r, row| {
            tails.rotate(s.turns(l, r), &mut row[..config.index_heads * dim], dim);
        });
        let kv = pass.kv.layers()[l.kv_layer + 3];
        let queries = Floats { x: queries, stride: q_stride };
        let attention = Attention::causal(kv, memory, config.index_heads, queries, pass.spans);
        let weights = Some(Floats { x: weights, stride });
        let rule = SelectionRule { top_k: config.top_k, every: self.blocks.compressor.ratio, ..SelectionRule::ALL };
        Indexer { attention, weights, rule }.run(rows.cpu, rows.pool, &mut s.threads, &mut s.selection);
    }
}

//! The forward pass of all model families: a batch of tokens of one or more sequences in, logits out.
//!
//! ```text
//! x = norm(embedding[token] * scale + token_type + position_embedding[position])
//! for each layer: x = block(x)                              (`residual/orders.rs`)
//! logits = soft_cap((W_out norm(x) + b) * scale)
//! ```
//!
//! Terms that a model does not have are skipped.

use alloc::vec::Vec;
use core::ops::Range;

use crate::kernels::Cpu;
use crate::kernels::attention::{KvLayout, KvMemory, PAGE, Slot, Span};
use crate::kernels::elementwise::{add_scaled, scale, soft_cap};
use crate::kernels::recurrent::StateSpan;
use crate::math::{ln, sqrt};
use crate::model::Model;
use crate::model::residual::orders::ForwardPass;
use crate::model::rows::{RowOps, as_columns, columns};
use crate::model::scratch::{AttentionScratch, LayerEmbeddingScratch, Scratch};
use crate::model::weights::{LayerEmbeddings, ResidualOrder, padded};
use crate::pool::Pool;

/// Where a forward pass runs: instruction set and threads. Neither changes a result.
#[derive(Clone, Copy)]
pub struct Exec<'a> {
    /// Instruction set.
    pub cpu: Cpu,
    /// Threads.
    pub pool: &'a dyn Pool,
}

/// The KV pages that a forward pass reads and writes.
pub struct KvRef<'a> {
    /// Layout of a page.
    pub layout: &'a KvLayout,
    /// The pages.
    pub memory: &'a mut KvMemory,
}

/// Consecutive tokens of one sequence in a batch.
#[derive(Debug, Clone, Copy)]
pub struct Run<'a> {
    /// Token ids, each below `n_vocab`.
    pub tokens: &'a [u32],
    /// Position of the first token in its sequence.
    pub pos: usize,
    /// KV pages of the sequence, one per [`PAGE`] positions, up to the last token of the run.
    pub pages: &'a [u32],
    /// Slot of the sequence's recurrent state; not used by models without recurrent layers.
    pub state: u32,
    /// Number of tokens, counted from the last, to compute logits for.
    pub n_logits: usize,
}

/// A point of the forward pass that a trace reports. [`Stage::Rope`] has the rotated queries, then the rotated keys;
/// [`Stage::Scores`] the scaled attention scores before the softmax, a row for each head of each token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Stage {
    Embedding,
    AttnNorm,
    Q,
    K,
    V,
    Rope,
    Scores,
    AttnOut,
    PostAttnNorm,
    FfnNorm,
    Router,
    FfnOut,
    PostFfnNorm,
    LayerEmbedding,
    FinalNorm,
    Logits,
}

impl Stage {
    /// The stage's name in the output of a trace.
    pub const fn name(self) -> &'static str {
        match self {
            Stage::Embedding => "embedding",
            Stage::AttnNorm => "attn_norm",
            Stage::Q => "q",
            Stage::K => "k",
            Stage::V => "v",
            Stage::Rope => "rope",
            Stage::Scores => "scores",
            Stage::AttnOut => "attn_out",
            Stage::PostAttnNorm => "post_attn_norm",
            Stage::FfnNorm => "ffn_norm",
            Stage::Router => "router",
            Stage::FfnOut => "ffn_out",
            Stage::PostFfnNorm => "post_ffn_norm",
            Stage::LayerEmbedding => "layer_embedding",
            Stage::FinalNorm => "final_norm",
            Stage::Logits => "logits",
        }
    }
}

/// A callback of the forward pass: stage, layer index (`None` outside the layers), and the rows of values, one per
/// token.
pub type Trace<'a> = &'a mut dyn FnMut(Stage, Option<usize>, &mut dyn Iterator<Item = &[f32]>);

/// Hidden states and logits of the rows of a batch that want logits, in order of the runs.
pub struct Output<'a> {
    hidden: &'a [f32],
    logits: &'a [f32],
    n_embd: usize,
    n_vocab: usize,
}

impl<'a> Output<'a> {
    /// Number of rows.
    pub fn len(&self) -> usize {
        self.hidden.len() / self.n_embd
    }

    /// Whether there are no rows.
    pub fn is_empty(&self) -> bool {
        self.hidden.is_empty()
    }

    /// Logits of a row (n_vocab).
    pub fn logits(&self, row: usize) -> &'a [f32] {
        &self.logits[row * padded(self.n_vocab)..][..self.n_vocab]
    }

    /// Hidden state of a row after the final norm (n_embd); it determines the logits.
    pub fn hidden(&self, row: usize) -> &'a [f32] {
        &self.hidden[row * self.n_embd..][..self.n_embd]
    }
}

impl Model {
    /// Runs a batch and returns the logits that its runs want. Writes the keys and values of its tokens to the pages of
    /// their sequences, and their recurrent states, which must be those before the runs' first tokens.
    ///
    /// # Panics
    /// If the batch exceeds the scratch memory, or a token, page or embedded position is out of range. `Engine::submit`
    /// checks these.
    pub fn forward<'s>(
        &self,
        exec: Exec<'_>,
        runs: &[Run<'_>],
        kv: KvRef<'_>,
        s: &'s mut Scratch,
        mut trace: Option<Trace<'_>>,
    ) -> Output<'s> {
        self.batch(exec, runs, kv, s, trace.as_mut().map(|t| &mut **t as _));
        self.logits(exec, &logits_rows(runs), s, trace)
    }

    /// Runs a batch through the layers. [`Model::logits`] computes logits of its rows, until the next batch.
    ///
    /// # Panics
    /// As [`Model::forward`].
    pub fn batch(&self, exec: Exec<'_>, runs: &[Run<'_>], kv: KvRef<'_>, s: &mut Scratch, trace: Option<Trace<'_>>) {
        let (spans, states) = (self.assign_slots(runs, &mut s.attention), self.state_spans(runs));
        let mut pass = self.pass(exec, (&spans, &states), kv.layout, trace);
        self.layers(&mut pass, runs, kv.memory, s);
    }

    /// Runs some layers of a batch of whole texts whose keys and values no later batch reads, so that pages of
    /// [`Config::batch_kv_layout`](crate::model::Config::batch_kv_layout) suffice. The layers of a batch are run in order, each once;
    /// between two parts nothing else may use `kv` and `s`. [`Model::final_states`] comes after the last.
    ///
    /// # Panics
    /// As [`Model::forward`].
    pub fn states_part(&self, exec: Exec<'_>, runs: &[Run<'_>], kv: KvRef<'_>, s: &mut Scratch, layers: Range<usize>) {
        // what `assign_slots` computes stays in the scratch memory
        let spans = if layers.start == 0 { self.assign_slots(runs, &mut s.attention) } else { spans(runs) };
        let states = self.state_spans(runs);
        let mut pass = self.pass(exec, (&spans, &states), kv.layout, None);
        if layers.start == 0 {
            self.begin_layers(&mut pass, runs, s);
        }
        let is_last = layers.end == self.config.n_layer();
        self.run_layers(layers, &mut pass, kv.memory, s);
        if is_last {
            self.end_layers(&pass, s);
        }
    }

    /// The hidden states of a batch after the final norm, (rows, n_embd), once all layers were run.
    pub fn final_states<'s>(&self, exec: Exec<'_>, runs: &[Run<'_>], s: &'s mut Scratch) -> &'s mut [f32] {
        let len = runs.iter().map(|run| run.tokens.len()).sum::<usize>() * self.config.n_embd;
        let (x, h) = (&mut s.x[..len], &mut s.h[..len]);
        let Some(norm) = &self.weights.final_norm else { return x };
        self.rows(exec).norm(norm, x, self.config.n_embd, h);
        h
    }

    fn pass<'a, 't>(
        &'a self,
        exec: Exec<'a>,
        (spans, states): (&'a [Span<'a>], &'a [StateSpan]),
        kv: &'a KvLayout,
        trace: Option<Trace<'t>>,
    ) -> ForwardPass<'a, 't> {
        let n = spans.iter().map(|s| s.n).sum();
        ForwardPass { model: self, rows: self.rows(exec), kv, spans, states, n, trace }
    }

    /// The rows of each sequence, for recurrent layers.
    fn state_spans(&self, runs: &[Run<'_>]) -> Vec<StateSpan> {
        let mut row = 0;
        let spans = runs.iter().filter(|_| self.config.recurrent.is_some()).map(|run| {
            row += run.tokens.len();
            StateSpan { row: row - run.tokens.len(), n: run.tokens.len(), slot: run.state }
        });
        spans.collect()
    }

    pub(crate) fn rows<'a>(&self, Exec { cpu, pool }: Exec<'a>) -> RowOps<'a> {
        RowOps { cpu, pool, kind: self.config.norm.kind, eps: self.config.norm.eps }
    }

    /// Runs the batch through all layers; the residual stream is in `s.x`.
    fn layers(&self, pass: &mut ForwardPass<'_, '_>, runs: &[Run<'_>], memory: &mut KvMemory, s: &mut Scratch) {
        self.begin_layers(pass, runs, s);
        self.run_layers(0..self.config.n_layer(), pass, memory, s);
        self.end_layers(pass, s);
    }

    /// Embeds the tokens of the batch: the residual streams before the first layer.
    fn begin_layers(&self, pass: &mut ForwardPass<'_, '_>, runs: &[Run<'_>], s: &mut Scratch) {
        let (d, n) = (self.config.n_embd, pass.n);
        assert!(n <= s.max_rows, "the batch has more rows than the scratch memory");
        self.embed(pass.rows.cpu, runs, s);
        s.experts.tokens.clear();
        s.experts.tokens.extend(runs.iter().flat_map(|run| run.tokens));
        if let Some(norm) = &self.weights.embedding_norm {
            pass.rows.norm_each(norm, &mut s.x[..n * d]);
        }
        if let Some(input) = &self.weights.mtp_input {
            pass.join_hidden(input, s);
        }
        pass.trace_stage(Stage::Embedding, None, &mut columns(&s.x[..n * d], d, 0, d));
        if let Some(embeddings) = &self.weights.layer_embeddings {
            self.embed_layers(&pass.rows, embeddings, runs, s);
        }
        if self.config.embedding.skips {
            s.skips[..n * d].copy_from_slice(&s.x[..n * d]);
        }
        if let Some(altup) = &self.weights.altup {
            pass.split_streams(altup, s);
        }
        if let Some(hyper) = &self.config.residual.hyper {
            pass.begin_streams(hyper, s);
        }
        if let Some(low) = &self.weights.low_state {
            pass.begin_passes(low, s);
        }
    }

    fn run_layers(&self, layers: Range<usize>, pass: &mut ForwardPass<'_, '_>, memory: &mut KvMemory, s: &mut Scratch) {
        let (d, n) = (self.config.n_embd, pass.n);
        for i in layers {
            match &self.layer(i).order {
                ResidualOrder::AltUp(altup) => pass.altup_block(i, altup, memory, s),
                ResidualOrder::Serial => pass.serial_block(i, memory, s),
                ResidualOrder::Parallel => pass.parallel_block(i, memory, s),
                ResidualOrder::PostNorm(norms) => pass.post_norm_block(i, norms, memory, s),
                ResidualOrder::Normed => pass.normed_block(i, memory, s),
                ResidualOrder::Attended(scores) => pass.attended_block(i, scores, memory, s),
                ResidualOrder::Hyper(weights) => pass.hyper_block(i, weights, memory, s),
            }
            let output_scale = self.config.layers[i].output_scale;
            if output_scale != 1.0 {
                let rows = pass.rows;
                rows.each(&mut s.x[..n * d], d, &|_, x| scale(rows.cpu, x, output_scale));
            }
            if let Some(end) = self.config.layers[i].after {
                pass.end_pass(end, s);
            }
        }
    }

    /// The residual stream after the last layer.
    fn end_layers(&self, pass: &ForwardPass<'_, '_>, s: &mut Scratch) {
        let (d, n) = (self.config.n_embd, pass.n);
        if let Some(altup) = &self.weights.altup {
            pass.merge_streams(altup, s);
        }
        if let Some(hyper) = &self.config.residual.hyper {
            pass.end_streams(hyper, s);
        }
        if let Some(score) = &self.weights.residual_score {
            let [_, kept] = self.config.residual.kept(self.config.n_layer() - 1);
            pass.rows.mix_residuals(score, &s.x[..n * d], &s.residuals[..kept * n * d], &mut s.h[..n * d]);
            s.x[..n * d].copy_from_slice(&s.h[..n * d]);
        }
    }

    /// Assigns each row of the batch its slot in a KV page, and computes cosines and sines of its position for each
    /// RoPE variant of the model.
    fn assign_slots<'r>(&self, runs: &[Run<'r>], s: &mut AttentionScratch) -> Vec<Span<'r>> {
        let pairs = self.config.attention.rope_pairs();
        s.slots.clear();
        for run in runs {
            for pos in run.pos..run.pos + run.tokens.len() {
                for (i, rotary) in s.rotary.iter().enumerate() {
                    let at = (s.slots.len() * s.rotary.len() + i) * pairs;
                    rotary.at(pos, &mut s.cos[at..at + pairs], &mut s.sin[at..at + pairs]);
                }
                if let Some(t) = &self.config.attention.temperature {
                    let steps = (pos + t.offset) / t.length;
                    s.temperatures[s.slots.len()] = (1.0 + f64::from(t.scale) * ln((steps + 1) as f64)) as f32;
                }
                s.slots.push(Slot { page: run.pages[pos / PAGE], token: (pos % PAGE) as u32 });
            }
        }
        spans(runs)
    }

    /// The residual stream before the first layer.
    fn embed(&self, cpu: Cpu, runs: &[Run<'_>], s: &mut Scratch) {
        let d = self.config.n_embd;
        let tokens = runs.iter().flat_map(|r| r.tokens.iter().enumerate().map(|(i, token)| (*token, r.pos + i)));
        for ((token, pos), x) in tokens.zip(s.x.chunks_exact_mut(d)) {
            self.weights.embedding.row(token as usize, x);
            if self.config.embedding.scale != 1.0 {
                scale(cpu, x, self.config.embedding.scale);
            }
            let kind = self.weights.token_types.as_ref().map(|types| (types, 0));
            let position = self.weights.positions.as_ref().map(|positions| (positions, pos));
            for (matrix, row) in kind.into_iter().chain(position) {
                matrix.row(row, &mut s.row);
                add_scaled(cpu, x, &s.row, 1.0);
            }
        }
    }

    /// The embeddings of the layers, from the tokens and their embeddings.
    fn embed_layers(&self, on: &RowOps<'_>, of: &LayerEmbeddings, runs: &[Run<'_>], s: &mut Scratch) {
        let (d, width, cpu) = (self.config.n_embd, self.config.embedding.per_layer, on.cpu);
        let n = runs.iter().map(|run| run.tokens.len()).sum::<usize>();
        let Scratch { x, embeddings, step, .. } = s;
        let LayerEmbeddingScratch { embeddings, stride, row } = embeddings;
        let (stride, rows) = (*stride, &mut embeddings[..n * *stride]);
        on.linear(&of.proj, &x[..n * d], rows, &mut step.words);
        let [by_width, by_layer] = [1.0 / sqrt(d as f32), sqrt(width as f32)];
        let tokens = runs.iter().flat_map(|run| run.tokens);
        for (token, out) in tokens.zip(rows.chunks_exact_mut(stride)) {
            let out = &mut out[..row.len()];
            scale(cpu, out, by_width);
            on.norm_heads(&of.norm, out);
            of.table.row(*token as usize, row);
            add_scaled(cpu, out, row, by_layer);
            scale(cpu, out, core::f32::consts::FRAC_1_SQRT_2);
        }
    }

    /// Hidden states after the final norm, and logits, of `rows` of the last batch.
    ///
    /// # Panics
    /// If there are more rows than the scratch memory has logits rows, or a row is not in the batch.
    pub fn logits<'s>(
        &self,
        exec: Exec<'_>,
        rows: &[Range<usize>],
        s: &'s mut Scratch,
        mut trace: Option<Trace<'_>>,
    ) -> Output<'s> {
        let (c, w, on) = (&self.config, &self.weights, self.rows(exec));
        let (d, stride) = (c.n_embd, padded(c.n_vocab));
        let mut wanted = 0;
        for rows in rows {
            assert!(wanted + rows.len() <= s.max_logits, "more logits rows than the scratch memory");
            let from = &s.x[rows.start * d..rows.end * d];
            let to = &mut s.hidden[wanted * d..(wanted + rows.len()) * d];
            match &w.final_norm {
                Some(norm) => on.norm(norm, from, d, to),
                None => to.copy_from_slice(from),
            }
            wanted += rows.len();
        }
        let (hidden, logits) = (&mut s.hidden[..wanted * d], &mut s.logits[..wanted * stride]);
        if wanted > 0 {
            let mut trace_stage = |stage, rows: &mut dyn Iterator<Item = &[f32]>| {
                if let Some(trace) = &mut trace {
                    trace(stage, None, rows);
                }
            };
            trace_stage(Stage::FinalNorm, &mut columns(hidden, d, 0, d));
            let output = w.output.as_ref().unwrap_or(&w.embedding);
            on.matrix(output, w.output_bias.as_deref(), as_columns(hidden, output), logits, &mut s.step.words);
            if c.output.scale != 1.0 || c.output.soft_cap.is_some() {
                on.each(logits, stride, &|_, row| {
                    if c.output.scale != 1.0 {
                        scale(exec.cpu, row, c.output.scale);
                    }
                    if let Some(cap) = c.output.soft_cap {
                        soft_cap(exec.cpu, row, cap);
                    }
                });
            }
            trace_stage(Stage::Logits, &mut columns(logits, stride, 0, c.n_vocab));
        }
        Output { hidden, logits, n_embd: d, n_vocab: c.n_vocab }
    }
}

/// The rows of each sequence of a batch.
fn spans<'r>(runs: &[Run<'r>]) -> Vec<Span<'r>> {
    let mut row = 0;
    let span = |run: &Run<'r>| {
        let n = run.tokens.len();
        row += n;
        Span { row: row - n, n, pos: run.pos, pages: run.pages }
    };
    runs.iter().map(span).collect()
}

/// The rows of a batch that want logits: the last `n_logits` of each run.
pub(crate) fn logits_rows(runs: &[Run<'_>]) -> Vec<Range<usize>> {
    let mut end = 0;
    let rows = runs.iter().map(|run| {
        end += run.tokens.len();
        assert!(run.n_logits <= run.tokens.len(), "more logits than tokens");
        end - run.n_logits..end
    });
    rows.collect()
}

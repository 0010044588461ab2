//! THE forward pass: tokens of one or several sequences in, logits out.
//!
//! ```text
//! x = norm(embedding[token] * scale + token_type + position_embedding[position])
//! each layer: attention and feed-forward add to x (`block.rs`)
//! logits = cap((W_out norm(x) + b) * scale)
//! ```
//!
//! What a model does not have is left out.

use alloc::vec::Vec;
use core::ops::Range;

use super::Model;
use super::block::Pass;
use super::rows::{Rows, cut, whole};
use super::scratch::{AttentionScratch, Scratch};
use super::weights::{Order, padded};
use crate::kernels::Cpu;
use crate::kernels::attention::{KvLayout, KvMemory, PAGE, Slot, Span};
use crate::kernels::elementwise::{add_scaled, scale, soft_cap};
use crate::pool::Pool;

/// Consecutive tokens of one sequence.
#[derive(Debug, Clone, Copy)]
pub struct Run<'a> {
    /// Token ids, each below `n_vocab`.
    pub tokens: &'a [u32],
    /// Position of the first.
    pub pos: usize,
    /// Pages of the sequence, enough for its last token here.
    pub pages: &'a [u32],
    /// How many of the last tokens want logits.
    pub n_logits: usize,
}

/// A point of the forward pass whose numbers a trace may look at. [`Stage::Rope`] is the rotated queries, then the
/// rotated keys; [`Stage::Scores`] the scaled scores of the tokens seen, before the softmax, head by head of each row.
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
    FinalNorm,
    Logits,
}

impl Stage {
    /// The name in a trace.
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
            Stage::FinalNorm => "final_norm",
            Stage::Logits => "logits",
        }
    }
}

/// Called with each stage, the layer (none for what is outside layers) and each row of its numbers in turn.
pub type Trace<'a> = &'a mut dyn FnMut(Stage, Option<usize>, &mut dyn Iterator<Item = &[f32]>);

/// What a batch gave: a row per wanted logit, in order of the runs.
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

    /// Whether no logits were wanted.
    pub fn is_empty(&self) -> bool {
        self.hidden.is_empty()
    }

    /// Logits of a row (n_vocab).
    pub fn logits(&self, row: usize) -> &'a [f32] {
        &self.logits[row * padded(self.n_vocab)..][..self.n_vocab]
    }

    /// State after the final norm (n_embd); it fixes the logits.
    pub fn hidden(&self, row: usize) -> &'a [f32] {
        &self.hidden[row * self.n_embd..][..self.n_embd]
    }
}

impl Model {
    /// Runs a batch; returns the logits that its runs want. Keys and values of its tokens are written to the sequences'
    /// pages of `memory`.
    ///
    /// # Panics
    /// If the batch is larger than the scratch, or a token, page or embedded position is out of range: the engine
    /// checks on submission.
    #[allow(clippy::too_many_arguments)]
    pub fn forward<'s>(
        &self,
        cpu: Cpu,
        pool: &dyn Pool,
        runs: &[Run<'_>],
        kv: &KvLayout,
        memory: &mut KvMemory,
        s: &'s mut Scratch,
        mut trace: Option<Trace<'_>>,
    ) -> Output<'s> {
        self.batch(cpu, pool, runs, kv, memory, s, trace.as_mut().map(|t| &mut **t as _));
        self.logits(cpu, pool, &logits_rows(runs), s, trace)
    }

    /// Runs a batch through the layers; [`Model::logits`] gives logits of its rows, until the next batch.
    ///
    /// # Panics
    /// As [`Model::forward`].
    #[allow(clippy::too_many_arguments)]
    pub fn batch(
        &self,
        cpu: Cpu,
        pool: &dyn Pool,
        runs: &[Run<'_>],
        kv: &KvLayout,
        memory: &mut KvMemory,
        s: &mut Scratch,
        trace: Option<Trace<'_>>,
    ) {
        let spans = self.place(runs, &mut s.attention);
        let mut pass = self.pass(cpu, pool, &spans, kv, trace);
        self.layers(&mut pass, runs, memory, s);
    }

    /// Runs a batch of whole texts, whose keys and values no later batch needs: pages of one layer
    /// ([`KvLayout::n_layer`]) will do. Returns the states after the final norm, (rows, n_embd).
    ///
    /// # Panics
    /// As [`Model::forward`].
    pub fn states<'s>(
        &self,
        cpu: Cpu,
        pool: &dyn Pool,
        runs: &[Run<'_>],
        kv: &KvLayout,
        memory: &mut KvMemory,
        s: &'s mut Scratch,
    ) -> &'s mut [f32] {
        let spans = self.place(runs, &mut s.attention);
        let mut pass = self.pass(cpu, pool, &spans, kv, None);
        self.layers(&mut pass, runs, memory, s);
        let len = pass.n * self.config.n_embd;
        let (x, h) = (&mut s.x[..len], &mut s.h[..len]);
        let Some(norm) = &self.weights.final_norm else { return x };
        pass.rows.norm(norm, x, self.config.n_embd, h);
        h
    }

    fn pass<'a, 't>(
        &'a self,
        cpu: Cpu,
        pool: &'a dyn Pool,
        spans: &'a [Span<'a>],
        kv: &'a KvLayout,
        trace: Option<Trace<'t>>,
    ) -> Pass<'a, 't> {
        Pass { model: self, rows: self.rows(cpu, pool), kv, spans, n: spans.iter().map(|s| s.n).sum(), trace }
    }

    pub(super) fn rows<'a>(&self, cpu: Cpu, pool: &'a dyn Pool) -> Rows<'a> {
        Rows { cpu, pool, kind: self.config.norm, eps: self.config.norm_eps }
    }

    /// The residual stream of the batch, through all layers.
    fn layers(&self, pass: &mut Pass<'_, '_>, runs: &[Run<'_>], memory: &mut KvMemory, s: &mut Scratch) {
        let (d, n) = (self.config.n_embd, pass.n);
        assert!(n <= s.max_rows, "a batch beyond the scratch");
        self.embed(pass.rows.cpu, runs, s);
        if let Some(norm) = &self.weights.embedding_norm {
            pass.rows.norm_each(norm, &mut s.x[..n * d]);
        }
        pass.look(Stage::Embedding, None, &mut cut(&s.x[..n * d], d, 0, d));
        for (i, layer) in self.weights.layers.iter().enumerate() {
            match &layer.order {
                Order::Serial => pass.serial_block(i, memory, s),
                Order::Parallel => pass.parallel_block(i, memory, s),
                Order::PostNorm(norms) => pass.post_norm_block(i, norms, memory, s),
            }
        }
    }

    /// Places of the batch's rows in the arena, and their cosines and sines for each rotation.
    fn place<'r>(&self, runs: &[Run<'r>], s: &mut AttentionScratch) -> Vec<Span<'r>> {
        let half = self.config.n_rot / 2;
        let mut spans = Vec::with_capacity(runs.len());
        s.slots.clear();
        for run in runs {
            spans.push(Span { row: s.slots.len(), n: run.tokens.len(), pos: run.pos, pages: run.pages });
            for pos in run.pos..run.pos + run.tokens.len() {
                for (i, rotary) in s.rotary.iter().enumerate() {
                    let at = (s.slots.len() * s.rotary.len() + i) * half;
                    rotary.at(pos, &mut s.cos[at..at + half], &mut s.sin[at..at + half]);
                }
                s.slots.push(Slot { page: run.pages[pos / PAGE], token: (pos % PAGE) as u32 });
            }
        }
        spans
    }

    /// The residual stream before the first layer.
    fn embed(&self, cpu: Cpu, runs: &[Run<'_>], s: &mut Scratch) {
        let d = self.config.n_embd;
        let tokens = runs.iter().flat_map(|r| r.tokens.iter().enumerate().map(|(i, token)| (*token, r.pos + i)));
        for ((token, pos), x) in tokens.zip(s.x.chunks_exact_mut(d)) {
            self.weights.embedding.row(token as usize, x);
            if self.config.embedding_scale != 1.0 {
                scale(cpu, x, self.config.embedding_scale);
            }
            let kind = self.weights.token_types.as_ref().map(|types| (types, 0));
            let position = self.weights.positions.as_ref().map(|positions| (positions, pos));
            for (matrix, row) in kind.into_iter().chain(position) {
                matrix.row(row, &mut s.row);
                add_scaled(cpu, x, &s.row, 1.0);
            }
        }
    }

    /// States after the final norm and logits of `rows` of the last batch.
    ///
    /// # Panics
    /// If there are more rows than the scratch has room for logits, or they are not of the batch.
    pub fn logits<'s>(
        &self,
        cpu: Cpu,
        pool: &dyn Pool,
        rows: &[Range<usize>],
        s: &'s mut Scratch,
        mut trace: Option<Trace<'_>>,
    ) -> Output<'s> {
        let (c, w, on) = (&self.config, &self.weights, self.rows(cpu, pool));
        let (d, stride) = (c.n_embd, padded(c.n_vocab));
        let mut wanted = 0;
        for rows in rows {
            assert!(wanted + rows.len() <= s.max_logits, "more logits than the scratch holds");
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
            let mut look = |stage, rows: &mut dyn Iterator<Item = &[f32]>| {
                if let Some(trace) = &mut trace {
                    trace(stage, None, rows);
                }
            };
            look(Stage::FinalNorm, &mut cut(hidden, d, 0, d));
            let output = w.output.as_ref().unwrap_or(&w.embedding);
            on.matrix(output, w.output_bias.as_deref(), whole(hidden, output), logits, &mut s.step.words);
            if c.logit_scale != 1.0 || c.logit_soft_cap.is_some() {
                on.each(logits, stride, &|_, row| {
                    if c.logit_scale != 1.0 {
                        scale(cpu, row, c.logit_scale);
                    }
                    if let Some(cap) = c.logit_soft_cap {
                        soft_cap(cpu, row, cap);
                    }
                });
            }
            look(Stage::Logits, &mut cut(logits, stride, 0, c.n_vocab));
        }
        Output { hidden, logits, n_embd: d, n_vocab: c.n_vocab }
    }
}

/// Rows of a batch that want logits: the last of each run.
pub(crate) fn logits_rows(runs: &[Run<'_>]) -> Vec<Range<usize>> {
    let mut end = 0;
    let rows = runs.iter().map(|run| {
        end += run.tokens.len();
        assert!(run.n_logits <= run.tokens.len(), "more logits than tokens");
        end - run.n_logits..end
    });
    rows.collect()
}

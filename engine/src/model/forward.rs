//! THE forward pass: tokens of one or several sequences in, logits out. Straight-line code, one block per layer:
//!
//! ```text
//! x = embedding[token]
//! h = rms_norm(x); q, k, v = W h + b; (norms of heads); rope; attention; x += W_o o
//! h = rms_norm(x); x += W_down (act(W_gate h) * (W_up h))
//! logits = W_out rms_norm(x)
//! ```

use alloc::collections::TryReserveError;
use alloc::vec::Vec;

use super::Model;
use super::weights::{Layer, Linear};
use crate::kernels::Cpu;
use crate::kernels::act::{self, ActKind};
use crate::kernels::attention::{AttendScratch, Attention, KvLayout, KvRows, KvType, MAX_HEAD_DIM, PAGE, Slot, Span};
use crate::kernels::elementwise::{add, gated};
use crate::kernels::matmul::{Columns, Job, products};
use crate::kernels::norm::rms_norm;
use crate::kernels::panel::{Matrix, PANEL};
use crate::kernels::rope::rope;
use crate::kernels::{attention, tasks};
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
    FfnNorm,
    FfnOut,
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
            Stage::FfnNorm => "ffn_norm",
            Stage::FfnOut => "ffn_out",
            Stage::FinalNorm => "final_norm",
            Stage::Logits => "logits",
        }
    }
}

/// Called with each stage, the layer (none for what is outside layers) and each row of its numbers in turn.
pub type Trace<'a> = &'a mut dyn FnMut(Stage, Option<usize>, &mut dyn Iterator<Item = &[f32]>);

/// Working memory of the forward pass, fixed at construction.
pub struct Scratch {
    /// Rows and logits rows at once.
    max_rows: usize,
    max_logits: usize,
    /// (rows, n_embd): the residual stream, and its norm.
    x: Vec<f32>,
    h: Vec<f32>,
    /// (rows, padded q + k + v)
    qkv: Vec<f32>,
    /// (rows, n_head * head_dim)
    attn: Vec<f32>,
    /// (rows, padded n_embd)
    proj: Vec<f32>,
    /// (rows, 2 * padded n_ff), and what goes down: (rows, n_ff)
    gate_up: Vec<f32>,
    ffn: Vec<f32>,
    /// Packed columns.
    words: Vec<u32>,
    /// (rows, n_rot / 2)
    cos: Vec<f32>,
    sin: Vec<f32>,
    slots: Vec<Slot>,
    attend: Vec<AttendScratch>,
    parts: Vec<f32>,
    /// (logits rows, n_embd) after the final norm, and (logits rows, padded n_vocab).
    hidden: Vec<f32>,
    logits: Vec<f32>,
}

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

/// Rows of an output in whole panels.
fn padded(rows: usize) -> usize {
    rows.next_multiple_of(PANEL)
}

fn zeros<T: Clone + Default>(n: usize) -> Result<Vec<T>, TryReserveError> {
    let mut v = Vec::new();
    v.try_reserve_exact(n)?;
    v.resize(n, T::default());
    Ok(v)
}

impl Model {
    /// How keys and values of this model lie in a page.
    pub fn kv_layout(&self, kv_type: KvType) -> KvLayout {
        let c = &self.config;
        KvLayout { n_layer: c.n_layer, n_head_kv: c.n_head_kv, head_dim: c.head_dim, kv_type }
    }

    /// Memory for batches of up to `max_rows` tokens of `max_seqs` sequences of up to `n_ctx` tokens, with logits for
    /// up to `max_logits` of them.
    ///
    /// # Errors
    /// If there is not enough memory.
    pub fn scratch(
        &self,
        pool: &dyn Pool,
        kv_type: KvType,
        max_rows: usize,
        max_logits: usize,
        max_seqs: usize,
        n_ctx: usize,
    ) -> Result<Scratch, TryReserveError> {
        let c = &self.config;
        let (q, kv, d) = (c.n_head * c.head_dim, c.n_head_kv * c.head_dim, c.n_embd);
        let layout = self.kv_layout(kv_type);
        let widest = d.max(q).max(c.n_ff);
        // two words of group and head per four elements, for up to three forms of the same input
        let words = 3 * max_rows * (widest * 5 / 8 + 32);
        Ok(Scratch {
            max_rows,
            max_logits,
            x: zeros(max_rows * d)?,
            h: zeros(max_rows * d)?,
            qkv: zeros(max_rows * (padded(q) + 2 * padded(kv)))?,
            attn: zeros(max_rows * q)?,
            proj: zeros(max_rows * padded(d))?,
            gate_up: zeros(max_rows * 2 * padded(c.n_ff))?,
            ffn: zeros(max_rows * c.n_ff)?,
            words: zeros(words)?,
            cos: zeros(max_rows * c.n_rot / 2)?,
            sin: zeros(max_rows * c.n_rot / 2)?,
            slots: Vec::with_capacity(max_rows),
            attend: (0..pool.threads()).map(|_| AttendScratch::new(&layout)).collect(),
            parts: zeros(Attention::parts_len(&layout, c.n_head, max_seqs, n_ctx))?,
            hidden: zeros(max_logits * d)?,
            logits: zeros(max_logits * padded(c.n_vocab))?,
        })
    }

    /// Runs a batch. Keys and values of its tokens are written to the sequences' pages of `arena`.
    ///
    /// # Panics
    /// If the batch is larger than the scratch, or a token or page is out of range: the engine checks on submission.
    #[allow(clippy::too_many_arguments)]
    pub fn forward<'s>(
        &self,
        cpu: Cpu,
        pool: &dyn Pool,
        runs: &[Run<'_>],
        kv: &KvLayout,
        arena: &mut [u8],
        s: &'s mut Scratch,
        mut trace: Option<Trace<'_>>,
    ) -> Output<'s> {
        let c = &self.config;
        let (d, q_width, kv_width) = (c.n_embd, c.n_head * c.head_dim, c.n_head_kv * c.head_dim);
        let (k_at, v_at) = (padded(q_width), padded(q_width) + padded(kv_width));
        let (qkv_stride, ff_at) = (v_at + padded(kv_width), padded(c.n_ff));
        let n: usize = runs.iter().map(|r| r.tokens.len()).sum();
        assert!(n <= s.max_rows, "a batch beyond the scratch");
        let traced = trace.is_some();
        let mut look = |stage: Stage, layer: Option<usize>, rows: &mut dyn Iterator<Item = &[f32]>| {
            if let Some(trace) = &mut trace {
                trace(stage, layer, rows);
            }
        };

        let x = &mut s.x[..n * d];
        let h = &mut s.h[..n * d];
        let qkv = &mut s.qkv[..n * qkv_stride];
        let attn = &mut s.attn[..n * q_width];
        let proj = &mut s.proj[..n * padded(d)];
        let gate_up = &mut s.gate_up[..n * 2 * ff_at];
        let ffn = &mut s.ffn[..n * c.n_ff];

        let spans = self.place(runs, &mut s.slots, &mut s.cos, &mut s.sin);
        for (token, x) in runs.iter().flat_map(|r| r.tokens).zip(x.chunks_exact_mut(d)) {
            self.weights.embedding.row(*token as usize, x);
        }
        look(Stage::Embedding, None, &mut cut(x, d, 0, d));

        for (i, layer) in self.weights.layers.iter().enumerate() {
            let at = Some(i);
            // attention
            norm_rows(cpu, pool, x, &layer.attn_norm, c.norm_eps, h);
            look(Stage::AttnNorm, at, &mut cut(h, d, 0, d));
            let jobs = [(&layer.q, 0), (&layer.k, k_at), (&layer.v, v_at)];
            linears(cpu, pool, &jobs, h, qkv, qkv_stride, &mut s.words);
            look(Stage::Q, at, &mut cut(qkv, qkv_stride, 0, q_width));
            look(Stage::K, at, &mut cut(qkv, qkv_stride, k_at, kv_width));
            look(Stage::V, at, &mut cut(qkv, qkv_stride, v_at, kv_width));
            self.rotate(cpu, pool, layer, qkv, qkv_stride, k_at, &s.cos, &s.sin);
            let k = cut(qkv, qkv_stride, k_at, kv_width);
            look(Stage::Rope, at, &mut cut(qkv, qkv_stride, 0, q_width).chain(k));
            let rows = KvRows { x: qkv, stride: qkv_stride, k_at, v_at, slots: &s.slots };
            attention::write_kv(cpu, pool, kv, i, rows, arena);
            let attention = Attention {
                kv,
                layer: i,
                arena,
                n_head: c.n_head,
                window: c.window,
                q: qkv,
                q_stride: qkv_stride,
                spans: &spans,
            };
            if traced {
                look(Stage::Scores, at, &mut attention.scores(cpu).iter().map(Vec::as_slice));
            }
            attention.run(cpu, pool, attn, &mut s.attend, &mut s.parts);
            look(Stage::AttnOut, at, &mut cut(attn, q_width, 0, q_width));
            linears(cpu, pool, &[(&layer.o, 0)], attn, proj, padded(d), &mut s.words);
            add_rows(cpu, pool, d, x, proj);

            // feed-forward
            norm_rows(cpu, pool, x, &layer.ffn_norm, c.norm_eps, h);
            look(Stage::FfnNorm, at, &mut cut(h, d, 0, d));
            linears(cpu, pool, &[(&layer.gate, 0), (&layer.up, ff_at)], h, gate_up, 2 * ff_at, &mut s.words);
            tasks::chunks(act::few(pool, n), ffn, act::TASK_COLUMNS * c.n_ff, &|i, rows, _| {
                for (r, row) in rows.chunks_exact_mut(c.n_ff).enumerate() {
                    let (gate, up) = gate_up[(i * act::TASK_COLUMNS + r) * 2 * ff_at..][..2 * ff_at].split_at(ff_at);
                    row.copy_from_slice(&gate[..c.n_ff]);
                    gated(cpu, c.arch.gate, row, &up[..c.n_ff]);
                }
            });
            linears(cpu, pool, &[(&layer.down, 0)], ffn, proj, padded(d), &mut s.words);
            look(Stage::FfnOut, at, &mut cut(proj, padded(d), 0, d));
            add_rows(cpu, pool, d, x, proj);
        }

        // logits of the rows that want them
        let mut wanted = 0;
        let mut row = 0;
        for run in runs {
            row += run.tokens.len();
            assert!(run.n_logits <= run.tokens.len() && wanted + run.n_logits <= s.max_logits);
            let from = &x[(row - run.n_logits) * d..row * d];
            let into = &mut s.hidden[wanted * d..(wanted + run.n_logits) * d];
            norm_rows(cpu, pool, from, &self.weights.final_norm, c.norm_eps, into);
            wanted += run.n_logits;
        }
        let hidden = &mut s.hidden[..wanted * d];
        let logits = &mut s.logits[..wanted * padded(c.n_vocab)];
        if wanted > 0 {
            look(Stage::FinalNorm, None, &mut cut(hidden, d, 0, d));
            match &self.weights.output {
                Some(output) => linears(cpu, pool, &[(output, 0)], hidden, logits, padded(c.n_vocab), &mut s.words),
                None => {
                    let tied = [(&self.weights.embedding, 0)];
                    matrices(cpu, pool, &tied, hidden, logits, padded(c.n_vocab), &mut s.words);
                }
            }
            look(Stage::Logits, None, &mut cut(logits, padded(c.n_vocab), 0, c.n_vocab));
        }
        Output { hidden, logits, n_embd: d, n_vocab: c.n_vocab }
    }

    /// Places of the batch's rows in the arena, and their cosines and sines.
    fn place<'r>(&self, runs: &[Run<'r>], slots: &mut Vec<Slot>, cos: &mut [f32], sin: &mut [f32]) -> Vec<Span<'r>> {
        let half = self.config.n_rot / 2;
        let mut spans = Vec::with_capacity(runs.len());
        slots.clear();
        for run in runs {
            spans.push(Span { row: slots.len(), n: run.tokens.len(), pos: run.pos, pages: run.pages });
            for pos in run.pos..run.pos + run.tokens.len() {
                let at = slots.len() * half;
                self.rotary.at(pos, &mut cos[at..at + half], &mut sin[at..at + half]);
                slots.push(Slot { page: run.pages[pos / PAGE], token: (pos % PAGE) as u32 });
            }
        }
        spans
    }

    /// Norms of heads where the model has them, then rotation; queries are scaled for the scores.
    #[allow(clippy::too_many_arguments)]
    fn rotate(
        &self,
        cpu: Cpu,
        pool: &dyn Pool,
        layer: &Layer,
        qkv: &mut [f32],
        stride: usize,
        k_at: usize,
        cos: &[f32],
        sin: &[f32],
    ) {
        let c = &self.config;
        let (half, kv_width) = (c.n_rot / 2, c.n_head_kv * c.head_dim);
        let n = qkv.len() / stride;
        tasks::chunks(act::few(pool, n), qkv, act::TASK_COLUMNS * stride, &|i, rows, _| {
            for (r, row) in rows.chunks_exact_mut(stride).enumerate() {
                let at = (i * act::TASK_COLUMNS + r) * half;
                let (cos, sin) = (&cos[at..at + half], &sin[at..at + half]);
                let (q, rest) = row.split_at_mut(k_at);
                let parts = [
                    (&mut q[..c.n_head * c.head_dim], &layer.q_norm, c.attn_scale),
                    (&mut rest[..kv_width], &layer.k_norm, 1.0),
                ];
                for (heads, norm, scale) in parts {
                    if let Some(w) = norm {
                        norm_heads(cpu, heads, w, c.norm_eps);
                    }
                    rope(cpu, c.arch.rope, heads, c.head_dim, cos, sin, scale);
                }
            }
        });
    }
}

/// Columns `at..at + width` of rows of `stride` numbers.
fn cut(x: &[f32], stride: usize, at: usize, width: usize) -> impl Iterator<Item = &[f32]> {
    x.chunks_exact(stride).map(move |row| &row[at..at + width])
}

/// `out = rms_norm(x)`, row by row.
fn norm_rows(cpu: Cpu, pool: &dyn Pool, x: &[f32], w: &[f32], eps: f32, out: &mut [f32]) {
    let d = w.len();
    tasks::chunks(act::few(pool, x.len() / d), out, act::TASK_COLUMNS * d, &|i, out, _| {
        let x = &x[i * act::TASK_COLUMNS * d..];
        for (x, out) in x.chunks_exact(d).zip(out.chunks_exact_mut(d)) {
            rms_norm(cpu, x, w, eps, out);
        }
    });
}

fn norm_heads(cpu: Cpu, heads: &mut [f32], w: &[f32], eps: f32) {
    let mut out = [0.0; MAX_HEAD_DIM];
    let out = &mut out[..w.len()];
    for head in heads.chunks_exact_mut(w.len()) {
        rms_norm(cpu, head, w, eps, out);
        head.copy_from_slice(out);
    }
}

/// `x += y`: rows of `d` numbers, those of `y` padded.
fn add_rows(cpu: Cpu, pool: &dyn Pool, d: usize, x: &mut [f32], y: &[f32]) {
    tasks::chunks(act::few(pool, x.len() / d), x, act::TASK_COLUMNS * d, &|i, x, _| {
        let y = &y[i * act::TASK_COLUMNS * padded(d)..];
        for (x, y) in x.chunks_exact_mut(d).zip(y.chunks_exact(padded(d))) {
            add(cpu, x, &y[..d]);
        }
    });
}

/// `out = W x + b` for linears that share their input `x` (n, k).
fn linears(
    cpu: Cpu,
    pool: &dyn Pool,
    linears: &[(&Linear, usize)],
    x: &[f32],
    out: &mut [f32],
    stride: usize,
    words: &mut [u32],
) {
    let jobs: Vec<(&Matrix, usize)> = linears.iter().map(|(l, at)| (&l.w, *at)).collect();
    matrices(cpu, pool, &jobs, x, out, stride, words);
    for (linear, at) in linears {
        if let Some(bias) = &linear.bias {
            for row in out.chunks_exact_mut(stride) {
                add(cpu, &mut row[*at..at + bias.len()], bias);
            }
        }
    }
}

/// `out = W x` for matrices that share their input `x` (n, k), which is packed once for each form they want.
fn matrices(
    cpu: Cpu,
    pool: &dyn Pool,
    matrices: &[(&Matrix, usize)],
    x: &[f32],
    out: &mut [f32],
    stride: usize,
    words: &mut [u32],
) {
    let Some((first, _)) = matrices.first() else { return };
    let (k, n) = (first.k(), x.len() / first.k());
    let mut left = words;
    let mut packed: Vec<act::Acts<'_>> = Vec::with_capacity(matrices.len());
    let mut jobs = Vec::with_capacity(matrices.len());
    for (w, at) in matrices {
        let x = match ActKind::of(cpu, w.dtype()) {
            None => Columns::Plain(x),
            Some(kind) => {
                if !packed.iter().any(|p| p.kind == kind) {
                    let (mine, rest) = left.split_at_mut(kind.len_words(n, k));
                    left = rest;
                    packed.push(act::pack(cpu, pool, kind, x, k, mine));
                }
                match packed.iter().find(|p| p.kind == kind) {
                    Some(p) => Columns::Packed(*p),
                    None => continue,
                }
            }
        };
        jobs.push(Job { w, x, at: *at });
    }
    products(cpu, pool, &jobs, n, out, stride);
}

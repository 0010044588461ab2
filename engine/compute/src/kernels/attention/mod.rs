//! Attention over pages of 16 tokens, in chunks of 256 tokens at absolute positions, with an online softmax across
//! chunks.
//!
//! ```text
//! s[t] = sum_d q[d] * k[t][d]        d = 0, 1, ...; q comes scaled; SIMD across 16 tokens
//! s[t] = cap * tanh(s[t] / cap)      with a soft cap
//! m = max s; p[t] = exp(s[t] - m); l = sum p     on 16 virtual lanes, lane = t mod 16
//! o[d] = sum_t p[t] * v[t][d]        t ascending; SIMD across d
//! M' = max(M, m); a = exp(M - M'); b = exp(m - M'); L = L*a + l*b; O = O*a + o*b     chunks ascending
//! out = O * (1 / L)
//! ```
//!
//! Chunk boundaries depend on positions only, so neither the batch, nor the split over threads, nor prefill versus
//! decode can change a bit. Int8 keys: `s = f32(sum q8*k8) * (d_k * d_q)`, with a scale per token and head. Int8 values are
//! `f16(v8 * d_v)`. With f16
//! keys q is rounded to 13 bits first, with f16 values p is: then all products are exact and may be fused with the
//! addition.
//!
//! With a selection of positions (`select.rs`) the scores of all others are -inf. Pages and chunks without a selected
//! position are left out, which changes no bit: their weights would be 0.

mod block;
mod compress;
mod int8_values;
mod joint;
mod kv;
mod lanes;
mod latent;
mod memory;
mod scalar;
mod select;
mod softmax_state;

use alloc::vec;
use alloc::vec::Vec;
use core::ops::Range;

use super::act::Floats;
use super::{Cpu, SharedOut, tasks};
use crate::pool::Pool;
use block::{AttentionBlock, BlockOutput, ScoresOp, run_chunk_op};
pub use compress::{Compressor, mean_key};
use joint::JOINT_PARTS;
pub use joint::attend_jointly;
pub use kv::{KvHeads, KvLayer, KvLayout, KvRows, KvType, MAX_HEAD_DIM, MAX_LATENT_DIM, PAGE, Slot, write_kv};
pub use memory::KvMemory;
pub use select::{Indexer, Selected, SelectionRule, SelectionScratch};
use softmax_state::{PartRows, combine};

/// Tokens of a chunk.
pub const CHUNK: usize = 256;
/// Largest number of query columns (rows of a block x query heads of the block) of one task.
const MAX_COLUMNS: usize = 32;
/// With f16 values, scores that far below the maximum get weight 0: exp(-77) is above 2^-112 (see `narrow.rs`).
const WEIGHT_LOW: f32 = -77.0;
/// Largest number of query heads that share a KV head: beyond any known model.
pub const MAX_GROUP: usize = 256;

/// Consecutive tokens of one sequence, as rows of a batch.
#[derive(Debug, Clone)]
pub struct Span<'a> {
    /// First row in the batch.
    pub row: usize,
    /// Number of rows.
    pub n: usize,
    /// Position of the first token in its sequence.
    pub pos: usize,
    /// The pages of the sequence, in order.
    pub pages: &'a [u32],
}

impl Span<'_> {
    /// The position after the last token.
    fn end(&self) -> usize {
        self.pos + self.n
    }
}

/// Attention window in tokens: how many tokens to the left and right of itself a token attends to, at most. Never
/// beyond the last token of its span.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionWindow {
    /// Earlier tokens; `usize::MAX` without a sliding window.
    pub left: usize,
    /// Later tokens, which must be in the same batch; 0 for causal attention.
    pub right: usize,
    /// Positions are divided into chunks of this many, and a token attends to those of its own chunk (Llama 4);
    /// `usize::MAX` for none.
    pub chunk: usize,
}

impl AttentionWindow {
    /// All tokens up to itself.
    pub const CAUSAL: AttentionWindow = AttentionWindow { left: usize::MAX, right: 0, chunk: usize::MAX };
}

/// A bias on the score of each key, by its distance from the query.
#[derive(Clone, Copy)]
pub struct DistanceBias<'a> {
    /// (n_head, 2 * max + 1): biases at distances `-max..=max` of the key, positive for later tokens.
    pub table: &'a [f32],
    /// Distances beyond have the bias of this one.
    pub max: usize,
}

/// Attention of a whole batch in one layer.
#[derive(Clone, Copy)]
pub struct Attention<'a> {
    /// The layer's keys and values in a page.
    pub kv: KvLayer,
    /// Memory of the pages.
    pub memory: &'a KvMemory,
    /// Number of query heads, a multiple of the KV heads.
    pub n_head: usize,
    /// Attention window.
    pub window: AttentionWindow,
    /// tanh soft cap on attention logits (Gemma 2), if any.
    pub soft_cap: Option<f32>,
    /// ALiBi (Press et al. 2022): a slope per query head, times the distance in tokens, is subtracted from the scores.
    pub alibi: Option<&'a [f32]>,
    /// Biases by distance, in models without positions of another kind (T5).
    pub bias: Option<DistanceBias<'a>>,
    /// A score per query head that takes part in the softmax without a value (gpt-oss).
    pub sinks: Option<&'a [f32]>,
    /// The positions that each row attends to, of those in its window; at least one of them. `None` for all.
    pub selected: Option<Selected<'a>>,
    /// Queries, (rows, n_head * key_dim), scaled and rotated, `q_stride` floats from one row to the next.
    pub q: &'a [f32],
    /// Floats from one row of `q` to the next.
    pub q_stride: usize,
    /// The spans, in order of their rows.
    pub spans: &'a [Span<'a>],
}

/// Spans of up to this many rows with several chunks are split by chunks (split-K), so that a few rows with long
/// contexts keep all threads busy.
const FEW_ROWS: usize = 4;

impl<'a> Attention<'a> {
    /// Causal attention to all positions, with nothing but the dot products in its scores.
    pub fn causal(
        kv: KvLayer,
        memory: &'a KvMemory,
        n_head: usize,
        q: Floats<'a>,
        spans: &'a [Span<'a>],
    ) -> Attention<'a> {
        let (window, Floats { x: q, stride: q_stride }) = (AttentionWindow::CAUSAL, q);
        let (soft_cap, alibi, bias, sinks, selected) = (None, None, None, None, None);
        Attention { kv, memory, n_head, window, soft_cap, alibi, bias, sinks, selected, q, q_stride, spans }
    }

    /// Floats of scratch for partial results, for a batch of `max_seqs` sequences of up to `n_ctx` tokens.
    pub fn parts_len(kv: &KvLayer, n_head: usize, max_seqs: usize, n_ctx: usize) -> usize {
        [FEW_ROWS, n_head, n_ctx.div_ceil(CHUNK), kv.part_len()].iter().fold(max_seqs, |n, d| n.saturating_mul(*d))
    }

    /// Computes `out`, (rows, n_head * value_dim). `scratch` must have an element per thread, `parts` be
    /// [`Attention::parts_len`] long.
    ///
    /// # Panics
    /// If spans overlap or are outside a buffer.
    pub fn run(&self, cpu: Cpu, pool: &dyn Pool, out: &mut [f32], scratch: &mut [AttendScratch], parts: &mut [f32]) {
        let (kv, d) = (&self.kv, self.kv.heads.value_dim);
        let (width, group) = (self.n_head * d, self.n_head / kv.heads.n);
        let block = (MAX_COLUMNS / group).max(1);
        let (mut all_tasks, mut end, mut part) = (Vec::new(), 0, 0);
        for (i, span) in self.spans.iter().enumerate() {
            assert!(span.row >= end && (span.row + span.n) * width <= out.len());
            end = span.row + span.n;
            for (head, heads) in (0..kv.heads.n).flat_map(|head| self.query_heads(head).map(move |heads| (head, heads)))
            {
                let task =
                    |token| AttentionTask { span: i, head, heads: heads.clone(), token, n: 1, chunk: None, part: 0 };
                if span.n <= FEW_ROWS && span.end() > CHUNK {
                    for token in 0..span.n {
                        for chunk in self.chunks(span, token, 1) {
                            all_tasks.push(AttentionTask { chunk: Some(chunk), part, ..task(token) });
                            part += heads.len() * kv.part_len();
                        }
                    }
                } else {
                    let tokens = (0..span.n).step_by(block);
                    all_tasks.extend(tokens.map(|token| AttentionTask { n: block.min(span.n - token), ..task(token) }));
                }
            }
        }
        assert!(part <= parts.len(), "scratch of {} floats for partial results, expected {part}", parts.len());
        // the last blocks of a causal prefill take longest: start with them
        all_tasks.reverse();
        let (rows, shared) = (SharedOut::new(out), SharedOut::new(parts));
        tasks::with_state(pool, all_tasks.len(), scratch, &|i, scratch| {
            let u = &all_tasks[i];
            let span = &self.spans[u.span];
            let row = span.row + u.token;
            let pos = span.pos + u.token;
            let (chunks, out) = match u.chunk {
                Some(chunk) => (chunk..chunk + 1, BlockOutput::Part { out: shared, at: u.part }),
                None => (self.chunks(span, u.token, u.n), BlockOutput::Rows { out: rows, at: row * width }),
            };
            let (head, query_heads) = (u.head, u.heads.clone());
            AttentionBlock { of: self, head, query_heads, span, row, tokens: u.n, pos, chunks }.run(cpu, out, scratch);
        });
        all_tasks.reverse();
        let mut i = 0;
        while i < all_tasks.len() {
            let u = &all_tasks[i];
            if u.chunk.is_none() {
                i += 1;
                continue;
            }
            let same = |v: &&AttentionTask| (v.span, &v.heads, v.token) == (u.span, &u.heads, u.token);
            let (n, stride) = (all_tasks[i..].iter().take_while(same).count(), u.heads.len() * kv.part_len());
            for (g, head) in u.heads.clone().enumerate() {
                let at = (self.spans[u.span].row + u.token) * width + head * d;
                let sink = self.sinks.map(|sinks| sinks[head]);
                let parts = &parts[u.part + g * kv.part_len()..];
                combine(cpu, kv, PartRows { parts, stride, n_chunks: n, sink }, &mut out[at..at + d]);
            }
            i += n;
        }
    }
}

impl Attention<'_> {
    /// The query heads of a KV head, as many at a time as a block has columns.
    fn query_heads(&self, head: usize) -> impl Iterator<Item = Range<usize>> {
        let group = self.n_head / self.kv.heads.n;
        let end = (head + 1) * group;
        (head * group..end).step_by(MAX_COLUMNS).map(move |first| first..end.min(first + MAX_COLUMNS))
    }

    /// The positions that the token at `pos` of a span attends to.
    fn attended(&self, span: &Span<'_>, pos: usize) -> Range<usize> {
        pos.saturating_sub(self.window.left).max(pos / self.window.chunk * self.window.chunk)
            ..pos.saturating_add(self.window.right).min(span.end() - 1) + 1
    }

    /// The chunks that `n` tokens from token `token` of a span on attend to.
    fn chunks(&self, span: &Span<'_>, token: usize, n: usize) -> Range<usize> {
        let first = span.pos + token;
        self.attended(span, first).start / CHUNK..self.attended(span, first + n - 1).end.div_ceil(CHUNK)
    }

    /// The scaled and capped attention scores of each row, in order of position: one list per row and query head. For
    /// traces: exactly the numbers that [`Attention::run`] applies the softmax to.
    pub fn scores(&self, cpu: Cpu) -> Vec<Vec<f32>> {
        let mut all = Vec::new();
        let mut scratch = AttendScratch::new(core::slice::from_ref(&self.kv));
        for span in self.spans {
            for token in 0..span.n {
                for head in 0..self.kv.heads.n {
                    for query_heads in self.query_heads(head) {
                        let (pos, row) = (span.pos + token, span.row + token);
                        let chunks = self.chunks(span, token, 1);
                        let a = AttentionBlock { of: self, head, query_heads, span, row, tokens: 1, pos, chunks };
                        let at = all.len();
                        all.resize(at + a.group(), Vec::new());
                        run_chunk_op(cpu, ScoresOp { a: &a, scratch: &mut scratch, out: &mut all[at..] });
                    }
                }
            }
        }
        all
    }
}

/// A task of [`Attention::run`]: tokens `token..token + n` of a span with some query heads of one KV head, over all
/// chunks, or over one chunk with its partial results at `part`.
struct AttentionTask {
    span: usize,
    head: usize,
    heads: Range<usize>,
    token: usize,
    n: usize,
    chunk: Option<usize>,
    part: usize,
}

/// Scratch memory of one thread for [`Attention::run`].
pub struct AttendScratch {
    dims: usize,
    /// (columns, key_dim)
    q: Vec<f32>,
    scores: Vec<[f32; CHUNK]>,
    /// (columns, value_dims): weighted values of the current chunk, and of all chunks so far.
    part: Vec<f32>,
    total: Vec<f32>,
    /// (parts, columns, part_len): partial results of [`attend_jointly`]; empty for layers without compressed keys.
    joint: Vec<f32>,
    /// Keys or values of some tokens, converted to f32 for a block of many columns.
    wide: Vec<f32>,
}

/// Tokens whose keys or values are converted at a time: those of the largest register tile.
const WIDE: usize = 64;

impl AttendScratch {
    /// Scratch for any of these layers.
    pub fn new(layers: &[KvLayer]) -> AttendScratch {
        let dims = layers.iter().map(|kv| kv.value_dims().max(kv.heads.key_dim)).max().unwrap_or(0);
        let rows = || vec![0.0; MAX_COLUMNS * dims];
        // compressed keys come with what they are made of
        let has_blocks = layers.iter().any(|kv| kv.heads.exact);
        AttendScratch {
            dims,
            q: rows(),
            scores: vec![[0.0; CHUNK]; MAX_COLUMNS],
            part: rows(),
            total: rows(),
            joint: vec![0.0; if has_blocks { JOINT_PARTS * MAX_COLUMNS * (2 + dims) } else { 0 }],
            wide: vec![0.0; WIDE * dims],
        }
    }
}

//! Sparse attention: an indexer selects the positions that a token attends to. It has keys of its own, one per
//! position, in a layer of the KV pages.
//!
//! ```text
//! s[t] = sum_h w[h] * max(q[h] . k[t], 0)     h ascending, from 0 (DeepSeek-V3.2's lightning indexer); or
//! s[t] = q[h] . k[t]                          for each KV head h by itself (MiniMax-M3)
//! b[j] = max s[t] over the positions t of block j up to the token's own; infinite for the last `local` blocks
//! ```
//!
//! Positions of the `top_k` blocks with the largest b are selected. Of blocks with the score of the last one, those are
//! selected that are left in a heap ([`keep_largest`]), as in llama.cpp. Products `q . k` are scores of attention
//! (`block.rs`), so a selection depends on nothing but tokens and positions.
#![allow(unsafe_code)]

use alloc::vec::Vec;
use core::ops::Range;

use super::block::{AttentionBlock, ChunkKernel, ChunkOp, run_chunk_op};
use super::{AttendScratch, Attention, CHUNK, MAX_COLUMNS, PAGE, Span};
use crate::kernels::act::Floats;
use crate::kernels::{Cpu, SharedOut, tasks};
use crate::pool::Pool;

/// Rows whose scores are held at a time.
const ROWS: usize = 8;

/// How many positions are selected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SelectionRule {
    /// Number of selected blocks, at least 1.
    pub top_k: usize,
    /// Positions of a block, at least 1.
    pub block: usize,
    /// The last blocks up to the token's own that are selected whatever their scores.
    pub local: usize,
    /// Only the last positions of blocks of this length can be selected, where compressed keys stand; 1 for all. If it is
    /// more, `block` is 1 and `local` 0.
    pub every: usize,
    /// Whether a selected compressed key stands for all positions of its block, instead of itself. The positions after the
    /// last whole block are then selected too.
    pub whole_blocks: bool,
    /// Positions of a block that have one score, that of its last one; 1 if each has its own. The positions after the last whole
    /// block are then selected before all others. If it is more, `block` and `every` are 1.
    pub shared: usize,
}

impl SelectionRule {
    /// All positions, each a block.
    pub const ALL: SelectionRule =
        SelectionRule { top_k: usize::MAX, block: 1, local: 0, every: 1, whole_blocks: false, shared: 1 };

    /// Number of blocks that a token at position `n - 1` selects from.
    fn candidates(self, n: usize) -> usize {
        if self.every > 1 { n / self.every } else { n.div_ceil(self.block) }
    }

    /// What block `j` below `n` stands for.
    fn selected(self, j: usize, n: usize) -> Range<usize> {
        if self.whole_blocks { j * self.every..(j + 1) * self.every } else { self.positions(j, n) }
    }

    /// The positions of block `j` below `n` that have scores.
    fn positions(self, j: usize, n: usize) -> Range<usize> {
        match self.every {
            1 => j * self.block..((j + 1) * self.block).min(n),
            every => (j + 1) * every - 1..(j + 1) * every,
        }
    }
}

/// Selected positions of the rows of a batch: a bit per position, a word per page.
#[derive(Clone, Copy)]
pub struct Selected<'a> {
    words: &'a [u16],
    lists: usize,
    n_pages: usize,
}

impl<'a> Selected<'a> {
    /// The pages of a row. If there is one list for all KV heads, `head` has no effect.
    pub(super) fn of(self, row: usize, head: usize) -> &'a [u16] {
        let list = if self.lists == 1 { 0 } else { head };
        &self.words[(row * self.lists + list) * self.n_pages..][..self.n_pages]
    }
}

/// Memory of a selection.
pub struct SelectionScratch {
    /// Selections of a row: 1, or one per KV head.
    pub lists: usize,
    /// Longest sequence in tokens.
    pub n_ctx: usize,
    /// (chunks, rows, lists, [`CHUNK`]): scores of some rows.
    pub scores: Vec<f32>,
    /// (rows, lists, 2, positions): bits of the scores of blocks, and the heap.
    pub blocks: Vec<u32>,
    /// (rows of the batch, lists, pages): the result.
    pub words: Vec<u16>,
}

impl SelectionScratch {
    /// Shapes of `scores`, `blocks` and `words` for batches of `rows`.
    pub fn shapes(rows: usize, lists: usize, n_ctx: usize) -> [[usize; 3]; 3] {
        let held = rows.min(ROWS);
        let positions = n_ctx.next_multiple_of(CHUNK);
        [[held, lists, positions], [held, lists, 2 * positions], [rows, lists, n_ctx.div_ceil(PAGE)]]
    }

    /// The selection.
    pub fn selected(&self) -> Selected<'_> {
        Selected { words: &self.words, lists: self.lists, n_pages: self.n_ctx.div_ceil(PAGE) }
    }
}

/// The indexer of a layer, for the rows of a batch.
pub struct Indexer<'a> {
    /// Its keys and queries: causal attention, of which only the products are used.
    pub attention: Attention<'a>,
    /// Factors of the heads, (rows, n_head), with all heads selecting together; `None` if each selects for a KV head of
    /// its own.
    pub weights: Option<Floats<'a>>,
    /// How many positions are selected.
    pub rule: SelectionRule,
}

impl Indexer<'_> {
    /// Selects the positions of all rows; `threads` must have an element per thread.
    ///
    /// # Panics
    /// If spans or rows are outside a buffer.
    pub fn run(&self, cpu: Cpu, pool: &dyn Pool, threads: &mut [AttendScratch], s: &mut SelectionScratch) {
        let (lists, n_pages) = (s.lists, s.n_ctx.div_ceil(PAGE));
        assert!(lists == if self.weights.is_some() { 1 } else { self.attention.n_head });
        assert!(self.rule.top_k > 0 && self.rule.block > 0 && self.rule.every > 0);
        let stride = 2 * s.n_ctx.next_multiple_of(CHUNK);
        for span in self.attention.spans {
            for first in (0..span.n).step_by(ROWS) {
                let rows = first..span.n.min(first + ROWS);
                let (start, n) = (span.pos + first, rows.len() * lists);
                if self.rule.candidates(span.pos + rows.end) > self.rule.top_k {
                    self.score((cpu, pool), span, rows, threads, &mut s.scores);
                }
                let scores = &s.scores;
                let words = &mut s.words[(span.row + first) * lists * n_pages..][..n * n_pages];
                let blocks = &mut s.blocks[..n * stride];
                tasks::chunks2(pool, (blocks, stride), (words, n_pages), &|i, blocks, words| {
                    let score = |t: usize| scores[(t / CHUNK * n + i) * CHUNK + t % CHUNK];
                    choose(self.rule, start + i / lists, score, blocks, words);
                });
            }
        }
    }

    /// Computes the scores of some rows of a span.
    fn score(
        &self,
        (cpu, pool): (Cpu, &dyn Pool),
        span: &Span<'_>,
        rows: Range<usize>,
        threads: &mut [AttendScratch],
        scores: &mut [f32],
    ) {
        let a = &self.attention;
        let lists = if self.weights.is_some() { 1 } else { a.n_head };
        let (n_chunks, len) = ((span.pos + rows.end).div_ceil(CHUNK), rows.len() * lists * CHUNK);
        assert!(a.kv.heads.is_supported() && a.kv.heads.n == 1 && span.end().div_ceil(PAGE) <= span.pages.len());
        assert!(threads.iter().all(|s| s.dims >= a.kv.heads.key_dim), "scratch made for a smaller head");
        let scores = SharedOut::new(&mut scores[..n_chunks * len]);
        tasks::with_state(pool, n_chunks, threads, &|chunk, scratch| {
            // SAFETY: each chunk has its own part of the scores.
            let out = unsafe { scores.slice(chunk * len, len) };
            out.fill(0.0);
            for query_heads in a.query_heads(0) {
                let step = MAX_COLUMNS / query_heads.len();
                for first in rows.clone().step_by(step) {
                    let tokens = step.min(rows.end - first);
                    let (pos, row, query_heads) = (span.pos + first, span.row + first, query_heads.clone());
                    let chunks = chunk..chunk + 1;
                    let block = AttentionBlock { of: a, head: 0, query_heads, span, row, tokens, pos, chunks };
                    let out = &mut out[(first - rows.start) * lists * CHUNK..][..tokens * lists * CHUNK];
                    let op = IndexOp { a: &block, weights: self.weights, scratch: &mut *scratch, out };
                    run_chunk_op(cpu, op);
                }
            }
        });
    }
}

/// Adds the scores of some heads of a block of tokens, in one chunk.
struct IndexOp<'a> {
    a: &'a AttentionBlock<'a>,
    weights: Option<Floats<'a>>,
    scratch: &'a mut AttendScratch,
    /// (tokens, lists, [`CHUNK`])
    out: &'a mut [f32],
}

impl<'a> ChunkOp<'a> for IndexOp<'a> {
    fn attend(&self) -> &'a AttentionBlock<'a> {
        self.a
    }

    #[inline(always)]
    fn run(self, k: &impl ChunkKernel) {
        let (a, chunk, group) = (self.a, self.a.chunks.start, self.a.group());
        let n = (a.pos + a.tokens).saturating_sub(chunk * CHUNK).min(CHUNK);
        if n == 0 {
            return;
        }
        let q = a.queries(k, &mut self.scratch.q);
        let scores = &mut self.scratch.scores[..a.tokens * group];
        k.scores(chunk, 0..n, q, scores, &mut self.scratch.wide);
        let lists = self.out.len() / (a.tokens * CHUNK);
        for (c, scores) in scores.iter().enumerate() {
            let (token, head) = (c / group, a.query_head(c));
            match self.weights {
                Some(Floats { x, stride }) => {
                    let weight = x[(a.row + token) * stride + head];
                    let out = &mut self.out[token * CHUNK..][..n];
                    for (out, s) in out.iter_mut().zip(scores) {
                        *out += weight * if *s > 0.0 { *s } else { 0.0 };
                    }
                }
                None => self.out[(token * lists + head) * CHUNK..][..n].copy_from_slice(&scores[..n]),
            }
        }
    }
}

/// Selects among the positions `0..=pos` by their scores.
fn choose(rule: SelectionRule, pos: usize, score: impl Fn(usize) -> f32, memory: &mut [u32], words: &mut [u16]) {
    let words = &mut words[..pos / PAGE + 1];
    let n = rule.candidates(pos + 1);
    let positions = |j: usize| rule.positions(j, pos + 1);
    if n <= rule.top_k {
        if rule.every == 1 || rule.whole_blocks {
            return words.fill(u16::MAX);
        }
        words.fill(0);
        return (0..n).flat_map(positions).for_each(|t| words[t / PAGE] |= 1 << (t % PAGE));
    }
    let (blocks, heap) = memory.split_at_mut(memory.len() / 2);
    let (blocks, heap) = (&mut blocks[..n], &mut heap[..rule.top_k]);
    // where the score of a position is
    let last = |t: usize| (t / rule.shared + 1) * rule.shared - 1;
    for (j, best) in blocks.iter_mut().enumerate() {
        let score = match j + rule.local >= n || last(j) > pos {
            true => f32::INFINITY,
            // NaN counts as the lowest score
            false => positions(j).map(|t| score(last(t))).fold(f32::NEG_INFINITY, |m, s| if s > m { s } else { m }),
        };
        *best = score.to_bits();
    }
    keep_largest(heap, n, |j| f32::from_bits(blocks[j as usize]));
    words.fill(0);
    let tail = if rule.whole_blocks { n * rule.every..pos + 1 } else { 0..0 };
    for t in heap.iter().flat_map(|j| rule.selected(*j as usize, pos + 1)).chain(tail) {
        words[t / PAGE] |= 1 << (t % PAGE);
    }
}

/// The numbers below `n` with the largest scores, in any order: a heap of the first ones, whose root has the least score,
/// is offered each further one. Which of equal ones are kept is part of the numerics: steps and order of the comparisons
/// are those of `std::partial_sort` in GCC's library (`__heap_select`), by which llama.cpp selects.
fn keep_largest(heap: &mut [u32], n: usize, score: impl Fn(u32) -> f32) {
    heap.iter_mut().zip(0..).for_each(|(number, j)| *number = j);
    for hole in (0..heap.len() / 2).rev() {
        let value = heap[hole];
        place(heap, hole, value, &score);
    }
    for j in heap.len() as u32..n as u32 {
        if score(j) > score(heap[0]) {
            place(heap, 0, j, &score);
        }
    }
}

/// Moves a hole in a heap down to a leaf, along the children with the lower scores, then up to the place of `value`
/// (`__adjust_heap`).
fn place(heap: &mut [u32], top: usize, value: u32, score: &impl Fn(u32) -> f32) {
    let (mut hole, len) = (top, heap.len());
    while 2 * hole + 1 < len {
        let right = 2 * hole + 2;
        let child = if right < len && score(heap[right]) <= score(heap[right - 1]) { right } else { right - 1 };
        (heap[hole], hole) = (heap[child], child);
    }
    while hole > top && score(heap[(hole - 1) / 2]) > score(value) {
        (heap[hole], hole) = (heap[(hole - 1) / 2], (hole - 1) / 2);
    }
    heap[hole] = value;
}

#[cfg(test)]
mod tests;

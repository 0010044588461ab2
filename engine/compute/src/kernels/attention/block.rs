//! Attention of a block of tokens of one sequence through one KV head: the loop over chunks, shared by all instruction
//! sets.
#![allow(unsafe_code)]

use alloc::vec::Vec;
use core::ops::Range;

use super::lanes::LaneKernel;
use super::scalar::ScalarKernel;
use super::softmax_state::{SoftmaxState, scale};
use super::{AttendScratch, Attention, CHUNK, DistanceBias, KvLayer, KvType, MAX_COLUMNS, PAGE, Span};
use crate::kernels::cpu::Op;
use crate::kernels::simd::Simd;
use crate::kernels::{Cpu, SharedOut};

/// A block of consecutive tokens of one sequence, attending with some query heads of one KV head over a range of chunks.
pub(super) struct AttentionBlock<'a> {
    pub(super) of: &'a Attention<'a>,
    pub(super) head: usize,
    pub(super) query_heads: Range<usize>,
    pub(super) span: &'a Span<'a>,
    /// First row of the block in the batch, and its number of rows.
    pub(super) row: usize,
    pub(super) tokens: usize,
    /// Position of the first token.
    pub(super) pos: usize,
    pub(super) chunks: Range<usize>,
}

/// Output of an [`AttentionBlock`].
#[derive(Clone, Copy)]
pub(super) enum BlockOutput<'a> {
    /// Finished rows, (tokens, n_head, value_dim), from element `at` on.
    Rows {
        /// The rows of the whole batch.
        out: SharedOut<'a, f32>,
        /// Index of the first element of the block.
        at: usize,
    },
    /// Partial result of one chunk: per query head of this KV head `[m, l, o[value_dims]]`, from element `at` on.
    Part {
        /// The partial results of all tasks.
        out: SharedOut<'a, f32>,
        /// Index of the first element of this task.
        at: usize,
    },
}

impl AttentionBlock<'_> {
    pub(super) fn kv(&self) -> &KvLayer {
        &self.of.kv
    }

    /// Number of query heads of the block.
    pub(super) fn group(&self) -> usize {
        self.query_heads.len()
    }

    /// The query head of a column.
    pub(super) fn query_head(&self, column: usize) -> usize {
        self.query_heads.start + column % self.group()
    }

    /// The tokens of chunk `chunk` that the token at `pos` attends to, relative to the chunk.
    fn attended(&self, chunk: usize, pos: usize) -> Range<usize> {
        let (start, seen) = (chunk * CHUNK, self.of.attended(self.span, pos));
        seen.start.saturating_sub(start).min(CHUNK)..seen.end.saturating_sub(start).min(CHUNK)
    }

    /// Gathers the queries of the block into `q`, (columns, key_dim); rounds them to 13 bits if keys are f16.
    #[inline(always)]
    pub(super) fn queries<'q>(&self, k: &impl ChunkKernel, q: &'q mut [f32]) -> &'q [f32] {
        let (group, d) = (self.group(), self.kv().heads.key_dim);
        let q = &mut q[..self.tokens * group * d];
        for (c, q) in q.chunks_exact_mut(d).enumerate() {
            let at = (self.row + c / group) * self.of.q_stride + self.query_head(c) * d;
            q.copy_from_slice(&self.of.q[at..at + d]);
        }
        if self.kv().kv_type == KvType::F16 {
            k.narrow(q);
        }
        q
    }

    /// ALiBi: `s[t] = s[t] + slope * -|t - pos|` for the scores of a column of the block; or a bias by `t - pos`.
    #[inline(always)]
    fn add_distances(&self, chunk: usize, column: usize, pos: usize, s: &mut [f32]) {
        let head = self.query_head(column);
        if let Some(DistanceBias { table, max }) = self.of.bias {
            let table = &table[head * (2 * max + 1)..][..2 * max + 1];
            for (t, s) in s.iter_mut().enumerate() {
                *s += table[(chunk * CHUNK + t + max).saturating_sub(pos).min(2 * max)];
            }
        }
        let Some(slopes) = self.of.alibi else { return };
        let slope = slopes[head];
        for (t, s) in s.iter_mut().enumerate() {
            *s += slope * -((chunk * CHUNK + t).abs_diff(pos) as f32);
        }
    }

    /// The pages, among those of `tokens` of the chunk, that have a selected position of any token of the block, as runs
    /// of whole pages.
    fn runs(&self, chunk: usize, tokens: Range<usize>) -> impl Iterator<Item = Range<usize>> + Clone {
        let (first, last) = (tokens.start / PAGE, tokens.end.div_ceil(PAGE));
        let is_read: [bool; CHUNK / PAGE] = core::array::from_fn(|page| {
            let is_selected = |row| self.selected(chunk, row).is_none_or(|words| words[page] != 0);
            (first..last).contains(&page) && (self.row..self.row + self.tokens).any(is_selected)
        });
        let mut page = first;
        core::iter::from_fn(move || {
            let start = (page..last).find(|page| is_read[*page])?;
            let end = (start..last).find(|page| !is_read[*page]).unwrap_or(last);
            page = end;
            Some(start * PAGE..tokens.end.min(end * PAGE))
        })
    }

    /// The selected positions of a row in a chunk, a word per page, padded by zeros.
    fn selected(&self, chunk: usize, row: usize) -> Option<[u16; CHUNK / PAGE]> {
        let words = self.of.selected?.of(row, self.head);
        let mut of_chunk = [0; CHUNK / PAGE];
        of_chunk.iter_mut().zip(&words[chunk * CHUNK / PAGE..]).for_each(|(to, from)| *to = *from);
        Some(of_chunk)
    }

    /// Sets the scores of positions that are not selected to -inf. Returns whether one of `seen` is selected.
    fn mask(&self, chunk: usize, row: usize, seen: Range<usize>, s: &mut [f32]) -> bool {
        let Some(words) = self.selected(chunk, row) else { return !seen.is_empty() };
        let mut any = false;
        for (t, s) in seen.clone().zip(&mut s[seen]) {
            let is_selected = words[t / PAGE] >> (t % PAGE) & 1 != 0;
            any |= is_selected;
            *s = if is_selected { *s } else { f32::NEG_INFINITY };
        }
        any
    }

    /// Whether `chunk` is in range and its token `token` exists.
    pub(super) fn has(&self, chunk: usize, token: usize) -> bool {
        self.chunks.contains(&chunk) && chunk * CHUNK + token < self.span.end()
    }

    fn page(&self, chunk: usize, token: usize) -> &[u8] {
        self.of.memory.page(self.span.pages[(chunk * CHUNK + token) / PAGE])
    }

    /// Keys of this head in the page of token `token` of the chunk.
    pub(super) fn keys(&self, chunk: usize, token: usize) -> &[u8] {
        &self.page(chunk, token)[self.kv().key_at(self.head)..][..self.kv().key_bytes()]
    }

    /// Values of this head in the page of token `token` of the chunk.
    pub(super) fn values(&self, chunk: usize, token: usize) -> &[u8] {
        &self.page(chunk, token)[self.kv().value_at(self.head)..][..self.kv().value_bytes()]
    }

    /// Runs the block. Blocks with disjoint outputs may run in parallel, each with its own scratch.
    ///
    /// # Panics
    /// If the block does not fit the layout, the pages or the scratch.
    pub(super) fn run(&self, cpu: Cpu, out: BlockOutput<'_>, scratch: &mut AttendScratch) {
        let (kv, of) = (self.kv(), self.of);
        let heads = kv.heads;
        assert!(heads.is_supported() && of.n_head.is_multiple_of(heads.n) && self.head < heads.n);
        let group = of.n_head / heads.n;
        assert!(self.query_heads.start >= self.head * group && self.query_heads.end <= (self.head + 1) * group);
        assert!(self.tokens > 0 && self.tokens * self.group() <= MAX_COLUMNS);
        assert!(self.span.end().div_ceil(PAGE) <= self.span.pages.len());
        assert!(scratch.dims >= kv.value_dims().max(heads.key_dim), "scratch made for a smaller head");
        run_chunk_op(cpu, AttendOp { a: self, out, scratch });
    }
}

/// Online softmax over the chunks of a block.
struct AttendOp<'a> {
    a: &'a AttentionBlock<'a>,
    out: BlockOutput<'a>,
    scratch: &'a mut AttendScratch,
}

impl<'a> ChunkOp<'a> for AttendOp<'a> {
    fn attend(&self) -> &'a AttentionBlock<'a> {
        self.a
    }
    /// The loop over chunks, shared by all instruction sets.
    #[inline(always)]
    fn run(self, k: &impl ChunkKernel) {
        let a = self.a;
        let (group, tokens, d, dims) = (a.group(), a.tokens, a.kv().heads.value_dim, a.kv().value_dims());
        let columns = tokens * group;
        let q = a.queries(k, &mut self.scratch.q);
        let scores = &mut self.scratch.scores[..columns];
        let part = &mut self.scratch.part[..columns * dims];
        let total = &mut self.scratch.total[..columns * dims];
        let wide = &mut self.scratch.wide[..];
        let mut running = [SoftmaxState { m: f32::NEG_INFINITY, l: 0.0 }; MAX_COLUMNS];
        for chunk in a.chunks.clone() {
            let (first, last) = (a.attended(chunk, a.pos), a.attended(chunk, a.pos + tokens - 1));
            if last.end == 0 || first.start == CHUNK {
                continue;
            }
            let runs = a.runs(chunk, first.start / PAGE * PAGE..last.end);
            let Some(n) = runs.clone().last().map(|run| run.end) else { continue };
            for run in runs.clone() {
                k.scores(chunk, run, q, scores, wide);
            }
            let mut here = [SoftmaxState { m: 0.0, l: 0.0 }; MAX_COLUMNS];
            for (c, (scores, here)) in scores.iter_mut().zip(&mut here).enumerate() {
                let seen = a.attended(chunk, a.pos + c / group);
                let seen = seen.start.min(n)..seen.end.min(n);
                let s = &mut scores[..n.next_multiple_of(PAGE)];
                if seen.is_empty() {
                    s.fill(0.0);
                    continue;
                }
                if let Some(cap) = a.of.soft_cap {
                    k.soft_cap(s, cap);
                }
                a.add_distances(chunk, c, a.pos + c / group, s);
                s[..seen.start].fill(f32::NEG_INFINITY);
                s[seen.end..].fill(f32::NEG_INFINITY);
                if !a.mask(chunk, a.row + c / group, seen, s) {
                    s.fill(0.0);
                    continue;
                }
                *here = k.softmax(s);
            }
            for (i, tokens) in runs.enumerate() {
                k.values(ChunkTokens { chunk, tokens, accumulate: i > 0 }, scores, part, wide);
            }
            let columns = total.chunks_exact_mut(dims).zip(part.chunks_exact(dims)).zip(running.iter_mut().zip(&here));
            for ((total, part), (running, here)) in columns {
                running.merge(
                    *here,
                    total,
                    part,
                    #[inline(always)]
                    |t, x, p, y| k.blend(t, x, p, y),
                );
            }
        }
        for (c, (o, running)) in total.chunks_exact_mut(dims).zip(&mut running).enumerate() {
            if running.l == 0.0 {
                // all scores were NaN: writes a row of NaN, not the old contents of the scratch
                o.fill(0.0);
            }
            let (token, head) = (c / group, a.query_head(c));
            match self.out {
                BlockOutput::Rows { out, at } => {
                    running.add_sink(a.of.sinks.map(|sinks| sinks[head]), o);
                    // SAFETY: a task owns the elements of its tokens and query heads.
                    let out = unsafe { out.slice(at + (token * a.of.n_head + head) * d, d) };
                    scale(&o[..d], running.l, out);
                }
                BlockOutput::Part { out, at } => {
                    // SAFETY: a task owns its partial results.
                    let out = unsafe { out.slice(at + c * (2 + dims), 2 + dims) };
                    (out[0], out[1]) = (running.m, running.l);
                    out[2..].copy_from_slice(o);
                }
            }
        }
    }
}

/// The attention scores of one token, for the query heads of one KV head.
pub(super) struct ScoresOp<'a> {
    pub(super) a: &'a AttentionBlock<'a>,
    pub(super) scratch: &'a mut AttendScratch,
    pub(super) out: &'a mut [Vec<f32>],
}

impl<'a> ChunkOp<'a> for ScoresOp<'a> {
    fn attend(&self) -> &'a AttentionBlock<'a> {
        self.a
    }
    #[inline(always)]
    fn run(self, k: &impl ChunkKernel) {
        let a = self.a;
        let q = a.queries(k, &mut self.scratch.q);
        let scores = &mut self.scratch.scores[..self.out.len()];
        for chunk in a.chunks.clone() {
            let seen = a.attended(chunk, a.pos);
            if seen.is_empty() {
                continue;
            }
            k.scores(chunk, 0..seen.end, q, scores, &mut self.scratch.wide);
            if let Some(cap) = a.of.soft_cap {
                for s in scores.iter_mut() {
                    k.soft_cap(&mut s[..seen.end.next_multiple_of(PAGE)], cap);
                }
            }
            for (c, s) in scores.iter_mut().enumerate() {
                a.add_distances(chunk, c, a.pos, &mut s[..seen.end]);
            }
            let words = a.selected(chunk, a.row);
            let is_attended = |t: &usize| words.is_none_or(|words| words[t / PAGE] >> (t % PAGE) & 1 != 0);
            for (out, s) in self.out.iter_mut().zip(&*scores) {
                out.extend(seen.clone().filter(is_attended).map(|t| s[t]));
            }
        }
    }
}

/// Tokens of a chunk, from a whole page on, whose weighted values are summed.
#[derive(Clone)]
pub(super) struct ChunkTokens {
    pub(super) chunk: usize,
    pub(super) tokens: Range<usize>,
    /// Whether the sum continues the one in the output.
    pub(super) accumulate: bool,
}

/// What an instruction set implements: scores, softmax and weighted values of one chunk.
pub(super) trait ChunkKernel {
    /// `q = narrow(q)`, see `narrow.rs`.
    fn narrow(&self, q: &mut [f32]);
    /// `scores[c][t]` for `tokens` of the chunk, from a whole page on, and the queries `q` (columns, key_dim). Scores up
    /// to the next whole page are arbitrary.
    fn scores(&self, chunk: usize, tokens: Range<usize>, q: &[f32], scores: &mut [[f32; CHUNK]], wide: &mut [f32]);
    /// `s = cap * tanh(s / cap)`; `s` is a multiple of 16 long.
    fn soft_cap(&self, s: &mut [f32], cap: f32);
    /// Replaces `s`, a multiple of 16 long, by `exp(s - max)`; returns the maximum and the sum.
    fn softmax(&self, s: &mut [f32]) -> SoftmaxState;
    /// `o[c][d] = sum_t p[c][t] * v[t][d]` over tokens of a chunk; `o` is (columns, value_dims).
    fn values(&self, tokens: ChunkTokens, p: &[[f32; CHUNK]], o: &mut [f32], wide: &mut [f32]);
    /// `total = total * a + part * b`.
    fn blend(&self, total: &mut [f32], a: f32, part: &[f32], b: f32);
}

/// An operation on the chunks of a block.
pub(super) trait ChunkOp<'a> {
    fn attend(&self) -> &'a AttentionBlock<'a>;
    /// Must be `#[inline(always)]`.
    fn run(self, k: &impl ChunkKernel);
}

/// Runs the operation. Each KV type is compiled as an operation of its own, except on WebAssembly, where one copy for
/// all types keeps the module small.
pub(super) fn run_chunk_op<'a>(cpu: Cpu, w: impl ChunkOp<'a>) {
    match w.attend().kv().kv_type {
        _ if cfg!(target_family = "wasm") => cpu.run(WithKvType::<_, ANY>(w)),
        KvType::F32 => cpu.run(WithKvType::<_, F32>(w)),
        KvType::F16 => cpu.run(WithKvType::<_, F16>(w)),
        KvType::K8 => cpu.run(WithKvType::<_, K8>(w)),
        KvType::Q8 => cpu.run(WithKvType::<_, Q8>(w)),
    }
}

pub(super) const F32: usize = KvType::F32 as usize;
pub(super) const F16: usize = KvType::F16 as usize;
pub(super) const K8: usize = KvType::K8 as usize;
pub(super) const Q8: usize = KvType::Q8 as usize;
/// Stands for any type, looked up at run time.
pub(super) const ANY: usize = KvType::ALL.len();

/// `KV`: index of the KV type, or `ANY`.
struct WithKvType<W, const KV: usize>(W);

impl<'a, W: ChunkOp<'a>, const KV: usize> Op for WithKvType<W, KV> {
    type Out = ();
    fn scalar(self) {
        let a = self.0.attend();
        self.0.run(&ScalarKernel(a));
    }
    #[inline(always)]
    fn simd<S: Simd>(self, s: S) {
        let a = self.0.attend();
        self.0.run(&LaneKernel::<S, KV> { a, s });
    }
}

//! Attention over pages of 16 tokens, in chunks of 256 tokens at absolute positions.
//!
//! ```text
//! s[t] = sum_d q[d] * k[t][d]        d = 0, 1, ...; q comes scaled; SIMD across 16 tokens
//! s[t] = cap * tanh(s[t] / cap)      where scores are capped
//! m = max s; p[t] = exp(s[t] - m); l = sum p     on the lane array, lane = t mod 16
//! o[d] = sum_t p[t] * v[t][d]        t ascending; SIMD across d
//! M' = max(M, m); a = exp(M - M'); b = exp(m - M'); L = L*a + l*b; O = O*a + o*b     chunks ascending
//! out = O * (1 / L)
//! ```
//!
//! Chunk boundaries depend on positions only, so neither the batch, nor the split over threads, nor prefill against
//! decode can change a bit. Int8 keys: `s = f32(sum q8*k8) * (d_k * d_q)`, a scale per token and head. With f16 keys q
//! is rounded to 13 bits first, with f16 values p is: the products are exact then, and may be fused with the addition.

mod kv;
mod lanes;
mod memory;
mod scalar;

use alloc::vec;
use alloc::vec::Vec;
use core::ops::Range;

use super::cpu::Op;
use super::exp::exp;
use super::norm::max;
use super::simd::Simd;
use super::{Cpu, SharedOut, tasks};
use crate::pool::Pool;
pub use kv::{KvLayout, KvRows, KvType, MAX_HEAD_DIM, PAGE, Slot, write_kv};
use lanes::{Lanes, blend_lanes};
pub use memory::KvMemory;
use scalar::Scalar;

/// Tokens of a chunk.
pub const CHUNK: usize = 256;
/// Query columns (rows of a block x query heads of a KV head) of one unit, at most.
const MAX_COLUMNS: usize = 32;
/// With f16 values, scores that far below the maximum have weight 0: exp(-77) is above 2^-112 (see `narrow.rs`).
const WEIGHT_LOW: f32 = -77.0;
/// Query heads that may share a KV head, at most.
pub const MAX_GROUP: usize = MAX_COLUMNS;

/// Consecutive tokens of one sequence, as rows of a batch.
#[derive(Debug, Clone)]
pub struct Span<'a> {
    /// First row of the batch.
    pub row: usize,
    /// Number of rows.
    pub n: usize,
    /// Position of the first token in its sequence.
    pub pos: usize,
    /// The sequence's pages, in order.
    pub pages: &'a [u32],
}

impl Span<'_> {
    /// The position after the last token.
    fn end(&self) -> usize {
        self.pos + self.n
    }
}

/// How many tokens before and after its own a token sees, at most; none after the last of its span.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sight {
    /// Earlier tokens.
    pub before: usize,
    /// Later tokens, which must be in the same batch.
    pub after: usize,
}

/// Attention of a whole batch in one layer.
#[derive(Clone, Copy)]
pub struct Attention<'a> {
    /// Where keys and values lie.
    pub kv: &'a KvLayout,
    /// The layer.
    pub layer: usize,
    /// All pages.
    pub memory: &'a KvMemory,
    /// Query heads, a multiple of the KV heads.
    pub n_head: usize,
    /// What a token sees besides itself.
    pub sight: Sight,
    /// Scores are softly kept below this in size, if at all.
    pub soft_cap: Option<f32>,
    /// Queries (rows, n_head * head_dim), scaled and rotated, `q_stride` floats from a row to the next.
    pub q: &'a [f32],
    /// Floats from a row of `q` to the next.
    pub q_stride: usize,
    /// The rows, in order.
    pub spans: &'a [Span<'a>],
}

/// Up to this many rows of a span are cut by chunks where there are several, so that few rows with long pasts keep all
/// threads busy.
const FEW_ROWS: usize = 4;

impl Attention<'_> {
    /// Scratch floats for the parts of chunks, for a batch of `max_seqs` sequences of up to `n_ctx` tokens.
    pub fn parts_len(kv: &KvLayout, n_head: usize, max_seqs: usize, n_ctx: usize) -> usize {
        [FEW_ROWS, n_head, n_ctx.div_ceil(CHUNK), kv.part_len()].iter().fold(max_seqs, |n, d| n.saturating_mul(*d))
    }

    /// `out` is (rows, n_head * head_dim). `scratch` holds one per thread, `parts` is [`Attention::parts_len`] long.
    ///
    /// # Panics
    /// If the spans overlap or are outside a buffer.
    pub fn run(&self, cpu: Cpu, pool: &dyn Pool, out: &mut [f32], scratch: &mut [AttendScratch], parts: &mut [f32]) {
        let (kv, width) = (self.kv, self.n_head * self.kv.head_dim);
        let group = self.n_head / kv.n_head_kv;
        let block = (MAX_COLUMNS / group).max(1);
        let stride = group * kv.part_len();
        let (mut units, mut end, mut part) = (Vec::new(), 0, 0);
        for (i, span) in self.spans.iter().enumerate() {
            assert!(span.row >= end && (span.row + span.n) * width <= out.len() && group <= MAX_COLUMNS);
            end = span.row + span.n;
            for head in 0..kv.n_head_kv {
                if span.n <= FEW_ROWS && span.end() > CHUNK {
                    for token in 0..span.n {
                        for chunk in self.chunks(span, token, 1) {
                            units.push(UnitOf { span: i, head, token, n: 1, chunk: Some(chunk), part });
                            part += stride;
                        }
                    }
                } else {
                    let tokens = (0..span.n).step_by(block);
                    units.extend(tokens.map(|token| UnitOf {
                        span: i,
                        head,
                        token,
                        n: block.min(span.n - token),
                        chunk: None,
                        part: 0,
                    }));
                }
            }
        }
        assert!(part <= parts.len(), "scratch for fewer sequences or shorter ones");
        // long blocks of a causal prefill come last: start with them
        units.reverse();
        let (rows, shared) = (SharedOut::new(out), SharedOut::new(parts));
        tasks::with_state(pool, units.len(), scratch, &|i, scratch| {
            let u = &units[i];
            let span = &self.spans[u.span];
            let row = span.row + u.token;
            let pos = span.pos + u.token;
            let (chunks, out) = match u.chunk {
                Some(chunk) => (chunk..chunk + 1, AttendOut::Part { out: shared, at: u.part }),
                None => (self.chunks(span, u.token, u.n), AttendOut::Rows { out: rows, at: row * width }),
            };
            Attend { of: self, head: u.head, span, row, tokens: u.n, pos, chunks }.run(cpu, out, scratch);
        });
        units.reverse();
        let mut i = 0;
        while i < units.len() {
            let u = &units[i];
            if u.chunk.is_none() {
                i += 1;
                continue;
            }
            let n = units[i..].iter().take_while(|v| (v.span, v.head, v.token) == (u.span, u.head, u.token)).count();
            for g in 0..group {
                let at = (self.spans[u.span].row + u.token) * width + (u.head * group + g) * kv.head_dim;
                combine(cpu, kv, &parts[u.part + g * kv.part_len()..], stride, n, &mut out[at..at + kv.head_dim]);
            }
            i += n;
        }
    }
}

impl Attention<'_> {
    /// The positions that the token at `pos` of a span sees.
    fn seen(&self, span: &Span<'_>, pos: usize) -> Range<usize> {
        pos.saturating_sub(self.sight.before)..pos.saturating_add(self.sight.after).min(span.end() - 1) + 1
    }

    /// The chunks that hold what `n` tokens from token `token` of a span on see.
    fn chunks(&self, span: &Span<'_>, token: usize, n: usize) -> Range<usize> {
        let first = span.pos + token;
        self.seen(span, first).start / CHUNK..self.seen(span, first + n - 1).end.div_ceil(CHUNK)
    }

    /// The scaled and capped scores of the tokens that each row sees, oldest first: one list per row and query head. For traces:
    /// the numbers that [`Attention::run`] turns into weights on this instruction set.
    pub fn scores(&self, cpu: Cpu) -> Vec<Vec<f32>> {
        let mut all = Vec::new();
        let mut scratch = AttendScratch::new(self.kv);
        for span in self.spans {
            for token in 0..span.n {
                for head in 0..self.kv.n_head_kv {
                    let pos = span.pos + token;
                    let chunks = self.chunks(span, token, 1);
                    let a = Attend { of: self, head, span, row: span.row + token, tokens: 1, pos, chunks };
                    let at = all.len();
                    all.resize(at + a.group(), Vec::new());
                    walk(cpu, Scores { a: &a, scratch: &mut scratch, out: &mut all[at..] });
                }
            }
        }
        all
    }
}

/// A task of [`Attention::run`]: tokens `token..token + n` of a span through one KV head; over one chunk, whose parts
/// then start at `part`, or over all of them.
struct UnitOf {
    span: usize,
    head: usize,
    token: usize,
    n: usize,
    chunk: Option<usize>,
    part: usize,
}

/// A block of consecutive tokens of one sequence attending through one KV head, over a range of chunks.
struct Attend<'a> {
    of: &'a Attention<'a>,
    head: usize,
    span: &'a Span<'a>,
    /// First row of the batch, and number of rows.
    row: usize,
    tokens: usize,
    /// Position of the first token.
    pos: usize,
    chunks: Range<usize>,
}

/// Where the result of an [`Attend`] goes.
#[derive(Clone, Copy)]
enum AttendOut<'a> {
    /// The finished rows: (tokens, n_head, head_dim) from element `at` on.
    Rows {
        /// The rows of all blocks.
        out: SharedOut<'a, f32>,
        /// Where this block's first token starts.
        at: usize,
    },
    /// One chunk's part: per query head of this KV head `[m, l, o[value_dims]]`, from element `at` on.
    Part {
        /// The parts of all units.
        out: SharedOut<'a, f32>,
        /// Where this unit's parts start.
        at: usize,
    },
}

impl Attend<'_> {
    fn kv(&self) -> &KvLayout {
        self.of.kv
    }

    fn group(&self) -> usize {
        self.of.n_head / self.kv().n_head_kv
    }

    /// The tokens of chunk `chunk` that the token at `pos` sees, relative to the chunk.
    fn seen(&self, chunk: usize, pos: usize) -> Range<usize> {
        let (start, seen) = (chunk * CHUNK, self.of.seen(self.span, pos));
        seen.start.saturating_sub(start).min(CHUNK)..seen.end.saturating_sub(start).min(CHUNK)
    }

    /// The queries of the block (columns, head_dim), gathered into `q`, narrowed where keys are f16.
    #[inline(always)]
    fn queries<'q>(&self, k: &impl Chunk, q: &'q mut [f32]) -> &'q [f32] {
        let (group, d) = (self.group(), self.kv().head_dim);
        let q = &mut q[..self.tokens * group * d];
        for (c, q) in q.chunks_exact_mut(d).enumerate() {
            let at = (self.row + c / group) * self.of.q_stride + (self.head * group + c % group) * d;
            q.copy_from_slice(&self.of.q[at..at + d]);
        }
        if self.kv().kv_type == KvType::F16 {
            k.narrow(q);
        }
        q
    }

    /// Whether the chunk is one of these, and its token in the sequence.
    fn has(&self, chunk: usize, token: usize) -> bool {
        self.chunks.contains(&chunk) && chunk * CHUNK + token < self.span.end()
    }

    fn page(&self, chunk: usize, token: usize) -> &[u8] {
        self.of.memory.page(self.span.pages[(chunk * CHUNK + token) / PAGE])
    }

    /// This head's keys in the page of the chunk's token `token`.
    fn keys(&self, chunk: usize, token: usize) -> &[u8] {
        &self.page(chunk, token)[self.kv().key_at(self.of.layer, self.head)..][..self.kv().key_bytes()]
    }

    /// This head's values in the page of the chunk's token `token`.
    fn values(&self, chunk: usize, token: usize) -> &[u8] {
        &self.page(chunk, token)[self.kv().value_at(self.of.layer, self.head)..][..self.kv().value_bytes()]
    }

    /// Runs the block. Units that write different parts of the output may run in parallel, each with its own scratch.
    fn run(&self, cpu: Cpu, out: AttendOut<'_>, scratch: &mut AttendScratch) {
        let (kv, of) = (self.kv(), self.of);
        assert!(kv.head_dim <= MAX_HEAD_DIM && of.n_head.is_multiple_of(kv.n_head_kv) && self.head < kv.n_head_kv);
        assert!(self.tokens > 0 && self.tokens * self.group() <= MAX_COLUMNS && of.layer < kv.n_layer);
        assert!(self.span.end().div_ceil(PAGE) <= self.span.pages.len());
        assert!(scratch.dims >= kv.value_dims(), "scratch for a smaller head");
        walk(cpu, Unit { a: self, out, scratch });
    }
}

/// Working memory of one thread for [`Attention::run`].
pub struct AttendScratch {
    dims: usize,
    /// (columns, head_dim)
    q: Vec<f32>,
    scores: Vec<[f32; CHUNK]>,
    /// (columns, value_dims): of the chunk at hand, and of all chunks so far.
    part: Vec<f32>,
    total: Vec<f32>,
    /// Keys or values of some tokens in f32, for a block of many columns.
    wide: Vec<f32>,
}

/// Tokens whose keys or values are widened at a time: those of the largest register tile.
const WIDE: usize = 64;

impl AttendScratch {
    /// For heads of that layout.
    pub fn new(kv: &KvLayout) -> AttendScratch {
        let dims = kv.value_dims();
        let rows = || vec![0.0; MAX_COLUMNS * dims];
        AttendScratch {
            dims,
            q: rows(),
            scores: vec![[0.0; CHUNK]; MAX_COLUMNS],
            part: rows(),
            total: rows(),
            wide: vec![0.0; WIDE * dims],
        }
    }
}

struct Unit<'a> {
    a: &'a Attend<'a>,
    out: AttendOut<'a>,
    scratch: &'a mut AttendScratch,
}

/// Running maxima and sums of a unit's columns; a sum of 0 means that no token was seen yet.
#[derive(Clone, Copy)]
struct Running {
    m: f32,
    l: f32,
}

/// What an instruction set contributes: scores, exponentials and weighted values of one chunk.
trait Chunk {
    /// `q = narrow(q)`, of `narrow.rs`.
    fn narrow(&self, q: &mut [f32]);
    /// `scores[c][t]` for the chunk's first `n` tokens (rounded up to pages; what lies beyond is arbitrary) and the
    /// queries `q` (columns, head_dim).
    fn scores(&self, chunk: usize, n: usize, q: &[f32], scores: &mut [[f32; CHUNK]], wide: &mut [f32]);
    /// `s = cap * tanh(s / cap)` (a multiple of 16 long).
    fn soft_cap(&self, s: &mut [f32], cap: f32);
    /// Turns `s` (a multiple of 16 long) into `exp(s - max)`; returns the maximum and the sum.
    fn softmax(&self, s: &mut [f32]) -> Running;
    /// `o[c][d] = sum_t p[c][t] * v[t][d]` for the chunk's `tokens`; `o` is (columns, value_dims).
    fn values(&self, chunk: usize, tokens: Range<usize>, p: &[[f32; CHUNK]], o: &mut [f32], wide: &mut [f32]);
    /// `total = total * a + part * b`.
    fn blend(&self, total: &mut [f32], a: f32, part: &[f32], b: f32);
}

impl<'a> Walk<'a> for Unit<'a> {
    fn attend(&self) -> &'a Attend<'a> {
        self.a
    }
    /// The path of a block through its chunks, the same for every instruction set.
    #[inline(always)]
    fn walk(self, k: &impl Chunk) {
        let a = self.a;
        let (group, tokens, d, dims) = (a.group(), a.tokens, a.kv().head_dim, a.kv().value_dims());
        let columns = tokens * group;
        let q = a.queries(k, &mut self.scratch.q);
        let scores = &mut self.scratch.scores[..columns];
        let part = &mut self.scratch.part[..columns * dims];
        let total = &mut self.scratch.total[..columns * dims];
        let wide = &mut self.scratch.wide[..];
        let mut running = [Running { m: f32::NEG_INFINITY, l: 0.0 }; MAX_COLUMNS];
        for chunk in a.chunks.clone() {
            let (first, last) = (a.seen(chunk, a.pos), a.seen(chunk, a.pos + tokens - 1));
            if last.end == 0 || first.start == CHUNK {
                continue;
            }
            let (from, n) = (first.start / PAGE * PAGE, last.end);
            k.scores(chunk, n, q, scores, wide);
            let mut here = [Running { m: 0.0, l: 0.0 }; MAX_COLUMNS];
            for (c, (scores, here)) in scores.iter_mut().zip(&mut here).enumerate() {
                let seen = a.seen(chunk, a.pos + c / group);
                let s = &mut scores[..n.next_multiple_of(PAGE)];
                if seen.is_empty() {
                    s.fill(0.0);
                    continue;
                }
                if let Some(cap) = a.of.soft_cap {
                    k.soft_cap(s, cap);
                }
                s[..seen.start].fill(f32::NEG_INFINITY);
                s[seen.end..].fill(f32::NEG_INFINITY);
                *here = k.softmax(s);
            }
            k.values(chunk, from..n, scores, part, wide);
            let columns = total.chunks_exact_mut(dims).zip(part.chunks_exact(dims)).zip(running.iter_mut().zip(&here));
            for ((total, part), (running, here)) in columns {
                running.take(
                    *here,
                    total,
                    part,
                    #[inline(always)]
                    |t, x, p, y| k.blend(t, x, p, y),
                );
            }
        }
        for (c, (o, running)) in total.chunks_exact_mut(dims).zip(&running).enumerate() {
            if running.l == 0.0 {
                // scores that are not numbers: the row ends as NaN, never as what the scratch held before
                o.fill(0.0);
            }
            let (token, head) = (c / group, a.head * group + c % group);
            match self.out {
                AttendOut::Rows { out, at } => {
                    // SAFETY: a unit owns its tokens' elements of its query heads.
                    let out = unsafe { out.slice(at + (token * a.of.n_head + head) * d, d) };
                    scale(&o[..d], running.l, out);
                }
                AttendOut::Part { out, at } => {
                    // SAFETY: a unit owns its part.
                    let out = unsafe { out.slice(at + c * (2 + dims), 2 + dims) };
                    (out[0], out[1]) = (running.m, running.l);
                    out[2..].copy_from_slice(o);
                }
            }
        }
    }
}

impl Running {
    /// Takes in the next chunk's part.
    #[inline(always)]
    fn take(&mut self, next: Running, total: &mut [f32], part: &[f32], blend: impl Fn(&mut [f32], f32, &[f32], f32)) {
        if next.l == 0.0 {
            return;
        }
        if self.l == 0.0 {
            *self = next;
            total.copy_from_slice(part);
            return;
        }
        let top = max(self.m, next.m);
        let (x, y) = (exp(self.m - top), exp(next.m - top));
        *self = Running { m: top, l: self.l * x + next.l * y };
        blend(total, x, part, y);
    }
}

#[inline(always)]
fn scale(o: &[f32], l: f32, out: &mut [f32]) {
    let inverse = 1.0 / l;
    for (out, o) in out.iter_mut().zip(o) {
        *out = o * inverse;
    }
}

/// Combines the parts of one query head of one token, chunks ascending: `parts` is (n_chunks, part_len), rows
/// `stride` floats apart.
fn combine(cpu: Cpu, kv: &KvLayout, parts: &[f32], stride: usize, n_chunks: usize, out: &mut [f32]) {
    assert!(n_chunks > 0 && parts.len() >= (n_chunks - 1) * stride + kv.part_len() && out.len() == kv.head_dim);
    cpu.run(Combine { dims: kv.value_dims(), parts, stride, n_chunks, out });
}

struct Combine<'a> {
    dims: usize,
    parts: &'a [f32],
    stride: usize,
    n_chunks: usize,
    out: &'a mut [f32],
}

impl Combine<'_> {
    #[inline(always)]
    fn walk(self, blend: impl Fn(&mut [f32], f32, &[f32], f32) + Copy) {
        let mut o = [0.0; MAX_HEAD_DIM];
        let o = &mut o[..self.dims];
        let mut running = Running { m: f32::NEG_INFINITY, l: 0.0 };
        for part in self.parts.chunks(self.stride).take(self.n_chunks) {
            let (ml, part) = part[..2 + self.dims].split_at(2);
            running.take(Running { m: ml[0], l: ml[1] }, o, part, blend);
        }
        scale(&o[..self.out.len()], running.l, self.out);
    }
}

impl Op for Combine<'_> {
    type Out = ();
    fn scalar(self) {
        self.walk(Scalar::blend_of);
    }
    #[inline(always)]
    fn simd<S: Simd>(self, s: S) {
        self.walk(
            #[inline(always)]
            |o, x, part, y| blend_lanes(s, o, x, part, y),
        );
    }
}

/// The scores of one token's query heads of one KV head.
struct Scores<'a> {
    a: &'a Attend<'a>,
    scratch: &'a mut AttendScratch,
    out: &'a mut [Vec<f32>],
}

impl<'a> Walk<'a> for Scores<'a> {
    fn attend(&self) -> &'a Attend<'a> {
        self.a
    }
    #[inline(always)]
    fn walk(self, k: &impl Chunk) {
        let a = self.a;
        let q = a.queries(k, &mut self.scratch.q);
        let scores = &mut self.scratch.scores[..self.out.len()];
        for chunk in a.chunks.clone() {
            let seen = a.seen(chunk, a.pos);
            if seen.is_empty() {
                continue;
            }
            k.scores(chunk, seen.end, q, scores, &mut self.scratch.wide);
            if let Some(cap) = a.of.soft_cap {
                for s in scores.iter_mut() {
                    k.soft_cap(&mut s[..seen.end.next_multiple_of(PAGE)], cap);
                }
            }
            self.out.iter_mut().zip(&*scores).for_each(|(out, s)| out.extend_from_slice(&s[seen.clone()]));
        }
    }
}

/// Work on the chunks of a block.
trait Walk<'a> {
    fn attend(&self) -> &'a Attend<'a>;
    /// Must be `#[inline(always)]`.
    fn walk(self, k: &impl Chunk);
}

/// Runs it. Each type of keys and values is an operation of its own, as it is a good deal of code; but one copy of what
/// they have in common is enough for modules for browsers.
fn walk<'a>(cpu: Cpu, w: impl Walk<'a>) {
    match w.attend().kv().kv_type {
        _ if cfg!(target_family = "wasm") => cpu.run(OfType::<_, ANY>(w)),
        KvType::F32 => cpu.run(OfType::<_, F32>(w)),
        KvType::F16 => cpu.run(OfType::<_, F16>(w)),
        KvType::K8 => cpu.run(OfType::<_, K8>(w)),
    }
}

const F32: usize = KvType::F32 as usize;
const F16: usize = KvType::F16 as usize;
const K8: usize = KvType::K8 as usize;
/// The type is looked up when it runs.
const ANY: usize = KvType::ALL.len();

/// `KV`: which of the types.
struct OfType<W, const KV: usize>(W);

impl<'a, W: Walk<'a>, const KV: usize> Op for OfType<W, KV> {
    type Out = ();
    fn scalar(self) {
        let a = self.0.attend();
        self.0.walk(&Scalar(a));
    }
    #[inline(always)]
    fn simd<S: Simd>(self, s: S) {
        let a = self.0.attend();
        self.0.walk(&Lanes::<S, KV> { a, s });
    }
}

//! Attention over pages of 16 tokens, in chunks of 256 tokens at absolute positions.
//!
//! ```text
//! s[t] = sum_d q[d] * k[t][d]        d = 0, 1, ...; q comes scaled; SIMD across 16 tokens
//! m = max s; p[t] = exp(s[t] - m); l = sum p     on the lane array, lane = t mod 16
//! o[d] = sum_t p[t] * v[t][d]        t ascending; SIMD across d
//! M' = max(M, m); a = exp(M - M'); b = exp(m - M'); L = L*a + l*b; O = O*a + o*b     chunks ascending
//! out = O * (1 / L)
//! ```
//!
//! Chunk boundaries depend on positions only, so neither the batch, nor the split over threads, nor prefill against
//! decode can change a bit. Int8 keys: `s = f32(sum q8*k8) * (d_k * d_q)`, a scale per token and head.

use alloc::vec;
use alloc::vec::Vec;
use core::ops::Range;

use super::act::{quantise_block, quantise_lanes, write_groups};
use super::cpu::Op;
use super::exp::{exp, exp_lanes};
use super::f32_tile::{AsF16, AsF32, Elem, F32Tile, f32_shapes};
use super::norm::{LANES, max, tree};
use super::panel::f16_to_f32;
use super::simd::{Rec, Simd};
use super::{Cpu, SharedOut, tasks};
use crate::pool::{Inline, Pool};

/// Tokens of a page: the width of the score kernel.
pub const PAGE: usize = 16;
/// Tokens of a chunk.
pub const CHUNK: usize = 256;
/// Query columns (rows of a block x query heads of a KV head) of one unit, at most.
const MAX_COLUMNS: usize = 32;
/// Query heads that may share a KV head, at most.
pub const MAX_GROUP: usize = MAX_COLUMNS;
/// Largest head dimension.
pub const MAX_HEAD_DIM: usize = 256;

/// How keys and values are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[cfg_attr(feature = "serde", serde(rename_all = "lowercase"))]
pub enum KvType {
    /// Both f32.
    F32,
    /// Both f16, values beyond its range clamped.
    F16,
    /// Keys int8 with a scale per token and head, values f16.
    K8,
}

impl KvType {
    /// All types.
    pub const ALL: [KvType; 3] = [KvType::F32, KvType::F16, KvType::K8];

    /// The name `--kv-type` takes.
    pub const fn name(self) -> &'static str {
        match self {
            KvType::F32 => "f32",
            KvType::F16 => "f16",
            KvType::K8 => "k8",
        }
    }
}

/// Shape and place of keys and values in a page. A page holds, per layer, the keys of all heads, then the values:
/// keys of a head `[head_dim][16 tokens]` (int8: `[head_dim/4][16][4]` offset binary, then 16 f32 scales), values of a
/// head `[head_dim/16][16 tokens][16]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvLayout {
    /// Layers.
    pub n_layer: usize,
    /// Heads of keys and values.
    pub n_head_kv: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Storage type.
    pub kv_type: KvType,
}

impl KvLayout {
    fn key_bytes(&self) -> usize {
        match self.kv_type {
            KvType::F32 => self.head_dim * PAGE * 4,
            KvType::F16 => self.head_dim * PAGE * 2,
            KvType::K8 => self.head_dim.next_multiple_of(4) * PAGE + PAGE * 4,
        }
    }

    fn value_dims(&self) -> usize {
        self.head_dim.next_multiple_of(LANES)
    }

    fn value_bytes(&self) -> usize {
        self.value_dims() * PAGE * if self.kv_type == KvType::F32 { 4 } else { 2 }
    }

    /// Bytes of a page, a multiple of 64.
    pub fn page_bytes(&self) -> usize {
        (self.n_layer * self.n_head_kv * (self.key_bytes() + self.value_bytes())).next_multiple_of(64)
    }

    /// Whether every number of a page is finite, as [`write_kv`] leaves them; `page` is [`KvLayout::page_bytes`] long.
    pub fn is_finite(&self, page: &[u8]) -> bool {
        let f16s = |b: &[u8]| b.chunks_exact(2).all(|b| b[1] & 0x7c != 0x7c);
        let f32s = |b: &[u8]| b.chunks_exact(4).all(|b| b[3] & 0x7f != 0x7f || b[2] & 0x80 == 0);
        let heads = (0..self.n_layer).flat_map(|l| (0..self.n_head_kv).map(move |h| (l, h)));
        heads.into_iter().all(|(l, h)| {
            let keys = &page[self.key_at(l, h)..][..self.key_bytes()];
            let values = &page[self.value_at(l, h)..][..self.value_bytes()];
            match self.kv_type {
                KvType::F32 => f32s(keys) && f32s(values),
                KvType::F16 => f16s(keys) && f16s(values),
                KvType::K8 => f32s(&keys[keys.len() - PAGE * 4..]) && f16s(values),
            }
        })
    }

    fn key_at(&self, layer: usize, head: usize) -> usize {
        layer * self.n_head_kv * (self.key_bytes() + self.value_bytes()) + head * self.key_bytes()
    }

    fn value_at(&self, layer: usize, head: usize) -> usize {
        let keys = self.n_head_kv * self.key_bytes();
        layer * (keys + self.n_head_kv * self.value_bytes()) + keys + head * self.value_bytes()
    }
}

/// A token's place in the arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot {
    /// The page.
    pub page: u32,
    /// The token in the page, below [`PAGE`].
    pub token: u32,
}

/// Rows of keys and values to be written: row r's keys start at `r * stride + k_at`, its values at `r * stride + v_at`,
/// both (n_head_kv, head_dim).
#[derive(Clone, Copy)]
pub struct KvRows<'a> {
    /// The rows.
    pub x: &'a [f32],
    /// Floats from a row to the next.
    pub stride: usize,
    /// Where a row's keys start.
    pub k_at: usize,
    /// Where a row's values start.
    pub v_at: usize,
    /// Where each row goes.
    pub slots: &'a [Slot],
}

/// Writes keys and values of some tokens of one layer into their slots, heads in parallel. A value that is not finite
/// is stored as the largest of its sign, so that no page ever holds one.
///
/// # Panics
/// If a row or slot is outside its buffer.
pub fn write_kv(cpu: Cpu, pool: &dyn Pool, kv: &KvLayout, layer: usize, rows: KvRows<'_>, arena: &mut [u8]) {
    let (n, d, bytes) = (kv.n_head_kv * kv.head_dim, kv.head_dim, kv.page_bytes());
    assert!(d <= MAX_HEAD_DIM && layer < kv.n_layer);
    assert!(rows.x.len() >= (rows.slots.len() * rows.stride) && rows.k_at.max(rows.v_at) + n <= rows.stride);
    let arena = SharedOut::new(arena);
    let write_head = |head: usize, _| {
        for (row, slot) in rows.x.chunks_exact(rows.stride).zip(rows.slots) {
            let page = slot.page as usize * bytes;
            // SAFETY: the keys and values of a head are its own bytes of a page, and one task writes each head.
            let (keys, values) = unsafe {
                (
                    arena.slice(page + kv.key_at(layer, head), kv.key_bytes()),
                    arena.slice(page + kv.value_at(layer, head), kv.value_bytes()),
                )
            };
            let k = &row[rows.k_at + head * d..][..d];
            let v = &row[rows.v_at + head * d..][..d];
            cpu.run(WriteKv { kv, k, v, keys, values, slot: slot.token as usize });
        }
    };
    // a few rows are not worth waking the others for
    let pool = if rows.slots.len() < 8 { &Inline } else { pool };
    tasks::run(pool, kv.n_head_kv, &write_head);
}

/// Writes one token's key and value of one head.
struct WriteKv<'a> {
    kv: &'a KvLayout,
    k: &'a [f32],
    v: &'a [f32],
    keys: &'a mut [u8],
    values: &'a mut [u8],
    slot: usize,
}

const F16_MAX: f32 = 65504.0;

/// `x` within `-limit..=limit`; NaN becomes `-limit`.
#[inline(always)]
fn clamp(x: f32, limit: f32) -> f32 {
    let x = if x > -limit { x } else { -limit };
    if x > limit { limit } else { x }
}

impl Op for WriteKv<'_> {
    type Out = ();

    fn scalar(self) {
        self.write(
            |x, out| {
                for (x, out) in x.iter().zip(out) {
                    *out = half::f16::from_f32_const(clamp(*x, F16_MAX)).to_bits();
                }
            },
            quantise_block,
        );
    }

    #[inline(always)]
    fn simd<S: Simd>(self, s: S) {
        self.write(
            #[inline(always)]
            |x, out| {
                let whole = x.len() / S::LANES * S::LANES;
                // SAFETY: `out` is as long as `x`; whole vectors below the length.
                unsafe {
                    let limit = s.splat(F16_MAX);
                    let low = s.splat(-F16_MAX);
                    for i in (0..whole).step_by(S::LANES) {
                        let v = s.load(x.as_ptr().add(i));
                        let v = s.select_gt(v, low, v, low);
                        let v = s.select_gt(v, limit, limit, v);
                        s.store_f16(out.as_mut_ptr().add(i), v);
                    }
                }
                for (x, out) in x[whole..].iter().zip(&mut out[whole..]) {
                    *out = half::f16::from_f32_const(clamp(*x, F16_MAX)).to_bits();
                }
            },
            #[inline(always)]
            |x, q| if x.len().is_multiple_of(S::LANES) { quantise_lanes(s, x, q) } else { quantise_block(x, q) },
        );
    }
}

impl WriteKv<'_> {
    #[inline(always)]
    fn write(self, to_f16: impl Fn(&[f32], &mut [u16]), quantise: impl Fn(&[f32], &mut [i8]) -> f32) {
        let (kv, d, slot) = (self.kv, self.kv.head_dim, self.slot);
        let mut h = [0u16; MAX_HEAD_DIM];
        let h = &mut h[..d];
        match kv.kv_type {
            KvType::F32 => {
                for (x, tokens) in self.k.iter().zip(self.keys.chunks_exact_mut(PAGE * 4)) {
                    tokens[slot * 4..][..4].copy_from_slice(&clamp(*x, f32::MAX).to_le_bytes());
                }
            }
            KvType::F16 => {
                to_f16(self.k, h);
                for (x, tokens) in h.iter().zip(self.keys.chunks_exact_mut(PAGE * 2)) {
                    tokens[slot * 2..][..2].copy_from_slice(&x.to_le_bytes());
                }
            }
            KvType::K8 => {
                let mut q = [0i8; MAX_HEAD_DIM];
                let scale = quantise(self.k, &mut q[..d]);
                let (keys, scales) = self.keys.split_at_mut(d.next_multiple_of(4) * PAGE);
                for (q, tokens) in q.chunks_exact(4).zip(keys.chunks_exact_mut(PAGE * 4)) {
                    tokens[slot * 4..][..4].copy_from_slice(&[q[0], q[1], q[2], q[3]].map(|q| q as u8 ^ 0x80));
                }
                scales[slot * 4..][..4].copy_from_slice(&scale.to_le_bytes());
            }
        }
        if kv.kv_type == KvType::F32 {
            for (x, group) in self.v.chunks(LANES).zip(self.values.chunks_exact_mut(PAGE * LANES * 4)) {
                for (x, out) in x.iter().zip(group[slot * LANES * 4..].chunks_exact_mut(4)) {
                    out.copy_from_slice(&clamp(*x, f32::MAX).to_le_bytes());
                }
            }
        } else {
            to_f16(self.v, h);
            for (x, group) in h.chunks(LANES).zip(self.values.chunks_exact_mut(PAGE * LANES * 2)) {
                for (x, out) in x.iter().zip(group[slot * LANES * 2..].chunks_exact_mut(2)) {
                    out.copy_from_slice(&x.to_le_bytes());
                }
            }
        }
    }
}

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

/// Attention of a whole batch in one layer.
#[derive(Clone, Copy)]
pub struct Attention<'a> {
    /// Where keys and values lie.
    pub kv: &'a KvLayout,
    /// The layer.
    pub layer: usize,
    /// All pages.
    pub arena: &'a [u8],
    /// Query heads, a multiple of the KV heads.
    pub n_head: usize,
    /// Tokens before and with the own one that a token sees; `usize::MAX` for all.
    pub window: usize,
    /// Queries (rows, n_head * head_dim), scaled and rotated, `q_stride` floats from a row to the next.
    pub q: &'a [f32],
    /// Floats from a row of `q` to the next.
    pub q_stride: usize,
    /// The rows, in order.
    pub spans: &'a [Span<'a>],
}

/// Up to this many rows of a span are cut by chunks, so that few rows with long pasts keep all threads busy.
const FEW_ROWS: usize = 4;

impl Attention<'_> {
    /// Scratch floats for the parts of chunks, for a batch of `max_seqs` sequences of up to `n_ctx` tokens.
    pub fn parts_len(kv: &KvLayout, n_head: usize, max_seqs: usize, n_ctx: usize) -> usize {
        max_seqs * FEW_ROWS * n_head * n_ctx.div_ceil(CHUNK) * kv.part_len()
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
                if span.n <= FEW_ROWS {
                    for token in 0..span.n {
                        for chunk in 0..(span.pos + token + 1).div_ceil(CHUNK) {
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
                None => (0..(pos + u.n).div_ceil(CHUNK), AttendOut::Rows { out: rows, at: row * width }),
            };
            Attend { of: self, head: u.head, pages: span.pages, row, tokens: u.n, pos, chunks }.run(cpu, out, scratch);
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
    /// The scaled scores of the tokens that each row sees, oldest first: one list per row and query head. For traces:
    /// the numbers that [`Attention::run`] turns into weights on this instruction set.
    pub fn scores(&self, cpu: Cpu) -> Vec<Vec<f32>> {
        let mut all = Vec::new();
        let mut scratch = AttendScratch::new(self.kv);
        for span in self.spans {
            for token in 0..span.n {
                for head in 0..self.kv.n_head_kv {
                    let pos = span.pos + token;
                    let chunks = 0..(pos + 1).div_ceil(CHUNK);
                    let a = Attend { of: self, head, pages: span.pages, row: span.row + token, tokens: 1, pos, chunks };
                    let at = all.len();
                    all.resize(at + a.group(), Vec::with_capacity(pos + 1));
                    cpu.run(Scores { a: &a, scratch: &mut scratch, out: &mut all[at..] });
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
    pages: &'a [u32],
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

impl KvLayout {
    /// Floats of the part of one chunk, one token and one query head.
    fn part_len(&self) -> usize {
        2 + self.value_dims()
    }
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
        let start = chunk * CHUNK;
        let from = (pos + 1).saturating_sub(self.of.window);
        from.saturating_sub(start).min(CHUNK)..(pos + 1).saturating_sub(start).min(CHUNK)
    }

    /// The queries of the block (columns, head_dim), gathered into `q`.
    #[inline(always)]
    fn queries<'q>(&self, q: &'q mut [f32]) -> &'q [f32] {
        let (group, d) = (self.group(), self.kv().head_dim);
        let q = &mut q[..self.tokens * group * d];
        for (c, q) in q.chunks_exact_mut(d).enumerate() {
            let at = (self.row + c / group) * self.of.q_stride + (self.head * group + c % group) * d;
            q.copy_from_slice(&self.of.q[at..at + d]);
        }
        q
    }

    fn page(&self, chunk: usize, token: usize) -> &[u8] {
        let bytes = self.kv().page_bytes();
        let page = self.pages[(chunk * CHUNK + token) / PAGE] as usize;
        &self.of.arena[page * bytes..(page + 1) * bytes]
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
        assert!((self.pos + self.tokens).div_ceil(PAGE) <= self.pages.len());
        assert!(scratch.dims >= kv.value_dims(), "scratch for a smaller head");
        cpu.run(Unit { a: self, out, scratch });
    }
}

/// Working memory of one thread for [`Attend::run`].
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

/// Tokens whose keys are widened at a time: those of the largest register tile.
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
    /// `scores[c][t]` for the chunk's first `n` tokens (rounded up to pages; what lies beyond is arbitrary) and the
    /// queries `q` (columns, head_dim).
    fn scores(&self, chunk: usize, n: usize, q: &[f32], scores: &mut [[f32; CHUNK]], wide: &mut [f32]);
    /// Turns `s` (a multiple of 16 long) into `exp(s - max)`; returns the maximum and the sum.
    fn softmax(&self, s: &mut [f32]) -> Running;
    /// `o[c][d] = sum_t p[c][t] * v[t][d]` for the chunk's `tokens`; `o` is (columns, value_dims).
    fn values(&self, chunk: usize, tokens: Range<usize>, p: &[[f32; CHUNK]], o: &mut [f32], wide: &mut [f32]);
    /// `total = total * a + part * b`.
    fn blend(&self, total: &mut [f32], a: f32, part: &[f32], b: f32);
}

impl Unit<'_> {
    /// The path of a block through its chunks, the same for every instruction set.
    #[inline(always)]
    fn walk(self, k: &impl Chunk) {
        let a = self.a;
        let (group, tokens, d, dims) = (a.group(), a.tokens, a.kv().head_dim, a.kv().value_dims());
        let columns = tokens * group;
        let q = a.queries(&mut self.scratch.q);
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
                s[..seen.start].fill(f32::NEG_INFINITY);
                s[seen.end..].fill(f32::NEG_INFINITY);
                *here = k.softmax(s);
            }
            k.values(chunk, from..n, scores, part, wide);
            let columns = total.chunks_exact_mut(dims).zip(part.chunks_exact(dims)).zip(running.iter_mut().zip(&here));
            for ((total, part), (running, here)) in columns {
                running.take(*here, total, part, |t, x, p, y| k.blend(t, x, p, y));
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
    fn walk(self, blend: impl Fn(&mut [f32], f32, &[f32], f32)) {
        let mut o = [0.0; MAX_HEAD_DIM];
        let o = &mut o[..self.dims];
        let mut running = Running { m: f32::NEG_INFINITY, l: 0.0 };
        for part in self.parts.chunks(self.stride).take(self.n_chunks) {
            let (ml, part) = part[..2 + self.dims].split_at(2);
            running.take(Running { m: ml[0], l: ml[1] }, o, part, &blend);
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

impl Scores<'_> {
    #[inline(always)]
    fn walk(self, k: &impl Chunk) {
        let a = self.a;
        let q = a.queries(&mut self.scratch.q);
        let scores = &mut self.scratch.scores[..self.out.len()];
        for chunk in a.chunks.clone() {
            let seen = a.seen(chunk, a.pos);
            if seen.is_empty() {
                continue;
            }
            k.scores(chunk, seen.end, q, scores, &mut self.scratch.wide);
            self.out.iter_mut().zip(&*scores).for_each(|(out, s)| out.extend_from_slice(&s[seen.clone()]));
        }
    }
}

impl Op for Scores<'_> {
    type Out = ();
    fn scalar(self) {
        let a = self.a;
        self.walk(&Scalar(a));
    }
    #[inline(always)]
    fn simd<S: Simd>(self, s: S) {
        let a = self.a;
        self.walk(&Lanes { a, s });
    }
}

impl Op for Unit<'_> {
    type Out = ();
    fn scalar(self) {
        let a = self.a;
        self.walk(&Scalar(a));
    }
    #[inline(always)]
    fn simd<S: Simd>(self, s: S) {
        let a = self.a;
        self.walk(&Lanes { a, s });
    }
}

/// The definition.
struct Scalar<'a>(&'a Attend<'a>);

impl Scalar<'_> {
    fn blend_of(total: &mut [f32], a: f32, part: &[f32], b: f32) {
        for (t, p) in total.iter_mut().zip(part) {
            *t = *t * a + p * b;
        }
    }
}

fn read_f32(b: &[u8], i: usize) -> f32 {
    f32::from_le_bytes([b[i * 4], b[i * 4 + 1], b[i * 4 + 2], b[i * 4 + 3]])
}

fn read_f16(b: &[u8], i: usize) -> f32 {
    f16_to_f32(u16::from_le_bytes([b[i * 2], b[i * 2 + 1]]))
}

impl Chunk for Scalar<'_> {
    fn scores(&self, chunk: usize, n: usize, q: &[f32], scores: &mut [[f32; CHUNK]], _: &mut [f32]) {
        let (a, kv, d) = (self.0, self.0.kv(), self.0.kv().head_dim);
        for (q, scores) in q.chunks_exact(d).zip(scores) {
            for (t, score) in scores[..n].iter_mut().enumerate() {
                let keys = a.keys(chunk, t);
                let t = t % PAGE;
                *score = match kv.kv_type {
                    KvType::F32 => (0..d).fold(0.0, |s, i| s + read_f32(keys, i * PAGE + t) * q[i]),
                    KvType::F16 => (0..d).fold(0.0, |s, i| s + read_f16(keys, i * PAGE + t) * q[i]),
                    KvType::K8 => {
                        let mut q8 = [0i8; MAX_HEAD_DIM];
                        let dq = quantise_block(q, &mut q8[..d]);
                        let key = |i: usize| i32::from((keys[i / 4 * 64 + t * 4 + i % 4] ^ 0x80) as i8);
                        let dot: i32 = (0..d).map(|i| key(i) * i32::from(q8[i])).sum();
                        dot as f32 * (read_f32(&keys[d.next_multiple_of(4) * PAGE..], t) * dq)
                    }
                };
            }
        }
    }

    fn softmax(&self, s: &mut [f32]) -> Running {
        let mut lanes = [f32::NEG_INFINITY; LANES];
        for (t, s) in s.iter().enumerate() {
            lanes[t % LANES] = max(lanes[t % LANES], *s);
        }
        let m = tree(lanes, max);
        let mut lanes = [0.0; LANES];
        for (t, s) in s.iter_mut().enumerate() {
            *s = exp(*s - m);
            lanes[t % LANES] += *s;
        }
        Running { m, l: tree(lanes, |a, b| a + b) }
    }

    fn values(&self, chunk: usize, tokens: Range<usize>, p: &[[f32; CHUNK]], o: &mut [f32], _: &mut [f32]) {
        let (a, kv) = (self.0, self.0.kv());
        for (p, o) in p.iter().zip(o.chunks_exact_mut(kv.value_dims())) {
            o.fill(0.0);
            for t in tokens.clone() {
                let values = a.values(chunk, t);
                for (d, o) in o.iter_mut().enumerate() {
                    let i = (d / LANES * PAGE + t % PAGE) * LANES + d % LANES;
                    *o += p[t] * if kv.kv_type == KvType::F32 { read_f32(values, i) } else { read_f16(values, i) };
                }
            }
        }
    }

    fn blend(&self, total: &mut [f32], a: f32, part: &[f32], b: f32) {
        Scalar::blend_of(total, a, part, b);
    }
}

/// The same on lanes.
struct Lanes<'a, S> {
    a: &'a Attend<'a>,
    s: S,
}

#[inline(always)]
fn blend_lanes<S: Simd>(s: S, total: &mut [f32], a: f32, part: &[f32], b: f32) {
    assert!(total.len() == part.len() && total.len().is_multiple_of(LANES));
    let (a, b) = (s.splat(a), s.splat(b));
    for i in (0..total.len()).step_by(S::LANES) {
        // SAFETY: both slices hold whole groups of 16.
        unsafe {
            let t = total.as_mut_ptr().add(i);
            s.store(t, s.add(s.mul(s.load(t), a), s.mul(s.load(part.as_ptr().add(i)), b)));
        }
    }
}

impl<S: Simd> Chunk for Lanes<'_, S> {
    #[inline(always)]
    fn scores(&self, chunk: usize, n: usize, q: &[f32], scores: &mut [[f32; CHUNK]], wide: &mut [f32]) {
        match self.a.kv().kv_type {
            KvType::F32 => self.float_scores::<AsF32>(chunk, n, q, scores, wide),
            KvType::F16 => self.float_scores::<AsF16>(chunk, n, q, scores, wide),
            KvType::K8 => self.int8_scores(chunk, n, q, scores),
        }
    }

    #[inline(always)]
    fn softmax(&self, p: &mut [f32]) -> Running {
        assert!(p.len().is_multiple_of(LANES));
        let s = self.s;
        let per = LANES / S::LANES;
        let mut lanes = [0.0; LANES];
        // SAFETY: whole groups of 16 elements, and 16 lanes.
        unsafe {
            let mut acc = [s.splat(f32::NEG_INFINITY); 4];
            for i in (0..p.len()).step_by(LANES) {
                for (j, acc) in acc[..per].iter_mut().enumerate() {
                    let v = s.load(p.as_ptr().add(i + j * S::LANES));
                    *acc = s.select_gt(v, *acc, v, *acc);
                }
            }
            for (j, acc) in acc[..per].iter().enumerate() {
                s.store(lanes.as_mut_ptr().add(j * S::LANES), *acc);
            }
            let m = tree(lanes, max);
            let mut acc = [s.splat(0.0); 4];
            for i in (0..p.len()).step_by(LANES) {
                for (j, acc) in acc[..per].iter_mut().enumerate() {
                    let at = p.as_mut_ptr().add(i + j * S::LANES);
                    let e = exp_lanes(s, s.sub(s.load(at), s.splat(m)));
                    s.store(at, e);
                    *acc = s.add(*acc, e);
                }
            }
            for (j, acc) in acc[..per].iter().enumerate() {
                s.store(lanes.as_mut_ptr().add(j * S::LANES), *acc);
            }
            Running { m, l: tree(lanes, |a, b| a + b) }
        }
    }

    #[inline(always)]
    fn values(&self, chunk: usize, tokens: Range<usize>, p: &[[f32; CHUNK]], o: &mut [f32], wide: &mut [f32]) {
        if self.a.kv().kv_type == KvType::F32 {
            self.float_values::<AsF32>(chunk, tokens, p, o, wide);
        } else {
            self.float_values::<AsF16>(chunk, tokens, p, o, wide);
        }
    }

    #[inline(always)]
    fn blend(&self, total: &mut [f32], a: f32, part: &[f32], b: f32) {
        blend_lanes(self.s, total, a, part, b);
    }
}

/// Shape of a register tile for `left` vectors, `columns` columns.
#[inline(always)]
fn fit<S: Simd>(left: usize, columns: usize) -> (usize, usize) {
    (S::TILE_F32.rv.min(left), S::TILE_F32.nc.min(columns))
}

impl<S: Simd> Lanes<'_, S> {
    /// Tokens outside, columns inside: the keys of a tile's tokens are widened once and stay in cache.
    #[inline(always)]
    fn float_scores<E: Elem>(&self, chunk: usize, n: usize, q: &[f32], scores: &mut [[f32; CHUNK]], wide: &mut [f32]) {
        let d = self.a.kv().head_dim;
        let tokens = n.next_multiple_of(PAGE);
        let mut t = 0;
        while t < tokens {
            let (rv, _) = fit::<S>((tokens - t) / S::LANES, 1);
            if self.is_worth_widening::<E>(scores.len()) {
                for (i, page) in (t / PAGE * PAGE..t + rv * S::LANES).step_by(PAGE).enumerate() {
                    self.widen::<E>(self.a.keys(chunk, page), &mut wide[i * d * PAGE..(i + 1) * d * PAGE]);
                }
                let keys = |v: usize| {
                    wide[((t % PAGE + v * S::LANES) / PAGE * d * PAGE) + (t + v * S::LANES) % PAGE..].as_ptr()
                };
                self.score_tiles::<AsF32>(t, rv, |v| keys(v).cast(), q, scores);
            } else {
                let keys = |v: usize| {
                    let t = t + v * S::LANES;
                    self.a.keys(chunk, t)[t % PAGE * E::BYTES..].as_ptr()
                };
                self.score_tiles::<E>(t, rv, keys, q, scores);
            }
            t += rv * S::LANES;
        }
    }

    /// Scores of `rv` vectors of tokens from `t` on, for all columns.
    #[inline(always)]
    fn score_tiles<E: Elem>(
        &self,
        t: usize,
        rv: usize,
        keys: impl Fn(usize) -> *const u8,
        q: &[f32],
        scores: &mut [[f32; CHUNK]],
    ) {
        let mut c = 0;
        while c < scores.len() {
            let (_, nc) = fit::<S>(1, scores.len() - c);
            f32_shapes!(S, rv, nc, score_tile(self, t, &keys, c, q, scores, Stored::<E>(core::marker::PhantomData)));
            c += nc;
        }
    }

    /// Pages outside, columns inside, as above.
    #[inline(always)]
    fn float_values<E: Elem>(
        &self,
        chunk: usize,
        tokens: Range<usize>,
        p: &[[f32; CHUNK]],
        o: &mut [f32],
        wide: &mut [f32],
    ) {
        let dims = self.a.kv().value_dims();
        for t in tokens.clone().step_by(PAGE) {
            let values = self.a.values(chunk, t);
            let part = ValuePart { t, n: PAGE.min(tokens.end - t), go_on: t > tokens.start };
            if self.is_worth_widening::<E>(p.len()) {
                self.widen::<E>(values, &mut wide[..dims * PAGE]);
                self.value_tiles::<AsF32>(&part, wide.as_ptr().cast(), p, o);
            } else {
                self.value_tiles::<E>(&part, values.as_ptr(), p, o);
            }
        }
    }

    /// Adds the weighted values of some tokens of a page to all columns.
    #[inline(always)]
    fn value_tiles<E: Elem>(&self, part: &ValuePart, values: *const u8, p: &[[f32; CHUNK]], o: &mut [f32]) {
        let vectors = self.a.kv().value_dims() / S::LANES;
        let mut c = 0;
        while c < p.len() {
            let (_, nc) = fit::<S>(1, p.len() - c);
            let mut v = 0;
            while v < vectors {
                let (rv, _) = fit::<S>(vectors - v, 1);
                f32_shapes!(
                    S,
                    rv,
                    nc,
                    value_tile(self, part, values, v, c, p, o, Stored::<E>(core::marker::PhantomData))
                );
                v += rv;
            }
            c += nc;
        }
    }

    /// Whether so many columns read the same numbers that they are better converted once.
    #[inline(always)]
    fn is_worth_widening<E: Elem>(&self, columns: usize) -> bool {
        E::BYTES < 4 && columns > S::TILE_F32.nc
    }

    #[inline(always)]
    fn widen<E: Elem>(&self, from: &[u8], to: &mut [f32]) {
        assert!(from.len() >= to.len() * E::BYTES && to.len().is_multiple_of(S::LANES));
        for i in (0..to.len()).step_by(S::LANES) {
            // SAFETY: both slices hold whole vectors up to `to.len()` elements.
            unsafe { self.s.store(to.as_mut_ptr().add(i), E::load(self.s, from.as_ptr().add(i * E::BYTES))) }
        }
    }

    #[inline(always)]
    fn int8_scores(&self, chunk: usize, n: usize, q: &[f32], scores: &mut [[f32; CHUNK]]) {
        const NC: usize = 4;
        let (s, a, d) = (self.s, self.a, self.a.kv().head_dim);
        let groups = d.div_ceil(4);
        let (rec, words) = (S::rec(8), S::rec(8).words());
        let mut packed = [0u32; MAX_HEAD_DIM / 4 * 2 * NC];
        for (c0, scores) in scores.chunks_mut(NC).enumerate() {
            let (mut first, mut dq) = ([0i32; NC], [0.0; NC]);
            for c in 0..scores.len() {
                let mut q8 = [0i8; MAX_HEAD_DIM];
                let q = &q[(c0 * NC + c) * d..][..d];
                dq[c] = if d.is_multiple_of(S::LANES) {
                    quantise_lanes(s, q, &mut q8[..d])
                } else {
                    quantise_block(q, &mut q8[..d])
                };
                let q8 = &q8[..groups * 4];
                let sum = |f: fn(i8) -> i32| q8.iter().map(|&q| f(q)).sum::<i32>();
                first[c] = if rec == Rec::Xor { -sum(|q| i32::from(q.min(0))) } else { -128 * sum(i32::from) };
                write_groups(rec, q8, NC, c, &mut packed);
            }
            for t in (0..n).step_by(S::LANES) {
                let keys = a.keys(chunk, t);
                // SAFETY: a head's keys are `groups` lines of 64 bytes and 16 scales; `packed` holds `groups` records;
                // a row of scores holds the vectors of whole pages.
                unsafe {
                    let mut dots: [S::Acc; NC] = core::array::from_fn(|c| s.acc::<8>(first[c]));
                    for g in 0..groups {
                        let w = s.weights(s.load_b(keys.as_ptr().add(g * 64 + t % PAGE * 4)));
                        for (c, dot) in dots.iter_mut().enumerate() {
                            *dot = s.dot::<8>(*dot, w, s.act::<8>(packed.as_ptr().add((g * NC + c) * words)));
                        }
                    }
                    let dk = s.load(keys.as_ptr().add(groups * 64 + t % PAGE * 4).cast());
                    for (c, scores) in scores.iter_mut().enumerate() {
                        let dot = s.to_f32(s.total::<8>(dots[c], first[c]));
                        s.store(scores.as_mut_ptr().add(t), s.mul(dot, s.mul(dk, s.splat(dq[c]))));
                    }
                }
            }
        }
    }
}

struct Stored<E>(core::marker::PhantomData<E>);

#[inline(always)]
fn score_tile<S: Simd, E: Elem, const RV: usize, const NC: usize>(
    l: &Lanes<'_, S>,
    t: usize,
    keys: &impl Fn(usize) -> *const u8,
    c: usize,
    q: &[f32],
    scores: &mut [[f32; CHUNK]],
    _: Stored<E>,
) {
    let d = l.a.kv().head_dim;
    let tile = F32Tile::<RV> {
        w: core::array::from_fn(keys),
        w_step: PAGE * E::BYTES,
        k: d,
        x: q[c * d..(c + NC) * d].as_ptr(),
        x_stride: d,
        out: scores[c..c + NC].as_flattened_mut()[t..].as_mut_ptr(),
        out_stride: CHUNK,
        go_on: false,
    };
    // SAFETY: keys of a head are d x 16 elements, the slices above hold NC queries and NC rows of scores.
    unsafe { tile.run::<S, E, NC>(l.s) }
}

/// Tokens of a page whose values are added: `n` from the chunk's token `t` on.
struct ValuePart {
    t: usize,
    n: usize,
    go_on: bool,
}

#[allow(clippy::too_many_arguments)]
#[inline(always)]
fn value_tile<S: Simd, E: Elem, const RV: usize, const NC: usize>(
    l: &Lanes<'_, S>,
    part: &ValuePart,
    values: *const u8,
    v0: usize,
    c: usize,
    p: &[[f32; CHUNK]],
    o: &mut [f32],
    _: Stored<E>,
) {
    let dims = l.a.kv().value_dims();
    let at = |v: usize| {
        let d = (v0 + v) * S::LANES;
        (d / LANES * PAGE * LANES + d % LANES) * E::BYTES
    };
    let tile = F32Tile::<RV> {
        // SAFETY: values of a head are 16 tokens of `dims` elements, whole groups of 16.
        w: core::array::from_fn(|v| unsafe { values.add(at(v)) }),
        w_step: LANES * E::BYTES,
        k: part.n,
        x: p[c..c + NC].as_flattened()[part.t..].as_ptr(),
        x_stride: CHUNK,
        out: o[c * dims..(c + NC) * dims][v0 * S::LANES..].as_mut_ptr(),
        out_stride: dims,
        go_on: part.go_on,
    };
    // SAFETY: as above, and the slices hold NC rows.
    unsafe { tile.run::<S, E, NC>(l.s) }
}

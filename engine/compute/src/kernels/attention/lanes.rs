//! Attention over one chunk on lanes: the arithmetic of the scalar definition, for 16 tokens or dimensions side by
//! side.
#![allow(unsafe_code)]

use core::hint::black_box;
use core::marker::PhantomData;
use core::ops::Range;
use core::ptr::null;

use super::super::act::{quantise_lanes, write_groups, zero_point_term_of_bytes};
use super::super::elementwise::soft_cap_lanes;
use super::super::exp::{LOW, UNROLL, exp_above_lanes};
use super::super::f32_tile::{AsF16, AsF32, Elem, Exact, F32Tile, columns_at_once, f32_shapes, has_shape};
use super::super::narrow::{narrow_lanes, round13_lanes};
use super::super::norm::{VIRTUAL_LANES, max, reduce};
use super::super::simd::{Simd, each};
use super::block::{ANY, AttentionBlock, ChunkKernel, ChunkTokens, F16, F32, Q8};
use super::softmax_state::SoftmaxState;
use super::{CHUNK, MAX_LATENT_DIM, PAGE, WEIGHT_LOW, WIDE};

/// Prefetch distance in tokens.
const PREFETCH_TOKENS: usize = 64;

/// Bytes of a cache line.
const LINE: usize = 64;

/// [`ChunkKernel`] on lanes, for KV type `KV`.
pub(super) struct LaneKernel<'a, S, const KV: usize> {
    pub(super) a: &'a AttentionBlock<'a>,
    pub(super) s: S,
}

#[inline(always)]
pub(super) fn blend_lanes<S: Simd>(s: S, total: &mut [f32], a: f32, part: &[f32], b: f32) {
    assert!(total.len() == part.len() && total.len().is_multiple_of(VIRTUAL_LANES));
    let (a, b) = (s.splat(a), s.splat(b));
    for i in (0..total.len()).step_by(S::LANES) {
        // SAFETY: both slices hold whole groups of 16.
        unsafe {
            let t = total.as_mut_ptr().add(i);
            s.store(t, s.add(s.mul(s.load(t), a), s.mul(s.load(part.as_ptr().add(i)), b)));
        }
    }
}

/// [`ChunkKernel::softmax`]; rounds the weights to 13 bits if `narrow`.
// not inlined on WebAssembly: one copy for all KV types
#[cfg_attr(not(target_family = "wasm"), inline(always))]
#[cfg_attr(target_family = "wasm", inline(never))]
fn softmax_lanes<S: Simd>(s: S, low: f32, narrow: bool, p: &mut [f32]) -> SoftmaxState {
    assert!(!p.is_empty() && p.len().is_multiple_of(VIRTUAL_LANES));
    let per = VIRTUAL_LANES / S::LANES;
    let mut lanes = [0.0; VIRTUAL_LANES];
    // SAFETY: whole groups of 16 elements, and 16 lanes.
    unsafe {
        let mut acc = [s.splat(f32::NEG_INFINITY); 4];
        for i in (0..p.len()).step_by(VIRTUAL_LANES) {
            for (j, acc) in acc[..per].iter_mut().enumerate() {
                let v = s.load(p.as_ptr().add(i + j * S::LANES));
                *acc = s.max(v, *acc);
            }
        }
        for (j, acc) in acc[..per].iter().enumerate() {
            s.store(lanes.as_mut_ptr().add(j * S::LANES), *acc);
        }
        let m = reduce(lanes, max);
        let mut acc = [s.splat(0.0); 4];
        for i in (0..p.len()).step_by(UNROLL * S::LANES) {
            // an incomplete last step repeats vectors instead of processing them one by one
            let n = UNROLL.min((p.len() - i) / S::LANES);
            let at = |j: usize| i + j.min(n - 1) * S::LANES;
            let mut e = [s.splat(0.0); UNROLL];
            for (j, e) in e.iter_mut().enumerate() {
                *e = s.sub(s.load(p.as_ptr().add(at(j))), s.splat(m));
            }
            let e = exp_above_lanes(s, low, e);
            for (j, e) in e.iter().enumerate() {
                let e = if narrow { round13_lanes(s, *e) } else { *e };
                s.store(p.as_mut_ptr().add(at(j)), e);
                if j < n {
                    acc[j % per] = s.add(acc[j % per], e);
                }
            }
        }
        for (j, acc) in acc[..per].iter().enumerate() {
            s.store(lanes.as_mut_ptr().add(j * S::LANES), *acc);
        }
        SoftmaxState { m, l: reduce(lanes, |a, b| a + b) }
    }
}

impl<S: Simd, const KV: usize> ChunkKernel for LaneKernel<'_, S, KV> {
    #[inline(always)]
    fn scores(&self, chunk: usize, tokens: Range<usize>, q: &[f32], scores: &mut [[f32; CHUNK]], wide: &mut [f32]) {
        self.touch_lines(tokens.clone().step_by(PAGE).map(|t| self.a.keys(chunk, t)));
        match self.kv_type() {
            F32 => self.float_scores::<AsF32, AsF32>(chunk, tokens, q, scores, wide),
            F16 => self.float_scores::<Exact<AsF16>, Exact<AsF32>>(chunk, tokens, q, scores, wide),
            _ => self.int8_scores(chunk, tokens, q, scores),
        }
    }

    #[inline(always)]
    fn narrow(&self, q: &mut [f32]) {
        narrow_lanes(self.s, q);
    }

    #[inline(always)]
    fn soft_cap(&self, p: &mut [f32], cap: f32) {
        assert!(p.len().is_multiple_of(S::LANES));
        for i in (0..p.len()).step_by(S::LANES) {
            // SAFETY: whole vectors below the length.
            unsafe {
                let at = p.as_mut_ptr().add(i);
                self.s.store(at, soft_cap_lanes(self.s, self.s.load(at), cap));
            }
        }
    }

    #[inline(always)]
    fn softmax(&self, p: &mut [f32]) -> SoftmaxState {
        let narrow = self.a.kv().kv_type.has_f16_values();
        softmax_lanes(self.s, if narrow { WEIGHT_LOW } else { LOW }, narrow, p)
    }

    #[inline(always)]
    fn values(&self, tokens: ChunkTokens, p: &[[f32; CHUNK]], o: &mut [f32], wide: &mut [f32]) {
        if !self.a.kv().heads.latent {
            let ChunkTokens { chunk, tokens, .. } = tokens.clone();
            self.touch_lines(tokens.step_by(PAGE).map(|t| self.a.values(chunk, t)));
        }
        match self.kv_type() {
            F32 => self.float_values::<AsF32, AsF32>(tokens, p, o, wide),
            _ => self.float_values::<Exact<AsF16>, Exact<AsF32>>(tokens, p, o, wide),
        }
    }

    #[inline(always)]
    fn blend(&self, total: &mut [f32], a: f32, part: &[f32], b: f32) {
        blend_lanes(self.s, total, a, part, b);
    }
}

impl<S: Simd, const KV: usize> LaneKernel<'_, S, KV> {
    /// Index of the KV type: a constant, unless `KV` is `ANY`.
    #[inline(always)]
    pub(super) fn kv_type(&self) -> usize {
        if const { KV == ANY } { self.a.kv().kv_type as usize } else { KV }
    }

    /// Tokens in the outer loop, columns in the inner one: the keys of a tile are converted once, from `E` to `W`, and
    /// stay in cache.
    #[inline(always)]
    fn float_scores<E: Elem, W: Elem>(
        &self,
        chunk: usize,
        tokens: Range<usize>,
        q: &[f32],
        scores: &mut [[f32; CHUNK]],
        wide: &mut [f32],
    ) {
        let d = self.a.kv().heads.key_dim;
        let (mut t, tokens) = (tokens.start, tokens.end.next_multiple_of(PAGE));
        while t < tokens {
            let rv = S::TILE_F32.rv.min((tokens - t) / S::LANES);
            if self.is_worth_widening::<E>(scores.len()) {
                for (i, page) in (t / PAGE * PAGE..t + rv * S::LANES).step_by(PAGE).enumerate() {
                    let prefetch = self.prefetch_after_keys(chunk, page, tokens);
                    self.widen::<E>(self.a.keys(chunk, page), prefetch, &mut wide[i * d * PAGE..(i + 1) * d * PAGE]);
                }
                let keys = |v: usize| {
                    wide[((t % PAGE + v * S::LANES) / PAGE * d * PAGE) + (t + v * S::LANES) % PAGE..].as_ptr()
                };
                let keys = KeyPointers { keys: |v| keys(v).cast(), prefetch: |_| null() };
                self.score_tiles::<W>(t, rv, &keys, q, scores);
            } else {
                let keys = |v: usize| {
                    let t = t + v * S::LANES;
                    self.a.keys(chunk, t)[t % PAGE * E::BYTES..].as_ptr()
                };
                let prefetch = |v: usize| self.prefetch_after_keys(chunk, t + v * S::LANES, tokens);
                self.score_tiles::<E>(t, rv, &KeyPointers { keys, prefetch }, q, scores);
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
        keys: &KeyPointers<impl Fn(usize) -> *const u8, impl Fn(usize) -> *const u8>,
        q: &[f32],
        scores: &mut [[f32; CHUNK]],
    ) {
        let mut c = 0;
        while c < scores.len() {
            let nc = columns_at_once::<S>(scores.len() - c);
            let at = TileOrigin { row: t, column: c };
            f32_shapes!(S, rv, nc, score_tile((self.s, self.a), at, keys, q, scores, ElemType::<E>(PhantomData)));
            c += nc;
        }
    }

    /// Tokens in the outer loop, columns in the inner one, as in [`LaneKernel::float_scores`].
    #[inline(always)]
    fn float_values<E: Elem, W: Elem>(
        &self,
        ChunkTokens { chunk, tokens, accumulate }: ChunkTokens,
        p: &[[f32; CHUNK]],
        o: &mut [f32],
        wide: &mut [f32],
    ) {
        let latent = self.a.kv().heads.latent;
        let gathers = latent || self.kv_type() == Q8;
        let widen = gathers || self.is_worth_widening::<E>(p.len());
        let depth = if widen { WIDE } else { PAGE };
        for t in tokens.clone().step_by(depth) {
            let (n, accumulate) = (depth.min(tokens.end - t), accumulate || t > tokens.start);
            if gathers {
                match latent {
                    true => self.gather_latents(chunk, t..t + n, wide),
                    false => self.gather_int8_values(chunk, t..t + n, tokens.end, wide),
                }
                let values = wide.as_ptr().cast();
                self.value_tiles::<W>(&ValuePart { values, t, n, depth, accumulate, prefetch: null() }, p, o);
            } else if widen {
                for page in (t..t + n).step_by(PAGE) {
                    let group = PAGE * VIRTUAL_LANES * E::BYTES;
                    let groups = self.a.values(chunk, page).chunks_exact(group);
                    let prefetch = self.prefetch_after_values(chunk, page, tokens.end);
                    for (i, (values, wide)) in groups.zip(wide.chunks_exact_mut(WIDE * VIRTUAL_LANES)).enumerate() {
                        let prefetch = if prefetch.is_null() { prefetch } else { prefetch.wrapping_add(i * group) };
                        self.widen::<E>(
                            values,
                            prefetch,
                            &mut wide[(page - t) * VIRTUAL_LANES..][..PAGE * VIRTUAL_LANES],
                        );
                    }
                }
                let values = wide.as_ptr().cast();
                self.value_tiles::<W>(&ValuePart { values, t, n, depth, accumulate, prefetch: null() }, p, o);
            } else {
                let prefetch = self.prefetch_after_values(chunk, t, tokens.end);
                let values = self.a.values(chunk, t).as_ptr();
                self.value_tiles::<E>(&ValuePart { values, t, n, depth, accumulate, prefetch }, p, o);
            }
        }
    }

    /// Adds the weighted values of some tokens to all columns.
    #[inline(always)]
    fn value_tiles<E: Elem>(&self, part: &ValuePart, p: &[[f32; CHUNK]], o: &mut [f32]) {
        let vectors = self.a.kv().value_dims() / S::LANES;
        let mut c = 0;
        while c < p.len() {
            let nc = columns_at_once::<S>(p.len() - c);
            let mut v = 0;
            while v < vectors {
                let rv = S::TILE_F32.rv.min(vectors - v);
                let at = TileOrigin { row: v, column: c };
                f32_shapes!(S, rv, nc, value_tile((self.s, self.a), at, part, p, o, ElemType::<E>(PhantomData)));
                v += rv;
            }
            c += nc;
        }
    }

    /// Whether enough columns read the same f16 numbers to convert them to f32 first.
    #[inline(always)]
    fn is_worth_widening<E: Elem>(&self, columns: usize) -> bool {
        E::BYTES < 4 && columns > S::TILE_F32.nc
    }

    /// Whether pages are prefetched: each page is a stream of its own, too short for the hardware prefetcher.
    #[inline(always)]
    fn prefetches(&self) -> bool {
        S::PREFETCHES && self.s.prefetch_policy().distance.floats > 0
    }

    /// Where there is no prefetch instruction, reads a byte of each line of the pages: these cache misses overlap,
    /// those of a tile would not.
    #[inline(always)]
    fn touch_lines<'p>(&self, pages: impl Iterator<Item = &'p [u8]>) {
        if !S::PREFETCHES {
            black_box(pages.flat_map(|page| page.iter().step_by(LINE)).fold(0, |all, byte| all ^ byte));
        }
    }

    /// The data read [`PREFETCH_TOKENS`] tokens after the keys of token `t` of the chunk: keys, or values once all
    /// `tokens` keys were read.
    #[inline(always)]
    fn prefetch_after_keys(&self, chunk: usize, t: usize, tokens: usize) -> *const u8 {
        match t + PREFETCH_TOKENS {
            _ if !self.prefetches() => null(),
            t if t < tokens => self.a.keys(chunk, t).as_ptr(),
            t if t < 2 * tokens => self.a.values(chunk, t - tokens).as_ptr(),
            _ => null(),
        }
    }

    /// The data read [`PREFETCH_TOKENS`] tokens after the values of token `t` of the chunk: values, or beyond `end` the
    /// keys of the next chunk.
    #[inline(always)]
    pub(super) fn prefetch_after_values(&self, chunk: usize, t: usize, end: usize) -> *const u8 {
        match t + PREFETCH_TOKENS {
            _ if !self.prefetches() => null(),
            t if t < end => self.a.values(chunk, t).as_ptr(),
            t if self.a.has(chunk + 1, t - end) => self.a.keys(chunk + 1, t - end).as_ptr(),
            _ => null(),
        }
    }

    #[inline(always)]
    fn widen<E: Elem>(&self, from: &[u8], prefetch: *const u8, to: &mut [f32]) {
        assert!(from.len() >= to.len() * E::BYTES && to.len().is_multiple_of(S::LANES));
        for i in (0..to.len()).step_by(S::LANES) {
            self.s.prefetch_line(prefetch, i * E::BYTES);
            // SAFETY: both slices hold whole vectors up to `to.len()` elements.
            unsafe { self.s.store(to.as_mut_ptr().add(i), E::load(self.s, from.as_ptr().add(i * E::BYTES))) }
        }
    }

    #[inline(always)]
    fn int8_scores(&self, chunk: usize, tokens: Range<usize>, q: &[f32], scores: &mut [[f32; CHUNK]]) {
        const NC: usize = 4;
        let (s, a, d) = (self.s, self.a, self.a.kv().heads.key_dim);
        let (groups, (parts, n_parts)) = (d.div_ceil(4), a.kv().heads.scaled_parts());
        let parts = &parts[..n_parts];
        let (encoding, words) = (S::act_encoding(8), S::act_encoding(8).words());
        let mut packed = [0u32; MAX_LATENT_DIM / 4 * 2 * NC];
        for (c0, scores) in scores.chunks_mut(NC).enumerate() {
            let (mut zero_points, mut dq) = ([[0i32; NC]; 2], [[0.0; NC]; 2]);
            for c in 0..scores.len() {
                let mut q8 = [0i8; MAX_LATENT_DIM];
                let q = &q[(c0 * NC + c) * d..][..d];
                for (i, part) in parts.iter().enumerate() {
                    dq[i][c] = quantise_lanes(s, &q[part.clone()], &mut q8[part.clone()]);
                    let padded = part.start..part.end.next_multiple_of(4);
                    zero_points[i][c] = zero_point_term_of_bytes(encoding, &q8[padded]);
                }
                write_groups(encoding, &q8[..groups * 4], NC, c, &mut packed);
            }
            for t in tokens.clone().step_by(S::LANES) {
                let keys = a.keys(chunk, t);
                for (i, part) in parts.iter().enumerate() {
                    // SAFETY: a head's keys are `groups` lines of 64 bytes and 16 scales of each part; `packed` holds
                    // `groups` records; a row of scores holds the vectors of whole pages.
                    unsafe {
                        let mut dots: [S::Acc; NC] = each!(NC, |c| s.acc::<8>(zero_points[i][c]));
                        for g in part.start / 4..part.end.div_ceil(4) {
                            let w = s.weights::<8>(s.load_b(keys.as_ptr().add(g * 64 + t % PAGE * 4)));
                            for (c, dot) in dots.iter_mut().enumerate() {
                                *dot = s.dot::<8>(*dot, w, s.act::<8>(packed.as_ptr().add((g * NC + c) * words)));
                            }
                        }
                        let dk = s.load(keys.as_ptr().add((groups + i) * 64 + t % PAGE * 4).cast());
                        for (c, scores) in scores.iter_mut().enumerate() {
                            let dot = s.to_f32(s.total::<8>(dots[c], zero_points[i][c]));
                            let (score, out) = (s.mul(dot, s.mul(dk, s.splat(dq[i][c]))), scores.as_mut_ptr().add(t));
                            s.store(out, if i == 0 { score } else { s.add(s.load(out), score) });
                        }
                    }
                }
            }
        }
    }
}

struct ElemType<E>(PhantomData<E>);

/// The first row and column of a tile. Rows are tokens of the chunk for scores, vectors of the head for values.
#[derive(Clone, Copy)]
struct TileOrigin {
    row: usize,
    column: usize,
}

/// Addresses by vector of tokens: of the keys, and of the data to prefetch meanwhile (or null).
struct KeyPointers<K, P> {
    keys: K,
    prefetch: P,
}

#[inline(always)]
fn score_tile<S: Simd, E: Elem, const RV: usize, const NC: usize>(
    (s, a): (S, &AttentionBlock<'_>),
    TileOrigin { row: t, column: c }: TileOrigin,
    pointers: &KeyPointers<impl Fn(usize) -> *const u8, impl Fn(usize) -> *const u8>,
    q: &[f32],
    scores: &mut [[f32; CHUNK]],
    _: ElemType<E>,
) {
    let d = a.kv().heads.key_dim;
    let tile = F32Tile::<RV> {
        w: each!(RV, |v| (pointers.keys)(v)),
        k: d,
        x: q[c * d..(c + NC) * d].as_ptr(),
        x_stride: d,
        out: scores[c..c + NC].as_flattened_mut()[t..].as_mut_ptr(),
        out_stride: CHUNK,
        accumulate: false,
        prefetch: each!(RV, |v| if c == 0 { (pointers.prefetch)(v) } else { null() }),
    };
    // SAFETY: keys of a head are d x 16 elements, the slices above hold NC queries and NC rows of scores.
    unsafe { tile.run::<S, E, NC>(s) }
}

/// Tokens whose values are added: `n` from token `t` of the chunk on. Each 16 dimensions are stored for `depth` tokens.
struct ValuePart {
    values: *const u8,
    t: usize,
    n: usize,
    depth: usize,
    accumulate: bool,
    /// Values to prefetch meanwhile, or null.
    prefetch: *const u8,
}

#[inline(always)]
fn value_tile<S: Simd, E: Elem, const RV: usize, const NC: usize>(
    (s, a): (S, &AttentionBlock<'_>),
    TileOrigin { row: v0, column: c }: TileOrigin,
    part: &ValuePart,
    p: &[[f32; CHUNK]],
    o: &mut [f32],
    _: ElemType<E>,
) {
    let dims = a.kv().value_dims();
    let at = |v: usize| {
        let d = (v0 + v) * S::LANES;
        (d / VIRTUAL_LANES * part.depth * VIRTUAL_LANES + d % VIRTUAL_LANES) * E::BYTES
    };
    let tile = F32Tile::<RV> {
        // SAFETY: values of a head are `depth` tokens of `dims` elements, whole groups of 16.
        w: each!(RV, |v| unsafe { part.values.add(at(v)) }),
        k: part.n,
        x: p[c..c + NC].as_flattened()[part.t..].as_ptr(),
        x_stride: CHUNK,
        out: o[c * dims..(c + NC) * dims][v0 * S::LANES..].as_mut_ptr(),
        out_stride: dims,
        accumulate: part.accumulate,
        prefetch: each!(RV, |v| if c == 0 && !part.prefetch.is_null() {
            part.prefetch.wrapping_add(at(v))
        } else {
            null()
        }),
    };
    // SAFETY: the weights were bounded where they were taken; the slices of `p` and `o` hold NC rows.
    unsafe { tile.run::<S, E, NC>(s) }
}

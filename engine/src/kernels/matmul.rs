//! Matrix products: panels of weights times packed columns.
//!
//! One output, blocks b = 0, 1, 2, ... in order, every float step rounded on its own:
//!
//! ```text
//! isum = sum_j (w_j - offset) * q_j                        exact i32
//! acc += f32(isum) * (d_w * d_a)                           blocks of 32
//! acc += f32(isum) * (d_w * d_a) + f32(asum) * (m_w * d_a) ... with a minimum; asum = sum_j q_j
//!
//! isum = sum_s scale_s * dot_s; msum = sum_s min_s * asum_s   exact i32
//! acc += f32(isum) * (d * d_a) - f32(msum) * (dmin * d_a)  super-blocks (types without minima: the first term)
//! ```
//!
//! In NVFP4 a step is half a block: 16 elements with their own `d_w`.
//!
//! A product is cut into units of panels; a unit computes its rows for all columns, so that any assignment of units to
//! threads gives the same bits. Inside a unit, register tiles of rows x columns run over the whole of K.

use alloc::vec::Vec;

use super::act::{self, Acts};
use super::cpu::Op;
use super::decoded::Decoded;
use super::f32_tile;
use super::form::{CodesForm, Form, code_line};
use super::panel::{Matrix, PANEL};
use super::simd::{Simd, TileShape};
use super::{Cpu, SharedOut, tasks};
use crate::pool::Pool;
use crate::quant::Dtype;

/// The columns of a product.
#[derive(Clone, Copy)]
pub enum Columns<'a> {
    /// Quantised and packed, for quantised weights.
    Packed(Acts<'a>),
    /// Plain rows (n, k), for float weights.
    Plain(&'a [f32]),
}

impl Columns<'_> {
    /// Number of columns of `k` elements.
    fn n(&self, k: usize) -> usize {
        match self {
            Columns::Packed(a) => a.n,
            Columns::Plain(x) => x.len() / k,
        }
    }
}

/// One matrix of a parallel region.
#[derive(Clone, Copy)]
pub struct Job<'a> {
    /// The weights.
    pub w: &'a Matrix,
    /// The columns.
    pub x: Columns<'a>,
    /// Where the first column goes in the output.
    pub column: usize,
    /// Where the product's first row stands in a column of the output.
    pub at: usize,
}

/// Several products in one parallel region: `out[(column + c) * stride + at + row] = sum_k w[row][k] * x[c][k]` for
/// each job, all its rows and all its columns. Rows beyond a matrix, up to whole panels, are written as 0.
///
/// # Panics
/// If the jobs' rows, in whole panels, overlap or do not fit `stride`; if jobs for other columns than those before do
/// not come after them; if the columns were packed for other weights.
pub fn products(cpu: Cpu, pool: &dyn Pool, jobs: &[Job<'_>], out: &mut [f32], stride: usize) {
    let (mut columns, mut end) = (0..0, 0);
    for job in jobs {
        let (k, n) = (job.w.k(), job.x.n(job.w.k()));
        let mine = job.column..job.column + n;
        if mine != columns {
            assert!(mine.start >= columns.end, "products in order of their columns in the output");
            (columns, end) = (mine, 0);
        }
        assert!(job.at >= end, "products in order of their place in the output");
        end = job.at + job.w.panels() * PANEL;
        assert!(n > 0 && end <= stride && out.len() >= columns.end * stride);
        if let Columns::Packed(a) = job.x {
            assert!(a.k == k && a.words.len() >= a.kind.len_words(n, k));
            assert!(Some(a.kind) == act::ActKind::of(cpu, job.w.dtype()), "columns packed for another product");
        }
    }
    let units = units(jobs, pool.threads());
    let out = SharedOut::new(out);
    tasks::run(pool, units.len(), &|i, _| {
        let Unit { job, p0, p1 } = units[i];
        let Job { w, x, column, at } = jobs[job];
        let (n, at) = (x.n(w.k()), column * stride + at);
        cpu.run(Panels { product: &Product { w, x, n, out, at, stride }, p0, p1 });
    });
}

/// A job; `at` is its first place in the output. Panels of different units write different rows.
pub(super) struct Product<'a> {
    pub(super) w: &'a Matrix,
    pub(super) x: Columns<'a>,
    pub(super) n: usize,
    pub(super) out: SharedOut<'a, f32>,
    pub(super) at: usize,
    pub(super) stride: usize,
}

struct Panels<'a> {
    product: &'a Product<'a>,
    p0: usize,
    p1: usize,
}

impl Op for Panels<'_> {
    type Out = ();

    fn scalar(self) {
        let Product { w, x, n, out, at, stride } = *self.product;
        for p in self.p0..self.p1 {
            for c in 0..n {
                // SAFETY: this unit owns these rows of every column.
                let out = unsafe { out.slice(c * stride + at + p * PANEL, PANEL) };
                match x {
                    Columns::Packed(a) => scalar_panel(w, p, &a, c, out),
                    Columns::Plain(x) => f32_tile::scalar_panel(w, p, &x[c * w.k()..(c + 1) * w.k()], out),
                }
            }
        }
    }

    #[inline(always)]
    fn simd<S: Simd>(self, s: S) {
        match (self.product.w.dtype(), self.product.w.form()) {
            (Dtype::F32, _) => f32_tile::panels::<S, f32_tile::AsF32>(s, self.product, self.p0, self.p1),
            (Dtype::F16, _) => f32_tile::panels::<S, f32_tile::AsF16>(s, self.product, self.p0, self.p1),
            (Dtype::Q4_0, _) => self.walk::<S, Small<4, false, false>>(s, S::TILE4, S::GEMV[0]),
            (Dtype::Q4_1, _) => self.walk::<S, Small<4, false, true>>(s, S::TILE4, S::GEMV[0]),
            (Dtype::Q5_0, _) => self.walk::<S, Small<5, true, false>>(s, S::TILE4, S::GEMV[0]),
            (Dtype::Q5_1, _) => self.walk::<S, Small<5, true, true>>(s, S::TILE4, S::GEMV[0]),
            (_, Form::Blocks32(_)) => self.walk::<S, Small<8, false, false>>(s, S::TILE8, S::GEMV[1]),
            (_, Form::SuperMin { five: false }) => self.walk::<S, SuperMin<4>>(s, S::TILE_K, S::GEMV[2]),
            (_, Form::SuperMin { five: true }) => self.walk::<S, SuperMin<5>>(s, S::TILE_K, S::GEMV[2]),
            (_, Form::SuperSigned) => self.walk::<S, SuperSigned>(s, S::TILE_K, S::GEMV[2]),
            (_, Form::Codes(f)) if f.is_super() => self.walk::<S, SuperCodes>(s, S::TILE_K, S::GEMV[2]),
            (_, Form::Codes(_)) => self.walk::<S, Codes32>(s, S::TILE8, S::GEMV[1]),
            (_, Form::Float) => f32_tile::panels::<S, f32_tile::AsBf16>(s, self.product, self.p0, self.p1),
        }
    }
}

/// The definition, for the 16 rows of a panel and one column.
fn scalar_panel(w: &Matrix, p: usize, a: &Acts<'_>, c: usize, out: &mut [f32]) {
    let (form, k, panel) = (w.form(), w.k(), w.panel(p));
    let block = form.block_len();
    let mut q = [0i8; 256];
    out.fill(0.0);
    for b in 0..k / block {
        let da = act::read_block(a, c, b, &mut q[..block]);
        for (r, acc) in out.iter_mut().enumerate() {
            *acc = add_block(form, *acc, &Decoded::new(form, k, panel, r, b), &q[..block], da);
        }
    }
}

/// The chain through one block.
fn add_block(form: &Form, acc: f32, w: &Decoded, q: &[i8], da: f32) -> f32 {
    let dot = |w: &[i16], q: &[i8]| w.iter().zip(q).map(|(&w, &q)| i32::from(w) * i32::from(q)).sum::<i32>();
    let sum = |q: &[i8]| q.iter().map(|&q| i32::from(q)).sum::<i32>();
    match form {
        Form::Blocks32(f) if f.m => acc + (dot(&w.q, q) as f32 * (w.d * da) + sum(q) as f32 * (w.dmin * da)),
        Form::Codes(f) if f.parts == 2 => {
            let acc = acc + dot(&w.q, &q[..16]) as f32 * (w.d * da);
            acc + dot(&w.q[16..], &q[16..]) as f32 * (w.dmin * da)
        }
        _ => {
            let (mut isum, mut msum) = (0, 0);
            for (s, q) in q.chunks_exact(16).enumerate() {
                isum += w.scale[s] * dot(&w.q[s * 16..], q);
                msum += w.min[s] * sum(q);
            }
            let term = isum as f32 * (w.d * da);
            let has_min = matches!(form, Form::SuperMin { .. }) || matches!(form, Form::Codes(f) if f.has_min());
            acc + if has_min { term - msum as f32 * (w.dmin * da) } else { term }
        }
    }
}

/// A quantised format on lanes.
trait Quant {
    /// Computes a register tile: `RV` vectors of rows times `NC` columns over all of K.
    ///
    /// # Safety
    /// `rows[v]` points at the panel of vector v, `lane[v]` is its first row in that panel; `acts` at a tile of NC
    /// packed columns; `out + c * stride + v * LANES` is writable.
    unsafe fn tile<S: Simd, const RV: usize, const NC: usize>(s: S, t: &Tile<'_, RV>);
}

/// Where a register tile reads and writes.
struct Tile<'a, const RV: usize> {
    panel: [*const u8; RV],
    lane: [usize; RV],
    nb: usize,
    acts: *const u32,
    out: *mut f32,
    stride: usize,
    /// For the types of codes.
    codes: Option<&'a CodesForm>,
}

impl Panels<'_> {
    /// Row groups outside, column tiles inside: a group of panels stays in cache while the columns stream by.
    #[inline(always)]
    fn walk<S: Simd, Q: Quant>(&self, s: S, shape: TileShape, gemv: usize) {
        let Columns::Packed(a) = self.product.x else { return };
        let rv = if a.n == 1 { gemv } else { shape.rv };
        let (mut row, end) = (self.p0 * PANEL, self.p1 * PANEL);
        while row < end {
            let rv = rv.min((end - row) / S::LANES);
            let mut c = 0;
            while c < a.n {
                let nc = act::tile_columns(a.kind.nc, a.n - c);
                self.tile_of::<S, Q>(s, &a, rv, row, nc, c);
                c += nc;
            }
            row += rv * S::LANES;
        }
    }

    #[inline(always)]
    fn tile_of<S: Simd, Q: Quant>(&self, s: S, a: &Acts<'_>, rv: usize, row: usize, nc: usize, c: usize) {
        macro_rules! shapes {
            ($(($rv:literal, $nc:literal))*) => {
                match (rv, nc) {
                    $(($rv, $nc) if const { uses::<S>($rv, $nc) } => self.tile::<S, Q, $rv, $nc>(s, a, row, c),)*
                    _ => unreachable!("a tile shape that no instruction set names"),
                }
            };
        }
        shapes!(
            (1, 1)(2, 1)(3, 1)(4, 1)(1, 2)(2, 2)(3, 2)(4, 2)(1, 3)(2, 3)(3, 3)(4, 3)(1, 4)(2, 4)(3, 4)(4, 4)(1, 5)(
                2, 5
            )(1, 6)(2, 6)
        );
    }

    // WebAssembly has no boundary of features to stay inside, and its engines do poorly on one huge function
    #[cfg_attr(not(target_family = "wasm"), inline(always))]
    #[cfg_attr(target_family = "wasm", inline(never))]
    fn tile<S: Simd, Q: Quant, const RV: usize, const NC: usize>(&self, s: S, a: &Acts<'_>, row: usize, c: usize) {
        let p = self.product;
        let block_words = a.k / a.kind.block * a.kind.words();
        let at = |v: usize| row + v * S::LANES;
        let tile = Tile {
            panel: core::array::from_fn(|v| p.w.panel(at(v) / PANEL).as_ptr()),
            lane: core::array::from_fn(|v| at(v) % PANEL),
            nb: a.k / a.kind.block,
            acts: a.words[c * block_words..(c + NC) * block_words].as_ptr(),
            out: p.out.ptr(c * p.stride + p.at + row, (NC - 1) * p.stride + RV * S::LANES),
            stride: p.stride,
            codes: if let Form::Codes(f) = p.w.form() { Some(f) } else { None },
        };
        // SAFETY: the panels hold `nb` blocks, the slice and `ptr` above checked the columns and the output.
        unsafe { Q::tile::<S, RV, NC>(s, &tile) }
    }
}

/// Whether an instruction set can come to that shape: keeps the others out of the binary.
const fn uses<S: Simd>(rv: usize, nc: usize) -> bool {
    let shapes = [S::TILE4, S::TILE8, S::TILE_K];
    let mut i = 0;
    while i < 3 {
        let whole = S::LANES * shapes[i].rv <= PANEL;
        let fits = if whole { rv == shapes[i].rv } else { rv <= shapes[i].rv };
        if (fits && nc <= shapes[i].nc) || (nc == 1 && (rv == S::GEMV[i] || (!whole && rv <= S::GEMV[i]))) {
            return true;
        }
        i += 1;
    }
    false
}

/// Blocks of 32: `BITS` per quant, `HIGH` = a plane of fifth bits, `MIN` = a minimum.
struct Small<const BITS: u32, const HIGH: bool, const MIN: bool>;

/// How far ahead decoding prefetches, in bytes of quants.
const AHEAD: usize = 2048;

impl<const BITS: u32, const HIGH: bool, const MIN: bool> Quant for Small<BITS, HIGH, MIN> {
    #[inline(always)]
    unsafe fn tile<S: Simd, const RV: usize, const NC: usize>(s: S, t: &Tile<'_, RV>) {
        let nibbles = BITS < 8;
        let lines = if nibbles { 4 } else { 8 };
        let bound = s.bound(lines);
        let qb = 64 * (lines + HIGH as usize);
        let aw = S::rec(BITS).words();
        // SAFETY: offsets stay inside the panels, columns and outputs that the caller vouches for.
        unsafe {
            let mut acc = [[s.splat(0.0); NC]; RV];
            let mut rec = t.acts;
            for b in 0..t.nb {
                let quants: [*const u8; RV] = core::array::from_fn(|v| t.panel[v].add(b * qb + t.lane[v] * 4));
                if NC == 1 {
                    for v in 0..RV {
                        if t.lane[v] == 0 {
                            let scales = t.panel[v].wrapping_add(t.nb * qb + b * 32);
                            s.prefetch(scales.wrapping_add(AHEAD / 8));
                            for l in 0..qb / 64 {
                                s.prefetch(quants[v].wrapping_add(AHEAD + l * 64));
                            }
                        }
                    }
                }
                let first = |c: usize| if MIN { 0 } else { rec.add(NC + c).read() as i32 };
                let mut dots: [[S::Acc; NC]; RV] =
                    core::array::from_fn(|_| core::array::from_fn(|c| s.acc::<BITS>(first(c))));
                let high: [S::B; RV] =
                    core::array::from_fn(|v| s.load_b(quants[v].add(if HIGH { lines * 64 } else { 0 })));
                for l in 0..bound {
                    let line: [S::B; RV] = core::array::from_fn(|v| s.load_b(quants[v].add(l * 64)));
                    for half in 0..if nibbles { 2 } else { 1 } {
                        let g = l + half * 4;
                        let w: [S::W; RV] = core::array::from_fn(|v| match (nibbles, HIGH) {
                            (false, _) => s.weights(line[v]),
                            (true, false) if half == 0 => s.weights_lo4(line[v]),
                            (true, false) => s.weights_hi4(line[v]),
                            (true, true) => {
                                let low = s.and_b(if half == 0 { line[v] } else { s.shr16_b(line[v], 4) }, 15);
                                s.weights(s.or_b(low, fifth_bit(s, high[v], l, half)))
                            }
                        });
                        for c in 0..NC {
                            let a = s.act::<BITS>(rec.add(2 * NC + (g * NC + c) * aw));
                            for v in 0..RV {
                                dots[v][c] = s.dot::<BITS>(dots[v][c], w[v], a);
                            }
                        }
                    }
                }
                for v in 0..RV {
                    let scales = t.panel[v].add(t.nb * qb + b * 32 + t.lane[v] * 2);
                    let d = s.load_f16(scales.cast());
                    let m = if MIN { s.load_f16(scales.add(t.nb * 32).cast()) } else { d };
                    for c in 0..NC {
                        let da = s.splat(f32::from_bits(rec.add(c).read()));
                        let isum = s.to_f32(s.total::<BITS>(dots[v][c], first(c)));
                        let mut term = s.mul(isum, s.mul(d, da));
                        if MIN {
                            let asum = s.splat(rec.add(NC + c).read() as i32 as f32);
                            term = s.add(term, s.mul(asum, s.mul(m, da)));
                        }
                        acc[v][c] = s.add(acc[v][c], term);
                    }
                }
                rec = rec.add((2 + 8 * aw) * NC);
            }
            store(s, &acc, t);
        }
    }
}

/// The fifth bits of group `l + 4 * half`, at bit 4 of each byte.
#[inline(always)]
fn fifth_bit<S: Simd>(s: S, plane: S::B, l: usize, half: usize) -> S::B {
    let b = if half == 0 { s.shl16_b(plane, 4 - l as u32) } else { s.shr16_b(plane, l as u32) };
    s.and_b(b, 16)
}

#[inline(always)]
unsafe fn store<S: Simd, const RV: usize, const NC: usize>(s: S, acc: &[[S::F; NC]; RV], t: &Tile<'_, RV>) {
    for (v, acc) in acc.iter().enumerate() {
        for (c, acc) in acc.iter().enumerate() {
            // SAFETY: the caller's tile.
            unsafe { s.store(t.out.add(c * t.stride + v * S::LANES), *acc) }
        }
    }
}

/// Q4_K and Q5_K: unsigned quants, eight sub-blocks with 6-bit scales and minima.
struct SuperMin<const BITS: u32>;

impl<const BITS: u32> Quant for SuperMin<BITS> {
    #[inline(always)]
    unsafe fn tile<S: Simd, const RV: usize, const NC: usize>(s: S, t: &Tile<'_, RV>) {
        let (bytes, meta) = if BITS == 5 { (2880, 2560) } else { (2368, 2048) };
        let aw = S::rec(BITS).words();
        // the chunk loop stays rolled (opaque bound): unrolled, the compiler interleaves the sub-blocks and spills
        let chunks = core::hint::black_box(4usize);
        let eight = s.bound(8);
        // SAFETY: offsets stay inside the panels, columns and outputs that the caller vouches for.
        unsafe {
            let mut acc = [[s.splat(0.0); NC]; RV];
            let mut rec = t.acts;
            for b in 0..t.nb {
                let o: [*const u8; RV] = core::array::from_fn(|v| t.panel[v].add(b * bytes));
                if NC == 1 {
                    prefetch_record(s, t, o, bytes);
                }
                let mut isum = [[s.splat_i(0); NC]; RV];
                let groups = rec.add(5 * NC);
                for chunk in 0..chunks {
                    for half in 0..2 {
                        let sub = chunk * 2 + half;
                        let mut dots: [[S::Acc; NC]; RV] = [[s.acc::<BITS>(0); NC]; RV];
                        for g in 0..eight {
                            let w: [S::W; RV] = core::array::from_fn(|v| {
                                let line = s.load_b(o[v].add((chunk * 8 + g) * 64 + t.lane[v] * 4));
                                if BITS == 5 {
                                    let plane = s.load_b(o[v].add(2048 + g * 64 + t.lane[v] * 4));
                                    let bit = s.and_b(s.shl16_b(s.and_b(s.shr16_b(plane, sub as u32), 1), 4), 16);
                                    let low = s.and_b(if half == 0 { line } else { s.shr16_b(line, 4) }, 15);
                                    s.weights(s.or_b(low, bit))
                                } else if half == 0 {
                                    s.weights_lo4(line)
                                } else {
                                    s.weights_hi4(line)
                                }
                            });
                            for c in 0..NC {
                                let a = s.act::<BITS>(groups.add(((sub * 8 + g) * NC + c) * aw));
                                for v in 0..RV {
                                    dots[v][c] = s.dot::<BITS>(dots[v][c], w[v], a);
                                }
                            }
                        }
                        for v in 0..RV {
                            let scale = s.load_u8(o[v].add(meta + sub * 16 + t.lane[v]));
                            for c in 0..NC {
                                isum[v][c] = s.add_i(isum[v][c], s.total_scaled::<BITS>(dots[v][c], scale));
                            }
                        }
                    }
                }
                for v in 0..RV {
                    let d = s.load_f16(o[v].add(meta + 256 + t.lane[v] * 2).cast());
                    let dmin = s.load_f16(o[v].add(meta + 288 + t.lane[v] * 2).cast());
                    for c in 0..NC {
                        let mut msum = s.splat_i(0);
                        for j in 0..4 {
                            let mins = o[v].add(meta + 128 + j * 32 + t.lane[v] * 2);
                            msum = s.pair_dot(msum, mins, rec.add((1 + j) * NC + c).read());
                        }
                        let da = s.splat(f32::from_bits(rec.add(c).read()));
                        let term = s.mul(s.to_f32(isum[v][c]), s.mul(d, da));
                        let min = s.mul(s.to_f32(msum), s.mul(dmin, da));
                        acc[v][c] = s.add(acc[v][c], s.sub(term, min));
                    }
                }
                rec = rec.add((5 + 64 * aw) * NC);
            }
            store(s, &acc, t);
        }
    }
}

/// Asks for the next record of each panel.
#[inline(always)]
fn prefetch_record<S: Simd, const RV: usize>(s: S, t: &Tile<'_, RV>, o: [*const u8; RV], bytes: usize) {
    for v in 0..RV {
        if t.lane[v] == 0 {
            for l in 0..bytes / 64 {
                s.prefetch(o[v].wrapping_add(bytes + l * 64));
            }
        }
    }
}

/// Q6_K: 6-bit quants stored with 32 added, sixteen sub-blocks with signed scales.
struct SuperSigned;

impl Quant for SuperSigned {
    #[inline(always)]
    unsafe fn tile<S: Simd, const RV: usize, const NC: usize>(s: S, t: &Tile<'_, RV>) {
        const BITS: u32 = 6;
        let bytes = 3392;
        let aw = S::rec(BITS).words();
        let chunks = core::hint::black_box(8usize); // rolled, as above
        // SAFETY: offsets stay inside the panels, columns and outputs that the caller vouches for.
        unsafe {
            let mut acc = [[s.splat(0.0); NC]; RV];
            let mut rec = t.acts;
            for b in 0..t.nb {
                let o: [*const u8; RV] = core::array::from_fn(|v| t.panel[v].add(b * bytes));
                if NC == 1 {
                    prefetch_record(s, t, o, bytes);
                }
                let mut isum = [[s.splat_i(0); NC]; RV];
                let groups = rec.add(17 * NC);
                for chunk in 0..chunks {
                    for half in 0..2 {
                        let sub = chunk * 2 + half;
                        let first = |c: usize| rec.add((1 + sub) * NC + c).read() as i32;
                        let mut dots: [[S::Acc; NC]; RV] =
                            core::array::from_fn(|_| core::array::from_fn(|c| s.acc::<BITS>(first(c))));
                        let high: [S::B; RV] =
                            core::array::from_fn(|v| s.load_b(o[v].add(2048 + sub * 64 + t.lane[v] * 4)));
                        for i in 0..4 {
                            let w: [S::W; RV] = core::array::from_fn(|v| {
                                let line = s.load_b(o[v].add((chunk * 4 + i) * 64 + t.lane[v] * 4));
                                let low = s.and_b(if half == 0 { line } else { s.shr16_b(line, 4) }, 15);
                                let two = if i < 2 {
                                    s.shl16_b(high[v], 4 - 2 * i as u32)
                                } else {
                                    s.shr16_b(high[v], 2 * i as u32 - 4)
                                };
                                s.weights(s.or_b(low, s.and_b(two, 0x30)))
                            });
                            for c in 0..NC {
                                let a = s.act::<BITS>(groups.add(((sub * 4 + i) * NC + c) * aw));
                                for v in 0..RV {
                                    dots[v][c] = s.dot::<BITS>(dots[v][c], w[v], a);
                                }
                            }
                        }
                        for v in 0..RV {
                            let scale = s.load_i8(o[v].add(3072 + sub * 16 + t.lane[v]).cast());
                            for c in 0..NC {
                                let dot = s.total::<BITS>(dots[v][c], first(c));
                                isum[v][c] = s.add_i(isum[v][c], s.mul_i(dot, scale));
                            }
                        }
                    }
                }
                for v in 0..RV {
                    let d = s.load_f16(o[v].add(3328 + t.lane[v] * 2).cast());
                    for c in 0..NC {
                        let da = s.splat(f32::from_bits(rec.add(c).read()));
                        acc[v][c] = s.add(acc[v][c], s.mul(s.to_f32(isum[v][c]), s.mul(d, da)));
                    }
                }
                rec = rec.add((17 + 64 * aw) * NC);
            }
            store(s, &acc, t);
        }
    }
}

/// Codes in blocks of 32, with one scale or one for each half.
struct Codes32;

impl Quant for Codes32 {
    #[inline(always)]
    unsafe fn tile<S: Simd, const RV: usize, const NC: usize>(s: S, t: &Tile<'_, RV>) {
        let Some(f) = t.codes else { return };
        let (qb, aw) = (f.chunk_bytes(), S::rec(8).words());
        let halves = 2 / f.parts; // of a part
        // SAFETY: offsets stay inside the panels, columns and outputs that the caller vouches for.
        unsafe {
            let table = s.load_table(f.offset_table.as_ptr());
            let mut acc = [[s.splat(0.0); NC]; RV];
            let mut rec = t.acts;
            for b in 0..t.nb {
                let quants: [*const u8; RV] = core::array::from_fn(|v| t.panel[v].add(b * qb + t.lane[v] * 4));
                if NC == 1 {
                    for v in 0..RV {
                        if t.lane[v] == 0 {
                            for l in 0..f.width {
                                s.prefetch(quants[v].wrapping_add(AHEAD + l * 64));
                            }
                        }
                    }
                }
                let groups = rec.add((1 + f.parts) * NC);
                for part in 0..f.parts {
                    let first = |c: usize| rec.add((1 + part) * NC + c).read() as i32;
                    let mut dots: [[S::Acc; NC]; RV] =
                        core::array::from_fn(|_| core::array::from_fn(|c| s.acc::<8>(first(c))));
                    for half in part * halves..(part + 1) * halves {
                        four_groups(s, f, table, quants, half, groups.add(half * 4 * NC * aw), &mut dots);
                    }
                    for v in 0..RV {
                        let scales = t.panel[v].add(t.nb * qb + (part * t.nb + b) * 32 + t.lane[v] * 2);
                        let d = if f.bf16() { s.load_bf16(scales.cast()) } else { s.load_f16(scales.cast()) };
                        for c in 0..NC {
                            let da = s.splat(f32::from_bits(rec.add(c).read()));
                            let isum = s.to_f32(s.total::<8>(dots[v][c], first(c)));
                            acc[v][c] = s.add(acc[v][c], s.mul(isum, s.mul(d, da)));
                        }
                    }
                }
                rec = rec.add((1 + f.parts + 8 * aw) * NC);
            }
            store(s, &acc, t);
        }
    }
}

/// Adds half a chunk of codes, 16 elements, to the dots: `groups` are its activations, `quants` the chunk.
///
/// # Safety
/// The chunk and the activations are there.
#[inline(always)]
unsafe fn four_groups<S: Simd, const RV: usize, const NC: usize>(
    s: S,
    f: &CodesForm,
    table: S::B,
    quants: [*const u8; RV],
    half: usize,
    groups: *const u32,
    dots: &mut [[S::Acc; NC]; RV],
) {
    let (aw, mask) = (S::rec(8).words(), (1u8 << f.width) - 1);
    // SAFETY: the caller's.
    unsafe {
        for i in 0..4 {
            let (line, shift) = code_line(half * 4 + i, f.width);
            let w: [S::W; RV] = core::array::from_fn(|v| {
                let code = s.and_b(s.shr16_b(s.load_b(quants[v].add(line * 64)), shift as u32), mask);
                s.weights(s.look_up(table, code))
            });
            for c in 0..NC {
                let a = s.act::<8>(groups.add((i * NC + c) * aw));
                for v in 0..RV {
                    dots[v][c] = s.dot::<8>(dots[v][c], w[v], a);
                }
            }
        }
    }
}

/// Codes in super-blocks of 256: sixteen sub-blocks with signed scales, in Q2_K minima too.
///
/// Sums fit in i32: a dot of 16 is at most 16 * 127 * 127, scales are -32..=31, and 16 * 32 of those are below 2^28.
struct SuperCodes;

impl Quant for SuperCodes {
    #[inline(always)]
    unsafe fn tile<S: Simd, const RV: usize, const NC: usize>(s: S, t: &Tile<'_, RV>) {
        let Some(f) = t.codes else { return };
        let (bytes, scales, aw) = (f.record_bytes(), f.scales(), S::rec(8).words());
        let head = if f.has_min() { 25 } else { 17 };
        let chunks = core::hint::black_box(8usize); // rolled, as above
        // SAFETY: offsets stay inside the panels, columns and outputs that the caller vouches for.
        unsafe {
            let table = s.load_table(f.offset_table.as_ptr());
            let mut acc = [[s.splat(0.0); NC]; RV];
            let mut rec = t.acts;
            for b in 0..t.nb {
                let o: [*const u8; RV] = core::array::from_fn(|v| t.panel[v].add(b * bytes));
                if NC == 1 {
                    prefetch_record(s, t, o, bytes);
                }
                let mut isum = [[s.splat_i(0); NC]; RV];
                let groups = rec.add(head * NC);
                for chunk in 0..chunks {
                    let quants: [*const u8; RV] =
                        core::array::from_fn(|v| o[v].add(chunk * f.chunk_bytes() + t.lane[v] * 4));
                    for half in 0..2 {
                        let sub = chunk * 2 + half;
                        let first = |c: usize| rec.add((1 + sub) * NC + c).read() as i32;
                        let mut dots: [[S::Acc; NC]; RV] =
                            core::array::from_fn(|_| core::array::from_fn(|c| s.acc::<8>(first(c))));
                        four_groups(s, f, table, quants, half, groups.add(sub * 4 * NC * aw), &mut dots);
                        for v in 0..RV {
                            let scale = s.load_i8(o[v].add(scales + sub * 16 + t.lane[v]).cast());
                            for c in 0..NC {
                                let dot = s.total::<8>(dots[v][c], first(c));
                                isum[v][c] = s.add_i(isum[v][c], s.mul_i(dot, scale));
                            }
                        }
                    }
                }
                for v in 0..RV {
                    let d = s.load(o[v].add(scales + 256 + t.lane[v] * 4).cast());
                    for c in 0..NC {
                        let da = s.splat(f32::from_bits(rec.add(c).read()));
                        let mut term = s.mul(s.to_f32(isum[v][c]), s.mul(d, da));
                        if f.has_min() {
                            let mut msum = s.splat_i(0);
                            for j in 0..8 {
                                let mins = o[v].add(scales + 320 + j * 32 + t.lane[v] * 2);
                                msum = s.pair_dot(msum, mins, rec.add((17 + j) * NC + c).read());
                            }
                            let dmin = s.load(o[v].add(scales + 576 + t.lane[v] * 4).cast());
                            term = s.sub(term, s.mul(s.to_f32(msum), s.mul(dmin, da)));
                        }
                        acc[v][c] = s.add(acc[v][c], term);
                    }
                }
                rec = rec.add((head + 64 * aw) * NC);
            }
            store(s, &acc, t);
        }
    }
}

/// Panels `p0..p1` of a job.
#[derive(Clone, Copy)]
struct Unit {
    job: usize,
    p0: usize,
    p1: usize,
}

/// Cuts the jobs into units: a few per thread, so that a late thread can be helped, but each a long stream.
fn units(jobs: &[Job<'_>], threads: usize) -> Vec<Unit> {
    let mut units = Vec::new();
    for (job, Job { w, .. }) in jobs.iter().enumerate() {
        let panels = w.panels();
        let long = UNIT_BYTES.div_ceil(w.panel_bytes().max(1));
        let per = match threads {
            1 => panels,
            _ => panels.div_ceil(threads * 4).max(long.min(panels.div_ceil(threads))).next_multiple_of(UNIT_PANELS),
        };
        units.extend((0..panels).step_by(per).map(|p0| Unit { job, p0, p1: (p0 + per).min(panels) }));
    }
    units
}

/// Weights of a unit, at least: long enough to stream.
const UNIT_BYTES: usize = 64 * 1024;
/// Whole register tiles of every instruction set.
const UNIT_PANELS: usize = 12;

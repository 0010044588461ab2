//! Matrix products (gemm and gemv): packed weight panels times packed activation columns.
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
//! In NVFP4 each half of a block, 16 elements with their own `d_w`, is a step of its own.
//!
//! A product is cut into tasks of whole panels; a task computes its rows for all columns, so any assignment of tasks to
//! threads gives the same bits. Inside a task, register tiles of rows x columns iterate over the whole of K.
#![allow(unsafe_code)]

pub mod f32_tile;
pub(in crate::kernels) mod partition;

use core::marker::PhantomData;

use self::f32_tile::{AsBf16, AsF16, AsF32, Elem};
use self::partition::{MatmulTask, split_into_tasks};
use crate::kernels::act::{self, Floats, PackedActs};
use crate::kernels::cpu::Op;
use crate::kernels::decoded::Decoded;
use crate::kernels::i16_fields::HAS_I16_FIELDS;
use crate::kernels::panel::{Matrix, PANEL};
use crate::kernels::panel_layout::PanelLayout;
use crate::kernels::simd::{FEW_TILES, Simd, TileShape, each};
use crate::kernels::tiles::{
    Block32, Codes32, QuantFormat, SuperCodes, SuperMin, SuperSigned, TileArgs, TileClass, UnpackBuffer, WeightPrefetch,
};
use crate::kernels::{Cpu, SharedOut, tasks};
use crate::pool::Pool;
use crate::quant::Dtype;

/// The columns (activations) of a product.
#[derive(Clone, Copy)]
pub enum Columns<'a> {
    /// Quantised and packed, for quantised weights.
    Packed(PackedActs<'a>),
    /// f32 rows, for float weights.
    Plain(Floats<'a>),
}

impl Columns<'_> {
    /// Number of columns.
    pub(in crate::kernels) fn n(&self) -> usize {
        match self {
            Columns::Packed(a) => a.n,
            Columns::Plain(x) => x.n(),
        }
    }
}

/// The product of one matrix, as a part of a parallel region.
#[derive(Clone, Copy)]
pub struct MatmulJob<'a> {
    /// The weights.
    pub w: &'a Matrix,
    /// The columns.
    pub x: Columns<'a>,
    /// Index in the output of the first column.
    pub out_column: usize,
    /// Row in an output column where the rows of this product begin.
    pub out_row: usize,
}

/// Several products in one parallel region: `out[(out_column + c) * stride + out_row + row] = sum_k w[row][k] *
/// x[c][k]` for each job, all its rows and columns. Padding rows, up to a whole panel, are written as 0.
///
/// # Panics
/// If the rows of jobs, in whole panels, overlap or do not fit `stride`; if jobs are not in order of their columns; if
/// columns were packed for another type of weights.
pub fn products(cpu: Cpu, pool: &dyn Pool, jobs: &[MatmulJob<'_>], out: &mut [f32], stride: usize) {
    let (mut columns, mut end) = (0..0, 0);
    for job in jobs {
        let (k, n) = (job.w.k(), job.x.n());
        let mine = job.out_column..job.out_column + n;
        if mine != columns {
            assert!(mine.start >= columns.end, "jobs must be in order of their columns");
            (columns, end) = (mine, 0);
        }
        assert!(job.out_row >= end, "rows of jobs overlap or are not in order");
        end = job.out_row + job.w.panels() * PANEL;
        assert!(n > 0 && end <= stride && out.len() >= columns.end * stride);
        match job.x {
            Columns::Packed(a) => {
                assert!(a.k == k && a.words.len() >= a.layout.len_words(n, k));
                assert!(
                    Some(a.layout) == act::ActLayout::of(cpu, job.w.dtype()),
                    "columns packed for another type of weights"
                );
            }
            Columns::Plain(x) => {
                let is_whole = x.stride >= k && x.x.len() >= (n - 1) * x.stride + k;
                assert!(is_whole, "columns shorter than the rows of the weights");
            }
        }
    }
    let all_tasks = split_into_tasks(jobs, pool.threads());
    let out = SharedOut::new(out);
    tasks::run(pool, all_tasks.len(), &|i, _| {
        let MatmulTask { job, p0, p1 } = all_tasks[i];
        let MatmulJob { w, x, out_column, out_row } = jobs[job];
        let prefetch_next =
            tasks::likely_next(i, all_tasks.len(), pool.threads()).map_or(&[][..], |i| all_tasks[i].weights(jobs));
        let (n, at) = (x.n(), out_column * stride + out_row);
        Panels { product: &Product { w, x, n, out, at, stride }, p0, p1, prefetch_next }.run(cpu);
    });
}

/// A job with its output; `at` is the index of its first element there. Different tasks write different rows.
pub(in crate::kernels) struct Product<'a> {
    pub(in crate::kernels) w: &'a Matrix,
    pub(in crate::kernels) x: Columns<'a>,
    pub(in crate::kernels) n: usize,
    pub(in crate::kernels) out: SharedOut<'a, f32>,
    pub(in crate::kernels) at: usize,
    pub(in crate::kernels) stride: usize,
}

/// Panels `p0..p1` of a product.
#[derive(Clone, Copy)]
pub(in crate::kernels) struct Panels<'a> {
    pub(in crate::kernels) product: &'a Product<'a>,
    pub(in crate::kernels) p0: usize,
    pub(in crate::kernels) p1: usize,
    /// Weights that this thread is likely to read next, prefetched at the end of the task.
    pub(in crate::kernels) prefetch_next: &'a [u8],
}

impl Panels<'_> {
    /// Computes the panels. Each format is an operation of its own: a single function for all would take a megabyte of
    /// code.
    fn run(self, cpu: Cpu) {
        #[cfg(target_arch = "x86_64")]
        if let (Columns::Packed(a), Some(amx)) = (self.product.x, cpu.amx())
            && a.layout.amx_columns(a.n) > 0
        {
            crate::kernels::isa::x86_64::amx::gemm(amx, self, &a);
        }
        match (self.product.w.dtype(), self.product.w.layout()) {
            (Dtype::F32, _) => cpu.run(FloatPanels::<AsF32>(self, PhantomData)),
            (Dtype::F16, _) => cpu.run(FloatPanels::<AsF16>(self, PhantomData)),
            (Dtype::Q4_0, _) => cpu.run(QuantPanels::<Block32<4, false>>(self, PhantomData)),
            (Dtype::Q4_1, _) => cpu.run(QuantPanels::<Block32<4, true>>(self, PhantomData)),
            (Dtype::Q5_0, _) => cpu.run(QuantPanels::<Block32<5, false>>(self, PhantomData)),
            (Dtype::Q5_1, _) => cpu.run(QuantPanels::<Block32<5, true>>(self, PhantomData)),
            (_, PanelLayout::Blocks32(_)) => cpu.run(QuantPanels::<Block32<8, false>>(self, PhantomData)),
            (_, PanelLayout::SuperMin { five: false }) => cpu.run(QuantPanels::<SuperMin<4>>(self, PhantomData)),
            (_, PanelLayout::SuperMin { five: true }) => cpu.run(QuantPanels::<SuperMin<5>>(self, PhantomData)),
            (_, PanelLayout::SuperSigned) => cpu.run(QuantPanels::<SuperSigned>(self, PhantomData)),
            (_, PanelLayout::Codes(f)) if f.is_super() => cpu.run(QuantPanels::<SuperCodes>(self, PhantomData)),
            (_, PanelLayout::Codes(_)) => cpu.run(QuantPanels::<Codes32>(self, PhantomData)),
            (_, PanelLayout::Float) => cpu.run(FloatPanels::<AsBf16>(self, PhantomData)),
        }
    }

    fn scalar(self) {
        let Product { w, x, n, out, at, stride } = *self.product;
        for p in self.p0..self.p1 {
            for c in 0..n {
                // SAFETY: this task owns these rows of every column.
                let out = unsafe { out.slice(c * stride + at + p * PANEL, PANEL) };
                match x {
                    Columns::Packed(a) => scalar_panel(w, p, &a, c, out),
                    Columns::Plain(x) => f32_tile::scalar_panel(w, p, &x.x[c * x.stride..][..w.k()], out),
                }
            }
        }
    }
}

struct FloatPanels<'a, E>(Panels<'a>, PhantomData<E>);

impl<E: Elem> Op for FloatPanels<'_, E> {
    type Out = ();
    fn scalar(self) {
        self.0.scalar();
    }
    #[inline(always)]
    fn simd<S: Simd>(self, s: S) {
        f32_tile::panels::<S, E>(s, self.0);
    }
}

struct QuantPanels<'a, Q>(Panels<'a>, PhantomData<Q>);

impl<Q: QuantFormat> Op for QuantPanels<'_, Q> {
    type Out = ();
    const DOTS: bool = true;
    fn scalar(self) {
        self.0.scalar();
    }
    #[inline(always)]
    fn simd<S: Simd>(self, s: S) {
        let bits = const { if UnpackBuffer::groups::<S, Q>() > 0 { Some(Q::BITS) } else { None } };
        let unpacks = const { UnpackBuffer::is_used::<S, Q>() };
        let (panels, tiles) = (self.0, TilesOf(self, s));
        // modules without relaxed-simd share one loop for all formats
        #[cfg(any(not(target_family = "wasm"), target_feature = "relaxed-simd"))]
        let tiles = &tiles;
        #[cfg(all(target_family = "wasm", not(target_feature = "relaxed-simd")))]
        let tiles: &dyn Tiles = &tiles;
        TileLoop { panels, s, class: Q::TILE_CLASS, unpacks, bits, tiles }.run();
    }
}

/// The tiles of a weight format on an instruction set.
trait Tiles {
    /// Computes a tile of `rv` vectors and one column.
    fn gemv(&self, a: &PackedActs<'_>, at: TilePosition, rv: usize);
    /// Computes a tile of `rv` vectors and `nc` columns.
    fn gemm(&self, a: &PackedActs<'_>, at: TilePosition, rv: usize, nc: usize);
}

struct TilesOf<'a, Q, S>(QuantPanels<'a, Q>, S);

impl<Q: QuantFormat, S: Simd> Tiles for TilesOf<'_, Q, S> {
    #[inline(always)]
    fn gemv(&self, a: &PackedActs<'_>, at: TilePosition, rv: usize) {
        self.0.tile_of::<S, 1, 1>(self.1, a, at, rv, 1);
    }
    #[inline(always)]
    fn gemm(&self, a: &PackedActs<'_>, at: TilePosition, rv: usize, nc: usize) {
        self.0.tile_of::<S, 2, 6>(self.1, a, at, rv, nc);
    }
}

/// The loop over all tiles of some panels.
struct TileLoop<'a, S, T: ?Sized> {
    panels: Panels<'a>,
    s: S,
    class: TileClass,
    /// Whether products of several columns unpack weights or scales once.
    unpacks: bool,
    /// Bits of the weights that are unpacked, if any.
    bits: Option<u32>,
    tiles: &'a T,
}

/// Number of row vectors at a time for `n` columns: that of `tile`, or for one column `gemv` or a panel.
#[inline(always)]
pub(in crate::kernels) fn vectors_per_tile<S: Simd>(s: S, n: usize, gemv: usize, tile: TileShape) -> usize {
    match n {
        1 if s.prefetch_policy().interleaves_panels => gemv,
        1 => PANEL / S::LANES,
        _ => tile.rv,
    }
}

/// The scalar definition, for the 16 rows of a panel and one column.
fn scalar_panel(w: &Matrix, p: usize, a: &PackedActs<'_>, c: usize, out: &mut [f32]) {
    let (layout, k, panel) = (w.layout(), w.k(), w.panel(p));
    let block = layout.block_len();
    let mut q = [0i8; 256];
    out.fill(0.0);
    for b in 0..k / block {
        let da = act::read_block(a, c, b, &mut q[..block]);
        for (r, acc) in out.iter_mut().enumerate() {
            *acc = add_block(layout, *acc, &Decoded::new(layout, panel, r, b), &q[..block], da);
        }
    }
}

/// Adds one block to the accumulator `acc`.
fn add_block(layout: &PanelLayout, acc: f32, w: &Decoded, q: &[i8], da: f32) -> f32 {
    let dot = |w: &[i16], q: &[i8]| w.iter().zip(q).map(|(&w, &q)| i32::from(w) * i32::from(q)).sum::<i32>();
    let sum = |q: &[i8]| q.iter().map(|&q| i32::from(q)).sum::<i32>();
    match layout {
        PanelLayout::Blocks32(f) if f.m => {
            acc + (dot(&w.q, q) as f32 * (w.d * da) + sum(q) as f32 * (w.block_min * da))
        }
        PanelLayout::Codes(f) if f.parts == 2 => {
            let acc = acc + dot(&w.q, &q[..16]) as f32 * (w.d * da);
            acc + dot(&w.q[16..], &q[16..]) as f32 * (w.second_scale * da)
        }
        _ => {
            let (mut isum, mut msum) = (0, 0);
            for (s, q) in q.chunks_exact(16).enumerate() {
                isum += w.scale[s] * dot(&w.q[s * 16..], q);
                msum += w.min[s] * sum(q);
            }
            let term = isum as f32 * (w.d * da);
            let has_min = matches!(layout, PanelLayout::SuperMin { .. })
                || matches!(layout, PanelLayout::Codes(f) if f.has_min());
            acc + if has_min { term - msum as f32 * (w.min_scale * da) } else { term }
        }
    }
}

impl<S: Simd, T: Tiles + ?Sized> TileLoop<'_, S, T> {
    /// Row groups in the outer loop, column tiles in the inner one: a group of panels stays in cache while the columns
    /// pass.
    #[cfg_attr(any(not(target_family = "wasm"), target_feature = "relaxed-simd"), inline(always))]
    fn run(&self) {
        let TileLoop { s, panels, .. } = *self;
        let Columns::Packed(a) = panels.product.x else { return };
        let shape = self.class.tile::<S>();
        let whole = vectors_per_tile(s, if FEW_TILES { 1 } else { a.n }, self.class.gemv::<S>(), shape);
        let (mut row, end) = (panels.p0 * PANEL, panels.p1 * PANEL);
        while row < end {
            let group = if (end - row) / S::LANES < whole { 1 } else { whole };
            let mut c = a.layout.amx_columns(a.n);
            let prefetch = self.prefetch_after(row + group * S::LANES, whole * S::LANES);
            if self.unpacks {
                c = self.unpacked(&a, group, row, c, &prefetch);
                while c < a.n {
                    self.tiles.gemv(&a, TilePosition::packed(&a, row, c, WeightPrefetch::NONE), group);
                    c += 1;
                }
            } else {
                while c < a.n {
                    let nc = a.layout.columns(a.n, c);
                    let rv = if nc == 1 { group } else { shape.rv.min(group) };
                    let prefetch = prefetch.share(s, c..c + nc, a.n, a.k / 32);
                    for v in (0..group).step_by(rv) {
                        let at = TilePosition::packed(&a, row + v * S::LANES, c, prefetch.clone());
                        match nc {
                            1 => self.tiles.gemv(&a, at, rv),
                            _ => self.tiles.gemm(&a, at, rv, nc),
                        }
                    }
                    c += nc;
                }
            }
            row += group * S::LANES;
        }
    }

    /// What the tiles before `row` prefetch: up to `rows` rows from `row` on, or else the first weights of the next
    /// task.
    #[inline(always)]
    fn prefetch_after(&self, row: usize, rows: usize) -> WeightPrefetch {
        let Panels { product, p1, prefetch_next, .. } = self.panels;
        if !S::PREFETCHES || product.n < self.s.prefetch_policy().min_columns {
            return WeightPrefetch::NONE;
        }
        WeightPrefetch::rows(product.w, row, rows, p1, prefetch_next)
    }

    /// Computes the tiles of several columns for a group of rows. Weights are unpacked once for all of them, in pieces
    /// that fit the L1 cache. Returns the first column that it did not compute.
    #[inline(always)]
    fn unpacked(&self, a: &PackedActs<'_>, group: usize, row: usize, first: usize, prefetch: &WeightPrefetch) -> usize {
        let several = |c: usize| (c < a.n).then(|| a.layout.columns(a.n, c)).filter(|&nc| nc > 1);
        if several(first).is_none() {
            return first;
        }
        let (s, w) = (self.s, self.panels.product.w);
        let rv = self.class.tile::<S>().rv.min(group);
        let (blocks, most) = (a.k / a.layout.block, UnpackBuffer::blocks::<S>(w.layout(), rv));
        let mut buffer = UnpackBuffer::new();
        let mut c = first;
        for row in (row..row + group * S::LANES).step_by(rv * S::LANES) {
            for b in (0..blocks).step_by(most) {
                let blocks = [b, blocks.min(b + most)];
                let unpacked = buffer.unpack(s, w, self.bits, row, rv, blocks);
                let chunks = (blocks[1] - blocks[0]) * a.layout.block / 32;
                c = first;
                while let Some(nc) = several(c) {
                    let done = blocks[0] * a.layout.block / 32 * a.n + c * chunks;
                    let prefetch = prefetch.share(s, done..done + nc * chunks, a.n * a.k / 32, chunks);
                    self.tiles.gemm(a, TilePosition { row, c, blocks, unpacked, prefetch }, rv, nc);
                    c += nc;
                }
            }
        }
        c
    }
}

impl<Q: QuantFormat> QuantPanels<'_, Q> {
    /// Computes the tile of `rv` vectors and `nc` columns; `nc` is in `LEAST..=MOST`.
    #[inline(always)]
    fn tile_of<S: Simd, const LEAST: usize, const MOST: usize>(
        &self,
        s: S,
        a: &PackedActs<'_>,
        at: TilePosition,
        rv: usize,
        nc: usize,
    ) {
        macro_rules! shapes {
            ($(($rv:literal, $nc:literal))*) => {
                match (rv, nc) {
                    $(($rv, $nc) if const { LEAST <= $nc && $nc <= MOST && Q::TILE_CLASS.has::<S>($rv, $nc) } => self.tile::<S, $rv, $nc>(s, a, at),)*
                    _ => unreachable!("tile size that no instruction set has"),
                }
            };
        }
        shapes!(
            (1, 1)(2, 1)(3, 1)(4, 1)(1, 2)(2, 2)(3, 2)(4, 2)(1, 3)(2, 3)(3, 3)(4, 3)(1, 4)(2, 4)(3, 4)(4, 4)(1, 5)(
                2, 5
            )(1, 6)(2, 6)
        );
    }

    // WebAssembly has no boundary of CPU features, and its engines compile one huge function poorly
    #[cfg_attr(not(target_family = "wasm"), inline(always))]
    #[cfg_attr(target_family = "wasm", inline(never))]
    fn tile<S: Simd, const RV: usize, const NC: usize>(&self, s: S, a: &PackedActs<'_>, at: TilePosition) {
        let (p, TilePosition { row, c, blocks, unpacked, prefetch }) = (self.0.product, at);
        // always calling `start` costs 10 % of some tiles, in address computations that the compiler does not remove
        let (first, words) = match NC {
            1 if HAS_I16_FIELDS => (a.layout.start(a.n, a.k, c), a.layout.record(1)),
            _ => ((c * (a.k / a.layout.block) + blocks[0] * NC) * a.layout.words, a.layout.words),
        };
        // rows within one panel: a single base address with constant offsets
        let side_by_side = const { PANEL.is_multiple_of(RV * S::LANES) };
        assert!(!side_by_side || row.is_multiple_of(RV * S::LANES), "tile that crosses a panel");
        let lane = if const { RV * S::LANES == PANEL } { 0 } else { row % PANEL };
        let panel_of = |v: usize| p.w.panel((row + v * S::LANES) / PANEL).as_ptr();
        let tile = TileArgs {
            panel: if side_by_side { [panel_of(0); RV] } else { each!(RV, |v| panel_of(v)) },
            lane: each!(RV, |v| if side_by_side { lane + v * S::LANES } else { (row + v * S::LANES) % PANEL }),
            blocks,
            bytes: p.w.layout().record_bytes(p.w.dtype()),
            unpacked,
            prefetch,
            acts: a.words[first..first + (blocks[1] - blocks[0]) * words * NC].as_ptr(),
            out: p.out.ptr(c * p.stride + p.at + row, (NC - 1) * p.stride + RV * S::LANES),
            stride: p.stride,
            codes: if let PanelLayout::Codes(f) = p.w.layout() { Some(f) } else { None },
        };
        // SAFETY: the panels hold these blocks, the slice and `ptr` above checked the columns and the output.
        unsafe { Q::tile::<S, RV, NC>(s, &tile) }
    }
}

/// Position of a tile: first row, first column, range of blocks, and where their unpacked weights are.
struct TilePosition {
    row: usize,
    c: usize,
    blocks: [usize; 2],
    unpacked: *const u8,
    prefetch: WeightPrefetch,
}

impl TilePosition {
    /// All blocks, read from the panel.
    #[inline(always)]
    fn packed(a: &PackedActs<'_>, row: usize, c: usize, prefetch: WeightPrefetch) -> TilePosition {
        TilePosition { row, c, blocks: [0, a.k / a.layout.block], unpacked: core::ptr::null(), prefetch }
    }
}

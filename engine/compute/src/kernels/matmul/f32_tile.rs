//! Register tiles of f32 products: float weights, and both products of attention. `acc += w * x` with k ascending;
//! multiplication and addition are rounded separately, unless every product is exact. SIMD runs across rows; each
//! output is one sequential chain.
#![allow(unsafe_code)]

use core::marker::PhantomData;

use crate::kernels::act::Floats;
use crate::kernels::decoded::float_at;
use crate::kernels::matmul::{Columns, Panels, Product, vectors_per_tile};
use crate::kernels::panel::{Matrix, PANEL};
use crate::kernels::simd::{FEW_TILES, Simd, TileShape, each};

/// Conversion of a stored weight to f32.
pub(in crate::kernels) trait Elem {
    /// Bytes of a stored weight.
    const BYTES: usize;
    /// Loads `LANES` weights.
    ///
    /// # Safety
    /// `p` must point at `LANES` weights.
    unsafe fn load<S: Simd>(s: S, p: *const u8) -> S::F;
    /// `acc + w * x`.
    #[inline(always)]
    fn mac<S: Simd>(s: S, acc: S::F, w: S::F, x: S::F) -> S::F {
        s.add(acc, s.mul(w, x))
    }
}

pub(in crate::kernels) struct AsF32;
pub(in crate::kernels) struct AsF16;
pub(in crate::kernels) struct AsBf16;

impl Elem for AsF32 {
    const BYTES: usize = 4;
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const u8) -> S::F {
        // SAFETY: the contract of this function, which its caller keeps.
        unsafe { s.load(p.cast()) }
    }
}

impl Elem for AsF16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const u8) -> S::F {
        // SAFETY: the contract of this function, which its caller keeps.
        unsafe { s.load_f16(p.cast()) }
    }
}

impl Elem for AsBf16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const u8) -> S::F {
        // SAFETY: the contract of this function, which its caller keeps.
        unsafe { s.load_bf16(p.cast()) }
    }
}

/// Weights whose products with x are all exact in f32, so that multiplication and addition may be fused.
pub(in crate::kernels) struct Exact<E>(PhantomData<E>);

impl<E: Elem> Elem for Exact<E> {
    const BYTES: usize = E::BYTES;
    #[inline(always)]
    unsafe fn load<S: Simd>(s: S, p: *const u8) -> S::F {
        // SAFETY: the contract of this function, which its caller keeps.
        unsafe { E::load(s, p) }
    }
    #[inline(always)]
    fn mac<S: Simd>(s: S, acc: S::F, w: S::F, x: S::F) -> S::F {
        s.mac_exact(acc, w, x)
    }
}

/// The scalar definition, for the 16 rows of a panel and one column.
pub(in crate::kernels) fn scalar_panel(w: &Matrix, p: usize, x: &[f32], out: &mut [f32]) {
    let panel = w.panel(p);
    out.fill(0.0);
    for (k, &x) in x.iter().enumerate() {
        for (r, acc) in out.iter_mut().enumerate() {
            *acc += float_at(w.dtype(), panel, k * PANEL + r) * x;
        }
    }
}

/// One register tile: `out[c*out_stride + v*LANES ..] (+)= sum_k w[v][k] * x[c*x_stride + k]`. Consecutive k are 16
/// elements apart: the rows of a panel, the tokens of a page, or 16 dimensions of a value.
pub(in crate::kernels) struct F32Tile<const RV: usize> {
    /// First weights of each row vector.
    pub(in crate::kernels) w: [*const u8; RV],
    pub(in crate::kernels) k: usize,
    pub(in crate::kernels) x: *const f32,
    pub(in crate::kernels) x_stride: usize,
    pub(in crate::kernels) out: *mut f32,
    pub(in crate::kernels) out_stride: usize,
    /// Whether the sum continues from the contents of `out`.
    pub(in crate::kernels) accumulate: bool,
    /// For each row vector a stream to prefetch line by line meanwhile, or null.
    pub(in crate::kernels) prefetch: [*const u8; RV],
}

impl<const RV: usize> F32Tile<RV> {
    /// # Safety
    /// All reads and writes of the tile must be inside their buffers.
    // not inlined on WebAssembly: one copy for all products and all kinds of attention
    #[cfg_attr(not(target_family = "wasm"), inline(always))]
    #[cfg_attr(target_family = "wasm", inline(never))]
    pub(in crate::kernels) unsafe fn run<S: Simd, E: Elem, const NC: usize>(&self, s: S) {
        // SAFETY: the contract of this function, which its caller keeps.
        unsafe {
            let mut acc = [[s.splat(0.0); NC]; RV];
            if self.accumulate {
                for v in 0..RV {
                    for c in 0..NC {
                        acc[v][c] = s.load(self.out.add(c * self.out_stride + v * S::LANES));
                    }
                }
            }
            for k in 0..self.k {
                for line in self.prefetch {
                    s.prefetch_line(line, k * PANEL * E::BYTES);
                }
                let w: [S::F; RV] = each!(RV, |v| E::load(s, self.w[v].add(k * PANEL * E::BYTES)));
                for c in 0..NC {
                    let x = s.splat(self.x.add(c * self.x_stride + k).read());
                    for v in 0..RV {
                        acc[v][c] = E::mac(s, acc[v][c], w[v], x);
                    }
                }
            }
            for v in 0..RV {
                for c in 0..NC {
                    s.store(self.out.add(c * self.out_stride + v * S::LANES), acc[v][c]);
                }
            }
        }
    }
}

/// Columns of the next tile when `left` are left: a full tile or all that are left; builds with few tile shapes have no
/// tile of 5.
#[inline(always)]
pub(in crate::kernels) const fn columns_at_once<S: Simd>(left: usize) -> usize {
    match left {
        _ if left >= S::TILE_F32.nc => S::TILE_F32.nc,
        5 if FEW_TILES => 4,
        _ => left,
    }
}

/// Whether products use tiles of `rv` vectors and `nc` columns: full tiles, and fewer vectors where full tiles do not
/// divide a panel (or 16 tokens, or 16 dimensions). Other sizes are not compiled.
pub(in crate::kernels) const fn has_shape<S: Simd>(rv: usize, nc: usize) -> bool {
    const fn rows<S: Simd>(whole: usize, rv: usize) -> bool {
        rv == whole || (rv < whole && !PANEL.is_multiple_of(S::LANES * whole))
    }
    let TileShape { rv: whole, nc: columns } = S::TILE_F32;
    (columns_at_once::<S>(nc) == nc && nc <= columns && rows::<S>(whole, rv)) || (nc == 1 && rows::<S>(S::GEMV[3], rv))
}

/// Calls `$f::<RV, NC>` for a tile size known at run time.
macro_rules! f32_shapes {
    ($S:ty, $rv:expr, $nc:expr, $f:ident($($arg:expr),*)) => {
        f32_shapes!(@ $S, $rv, $nc, $f($($arg),*),
            (1 1) (1 2) (1 3) (1 4) (1 5) (1 6) (2 1) (2 2) (2 3) (2 4) (2 5) (2 6)
            (3 1) (3 2) (3 3) (3 4) (3 5) (3 6) (4 1) (4 2) (4 3) (4 4) (4 5) (4 6))
    };
    (@ $S:ty, $rv:expr, $nc:expr, $f:ident $args:tt, $(($r:literal $n:literal))*) => {
        match ($rv, $nc) {
            $(($r, $n) if const { has_shape::<$S>($r, $n) } => f32_shapes!(@call $f::<$S, $r, $n> $args),)*
            _ => unreachable!("tile size that no instruction set has"),
        }
    };
    (@call $f:ident::<$S:ty, $r:literal, $n:literal> ($($arg:expr),*)) => { $f::<$S, _, $r, $n>($($arg),*) };
}
pub(in crate::kernels) use f32_shapes;

/// Computes panels of a product with float weights.
#[inline(always)]
pub(in crate::kernels) fn panels<S: Simd, E: Elem>(s: S, panels: Panels<'_>) {
    let p = panels.product;
    let Columns::Plain(x) = p.x else { return };
    let rv = vectors_per_tile(s, p.n, S::GEMV[3], S::TILE_F32);
    let (mut row, end) = (panels.p0 * PANEL, panels.p1 * PANEL);
    while row < end {
        let rv = rv.min((end - row) / S::LANES);
        let mut c = 0;
        while c < p.n {
            let nc = columns_at_once::<S>(p.n - c);
            f32_shapes!(S, rv, nc, tile(s, p, x, row, c, ElemType::<E>(PhantomData)));
            c += nc;
        }
        row += rv * S::LANES;
    }
}

struct ElemType<E>(PhantomData<E>);

#[inline(always)]
fn tile<S: Simd, E: Elem, const RV: usize, const NC: usize>(
    s: S,
    p: &Product<'_>,
    x: Floats<'_>,
    row: usize,
    c: usize,
    _: ElemType<E>,
) {
    let k = p.w.k();
    let at = |v: usize| row + v * S::LANES;
    let w = each!(RV, |v| p.w.panel(at(v) / PANEL)[at(v) % PANEL * E::BYTES..].as_ptr());
    let ahead = s.prefetch_policy().distance.floats;
    let prefetches = ahead > 0 && (NC == 1 || c == 0);
    let tile = F32Tile::<RV> {
        w,
        k,
        x: x.rows(c, c + NC).x.as_ptr(),
        x_stride: x.stride,
        out: p.out.ptr(c * p.stride + p.at + row, (NC - 1) * p.stride + RV * S::LANES),
        out_stride: p.stride,
        accumulate: false,
        prefetch: if prefetches { each!(RV, |v| w[v].wrapping_add(ahead)) } else { [core::ptr::null(); RV] },
    };
    // SAFETY: the panels hold k elements a row, the slice and `ptr` above checked the columns and the output.
    unsafe { tile.run::<S, E, NC>(s) }
}

//! Matrices of low rank, and products whose inputs and outputs are planes of rows.

use alloc::format;
use alloc::vec::Vec;

use crate::error::LoadError;
use crate::kernels::act::Floats;
use crate::kernels::matmul::{MatmulJob, products};
use crate::kernels::panel::Matrix;
use crate::model::memory::{Size, Stack};
use crate::model::rows::{PackedColumns, RowOps};
use crate::model::tensors::{Declared, Loaded, Name, matrix};

/// The product of two matrices with few elements between them, perhaps with an activation there.
pub(super) struct LowRank {
    /// (rank, k)
    pub down: Matrix,
    /// (rows, rank)
    pub up: Matrix,
}

impl LowRank {
    /// Takes the tensors of these names.
    pub(crate) fn load(t: &mut Loaded<'_>, [down, up]: [Name; 2]) -> Result<LowRank, LoadError> {
        let low_rank = LowRank { down: t.matrix(down)?, up: t.matrix(up)? };
        let (rank, k, rows) = (low_rank.down.rows(), low_rank.up.k(), low_rank.up.rows());
        if rank != k {
            return Err(t.error(up, &format!("shape [{k}, {rows}]"), &format!("shape [{rank}, {rows}]")));
        }
        Ok(low_rank)
    }

    /// Declares the tensors of these names, in a model of width `d`.
    pub(crate) fn tensors(t: &mut Declared<'_>, names: [Name; 2], is_required: bool, d: usize) {
        let [down, up] = names;
        let down_shape = move |dims: &[u64; 4]| matrix(rank(dims[1], d), d);
        let up_shape = move |dims: &[u64; 4]| matrix(d, rank(dims[0], d));
        if is_required {
            t.required_by(down, down_shape);
            t.required_by(up, up_shape);
        } else {
            t.optional_by(down, down_shape);
            t.optional_by(up, up_shape);
        }
    }

    pub(crate) fn matrices(&self) -> [&Matrix; 2] {
        [&self.down, &self.up]
    }
}

/// A rank that only the tensor itself states, at most the width of the model.
pub(crate) fn rank(dim: u64, d: usize) -> usize {
    dim.min(d as u64) as usize
}

/// A product of one plane of rows into another.
pub(crate) struct PlaneProduct<'w> {
    pub(crate) w: &'w Matrix,
    pub(crate) from: usize,
    pub(crate) to: usize,
}

impl PlaneProduct<'_> {
    /// Temporaries of products of `n` rows.
    pub(crate) fn size(all: &[PlaneProduct<'_>], n: usize) -> Size {
        all.iter().fold(Size::NONE, |size, p| size.and(Size::packed(n, 1, p.w.k())))
    }
}

impl RowOps<'_> {
    /// Computes products, in ascending order of their input and output planes. Planes have `n` rows of a stride.
    pub(crate) fn plane_products(
        &self,
        all: &[PlaneProduct<'_>],
        n: usize,
        (x, x_stride): (&[f32], usize),
        (out, out_stride): (&mut [f32], usize),
        stack: &mut Stack<'_>,
    ) {
        let mut stack = stack.scope();
        let mut packed = PackedColumns::new(stack.words(PlaneProduct::size(all, n).words));
        let job = |p: &PlaneProduct<'_>| {
            let x = Floats { x: &x[p.from * n * x_stride..][..n * x_stride], stride: x_stride };
            (p.to * n, packed.of(self, p.w, x, p.from))
        };
        let places: Vec<_> = all.iter().map(job).collect();
        let jobs = all.iter().zip(places).map(|(p, (out_column, x))| MatmulJob { w: p.w, x, out_column, out_row: 0 });
        products(self.cpu, self.pool, &jobs.collect::<Vec<_>>(), out, out_stride);
    }
}

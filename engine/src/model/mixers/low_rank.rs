//! Matrices of low rank, and products whose inputs and outputs are planes of rows.

use alloc::format;
use alloc::vec::Vec;

use crate::error::LoadError;
use crate::kernels::act::Floats;
use crate::kernels::matmul::{MatmulJob, products};
use crate::kernels::panel::Matrix;
use crate::model::config::Config;
use crate::model::loader::LoadedTensors;
use crate::model::roles::{Role, Scope, matrix, tensor_error};
use crate::model::rows::{PackedColumns, RowOps};

/// The product of two matrices with few elements between them, perhaps with an activation there.
pub struct LowRank {
    /// (rank, k)
    pub down: Matrix,
    /// (rows, rank)
    pub up: Matrix,
}

impl LowRank {
    /// Takes the tensors of these names.
    pub(crate) fn load(tensors: &mut LoadedTensors, down: &str, up: &str) -> Result<LowRank, LoadError> {
        let low_rank = LowRank { down: tensors.matrix(down)?, up: tensors.matrix(up)? };
        let (rank, k, rows) = (low_rank.down.rows(), low_rank.up.k(), low_rank.up.rows());
        if rank != k {
            return Err(tensor_error(up, &format!("shape [{k}, {rows}]"), &format!("shape [{rank}, {rows}]")));
        }
        Ok(low_rank)
    }

    pub(crate) fn matrices(&self) -> [&Matrix; 2] {
        [&self.down, &self.up]
    }
}

/// A rank that only the tensor itself states, at most the width of the model.
pub(crate) fn rank(c: &Config, dim: u64) -> usize {
    dim.min(c.n_embd as u64) as usize
}

/// The role of the first matrix of low rank (rank, n_embd).
pub(crate) fn down(c: &Scope<'_>, dims: &[u64; 4]) -> Option<Role> {
    matrix(rank(c, dims[1]), c.n_embd)
}

/// The role of the second matrix of low rank (n_embd, rank).
pub(crate) fn up(c: &Scope<'_>, dims: &[u64; 4]) -> Option<Role> {
    matrix(c.n_embd, rank(c, dims[0]))
}

/// A product of one plane of rows into another.
pub(crate) struct PlaneProduct<'w> {
    pub(crate) w: &'w Matrix,
    pub(crate) from: usize,
    pub(crate) to: usize,
}

impl RowOps<'_> {
    /// Computes products, in ascending order of their input and output planes. Planes have `n` rows of a stride.
    pub(crate) fn plane_products(
        &self,
        all: &[PlaneProduct<'_>],
        n: usize,
        (x, x_stride): (&[f32], usize),
        (out, out_stride): (&mut [f32], usize),
        words: &mut [u32],
    ) {
        let mut packed = PackedColumns::new(words);
        let job = |p: &PlaneProduct<'_>| {
            let x = Floats { x: &x[p.from * n * x_stride..][..n * x_stride], stride: x_stride };
            (p.to * n, packed.of(self, p.w, x, p.from))
        };
        let places: Vec<_> = all.iter().map(job).collect();
        let jobs = all.iter().zip(places).map(|(p, (out_column, x))| MatmulJob { w: p.w, x, out_column, out_row: 0 });
        products(self.cpu, self.pool, &jobs.collect::<Vec<_>>(), out, out_stride);
    }
}

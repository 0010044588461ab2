//! Projections of pooled embeddings: the `Dense` modules of sentence-transformers, without activations between them.

use alloc::format;
use alloc::vec::Vec;

use crate::error::{LoadError, MemoryError};
use crate::model::budget::Budget;
use crate::model::linear::{Linear, padded};
use crate::model::memory::{Memory, Size};
use crate::model::rows::RowOps;
use crate::model::tensors::{Declared, LinearName, Loaded, any_width, matrix, vector};

/// The projections, in order.
const NAMES: [LinearName; 2] = [LinearName("dense_2"), LinearName("dense_3")];

/// Declares the tensors. A projection has any shape; each must fit the one before.
pub(crate) fn tensors(t: &mut Declared<'_>) {
    for layer in NAMES {
        t.optional_by(layer.weight(), |dims| matrix(any_width(dims[1]), any_width(dims[0])));
        t.optional_by(layer.bias(), |dims| vector(any_width(dims[0])));
    }
}

/// Takes the projections; each has as many columns as the one before has rows.
pub(crate) fn load(t: &mut Loaded<'_>, mut width: usize) -> Result<Vec<Linear>, LoadError> {
    let mut all = Vec::new();
    for name in NAMES {
        let Some(projection) = t.optional_linear(name)? else { continue };
        let (k, rows) = (projection.w.k(), projection.w.rows());
        if k != width {
            return Err(t.error(name.weight(), &format!("shape [{k}, {rows}]"), &format!("shape [{width}, {rows}]")));
        }
        width = rows;
        all.push(projection);
    }
    Ok(all)
}

/// Working memory of layers that are applied to pooled vectors one after the other; empty without layers.
pub(crate) struct ProjectionScratch {
    /// (texts, k): input of a layer; after the last one, its output.
    pub(crate) x: Vec<f32>,
    /// (texts, padded rows): output of a layer.
    y: Vec<f32>,
    memory: Memory,
}

impl ProjectionScratch {
    /// Memory for `max_texts` vectors.
    ///
    /// # Errors
    /// [`MemoryError`] if the allocation fails, or would exceed `limit` bytes.
    pub(crate) fn new(layers: &[&Linear], max_texts: usize, limit: usize) -> Result<ProjectionScratch, MemoryError> {
        let mut budget = Budget::new(limit);
        let most = |of: fn((usize, usize)) -> usize| {
            layers.iter().map(|layer| of((layer.w.k(), layer.w.rows()))).max().unwrap_or(0)
        };
        let scratch = ProjectionScratch {
            x: budget.zeros(&[max_texts, most(|(k, rows)| k.max(rows))]),
            y: budget.zeros(&[max_texts, most(|(_, rows)| padded(rows))]),
            memory: Memory::new(Size::any(layers.iter().map(|layer| layer.size(max_texts))), &mut budget),
        };
        budget.check(max_texts)?;
        Ok(scratch)
    }

    /// Copies the first `width` values of each vector to the input.
    pub(crate) fn load(&mut self, vectors: &[&mut &mut [f32]], width: usize) {
        for (x, v) in self.x.chunks_exact_mut(width).zip(vectors.iter()) {
            x.copy_from_slice(&v[..width]);
        }
    }

    /// Replaces the input, `n` rows, by the output of a layer.
    pub(crate) fn apply(&mut self, on: &RowOps<'_>, layer: &Linear, n: usize) {
        let (k, rows) = (layer.w.k(), layer.w.rows());
        let y = &mut self.y[..n * padded(rows)];
        on.linear(layer, &self.x[..n * k], y, &mut self.memory.stack());
        for (x, y) in self.x.chunks_exact_mut(rows).zip(y.chunks_exact(padded(rows))) {
            x.copy_from_slice(&y[..rows]);
        }
    }
}

//! Projections of pooled embeddings: the `Dense` modules of sentence-transformers, without activations between them.

use alloc::vec::Vec;

use crate::error::MemoryError;
use crate::model::rows::{RowOps, packed_words};
use crate::model::scratch::Budget;
use crate::model::weights::{Linear, padded};
use crate::model::{Exec, Model};

/// Tensor names of the projections, in order.
pub(crate) const NAMES: [&str; 2] = ["dense_2", "dense_3"];

/// Working memory of layers that are applied to pooled vectors one after the other; empty without layers.
pub(crate) struct ProjectionScratch {
    /// (texts, k): input of a layer; after the last one, its output.
    pub(crate) x: Vec<f32>,
    /// (texts, padded rows): output of a layer.
    y: Vec<f32>,
    words: Vec<u32>,
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
            words: budget.zeros(&[max_texts, most(|(k, _)| packed_words(1, 1, k))]),
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
        on.linear(layer, &self.x[..n * k], y, &mut self.words);
        for (x, y) in self.x.chunks_exact_mut(rows).zip(y.chunks_exact(padded(rows))) {
            x.copy_from_slice(&y[..rows]);
        }
    }
}

impl Model {
    /// Dimensions of an embedding: the rows of the last projection, or `n_embd` without projections.
    pub fn n_embd_out(&self) -> usize {
        self.weights.projections.last().map_or(self.config.n_embd, |projection| projection.w.rows())
    }

    /// Allocates memory to project `max_texts` vectors.
    ///
    /// # Errors
    /// [`MemoryError`] if the allocation fails, or would exceed [`Model::max_scratch_bytes`].
    pub(crate) fn projection_scratch(&self, max_texts: usize) -> Result<ProjectionScratch, MemoryError> {
        let layers: Vec<&Linear> = self.weights.projections.iter().collect();
        ProjectionScratch::new(&layers, max_texts, self.max_scratch_bytes)
    }

    /// Projects pooled vectors (n_embd): each then refers to [`Model::n_embd_out`] values in `s`.
    ///
    /// # Panics
    /// If there are more vectors than the scratch memory is for.
    pub(crate) fn project<'s>(&self, exec: Exec<'_>, vectors: &mut [&mut &'s mut [f32]], s: &'s mut ProjectionScratch) {
        let (n, on) = (vectors.len(), self.rows(exec));
        if n == 0 || self.weights.projections.is_empty() {
            return;
        }
        s.load(vectors, self.config.n_embd);
        for projection in &self.weights.projections {
            s.apply(&on, projection, n);
        }
        for (v, x) in vectors.iter_mut().zip(s.x.chunks_exact_mut(self.n_embd_out())) {
            **v = x;
        }
    }
}

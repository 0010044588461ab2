//! Projections of pooled embeddings: the `Dense` modules of sentence-transformers, without activations between them.

use alloc::vec::Vec;

use super::rows::packed_words;
use super::scratch::Budget;
use super::weights::padded;
use super::{Exec, Model};
use crate::error::MemoryError;

/// Tensor names of the projections, in order.
pub(super) const NAMES: [&str; 2] = ["dense_2", "dense_3"];

/// Working memory of the projections; empty if the model has none.
pub(crate) struct ProjectionScratch {
    /// (texts, k): input of a projection; after the last one, its output.
    x: Vec<f32>,
    /// (texts, padded rows): output of a projection.
    y: Vec<f32>,
    words: Vec<u32>,
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
        let mut budget = Budget::new(self.max_scratch_bytes);
        let most = |of: fn((usize, usize)) -> usize| {
            self.weights
                .projections
                .iter()
                .map(|projection| of((projection.w.k(), projection.w.rows())))
                .max()
                .unwrap_or(0)
        };
        let scratch = ProjectionScratch {
            x: budget.zeros(&[max_texts, most(|(k, rows)| k.max(rows))]),
            y: budget.zeros(&[max_texts, most(|(_, rows)| padded(rows))]),
            words: budget.zeros(&[max_texts, most(|(k, _)| packed_words(1, 1, k))]),
        };
        budget.check(max_texts)?;
        Ok(scratch)
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
        for (x, v) in s.x.chunks_exact_mut(self.config.n_embd).zip(vectors.iter()) {
            x.copy_from_slice(&v[..self.config.n_embd]);
        }
        for projection in &self.weights.projections {
            let (k, rows) = (projection.w.k(), projection.w.rows());
            let y = &mut s.y[..n * padded(rows)];
            on.linear(projection, &s.x[..n * k], y, &mut s.words);
            for (x, y) in s.x.chunks_exact_mut(rows).zip(y.chunks_exact(padded(rows))) {
                x.copy_from_slice(&y[..rows]);
            }
        }
        for (v, x) in vectors.iter_mut().zip(s.x.chunks_exact_mut(self.n_embd_out())) {
            **v = x;
        }
    }
}

//! Heads: products that make a pooled state into a text's vector (the `Dense` modules of sentence-transformers, with no
//! function between them, as GGUF files have them).

use alloc::vec::Vec;

use super::Model;
use super::rows::packed_words;
use super::scratch::Budget;
use super::weights::padded;
use crate::error::MemoryError;
use crate::kernels::Cpu;
use crate::pool::Pool;

/// Their names in a file, in order.
pub(super) const NAMES: [&str; 2] = ["dense_2", "dense_3"];

/// Working memory of the heads, none where a model has none.
pub(crate) struct HeadScratch {
    /// (texts, n): what goes in, and at last what came out.
    x: Vec<f32>,
    /// (texts, n in whole panels)
    y: Vec<f32>,
    words: Vec<u32>,
}

impl Model {
    /// Numbers of a text's vector: those of a state, or of what the last head makes of it.
    pub fn n_embd_out(&self) -> usize {
        self.weights.heads.last().map_or(self.config.n_embd, |head| head.w.rows())
    }

    /// Memory to put `max_texts` vectors through the heads.
    ///
    /// # Errors
    /// If there is not enough, or it would be more than [`Model::max_scratch_bytes`].
    pub(crate) fn head_scratch(&self, max_texts: usize) -> Result<HeadScratch, MemoryError> {
        let mut budget = Budget::new(self.max_scratch_bytes);
        let most = |of: fn((usize, usize)) -> usize| {
            self.weights.heads.iter().map(|head| of((head.w.k(), head.w.rows()))).max().unwrap_or(0)
        };
        let scratch = HeadScratch {
            x: budget.zeros(&[max_texts, most(|(k, rows)| k.max(rows))]),
            y: budget.zeros(&[max_texts, most(|(_, rows)| padded(rows))]),
            words: budget.zeros(&[max_texts, most(|(k, _)| packed_words(1, 1, k))]),
        };
        budget.check(max_texts)?;
        Ok(scratch)
    }

    /// Puts vectors (n_embd) through the heads: each becomes one of [`Model::n_embd_out`] numbers in `s`.
    ///
    /// # Panics
    /// If there are more than the scratch is for.
    pub(crate) fn heads<'s>(
        &self,
        cpu: Cpu,
        pool: &dyn Pool,
        vectors: &mut [&mut &'s mut [f32]],
        s: &'s mut HeadScratch,
    ) {
        let (n, on) = (vectors.len(), self.rows(cpu, pool));
        if n == 0 || self.weights.heads.is_empty() {
            return;
        }
        for (x, v) in s.x.chunks_exact_mut(self.config.n_embd).zip(vectors.iter()) {
            x.copy_from_slice(&v[..self.config.n_embd]);
        }
        for head in &self.weights.heads {
            let (k, rows) = (head.w.k(), head.w.rows());
            let y = &mut s.y[..n * padded(rows)];
            on.linear(head, &s.x[..n * k], y, &mut s.words);
            for (x, y) in s.x.chunks_exact_mut(rows).zip(y.chunks_exact(padded(rows))) {
                x.copy_from_slice(&y[..rows]);
            }
        }
        for (v, x) in vectors.iter_mut().zip(s.x.chunks_exact_mut(self.n_embd_out())) {
            **v = x;
        }
    }
}

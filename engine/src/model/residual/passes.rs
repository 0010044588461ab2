//! Several passes of the residual stream through the same weights: plain loops (Nanbeige), and two stacks that run in nested
//! cycles (HRM-Text).
//!
//! ```text
//! for each cycle: low = norm(low_stack(low + high)), several times; high = norm(high_stack(low + high))
//! ```

use alloc::vec::Vec;

use crate::model::config::PassEnd;
use crate::model::residual::orders::ForwardPass;
use crate::model::scratch::Scratch;

/// States of nested cycles.
pub(crate) struct PassScratch {
    /// (rows, n_embd)
    pub(crate) low: Vec<f32>,
    pub(crate) high: Vec<f32>,
}

impl ForwardPass<'_, '_> {
    /// The states before the first pass: `low`, the same for all tokens, and the embeddings. Their sum is the residual
    /// stream.
    pub(crate) fn begin_passes(&self, low: &[f32], s: &mut Scratch) {
        let (d, n) = (low.len(), self.n);
        let Scratch { x, passes, .. } = s;
        passes.high[..n * d].copy_from_slice(&x[..n * d]);
        passes.low[..n * d].chunks_exact_mut(d).for_each(|row| row.copy_from_slice(low));
        self.rows.add(&mut x[..n * d], d, &passes.low, d, 1.0);
    }

    /// What follows a pass that is not the last.
    pub(crate) fn end_pass(&self, end: PassEnd, s: &mut Scratch) {
        let (d, n) = (self.model.config.n_embd, self.n);
        let Scratch { x, passes, .. } = s;
        let x = &mut x[..n * d];
        if let Some(norm) = &self.model.weights.final_norm {
            self.rows.norm_each(norm, x);
        }
        let (own, other) = match end {
            PassEnd::Norm => return,
            PassEnd::Low => (&mut passes.low, &passes.high),
            PassEnd::High => (&mut passes.high, &passes.low),
        };
        own[..n * d].copy_from_slice(x);
        self.rows.add(x, d, other, d, 1.0);
    }
}

//! Several passes of the residual stream through the same weights: plain loops (Nanbeige), and two stacks that run in nested
//! cycles (HRM-Text).
//!
//! ```text
//! for each cycle: low = norm(low_stack(low + high)), several times; high = norm(high_stack(low + high))
//! ```

use alloc::format;
use alloc::vec::Vec;

use crate::error::LoadError;
use crate::model::keys::{Keys, MAX_LAYERS};
use crate::model::residual::orders::ForwardPass;
use crate::model::scratch::Scratch;

/// What follows the last layer of a pass, after the final norm.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PassEnd {
    /// The next pass.
    Norm,
    /// The residual stream is the low state; the next pass reads the sum of low and high state.
    Low,
    /// The same with the high state.
    High,
}

/// A layer of a pass.
pub(crate) struct PassLayer {
    /// The layer of the file that it is a copy of.
    pub(crate) layer: usize,
    /// Index of its weights.
    pub(crate) block: usize,
    pub(crate) after: Option<PassEnd>,
}

/// Reads the layers of all passes: of `n` layers of the file, or with `hrm.` keys of all.
pub(crate) fn layers(keys: &Keys<'_, '_>, n: usize) -> Result<Vec<PassLayer>, LoadError> {
    if keys.has("hrm.layers_per_stack") {
        return nested(keys, n);
    }
    let n_loops = match keys.u32("num_loops")? {
        None => 1,
        v => keys.in_range("num_loops", v, 1..=MAX_LAYERS / n as u32)?,
    };
    let with_norm = !keys.bool("skip_loop_final_norm")?.unwrap_or(false);
    let layer = |i: usize| {
        let ends = with_norm && i % n == n - 1 && i + 1 < n * n_loops;
        PassLayer { layer: i % n, block: i % n, after: ends.then_some(PassEnd::Norm) }
    };
    Ok((0..n * n_loops).map(layer).collect())
}

/// A stack of layers for the low state and one for the high state, which runs after every `l_cycles` passes of the other.
fn nested(keys: &Keys<'_, '_>, n: usize) -> Result<Vec<PassLayer>, LoadError> {
    let size = |name: &str| keys.size(name, 1..=n as u32);
    let (stack, high, low) = (size("hrm.layers_per_stack")?, size("hrm.h_cycles")?, size("hrm.l_cycles")?);
    let expected = stack.saturating_mul(high).saturating_mul(low + 1);
    if n != expected {
        let expected = format!("{expected}: layers_per_stack * h_cycles * (l_cycles + 1)");
        return Err(keys.wrong("block_count", n, expected));
    }
    let layer = |i: usize| {
        let is_high = i / stack % (low + 1) == low;
        let end = if is_high { PassEnd::High } else { PassEnd::Low };
        PassLayer {
            layer: i,
            block: i % stack + if is_high { stack } else { 0 },
            after: (i % stack == stack - 1 && i + 1 < n).then_some(end),
        }
    };
    Ok((0..n).map(layer).collect())
}

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

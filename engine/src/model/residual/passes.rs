//! Several passes of the residual stream through the same weights: plain loops (Nanbeige), and two stacks that run in nested
//! cycles (HRM-Text).
//!
//! ```text
//! for each cycle: low = norm(low_stack(low + high)), several times; high = norm(high_stack(low + high))
//! ```

use alloc::format;
use alloc::vec::Vec;

use super::batch::Streams;
use crate::error::LoadError;
use crate::model::keys::{Keys, MAX_LAYERS};
use crate::model::linear::Norm;
use crate::model::pass::Pass;

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

/// The states before the first pass: `low`, the same for all tokens, and the embeddings. Their sum is the residual stream.
pub(super) fn begin(pass: &Pass<'_, '_>, low: &[f32], x: &mut [f32], s: &mut Streams) {
    let (d, n) = (low.len(), pass.n);
    s.high[..n * d].copy_from_slice(x);
    s.low[..n * d].chunks_exact_mut(d).for_each(|row| row.copy_from_slice(low));
    pass.rows.add(x, d, &s.low, d, 1.0);
}

/// What follows a pass that is not the last; `norm` is the final one.
pub(super) fn end(pass: &Pass<'_, '_>, end: PassEnd, norm: Option<&Norm>, x: &mut [f32], s: &mut Streams) {
    if let Some(norm) = norm {
        pass.rows.norm_each(norm, x);
    }
    let (own, other) = match end {
        PassEnd::Norm => return,
        PassEnd::Low => (&mut s.low, &s.high),
        PassEnd::High => (&mut s.high, &s.low),
    };
    own[..x.len()].copy_from_slice(x);
    pass.rows.add(x, pass.d, other, pass.d, 1.0);
}

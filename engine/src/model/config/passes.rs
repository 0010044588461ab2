//! Passes of the residual stream through the same weights.

use alloc::format;
use alloc::vec::Vec;

use crate::error::LoadError;
use crate::model::config::{LayerConfig, MAX_LAYERS};
use crate::model::keys::Keys;

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

/// The layers of all passes, from those of one pass, or with `hrm.` keys of all.
pub(crate) fn passes(keys: &Keys<'_, '_>, layers: Vec<LayerConfig>) -> Result<Vec<LayerConfig>, LoadError> {
    let n = layers.len();
    if keys.has("hrm.layers_per_stack") {
        return nested(keys, layers);
    }
    let n_loops = match keys.u32("num_loops")? {
        None => 1,
        v => keys.in_range("num_loops", v, 1..=MAX_LAYERS / n as u32)?,
    };
    let with_norm = !keys.bool("skip_loop_final_norm")?.unwrap_or(false);
    let layer = |i: usize| {
        let ends = with_norm && i % n == n - 1 && i + 1 < n * n_loops;
        LayerConfig { after: ends.then_some(PassEnd::Norm), ..layers[i % n] }
    };
    Ok((0..n * n_loops).map(layer).collect())
}

/// A stack of layers for the low state and one for the high state, which runs after every `l_cycles` passes of the other.
fn nested(keys: &Keys<'_, '_>, mut layers: Vec<LayerConfig>) -> Result<Vec<LayerConfig>, LoadError> {
    let n = layers.len();
    let size = |name: &str| keys.size(name, 1..=n as u32);
    let (stack, high, low) = (size("hrm.layers_per_stack")?, size("hrm.h_cycles")?, size("hrm.l_cycles")?);
    let expected = stack.saturating_mul(high).saturating_mul(low + 1);
    if n != expected {
        let expected = format!("{expected}: layers_per_stack * h_cycles * (l_cycles + 1)");
        return Err(keys.wrong("block_count", n, expected));
    }
    for (i, layer) in layers.iter_mut().enumerate() {
        let is_high = i / stack % (low + 1) == low;
        let end = if is_high { PassEnd::High } else { PassEnd::Low };
        layer.block = i % stack + if is_high { stack } else { 0 };
        layer.after = (i % stack == stack - 1 && i + 1 < n).then_some(end);
    }
    Ok(layers)
}

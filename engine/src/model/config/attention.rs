//! Heads, windows and factors of attention.

use alloc::format;
use alloc::vec::Vec;

use super::{MAX_CONTEXT, MAX_WIDTH};
use crate::error::LoadError;
use crate::kernels::attention::{MAX_GROUP, MAX_HEAD_DIM};
use crate::math::pow;
use crate::model::arch::{Arch, Temperature};
use crate::model::keys::Keys;

/// Factor on queries by position: `1 + scale * ln(floor((pos + offset) / length) + 1)`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TemperatureConfig {
    /// Growth of the factor.
    pub scale: f32,
    /// Tokens of a step.
    pub length: usize,
    /// Added to positions.
    pub offset: usize,
    /// Whether layers with RoPE have the factor too.
    pub with_rope: bool,
}

/// Numbers of query heads and of key and value heads.
pub(super) fn heads(keys: &Keys<'_, '_>) -> Result<(usize, usize), LoadError> {
    let n_head = keys.u32_or_zero("attention.head_count")?;
    let n_head = keys.in_range("attention.head_count", n_head, 1..=MAX_WIDTH)?;
    let n_head_kv = match keys.u32_or_zero("attention.head_count_kv")? {
        None => n_head,
        v => keys.in_range("attention.head_count_kv", v, 1..=n_head as u32)?,
    };
    if !n_head.is_multiple_of(n_head_kv) {
        return Err(keys.wrong("attention.head_count_kv", n_head_kv, format!("a divisor of head_count, {n_head}")));
    }
    if n_head / n_head_kv > MAX_GROUP {
        let found = format!("{n_head} query heads for {n_head_kv} KV heads");
        return Err(keys.wrong("attention.head_count", found, format!("at most {MAX_GROUP} query heads per KV head")));
    }
    Ok((n_head, n_head_kv))
}

pub(super) fn head_dim(keys: &Keys<'_, '_>, n_embd: usize, n_head: usize) -> Result<usize, LoadError> {
    let default = Some((n_embd / n_head) as u32);
    let given = keys.u32("attention.key_length")?.or(default);
    let head_dim = keys.in_range("attention.key_length", given, 1..=MAX_HEAD_DIM as u32)?;
    let value_dim = keys.u32("attention.value_length")?.map_or(head_dim, |v| v as usize);
    if value_dim != head_dim {
        return Err(keys.wrong("attention.value_length", value_dim, format!("{head_dim}, the value of key_length")));
    }
    if n_head * head_dim > MAX_WIDTH as usize {
        let expected =
            format!("at most {} (head_count * key_length is at most {MAX_WIDTH})", MAX_WIDTH as usize / head_dim);
        return Err(keys.wrong("attention.head_count", n_head, expected));
    }
    Ok(head_dim)
}

/// Which layers have a window.
pub(super) fn pattern(keys: &Keys<'_, '_>, arch: &Arch, n: usize) -> Result<Vec<bool>, LoadError> {
    let mut local = keys.pattern("attention.sliding_window_pattern", n, arch.window_pattern)?;
    if arch.global_first && !keys.is_array("attention.sliding_window_pattern") {
        // the last layer of a period becomes the first of the next
        let period = local.iter().position(|local| !local).map_or(n, |last| last + 1);
        local.iter_mut().enumerate().for_each(|(i, local)| *local = i % period != 0);
    }
    Ok(local)
}

/// Slopes of ALiBi: powers of 2^(-max_bias / n) for the largest power of two n up to `n_head`, then the odd powers of
/// its root.
pub(super) fn slopes(max_bias: f32, n_head: usize) -> Vec<f32> {
    let n = 1 << n_head.ilog2();
    let slope = |h: usize| match h < n {
        true => f64::from(max_bias) * (h + 1) as f64 / n as f64,
        false => f64::from(max_bias) / 2.0 * (2 * (h - n) + 1) as f64 / n as f64,
    };
    (0..n_head).map(|h| pow(2.0, -slope(h)) as f32).collect()
}

pub(super) fn temperature(
    keys: &Keys<'_, '_>,
    arch: &Arch,
    original_context: usize,
) -> Result<Option<TemperatureConfig>, LoadError> {
    let (scale, length, offset) = match arch.temperature {
        Temperature::ByKey => (None, original_context, 0),
        Temperature::NoRope => (Some(0.1), 8192, 1),
    };
    let Some(scale) = keys.optional("attention.temperature_scale")?.or(scale) else { return Ok(None) };
    let length = match keys.u32("attention.temperature_length")? {
        None => length,
        v => keys.in_range("attention.temperature_length", v, 1..=MAX_CONTEXT)?,
    };
    Ok(Some(TemperatureConfig { scale, length, offset, with_rope: arch.temperature == Temperature::ByKey }))
}

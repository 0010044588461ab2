//! Heads, windows and factors of attention.

use alloc::format;
use alloc::vec::Vec;

use super::latent_heads::{self, LatentHeads};
use crate::error::LoadError;
use crate::kernels::attention::{KvHeads, MAX_GROUP, MAX_HEAD_DIM};
use crate::math::pow;
use crate::model::family::Family;
use crate::model::keys::Keys;
use crate::model::keys::{MAX_CONTEXT, MAX_WIDTH};
use crate::model::mixers::kind::{LayerKind, MixerKind};

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

/// Heads of a layer's attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HeadConfig {
    /// Number of query heads; a multiple of `n_head_kv`.
    pub n_head: usize,
    /// Number of key and value heads.
    pub n_head_kv: usize,
    /// Elements of a query or key.
    pub key_dim: usize,
    /// Elements of a value.
    pub value_dim: usize,
    /// Sizes of latent attention: there is one KV head, whose value is the beginning of its key.
    pub latent: Option<LatentHeads>,
}

impl HeadConfig {
    /// Elements of a key that RoPE may rotate.
    pub fn rotated(&self) -> usize {
        self.latent.map_or(self.key_dim, |latent| latent.rope)
    }

    /// Elements of all queries of a token.
    pub fn q_width(&self) -> usize {
        self.n_head * self.key_dim
    }

    /// Elements of all keys of a token.
    pub fn k_width(&self) -> usize {
        self.n_head_kv * self.key_dim
    }

    /// Elements of all values of a token.
    pub fn v_width(&self) -> usize {
        self.n_head_kv * self.value_dim
    }

    /// Elements of the output of all query heads.
    pub fn out_width(&self) -> usize {
        self.n_head * self.value_dim
    }

    /// The heads in KV pages.
    pub fn kv_heads(&self) -> KvHeads {
        let latent = self.latent.is_some();
        KvHeads { latent, ..KvHeads::separate(self.n_head_kv, self.key_dim, self.value_dim) }
    }
}

/// The heads of layers with attention, of which those `local` may have other dimensions; default values for other layers.
pub(crate) fn heads(
    keys: &Keys<'_, '_>,
    n_embd: usize,
    kinds: &[LayerKind],
    local: &[bool],
) -> Result<Vec<HeadConfig>, LoadError> {
    let name = "attention.head_count";
    let has_attention = |i: usize| kinds[i].mixer.has_attention();
    let Some(first) = (0..kinds.len()).find(|i| has_attention(*i)) else {
        return Ok(alloc::vec![HeadConfig::default(); kinds.len()]);
    };
    let Some(counts) = keys.per_layer_u32(name, kinds.len())? else {
        return Err(keys.wrong(name, "nothing", "a number"));
    };
    let kv_counts = keys.per_layer_u32("attention.head_count_kv", kinds.len())?;
    let n_head = keys.in_range(name, Some(counts[first]), 1..=MAX_WIDTH)?;
    let dims = match kinds.iter().any(|kind| kind.mixer.has_attention() && kind.mixer != MixerKind::Latent) {
        true => head_dims(keys, n_embd / n_head)?,
        false => Default::default(),
    };
    let heads = |i: usize| {
        if !has_attention(i) {
            return Ok(HeadConfig::default());
        }
        if kinds[i].mixer == MixerKind::Latent {
            let (n_head, rank, latent) = latent_heads::heads(keys, n_embd, counts[i], local[i])?;
            let (key_dim, latent) = (rank + latent.rope, Some(latent));
            return Ok(HeadConfig { n_head, n_head_kv: 1, key_dim, value_dim: rank, latent });
        }
        let [key_dim, value_dim] = dims[usize::from(local[i])];
        let n_head = keys.in_range(name, Some(counts[i]), 1..=MAX_WIDTH)?;
        let n_head_kv = match &kv_counts {
            None => n_head,
            Some(counts) => keys.in_range("attention.head_count_kv", Some(counts[i]), 1..=n_head as u32)?,
        };
        if !n_head.is_multiple_of(n_head_kv) {
            return Err(keys.wrong("attention.head_count_kv", n_head_kv, format!("a divisor of head_count, {n_head}")));
        }
        if n_head / n_head_kv > MAX_GROUP {
            let found = format!("{n_head} query heads for {n_head_kv} KV heads");
            return Err(keys.wrong(name, found, format!("at most {MAX_GROUP} query heads per KV head")));
        }
        let dim = key_dim.max(value_dim);
        if n_head.saturating_mul(dim) > MAX_WIDTH as usize {
            let most = MAX_WIDTH as usize / dim;
            return Err(keys.wrong(
                name,
                n_head,
                format!("at most {most} (head_count * key_length is at most {MAX_WIDTH})"),
            ));
        }
        Ok(HeadConfig { n_head, n_head_kv, key_dim, value_dim, latent: None })
    };
    (0..kinds.len()).map(heads).collect()
}

/// Dimensions of keys and values: of global layers, and of local ones.
fn head_dims(keys: &Keys<'_, '_>, default: usize) -> Result<[[usize; 2]; 2], LoadError> {
    let dim = |name: &str, default: usize| {
        keys.in_range(name, keys.u32(name)?.or(Some(default as u32)), 1..=MAX_HEAD_DIM as u32)
    };
    let key = dim("attention.key_length", default)?;
    let value = dim("attention.value_length", key)?;
    let local_key = dim("attention.key_length_swa", key)?;
    let local_value =
        dim("attention.value_length_swa", if keys.has("attention.value_length") { value } else { local_key })?;
    Ok([[key, value], [local_key, local_value]])
}

/// Which layers have a window.
pub(crate) fn pattern(keys: &Keys<'_, '_>, family: &Family, n: usize) -> Result<Vec<bool>, LoadError> {
    let mut local = keys.pattern("attention.sliding_window_pattern", n, family.window_pattern)?;
    if family.global_first && !keys.is_array("attention.sliding_window_pattern") {
        // the last layer of a period becomes the first of the next
        let period = local.iter().position(|local| !local).map_or(n, |last| last + 1);
        local.iter_mut().enumerate().for_each(|(i, local)| *local = i % period != 0);
    }
    Ok(local)
}

/// Slopes of ALiBi: powers of 2^(-max_bias / n) for the largest power of two n up to `n_head`, then the odd powers of
/// its root.
pub(crate) fn slopes(max_bias: f32, n_head: usize) -> Vec<f32> {
    let n = 1 << n_head.ilog2();
    let slope = |h: usize| match h < n {
        true => f64::from(max_bias) * (h + 1) as f64 / n as f64,
        false => f64::from(max_bias) / 2.0 * (2 * (h - n) + 1) as f64 / n as f64,
    };
    (0..n_head).map(|h| pow(2.0, -slope(h)) as f32).collect()
}

pub(crate) fn temperature(
    keys: &Keys<'_, '_>,
    original_context: usize,
) -> Result<Option<TemperatureConfig>, LoadError> {
    let Some(scale) = keys.optional("attention.temperature_scale")? else { return Ok(None) };
    let length = match keys.u32("attention.temperature_length")? {
        None => original_context,
        v => keys.in_range("attention.temperature_length", v, 1..=MAX_CONTEXT)?,
    };
    Ok(Some(TemperatureConfig { scale, length, offset: 0, with_rope: true }))
}

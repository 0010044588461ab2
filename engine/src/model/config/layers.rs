//! Parameters of the layers.

use alloc::vec;
use alloc::vec::Vec;

use super::attention::pattern;
use super::rope::rotations;
use super::{LayerConfig, MixerKind};
use crate::error::LoadError;
use crate::kernels::attention::AttentionWindow;
use crate::kernels::elementwise::Xielu;
use crate::math::{exp, ln};
use crate::model::arch::{Arch, Rotated, Swiglu};
use crate::model::keys::Keys;
use crate::model::rotary::RopeConfig;

/// Attention windows and RoPE variants of the layers.
pub(super) fn layers(
    keys: &Keys<'_, '_>,
    arch: &Arch,
    n_layer: usize,
    n_ctx_train: usize,
    causal: bool,
) -> Result<(Vec<RopeConfig>, Vec<LayerConfig>), LoadError> {
    let (window, local) = match keys.u32("attention.sliding_window")?.map_or(arch.window, |w| w as usize) {
        // without a window the pattern is unused and not checked
        0 => (usize::MAX, vec![false; n_layer]),
        w => (arch.fixed_window.unwrap_or(w), pattern(keys, arch, n_layer)?),
    };
    let rope_pattern = match keys.has("attention.rope_pattern") {
        true => Some(keys.pattern("attention.rope_pattern", n_layer, 0)?),
        false => None,
    };
    let is_chunked = match arch.attention_chunk {
        // a window of 0 turns chunks off
        0 => vec![false; n_layer],
        _ if keys.u32("attention.sliding_window")? == Some(0) => vec![false; n_layer],
        _ => pattern(keys, arch, n_layer)?,
    };
    let n_dense = keys.u32("leading_dense_block_count")?.unwrap_or(0) as usize;
    let xielu = xielu(keys, n_layer)?;
    let any_local = local.contains(&true);
    let [expert_limits, shared_limits] =
        [keys.per_layer_f32("swiglu_clamp_exp", n_layer)?, keys.per_layer_f32("swiglu_clamp_shexp", n_layer)?];
    let (global, near) = match arch.rope {
        None => Default::default(),
        Some(_) => rotations(keys, arch, n_ctx_train, local.contains(&true))?,
    };
    let is_finetuned = keys.bool("rope.scaling.finetuned")?.unwrap_or(true);
    let mut ropes = Vec::new();
    let mut layers = Vec::with_capacity(n_layer);
    for (i, local) in local.into_iter().enumerate() {
        let rotates = match arch.rotated {
            _ if arch.rope.is_none() => false,
            _ if rope_pattern.is_some() => rope_pattern.as_ref().is_some_and(|pattern| pattern[i]),
            Rotated::All => true,
            Rotated::AllBut(n) => (i + 1) % n != 0,
            Rotated::Local => local,
            Rotated::LocalOrDense => local || i < n_dense,
            Rotated::LocalIfAny => local || !any_local,
            Rotated::None => false,
            Rotated::IfFinetuned => is_finetuned,
        };
        let rope = if local { &near } else { &global };
        let known = ropes.iter().position(|r| r == rope);
        if rotates && known.is_none() {
            ropes.push(rope.clone());
        }
        let rope = rotates.then(|| known.unwrap_or(ropes.len() - 1));
        let before = match (local, causal) {
            (false, _) => usize::MAX,
            (true, true) => window - 1,
            (true, false) => window / 2,
        };
        layers.push(LayerConfig {
            window: AttentionWindow {
                left: before,
                right: if causal { 0 } else { before },
                chunk: if is_chunked[i] { arch.attention_chunk } else { usize::MAX },
            },
            rope,
            expert_limit: match arch.swiglu {
                Swiglu::Limited(limit) if expert_limits[i] == 0.0 => limit,
                _ => expert_limits[i],
            },
            xielu: xielu.as_ref().map(|all| all[i]),
            shared_limit: shared_limits[i],
            mixer: MixerKind::Attention,
            has_ffn: true,
            kv_layer: i,
            state_at: 0,
        });
    }
    Ok((ropes, layers))
}

/// xIELU of each layer, if the file has its parameters.
fn xielu(keys: &Keys<'_, '_>, n: usize) -> Result<Option<Vec<Xielu>>, LoadError> {
    // these keys have a prefix of their own
    let keys = Keys { gguf: keys.gguf, arch: "xielu" };
    if !keys.has("alpha_p") {
        return Ok(None);
    }
    let read = |name: &str| keys.per_layer_f32(name, n);
    let (positive, negative, beta, eps) = (read("alpha_p")?, read("alpha_n")?, read("beta")?, read("eps")?);
    let softplus = |x: f32| (if x > 20.0 { f64::from(x) } else { ln(1.0 + exp(f64::from(x))) }) as f32;
    let one = |i: usize| Xielu {
        negative: beta[i] + softplus(negative[i]),
        positive: softplus(positive[i]),
        beta: beta[i],
        eps: eps[i],
    };
    Ok(Some((0..n).map(one).collect()))
}

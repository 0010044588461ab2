//! Parameters of the layers.

use alloc::format;
use alloc::vec;
use alloc::vec::Vec;

use crate::error::LoadError;
use crate::kernels::attention::AttentionWindow;
use crate::kernels::elementwise::Xielu;
use crate::math::{exp, ln, sqrt};
use crate::model::config::{LayerConfig, MAX_WIDTH, RecurrentConfig, Selection};
use crate::model::families::{Arch, ExpertInput, Rotated, ScoreScale, Swiglu};
use crate::model::keys::Keys;
use crate::model::mixers::LayerKind;
use crate::model::mixers::attention::heads::{HeadConfig, heads, pattern};
use crate::model::mixers::attention::rope::rotations;
use crate::model::mixers::attention::rotary::RopeConfig;

/// Attention windows and RoPE variants of the layers.
pub(crate) fn layers(
    keys: &Keys<'_, '_>,
    arch: &Arch,
    kinds: &[LayerKind],
    n_embd: usize,
    n_ctx_train: usize,
    causal: bool,
) -> Result<(Vec<RopeConfig>, Vec<LayerConfig>), LoadError> {
    let n_layer = kinds.len();
    let stated_window = keys.u32("attention.sliding_window")?.map_or(arch.window, |w| w as usize);
    let has_window = stated_window > 0;
    let (window, local) = match stated_window {
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
    let n_by_token = keys.u32("hash_layer_count")?.unwrap_or(0) as usize;
    let n_dense = keys.u32("leading_dense_block_count")?.unwrap_or(0) as usize;
    let xielu = xielu(keys, n_layer)?;
    let rescale = keys.u32("rescale_every_n_layers")?.unwrap_or(0) as usize;
    let any_local = local.contains(&true);
    let [expert_limits, shared_limits] =
        [keys.per_layer_f32("swiglu_clamp_exp", n_layer)?, keys.per_layer_f32("swiglu_clamp_shexp", n_layer)?];
    // without limits of their own, shared experts have those of the others
    let has_own = !arch.limited_dense || keys.has("swiglu_clamp_shexp");
    let shared_limits = if has_own { shared_limits } else { expert_limits.clone() };
    let heads = heads(keys, n_embd, kinds, &local)?;
    if let Some(h) = heads.iter().find(|h| arch.gated_queries && h.key_dim != h.value_dim) {
        return Err(keys.wrong(
            "attention.value_length",
            h.value_dim,
            format!("{}, the value of key_length", h.key_dim),
        ));
    }
    let n_ff = ff_widths(keys, arch, kinds, n_embd)?;
    let key_dim = |of_local: bool| {
        (0..n_layer).find(|i| local[*i] == of_local && kinds[*i].mixer.has_attention()).map(|i| heads[i].rotated())
    };
    let (global, near) = match arch.rope {
        Some(_) if arch.rotated != Rotated::None => rotations(keys, arch, n_ctx_train, [false, true].map(key_dim))?,
        _ => Default::default(),
    };
    let scale = keys.optional("attention.scale")?.or(keys.optional("attention.output_scale")?);
    let sparsity = sparsity(keys, arch, n_layer)?;
    let is_finetuned = keys.bool("rope.scaling.finetuned")?.unwrap_or(true);
    let mut ropes = Vec::new();
    let mut layers = Vec::with_capacity(n_layer);
    for (i, local) in local.iter().copied().enumerate() {
        let rotates = match arch.rotated {
            _ if arch.rope.is_none() => false,
            _ if rope_pattern.is_some() => rope_pattern.as_ref().is_some_and(|pattern| pattern[i]),
            Rotated::All => true,
            Rotated::AllBut(n) => (i + 1) % n != 0,
            Rotated::AllButFirst(n) => i % n != 0 || !has_window || n_layer == n,
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
            output_scale: if rescale > 0 && (i + 1) % rescale == 0 { 0.5 } else { 1.0 },
            xielu: xielu.as_ref().map(|all| all[i]),
            shared_limit: shared_limits[i],
            selection: Selection::All,
            index_ratio: 1,
            compressor: None,
            routes_by_token: i < n_by_token,
            mixer: kinds[i].mixer,
            has_ffn: kinds[i].has_ffn,
            attn_scale: scale.unwrap_or_else(|| {
                let scaling = rope.and_then(|rope| ropes[rope].scaling);
                score_scale(arch, &heads[i], (n_layer, n_embd)) * scaling.map_or(1.0, |s| s.score_factor)
            }),
            heads: heads[i],
            n_ff: n_ff[i],
            sparsity: sparsity[i],
            block: i,
            after: None,
            kv_layer: 0,
            owns_kv: true,
            state_at: 0,
        });
    }
    Ok((ropes, layers))
}

/// Gives each layer its keys and values in KV pages, of which an indexer has `index_layers`, and the place of its recurrent
/// state. The last layers may read keys and values of the last layer before them that has the same kind of window.
pub(crate) fn place(
    keys: &Keys<'_, '_>,
    arch: &Arch,
    layers: &mut [LayerConfig],
    recurrent: Option<&RecurrentConfig>,
    index_layers: usize,
) -> Result<(), LoadError> {
    let n = layers.len();
    let name = "attention.shared_kv_layers";
    let owners = match keys.u32(name)? {
        Some(shared) => n - keys.in_range(name, Some(shared), 0..=n as u32 - 1)?,
        None => arch.kv_layers.unwrap_or(n).min(n),
    };
    let (mut kv_layer, mut state_at, state_len) = (0usize, 0usize, recurrent.map_or(0, RecurrentConfig::state_len));
    for i in 0..n {
        let LayerConfig { mixer, window, heads, .. } = layers[i];
        if mixer.has_attention() && i >= owners {
            let source = layers[..owners].iter().rfind(|l| l.mixer.has_attention() && l.window == window);
            let Some(source) = source.filter(|l| l.heads.kv_heads() == heads.kv_heads()) else {
                let found = format!("layer {i}, whose window and KV heads no layer before layer {owners} has");
                return Err(keys.wrong(name, found, "a layer with the same window and KV heads"));
            };
            (layers[i].kv_layer, layers[i].owns_kv) = (source.kv_layer, false);
        } else if mixer.has_attention() {
            layers[i].kv_layer = kv_layer;
            kv_layer += layers[i].kv_layers();
            if let Selection::Own { kv_layer: index } = &mut layers[i].selection {
                *index = kv_layer;
                kv_layer += index_layers;
            }
        }
        layers[i].state_at = state_at;
        state_at = state_at.saturating_add(if mixer.is_recurrent() { state_len } else { 0 });
    }
    Ok(())
}

/// Widths of the dense feed-forwards; 0 in layers without a feed-forward.
fn ff_widths(keys: &Keys<'_, '_>, arch: &Arch, kinds: &[LayerKind], n_embd: usize) -> Result<Vec<usize>, LoadError> {
    let name = "feed_forward_length";
    // where all layers have experts (DeepSeek-V4, Qwen3.5), files do not state another width
    let experts = "expert_feed_forward_length";
    let is_known = keys.has(name) || !keys.has(experts);
    let widths = keys.per_layer_u32(if is_known { name } else { experts }, kinds.len())?;
    let width = |i: usize| {
        if !kinds[i].has_ffn {
            return Ok(0);
        }
        let n = keys.in_range(name, widths.as_ref().map(|widths| widths[i]), 1..=MAX_WIDTH)?;
        match n / if arch.doubled_ff { 2 } else { 1 } {
            0 => Err(keys.wrong(name, n, "an even number")),
            // Arctic's dense feed-forwards are as wide as the model
            _ if arch.expert_input == ExpertInput::Layer => Ok(n_embd),
            n => Ok(n),
        }
    };
    (0..kinds.len()).map(width).collect()
}

/// Activation sparsity of the layers; those without have 0 or -infinity in files.
fn sparsity(keys: &Keys<'_, '_>, arch: &Arch, n_layer: usize) -> Result<Vec<f32>, LoadError> {
    let name = "activation_sparsity_scale";
    let Some((n, scale)) = arch.sparsity else { return Ok(vec![0.0; n_layer]) };
    let values = match keys.f32_array(name)? {
        None => (0..n_layer).map(|i| if i < n { scale } else { 0.0 }).collect(),
        Some(values) => values,
    };
    if values.len() != n_layer || values.iter().any(|v| v.is_nan() || *v == f32::INFINITY) {
        return Err(keys.wrong(name, format!("{} values", values.len()), format!("{n_layer} numbers")));
    }
    Ok(values.into_iter().map(|v| if v > 0.0 { v } else { 0.0 }).collect())
}

/// Factor of attention scores if the file has none, of a model of `n_layer` layers.
fn score_scale(arch: &Arch, heads: &HeadConfig, (n_layer, n_embd): (usize, usize)) -> f32 {
    let is_by_width = arch.scaled_by_width == Some(n_layer) && heads.n_head > 0;
    let dim = heads.latent.map_or(heads.key_dim, |latent| latent.query());
    let width = if is_by_width { n_embd / heads.n_head } else { dim };
    match arch.score_scale {
        ScoreScale::Root => 1.0 / sqrt(width as f32),
        ScoreScale::Inverse => 1.0 / heads.key_dim as f32,
        ScoreScale::One => 1.0,
    }
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

//! Feed-forwards: what the metadata tell about them.

use alloc::vec::Vec;

use super::activation::activation;
use super::experts::config::{self, ExpertsConfig};
use crate::error::LoadError;
use crate::gguf::Gguf;
use crate::kernels::elementwise::{Activation, Xielu};
use crate::math::{exp, ln};
use crate::model::family::{ExpertInput, Family, Swiglu};
use crate::model::keys::{Keys, MAX_WIDTH};
use crate::model::mixers::kind::LayerKind;

/// Feed-forwards of a model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FfnConfig {
    /// The activation.
    pub act: Activation,
    /// The same in feed-forwards without a gate.
    pub ungated_act: Activation,
    /// Activation of gate and up.
    pub swiglu: Swiglu,
    /// Whether dense feed-forwards and shared experts are limited as [`Swiglu::Limited`].
    pub limits_dense: bool,
    /// Betas of the activation SiTU of gate and up, if the model has it; the second is 0 if `up` is used as it is.
    pub situ: Option<[f32; 2]>,
    /// Experts, if the model has any.
    pub experts: Option<ExpertsConfig>,
}

/// The feed-forward of a layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LayerFfn {
    /// Whether the layer has one.
    pub exists: bool,
    /// Width of the dense feed-forward.
    pub width: usize,
    /// Whether the token, instead of the router, selects the experts.
    pub routes_by_token: bool,
    /// Limit of the products of an expert's gate and up; 0 for none.
    pub expert_limit: f32,
    /// The same for the shared expert, and dense feed-forwards.
    pub shared_limit: f32,
    /// Activation sparsity of the dense feed-forward: the gates below `mean + sparsity * deviation` become 0; 0 for none.
    pub sparsity: f32,
    /// The activation, where it is xIELU.
    pub xielu: Option<Xielu>,
}

impl FfnConfig {
    pub(crate) fn read(
        keys: &Keys<'_, '_>,
        family: &Family,
        n_embd: usize,
        n_blocks: usize,
        shards: &[Gguf<'_>],
    ) -> Result<FfnConfig, LoadError> {
        let widths = keys.per_layer_u32("feed_forward_length", n_blocks)?.unwrap_or_default();
        let experts = config::read(keys, family, n_embd, widths.into_iter().max().unwrap_or(0) as usize, shards)?;
        let act = activation(keys, family)?;
        let (swiglu, situ) = (family.swiglu, situ(keys)?);
        Ok(FfnConfig { act, ungated_act: act, swiglu, limits_dense: false, situ, experts })
    }
}

/// Reads the feed-forwards of the layers of a model of width `n_embd`.
pub(crate) fn layers(
    keys: &Keys<'_, '_>,
    family: &Family,
    kinds: &[LayerKind],
    n_embd: usize,
) -> Result<Vec<LayerFfn>, LoadError> {
    let n = kinds.len();
    let n_by_token = keys.u32("hash_layer_count")?.unwrap_or(0) as usize;
    let [expert_limits, shared_limits] =
        [keys.per_layer_f32("swiglu_clamp_exp", n)?, keys.per_layer_f32("swiglu_clamp_shexp", n)?];
    let (xielu, widths) = (xielu(keys, n)?, widths(keys, family, kinds, n_embd)?);
    let layer = |i: usize| LayerFfn {
        exists: kinds[i].has_ffn,
        width: widths[i],
        routes_by_token: i < n_by_token,
        expert_limit: match family.swiglu {
            Swiglu::Limited(limit) if expert_limits[i] == 0.0 => limit,
            _ => expert_limits[i],
        },
        shared_limit: shared_limits[i],
        sparsity: 0.0,
        xielu: xielu.as_ref().map(|all| all[i]),
    };
    Ok((0..n).map(layer).collect())
}

/// Widths of the dense feed-forwards; 0 in layers without a feed-forward.
fn widths(keys: &Keys<'_, '_>, family: &Family, kinds: &[LayerKind], n_embd: usize) -> Result<Vec<usize>, LoadError> {
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
        // Arctic's dense feed-forwards are as wide as the model
        Ok(if family.expert_input == ExpertInput::Layer { n_embd } else { n })
    };
    (0..kinds.len()).map(width).collect()
}

/// xIELU of each layer, if the file has its parameters.
fn xielu(keys: &Keys<'_, '_>, n: usize) -> Result<Option<Vec<Xielu>>, LoadError> {
    // these keys have a prefix of their own
    let keys = keys.with_prefix("xielu");
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

fn situ(keys: &Keys<'_, '_>) -> Result<Option<[f32; 2]>, LoadError> {
    let beta = keys.optional("activation.situ_beta")?;
    let linear = keys.f32("activation.situ_linear_beta")?.unwrap_or(0.0);
    Ok(beta.map(|beta| [beta, if linear > 0.0 { linear } else { 0.0 }]))
}

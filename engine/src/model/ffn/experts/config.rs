//! Experts.

use alloc::format;

use crate::error::LoadError;
use crate::gguf::Gguf;
use crate::model::family::{ExpertInput, Family, Gating};
use crate::model::keys::Keys;
use crate::model::keys::MAX_WIDTH;

/// Maximal experts of a layer, and experts per token: beyond any known model.
const MAX_EXPERTS: u32 = 4096;
const MAX_EXPERTS_USED: u32 = 64;

/// Parameters of the experts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertsConfig {
    /// Number of experts per layer.
    pub n: usize,
    /// Experts per token.
    pub n_used: usize,
    /// Width of an expert's input and output; `n_embd` unless experts work in a latent space.
    pub width: usize,
    /// Width of an expert's feed-forward.
    pub n_ff: usize,
    /// Width of the shared expert's feed-forward.
    pub n_ff_shared: usize,
    /// Whether the weights of the selected experts are normalised to sum to 1.
    pub normalised: bool,
    /// Factor on the experts' weights.
    pub scale: f32,
    /// How scores become weights.
    pub gating: Gating,
    /// Groups of experts, and the number of groups that a token's experts are chosen from.
    pub groups: Option<(usize, usize)>,
    /// Adjugate experts (GroveMoE), if the model has any.
    pub adjugates: Option<AdjugatesConfig>,
    /// What the experts of a layer read.
    pub input: ExpertInput,
    /// Whether experts have gates.
    pub is_gated: bool,
    /// Whether the weight of an expert multiplies its input instead of its output.
    pub weighted_inputs: bool,
    /// Whether layers with experts have a dense feed-forward beside them.
    pub dense_beside: bool,
    /// Factor on the sum of routed and shared experts.
    pub shared_factor: f32,
}

/// Parameters of adjugate experts (Wu et al., arXiv:2508.07785): neighbouring experts share one.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdjugatesConfig {
    /// Experts that share an adjugate expert.
    pub per_group: usize,
    /// Width of an adjugate expert's feed-forward.
    pub n_ff: usize,
    /// Factor on their outputs.
    pub scale: f32,
}

impl ExpertsConfig {
    /// Number of adjugate experts per layer.
    pub fn n_adjugates(&self) -> usize {
        self.adjugates.map_or(0, |a| self.n / a.per_group)
    }
}

fn adjugates(keys: &Keys<'_, '_>, n: usize, n_used: usize) -> Result<Option<AdjugatesConfig>, LoadError> {
    let name = "experts_per_group";
    let per_group = match keys.u32(name)? {
        None => return Ok(None),
        v => keys.in_range(name, v, 1..=n as u32)?,
    };
    if !n.is_multiple_of(per_group) || n / per_group < n_used {
        let expected = format!("a divisor of expert_count, {n}, with at least expert_used_count, {n_used}, groups");
        return Err(keys.wrong(name, per_group, expected));
    }
    Ok(Some(AdjugatesConfig {
        per_group,
        n_ff: keys.size("expert_chunk_feed_forward_length", 1..=MAX_WIDTH)?,
        scale: keys
            .f32("expert_group_scale")?
            .ok_or_else(|| keys.wrong("expert_group_scale", "nothing", "a number"))?,
    }))
}

pub(crate) fn read(
    keys: &Keys<'_, '_>,
    family: &Family,
    n_embd: usize,
    n_ff: usize,
    shards: &[Gguf<'_>],
) -> Result<Option<ExpertsConfig>, LoadError> {
    let n = match keys.u32("expert_count")? {
        None | Some(0) => return Ok(None),
        v => keys.in_range("expert_count", v, 1..=MAX_EXPERTS)?,
    };
    let (gating, over_selected) = match keys.u32("expert_gating_func")? {
        None | Some(0) => (family.gating, false),
        Some(1) => (Gating::Softmax, false),
        Some(2) => (Gating::Sigmoid, false),
        // a softmax over the selected experts is a softmax over all, normalised
        Some(3) => (Gating::Softmax, true),
        Some(4) => (Gating::SqrtSoftplus, false),
        Some(other) => {
            let (found, known) = (format!("{other}"), ["softmax", "sigmoid", "sqrtsoftplus"].into());
            return Err(LoadError::Unsupported { what: "expert gating function", found, known });
        }
    };
    let groups = match keys.u32("expert_group_count")? {
        None | Some(0..=1) => None,
        v => {
            let n_groups = keys.in_range("expert_group_count", v, 1..=n as u32)?;
            if n % n_groups != 0 {
                return Err(keys.wrong("expert_group_count", n_groups, format!("a divisor of expert_count, {n}")));
            }
            let used = keys.u32("expert_group_used_count")?;
            Some((n_groups, keys.in_range("expert_group_used_count", used, 1..=n_groups as u32)?))
        }
    };
    let width = |name: &str| match keys.u32(name)? {
        None | Some(0) => keys.in_range("feed_forward_length", Some(n_ff as u32), 1..=MAX_WIDTH),
        v => keys.in_range(name, v, 1..=MAX_WIDTH),
    };
    let n_used = keys.size("expert_used_count", 1..=MAX_EXPERTS_USED.min(n as u32))?;
    if let Some((n_groups, used)) = groups
        && n_used > used * (n / n_groups)
    {
        return Err(keys.wrong("expert_used_count", n_used, "at most the experts of the used groups"));
    }
    // llama.cpp takes feed_forward_length for some families, whatever the other key says
    let expert_ff = match width("expert_feed_forward_length")? {
        stated if stated != n_ff && expert_width(shards) == Some(n_ff as u64) => n_ff,
        stated => stated,
    };
    let n_ff_shared = match (keys.u32("expert_shared_feed_forward_length")?, keys.u32("expert_shared_count")?) {
        (None | Some(0), Some(count @ 1..)) => {
            let n = keys.in_range("expert_shared_count", Some(count), 1..=MAX_EXPERTS)?;
            keys.in_range("expert_shared_count", Some((n * expert_ff).min(u32::MAX as usize) as u32), 1..=MAX_WIDTH)?
        }
        (None | Some(0), _) if family.shared_as_expert => expert_ff,
        _ => width("expert_shared_feed_forward_length")?,
    };
    Ok(Some(ExpertsConfig {
        n,
        n_used,
        width: latent_width(keys)?.unwrap_or(n_embd),
        n_ff: expert_ff,
        n_ff_shared,
        gating,
        groups,
        adjugates: adjugates(keys, n, n_used)?,
        normalised: over_selected || keys.bool("expert_weights_norm")?.unwrap_or(family.normalised_experts),
        scale: keys.optional("expert_weights_scale")?.unwrap_or(1.0),
        input: family.expert_input,
        is_gated: true,
        weighted_inputs: false,
        dense_beside: family.dense_beside_experts,
        shared_factor: 1.0,
    }))
}

/// Width of the feed-forward of an expert in the tensors of the first layer with experts.
fn expert_width(shards: &[Gguf<'_>]) -> Option<u64> {
    let is_down = |name: &str| name.ends_with(".ffn_down_exps.weight") || name.ends_with(".ffn_down.0.weight");
    let mut tensors = shards.iter().flat_map(Gguf::tensors);
    tensors.find(|t| is_down(t.name)).map(|t| t.dims[0])
}

/// Width of the latent space of the experts, if they have one.
fn latent_width(keys: &Keys<'_, '_>) -> Result<Option<usize>, LoadError> {
    for name in ["moe_latent_size", "expert_latent_length"] {
        if let Some(width @ 1..) = keys.u32(name)? {
            return keys.in_range(name, Some(width), 1..=MAX_WIDTH).map(Some);
        }
    }
    Ok(None)
}

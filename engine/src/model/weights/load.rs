//! Assembles the weights from the tensors of a file.

use alloc::boxed::Box;
use alloc::format;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;

use crate::error::LoadError;
use crate::math::sqrt;
use crate::model::config::{Config, MixerKind};
use crate::model::embeddings::ngrams::NgramWeights;
use crate::model::heads::classifier::Classifier;
use crate::model::heads::projection;
use crate::model::loader::LoadedTensors;
use crate::model::mixers::{CompressedWeights, IndexerWeights, LatentWeights};
use crate::model::residual::hyper::HyperWeights;
use crate::model::roles::tensor_error;
use crate::model::weights::{
    AltUp, AltUpProjections, AttentionWeights, ChannelMix, Dense, ExpertMatrices, Experts, FeedForward, Laurel, Layer,
    LayerEmbedding, LayerEmbeddings, Linear, LinearGroup, Mixer, Norm, Recurrent, ResidualOrder, RopeDivisors,
    SharedExpert, Weights,
};

impl Weights {
    /// Takes the tensors of a file and assembles the weights.
    ///
    /// # Errors
    /// [`LoadError`] of a tensor that is missing, or whose shape does not fit another's.
    pub(crate) fn new(tensors: &mut LoadedTensors, c: &Config) -> Result<Weights, LoadError> {
        let layers = Weights::layers(tensors, c)?;
        let divisors = |tensors: &mut LoadedTensors, name: &str| tensors.optional(&format!("rope_{name}.weight"));
        let rope_divisors =
            match (divisors(tensors, "freqs"), divisors(tensors, "factors_short"), divisors(tensors, "factors_long")) {
                (Some(all), ..) => RopeDivisors::All(all),
                (None, Some(short), Some(long)) => RopeDivisors::ByContext { short, long },
                _ => RopeDivisors::None,
            };
        Ok(Weights {
            embedding: Arc::new(tensors.matrix("token_embd.weight")?),
            mtp_input: None,
            is_shared: [false; 2],
            token_types: if tensors.has("token_types.weight") {
                Some(tensors.matrix("token_types.weight")?)
            } else {
                None
            },
            low_state: tensors.optional("hrm.z_l_init"),
            altup: match (tensors.matrices("altup_proj.weight"), tensors.matrices("altup_unembd_proj.weight")) {
                (Some(split), Some(merge)) => Some(AltUpProjections { split, merge }),
                _ => None,
            },
            layer_embeddings: match c.embedding.per_layer {
                0 => None,
                _ => Some(LayerEmbeddings {
                    table: tensors.matrix("per_layer_token_embd.weight")?,
                    proj: linear(tensors, "per_layer_model_proj")?,
                    norm: required_norm(tensors, "per_layer_proj_norm")?,
                }),
            },
            ngram_table: match c.embedding.ngrams {
                Some(_) => Some(tensors.matrix("per_layer_token_embd.weight")?),
                None => None,
            },
            embedding_norm: norm(tensors, "token_embd_norm")?.or(c.embedding.plain_norm.then(|| Norm::plain(c.n_embd))),
            positions: if c.embedding.learned_positions { Some(tensors.matrix("position_embd.weight")?) } else { None },
            layers,
            final_norm: norm(tensors, "output_norm")?.or(c.norm.plain.then(|| Norm::plain(c.n_embd))),
            hyper_output: match HyperWeights::load(tensors, "output_hc", c.n_embd)? {
                None if c.attention.compressed.is_some() => return Err(missing("output_hc_fn.weight")),
                weights => weights,
            },
            residual_score: tensors.optional("output_res_score.weight"),
            output_bias: tensors.optional("output.bias"),
            output: match tensors.has("output.weight") {
                true => Some(Arc::new(tensors.matrix("output.weight")?)),
                false => None,
            },
            rope_divisors,
            projections: projections(tensors, c.n_embd)?,
            classifier: Classifier::load(tensors, c)?,
        })
    }

    /// The layers.
    pub(crate) fn layers(tensors: &mut LoadedTensors, c: &Config) -> Result<Vec<Layer>, LoadError> {
        let mut layers = (0..c.n_blocks()).map(|i| layer(tensors, c, i)).collect::<Result<Vec<_>, _>>()?;
        share_biases(c, &mut layers)?;
        // without this norm a block is parallel: all layers must have it, or none
        let lacks_norm = |l: &Layer| l.ffn_norm.is_none() && !matches!(l.ffn, FeedForward::None);
        if layers.iter().any(|l| l.ffn_norm.is_some())
            && let Some(i) = layers.iter().position(lacks_norm)
        {
            return Err(missing(&format!("blk.{i}.ffn_norm.weight")));
        }
        Ok(layers)
    }
}

pub(crate) fn missing(name: &str) -> LoadError {
    LoadError::MissingTensor { name: name.into() }
}

pub(crate) fn linear(tensors: &mut LoadedTensors, name: &str) -> Result<Linear, LoadError> {
    let (w, bias) = (tensors.matrix(&format!("{name}.weight"))?, tensors.optional(&format!("{name}.bias")));
    match &bias {
        Some(b) if b.len() != w.rows() => Err(tensor_error(
            &format!("{name}.bias"),
            &format!("shape [{}]", b.len()),
            &format!("shape [{}]", w.rows()),
        )),
        _ => Ok(Linear { w, bias }),
    }
}

pub(crate) fn norm(tensors: &mut LoadedTensors, name: &str) -> Result<Option<Norm>, LoadError> {
    let bias = tensors.optional(&format!("{name}.bias"));
    let weight = format!("{name}.weight");
    // in files of some families a norm is named without the suffix
    match (tensors.vector(&weight).or_else(|| tensors.vector(name)), bias) {
        (Some((weight, width)), bias) => Ok(Some(Norm { weight, bias, eps: None, width })),
        (None, None) => Ok(None),
        (None, Some(_)) => Err(missing(&weight)),
    }
}

/// A norm that must be there.
pub(crate) fn required_norm(tensors: &mut LoadedTensors, name: &str) -> Result<Norm, LoadError> {
    norm(tensors, name)?.ok_or_else(|| missing(&format!("{name}.weight")))
}

/// Values with rows and columns exchanged.
pub(crate) fn transposed(tensors: &mut LoadedTensors, name: &str) -> Result<Vec<f32>, LoadError> {
    let (values, width) = tensors.vector(name).ok_or_else(|| missing(name))?;
    Ok((0..width).flat_map(|i| values.iter().skip(i).step_by(width).copied()).collect())
}

/// The projections of pooled embeddings; each has as many columns as the one before has rows.
fn projections(tensors: &mut LoadedTensors, mut width: usize) -> Result<Vec<Linear>, LoadError> {
    let mut all = Vec::new();
    for name in projection::NAMES {
        let weight = format!("{name}.weight");
        if !tensors.has(&weight) {
            continue;
        }
        let projection = linear(tensors, name)?;
        let (k, rows) = (projection.w.k(), projection.w.rows());
        if k != width {
            return Err(tensor_error(&weight, &format!("shape [{k}, {rows}]"), &format!("shape [{width}, {rows}]")));
        }
        width = rows;
        all.push(projection);
    }
    Ok(all)
}

/// A norm of heads, with a factor per element if the file has one per head.
fn per_element(norm: Norm, dim: usize) -> Norm {
    if norm.width > 1 || norm.bias.is_some() {
        return norm;
    }
    let weight = norm.weight.iter().flat_map(|w| core::iter::repeat_n(*w, dim)).collect();
    Norm { weight, width: dim, ..norm }
}

fn attention(tensors: &mut LoadedTensors, c: &Config, i: usize) -> Result<AttentionWeights, LoadError> {
    let name = |part: &str| format!("blk.{i}.{part}");
    let config = c.block(i);
    let (heads, owns_kv) = (&config.attention.heads, config.attention.owns_kv);
    let has_values = tensors.has(&name("attn_v.weight")) || tensors.has(&name("attn_qkv.weight"));
    let values_from_keys = owns_kv && c.attention.values_from_keys && !has_values;
    if values_from_keys && heads.key_dim != heads.value_dim {
        return Err(missing(&name("attn_v.weight")));
    }
    let mut qkv = if tensors.has(&name("attn_qkv.weight")) {
        let parts = [c.attention.q_rows(heads), heads.k_width(), heads.v_width()];
        LinearGroup::fused(linear(tensors, &name("attn_qkv"))?, &parts)
    } else {
        let mut group = LinearGroup::separate(vec![linear(tensors, &name("attn_q"))?]);
        if owns_kv {
            group.push(linear(tensors, &name("attn_k"))?);
        }
        if owns_kv && !values_from_keys {
            group.push(linear(tensors, &name("attn_v"))?);
        } else if owns_kv {
            group.reserve(heads.v_width());
        }
        group
    };
    let kv_at = match qkv.part_starts[..] {
        [_, k_at, v_at, ..] => [k_at, v_at],
        _ => [0; 2],
    };
    let gate_at = tensors.has(&name("attn_gate.weight")).then_some(qkv.stride);
    if gate_at.is_some() {
        qkv.push(linear(tensors, &name("attn_gate"))?);
    }
    let head_norm =
        || (c.attention.plain_head_norms && config.attention.rope.is_some()).then(|| Norm::plain(heads.key_dim));
    Ok(AttentionWeights {
        qkv,
        kv_at,
        gate_at,
        values_from_keys,
        v_norm: c.attention.plain_value_norm.then(|| Norm::plain(heads.value_dim)),
        attn_sub_norm: norm(tensors, &name("attn_sub_norm"))?,
        distance_bias: tensors
            .vector(&name("attn_rel_b.weight"))
            .and_then(|(values, n_head)| c.attention.distances.map(|d| d.biases(&values, n_head))),
        sinks: tensors.optional(&name("attn_sinks.weight")),
        q_norm: norm(tensors, &name("attn_q_norm"))?.map(|n| per_element(n, heads.key_dim)).or_else(head_norm),
        k_norm: norm(tensors, &name("attn_k_norm"))?.map(|n| per_element(n, heads.key_dim)).or_else(head_norm),
        o: linear(tensors, &name("attn_output"))?,
    })
}

/// Layers without biases by distance have those of the first.
fn share_biases(c: &Config, layers: &mut [Layer]) -> Result<(), LoadError> {
    let Some(distances) = c.attention.distances else { return Ok(()) };
    let mut first: Option<Vec<f32>> = None;
    for (i, layer) in layers.iter_mut().enumerate() {
        let Mixer::Attention(a) = &mut layer.mixer else { continue };
        let len = c.block(i).attention.heads.n_head * (2 * distances.max + 1);
        if a.distance_bias.is_none() {
            a.distance_bias = first.clone().filter(|biases| biases.len() == len);
        }
        match &a.distance_bias {
            None => return Err(missing(&format!("blk.{i}.attn_rel_b.weight"))),
            Some(biases) if first.is_none() => first = Some(biases.clone()),
            Some(_) => {}
        }
    }
    Ok(())
}

fn mixer(tensors: &mut LoadedTensors, c: &Config, i: usize) -> Result<Mixer, LoadError> {
    let kind = c.block(i).mixer;
    let recurrent = match c.recurrent.as_ref().filter(|_| kind.is_recurrent()) {
        Some(config) => Some(Recurrent::load(config, tensors, i)?),
        None => None,
    };
    if let Some(sizes) = c.block(i).attention.heads.latent {
        return Ok(Mixer::Latent(Box::new(LatentWeights::load(c.block(i), sizes, tensors, i)?)));
    }
    if kind == MixerKind::Compressed {
        return Ok(Mixer::Compressed(Box::new(CompressedWeights::load(&c.block(i).attention, tensors, i)?)));
    }
    let attention = if kind.has_attention() { Some(attention(tensors, c, i)?) } else { None };
    if kind == MixerKind::Linear {
        return Ok(Mixer::Linear(Box::new(linear(tensors, &format!("blk.{i}.attn_output"))?)));
    }
    Ok(match (attention, recurrent) {
        (Some(a), Some(r)) => Mixer::Both(Box::new((a, r))),
        (Some(a), None) => Mixer::Attention(Box::new(a)),
        (None, Some(r)) => Mixer::Recurrent(r),
        (None, None) => Mixer::None,
    })
}

fn layer(tensors: &mut LoadedTensors, c: &Config, i: usize) -> Result<Layer, LoadError> {
    let name = |part: &str| format!("blk.{i}.{part}");
    let mixer = mixer(tensors, c, i)?;
    let mut attn_norm = norm(tensors, &name("attn_norm"))?.or(c.norm.plain.then(|| Norm::plain(c.n_embd)));
    let mut ffn_norm = norm(tensors, &name("ffn_norm"))?.or(c.norm.plain.then(|| Norm::plain(c.n_embd)));
    if c.residual.swapped_norms && ffn_norm.is_some() {
        core::mem::swap(&mut attn_norm, &mut ffn_norm);
    }
    let ffn = match &c.ffn.experts {
        _ if !c.block(i).ffn.exists => FeedForward::None,
        Some(e) if tensors.has(&name("ffn_gate_inp.weight")) => {
            FeedForward::Experts(Box::new(experts(tensors, c, (e.n, c.block(i).ffn.width), &name)?))
        }
        _ if tensors.has(&name("channel_mix_key.weight")) => {
            FeedForward::ChannelMix(Box::new(ChannelMix::load(tensors, &name)?))
        }
        _ => FeedForward::Dense(Box::new(dense(tensors, c.block(i).ffn.width, "", &name)?)),
    };
    let is_partial = matches!(mixer, Mixer::None) || matches!(ffn, FeedForward::None);
    if matches!(mixer, Mixer::None) && ffn_norm.is_none() {
        ffn_norm = attn_norm.take();
    }
    // a block is parallel if it has one norm for both sub-layers, or if the metadata says so
    let has_one_norm = attn_norm.is_some() && ffn_norm.is_none() && !is_partial;
    let parallel = !c.residual.post_norm && (c.residual.parallel || has_one_norm);
    if parallel && attn_norm.is_none() {
        return Err(missing(&name("attn_norm.weight")));
    }
    for part in ["post_attention_norm.weight", "post_ffw_norm.weight"].map(name) {
        if parallel && tensors.has(&part) {
            let found = "a norm after a sub-layer of a parallel block";
            return Err(tensor_error(&part, found, "no such norm where attention and feed-forward are parallel"));
        }
    }
    let order = match (norm(tensors, &name("attn_output_norm"))?, norm(tensors, &name("layer_output_norm"))?) {
        (Some(attn), Some(ffn)) => ResidualOrder::PostNorm([attn, ffn]),
        _ if parallel => ResidualOrder::Parallel,
        _ if c.residual.hyper.is_some() => {
            let [attn, ffn] = ["hc_attn", "hc_ffn"].map(|part| HyperWeights::load(tensors, &name(part), c.n_embd));
            let missing = || missing(&name("hc_attn_fn.weight"));
            ResidualOrder::Hyper(Box::new([attn?.ok_or_else(missing)?, ffn?.ok_or_else(missing)?]))
        }
        _ if c.residual.n_altup > 0 => ResidualOrder::AltUp(Box::new(altup(tensors, &name)?)),
        _ if c.residual.normed => ResidualOrder::Normed,
        _ if c.residual.block > 0 => {
            let [attn, ffn] = ["attn_res_score.weight", "ffn_res_score.weight"].map(|p| tensors.required(&name(p)));
            ResidualOrder::Attended([attn?, ffn?])
        }
        _ => ResidualOrder::Serial,
    };
    let embedding = match c.embedding.per_layer {
        0 => None,
        _ => Some(LayerEmbedding {
            gate: linear(tensors, &name("inp_gate"))?,
            proj: linear(tensors, &name("proj"))?,
            norm: required_norm(tensors, &name("post_norm"))?,
        }),
    };
    let output_scale = tensors.optional(&name("layer_output_scale.weight")).and_then(|v| v.first().copied());
    let with_eps = |norm: Norm| Norm { eps: c.residual.post_norm_eps, ..norm };
    Ok(Layer {
        order,
        mixer,
        ngrams: NgramWeights::load(c, tensors, i)?.map(Box::new),
        indexer: IndexerWeights::load(c, tensors, i)?,
        second_norm: norm(tensors, &name("attn_norm_2"))?,
        post_attn_norm: norm(tensors, &name("post_attention_norm"))?.map(with_eps),
        ffn,
        post_ffn_norm: norm(tensors, &name("post_ffw_norm"))?.map(with_eps),
        embedding,
        output_scale: output_scale.filter(|_| !c.embedding.skips),
        embedding_skip: output_scale.filter(|_| c.embedding.skips),
        attn_norm,
        ffn_norm,
    })
}

fn altup(tensors: &mut LoadedTensors, name: &dyn Fn(&str) -> String) -> Result<AltUp, LoadError> {
    let laurel = Laurel {
        left: linear(tensors, &name("laurel_l"))?,
        right: linear(tensors, &name("laurel_r"))?,
        norm: required_norm(tensors, &name("laurel_post_norm"))?,
    };
    if laurel.left.w.rows() != laurel.right.w.k() {
        let [found, expected] = [laurel.right.w.k(), laurel.left.w.rows()].map(|rank| format!("rank {rank}"));
        return Err(tensor_error(&name("laurel_r.weight"), &found, &format!("{expected}, that of laurel_l.weight")));
    }
    Ok(AltUp {
        router_norm: required_norm(tensors, &name("altup_router_norm"))?,
        router: linear(tensors, &name("altup_router"))?,
        predict: tensors.required(&name("altup_predict_coef.weight"))?,
        correct: tensors.required(&name("altup_correct_coef.weight"))?,
        correct_scale: tensors.required(&name("altup_correct_scale.weight"))?,
        laurel,
    })
}

/// A dense feed-forward whose tensor names end in `suffix`.
fn dense(
    tensors: &mut LoadedTensors,
    n_ff: usize,
    suffix: &str,
    name: &dyn Fn(&str) -> String,
) -> Result<Dense, LoadError> {
    let gate = name(&format!("ffn_gate{suffix}"));
    let has_gate = tensors.has(&format!("{gate}.weight"));
    let up_name = name(&format!("ffn_up{suffix}"));
    let up = linear(tensors, &up_name)?;
    let fused = up.w.rows() == 2 * n_ff;
    let up = match (has_gate, fused) {
        (true, false) => LinearGroup::separate(vec![linear(tensors, &gate)?, up]),
        (false, true) => LinearGroup::fused(up, &[n_ff, n_ff]),
        (false, false) => LinearGroup::separate(vec![up]),
        (true, true) => {
            let found = format!("{} rows beside `{gate}.weight`", 2 * n_ff);
            return Err(tensor_error(&format!("{up_name}.weight"), &found, &format!("{n_ff} rows")));
        }
    };
    let sub_norm = if suffix.is_empty() { norm(tensors, &name("ffn_sub_norm"))? } else { None };
    Ok(Dense { up, sub_norm, down: linear(tensors, &name(&format!("ffn_down{suffix}")))? })
}

/// Numbers of experts, all below `n`.
fn expert_ids(name: &str, ids: &[f32], n: usize) -> Result<Vec<u32>, LoadError> {
    match ids.iter().find(|id| !(0.0..n as f32).contains(*id)) {
        Some(id) => Err(tensor_error(name, &format!("expert {id}"), &format!("0 to {}", n - 1))),
        None => Ok(ids.iter().map(|id| *id as u32).collect()),
    }
}

fn experts(
    tensors: &mut LoadedTensors,
    c: &Config,
    (n, n_ff): (usize, usize),
    name: &dyn Fn(&str) -> String,
) -> Result<Experts, LoadError> {
    let fused = tensors.matrices(&name("ffn_gate_up_exps.weight"));
    let mut stack = |part: &str| match tensors.matrices(&name(&format!("{part}_exps.weight"))) {
        Some(all) => Ok(all),
        None => (0..n).map(|i| tensors.matrix(&name(&format!("{part}.{i}.weight")))).collect(),
    };
    let is_separate = fused.is_none() && c.ffn.experts.is_some_and(|experts| experts.is_gated);
    let gate = if is_separate { stack("ffn_gate")? } else { Vec::new() };
    let up = if let Some(fused) = fused { fused } else { stack("ffn_up")? };
    let down = stack("ffn_down")?;
    let biases = ["gate", "up", "down"].map(|part| tensors.optional(&name(&format!("ffn_{part}_exps.bias"))));
    let mut adjugate = |part: &str| {
        let name = name(&format!("ffn_{part}_chexps.weight"));
        tensors.matrices(&name).ok_or(LoadError::MissingTensor { name })
    };
    let adjugates = match c.ffn.experts.and_then(|e| e.adjugates) {
        Some(_) => Some(ExpertMatrices {
            gate: adjugate("gate")?,
            up: adjugate("up")?,
            down: adjugate("down")?,
            biases: Default::default(),
        }),
        None => None,
    };
    let shared_gate = name("ffn_gate_inp_shexp");
    let shared = if tensors.has(&name("ffn_up_shexp.weight")) {
        let gate = match tensors.has(&format!("{shared_gate}.weight")) {
            true => Some(linear(tensors, &shared_gate)?),
            false => None,
        };
        // a shared expert is never fused, so its width must not match `2 * n_ff`
        Some(SharedExpert { gate, ffn: dense(tensors, usize::MAX / 2, "_shexp", name)?, post_norm: None })
    } else if c.ffn.experts.is_some_and(|experts| experts.dense_beside) && tensors.has(&name("ffn_up.weight")) {
        Some(SharedExpert {
            gate: None,
            ffn: dense(tensors, n_ff, "", name)?,
            post_norm: norm(tensors, &name("post_ffw_norm_1"))?,
        })
    } else {
        None
    };
    let input_norm = match norm(tensors, &name("ffn_norm_exps"))? {
        None => norm(tensors, &name("pre_ffw_norm_2"))?,
        norm => norm,
    };
    let router_norm = tensors.optional(&name("ffn_gate_inp.scale")).map(|mut weight| {
        let factor = 1.0 / sqrt(c.n_embd as f32);
        weight.iter_mut().for_each(|w| *w *= factor);
        Norm { weight, bias: None, eps: None, width: c.n_embd }
    });
    let by_token = match tensors.optional(&name("ffn_gate_tid2eid.weight")) {
        Some(ids) => Some(expert_ids(&name("ffn_gate_tid2eid.weight"), &ids, n)?),
        None => None,
    };
    let selection_bias = tensors.optional(&name("exp_probs_b.bias"));
    let width = c.ffn.experts.map_or(c.n_embd, |e| e.width);
    let latent = if width != c.n_embd || tensors.has(&name("ffn_latent_down.weight")) {
        Some([linear(tensors, &name("ffn_latent_down"))?, linear(tensors, &name("ffn_latent_up"))?])
    } else {
        None
    };
    Ok(Experts {
        by_token,
        router: linear(tensors, &name("ffn_gate_inp"))?,
        selection_bias,
        matrices: ExpertMatrices { gate, up, down, biases },
        adjugates,
        latent,
        latent_norm: norm(tensors, &name("ffn_latent_norm"))?,
        input_norm,
        router_norm,
        post_norm: norm(tensors, &name("post_ffw_norm_2"))?,
        output_scale: tensors.optional(&name("ffn_down_exps.scale")),
        shared,
    })
}

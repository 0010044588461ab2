//! The tensors outside of layers and those of all layers. A mixer's own stand in its file.

use crate::model::config::{Config, MixerKind};
use crate::model::family::ExpertInput;
use crate::model::ffn::experts::ExpertsConfig;
use crate::model::keys::MAX_WIDTH;
use crate::model::residual::PassEnd;
use crate::model::roles::{Layout, Need, Part, Role, Scope, TensorRow, matrix, values, vector};

const SEPARATE_QKV: (&str, &str) = ("attn_qkv", "either the fused or the separate tensors");
const DENSE: (&str, &str) = ("ffn_gate_inp", "either a dense feed-forward or experts");
const FUSED_EXPERTS: (&str, &str) = ("ffn_gate_up_exps", "either the fused or the separate tensors");
const TWO_DIVISORS: (&str, &str) = ("rope_freqs", "either one set of RoPE divisors or two");

const FUSED: &[Layout] = &[(Part::Qkv, 0)];
const SEPARATE: &[Layout] = &[(Part::Qkv, 1)];
const EXPERTS: &[Layout] = &[(Part::FeedForward, 0)];
const GATED: &[Layout] = &[(Part::FeedForward, 1)];
const ANY_DENSE: &[Layout] = &[(Part::FeedForward, 1), (Part::FeedForward, 2)];

/// The norm of the input of a sub-layer.
fn input_norm(c: &Scope<'_>, _: &[u64; 4]) -> Option<Role> {
    if c.norm.plain || c.residual.has_gated_streams() { None } else { vector(c.n_embd) }
}

/// The norm of the input of attention.
fn attention_norm(c: &Scope<'_>, dims: &[u64; 4]) -> Option<Role> {
    match dims {
        // not required
        [0, ..] if c.residual.optional_first_norm && c.layer.block == 0 => None,
        _ => input_norm(c, dims),
    }
}

fn embedding_wide(c: &Scope<'_>, _: &[u64; 4]) -> Option<Role> {
    vector(c.n_embd)
}

/// Weights of the scores of residual streams.
fn residual_score(c: &Scope<'_>, _: &[u64; 4]) -> Option<Role> {
    if c.residual.block > 0 { vector(c.n_embd) } else { None }
}

fn final_norm(c: &Scope<'_>, _: &[u64; 4]) -> Option<Role> {
    if c.residual.post_norm || c.norm.plain || c.residual.has_gated_streams() { None } else { vector(c.n_embd) }
}

fn post_norm_only(c: &Scope<'_>, _: &[u64; 4]) -> Option<Role> {
    if c.residual.post_norm { vector(c.n_embd) } else { None }
}

fn rope_divisors(c: &Scope<'_>, _: &[u64; 4]) -> Option<Role> {
    vector(c.attention.rope_pairs())
}

/// A projection has any shape; each must fit the one before.
fn projection_matrix(_: &Scope<'_>, dims: &[u64; 4]) -> Option<Role> {
    matrix(width(dims[1]), width(dims[0]))
}

fn projection_bias(_: &Scope<'_>, dims: &[u64; 4]) -> Option<Role> {
    vector(width(dims[0]))
}

/// A width that only the tensor itself states.
fn width(dim: u64) -> usize {
    dim.min(u64::from(MAX_WIDTH)) as usize
}

/// Rows of the fused projection of queries, keys and values.
fn qkv_rows(c: &Scope<'_>) -> usize {
    q_rows(c) + c.layer.attention.heads.k_width() + c.layer.attention.heads.v_width()
}

/// Rows of the query projection, which may give gates too.
fn q_rows(c: &Scope<'_>) -> usize {
    c.attention.q_rows(&c.layer.attention.heads)
}

/// Rows of the up matrix, which may have those of the gate too.
fn up_rows(c: &Scope<'_>, dim: u64) -> usize {
    let n = c.layer.ffn.width;
    if dim == 2 * n as u64 { 2 * n } else { n }
}

/// Keys, which layers that read those of others do not have.
fn of_keys(c: &Scope<'_>, role: Option<Role>) -> Option<Role> {
    role.filter(|_| c.layer.attention.owns_kv)
}

/// The output projection, or the matrix instead of attention.
fn attn_output(c: &Scope<'_>, _: &[u64; 4]) -> Option<Role> {
    match c.layer.mixer {
        MixerKind::Linear => matrix(c.n_embd, c.n_embd),
        _ => matrix(c.n_embd, c.layer.attention.heads.out_width()),
    }
}

/// A tensor of layers with embeddings of their own.
fn with_embeddings(c: &Scope<'_>, role: fn(usize, usize) -> Option<Role>) -> Option<Role> {
    if c.embedding.per_layer > 0 { role(c.embedding.per_layer, c.n_embd) } else { None }
}

/// A tensor of layers with several residual streams.
fn with_streams(c: &Scope<'_>, role: Option<Role>) -> Option<Role> {
    role.filter(|_| c.residual.n_altup > 0)
}

fn stream_projections(c: &Scope<'_>, _: &[u64; 4]) -> Option<Role> {
    match c.residual.n_altup {
        0 => None,
        n => Some(Role::Matrices { n: n - 1, rows: c.n_embd, k: c.n_embd }),
    }
}

/// A tensor of multi-token prediction.
fn of_head(c: &Scope<'_>, role: Option<Role>) -> Option<Role> {
    role.filter(|_| c.is_mtp_head)
}

/// A norm or factor of experts that read the residual stream.
fn beside_residual(c: &Scope<'_>, _: &[u64; 4]) -> Option<Role> {
    c.ffn.experts.filter(|experts| experts.input == ExpertInput::Residual).and_then(|_| vector(c.n_embd))
}

/// The tensors outside of layers; required ones are reported in this order.
pub(crate) const MODEL_TENSORS: &[TensorRow] = &[
    TensorRow::new("token_embd.weight", |c, _| matrix(c.n_vocab, c.n_embd)).need(Need::Always),
    TensorRow::new("output_norm.weight", final_norm).need(Need::Always),
    TensorRow::new("position_embd.weight", |c, _| match c.embedding.learned_positions {
        true => matrix(c.n_ctx_train, c.n_embd),
        false => None,
    })
    .need(Need::Always),
    TensorRow::new("hrm.z_l_init", |c, _| match c.layers.iter().any(|l| l.after == Some(PassEnd::Low)) {
        true => vector(c.n_embd),
        false => None,
    })
    .need(Need::Always),
    TensorRow::new("altup_proj.weight", stream_projections).need(Need::Always),
    TensorRow::new("altup_unembd_proj.weight", stream_projections).need(Need::Always),
    TensorRow::new("per_layer_token_embd.weight", |c, dims| match c.embedding.per_layer {
        0 => c.embedding.ngrams.as_ref()?.table(dims),
        n => matrix(c.n_vocab, n * c.n_blocks()),
    })
    .need(Need::Always),
    TensorRow::new("per_layer_model_proj.weight", |c, _| match c.embedding.per_layer {
        0 => None,
        n => matrix(n * c.n_blocks(), c.n_embd),
    })
    .need(Need::Always),
    TensorRow::new("per_layer_proj_norm.weight", |c, _| with_embeddings(c, |n, _| vector(n))).need(Need::Always),
    // divisors for short and for long contexts come together
    TensorRow::new("rope_factors_long.weight", rope_divisors)
        .need(Need::LongRope { other: "rope_factors_short.weight" })
        .excludes(TWO_DIVISORS),
    TensorRow::new("rope_factors_short.weight", rope_divisors)
        .need(Need::LongRope { other: "rope_factors_long.weight" })
        .excludes(TWO_DIVISORS),
    TensorRow::new("rope_freqs.weight", rope_divisors),
    TensorRow::new("output.weight", |c, _| matrix(c.n_vocab, c.n_embd)),
    TensorRow::new("output_res_score.weight", residual_score).need(Need::Always),
    TensorRow::new("output.bias", |c, _| vector(c.n_vocab)),
    TensorRow::new("output_norm.bias", final_norm),
    // a row per token type; the first is used
    TensorRow::new("token_types.weight", |c, dims| matrix(width(dims[1]), c.n_embd)),
    TensorRow::new("token_embd_norm.weight", embedding_wide),
    TensorRow::new("token_embd_norm.bias", embedding_wide),
    TensorRow::new("dense_2.weight", projection_matrix),
    TensorRow::new("dense_2.bias", projection_bias),
    TensorRow::new("dense_3.weight", projection_matrix),
    TensorRow::new("dense_3.bias", projection_bias),
    TensorRow::new("cls.weight", projection_matrix),
    TensorRow::new("cls.bias", projection_bias),
    TensorRow::new("cls.norm.weight", projection_bias),
    TensorRow::new("cls.output.weight", projection_matrix),
    TensorRow::new("cls.output.bias", projection_bias),
];

/// The tensors of a layer; those of a layout are reported in this order.
pub(crate) const LAYER_TENSORS: &[TensorRow] = &[
    TensorRow::new("post_attention_norm.weight", embedding_wide).of(&[(Part::PreNorm, 0)]),
    TensorRow::new("attn_norm.weight", attention_norm).of(&[(Part::PreNorm, 1)]),
    TensorRow::new("attn_norm.bias", embedding_wide),
    TensorRow::new("attn_res_score.weight", residual_score).need(Need::EachLayer),
    TensorRow::new("ffn_res_score.weight", residual_score).need(Need::EachLayer),
    TensorRow::new("ffn_norm.weight", input_norm),
    TensorRow::new("ffn_norm.bias", embedding_wide),
    // the names in files of Falcon-H1 and PLaMo 2
    TensorRow::new("ffn_norm", embedding_wide),
    TensorRow::new("post_attention_norm", embedding_wide),
    TensorRow::new("post_ffw_norm", embedding_wide),
    TensorRow::new("post_ffw_norm.weight", embedding_wide),
    TensorRow::new("attn_norm_2.weight", post_norm_only),
    TensorRow::new("attn_norm_2.bias", post_norm_only),
    TensorRow::new("ffn_norm_exps.weight", |c, _| {
        c.ffn.experts.filter(|experts| experts.input == ExpertInput::Layer)?;
        vector(c.n_embd)
    }),
    TensorRow::new("altup_router.weight", |c, _| with_streams(c, matrix(c.residual.n_altup, c.n_embd)))
        .need(Need::EachLayer),
    TensorRow::new("altup_router_norm.weight", |c, _| with_streams(c, vector(c.n_embd))).need(Need::EachLayer),
    TensorRow::new("altup_predict_coef.weight", |c, _| {
        with_streams(c, values(c.residual.n_altup, c.residual.n_altup * c.residual.n_altup))
    })
    .need(Need::EachLayer),
    TensorRow::new("altup_correct_coef.weight", |c, _| with_streams(c, values(c.residual.n_altup, c.residual.n_altup)))
        .need(Need::EachLayer),
    TensorRow::new("altup_correct_scale.weight", |c, _| with_streams(c, vector(c.n_embd))).need(Need::EachLayer),
    // the two tell the rank
    TensorRow::new("laurel_l.weight", |c, dims| with_streams(c, matrix(width(dims[1]), c.n_embd)))
        .need(Need::EachLayer),
    TensorRow::new("laurel_r.weight", |c, dims| with_streams(c, matrix(c.n_embd, width(dims[0]))))
        .need(Need::EachLayer),
    TensorRow::new("laurel_post_norm.weight", |c, _| with_streams(c, vector(c.n_embd))).need(Need::EachLayer),
    TensorRow::new("inp_gate.weight", |c, _| with_embeddings(c, matrix)).need(Need::EachLayer),
    TensorRow::new("proj.weight", |c, _| with_embeddings(c, |n, d| matrix(d, n))).need(Need::EachLayer),
    TensorRow::new("post_norm.weight", |c, _| with_embeddings(c, |_, d| vector(d))).need(Need::EachLayer),
    TensorRow::new("layer_output_scale.weight", |_, _| vector(1)),
    TensorRow::new("nextn.eh_proj.weight", |c, _| of_head(c, matrix(c.n_embd, 2 * c.n_embd))).need(Need::EachLayer),
    TensorRow::new("nextn.enorm.weight", |c, _| of_head(c, vector(c.n_embd))).need(Need::EachLayer),
    TensorRow::new("nextn.hnorm.weight", |c, _| of_head(c, vector(c.n_embd))).need(Need::EachLayer),
    TensorRow::new("nextn.shared_head_norm.weight", |c, _| of_head(c, vector(c.n_embd))),
    TensorRow::new("nextn.embed_tokens.weight", |c, _| of_head(c, matrix(c.n_vocab, c.n_embd))),
    TensorRow::new("nextn.shared_head_head.weight", |c, _| of_head(c, matrix(c.n_vocab, c.n_embd))),
    TensorRow::new("attn_output_norm.weight", post_norm_only).of(&[(Part::PostNorm, 0)]),
    TensorRow::new("attn_output_norm.bias", post_norm_only),
    TensorRow::new("layer_output_norm.weight", post_norm_only).of(&[(Part::PostNorm, 0)]),
    TensorRow::new("layer_output_norm.bias", post_norm_only),
    TensorRow::new("attn_q_norm.weight", |c, _| {
        head_norm(c.layer.attention.heads.n_head, c.layer.attention.heads.key_dim)
    }),
    TensorRow::new("attn_k_norm.weight", |c, _| {
        of_keys(c, head_norm(c.layer.attention.heads.n_head_kv, c.layer.attention.heads.key_dim))
    }),
    TensorRow::new("attn_q_norm.bias", |c, _| vector(c.layer.attention.heads.q_width())),
    TensorRow::new("attn_k_norm.bias", |c, _| of_keys(c, vector(c.layer.attention.heads.k_width()))),
    TensorRow::new("attn_sub_norm.weight", |c, _| vector(c.layer.attention.heads.out_width())),
    TensorRow::new("ffn_sub_norm.weight", |c, _| vector(c.layer.ffn.width)),
    TensorRow::new("attn_rel_b.weight", |c, dims| match dims {
        // layers without have those of the first
        [0, ..] => None,
        _ => values(c.layer.attention.heads.n_head, c.attention.distances?.buckets),
    }),
    TensorRow::new("attn_sinks.weight", |c, _| vector(c.layer.attention.heads.n_head)),
    // a gate per head or per element
    TensorRow::new("attn_gate.weight", |c, dims| {
        let heads = &c.layer.attention.heads;
        matrix(if dims[1] == heads.n_head as u64 { heads.n_head } else { heads.out_width() }, c.n_embd)
    }),
    TensorRow::new("exp_probs_b.bias", |c, _| match c.layer.ffn.routes_by_token {
        false => vector(c.ffn.experts.as_ref()?.n),
        true => None,
    }),
    TensorRow::new("ffn_gate_tid2eid.weight", |c, _| match c.layer.ffn.routes_by_token {
        true => Some(Role::Integers { width: c.ffn.experts.as_ref()?.n_used, rows: c.n_vocab }),
        false => None,
    })
    .need(Need::EachLayer),
    TensorRow::new("ffn_gate_inp.bias", |c, _| vector(c.ffn.experts.as_ref()?.n)),
    TensorRow::new("ffn_gate_exps.bias", |c, _| expert_biases(c, |e| e.n_ff)),
    TensorRow::new("ffn_up_exps.bias", |c, _| expert_biases(c, |e| e.n_ff)),
    TensorRow::new("ffn_down_exps.bias", |c, _| expert_biases(c, |e| e.width)),
    TensorRow::new("attn_qkv.weight", |c, _| matrix(qkv_rows(c), c.n_embd)).of(FUSED),
    TensorRow::new("attn_qkv.bias", |c, _| vector(qkv_rows(c))),
    TensorRow::new("attn_q.weight", |c, _| matrix(q_rows(c), c.n_embd)).of(SEPARATE).excludes(SEPARATE_QKV),
    TensorRow::new("attn_q.bias", |c, _| vector(q_rows(c))).excludes(SEPARATE_QKV),
    TensorRow::new("attn_k.weight", |c, _| of_keys(c, matrix(c.layer.attention.heads.k_width(), c.n_embd)))
        .of(SEPARATE)
        .excludes(SEPARATE_QKV),
    TensorRow::new("attn_k.bias", |c, _| of_keys(c, vector(c.layer.attention.heads.k_width()))).excludes(SEPARATE_QKV),
    TensorRow::new("attn_v.weight", |c, dims| match dims {
        // not required
        [0, ..] if c.attention.values_from_keys => None,
        _ => of_keys(c, matrix(c.layer.attention.heads.v_width(), c.n_embd)),
    })
    .of(SEPARATE)
    .excludes(SEPARATE_QKV),
    TensorRow::new("attn_v.bias", |c, _| of_keys(c, vector(c.layer.attention.heads.v_width()))).excludes(SEPARATE_QKV),
    TensorRow::new("attn_output.weight", attn_output).of(&[(Part::AttnOutput, 0)]),
    TensorRow::new("attn_output.bias", embedding_wide),
    TensorRow::new("ffn_gate_inp.weight", |c, _| matrix(c.ffn.experts.as_ref()?.n, c.n_embd)).of(EXPERTS),
    TensorRow::new("ffn_gate_up_exps.weight", |c, _| {
        let e = c.ffn.experts.as_ref()?;
        Some(Role::Matrices { n: e.n, rows: 2 * e.n_ff, k: c.n_embd })
    })
    .of(&[(Part::ExpertInput, 0)]),
    TensorRow::new("ffn_up_exps.weight", expert_inputs).of(&[(Part::ExpertInput, 1)]).excludes(FUSED_EXPERTS),
    TensorRow::new("ffn_gate_exps.weight", |c, dims| {
        c.ffn.experts.filter(|experts| experts.is_gated)?;
        expert_inputs(c, dims)
    })
    .of(&[(Part::ExpertInput, 1)])
    .excludes(FUSED_EXPERTS),
    TensorRow::new("ffn_down_exps.weight", |c, _| {
        let e = c.ffn.experts.as_ref()?;
        Some(Role::Matrices { n: e.n, rows: e.width, k: e.n_ff })
    })
    .of(EXPERTS),
    TensorRow::new("ffn_gate_inp.scale", beside_residual).of(EXPERTS),
    TensorRow::new("pre_ffw_norm_2.weight", beside_residual).of(EXPERTS),
    TensorRow::new("post_ffw_norm_1.weight", beside_residual).of(EXPERTS),
    TensorRow::new("post_ffw_norm_2.weight", beside_residual).of(EXPERTS),
    TensorRow::new("ffn_down_exps.scale", |c, _| vector(c.ffn.experts.as_ref()?.n)),
    TensorRow::new("ffn_gate_chexps.weight", adjugate_inputs).of(EXPERTS),
    TensorRow::new("ffn_up_chexps.weight", adjugate_inputs).of(EXPERTS),
    TensorRow::new("ffn_down_chexps.weight", |c, _| {
        let e = c.ffn.experts.as_ref()?;
        Some(Role::Matrices { n: e.n_adjugates(), rows: c.n_embd, k: e.adjugates?.n_ff })
    })
    .of(EXPERTS),
    TensorRow::new("ffn_gate.weight", |c, _| matrix(c.layer.ffn.width, c.n_embd)).of(GATED).excludes(DENSE),
    TensorRow::new("ffn_gate.bias", |c, _| vector(c.layer.ffn.width)).excludes(DENSE),
    TensorRow::new("ffn_up.weight", |c, dims| matrix(up_rows(c, dims[1]), c.n_embd)).of(ANY_DENSE).excludes(DENSE),
    TensorRow::new("ffn_up.bias", |c, dims| vector(up_rows(c, dims[0]))).excludes(DENSE),
    TensorRow::new("ffn_down.weight", |c, _| matrix(c.n_embd, c.layer.ffn.width)).of(ANY_DENSE).excludes(DENSE),
    TensorRow::new("ffn_down.bias", embedding_wide).excludes(DENSE),
    TensorRow::new("ffn_latent_down.weight", |c, _| matrix(c.ffn.experts.as_ref()?.width, c.n_embd)),
    TensorRow::new("ffn_latent_norm.weight", |c, _| vector(c.ffn.experts.as_ref()?.width)),
    TensorRow::new("ffn_latent_up.weight", |c, _| matrix(c.n_embd, c.ffn.experts.as_ref()?.width)),
    TensorRow::new("ffn_gate_inp_shexp.weight", |c, _| c.ffn.experts.as_ref().and_then(|_| matrix(1, c.n_embd))),
    TensorRow::new("ffn_gate_shexp.weight", |c, _| matrix(c.ffn.experts.as_ref()?.n_ff_shared, c.n_embd)),
    TensorRow::new("ffn_up_shexp.weight", |c, _| matrix(c.ffn.experts.as_ref()?.n_ff_shared, c.n_embd)),
    TensorRow::new("ffn_down_shexp.weight", |c, _| matrix(c.n_embd, c.ffn.experts.as_ref()?.n_ff_shared)),
    // in older files, one tensor per expert
    TensorRow::new("ffn_gate.#.weight", |c, _| matrix(c.ffn.experts.as_ref()?.n_ff, c.ffn.experts.as_ref()?.width))
        .excludes(DENSE),
    TensorRow::new("ffn_up.#.weight", |c, _| matrix(c.ffn.experts.as_ref()?.n_ff, c.ffn.experts.as_ref()?.width))
        .excludes(DENSE),
    TensorRow::new("ffn_down.#.weight", |c, _| matrix(c.ffn.experts.as_ref()?.width, c.ffn.experts.as_ref()?.n_ff))
        .excludes(DENSE),
];

fn head_norm(n_head: usize, head_dim: usize) -> Option<Role> {
    Some(Role::HeadNorm { n_head, head_dim })
}

fn expert_biases(c: &Config, width: impl Fn(&ExpertsConfig) -> usize) -> Option<Role> {
    let e = c.ffn.experts.as_ref()?;
    Some(Role::Rows { n: e.n, width: width(e) })
}

fn adjugate_inputs(c: &Scope<'_>, _: &[u64; 4]) -> Option<Role> {
    let e = c.ffn.experts.as_ref()?;
    Some(Role::Matrices { n: e.n_adjugates(), rows: e.adjugates?.n_ff, k: c.n_embd })
}

fn expert_inputs(c: &Scope<'_>, _: &[u64; 4]) -> Option<Role> {
    let e = c.ffn.experts.as_ref()?;
    Some(Role::Matrices { n: e.n, rows: e.n_ff, k: e.width })
}

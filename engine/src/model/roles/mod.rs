//! The table of tensors: their names, the shape that each must have, when it is required, and what takes its place.

use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::ops::Deref;

use super::arch::ExpertInput;
use super::config::{Config, ExpertsConfig, LayerConfig, MAX_WIDTH, MixerKind, PassEnd, RecurrentConfig};
use super::mixers::{Selection, indexer, latent};
use crate::error::LoadError;
use crate::gguf::TensorInfo;
use crate::kernels::WeightArena;
use crate::kernels::panel::Matrix;
use crate::quant::Dtype;

/// Suffixes of tensors that the forward pass ignores: precomputed tables of old converters.
const IGNORED: [&str; 1] = ["rotary_emb.inv_freq"];

/// Expected shape of a tensor.
#[derive(Clone, Copy)]
pub(super) enum Role {
    /// `n` matrices (rows, k), concatenated; `n` is a dimension unless it is 1.
    Matrices { n: usize, rows: usize, k: usize },
    /// `n` matrices (rows, k) in one dimension of the file.
    Stacked { n: usize, rows: usize, k: usize },
    /// A vector of this length.
    Vector(usize),
    /// Rows of vectors, one per expert.
    Rows { n: usize, width: usize },
    /// Weights of a norm of heads: (head_dim), (n_head, head_dim) or (n_head * head_dim), or one per head, (n_head, 1).
    HeadNorm { n_head: usize, head_dim: usize },
    /// Values in rows of this width; dimensions of 1 may be between.
    Values { width: usize, rows: usize },
}

/// Memory of a tensor.
pub(super) enum TensorStorage {
    /// One matrix, or one per expert.
    Matrices(Vec<Matrix>),
    /// Values, and the length of a row.
    Vector { values: Vec<f32>, width: usize },
}

impl Role {
    /// The role of a tensor by its name; `None` if the model has no tensor of this name.
    fn of(name: &str, t: &TensorInfo<'_>, c: &Config) -> Option<Role> {
        let (row, scope) = match name.strip_prefix("blk.") {
            Some(rest) => {
                let (layer, part) = rest.split_once('.')?;
                let n_experts = c.experts.map_or(0, |e| e.n);
                let i = index(layer)?;
                let row = layer_tables(c, i)?.into_iter().find_map(|rows| find(rows, part, n_experts));
                (row?, Scope { config: c, layer: c.block(i) })
            }
            None => (find(MODEL_TENSORS, name, 0)?, Scope::of_model(c)),
        };
        (row.role)(&scope, &t.dims)
    }

    fn reserve(self, t: &TensorInfo<'_>, arena: &mut WeightArena) -> Result<TensorStorage, LoadError> {
        let fits = match self {
            Role::Matrices { n, rows, k } => t.dims == [k as u64, rows as u64, n as u64, 1],
            Role::Stacked { n, rows, k } => t.dims == [k as u64, (rows * n) as u64, 1, 1],
            Role::Vector(n) => t.dims == [n as u64, 1, 1, 1],
            Role::Rows { n, width } => t.dims == [width as u64, n as u64, 1, 1],
            Role::HeadNorm { n_head, head_dim } => {
                let (d, n) = (head_dim as u64, n_head as u64);
                [[d, 1, 1, 1], [d, n, 1, 1], [d * n, 1, 1, 1], [1, n, 1, 1]].contains(&t.dims)
            }
            Role::Values { width, rows } => {
                let (w, n) = (width as u64, rows as u64);
                let rows = [[w, n, 1, 1], [w, 1, n, 1], [w, 1, 1, n]].contains(&t.dims);
                rows || (w == 1 && t.dims == [n, 1, 1, 1])
            }
        };
        if !fits {
            let expected = match self {
                Role::Matrices { n: 1, rows, k } => format!("shape [{k}, {rows}]"),
                Role::Matrices { n, rows, k } => format!("shape [{k}, {rows}, {n}]"),
                Role::Stacked { n, rows, k } => format!("shape [{k}, {}]", rows * n),
                Role::Vector(n) => format!("shape [{n}]"),
                Role::Rows { n, width } => format!("shape [{width}, {n}]"),
                Role::HeadNorm { n_head, head_dim: d } => format!("shape [{d}], [{d}, {n_head}] or [{}]", d * n_head),
                Role::Values { width, rows } => format!("shape [{width}, {rows}]"),
            };
            return Err(tensor_error(t.name, &format!("shape {:?}", &t.dims[..t.n_dims as usize]), &expected));
        }
        let out_of_memory = |_| LoadError::OutOfMemory { what: "the weights", needed: t.len_bytes };
        if let Role::Matrices { n, rows, k } | Role::Stacked { n, rows, k } = self {
            if !t.dtype.supported() {
                return Err(LoadError::Unsupported {
                    what: "tensor type",
                    found: format!("{} ({})", t.dtype.name(), t.name),
                    known: Dtype::SUPPORTED.map(Dtype::name).into(),
                });
            }
            let matrices = (0..n).map(|_| Matrix::zeroed_in(arena, t.dtype, rows, k)).collect::<Result<_, _>>();
            return Ok(TensorStorage::Matrices(matrices.map_err(out_of_memory)?));
        }
        if !matches!(t.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16) {
            return Err(tensor_error(t.name, t.dtype.name(), "F32, F16 or BF16"));
        }
        let mut values = Vec::new();
        values.try_reserve_exact(t.n_elements() as usize).map_err(out_of_memory)?;
        Ok(TensorStorage::Vector { values, width: t.dims[0] as usize })
    }
}

/// A configuration and one of its layers.
pub(super) struct Scope<'a> {
    config: &'a Config,
    pub(super) layer: &'a LayerConfig,
}

impl<'a> Scope<'a> {
    /// For tensors outside of layers, which do not depend on one.
    fn of_model(config: &'a Config) -> Scope<'a> {
        Scope { config, layer: &config.layers[0] }
    }
}

impl Deref for Scope<'_> {
    type Target = Config;

    fn deref(&self) -> &Config {
        self.config
    }
}

/// A tensor of the table: its name, its shape, when it is required, and which tensors it cannot be beside.
pub(super) struct TensorRow {
    /// The name; in a layer the part after `blk.N.`. `#` is the index of an expert.
    name: &'static str,
    /// The expected shape, of a layer and the dimensions in the file; `None` where the model has no such tensor.
    role: fn(&Scope<'_>, &[u64; 4]) -> Option<Role>,
    need: Need,
    /// A tensor that takes the place of this one, and the rule in an error's words.
    excludes: Option<(&'static str, &'static str)>,
}

/// When a tensor is required.
pub(super) enum Need {
    Optional,
    /// Wherever the model has a tensor of this name.
    Always,
    /// In every layer, if the model has tensors of this name.
    EachLayer,
    /// With the other set of LongRoPE divisors, or because the metadata asks for it.
    LongRope {
        other: &'static str,
    },
    /// In these layouts of a sub-layer.
    Layouts(&'static [Layout]),
}

/// One of the alternative layouts of a part of a layer: of those whose first tensor exists, the one with the lowest
/// number applies; if there is none, the one with the highest.
pub(super) type Layout = (Part, usize);

#[derive(Clone, Copy, PartialEq)]
pub(super) enum Part {
    PreNorm,
    PostNorm,
    Qkv,
    AttnOutput,
    LatentInput,
    LatentQuery,
    LatentHeads,
    Indexer,
    Recurrent,
    FeedForward,
    ExpertInput,
}

impl TensorRow {
    pub(super) const fn new(name: &'static str, role: fn(&Scope<'_>, &[u64; 4]) -> Option<Role>) -> TensorRow {
        TensorRow { name, role, need: Need::Optional, excludes: None }
    }

    pub(super) const fn need(self, need: Need) -> TensorRow {
        TensorRow { need, ..self }
    }

    pub(super) const fn of(self, layouts: &'static [Layout]) -> TensorRow {
        self.need(Need::Layouts(layouts))
    }

    pub(super) const fn excludes(self, rule: (&'static str, &'static str)) -> TensorRow {
        TensorRow { excludes: Some(rule), ..self }
    }

    fn is_of(&self, layout: Layout) -> bool {
        matches!(self.need, Need::Layouts(all) if all.contains(&layout))
    }
}

const SEPARATE_QKV: (&str, &str) = ("attn_qkv", "either the fused or the separate tensors");
const DENSE: (&str, &str) = ("ffn_gate_inp", "either a dense feed-forward or experts");
const FUSED_EXPERTS: (&str, &str) = ("ffn_gate_up_exps", "either the fused or the separate tensors");
const TWO_DIVISORS: (&str, &str) = ("rope_freqs", "either one set of RoPE divisors or two");

const FUSED: &[Layout] = &[(Part::Qkv, 0)];
const SEPARATE: &[Layout] = &[(Part::Qkv, 1)];
const EXPERTS: &[Layout] = &[(Part::FeedForward, 0)];
const GATED: &[Layout] = &[(Part::FeedForward, 1)];
const ANY_DENSE: &[Layout] = &[(Part::FeedForward, 1), (Part::FeedForward, 2)];

pub(super) fn matrix(rows: usize, k: usize) -> Option<Role> {
    Some(Role::Matrices { n: 1, rows, k })
}

pub(super) fn vector(n: usize) -> Option<Role> {
    Some(Role::Vector(n))
}

/// The norm of the input of a sub-layer.
fn input_norm(c: &Scope<'_>, _: &[u64; 4]) -> Option<Role> {
    if c.arch.plain_norms { None } else { vector(c.n_embd) }
}

pub(super) fn values(width: usize, rows: usize) -> Option<Role> {
    Some(Role::Values { width, rows })
}

fn embedding_wide(c: &Scope<'_>, _: &[u64; 4]) -> Option<Role> {
    vector(c.n_embd)
}

/// Weights of the scores of residual streams.
fn residual_score(c: &Scope<'_>, _: &[u64; 4]) -> Option<Role> {
    if c.residual_block > 0 { vector(c.n_embd) } else { None }
}

fn final_norm(c: &Scope<'_>, _: &[u64; 4]) -> Option<Role> {
    if c.arch.post_norm || c.arch.plain_norms { None } else { vector(c.n_embd) }
}

fn post_norm_only(c: &Scope<'_>, _: &[u64; 4]) -> Option<Role> {
    if c.arch.post_norm { vector(c.n_embd) } else { None }
}

fn rope_divisors(c: &Scope<'_>, _: &[u64; 4]) -> Option<Role> {
    vector(c.rope_pairs())
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
    q_rows(c) + c.layer.heads.k_width() + c.layer.heads.v_width()
}

/// Rows of the query projection, which may give gates too.
fn q_rows(c: &Scope<'_>) -> usize {
    c.q_rows(&c.layer.heads)
}

/// Rows of the up matrix, which may have those of the gate too.
fn up_rows(c: &Scope<'_>, dim: u64) -> usize {
    let n = c.layer.n_ff;
    if dim == 2 * n as u64 { 2 * n } else { n }
}

/// Keys, which layers that read those of others do not have.
fn of_keys(c: &Scope<'_>, role: Option<Role>) -> Option<Role> {
    role.filter(|_| c.layer.owns_kv)
}

/// The output projection, or the matrix instead of attention.
fn attn_output(c: &Scope<'_>, _: &[u64; 4]) -> Option<Role> {
    match c.layer.mixer {
        MixerKind::Linear => matrix(c.n_embd, c.n_embd),
        _ => matrix(c.n_embd, c.layer.heads.out_width()),
    }
}

/// A tensor of layers with embeddings of their own.
fn with_embeddings(c: &Scope<'_>, role: fn(usize, usize) -> Option<Role>) -> Option<Role> {
    if c.n_embd_layer > 0 { role(c.n_embd_layer, c.n_embd) } else { None }
}

/// A tensor of layers with several residual streams.
fn with_streams(c: &Scope<'_>, role: Option<Role>) -> Option<Role> {
    role.filter(|_| c.n_altup > 0)
}

fn stream_projections(c: &Scope<'_>, _: &[u64; 4]) -> Option<Role> {
    match c.n_altup {
        0 => None,
        n => Some(Role::Matrices { n: n - 1, rows: c.n_embd, k: c.n_embd }),
    }
}

/// A norm or factor of experts that read the residual stream.
fn beside_residual(c: &Scope<'_>, _: &[u64; 4]) -> Option<Role> {
    if c.experts.is_some() && c.arch.expert_input == ExpertInput::Residual { vector(c.n_embd) } else { None }
}

/// The tensors outside of layers; required ones are reported in this order.
const MODEL_TENSORS: &[TensorRow] = &[
    TensorRow::new("token_embd.weight", |c, _| matrix(c.n_vocab, c.n_embd)).need(Need::Always),
    TensorRow::new("output_norm.weight", final_norm).need(Need::Always),
    TensorRow::new("position_embd.weight", |c, _| match c.learned_positions {
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
    TensorRow::new("per_layer_token_embd.weight", |c, _| match c.n_embd_layer {
        0 => None,
        n => matrix(c.n_vocab, n * c.n_blocks()),
    })
    .need(Need::Always),
    TensorRow::new("per_layer_model_proj.weight", |c, _| match c.n_embd_layer {
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
const LAYER_TENSORS: &[TensorRow] = &[
    TensorRow::new("post_attention_norm.weight", embedding_wide).of(&[(Part::PreNorm, 0)]),
    TensorRow::new("attn_norm.weight", input_norm).of(&[(Part::PreNorm, 1)]),
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
        if c.arch.expert_input == ExpertInput::Layer { vector(c.n_embd) } else { None }
    }),
    TensorRow::new("altup_router.weight", |c, _| with_streams(c, matrix(c.n_altup, c.n_embd))).need(Need::EachLayer),
    TensorRow::new("altup_router_norm.weight", |c, _| with_streams(c, vector(c.n_embd))).need(Need::EachLayer),
    TensorRow::new("altup_predict_coef.weight", |c, _| with_streams(c, values(c.n_altup, c.n_altup * c.n_altup)))
        .need(Need::EachLayer),
    TensorRow::new("altup_correct_coef.weight", |c, _| with_streams(c, values(c.n_altup, c.n_altup)))
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
    TensorRow::new("attn_output_norm.weight", post_norm_only).of(&[(Part::PostNorm, 0)]),
    TensorRow::new("attn_output_norm.bias", post_norm_only),
    TensorRow::new("layer_output_norm.weight", post_norm_only).of(&[(Part::PostNorm, 0)]),
    TensorRow::new("layer_output_norm.bias", post_norm_only),
    TensorRow::new("attn_q_norm.weight", |c, _| head_norm(c.layer.heads.n_head, c.layer.heads.key_dim)),
    TensorRow::new("attn_k_norm.weight", |c, _| of_keys(c, head_norm(c.layer.heads.n_head_kv, c.layer.heads.key_dim))),
    TensorRow::new("attn_q_norm.bias", |c, _| vector(c.layer.heads.q_width())),
    TensorRow::new("attn_k_norm.bias", |c, _| of_keys(c, vector(c.layer.heads.k_width()))),
    TensorRow::new("attn_sub_norm.weight", |c, _| vector(c.layer.heads.out_width())),
    TensorRow::new("ffn_sub_norm.weight", |c, _| vector(c.layer.n_ff)),
    TensorRow::new("attn_rel_b.weight", |c, dims| match dims {
        // layers without have those of the first
        [0, ..] => None,
        _ if c.relative_buckets == 0 => None,
        _ => values(c.layer.heads.n_head, c.relative_buckets),
    }),
    TensorRow::new("attn_sinks.weight", |c, _| vector(c.layer.heads.n_head)),
    // a gate per head or per element
    TensorRow::new("attn_gate.weight", |c, dims| {
        let heads = &c.layer.heads;
        matrix(if dims[1] == heads.n_head as u64 { heads.n_head } else { heads.out_width() }, c.n_embd)
    }),
    TensorRow::new("exp_probs_b.bias", |c, _| vector(c.experts.as_ref()?.n)),
    TensorRow::new("ffn_gate_inp.bias", |c, _| vector(c.experts.as_ref()?.n)),
    TensorRow::new("ffn_gate_exps.bias", |c, _| expert_biases(c, |e| e.n_ff)),
    TensorRow::new("ffn_up_exps.bias", |c, _| expert_biases(c, |e| e.n_ff)),
    TensorRow::new("ffn_down_exps.bias", |c, _| expert_biases(c, |e| e.width)),
    TensorRow::new("attn_qkv.weight", |c, _| matrix(qkv_rows(c), c.n_embd)).of(FUSED),
    TensorRow::new("attn_qkv.bias", |c, _| vector(qkv_rows(c))),
    TensorRow::new("attn_q.weight", |c, _| matrix(q_rows(c), c.n_embd)).of(SEPARATE).excludes(SEPARATE_QKV),
    TensorRow::new("attn_q.bias", |c, _| vector(q_rows(c))).excludes(SEPARATE_QKV),
    TensorRow::new("attn_k.weight", |c, _| of_keys(c, matrix(c.layer.heads.k_width(), c.n_embd)))
        .of(SEPARATE)
        .excludes(SEPARATE_QKV),
    TensorRow::new("attn_k.bias", |c, _| of_keys(c, vector(c.layer.heads.k_width()))).excludes(SEPARATE_QKV),
    TensorRow::new("attn_v.weight", |c, dims| match dims {
        // not required
        [0, ..] if c.arch.values_from_keys => None,
        _ => of_keys(c, matrix(c.layer.heads.v_width(), c.n_embd)),
    })
    .of(SEPARATE)
    .excludes(SEPARATE_QKV),
    TensorRow::new("attn_v.bias", |c, _| of_keys(c, vector(c.layer.heads.v_width()))).excludes(SEPARATE_QKV),
    TensorRow::new("attn_output.weight", attn_output).of(&[(Part::AttnOutput, 0)]),
    TensorRow::new("attn_output.bias", embedding_wide),
    TensorRow::new("ffn_gate_inp.weight", |c, _| matrix(c.experts.as_ref()?.n, c.n_embd)).of(EXPERTS),
    TensorRow::new("ffn_gate_up_exps.weight", |c, _| {
        let e = c.experts.as_ref()?;
        Some(Role::Matrices { n: e.n, rows: 2 * e.n_ff, k: c.n_embd })
    })
    .of(&[(Part::ExpertInput, 0)]),
    TensorRow::new("ffn_up_exps.weight", expert_inputs).of(&[(Part::ExpertInput, 1)]).excludes(FUSED_EXPERTS),
    TensorRow::new("ffn_gate_exps.weight", |c, dims| if c.arch.plain_experts { None } else { expert_inputs(c, dims) })
        .of(&[(Part::ExpertInput, 1)])
        .excludes(FUSED_EXPERTS),
    TensorRow::new("ffn_down_exps.weight", |c, _| {
        let e = c.experts.as_ref()?;
        Some(Role::Matrices { n: e.n, rows: e.width, k: e.n_ff })
    })
    .of(EXPERTS),
    TensorRow::new("ffn_gate_inp.scale", beside_residual).of(EXPERTS),
    TensorRow::new("pre_ffw_norm_2.weight", beside_residual).of(EXPERTS),
    TensorRow::new("post_ffw_norm_1.weight", beside_residual).of(EXPERTS),
    TensorRow::new("post_ffw_norm_2.weight", beside_residual).of(EXPERTS),
    TensorRow::new("ffn_down_exps.scale", |c, _| vector(c.experts.as_ref()?.n)),
    TensorRow::new("ffn_gate_chexps.weight", adjugate_inputs).of(EXPERTS),
    TensorRow::new("ffn_up_chexps.weight", adjugate_inputs).of(EXPERTS),
    TensorRow::new("ffn_down_chexps.weight", |c, _| {
        let e = c.experts.as_ref()?;
        Some(Role::Matrices { n: e.n_adjugates(), rows: c.n_embd, k: e.adjugates?.n_ff })
    })
    .of(EXPERTS),
    TensorRow::new("ffn_gate.weight", |c, _| matrix(c.layer.n_ff, c.n_embd)).of(GATED).excludes(DENSE),
    TensorRow::new("ffn_gate.bias", |c, _| vector(c.layer.n_ff)).excludes(DENSE),
    TensorRow::new("ffn_up.weight", |c, dims| matrix(up_rows(c, dims[1]), c.n_embd)).of(ANY_DENSE).excludes(DENSE),
    TensorRow::new("ffn_up.bias", |c, dims| vector(up_rows(c, dims[0]))).excludes(DENSE),
    TensorRow::new("ffn_down.weight", |c, _| matrix(c.n_embd, c.layer.n_ff)).of(ANY_DENSE).excludes(DENSE),
    TensorRow::new("ffn_down.bias", embedding_wide).excludes(DENSE),
    TensorRow::new("ffn_latent_down.weight", |c, _| matrix(c.experts.as_ref()?.width, c.n_embd)),
    TensorRow::new("ffn_latent_norm.weight", |c, _| vector(c.experts.as_ref()?.width)),
    TensorRow::new("ffn_latent_up.weight", |c, _| matrix(c.n_embd, c.experts.as_ref()?.width)),
    TensorRow::new("ffn_gate_inp_shexp.weight", |c, _| c.experts.as_ref().and_then(|_| matrix(1, c.n_embd))),
    TensorRow::new("ffn_gate_shexp.weight", |c, _| matrix(c.experts.as_ref()?.n_ff_shared, c.n_embd)),
    TensorRow::new("ffn_up_shexp.weight", |c, _| matrix(c.experts.as_ref()?.n_ff_shared, c.n_embd)),
    TensorRow::new("ffn_down_shexp.weight", |c, _| matrix(c.n_embd, c.experts.as_ref()?.n_ff_shared)),
    // in older files, one tensor per expert
    TensorRow::new("ffn_gate.#.weight", |c, _| matrix(c.experts.as_ref()?.n_ff, c.experts.as_ref()?.width))
        .excludes(DENSE),
    TensorRow::new("ffn_up.#.weight", |c, _| matrix(c.experts.as_ref()?.n_ff, c.experts.as_ref()?.width))
        .excludes(DENSE),
    TensorRow::new("ffn_down.#.weight", |c, _| matrix(c.experts.as_ref()?.width, c.experts.as_ref()?.n_ff))
        .excludes(DENSE),
];

fn head_norm(n_head: usize, head_dim: usize) -> Option<Role> {
    Some(Role::HeadNorm { n_head, head_dim })
}

fn expert_biases(c: &Config, width: impl Fn(&ExpertsConfig) -> usize) -> Option<Role> {
    let e = c.experts.as_ref()?;
    Some(Role::Rows { n: e.n, width: width(e) })
}

fn adjugate_inputs(c: &Scope<'_>, _: &[u64; 4]) -> Option<Role> {
    let e = c.experts.as_ref()?;
    Some(Role::Matrices { n: e.n_adjugates(), rows: e.adjugates?.n_ff, k: c.n_embd })
}

fn expert_inputs(c: &Scope<'_>, _: &[u64; 4]) -> Option<Role> {
    let e = c.experts.as_ref()?;
    Some(Role::Matrices { n: e.n, rows: e.n_ff, k: e.width })
}

/// The tables of the tensors of a layer, those of its mixer first; `None` if there is no such layer.
fn layer_tables(c: &Config, layer: usize) -> Option<[&'static [TensorRow]; 4]> {
    if layer >= c.n_blocks() {
        return None;
    }
    let mixer = c.block(layer).mixer;
    let recurrent = c.recurrent.as_ref().filter(|_| mixer.is_recurrent());
    let latent = if mixer == MixerKind::Latent { latent::TENSORS } else { &[] };
    let indexer = if c.indexer.is_some() { indexer::TENSORS } else { &[] };
    Some([recurrent.map_or(&[], RecurrentConfig::tensors), latent, indexer, LAYER_TENSORS])
}

/// The row of a tensor; experts have indices below `n_experts`.
fn find(rows: &'static [TensorRow], name: &str, n_experts: usize) -> Option<&'static TensorRow> {
    rows.iter().find(|row| match row.name.split_once('#') {
        Some((head, tail)) => {
            let number = name.strip_prefix(head).and_then(|rest| rest.strip_suffix(tail));
            number.and_then(index).is_some_and(|i| i < n_experts)
        }
        None => row.name == name,
    })
}

/// The error for a tensor that no layer took, because the file also has the tensors that take its place.
pub(super) fn conflict(name: &str, c: &Config) -> LoadError {
    let layer = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
    let (prefix, row) = match layer {
        Some((layer, part)) => {
            let tables = index(layer).and_then(|layer| layer_tables(c, layer)).unwrap_or_default();
            (format!("blk.{layer}."), tables.into_iter().find_map(|rows| find(rows, part, usize::MAX)))
        }
        None => (String::new(), find(MODEL_TENSORS, name, 0)),
    };
    match row.and_then(|row| row.excludes) {
        Some((other, expected)) => tensor_error(name, &format!("both it and `{prefix}{other}.weight`"), expected),
        None => tensor_error(name, "a tensor that no layer uses", "only tensors that the model uses"),
    }
}

impl TensorStorage {
    /// Allocates memory for a tensor, matrices from `arena`; `None` if the tensor is ignored.
    ///
    /// # Errors
    /// [`LoadError`] if the model has no tensor of this name, or its shape or type is not accepted.
    pub(super) fn reserve(
        name: &str,
        t: &TensorInfo<'_>,
        c: &Config,
        arena: &mut WeightArena,
    ) -> Result<Option<TensorStorage>, LoadError> {
        match Role::of(name, t, c) {
            Some(role) => role.reserve(t, arena).map(Some),
            None if is_ignored(name, c) || c.is_unused(name) => Ok(None),
            None if IGNORED.iter().any(|s| t.name.ends_with(s)) => Ok(None),
            None => {
                let expected = format!("only tensors of the architecture `{}`", c.arch.name);
                Err(tensor_error(t.name, "a tensor that this architecture does not use", &expected))
            }
        }
    }
}

/// Names that some converters write without a suffix.
const WITHOUT_SUFFIX: [(&str, &str); 3] = [
    ("exp_probs_b", "exp_probs_b.bias"),
    ("post_attention_norm", "post_attention_norm.weight"),
    ("post_ffw_norm", "post_ffw_norm.weight"),
];

/// The name of a tensor in the table: families have names of their own for some.
pub(super) fn canonical(name: &str, c: &Config) -> String {
    let name = name.strip_prefix(c.arch.prefix).unwrap_or(name);
    let layer = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.'));
    let (prefix, part) = layer.map_or((String::new(), name), |(layer, part)| (format!("blk.{layer}."), part));
    let part = WITHOUT_SUFFIX.iter().find(|(short, _)| *short == part).map_or(part, |(_, whole)| whole);
    let (stem, suffix) = part.rsplit_once('.').unwrap_or((part, ""));
    match c.arch.aliases.iter().find(|(alias, _)| *alias == stem) {
        Some((_, stem)) => format!("{prefix}{stem}.{suffix}"),
        None => format!("{prefix}{part}"),
    }
}

/// Whether text does not use the tensor.
fn is_ignored(name: &str, c: &Config) -> bool {
    let part = name.strip_prefix("blk.").and_then(|rest| rest.split_once('.')).map_or(name, |(_, part)| part);
    let layer = name.strip_prefix("blk.").and_then(|rest| index(rest.split_once('.')?.0)).map(|i| c.block(i));
    let is_of_keys = ["attn_k.", "attn_v.", "attn_k_norm."].iter().any(|beginning| part.starts_with(beginning));
    (is_of_keys && layer.is_some_and(|l| l.mixer.has_attention() && !l.owns_kv))
        || (part.starts_with("indexer.") && layer.is_some_and(|l| l.selection == Selection::Previous))
        || c.arch.ignored.iter().any(|beginning| part.starts_with(beginning))
}

/// Parses an index in a tensor name: decimal without leading zeros.
fn index(text: &str) -> Option<usize> {
    if text.len() > 1 && text.starts_with('0') {
        return None;
    }
    text.parse().ok()
}

/// The first required tensor that is missing; `has` tells which exist.
pub(super) fn missing(c: &Config, has_tensor: impl Fn(&str) -> bool) -> Option<String> {
    let is_required = |row: &&TensorRow| match row.need {
        Need::Optional | Need::EachLayer | Need::Layouts(_) => false,
        Need::Always => (row.role)(&Scope::of_model(c), &[0; 4]).is_some(),
        Need::LongRope { other } => c.is_longrope() || has_tensor(other),
    };
    if let Some(row) = MODEL_TENSORS.iter().filter(is_required).find(|row| !has_tensor(row.name)) {
        return Some(row.name.into());
    }
    let norm = if c.arch.post_norm { Part::PostNorm } else { Part::PreNorm };
    for layer in 0..c.n_blocks() {
        let name = |part: &str| format!("blk.{layer}.{part}");
        let has = |row: &TensorRow| match row.name.strip_suffix("_exps.weight") {
            Some(one) => {
                let n = c.experts.map_or(0, |e| e.n);
                has_tensor(&name(row.name)) || (0..n).all(|i| has_tensor(&name(&format!("{one}.{i}.weight"))))
            }
            None => has_tensor(&name(row.name)),
        };
        let kind = c.block(layer);
        let scope = Scope { config: c, layer: kind };
        let (attention, recurrent) = (kind.mixer.has_attention(), kind.mixer.is_recurrent());
        let exists = |part: &str| has_tensor(&name(part));
        let is_each = |row: &&TensorRow| matches!(row.need, Need::EachLayer) && (row.role)(&scope, &[0; 4]).is_some();
        if let Some(row) = LAYER_TENSORS.iter().filter(is_each).find(|row| !exists(row.name)) {
            return Some(name(row.name));
        }
        let latent = kind.mixer == MixerKind::Latent;
        let parts = [
            (norm, kind.mixer != MixerKind::None || !exists("ffn_norm.weight")),
            (Part::Qkv, attention && !latent),
            (Part::LatentInput, latent),
            (Part::LatentQuery, latent),
            (Part::LatentHeads, latent),
            (Part::Indexer, matches!(kind.selection, Selection::Own { .. })),
            (Part::AttnOutput, attention || kind.mixer == MixerKind::Linear),
            (Part::Recurrent, recurrent),
            (Part::FeedForward, kind.has_ffn),
            (Part::ExpertInput, kind.has_ffn && exists("ffn_gate_inp.weight")),
        ];
        for part in parts.into_iter().filter_map(|(part, is_there)| is_there.then_some(part)) {
            let tables = layer_tables(c, layer).unwrap_or_default();
            let rows = |i| tables.into_iter().flatten().filter(move |row| row.is_of((part, i)));
            let n = (0..).take_while(|&i| rows(i).next().is_some()).count();
            let layout = (0..n).find(|&i| rows(i).next().is_some_and(has)).unwrap_or(n.saturating_sub(1));
            if let Some(row) = rows(layout).find(|row| !has(row) && (row.role)(&scope, &[0; 4]).is_some()) {
                return Some(name(row.name));
            }
        }
    }
    None
}

/// The first tensor that a layer lacks although the layer before it of the same kind (mixer, dense or experts) has it.
/// Such a layer would be computed as another kind of block. `names` are the existing tensors, ascending.
pub(super) fn missing_in_layer(c: &Config, names: &[&str], has: impl Fn(&str) -> bool) -> Option<String> {
    let mut last = BTreeMap::new();
    // twice around, so that the first layer of a kind is compared with the last
    for i in 0..2 * c.n_blocks() {
        let layer = i % c.n_blocks();
        let with_experts = has(&format!("blk.{layer}.ffn_gate_inp.weight"));
        let LayerConfig { mixer, has_ffn, .. } = *c.block(layer);
        let Some(before) = last.insert((mixer, has_ffn, with_experts), layer) else { continue };
        let prefix = format!("blk.{before}.");
        for name in &names[names.partition_point(|name| *name < &prefix[..])..] {
            let Some(part) = name.strip_prefix(&prefix[..]) else { break };
            if !may_have(c, layer, part) {
                continue;
            }
            let name = format!("blk.{layer}.{part}");
            if !has(&name) {
                return Some(name);
            }
        }
    }
    None
}

/// Whether a layer may have a tensor that another layer of its kind has.
fn may_have(c: &Config, layer: usize, part: &str) -> bool {
    let scope = Scope { config: c, layer: c.block(layer) };
    let row = layer_tables(c, layer).and_then(|tables| tables.into_iter().find_map(|rows| find(rows, part, 0)));
    row.is_none_or(|row| (row.role)(&scope, &[0; 4]).is_some())
}

pub(super) fn tensor_error(name: &str, found: &str, expected: &str) -> LoadError {
    LoadError::Tensor { name: name.into(), found: found.into(), expected: expected.into() }
}

//! Tensor names: the shape that each must have, and which tensors a layer requires.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use super::config::{Config, MAX_WIDTH};
use super::projection;
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
    /// A vector of this length.
    Vector(usize),
    /// Weights of a norm of heads: (head_dim), (n_head, head_dim) or (n_head * head_dim).
    HeadNorm { n_head: usize, head_dim: usize },
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
    fn of(t: &TensorInfo<'_>, c: &Config) -> Option<Role> {
        let (q, kv) = (c.n_head * c.head_dim, c.n_head_kv * c.head_dim);
        let matrix = |rows, k| Some(Role::Matrices { n: 1, rows, k });
        let vector = |n| Some(Role::Vector(n));
        // widths that only the tensor itself states
        let width = |dim: u64| dim.min(u64::from(MAX_WIDTH)) as usize;
        match t.name {
            "token_embd.weight" | "output.weight" => return matrix(c.n_vocab, c.n_embd),
            "position_embd.weight" if c.arch.rope.is_none() => return matrix(c.n_ctx_train, c.n_embd),
            // the tensor has a row per token type; the first is used
            "token_types.weight" => return matrix(width(t.dims[1]), c.n_embd),
            "token_embd_norm.weight" | "token_embd_norm.bias" => return vector(c.n_embd),
            "output.bias" => return vector(c.n_vocab),
            "output_norm.weight" | "output_norm.bias" if !c.arch.post_norm => return vector(c.n_embd),
            "rope_freqs.weight" | "rope_factors_long.weight" | "rope_factors_short.weight" => {
                return vector(c.n_rot / 2);
            }
            _ => {}
        }
        // projections have any shape; each must fit the one before
        match t.name.split_once('.') {
            Some((head, "weight")) if projection::NAMES.contains(&head) => {
                return matrix(width(t.dims[1]), width(t.dims[0]));
            }
            Some((head, "bias")) if projection::NAMES.contains(&head) => return vector(width(t.dims[0])),
            _ => {}
        }
        let (layer, part) = t.name.strip_prefix("blk.")?.split_once('.')?;
        if index(layer)? >= c.n_layer() {
            return None;
        }
        // gate and up may be fused in one matrix
        let up = if t.dims[1] == 2 * c.n_ff as u64 { 2 * c.n_ff } else { c.n_ff };
        if let Some((norm, "weight" | "bias")) = part.split_once('.')
            && ["attn_output_norm", "layer_output_norm"].contains(&norm)
        {
            return if c.arch.post_norm { vector(c.n_embd) } else { None };
        }
        match part {
            "attn_norm.weight" | "ffn_norm.weight" | "post_attention_norm.weight" | "post_ffw_norm.weight" => {
                vector(c.n_embd)
            }
            "attn_norm.bias" | "ffn_norm.bias" => vector(c.n_embd),
            "attn_q_norm.weight" => Some(Role::HeadNorm { n_head: c.n_head, head_dim: c.head_dim }),
            "attn_k_norm.weight" => Some(Role::HeadNorm { n_head: c.n_head_kv, head_dim: c.head_dim }),
            "attn_qkv.weight" => matrix(q + 2 * kv, c.n_embd),
            "attn_qkv.bias" => vector(q + 2 * kv),
            "attn_q.weight" => matrix(q, c.n_embd),
            "attn_q.bias" => vector(q),
            "attn_k.weight" | "attn_v.weight" => matrix(kv, c.n_embd),
            "attn_k.bias" | "attn_v.bias" => vector(kv),
            "attn_output.weight" => matrix(c.n_embd, q),
            "attn_output.bias" | "ffn_down.bias" => vector(c.n_embd),
            "ffn_gate.weight" => matrix(c.n_ff, c.n_embd),
            "ffn_up.weight" => matrix(up, c.n_embd),
            "ffn_gate.bias" => vector(c.n_ff),
            "ffn_up.bias" => vector(if t.dims[0] == 2 * c.n_ff as u64 { 2 * c.n_ff } else { c.n_ff }),
            "ffn_down.weight" => matrix(c.n_embd, c.n_ff),
            _ => Role::of_experts(part, c),
        }
    }

    /// The role of a tensor of experts: one tensor for all experts, or, in older files, one per expert.
    fn of_experts(part: &str, c: &Config) -> Option<Role> {
        let e = c.experts.as_ref()?;
        let matrices = |n, rows, k| Some(Role::Matrices { n, rows, k });
        match part {
            "ffn_gate_inp.weight" => matrices(1, e.n, c.n_embd),
            "ffn_gate_exps.weight" | "ffn_up_exps.weight" => matrices(e.n, e.n_ff, c.n_embd),
            "ffn_down_exps.weight" => matrices(e.n, c.n_embd, e.n_ff),
            "ffn_gate_inp_shexp.weight" => matrices(1, 1, c.n_embd),
            "ffn_gate_shexp.weight" | "ffn_up_shexp.weight" => matrices(1, e.n_ff_shared, c.n_embd),
            "ffn_down_shexp.weight" => matrices(1, c.n_embd, e.n_ff_shared),
            _ => {
                let (which, number) = part.strip_suffix(".weight")?.split_once('.')?;
                if index(number)? >= e.n {
                    return None;
                }
                match which {
                    "ffn_gate" | "ffn_up" => matrices(1, e.n_ff, c.n_embd),
                    "ffn_down" => matrices(1, c.n_embd, e.n_ff),
                    _ => None,
                }
            }
        }
    }

    fn reserve(self, t: &TensorInfo<'_>, arena: &mut WeightArena) -> Result<TensorStorage, LoadError> {
        let fits = match self {
            Role::Matrices { n, rows, k } => t.dims == [k as u64, rows as u64, n as u64, 1],
            Role::Vector(n) => t.dims == [n as u64, 1, 1, 1],
            Role::HeadNorm { n_head, head_dim } => {
                let (d, n) = (head_dim as u64, n_head as u64);
                [[d, 1, 1, 1], [d, n, 1, 1], [d * n, 1, 1, 1]].contains(&t.dims)
            }
        };
        if !fits {
            let expected = match self {
                Role::Matrices { n: 1, rows, k } => format!("shape [{k}, {rows}]"),
                Role::Matrices { n, rows, k } => format!("shape [{k}, {rows}, {n}]"),
                Role::Vector(n) => format!("shape [{n}]"),
                Role::HeadNorm { n_head, head_dim: d } => format!("shape [{d}], [{d}, {n_head}] or [{}]", d * n_head),
            };
            return Err(tensor_error(t.name, &format!("shape {:?}", &t.dims[..t.n_dims as usize]), &expected));
        }
        let out_of_memory = |_| LoadError::OutOfMemory { what: "the weights", needed: t.len_bytes };
        if let Role::Matrices { n, rows, k } = self {
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

impl TensorStorage {
    /// Allocates memory for a tensor, matrices from `arena`; `None` if the tensor is ignored.
    ///
    /// # Errors
    /// [`LoadError`] if the model has no tensor of this name, or its shape or type is not accepted.
    pub(super) fn reserve(
        t: &TensorInfo<'_>,
        c: &Config,
        arena: &mut WeightArena,
    ) -> Result<Option<TensorStorage>, LoadError> {
        match Role::of(t, c) {
            Some(role) => role.reserve(t, arena).map(Some),
            None if IGNORED.iter().any(|s| t.name.ends_with(s)) => Ok(None),
            None => {
                let expected = format!("only tensors of the architecture `{}`", c.arch.name);
                Err(tensor_error(t.name, "a tensor that this architecture does not use", &expected))
            }
        }
    }
}

/// Parses an index in a tensor name: decimal without leading zeros.
fn index(text: &str) -> Option<usize> {
    if text.len() > 1 && text.starts_with('0') {
        return None;
    }
    text.parse().ok()
}

/// Alternative tensor layouts of a sub-layer (fused QKV; separate Q, K and V). The first whose first tensor exists
/// applies, else the last.
type Layouts = &'static [&'static [&'static str]];

const PRE_NORMS: Layouts = &[&["post_attention_norm"], &["attn_norm"]];
const POST_NORMS: Layouts = &[&["attn_output_norm", "layer_output_norm"]];
const SUBLAYERS: [Layouts; 3] = [
    &[&["attn_qkv"], &["attn_q", "attn_k", "attn_v"]],
    &[&["attn_output"]],
    &[
        &["ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"],
        &["ffn_gate", "ffn_up", "ffn_down"],
        &["ffn_up", "ffn_down"],
    ],
];

/// The first required tensor that is missing; `has` tells which exist.
pub(super) fn missing(c: &Config, has: impl Fn(&str) -> bool) -> Option<String> {
    let mut all: Vec<&str> = ["token_embd.weight"].into();
    if !c.arch.post_norm {
        all.push("output_norm.weight");
    }
    if c.arch.rope.is_none() {
        all.push("position_embd.weight");
    }
    // divisors for short and for long contexts come together
    let factors = ["rope_factors_long.weight", "rope_factors_short.weight"];
    if c.is_longrope() || factors.iter().any(|f| has(f)) {
        all.extend(factors);
    }
    if let Some(name) = all.into_iter().find(|name| !has(name)) {
        return Some(name.into());
    }
    for layer in 0..c.n_layer() {
        let name = |part: &str| format!("blk.{layer}.{part}.weight");
        // older files have one tensor per expert
        let has = |part: &str| match part.strip_suffix("_exps") {
            Some(one) => {
                let n = c.experts.map_or(0, |e| e.n);
                has(&name(part)) || (0..n).all(|i| has(&name(&format!("{one}.{i}"))))
            }
            None => has(&name(part)),
        };
        let norms = if c.arch.post_norm { POST_NORMS } else { PRE_NORMS };
        for layouts in [norms].into_iter().chain(SUBLAYERS) {
            let layout = layouts.iter().find(|layout| has(layout[0])).or(layouts.last())?;
            if let Some(part) = layout.iter().find(|part| !has(part)) {
                return Some(name(part));
            }
        }
    }
    None
}

/// The first tensor that a layer lacks although the layer before it of the same kind (dense or experts) has it. Such a
/// layer would be computed as another kind of block. `names` are the existing tensors, ascending.
pub(super) fn missing_in_layer(c: &Config, names: &[&str], has: impl Fn(&str) -> bool) -> Option<String> {
    let mut last = [None; 2];
    // twice around, so that the first layer of a kind is compared with the last
    for i in 0..2 * c.n_layer() {
        let layer = i % c.n_layer();
        let with_experts = has(&format!("blk.{layer}.ffn_gate_inp.weight"));
        let Some(before) = last[usize::from(with_experts)].replace(layer) else { continue };
        let prefix = format!("blk.{before}.");
        for name in &names[names.partition_point(|name| *name < &prefix[..])..] {
            let Some(part) = name.strip_prefix(&prefix[..]) else { break };
            let name = format!("blk.{layer}.{part}");
            if !has(&name) {
                return Some(name);
            }
        }
    }
    None
}

pub(super) fn tensor_error(name: &str, found: &str, expected: &str) -> LoadError {
    LoadError::Tensor { name: name.into(), found: found.into(), expected: expected.into() }
}

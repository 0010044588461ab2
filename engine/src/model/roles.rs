//! Names of tensors: what each is for, the shape it must have, and which ones a layer cannot do without.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;

use super::config::{Config, MAX_WIDTH};
use super::heads;
use crate::error::LoadError;
use crate::gguf::TensorInfo;
use crate::kernels::Arena;
use crate::kernels::panel::Matrix;
use crate::quant::Dtype;

/// Tensors of no use to the forward pass: precomputed tables of old converters.
const IGNORED: [&str; 1] = ["rotary_emb.inv_freq"];

/// What a tensor is for: its shape.
#[derive(Clone, Copy)]
pub(super) enum Role {
    /// `n` matrices of (rows, k), one after the other; `n` is a dimension of its own unless it is 1.
    Matrices { n: usize, rows: usize, k: usize },
    /// So many numbers.
    Vector(usize),
    /// Weights of a norm: of one head, of each head, or of all heads together.
    HeadNorm { n_head: usize, head_dim: usize },
}

/// Where a tensor goes.
pub(super) enum Into {
    /// One matrix, or the experts'.
    Matrices(Vec<Matrix>),
    /// Numbers, and how many of them belong together: the length of a row.
    Vector { values: Vec<f32>, width: usize },
}

impl Role {
    /// The role of a tensor, by its name. A fused matrix has a role of its own only in its shape.
    fn of(t: &TensorInfo<'_>, c: &Config) -> Option<Role> {
        let (q, kv) = (c.n_head * c.head_dim, c.n_head_kv * c.head_dim);
        let matrix = |rows, k| Some(Role::Matrices { n: 1, rows, k });
        let vector = |n| Some(Role::Vector(n));
        // what a tensor says itself, as far as widths go
        let width = |dim: u64| dim.min(u64::from(MAX_WIDTH)) as usize;
        match t.name {
            "token_embd.weight" | "output.weight" => return matrix(c.n_vocab, c.n_embd),
            "position_embd.weight" if c.arch.rope.is_none() => return matrix(c.n_ctx_train, c.n_embd),
            // of so many kinds of text as there are rows: the first is used
            "token_types.weight" => return matrix(width(t.dims[1]), c.n_embd),
            "token_embd_norm.weight" | "token_embd_norm.bias" => return vector(c.n_embd),
            "output.bias" => return vector(c.n_vocab),
            "output_norm.weight" | "output_norm.bias" if !c.arch.post_norm => return vector(c.n_embd),
            "rope_freqs.weight" | "rope_factors_long.weight" | "rope_factors_short.weight" => {
                return vector(c.n_rot / 2);
            }
            _ => {}
        }
        // heads have the widths that they have: one goes with the next
        match t.name.split_once('.') {
            Some((head, "weight")) if heads::NAMES.contains(&head) => {
                return matrix(width(t.dims[1]), width(t.dims[0]));
            }
            Some((head, "bias")) if heads::NAMES.contains(&head) => return vector(width(t.dims[0])),
            _ => {}
        }
        let (layer, part) = t.name.strip_prefix("blk.")?.split_once('.')?;
        if index(layer)? >= c.n_layer() {
            return None;
        }
        // gate and up may be one matrix
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

    /// The role of a part of a layer's experts: all in one tensor, or as older files have them, each in its own.
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

    fn reserve(self, t: &TensorInfo<'_>, arena: &mut Arena) -> Result<Into, LoadError> {
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
            return Ok(Into::Matrices(matrices.map_err(out_of_memory)?));
        }
        if !matches!(t.dtype, Dtype::F32 | Dtype::F16 | Dtype::BF16) {
            return Err(tensor_error(t.name, t.dtype.name(), "F32, F16 or BF16"));
        }
        let mut values = Vec::new();
        values.try_reserve_exact(t.n_elements() as usize).map_err(out_of_memory)?;
        Ok(Into::Vector { values, width: t.dims[0] as usize })
    }
}

impl Into {
    /// Memory for a tensor of the file, its matrices' from `arena`; `None` if it is of no use.
    ///
    /// # Errors
    /// A name that the model does not use, another shape than expected, a type that is not known.
    pub(super) fn reserve(t: &TensorInfo<'_>, c: &Config, arena: &mut Arena) -> Result<Option<Into>, LoadError> {
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

/// A number as it stands in a name: without leading zeros.
fn index(text: &str) -> Option<usize> {
    if text.len() > 1 && text.starts_with('0') {
        return None;
    }
    text.parse().ok()
}

/// Ways to build a step of a layer, each by the parts it needs. The first is meant whose first part is there; if none
/// is, the last.
type Ways = &'static [&'static [&'static str]];

const PRE_NORMS: Ways = &[&["post_attention_norm"], &["attn_norm"]];
const POST_NORMS: Ways = &[&["attn_output_norm", "layer_output_norm"]];
const STEPS: [Ways; 3] = [
    &[&["attn_qkv"], &["attn_q", "attn_k", "attn_v"]],
    &[&["attn_output"]],
    &[
        &["ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"],
        &["ffn_gate", "ffn_up", "ffn_down"],
        &["ffn_up", "ffn_down"],
    ],
];

/// The first tensor that is missing, given those that are there.
pub(super) fn missing(c: &Config, has: impl Fn(&str) -> bool) -> Option<String> {
    let mut all: Vec<&str> = ["token_embd.weight"].into();
    if !c.arch.post_norm {
        all.push("output_norm.weight");
    }
    if c.arch.rope.is_none() {
        all.push("position_embd.weight");
    }
    // divisors for long contexts never come alone
    let factors = ["rope_factors_long.weight", "rope_factors_short.weight"];
    if c.is_longrope() || factors.iter().any(|f| has(f)) {
        all.extend(factors);
    }
    if let Some(name) = all.into_iter().find(|name| !has(name)) {
        return Some(name.into());
    }
    for layer in 0..c.n_layer() {
        let name = |part: &str| format!("blk.{layer}.{part}.weight");
        // older files have a tensor for each expert
        let has = |part: &str| match part.strip_suffix("_exps") {
            Some(one) => {
                let n = c.experts.map_or(0, |e| e.n);
                has(&name(part)) || (0..n).all(|i| has(&name(&format!("{one}.{i}"))))
            }
            None => has(&name(part)),
        };
        let norms = if c.arch.post_norm { POST_NORMS } else { PRE_NORMS };
        for ways in [norms].into_iter().chain(STEPS) {
            let way = ways.iter().find(|way| has(way[0])).or(ways.last())?;
            if let Some(part) = way.iter().find(|part| !has(part)) {
                return Some(name(part));
            }
        }
    }
    None
}

/// The first tensor that a layer lacks and the one before it of its kind has, with experts or without: the layer would be
/// taken for another kind of layer. `names` are those that are there, ascending.
pub(super) fn uneven(c: &Config, names: &[&str], has: impl Fn(&str) -> bool) -> Option<String> {
    let mut last = [None; 2];
    // twice around: before the first of a kind comes the last one
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

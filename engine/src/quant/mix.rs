//! Which type each tensor gets when a model is quantised: the mixtures that llama.cpp's names stand for.
//!
//! A mixture has a base type, and rules that give sensitive tensors more bits: the output matrix, attention values,
//! and the feed-forward down projections of some layers. Source: `llama_tensor_get_type_impl` and
//! `tensor_allows_quantization` in <https://github.com/ggml-org/llama.cpp/blob/master/src/llama-quant.cpp>, for
//! models of the llama kind and without an importance matrix.

use alloc::vec::Vec;

use super::Dtype;

/// A mixture, by llama.cpp's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[allow(missing_docs, non_camel_case_types)] // llama.cpp's own names
pub enum Mix {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4_K_S,
    Q4_K_M,
    Q5_K_S,
    Q5_K_M,
    Q6_K,
}

/// Mixture, name, `general.file_type`, base type; in the order of the enum.
const TABLE: [(Mix, &str, u32, Dtype); 13] = [
    (Mix::F32, "F32", 0, Dtype::F32),
    (Mix::F16, "F16", 1, Dtype::F16),
    (Mix::BF16, "BF16", 32, Dtype::BF16),
    (Mix::Q4_0, "Q4_0", 2, Dtype::Q4_0),
    (Mix::Q4_1, "Q4_1", 3, Dtype::Q4_1),
    (Mix::Q5_0, "Q5_0", 8, Dtype::Q5_0),
    (Mix::Q5_1, "Q5_1", 9, Dtype::Q5_1),
    (Mix::Q8_0, "Q8_0", 7, Dtype::Q8_0),
    (Mix::Q4_K_S, "Q4_K_S", 14, Dtype::Q4_K),
    (Mix::Q4_K_M, "Q4_K_M", 15, Dtype::Q4_K),
    (Mix::Q5_K_S, "Q5_K_S", 16, Dtype::Q5_K),
    (Mix::Q5_K_M, "Q5_K_M", 17, Dtype::Q5_K),
    (Mix::Q6_K, "Q6_K", 18, Dtype::Q6_K),
];

impl Mix {
    /// Every mixture.
    pub fn all() -> impl Iterator<Item = Mix> {
        TABLE.iter().map(|row| row.0)
    }

    /// The mixture of this name; `Q4_K` and `Q5_K` mean the `_M` ones, case does not matter.
    pub fn from_name(name: &str) -> Option<Mix> {
        match name {
            _ if name.eq_ignore_ascii_case("Q4_K") => Some(Mix::Q4_K_M),
            _ if name.eq_ignore_ascii_case("Q5_K") => Some(Mix::Q5_K_M),
            _ => TABLE.iter().find(|row| row.1.eq_ignore_ascii_case(name)).map(|row| row.0),
        }
    }

    /// llama.cpp's name.
    pub fn name(self) -> &'static str {
        TABLE[self as usize].1
    }

    /// The value of `general.file_type`.
    pub fn file_type(self) -> u32 {
        TABLE[self as usize].2
    }

    /// The type of most matrices.
    pub fn base(self) -> Dtype {
        TABLE[self as usize].3
    }
}

/// What the rules ask of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Facts {
    /// `{arch}.block_count`.
    pub n_layers: u32,
    /// `{arch}.attention.head_count`.
    pub n_heads: u32,
    /// `{arch}.attention.head_count_kv`.
    pub n_kv_heads: u32,
    /// `{arch}.expert_count`, 0 if there are none.
    pub n_experts: u32,
}

/// A tensor of the model as it is.
#[derive(Debug, Clone, Copy)]
pub struct Source<'a> {
    /// Its name.
    pub name: &'a str,
    /// Its type.
    pub dtype: Dtype,
    /// Sizes, the fastest-varying first, padded with 1.
    pub dims: [u64; 4],
}

/// The part a tensor plays, as far as the rules care.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    TokenEmbedding,
    Output,
    /// Values, or values fused with others.
    AttnV,
    AttnK,
    AttnOutput,
    FfnDown,
    Other,
}

/// The new type of every tensor, in the order given. Tensors that must not be quantised keep theirs.
pub fn tensor_types(mix: Mix, facts: &Facts, tensors: &[Source<'_>]) -> Vec<Dtype> {
    let tied = !tensors.iter().any(|t| role(t.name) == Role::Output);
    // "the i-th value projection" counts layers upwards, whatever the order in the file
    let mut order: Vec<usize> = (0..tensors.len()).collect();
    order.sort_by_key(|&i| (layer(tensors[i].name), tensors[i].name));
    let n_attn_v = tensors.iter().filter(|t| role(t.name) == Role::AttnV).count() as u32;
    let (mut i_attn_v, mut i_ffn_down) = (0, 0);

    let mut types: Vec<Dtype> = tensors.iter().map(|t| t.dtype).collect();
    for i in order {
        let t = &tensors[i];
        if !may_quantise(t) {
            continue;
        }
        types[i] = match (mix.base(), role(t.name)) {
            (base @ (Dtype::F32 | Dtype::F16 | Dtype::BF16), _) => base,
            (base, Role::Output) => fall_back(output(base, t.dims[0]), t.dims[0]),
            (base, Role::TokenEmbedding) if tied => fall_back(output(base, t.dims[0]), t.dims[0]),
            (_, Role::AttnV) => {
                i_attn_v += 1;
                fall_back(attn_v(mix, facts, i_attn_v - 1, n_attn_v), t.dims[0])
            }
            (_, Role::FfnDown) => {
                i_ffn_down += 1;
                let position = if facts.n_experts > 1 { layer(t.name).unwrap_or(0) } else { i_ffn_down - 1 };
                fall_back(ffn_down(mix, position, facts.n_layers), t.dims[0])
            }
            (_, Role::AttnK) if facts.n_experts == 8 => fall_back(Dtype::Q8_0, t.dims[0]),
            (Dtype::Q4_K, Role::AttnOutput) if facts.n_experts == 8 => fall_back(Dtype::Q5_K, t.dims[0]),
            (base, _) => fall_back(base, t.dims[0]),
        };
    }
    types
}

/// The output matrix, or the token embedding that serves as one; `k` is its row length.
fn output(base: Dtype, k: u64) -> Dtype {
    if base == Dtype::Q8_0 || !k.is_multiple_of(base.block_len()) { Dtype::Q8_0 } else { Dtype::Q6_K }
}

/// The `i`-th value projection of `n`.
fn attn_v(mix: Mix, facts: &Facts, i: u32, n: u32) -> Dtype {
    let chosen = match mix {
        Mix::Q4_K_M | Mix::Q5_K_M if use_more_bits(i, n) => Dtype::Q6_K,
        Mix::Q4_K_S if i < 4 => Dtype::Q5_K,
        _ => mix.base(),
    };
    // the 70B models: eight heads share a value, so its matrix is small
    let is_70b = facts.n_layers == 80 && facts.n_heads != facts.n_kv_heads;
    match chosen {
        _ if facts.n_experts == 8 => Dtype::Q8_0,
        Dtype::Q4_K if is_70b => Dtype::Q5_K,
        other => other,
    }
}

/// The down projection of layer `i` of `n`.
fn ffn_down(mix: Mix, i: u32, n: u32) -> Dtype {
    match mix {
        Mix::Q4_K_M | Mix::Q5_K_M if use_more_bits(i, n) => Dtype::Q6_K,
        Mix::Q4_K_S if i < n / 8 => Dtype::Q5_K,
        _ => mix.base(),
    }
}

/// The first and the last eighth of the layers, and every third between.
fn use_more_bits(i: u32, n: u32) -> bool {
    i < n / 8 || i >= 7 * n / 8 || (i - n / 8) % 3 == 2
}

/// A type that fits rows of `k` elements: that one, or one of nearly as many bits in blocks of 32, or F16.
fn fall_back(dtype: Dtype, k: u64) -> Dtype {
    let smaller = match dtype {
        _ if k.is_multiple_of(dtype.block_len()) => return dtype,
        Dtype::Q4_K => Dtype::Q5_0,
        Dtype::Q5_K => Dtype::Q5_1,
        Dtype::Q6_K => Dtype::Q8_0,
        _ => Dtype::F16,
    };
    if k.is_multiple_of(smaller.block_len()) { smaller } else { Dtype::F16 }
}

/// Matrices of weights are quantised; vectors, norms, routers, and small tables are not.
fn may_quantise(t: &Source<'_>) -> bool {
    const KEPT: [&str; 5] = ["_norm.weight", "ffn_gate_inp.weight", "ssm_conv1d", "shortconv.conv.weight", ".rel_pos"];
    let is_matrix = t.dims[1..].iter().any(|&d| d > 1);
    let is_table = matches!(t.name, "position_embd.weight" | "token_types.weight");
    is_matrix && t.name.ends_with("weight") && !is_table && !KEPT.iter().any(|kept| t.name.contains(kept))
}

fn role(name: &str) -> Role {
    const PARTS: [(&str, Role); 6] = [
        ("attn_qkv.weight", Role::AttnV),
        ("attn_kv_b.weight", Role::AttnV),
        ("attn_v.weight", Role::AttnV),
        ("attn_k.weight", Role::AttnK),
        ("attn_output.weight", Role::AttnOutput),
        ("ffn_down", Role::FfnDown),
    ];
    match name {
        "output.weight" => Role::Output,
        "token_embd.weight" => Role::TokenEmbedding,
        _ => PARTS.iter().find(|(part, _)| name.contains(part)).map_or(Role::Other, |p| p.1),
    }
}

/// The layer number in `blk.N.`.
fn layer(name: &str) -> Option<u32> {
    name.strip_prefix("blk.")?.split_once('.')?.0.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_is_in_order_of_the_enum() {
        for (i, row) in TABLE.iter().enumerate() {
            assert_eq!(row.0 as usize, i);
            assert_eq!(Mix::from_name(row.1), Some(row.0));
        }
    }

    fn types(mix: Mix, facts: Facts, tensors: &[(&str, [u64; 2])]) -> Vec<Dtype> {
        let tensors: Vec<Source<'_>> = tensors
            .iter()
            .map(|&(name, [k, rows])| Source { name, dtype: Dtype::F32, dims: [k, rows, 1, 1] })
            .collect();
        tensor_types(mix, &facts, &tensors)
    }

    const LLAMA: Facts = Facts { n_layers: 32, n_heads: 32, n_kv_heads: 8, n_experts: 0 };

    #[test]
    fn rows_that_do_not_divide_fall_back() {
        let rows = |mix, k| types(mix, LLAMA, &[("output.weight", [k, 8]), ("blk.9.attn_q.weight", [k, 8])]);
        assert_eq!(rows(Mix::Q4_K_S, 256), [Dtype::Q6_K, Dtype::Q4_K]);
        assert_eq!(rows(Mix::Q4_K_S, 288), [Dtype::Q8_0, Dtype::Q5_0]);
        assert_eq!(rows(Mix::Q5_K_M, 288), [Dtype::Q8_0, Dtype::Q5_1]);
        assert_eq!(rows(Mix::Q6_K, 288), [Dtype::Q8_0, Dtype::Q8_0]);
        assert_eq!(rows(Mix::Q4_0, 288), [Dtype::Q8_0, Dtype::Q4_0]);
        assert_eq!(rows(Mix::Q4_K_M, 40), [Dtype::F16, Dtype::F16]);
    }

    #[test]
    fn small_mixtures_favour_the_first_layers() {
        let names: Vec<_> = ["attn_v", "ffn_down"]
            .iter()
            .flat_map(|part| (0..32).map(move |i| std::format!("blk.{i}.{part}.weight")))
            .collect();
        let tensors: Vec<(&str, [u64; 2])> = names.iter().map(|n| (n.as_str(), [256, 256])).collect();
        let small = types(Mix::Q4_K_S, LLAMA, &tensors);
        for (i, t) in small.iter().enumerate() {
            assert_eq!(*t, if i % 32 < 4 { Dtype::Q5_K } else { Dtype::Q4_K }, "{}", names[i]);
        }
        assert!(types(Mix::Q5_K_S, LLAMA, &tensors).iter().all(|t| *t == Dtype::Q5_K));
        // 70B: the value projections that would have 4 bits have 5
        let facts = Facts { n_layers: 80, n_heads: 64, n_kv_heads: 8, n_experts: 0 };
        let two = [("blk.0.attn_v.weight", [256, 256]), ("blk.1.attn_v.weight", [256, 256])];
        assert_eq!(types(Mix::Q4_K_M, LLAMA, &two), [Dtype::Q4_K, Dtype::Q6_K]);
        assert_eq!(types(Mix::Q4_K_M, facts, &two), [Dtype::Q5_K, Dtype::Q6_K]);
    }

    #[test]
    fn vectors_norms_and_routers_stay() {
        let kept = [
            ("blk.0.attn_q.bias", [256, 2]),
            ("blk.0.attn_norm.weight", [256, 1]),
            ("blk.0.ffn_gate_inp.weight", [256, 4]),
        ];
        for mix in [Mix::F16, Mix::Q8_0, Mix::Q4_K_M] {
            assert_eq!(types(mix, LLAMA, &kept), [Dtype::F32; 3]);
        }
        assert_eq!(types(Mix::BF16, LLAMA, &[("blk.0.attn_q.weight", [40, 2])]), [Dtype::BF16]);
    }

    #[test]
    fn eight_experts_have_better_attention() {
        let facts = Facts { n_experts: 8, ..LLAMA };
        let names = ["attn_k", "attn_v", "attn_output", "ffn_down_exps", "ffn_gate_inp"];
        let names = names.map(|n| std::format!("blk.0.{n}.weight"));
        let tensors: Vec<(&str, [u64; 2])> = names.iter().map(|n| (n.as_str(), [256, 256])).collect();
        let expected = [Dtype::Q8_0, Dtype::Q8_0, Dtype::Q5_K, Dtype::Q6_K, Dtype::F32];
        assert_eq!(types(Mix::Q4_K_M, facts, &tensors), expected);
    }

    #[test]
    fn layers_count_upwards_in_any_file_order() {
        let names: Vec<_> = (0..32).rev().map(|i| std::format!("blk.{i}.attn_v.weight")).collect();
        let tensors: Vec<(&str, [u64; 2])> = names.iter().map(|n| (n.as_str(), [256, 256])).collect();
        let six_bits: Vec<u32> =
            (0..32).filter(|i| types(Mix::Q4_K_M, LLAMA, &tensors)[31 - *i as usize] == Dtype::Q6_K).collect();
        assert_eq!(six_bits, [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]);
    }
}

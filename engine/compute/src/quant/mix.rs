//! Quantisation mixtures: the type of each tensor under a llama.cpp file type such as Q4_K_M.
//!
//! A mixture has a base type, and rules that give sensitive tensors more bits: the output matrix, attention values, and
//! the feed-forward down projections of some layers. Source: `llama_tensor_get_type_impl` and
//! `tensor_allows_quantization` in <https://github.com/ggml-org/llama.cpp/blob/master/src/llama-quant.cpp>, for
//! llama-like models.

use alloc::vec::Vec;

use super::Dtype;

/// A mixture, by its llama.cpp name.
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
    Q2_K,
    Q2_K_S,
    Q3_K_S,
    Q3_K_M,
    Q3_K_L,
    Q4_K_S,
    Q4_K_M,
    Q5_K_S,
    Q5_K_M,
    Q6_K,
    IQ1_S,
    IQ1_M,
    IQ2_XXS,
    IQ2_XS,
    IQ2_S,
    IQ2_M,
    IQ3_XXS,
    IQ3_XS,
    IQ3_S,
    IQ3_M,
    IQ4_NL,
    IQ4_XS,
    TQ1_0,
    TQ2_0,
    MXFP4_MOE,
    Q1_0,
    Q2_0,
}

/// Mixture, name, `general.file_type`, base type; in the order of the enum.
const TABLE: [(Mix, &str, u32, Dtype); 35] = [
    (Mix::F32, "F32", 0, Dtype::F32),
    (Mix::F16, "F16", 1, Dtype::F16),
    (Mix::BF16, "BF16", 32, Dtype::BF16),
    (Mix::Q4_0, "Q4_0", 2, Dtype::Q4_0),
    (Mix::Q4_1, "Q4_1", 3, Dtype::Q4_1),
    (Mix::Q5_0, "Q5_0", 8, Dtype::Q5_0),
    (Mix::Q5_1, "Q5_1", 9, Dtype::Q5_1),
    (Mix::Q8_0, "Q8_0", 7, Dtype::Q8_0),
    (Mix::Q2_K, "Q2_K", 10, Dtype::Q2_K),
    (Mix::Q2_K_S, "Q2_K_S", 21, Dtype::Q2_K),
    (Mix::Q3_K_S, "Q3_K_S", 11, Dtype::Q3_K),
    (Mix::Q3_K_M, "Q3_K_M", 12, Dtype::Q3_K),
    (Mix::Q3_K_L, "Q3_K_L", 13, Dtype::Q3_K),
    (Mix::Q4_K_S, "Q4_K_S", 14, Dtype::Q4_K),
    (Mix::Q4_K_M, "Q4_K_M", 15, Dtype::Q4_K),
    (Mix::Q5_K_S, "Q5_K_S", 16, Dtype::Q5_K),
    (Mix::Q5_K_M, "Q5_K_M", 17, Dtype::Q5_K),
    (Mix::Q6_K, "Q6_K", 18, Dtype::Q6_K),
    (Mix::IQ1_S, "IQ1_S", 24, Dtype::IQ1_S),
    (Mix::IQ1_M, "IQ1_M", 31, Dtype::IQ1_M),
    (Mix::IQ2_XXS, "IQ2_XXS", 19, Dtype::IQ2_XXS),
    (Mix::IQ2_XS, "IQ2_XS", 20, Dtype::IQ2_XS),
    (Mix::IQ2_S, "IQ2_S", 28, Dtype::IQ2_XS),
    (Mix::IQ2_M, "IQ2_M", 29, Dtype::IQ2_S),
    (Mix::IQ3_XXS, "IQ3_XXS", 23, Dtype::IQ3_XXS),
    (Mix::IQ3_XS, "IQ3_XS", 22, Dtype::IQ3_S),
    (Mix::IQ3_S, "IQ3_S", 26, Dtype::IQ3_S),
    (Mix::IQ3_M, "IQ3_M", 27, Dtype::IQ3_S),
    (Mix::IQ4_NL, "IQ4_NL", 25, Dtype::IQ4_NL),
    (Mix::IQ4_XS, "IQ4_XS", 30, Dtype::IQ4_XS),
    (Mix::TQ1_0, "TQ1_0", 36, Dtype::TQ1_0),
    (Mix::TQ2_0, "TQ2_0", 37, Dtype::TQ2_0),
    (Mix::MXFP4_MOE, "MXFP4_MOE", 38, Dtype::MXFP4),
    (Mix::Q1_0, "Q1_0", 40, Dtype::Q1_0),
    (Mix::Q2_0, "Q2_0", 41, Dtype::Q2_0),
];

impl Mix {
    /// Every mixture.
    pub fn all() -> impl Iterator<Item = Mix> {
        TABLE.iter().map(|row| row.0)
    }

    /// The mixture with this name, in any case; `Q3_K`, `Q4_K` and `Q5_K` are the `_M` ones.
    pub fn from_name(name: &str) -> Option<Mix> {
        match name {
            _ if name.eq_ignore_ascii_case("Q3_K") => Some(Mix::Q3_K_M),
            _ if name.eq_ignore_ascii_case("Q4_K") => Some(Mix::Q4_K_M),
            _ if name.eq_ignore_ascii_case("Q5_K") => Some(Mix::Q5_K_M),
            _ => TABLE.iter().find(|row| row.1.eq_ignore_ascii_case(name)).map(|row| row.0),
        }
    }

    /// The mixture with this `general.file_type`.
    pub fn from_file_type(file_type: u32) -> Option<Mix> {
        TABLE.iter().find(|row| row.2 == file_type).map(|row| row.0)
    }

    /// The name that llama.cpp uses.
    pub fn name(self) -> &'static str {
        TABLE[self as usize].1
    }

    /// The value of the metadata key `general.file_type`.
    pub fn file_type(self) -> u32 {
        TABLE[self as usize].2
    }

    /// The type of most matrices.
    pub fn base(self) -> Dtype {
        TABLE[self as usize].3
    }
}

/// Properties of a model that the rules depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelShape {
    /// `{arch}.block_count`.
    pub n_layers: u32,
    /// `{arch}.attention.head_count`.
    pub n_heads: u32,
    /// `{arch}.attention.head_count_kv`.
    pub n_kv_heads: u32,
    /// `{arch}.expert_count`, 0 if there are none.
    pub n_experts: u32,
    /// Whether an importance matrix is used.
    pub importance: bool,
}

/// A tensor before quantisation.
#[derive(Debug, Clone, Copy)]
pub struct SourceTensor<'a> {
    /// Name in the GGUF file.
    pub name: &'a str,
    /// Type in the GGUF file.
    pub dtype: Dtype,
    /// Dimensions, the fastest-varying first, padded with 1.
    pub dims: [u64; 4],
}

/// Role of a tensor in the rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Role {
    TokenEmbedding,
    Output,
    /// Attention values, or a tensor that contains them (fused QKV).
    AttnV,
    AttnK,
    AttnQ,
    AttnOutput,
    FfnDown,
    FfnGate,
    FfnUp,
    Other,
}

/// The type of every tensor after quantisation, in the order given. Tensors that are not quantised keep their type.
pub fn tensor_types(mix: Mix, facts: &ModelShape, tensors: &[SourceTensor<'_>]) -> Vec<Dtype> {
    let tied = !tensors.iter().any(|t| role(t.name) == Role::Output);
    // rules count value projections in order of layers, whatever the order in the file
    let mut order: Vec<usize> = (0..tensors.len()).collect();
    order.sort_by_key(|&i| (layer(tensors[i].name), tensors[i].name));
    let n_attn_v = tensors.iter().filter(|t| role(t.name) == Role::AttnV).count() as u32;
    let mut seen = [0; Role::Other as usize + 1];

    let mut types: Vec<Dtype> = tensors.iter().map(|t| t.dtype).collect();
    for i in order {
        let t = &tensors[i];
        if !may_quantise(t) {
            continue;
        }
        let (base, role) = (mix.base(), role(t.name));
        if matches!(base, Dtype::F32 | Dtype::F16 | Dtype::BF16) {
            types[i] = base;
            continue;
        }
        let count = &mut seen[role as usize];
        *count += 1;
        let by_name = facts.n_experts > 1 && role != Role::AttnV;
        let i_layer = if by_name { layer(t.name).unwrap_or(0) } else { *count - 1 };
        let n_layers = if role == Role::AttnV { n_attn_v } else { facts.n_layers };
        let chosen = match role {
            Role::Output => output(mix, t.dims[0]),
            Role::TokenEmbedding if tied => output(mix, t.dims[0]),
            _ if mix == Mix::MXFP4_MOE => {
                if t.dims[2] > 1 {
                    Dtype::MXFP4
                } else {
                    Dtype::Q8_0
                }
            }
            _ => apply_rules(mix, role, facts, i_layer, n_layers),
        };
        types[i] = fall_back(chosen, t.dims[0]);
    }
    types
}

/// Whether llama.cpp refuses to quantise a tensor to that type without an importance matrix.
pub fn needs_importance(mix: Mix, name: &str, dtype: Dtype) -> bool {
    let low =
        matches!(dtype, Dtype::IQ1_S | Dtype::IQ1_M | Dtype::IQ2_XXS | Dtype::IQ2_XS | Dtype::IQ2_S | Dtype::IQ3_XXS);
    let exempt = matches!(role(name), Role::Output | Role::TokenEmbedding);
    !exempt && (low || mix == Mix::Q2_K_S && dtype == Dtype::Q2_K)
}

/// Type of the output matrix, or of the token embedding if it is tied; `k` is its row length.
fn output(mix: Mix, k: u64) -> Dtype {
    let base = mix.base();
    match mix {
        Mix::Q8_0 | Mix::MXFP4_MOE => Dtype::Q8_0,
        _ if !k.is_multiple_of(base.block_len()) => Dtype::Q8_0,
        Mix::IQ3_XXS => Dtype::Q5_K,
        _ if TWO_BITS.contains(&mix) => Dtype::Q5_K,
        _ => Dtype::Q6_K,
    }
}

/// Condition of a rule, for the i-th of n tensors of a role, in order of layers.
#[derive(Debug, Clone, Copy)]
enum When {
    Always,
    First(u32),
    /// The first n / 8, n / 16, ... of them.
    FirstOf(u32),
    /// Neither in the first nor in the last eighth.
    Middle,
    /// Where [`use_more_bits`] says so.
    MoreBits,
    /// At least 4 query heads per KV head (grouped-query attention).
    Gqa4,
    /// As `Gqa4`, or at least 4 experts.
    Gqa4OrExperts,
    EightExperts,
    EightExpertsMoreBits,
    /// Without an importance matrix.
    NoImatrix,
    /// Without an importance matrix, in the first eighth.
    NoImatrixFirstEighth,
    /// With an importance matrix, in the first eighth.
    ImatrixFirstEighth,
}

use Mix::*;

/// Mixtures of about two bits or less.
const TWO_BITS: &[Mix] = &[IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ2_M];
/// Mixtures that use Q5_K for the attention output of models with 8 experts.
const EXPERTS_OUTPUT_Q5: &[Mix] =
    &[Q2_K, IQ3_XS, IQ3_XXS, Q3_K_S, Q3_K_M, IQ4_NL, Q4_K_S, Q4_K_M, IQ3_S, IQ3_M, IQ4_XS];

/// Mixtures (empty: all), role, condition, type. The first rule that applies wins; without one it is the base type.
#[rustfmt::skip]
const RULES: &[(&[Mix], Role, When, Dtype)] = &[
    (&[IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS], Role::TokenEmbedding, When::Always, Dtype::Q2_K),
    (&[IQ2_S, IQ2_M, IQ3_XXS], Role::TokenEmbedding, When::Always, Dtype::IQ3_S),
    (&[TQ1_0, TQ2_0, Q2_0], Role::TokenEmbedding, When::Always, Dtype::Q4_K),

    (TWO_BITS, Role::AttnV, When::Gqa4OrExperts, Dtype::Q4_K),
    (&[IQ2_S, IQ2_M], Role::AttnV, When::Always, Dtype::IQ3_S),
    (TWO_BITS, Role::AttnV, When::Always, Dtype::Q2_K),
    (&[], Role::AttnV, When::EightExperts, Dtype::Q8_0),
    (&[Q2_K, Q2_K_S, IQ3_XXS, IQ3_XS, IQ3_S], Role::AttnV, When::Gqa4, Dtype::Q4_K),
    (&[Q2_K], Role::AttnV, When::Always, Dtype::Q3_K),
    (&[IQ3_XXS], Role::AttnV, When::NoImatrix, Dtype::IQ3_S),
    (&[IQ3_M], Role::AttnV, When::Always, Dtype::Q4_K),
    (&[Q3_K_M], Role::AttnV, When::First(2), Dtype::Q5_K),
    (&[Q3_K_M], Role::AttnV, When::Always, Dtype::Q4_K),
    (&[Q3_K_L], Role::AttnV, When::Always, Dtype::Q5_K),
    (&[IQ4_NL, IQ4_XS], Role::AttnV, When::Gqa4, Dtype::Q5_K),
    (&[Q4_K_M, Q5_K_M], Role::AttnV, When::MoreBits, Dtype::Q6_K),
    (&[Q4_K_S], Role::AttnV, When::First(4), Dtype::Q5_K),

    (TWO_BITS, Role::AttnK, When::EightExperts, Dtype::Q4_K),
    (&[], Role::AttnK, When::EightExperts, Dtype::Q8_0),
    (&[IQ3_XS], Role::AttnK, When::Always, Dtype::IQ3_XXS),
    (&[IQ3_XS], Role::AttnQ, When::Always, Dtype::IQ3_XXS),
    (&[IQ3_XXS], Role::AttnK, When::Always, Dtype::IQ2_S),
    (&[IQ3_XXS], Role::AttnQ, When::Always, Dtype::IQ2_S),

    (TWO_BITS, Role::AttnOutput, When::EightExperts, Dtype::Q5_K),
    (&[IQ1_S, IQ1_M], Role::AttnOutput, When::Always, Dtype::IQ2_XXS),
    (&[IQ2_S, IQ2_M], Role::AttnOutput, When::Always, Dtype::IQ3_S),
    (EXPERTS_OUTPUT_Q5, Role::AttnOutput, When::EightExperts, Dtype::Q5_K),
    (&[Q3_K_L], Role::AttnOutput, When::EightExperts, Dtype::Q3_K),
    (&[Q2_K], Role::AttnOutput, When::Always, Dtype::Q3_K),
    (&[IQ3_XXS], Role::AttnOutput, When::Always, Dtype::IQ3_S),
    (&[Q3_K_M, IQ3_M], Role::AttnOutput, When::Always, Dtype::Q4_K),
    (&[Q3_K_L], Role::AttnOutput, When::Always, Dtype::Q5_K),

    (&[IQ2_S, IQ2_M], Role::FfnDown, When::FirstOf(8), Dtype::IQ3_S),
    (TWO_BITS, Role::FfnDown, When::FirstOf(8), Dtype::Q2_K),
    (&[Q2_K], Role::FfnDown, When::Always, Dtype::Q3_K),
    (&[Q2_K_S], Role::FfnDown, When::FirstOf(8), Dtype::Q4_K),
    (&[IQ3_XXS], Role::FfnDown, When::NoImatrixFirstEighth, Dtype::Q4_K),
    (&[IQ3_XXS], Role::FfnDown, When::NoImatrix, Dtype::Q3_K),
    (&[Q3_K_M], Role::FfnDown, When::FirstOf(16), Dtype::Q5_K),
    (&[Q3_K_M], Role::FfnDown, When::Always, Dtype::Q4_K),
    (&[IQ3_M], Role::FfnDown, When::FirstOf(8), Dtype::Q4_K),
    (&[IQ3_M], Role::FfnDown, When::EightExpertsMoreBits, Dtype::Q4_K),
    (&[Q3_K_L], Role::FfnDown, When::Always, Dtype::Q5_K),
    (&[Q4_K_M, Q5_K_M], Role::FfnDown, When::MoreBits, Dtype::Q6_K),
    (&[IQ4_NL, IQ4_XS], Role::FfnDown, When::NoImatrixFirstEighth, Dtype::Q5_K),
    (&[Q4_K_S], Role::FfnDown, When::FirstOf(8), Dtype::Q5_K),
    (&[Q4_0], Role::FfnDown, When::ImatrixFirstEighth, Dtype::Q4_1),
    (&[Q5_0], Role::FfnDown, When::ImatrixFirstEighth, Dtype::Q5_1),

    (&[IQ3_XS], Role::FfnGate, When::Middle, Dtype::IQ3_XXS),
    (&[IQ3_XS], Role::FfnUp, When::Middle, Dtype::IQ3_XXS),
];

fn apply_rules(mix: Mix, role: Role, facts: &ModelShape, i: u32, n: u32) -> Dtype {
    let gqa4 = facts.n_kv_heads > 0 && facts.n_heads / facts.n_kv_heads >= 4;
    let applies = |when: When| match when {
        When::Always => true,
        When::First(count) => i < count,
        When::FirstOf(part) => i < n / part,
        When::Middle => i >= n / 8 && !is_in_last_eighth(i, n),
        When::MoreBits => use_more_bits(i, n),
        When::Gqa4 => gqa4,
        When::Gqa4OrExperts => gqa4 || facts.n_experts >= 4,
        When::EightExperts => facts.n_experts == 8,
        When::EightExpertsMoreBits => facts.n_experts == 8 && use_more_bits(i, n),
        When::NoImatrix => !facts.importance,
        When::NoImatrixFirstEighth => !facts.importance && i < n / 8,
        When::ImatrixFirstEighth => facts.importance && i < n / 8,
    };
    let rule = RULES
        .iter()
        .find(|(mixes, of, when, _)| *of == role && (mixes.is_empty() || mixes.contains(&mix)) && applies(*when));
    // 70B models: eight query heads share a KV head, so the value matrix is small and more bits cost little
    let is_70b = facts.n_layers == 80 && facts.n_heads != facts.n_kv_heads;
    match rule.map_or(mix.base(), |rule| rule.3) {
        Dtype::Q3_K | Dtype::Q4_K if is_70b && role == Role::AttnV && !TWO_BITS.contains(&mix) => Dtype::Q5_K,
        chosen => chosen,
    }
}

/// True for the first and the last eighth of the layers, and every third in between.
fn use_more_bits(i: u32, n: u32) -> bool {
    i < n / 8 || is_in_last_eighth(i, n) || (i - n / 8) % 3 == 2
}

fn is_in_last_eighth(i: u32, n: u32) -> bool {
    u64::from(i) >= 7 * u64::from(n) / 8
}

/// The type itself if it divides rows of `k` elements; else a similar type in blocks of 32, or F16.
fn fall_back(dtype: Dtype, k: u64) -> Dtype {
    let smaller = match dtype {
        _ if k.is_multiple_of(dtype.block_len()) => return dtype,
        Dtype::IQ1_S | Dtype::IQ1_M | Dtype::IQ2_XXS | Dtype::IQ2_XS | Dtype::IQ2_S => Dtype::IQ4_NL,
        Dtype::IQ3_XXS | Dtype::IQ3_S | Dtype::IQ4_XS => Dtype::IQ4_NL,
        Dtype::Q2_0 | Dtype::Q2_K | Dtype::Q3_K | Dtype::TQ1_0 | Dtype::TQ2_0 => Dtype::Q4_0,
        Dtype::Q4_K => Dtype::Q5_0,
        Dtype::Q5_K => Dtype::Q5_1,
        Dtype::Q6_K => Dtype::Q8_0,
        _ => Dtype::F16,
    };
    if k.is_multiple_of(smaller.block_len()) { smaller } else { Dtype::F16 }
}

/// Whether llama.cpp quantises a tensor: weight matrices, but not vectors, norms, routers and small tables.
fn may_quantise(t: &SourceTensor<'_>) -> bool {
    const KEPT: [&str; 29] = [
        "_norm.weight",
        "ffn_gate_inp.weight",
        "ssm_conv1d",
        "shortconv.conv.weight",
        ".rel_pos",
        "attn_rel_b.weight",
        "ffn_gate_tid2eid.weight",
        "altup",
        "laurel",
        "per_layer_model_proj",
        "time_mix_first.weight",
        "time_mix_w0.weight",
        "time_mix_w1.weight",
        "time_mix_w2.weight",
        "time_mix_v0.weight",
        "time_mix_v1.weight",
        "time_mix_v2.weight",
        "time_mix_a0.weight",
        "time_mix_a1.weight",
        "time_mix_a2.weight",
        "time_mix_g1.weight",
        "time_mix_g2.weight",
        "time_mix_decay_w1.weight",
        "time_mix_decay_w2.weight",
        "time_mix_lerp_fused.weight",
        "indexer.k_proj.weight",
        "indexer.q_proj.weight",
        // llama.cpp quantises these, although they are no matrices
        "ple_norm_",
        "compressor_ape",
    ];
    let is_matrix = t.dims[1..].iter().any(|&d| d > 1);
    let is_table = matches!(t.name, "position_embd.weight" | "token_types.weight");
    is_matrix && t.name.ends_with("weight") && !is_table && !KEPT.iter().any(|kept| t.name.contains(kept))
}

fn role(name: &str) -> Role {
    const PARTS: [(&str, Role); 9] = [
        ("attn_qkv.weight", Role::AttnV),
        ("attn_kv_b.weight", Role::AttnV),
        ("attn_v.weight", Role::AttnV),
        ("attn_k.weight", Role::AttnK),
        ("attn_q.weight", Role::AttnQ),
        ("attn_output.weight", Role::AttnOutput),
        ("ffn_up", Role::FfnUp),
        ("ffn_gate", Role::FfnGate),
        ("ffn_down", Role::FfnDown),
    ];
    match name {
        "output.weight" => Role::Output,
        "token_embd.weight" => Role::TokenEmbedding,
        _ => PARTS.iter().find(|(part, _)| name.contains(part)).map_or(Role::Other, |p| p.1),
    }
}

/// The layer number N in `blk.N.`.
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

    fn types(mix: Mix, facts: ModelShape, tensors: &[(&str, [u64; 2])]) -> Vec<Dtype> {
        let tensors: Vec<SourceTensor<'_>> = tensors
            .iter()
            .map(|&(name, [k, rows])| SourceTensor { name, dtype: Dtype::F32, dims: [k, rows, 1, 1] })
            .collect();
        tensor_types(mix, &facts, &tensors)
    }

    const LLAMA: ModelShape = ModelShape { n_layers: 32, n_heads: 32, n_kv_heads: 8, n_experts: 0, importance: false };

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
    fn values_of_the_largest_models_have_five_bits() {
        let facts = ModelShape { n_layers: 80, n_heads: 64, ..LLAMA };
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
    fn layers_count_upwards_in_any_file_order() {
        let names: Vec<_> = (0..32).rev().map(|i| std::format!("blk.{i}.attn_v.weight")).collect();
        let tensors: Vec<(&str, [u64; 2])> = names.iter().map(|n| (n.as_str(), [256, 256])).collect();
        let six_bits: Vec<u32> =
            (0..32).filter(|i| types(Mix::Q4_K_M, LLAMA, &tensors)[31 - *i as usize] == Dtype::Q6_K).collect();
        assert_eq!(six_bits, [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, 28, 29, 30, 31]);
    }
}

//! Model layouts without a reference file: tensor layouts of older files, metadata that contradicts tensors.

use starling::gguf::{Gguf, GgufWriter, TensorInfo, Value};
use starling::kernels::Cpu;
use starling::model::Model;
use starling::model::families::FAMILIES;
use starling::pool::Inline;
use starling::quant::Dtype;
use starling_tests::architecture::recipe;
use starling_tests::reference::{self, Piece, changed, whole};

const IDS: [u32; 9] = [1, 7, 33, 250, 17, 3, 99, 120, 12];

fn same_logits(file: &str, pieces: &dyn Fn(&TensorInfo<'_>) -> Vec<Piece>) {
    let (one, other) = (reference::load(file), changed(file, &[], pieces).expect("a model"));
    let logits = |model| reference::logits(model, Cpu::detect(), &IDS);
    assert_eq!(logits(&one), logits(&other), "{file}");
}

/// Cuts a tensor by rows into named parts.
fn cut(t: &TensorInfo<'_>, parts: &[(String, u64)]) -> Vec<Piece> {
    let row = (t.len_bytes / t.n_rows()) as usize;
    let mut at = 0;
    let pieces = parts.iter().map(|(name, rows)| {
        let start = at;
        at += *rows as usize * row;
        (name.clone(), vec![t.dims[0], *rows], start..at)
    });
    pieces.collect()
}

/// Older files have one tensor per expert.
#[test]
fn experts_in_tensors_of_their_own() {
    for file in ["mixtral-4x2-f16.gguf", "mixtral-quant-q4_0.gguf", "qwen2moe-shared-f16.gguf"] {
        same_logits(file, &|t| {
            let Some(name) = t.name.strip_suffix("_exps.weight") else { return whole(t) };
            let parts: Vec<_> = (0..t.dims[2]).map(|i| (format!("{name}.{i}.weight"), t.dims[1])).collect();
            cut(t, &parts)
        });
    }
}

/// Q, K and V, and gate and up: fused and separate tensors give the same result.
#[test]
fn fused_matrices_cut_apart() {
    same_logits("phi3-partial-f16.gguf", &|t| {
        let name = |part: &str| t.name.replace("attn_qkv", part).replace("ffn_up", part);
        if t.name.ends_with("attn_qkv.weight") {
            cut(t, &[("attn_q", 64), ("attn_k", 32), ("attn_v", 32)].map(|(part, rows)| (name(part), rows)))
        } else if t.name.ends_with("ffn_up.weight") {
            cut(t, &["ffn_gate", "ffn_up"].map(|part| (name(part), 96)))
        } else {
            whole(t)
        }
    });
}

#[test]
fn missing_tensors_are_named() {
    for (file, missing) in [
        ("gemma3-swa8-f16.gguf", "blk.3.ffn_down.weight"),
        ("olmo2-postnorm-f16.gguf", "blk.1.attn_v.weight"),
        ("gpt2-4h-f16.gguf", "position_embd.weight"),
        ("gpt2-4h-f16.gguf", "blk.0.attn_norm.weight"),
        ("gpt2-4h-f16.gguf", "blk.1.ffn_norm.weight"),
        ("qwen2-untied-f16.gguf", "blk.1.ffn_norm.weight"),
        ("phi3-longrope-long-f16.gguf", "rope_factors_short.weight"),
        ("mixtral-4x2-f16.gguf", "blk.1.ffn_up_exps.weight"),
    ] {
        let error = changed(file, &[], &|t| if t.name == missing { Vec::new() } else { whole(t) }).err();
        let error = error.unwrap_or_else(|| panic!("{file} without {missing}")).to_string();
        assert!(error.contains(missing) && error.contains("is missing"), "{error}");
    }
}

/// An optional tensor is in all layers or in none: a file that lacks it in one layer is refused.
#[test]
fn layers_have_what_others_have() {
    for file in [
        "gemma2-swa16-f16.gguf",
        "gemma3-swa8-f16.gguf",
        "gpt2-4h-f16.gguf",
        "gptneox-parallel-f16.gguf",
        "olmo2-postnorm-f16.gguf",
        "phi2-parallel-f16.gguf",
        "qwen2-untied-f16.gguf",
        "qwen2moe-shared-f16.gguf",
        "qwen3-tied-f16.gguf",
        "stablelm-parallel-qknorm-f16.gguf",
        "starcoder2-gqa-f16.gguf",
    ] {
        let bytes = reference::read(file);
        let all = Gguf::parse(&bytes).expect("a model");
        for lost in all.tensors().iter().map(|t| t.name).filter(|name| name.starts_with("blk.1.")) {
            let error = changed(file, &[], &|t| if t.name == lost { Vec::new() } else { whole(t) }).err();
            let error = error.unwrap_or_else(|| panic!("{file} without {lost}")).to_string();
            assert!(error.contains("blk.1.") && error.contains("is missing"), "{file} without {lost}: {error}");
        }
    }
}

#[test]
fn metadata_that_contradicts_is_refused() {
    let refused = |file: &str, key: &str, value: u32, words: &[&str]| {
        let error = changed(file, &[(key, Value::U32(value))], &whole).err().expect("a refusal").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{key} = {value}: {error}");
    };
    refused("mixtral-4x2-f16.gguf", "llama.expert_used_count", 5, &["expert_used_count", "found 5", "1 to 4"]);
    refused("mixtral-4x2-f16.gguf", "llama.expert_used_count", 0, &["expert_used_count", "found 0"]);
    refused("mixtral-4x2-f16.gguf", "llama.expert_count", 8, &["ffn_gate_exps", "shape [48, 64, 8]"]);
    refused("mixtral-4x2-f16.gguf", "llama.expert_count", 0, &["does not use"]);
    refused("mixtral-4x2-f16.gguf", "llama.expert_gating_func", 9, &["gating", "9", "sigmoid", "softmax"]);
    refused(
        "mixtral-4x2-f16.gguf",
        "llama.expert_group_count",
        3,
        &["expert_group_count", "a divisor of expert_count, 4"],
    );
    refused("gpt2-4h-f16.gguf", "gpt2.context_length", 512, &["position_embd.weight", "[48, 512]"]);
    refused("phi3-partial-f16.gguf", "phi3.feed_forward_length", 95, &["ffn_"]);
    refused("phi3-partial-f16.gguf", "phi3.rope.dimension_count", 11, &["even"]);
    refused("stablelm-parallel-qknorm-f16.gguf", "stablelm.attention.head_count", 8, &["attn_k_norm", "[8, 2]"]);
}

/// A metadata key that the architecture does not use neither refuses a file nor changes a result.
#[test]
fn unused_keys_do_not_matter() {
    let zero = Value::F32(0.0);
    for (file, key, value) in [
        ("gpt2-4h-f16.gguf", "gpt2.attention.layer_norm_rms_epsilon", zero),
        ("gpt2-4h-f16.gguf", "gpt2.attention.layer_norm_rms_epsilon", Value::F32(1e-5)),
        ("gpt2-4h-f16.gguf", "gpt2.rope.freq_base", zero),
        ("gpt2-4h-f16.gguf", "gpt2.rope.scaling.type", Value::Str(b"unknown")),
        ("llama-gqa-untied-f16.gguf", "llama.attention.layer_norm_epsilon", zero),
        ("llama-gqa-untied-f16.gguf", "llama.rope.freq_base_swa", zero),
        ("llama-gqa-untied-f16.gguf", "llama.attention.sliding_window_pattern", Value::Str(b"none")),
        ("llama-gqa-untied-f16.gguf", "llama.expert_used_count", Value::U32(9)),
    ] {
        let (one, other) = (reference::load(file), changed(file, &[(key, value)], &whole));
        let other = other.unwrap_or_else(|e| panic!("{file} with {key}: {e}"));
        let logits = |model| reference::logits(model, Cpu::detect(), &IDS);
        assert_eq!(logits(&one), logits(&other), "{file} with {key}");
    }
}

/// More embedding rows than tokens are accepted only if `vocab_size` is the number of rows.
#[test]
fn rows_without_a_token_are_announced() {
    let file = "llama-gqa-untied-f16.gguf";
    let bytes = reference::read(file);
    let gguf = Gguf::parse(&bytes).expect("a model");
    let rows = gguf.tensor("token_embd.weight").expect("the embedding").dims[1] as u32;
    let tokens: Vec<&[u8]> = gguf.str_array("tokenizer.ggml.tokens").expect("valid").expect("tokens").collect();
    let mut w = GgufWriter::new();
    w.str_array("tokens", &tokens[..tokens.len() - 1]).expect("valid");
    let header = w.header();
    let fewer = *Gguf::parse(&header).expect("valid").get("tokens").expect("it was written");
    let key = "tokenizer.ggml.tokens";
    let refusal = changed(file, &[(key, fewer), ("llama.vocab_size", Value::U32(1))], &whole).err().expect("a refusal");
    assert!(refusal.to_string().contains("token_embd.weight"), "{refusal}");
    changed(file, &[(key, fewer), ("llama.vocab_size", Value::U32(rows))], &whole).expect("a padded vocabulary");
}

/// Numbers that differ by layer are those of each layer; arrays of another length than `block_count` are refused.
#[test]
fn arrays_have_a_number_per_layer() {
    for (key, of_other) in [
        ("llama.attention.head_count", "head_count_kv`: found 2, expected 1 to 1"),
        ("llama.attention.head_count_kv", "`blk.1.attn_k.weight`: found shape [72, 24], expected shape [72, 12]"),
        ("llama.feed_forward_length", "`blk.0.ffn_down.weight`: found shape [112, 72], expected shape [2, 72]"),
    ] {
        let mut w = GgufWriter::new();
        w.u32_array("same", &[2, 2]).expect("valid");
        w.u32_array("other", &[2, 1]).expect("valid");
        w.u32_array("short", &[2]).expect("valid");
        w.u32_array("long", &[2, 2, 2]).expect("valid");
        let header = w.header();
        let arrays = Gguf::parse(&header).expect("valid");
        let error = |name: &str| {
            let value = arrays.get(name).expect("it was written");
            changed("llama-gqa-untied-f16.gguf", &[(key, *value)], &whole).err().map(|error| error.to_string())
        };
        let refusal = error("other").expect("a refusal");
        assert!(refusal.contains(of_other), "{refusal}");
        for (name, found) in [("short", "an array of 1 element"), ("long", "an array of 3 elements")] {
            let refusal = error(name).expect("a refusal");
            assert!(refusal.contains(found) && refusal.contains("block_count"), "{refusal}");
        }
        assert!(!error("same").unwrap_or_default().contains(key), "{key}");
    }
}

/// Layers that predict further tokens (NextN) are left out: the logits are those of the file without them.
#[test]
fn nextn_layers_are_left_out() {
    for name in ["glm4moe", "exaone-moe", "qwen35", "qwen3next", "bailingmoe2", "hy_v3"] {
        let load = |bytes: &[u8]| Model::load(bytes, &Inline).unwrap_or_else(|e| panic!("{name}: {e}"));
        let mut recipe = recipe(name);
        let ids = recipe.prompts[0].clone();
        let logits = |model: &Model| reference::logits(model, Cpu::detect(), &ids);
        let plain = load(&recipe.file(Dtype::F32));
        recipe.add_nextn_layer();
        let other = load(&recipe.file(Dtype::F32));
        assert_eq!((plain.config.n_layer(), other.config.n_nextn), (other.config.n_layer(), 1), "{name}");
        assert_eq!(logits(&plain), logits(&other), "{name}");
        // without the key they are refused, by name
        recipe.metadata.retain(|(key, ..)| !key.ends_with("nextn_predict_layers"));
        let refusal = Model::load(&recipe.file(Dtype::F32), &Inline).err().expect("a refusal").to_string();
        assert!(refusal.contains("nextn"), "{name}: {refusal}");
    }
}

/// A file has layers besides those that predict further tokens.
#[test]
fn nextn_layers_are_fewer_than_all() {
    let mut recipe = recipe("glm4moe");
    recipe.metadata.push(("glm4moe.nextn_predict_layers".into(), "UINT32".into(), 3.into()));
    let refusal = Model::load(&recipe.file(Dtype::F32), &Inline).err().expect("a refusal").to_string();
    assert!(refusal.contains("nextn_predict_layers") && refusal.contains("0 to 2"), "{refusal}");
}

/// The specification has a row for each family.
#[test]
fn every_family_is_specified() {
    let text = include_str!("../../engine/docs/numerics.md");
    let table = text.split("### Families").nth(1).expect("the table of families");
    let is_name = |c: char| c.is_ascii_alphanumeric() || "-_".contains(c);
    let names: Vec<&str> = table.split(|c| !is_name(c)).collect();
    let missing: Vec<&str> =
        FAMILIES.iter().map(|entry| entry.family.name).filter(|name| !names.contains(name)).collect();
    assert!(missing.is_empty(), "no row in engine/docs/numerics.md: {missing:?}");
}

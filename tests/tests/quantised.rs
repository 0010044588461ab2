//! Whole models as llama.cpp quantises them: the same types, the same bytes.

use std::path::{Path, PathBuf};

use starling::gguf::Gguf;
use starling::quant::mix::{Facts, Mix, Source, tensor_types};
use starling::quant::{Dtype, dequantise, quantise, validate};

fn reference(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/reference").join(name)
}

/// Types and bytes of a model, from its BF16 file.
fn check_model(quantised: &str, original: Option<&str>, mix: Mix) {
    let case: serde_json::Value =
        serde_json::from_slice(&std::fs::read(reference(&format!("{quantised}.json"))).expect("a whole reference"))
            .expect("a whole reference");
    let file = std::fs::read(reference(&format!("{quantised}.gguf"))).expect("a whole reference");
    let file = Gguf::parse(&file).expect("a whole reference");
    assert_eq!(file.u32("general.file_type").expect("a whole reference"), Some(mix.file_type()));
    let config = |name: &str| case["config"][name].as_u64().expect("a whole reference") as u32;
    let facts = Facts {
        n_layers: config("num_hidden_layers"),
        n_heads: config("num_attention_heads"),
        n_kv_heads: config("num_key_value_heads"),
        n_experts: 0,
        importance: false,
    };
    let sources: Vec<_> =
        file.tensors().iter().map(|t| Source { name: t.name, dtype: Dtype::F32, dims: t.dims }).collect();
    let types = tensor_types(mix, &facts, &sources);
    for (t, dtype) in file.tensors().iter().zip(&types) {
        assert_eq!(*dtype, t.dtype, "{}", t.name);
        assert_eq!(case["tensor_types"][t.name], dtype.name());
        assert_eq!(validate(*dtype, file.data(t).expect("a whole reference")), Ok(()));
    }
    for row in case["rows"].as_array().expect("a whole reference") {
        let hex = row["bytes_hex"].as_str().expect("a whole reference");
        let bytes: Vec<u8> = (0..hex.len())
            .step_by(2)
            .map(|at| u8::from_str_radix(&hex[at..at + 2], 16).expect("a whole reference"))
            .collect();
        let dtype = Dtype::from_name(row["type"].as_str().expect("a whole reference")).expect("a whole reference");
        // shortest decimals of f32: by way of text, so that they are rounded once
        let theirs: Vec<f32> = row["values"]
            .as_array()
            .expect("a whole reference")
            .iter()
            .map(|v| v.to_string().parse().expect("a whole reference"))
            .collect();
        let mut ours = vec![0.0; theirs.len()];
        dequantise(
            dtype,
            &bytes[..dtype.row_bytes(theirs.len() as u64).expect("a whole reference") as usize],
            &mut ours,
        )
        .expect("a whole reference");
        assert_eq!(ours, theirs, "{dtype:?} {}", row["tensor"]);
    }

    let Some(original) = original else { return };
    let bytes = std::fs::read(reference(original)).expect("a whole reference");
    let original = Gguf::parse(&bytes).expect("a whole reference");
    for (t, dtype) in file.tensors().iter().zip(types) {
        let source = original.tensor(t.name).expect("a whole reference");
        let mut values = vec![0.0; source.n_elements() as usize];
        dequantise(source.dtype, original.data(source).expect("a whole reference"), &mut values)
            .expect("a whole reference");
        let mut ours = vec![0; t.len_bytes as usize];
        quantise(dtype, &values, &mut ours).expect("a whole reference");
        let theirs = file.data(t).expect("a whole reference");
        let block = dtype.block_bytes() as usize;
        let differ = ours.chunks(block).zip(theirs.chunks(block)).filter(|(a, b)| a != b).count();
        assert_eq!(differ, 0, "{} of {} blocks of {} ({dtype:?})", differ, ours.len() / block, t.name);
    }
}

#[test]
fn models_have_ggmls_bytes() {
    for mix in [
        Mix::Q2_K,
        Mix::Q3_K_M,
        Mix::IQ4_NL,
        Mix::IQ4_XS,
        Mix::Q4_0,
        Mix::Q4_1,
        Mix::Q5_0,
        Mix::Q5_1,
        Mix::Q8_0,
        Mix::Q4_K_M,
        Mix::Q5_K_M,
        Mix::Q6_K,
    ] {
        let name = mix.name().to_ascii_lowercase();
        check_model(&format!("llama-k256-{name}"), Some("llama-k256-bf16.gguf"), mix);
    }
    check_model("llama-k256-2l-q4_k_m", None, Mix::Q4_K_M);
    check_model("llama-fallback-q4_k_m", None, Mix::Q4_K_M);
}

//! Whole models quantised as llama.cpp does: same tensor types, same bytes.

use std::collections::BTreeMap;

use serde::Deserialize;
use starling::gguf::Gguf;
use starling::quant::mix::{Mix, ModelShape, SourceTensor, tensor_types};
use starling::quant::{Dtype, dequantise, quantise, validate};
use starling_tests::reference::read;

/// An entry of the quantised files; schema in `fixtures/reference/README.md`.
#[derive(Deserialize)]
struct Case {
    config: Shape,
    tensor_types: BTreeMap<String, String>,
    rows: Vec<Row>,
}

#[derive(Deserialize)]
struct Shape {
    num_hidden_layers: u32,
    num_attention_heads: u32,
    num_key_value_heads: u32,
}

/// The first blocks of a row of a tensor.
#[derive(Deserialize)]
struct Row {
    tensor: String,
    #[serde(rename = "type")]
    dtype: String,
    bytes_hex: String,
    /// f32 in shortest decimal form; parsed from text, so that each is rounded once.
    values: Vec<serde_json::Number>,
}

fn parse<'a>(name: &str, file: &'a [u8]) -> Gguf<'a> {
    Gguf::parse(file).unwrap_or_else(|e| panic!("{name}: {e}"))
}

fn values(name: &str, dtype: Dtype, bytes: &[u8], n: usize) -> Vec<f32> {
    let mut values = vec![0.0; n];
    dequantise(dtype, bytes, &mut values).unwrap_or_else(|e| panic!("{name}: {e}"));
    values
}

impl Row {
    fn bytes(&self) -> Vec<u8> {
        let byte = |at| u8::from_str_radix(&self.bytes_hex[at..at + 2], 16).expect("hexadecimal digits");
        (0..self.bytes_hex.len()).step_by(2).map(byte).collect()
    }

    fn check(&self) {
        let dtype = Dtype::from_name(&self.dtype).expect("a type of ours");
        let theirs: Vec<f32> = self.values.iter().map(|v| v.to_string().parse().expect("a number")).collect();
        let len = dtype.row_bytes(theirs.len() as u64).expect("whole blocks") as usize;
        assert_eq!(
            values(&self.tensor, dtype, &self.bytes()[..len], theirs.len()),
            theirs,
            "{dtype:?} {}",
            self.tensor
        );
    }
}

/// Checks tensor types and bytes of a model quantised from its BF16 file.
fn check_model(quantised: &str, original: Option<&str>, mix: Mix) {
    let case: Case = serde_json::from_slice(&read(&format!("{quantised}.json"))).expect("a case as the README says");
    let bytes = read(&format!("{quantised}.gguf"));
    let file = parse(quantised, &bytes);
    assert_eq!(file.u32("general.file_type"), Ok(Some(mix.file_type())));
    let facts = ModelShape {
        n_layers: case.config.num_hidden_layers,
        n_heads: case.config.num_attention_heads,
        n_kv_heads: case.config.num_key_value_heads,
        n_experts: 0,
        importance: false,
    };
    let sources: Vec<_> =
        file.tensors().iter().map(|t| SourceTensor { name: t.name, dtype: Dtype::F32, dims: t.dims }).collect();
    let types = tensor_types(mix, &facts, &sources);
    for (t, dtype) in file.tensors().iter().zip(&types) {
        assert_eq!(*dtype, t.dtype, "{}", t.name);
        assert_eq!(case.tensor_types[t.name], dtype.name());
        let data = file.data(t).unwrap_or_else(|| panic!("{}: no data", t.name));
        assert_eq!(validate(*dtype, data), Ok(()), "{}", t.name);
    }
    case.rows.iter().for_each(Row::check);

    let Some(original) = original else { return };
    let bytes = read(original);
    let original = parse(original, &bytes);
    for (t, dtype) in file.tensors().iter().zip(types) {
        let source = original.tensor(t.name).unwrap_or_else(|| panic!("{}: no tensor", t.name));
        let (Some(theirs), Some(data)) = (file.data(t), original.data(source)) else { panic!("{}: no data", t.name) };
        let values = values(t.name, source.dtype, data, source.n_elements() as usize);
        let mut ours = vec![0; t.len_bytes as usize];
        assert_eq!(quantise(dtype, &values, &mut ours), Ok(()), "{}", t.name);
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

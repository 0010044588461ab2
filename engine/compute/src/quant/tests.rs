//! Comparison with ggml: values of blocks, bytes of quantised rows. `tests/tests/quantised.rs` compares whole models.

use alloc::string::{String, ToString};
use alloc::vec;
use alloc::vec::Vec;
use std::format;
use std::path::{Path, PathBuf};

use proptest::prelude::*;

use super::mix::{Mix, ModelShape, SourceTensor, needs_importance, tensor_types};
use super::*;
use crate::kernels::tests::Rng;
use sha2::{Digest, Sha256};

fn reference() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/reference")
}

fn json(path: PathBuf) -> serde_json::Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn hex(text: &str) -> Vec<u8> {
    text.as_bytes().chunks(2).map(|pair| u8::from_str_radix(core::str::from_utf8(pair).unwrap(), 16).unwrap()).collect()
}

fn floats(value: &serde_json::Value) -> Vec<f32> {
    // parsed from text, so that the decimals are rounded only once, to f32
    value.as_array().unwrap().iter().map(|v| v.to_string().parse().unwrap()).collect()
}

/// Quantisers of all types, made once.
fn quantisers() -> &'static [(Dtype, Quantiser)] {
    static ALL: std::sync::OnceLock<Vec<(Dtype, Quantiser)>> = std::sync::OnceLock::new();
    ALL.get_or_init(|| Dtype::SUPPORTED.into_iter().map(|d| (d, Quantiser::new(d).unwrap())).collect())
}

/// Quantisers of the types that need no importance matrix.
fn plain_quantisers() -> impl Iterator<Item = (Dtype, &'static Quantiser)> {
    quantisers().iter().map(|(dtype, quantiser)| (*dtype, quantiser)).filter(|(dtype, quantiser)| {
        let (k, bytes) = (dtype.block_len() as usize, dtype.block_bytes() as usize);
        quantiser.rows(&vec![0.0; k], k, None, &mut vec![0; bytes]) != Err(QuantError::NeedsImportance(*dtype))
    })
}

/// Checks that `dequantise` gives exactly `values`.
fn check_values(dtype: Dtype, bytes: &[u8], values: &[f32]) {
    let mut ours = vec![0.0; values.len()];
    dequantise(dtype, bytes, &mut ours).unwrap();
    for (i, (ours, theirs)) in ours.iter().zip(values).enumerate() {
        let both_nan = ours.is_nan() && theirs.is_nan();
        assert!(ours.to_bits() == theirs.to_bits() || both_nan || ours == theirs, "{dtype:?} {i}: {ours} {theirs}");
    }
}

#[test]
fn blocks_have_ggmls_values() {
    for dtype in Dtype::SUPPORTED {
        if dtype == Dtype::F32 {
            continue;
        }
        let file = json(reference().join(format!("dequant/{}.json", dtype.name())));
        assert_eq!(file["ggml_type_id"], dtype.ggml_id());
        let blocks = file["blocks"].as_array().unwrap();
        assert_eq!(blocks.len(), 8);
        for block in blocks {
            let bytes = hex(block["bytes_hex"].as_str().unwrap());
            check_values(dtype, &bytes, &floats(&block["values"]));
        }
    }
}

#[test]
fn sizes_are_ggmls() {
    for entry in std::fs::read_dir(reference().join("dequant")).unwrap() {
        let file = json(entry.unwrap().path());
        let dtype = Dtype::from_name(file["type"].as_str().unwrap()).unwrap();
        assert_eq!(file["ggml_type_id"], dtype.ggml_id());
        assert_eq!(file["block_elements"], dtype.block_len());
        assert_eq!(file["block_bytes"], dtype.block_bytes());
    }
}

/// Test data of `tests/scripts/make_quantiser_cases.py`: rows, and the importance of their elements.
fn numbers(rows: usize, k: usize) -> (Vec<Vec<f32>>, Vec<f32>) {
    let mut rng = Rng(1);
    let row = |i: usize| {
        (0..k)
            .map(|j| {
                let z = rng.next();
                let mut v =
                    (z & 0xffff) as i32 + (z >> 16 & 0xffff) as i32 + (z >> 32 & 0xffff) as i32 + (z >> 48) as i32;
                v -= 131_070;
                let mut e = -17 + (i as i32 % 5 - 2) * 3;
                match i % 8 {
                    3 if !z.is_multiple_of(16) => v = 0,
                    4 if z.is_multiple_of(64) => e += 5,
                    5 => v = v.abs(),
                    6 if j % 256 < 128 => v = 0,
                    7 => v = v >> 15 << 15,
                    _ => {}
                }
                v as f32 * 2.0f32.powi(e)
            })
            .collect()
    };
    let rows = (0..rows).map(row).collect();
    let mut weights: Vec<f32> = (0..k).map(|_| (rng.next() & 0xffff) as f32 / 4096.0).collect();
    weights.iter_mut().step_by(37).for_each(|w| *w = 0.0);
    (rows, weights)
}

#[test]
fn rows_have_ggmls_bytes() {
    let file = json(reference().join("../quantised/rows.json"));
    let (rows, k) = (file["rows"].as_u64().unwrap() as usize, file["k"].as_u64().unwrap() as usize);
    let (rows, weights) = numbers(rows, k);
    let mut wrong = Vec::new();
    for (name, cases) in file["types"].as_object().unwrap() {
        let dtype = Dtype::from_name(name).unwrap();
        let quantiser = Quantiser::new(dtype).unwrap();
        let mut out = vec![0; dtype.row_bytes(k as u64).unwrap() as usize];
        for (kind, digests) in cases.as_object().unwrap() {
            let importance = (kind == "weighted").then_some(&weights[..]);
            for (i, (row, digest)) in rows.iter().zip(digests.as_array().unwrap()).enumerate() {
                out.fill(0xa5);
                // the only difference: see `iq3::quantise_s`
                if dtype == Dtype::IQ3_S && row.chunks(32).any(|x| x.iter().all(|&x| x == 0.0)) {
                    continue;
                }
                let done = quantiser.rows(row, k, importance, &mut out);
                let ours: String = Sha256::digest(&out)[..8].iter().map(|b| format!("{b:02x}")).collect();
                if done != Ok(()) || digest.as_str() != Some(&ours) {
                    wrong.push(format!("{name} {kind} {i} {done:?}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:?}");
}

/// The tensors of a model of `make_mixture_cases.py`.
fn mixture_tensors(model: &serde_json::Value) -> Vec<(String, [u64; 4])> {
    let number = |key: &str| model[key].as_u64().unwrap();
    let (experts, kv) = (number("experts"), 256 / number("heads") * number("kv_heads"));
    let mut all = vec![("token_embd.weight".to_string(), [256, 32, 1, 1])];
    if model["tied"] == false {
        all.push(("output.weight".to_string(), [256, 32, 1, 1]));
    }
    for i in 0..number("layers") {
        for (part, rows) in [("attn_q", 256), ("attn_k", kv), ("attn_v", kv), ("attn_output", 256)] {
            all.push((format!("blk.{i}.{part}.weight"), [256, rows, 1, 1]));
        }
        if experts > 0 {
            all.push((format!("blk.{i}.ffn_gate_inp.weight"), [256, experts, 1, 1]));
        }
        for part in ["ffn_gate", "ffn_up", "ffn_down"] {
            let suffix = if experts > 0 { "_exps" } else { "" };
            all.push((format!("blk.{i}.{part}{suffix}.weight"), [256, 256, experts.max(1), 1]));
        }
    }
    all
}

/// The types of one kind of tensor in order of layers, in the notation of `make_mixture_cases.py`.
fn runs(types: &[Dtype]) -> String {
    let runs = types.chunk_by(|a, b| a == b).map(|run| format!("{}*{}", run[0].name(), run.len()));
    runs.collect::<Vec<_>>().join(" ")
}

#[test]
fn mixtures_are_llama_cpps() {
    let file = json(reference().join("../quantised/mixtures.json"));
    for (name, model) in file.as_object().unwrap() {
        let number = |key: &str| model[key].as_u64().unwrap() as u32;
        let tensors = mixture_tensors(model);
        for (mix_name, cases) in model["mixes"].as_object().unwrap() {
            let mix = Mix::from_name(mix_name).unwrap();
            for (case, importance) in [("plain", false), ("guided", true)] {
                let facts = ModelShape {
                    n_layers: number("layers"),
                    n_heads: number("heads"),
                    n_kv_heads: number("kv_heads"),
                    n_experts: number("experts"),
                    importance,
                };
                let sources: Vec<_> =
                    tensors.iter().map(|(name, dims)| SourceTensor { name, dtype: Dtype::F32, dims: *dims }).collect();
                let types = tensor_types(mix, &facts, &sources);
                let mut kinds = std::collections::BTreeMap::<&str, Vec<Dtype>>::new();
                for ((name, _), dtype) in tensors.iter().zip(&types) {
                    let kind = name.strip_prefix("blk.").map_or(&name[..], |rest| rest.split_once('.').unwrap().1);
                    kinds.entry(kind).or_default().push(*dtype);
                }
                let refused = tensors.iter().zip(&types).any(|((name, _), t)| needs_importance(mix, name, *t));
                let Some(expected) = cases[case].as_object() else {
                    assert!(refused && !importance, "{name} {mix_name} {case}: llama.cpp refuses");
                    continue;
                };
                assert!(importance || !refused, "{name} {mix_name} {case}: refused");
                assert_eq!(expected.len(), kinds.len(), "{name}");
                for (kind, types) in kinds {
                    assert_eq!(expected[kind].as_str(), Some(&runs(&types)[..]), "{name} {mix_name} {case} {kind}");
                }
            }
        }
    }
}

#[test]
fn lengths_and_types_are_checked() {
    let length = |elements, bytes| QuantError::Length { dtype: Dtype::Q4_0, elements, bytes };
    assert_eq!(quantise(Dtype::Q4_0, &[0.0; 33], &mut [0; 18]), Err(length(33, 18)));
    assert_eq!(dequantise(Dtype::Q4_0, &[0; 17], &mut [0.0; 32]), Err(length(32, 17)));
    assert_eq!(dequantise(Dtype::Q4_0, &[], &mut []), Ok(()));
    let unsupported = QuantError::Unsupported(Dtype::Q8_1);
    assert_eq!(dequantise(Dtype::Q8_1, &[0; 36], &mut [0.0; 32]), Err(unsupported));
    assert_eq!(quantise(Dtype::Q8_1, &[0.0; 32], &mut [0; 36]), Err(unsupported));
}

#[test]
fn importance_is_checked() {
    let (x, mut w) = ([1.0; 256], [1.0; 256]);
    for dtype in [Dtype::IQ1_S, Dtype::IQ1_M, Dtype::IQ2_XXS, Dtype::IQ2_XS, Dtype::IQ2_S] {
        let mut out = vec![0; dtype.block_bytes() as usize];
        assert_eq!(quantise(dtype, &x, &mut out), Err(QuantError::NeedsImportance(dtype)));
    }
    let quantiser = Quantiser::new(Dtype::Q4_K).unwrap();
    let importance = |found| Err(QuantError::Importance { found, expected: 256 });
    assert_eq!(quantiser.rows(&x, 256, Some(&w[..255]), &mut [0; 144]), importance(255));
    w[17] = -1.0;
    assert_eq!(quantiser.rows(&x, 256, Some(&w), &mut [0; 144]), importance(17));
    w[17] = f32::NAN;
    assert_eq!(quantiser.rows(&x, 256, Some(&w), &mut [0; 144]), importance(17));
    let length = QuantError::Length { dtype: Dtype::Q4_K, elements: 100, bytes: 144 };
    assert_eq!(quantiser.rows(&x, 100, None, &mut [0; 144]), Err(length));
}

#[test]
fn infinities_and_nans_are_refused() {
    let mut x = vec![1.0f32; 4096];
    x[2345] = f32::NAN;
    for (dtype, quantiser) in plain_quantisers() {
        let mut out = vec![0; dtype.row_bytes(4096).unwrap() as usize];
        assert_eq!(quantiser.rows(&x, x.len(), None, &mut out), Err(QuantError::NotFinite { index: 2345 }));
        if !matches!(dtype, Dtype::F32 | Dtype::BF16 | Dtype::MXFP4) {
            let fault = BlockFault { index: 0 };
            assert_eq!(
                quantiser.rows(&[1e38; 256], 256, None, &mut out[..dtype.row_bytes(256).unwrap() as usize]),
                Err(QuantError::Overflow { dtype, fault })
            );
        }
    }
}

#[test]
fn validate_finds_every_bad_scale() {
    for dtype in Dtype::SUPPORTED {
        let block = dtype.block_bytes() as usize;
        assert_eq!(validate(dtype, &vec![0; 3000 * block]), Ok(()));
        if block > 1 {
            assert_eq!(validate(dtype, &vec![0; 2 * block - 1]), Err(BlockFault { index: 1 }));
        }
        for (&offset, index) in dtype.f16_scales().iter().flat_map(|o| [0, 1, 1023, 1024, 2999].map(|i| (o, i))) {
            for bad in [0x7c00u16, 0xfc00, 0x7e01] {
                let mut bytes = vec![0; 3000 * block];
                bytes[index * block + offset..][..2].copy_from_slice(&bad.to_le_bytes());
                assert_eq!(validate(dtype, &bytes), Err(BlockFault { index }), "{dtype:?}");
            }
        }
    }
    let mut block = [0; 56];
    [block[49], block[51], block[53], block[55]] = [0xf0, 0xf0, 0xc0, 0x70]; // the parts of 0x7cff
    assert_eq!(validate(Dtype::IQ1_M, &block), Err(BlockFault { index: 0 }));
    for (e, expected) in [(252, Ok(())), (253, Err(BlockFault { index: 0 })), (255, Err(BlockFault { index: 0 }))] {
        let mut block = [0x77; 17];
        block[0] = e;
        assert_eq!(validate(Dtype::MXFP4, &block), expected);
        let mut values = [0.0; 32];
        dequantise(Dtype::MXFP4, &block, &mut values).unwrap();
        assert_eq!(values[0].is_finite(), expected.is_ok());
    }
    assert_eq!(validate(Dtype::F32, &f32::INFINITY.to_le_bytes()), Err(BlockFault { index: 0 }));
    assert_eq!(validate(Dtype::BF16, &[0, 0, 0x80, 0x7f]), Err(BlockFault { index: 1 }));
}

/// Number of quantisation steps in the range of a block; the error of an element is about one step at most.
fn steps(dtype: Dtype) -> f32 {
    match dtype {
        Dtype::Q4_0 | Dtype::Q4_1 | Dtype::Q4_K => 15.0,
        Dtype::Q5_0 | Dtype::Q5_1 | Dtype::Q5_K => 31.0,
        Dtype::Q6_K => 63.0,
        Dtype::Q8_0 => 254.0,
        Dtype::F16 => 2048.0,
        Dtype::BF16 => 256.0,
        Dtype::IQ4_NL | Dtype::IQ4_XS => 10.0,
        Dtype::Q3_K => 7.0,
        // no useful bound for single elements
        _ if dtype.block_len() > 1 => 1.0,
        _ => f32::INFINITY,
    }
}

proptest! {
    #[test]
    fn quantising_loses_about_a_step(x in proptest::collection::vec(-8.0f32..8.0, 512), zero in 0usize..512) {
        let mut x = x;
        x[..zero].fill(0.0);
        for (dtype, quantiser) in plain_quantisers() {
            let mut bytes = vec![0xa5; dtype.row_bytes(512).unwrap() as usize];
            quantiser.rows(&x, x.len(), None, &mut bytes).unwrap();
            let mut back = vec![0.0; 512];
            dequantise(dtype, &bytes, &mut back).unwrap();
            for (a, b) in x.iter().zip(&back) {
                prop_assert!((a - b).abs() <= 1.5 * 16.0 / steps(dtype), "{dtype:?}: {a} became {b}");
            }
        }
    }

    #[test]
    fn any_finite_numbers_give_finite_blocks(bits in proptest::collection::vec(any::<u32>(), 256)) {
        let x: Vec<f32> = bits.iter().map(|&b| f32::from_bits(b)).map(|v| if v.is_finite() { v } else { 0.0 }).collect();
        for (dtype, quantiser) in plain_quantisers() {
            let mut bytes = vec![0; dtype.row_bytes(256).unwrap() as usize];
            match quantiser.rows(&x, x.len(), None, &mut bytes) {
                Ok(()) => prop_assert_eq!(validate(dtype, &bytes), Ok(())),
                Err(e) => prop_assert!(matches!(e, QuantError::Overflow { .. }), "other error"),
            }
        }
    }

    #[test]
    fn any_importance_gives_finite_blocks(
        bits in proptest::collection::vec(any::<u32>(), 256), scale in -40i32..60, weights in proptest::collection::vec(any::<u32>(), 256),
    ) {
        let finite = |bits: u32| Some(f32::from_bits(bits)).filter(|v| v.is_finite()).unwrap_or(0.0);
        let x: Vec<f32> = bits.iter().map(|&b| (b as i32 as f32) * 2.0f32.powi(-scale)).collect();
        let w: Vec<f32> = weights.iter().map(|&b| finite(b).abs()).collect();
        for (dtype, quantiser) in quantisers() {
            let mut bytes = vec![0; dtype.row_bytes(256).unwrap() as usize];
            match quantiser.rows(&x, 256, Some(&w), &mut bytes) {
                Ok(()) => prop_assert_eq!(validate(*dtype, &bytes), Ok(())),
                Err(e) => prop_assert!(matches!(e, QuantError::Overflow { .. }), "{}", e),
            }
        }
    }
}

//! `starling embed` with texts from arguments, files and standard input.

use std::fs;
use std::path::Path;

use serde_json::Value;

use super::starling::{USAGE, with_input};

/// An embedding model of the reference fixtures.
fn embedding_model() -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fixtures/reference/qwen3-embedding-last-f16.gguf");
    path.display().to_string()
}

fn vector(value: &Value) -> Vec<f32> {
    serde_json::from_value(value.clone()).expect("numbers")
}

#[test]
fn embeddings_are_those_of_the_reference_however_texts_come() {
    let model = embedding_model();
    let reference: Value =
        serde_json::from_slice(&fs::read(model.replace("-f16.gguf", ".json")).expect("a reference")).expect("JSON");
    let prompts = reference["prompts"].as_array().expect("prompts");
    let texts: Vec<&str> = prompts.iter().map(|p| p["text"].as_str().expect("a text")).collect();
    let args = |more: &[&str]| -> Vec<String> {
        ["embed", "-m", &model].iter().chain(more).map(|s| (*s).to_owned()).collect()
    };
    let run = |more: &[&str], input: &str| {
        let args = args(more);
        let ran = with_input(&args.iter().map(String::as_str).collect::<Vec<_>>(), input.as_bytes());
        assert_eq!(ran.code, 0, "{}", ran.err);
        ran
    };
    let all = run(&texts, "").json();
    for (i, (got, prompt)) in all.as_array().expect("an array").iter().zip(prompts).enumerate() {
        assert_eq!(got["index"], i);
        assert_eq!(got["n_tokens"], prompt["n_tokens"]);
        let (got, want) = (vector(&got["embedding"]), vector(&prompt["embedding"]));
        assert!(got.len() == want.len() && got.iter().zip(&want).all(|(g, w)| (g - w).abs() <= 5e-4));
    }
    let lines = texts.join("\n");
    assert_eq!(run(&[], &lines).json(), all);
    assert_eq!(run(&["--file", "-", "--batch-texts", "1"], &lines).json(), all);
    let objects: Vec<String> = texts.iter().map(|t| serde_json::json!({ "input": t }).to_string()).collect();
    assert_eq!(run(&["--jsonl"], &objects.join("\n")).json(), all);
    let ids: Vec<u32> = serde_json::from_value(prompts[0]["ids"].clone()).expect("ids");
    let ids = ids.iter().map(u32::to_string).collect::<Vec<_>>().join(",");
    assert_eq!(run(&["--ids", &ids], "").json()[0], all[0]);

    let first = vector(&all[0]["embedding"]);
    let cut = vector(&run(&["--dimensions", "8", "--no-normalize", "--ids", &ids], "").json()[0]["embedding"]);
    assert_eq!(cut.len(), 8);
    assert!(cut.iter().zip(&first).all(|(c, f)| (c / f - cut[0] / first[0]).abs() < 1e-3));
    let states = run(&["--pooling", "none", "--ids", &ids], "").json();
    assert_eq!(vector(&states[0]["embedding"][9]), first);
    let npy = run(&["-o", "npy", "--ids", &ids, "--ids", &ids], "").out;
    assert!(npy.starts_with(b"\x93NUMPY\x01\x00") && npy.len() == 128 + 2 * 48 * 4);
    let bytes: Vec<u8> = first.iter().flat_map(|v| v.to_le_bytes()).collect();
    assert!(String::from_utf8_lossy(&npy[..128]).contains("'<f4', 'fortran_order': False, 'shape': (2, 48)"));
    assert!(npy[128..].chunks(bytes.len()).all(|row| row == bytes));
    let base64 = run(&["-o", "base64", "--ids", &ids], "").json();
    assert_eq!(base64[0]["embedding"].as_str().expect("a text").len(), (48usize * 4).div_ceil(3) * 4);
}

#[test]
fn embedding_what_is_wrong_says_so() {
    let model = embedding_model();
    let fails = |args: &[&str], input: &[u8], code: i32, words: &[&str]| {
        let ran = with_input(args, input);
        assert_eq!(ran.code, code, "{args:?}: {}", ran.err);
        assert!(words.iter().all(|w| ran.err.contains(w)), "{args:?}: {}", ran.err);
    };
    fails(&["embed", "a"], b"", USAGE, &["no model", "-m"]);
    let embed = |more: &[&'static str]| [&["embed", "-m", &model], more].concat();
    fails(&embed(&[]), b"", USAGE, &["no texts"]);
    fails(&embed(&["--ids", "1,x"]), b"", USAGE, &["`x`"]);
    fails(&embed(&["--ids", "1,368"]), b"", USAGE, &["368"]);
    fails(&embed(&["--dimensions", "49", "a"]), b"", USAGE, &["dimensions", "49 (the model has 48)"]);
    fails(&embed(&["--jsonl"]), b"\"a\"\n{\"txt\": 1}\n", USAGE, &["line 2", "input"]);
    fails(&embed(&["--pooling", "max", "a"]), b"", USAGE, &["max", "mean"]);
    fails(&embed(&["-c", "4"]), b"a\nThe birds moved slowly\n", USAGE, &["text 1", "context 4"]);
    let ran = with_input(&embed(&["-c", "4", "--truncate"]), b"The birds moved slowly\n");
    assert_eq!((ran.code, ran.json()[0]["n_tokens"].as_u64()), (0, Some(4)), "{}", ran.err);
}

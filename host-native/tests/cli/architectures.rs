//! `quantize`, `inspect` and `perplexity` on a small model of every architecture of the kit.

use std::collections::BTreeSet;
use std::fs;
use std::panic::catch_unwind;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use starling::gguf::Gguf;
use starling::quant::Dtype;
use starling_tests::architecture::{Recipe, recipes};

use super::starling::{USAGE, fails, ok, temp, written};

/// Mixtures, in turn.
const MIXTURES: [&str; 4] = ["Q4_K_M", "Q8_0", "Q5_0", "Q3_K_S"];
const TEXT: &str = "THE QUICK BROWN FOX JUMPS OVER THE LAZY DOG";

/// Quantises the model of a recipe and runs the result.
fn check(i: usize, recipe: &Recipe) {
    let (name, mixture) = (&recipe.name[..], MIXTURES[i % MIXTURES.len()]);
    let file = recipe.file(Dtype::F32);
    let source = written(&format!("arch-{name}.gguf"), &file);
    let out = temp(&format!("arch-{name}-quantised.gguf"));
    ok(&["quantize", &source, &out, mixture]);
    // each tensor, of the same shape; matrices are smaller
    let json = ok(&["inspect", "-m", &out, "--json"]).json();
    let before = Gguf::parse(&file).expect("a model");
    let tensors = json["tensors"].as_array().expect("tensors");
    assert_eq!(tensors.len(), before.tensors().len(), "{name}");
    for t in tensors {
        let was = before.tensor(t["name"].as_str().expect("a name")).expect("the same names");
        let shape: Vec<u64> = t["shape"].as_array().expect("a shape").iter().filter_map(|n| n.as_u64()).collect();
        assert_eq!(shape, was.dims[..was.n_dims as usize], "{name}: {}", was.name);
    }
    let bytes = json["bytes"].as_u64().expect("a number");
    assert!(bytes < file.len() as u64 / 2, "{name}: {mixture} takes {bytes} of {} bytes", file.len());
    let summary = ok(&["inspect", "-m", &out]).text();
    assert!(summary.contains("keys and values:"), "{name}: the configuration is not read: {summary}");

    let text = written(&format!("arch-{name}.txt"), TEXT.as_bytes());
    let perplexity = ["perplexity", "-m", &out, "--file", &text, "--ctx-size", "16", "--chunks", "1"];
    match &recipe.kind[..] {
        "causal" => {
            let found = ok(&perplexity).text();
            assert!(found.contains("perplexity"), "{name}: {found}");
        }
        "embedding" => drop(fails(&perplexity, USAGE, &["the model is an encoder"])),
        _ => drop(fails(&perplexity, USAGE, &["masked tokens by diffusion"])),
    }
    for file in [source, out, text] {
        fs::remove_file(file).expect("a file");
    }
}

#[test]
fn quantize_inspect_and_perplexity_take_every_architecture() {
    // one recipe of each architecture
    let mut seen = BTreeSet::new();
    let recipes: Vec<Recipe> = recipes().into_iter().filter(|r| seen.insert(r.arch.clone())).collect();
    let (next, failed) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some((i, recipe)) =
                    Some(next.fetch_add(1, Ordering::Relaxed)).and_then(|i| Some((i, recipes.get(i)?)))
                {
                    if catch_unwind(|| check(i, recipe)).is_err() {
                        failed.lock().expect("no poison").push(recipe.name.clone());
                    }
                }
            });
        }
    });
    assert_eq!(failed.into_inner().expect("no poison"), [""; 0]);
}

/// `logits` and `run` of a model that generates by diffusion; the server's refusal is in `tests/serve`.
#[test]
fn a_model_that_fills_in_masks_generates() {
    let mut recipe = starling_tests::architecture::recipe("llada");
    let plain = written("llada-without-mask.gguf", &recipe.file(Dtype::F32));
    recipe.metadata.push(("tokenizer.ggml.mask_token_id".into(), "UINT32".into(), 127.into()));
    recipe.metadata.push(("diffusion.shift_logits".into(), "BOOL".into(), false.into()));
    let model = written("llada.gguf", &recipe.file(Dtype::F32));
    let json = ok(&["logits", "-m", &model, "--ids", "5,17,127", "--all", "--kv-type", "f32"]).json();
    assert_eq!(json["logits"]["shape"], serde_json::json!([3, 128]));

    let options = ["--raw", "-q", "--json", "-n", "12", "--diffusion-steps", "6", "--seed", "3"];
    let run = |more: &[&str]| ok(&[&["run", "-m", &model, "THE QUICK"][..], &options, more].concat()).json();
    let first = run(&["--ignore-eos"]);
    assert_eq!(first["ids"].as_array().map(Vec::len), Some(12));
    assert_eq!(first["ids"], run(&["--ignore-eos", "--threads", "2", "--isa", "scalar"])["ids"]);
    assert_eq!(first["seed"], 3);
    let blocks = run(&["--ignore-eos", "--diffusion-block-length", "4", "--diffusion-algorithm", "margin"]);
    assert_ne!(blocks["ids"], first["ids"]);
    assert_eq!(run(&["--ignore-eos", "--diffusion-algorithm", "4"])["ids"], first["ids"], "llama.cpp's number");

    let refused = |args: &[&str], found: &[&str]| drop(fails(args, USAGE, found));
    refused(&["run", "-m", &model, "A", "--raw", "--stop", "x"], &["--stop", "generates by diffusion"]);
    refused(&["run", "-m", &model, "A", "--raw", "--diffusion-eps", "2"], &["eps is 2"]);
    refused(&["run", "-m", &model, "A", "--diffusion-algorithm", "5"], &["origin, entropy, margin"]);
    refused(&["run", "-m", &plain, "A", "--raw"], &["mask_token_id"]);
    refused(&["run", "A", "--raw", "--diffusion-steps", "3"], &["--diffusion-steps", "`llama`"]);
}

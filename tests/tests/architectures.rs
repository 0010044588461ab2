//! Logits and embeddings of small models of many architectures against llama.cpp, whole, in chunks and token by token.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use starling::error::LoadError;
use starling::kernels::Cpu;
use starling::kernels::attention::KvType;
use starling::model::Model;
use starling::model::evaluate::{Evaluation, EvaluationError};
use starling::pool::Inline;
use starling::quant::Dtype;
use starling_tests::architecture::{ROWS, Recipe, recipes};
use starling_tests::embedding;

/// Recipes that must load; the others must be refused.
const SUPPORTED: &[&str] = &[
    "bert",
    "cohere2",
    "command-r",
    "command-r-plus",
    "ernie4_5",
    "exaone",
    "gemma",
    "gemma-embedding",
    "gemma2",
    "gemma2-27b",
    "gemma3",
    "gemma3-27b",
    "gpt2",
    "gptneox",
    "granite",
    "granite-moe",
    "granitemoe",
    "granitemoe-moe",
    "internlm2",
    "llama",
    "llama-moe",
    "nomic-bert",
    "olmo2",
    "olmoe",
    "phi2",
    "phi3",
    "qwen2",
    "qwen2moe",
    "qwen2vl",
    "qwen3",
    "qwen3moe",
    "smollm3",
    "stablelm",
    "stablelm-parallel",
    "starcoder2",
];

/// Squared difference over the squared reference.
fn nmse(got: &[f32], want: &[f32]) -> f64 {
    assert_eq!(got.len(), want.len());
    let difference: f64 = got.iter().zip(want).map(|(g, w)| f64::from(g - w).powi(2)).sum();
    difference / want.iter().map(|w| f64::from(*w).powi(2)).sum::<f64>()
}

/// Logits after each token, computed in batches of `batch` tokens.
fn logits(model: &Model, ids: &[u32], batch: usize) -> Vec<f32> {
    let (cpu, pool) = (Cpu::detect(), &Inline);
    let evaluation = Evaluation { model, cpu, pool, kv_type: KvType::F32, batch, n_ctx: ids.len() };
    let mut logits = Vec::new();
    let done = evaluation.run::<EvaluationError>(ids, 0, None, &mut |row| {
        logits.extend_from_slice(row.logits);
        Ok(())
    });
    done.expect("a text that fits");
    logits
}

/// Deviation of the worst prompt from the reference.
fn deviation(recipe: &Recipe, model: &Arc<Model>, chunked: bool) -> f64 {
    let mut worst = 0.0f64;
    for (ids, want) in recipe.prompts.iter().zip(recipe.expected()) {
        if recipe.kind == "embedding" {
            let states = embedding::states(model, Cpu::detect(), ids);
            let width = model.config.n_embd;
            let deviation = nmse(&states[(ids.len() - ROWS) * width..], &want.rows);
            let mut mean = vec![0.0f64; width];
            states.chunks(width).for_each(|row| mean.iter_mut().zip(row).for_each(|(m, x)| *m += f64::from(*x)));
            let mean: Vec<f32> = mean.iter().map(|m| (*m / ids.len() as f64) as f32).collect();
            worst = worst.max(deviation).max(nmse(&mean, &want.mean));
            continue;
        }
        let whole = logits(model, ids, ids.len());
        worst = worst.max(nmse(&whole[(ids.len() - ROWS) * recipe.n_vocab..], &want.rows));
        for batch in [7, 1] {
            assert!(!chunked || logits(model, ids, batch) == whole, "{}: batches of {batch} tokens", recipe.name);
        }
    }
    worst
}

/// The result of a case: a line of the table, and whether it is as expected.
fn check(recipe: &Recipe) -> (String, bool) {
    let name = &recipe.name[..];
    let load = |dtype| Model::load(&recipe.file(dtype), &Inline).map(Arc::new);
    let model = match load(Dtype::F32) {
        Ok(model) => model,
        Err(e) => {
            let refused = !matches!(e, LoadError::OutOfMemory { .. } | LoadError::Gguf { .. });
            return (format!("{name:18} refused: {:.90}", e.to_string()), refused && !SUPPORTED.contains(&name));
        }
    };
    let exact = deviation(recipe, &model, true);
    let quantised = deviation(recipe, &load(Dtype::Q8_0).expect("a model"), false);
    let limits = [
        if recipe.gelu_f16_table { 5e-6 } else { 1e-6 },
        (4.0 * recipe.nmse_by_type.get("Q8_0").copied().unwrap_or(0.0)).max(1e-3),
    ];
    let passed = exact <= limits[0] && quantised <= limits[1] && SUPPORTED.contains(&name);
    (format!("{name:18} F32 {exact:.1e}   Q8_0 {quantised:.1e} (limit {:.1e})", limits[1]), passed)
}

#[test]
fn outputs_agree_with_llama_cpp() {
    let recipes = recipes();
    // one case or a few by name, for development
    let only = std::env::var("STARLING_ARCHITECTURES").unwrap_or_default();
    let wanted = |recipe: &Recipe| only.is_empty() || only.split(',').any(|name| name == recipe.name);
    let (next, lines) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some(recipe) = recipes.get(next.fetch_add(1, Ordering::Relaxed)) {
                    if wanted(recipe) {
                        let line = std::panic::catch_unwind(|| check(recipe));
                        let line = line.unwrap_or_else(|_| (format!("{:18} panicked", recipe.name), false));
                        lines.lock().expect("no poison").push(line);
                    }
                }
            });
        }
    });
    let mut lines = lines.into_inner().expect("no poison");
    lines.sort();
    for (line, passed) in &lines {
        println!("{} {line}", if *passed { "  " } else { "! " });
    }
    assert!(SUPPORTED.iter().all(|name| recipes.iter().any(|r| r.name == *name)), "a recipe is missing");
    assert!(lines.iter().all(|(_, passed)| *passed), "cases that are not as expected are marked with `!`");
}

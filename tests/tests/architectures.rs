//! Logits and embeddings of small models of many architectures against llama.cpp, whole, in chunks and token by token.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use starling::error::LoadError;
use starling::kernels::Cpu;
use starling::kernels::attention::KvType;
use starling::model::evaluate::{EvaluatedToken, Evaluation, EvaluationError};
use starling::model::{Model, Stage};
use starling::pool::Inline;
use starling::quant::Dtype;
use starling_tests::architecture::{ROWS, Recipe, nmse, outputs, recipes};

/// Recipes that must load; the others must be refused.
const SUPPORTED: &[&str] = &[
    "afmoe",
    "apertus",
    "arcee",
    "arctic",
    "arwkv7",
    "baichuan",
    "baichuan-alibi",
    "bailingmoe",
    "bailingmoe2",
    "bailingmoe3",
    "bailingmoe3-sizes",
    "bert",
    "bitnet",
    "bloom",
    "chatglm",
    "codeshell",
    "cogvlm",
    "cogvlm-sizes",
    "cohere2",
    "cohere2moe",
    "cohere2moe-sizes",
    "command-r",
    "command-r-plus",
    "dbrx",
    "deci",
    "deepseek",
    "deepseek2",
    "deepseek2-lite",
    "deepseek32",
    "deepseek4",
    "dots1",
    "dots3note",
    "dream",
    "ernie4_5",
    "ernie4_5-moe",
    "eurobert",
    "exaone",
    "exaone-moe",
    "exaone4",
    "exaone4-swa",
    "falcon",
    "falcon-h1",
    "gemma",
    "gemma-embedding",
    "gemma2",
    "gemma2-27b",
    "gemma3",
    "gemma3-27b",
    "gemma3n",
    "gemma4",
    "gemma4-moe",
    "glm-dsa",
    "glm4",
    "glm4moe",
    "glm5-next",
    "gpt-oss",
    "gpt2",
    "gptneox",
    "granite",
    "granite-moe",
    "granite_swa",
    "granitehybrid",
    "granitehybrid-moe",
    "granitemoe",
    "granitemoe-moe",
    "grok",
    "grok-sizes",
    "grovemoe",
    "hrm_text",
    "hunyuan-dense",
    "hunyuan-moe",
    "hunyuan-moe-sizes",
    "hunyuan_vl",
    "hy_v3",
    "hy_v4",
    "internlm2",
    "jais",
    "jais2",
    "jamba",
    "jamba-moe",
    "jina-bert-v2",
    "jina-bert-v3",
    "kimi-k3",
    "kimi-k3-sizes",
    "kimi-linear",
    "laguna",
    "lfm2",
    "lfm2moe",
    "llada",
    "llada-moe",
    "llama",
    "llama-moe",
    "llama4",
    "llama4-128e",
    "maincoder",
    "mamba",
    "mamba2",
    "maple",
    "mellum",
    "mimo2",
    "minicpm",
    "minicpm-moe",
    "minicpm3",
    "minimax-01",
    "minimax-m2",
    "minimax-m2-sizes",
    "minimax-m3",
    "mistral3",
    "mistral3-moe",
    "mistral4",
    "modern-bert",
    "mpt",
    "muse-glimmer",
    "nanbeige",
    "nemotron",
    "nemotron_h",
    "nemotron_h_moe",
    "neo-bert",
    "nomic-bert",
    "nomic-bert-moe",
    "olmo",
    "olmo2",
    "olmoe",
    "openelm",
    "orion",
    "paddleocr",
    "pangu-embedded",
    "phi2",
    "phi3",
    "phimoe",
    "plamo",
    "plamo2",
    "plamo3",
    "plm",
    "pockettts",
    "qwen",
    "qwen2",
    "qwen2moe",
    "qwen2vl",
    "qwen3",
    "qwen35",
    "qwen35moe",
    "qwen3moe",
    "qwen3next",
    "qwen3tts",
    "qwen3vl",
    "qwen3vlmoe",
    "qwen4exp",
    "refact",
    "rnd1",
    "rwkv6",
    "rwkv7",
    "seed_oss",
    "smallthinker",
    "smallthinker-sizes",
    "smollm3",
    "spark2_5",
    "stablelm",
    "stablelm-parallel",
    "starcoder",
    "starcoder2",
    "step35",
    "t5encoder",
    "talkie",
    "xverse",
];

/// Supported recipes whose Q8_0 products select other experts for some tokens than the F32 weights do, and than llama.cpp's: there
/// the scores of two experts are nearly equal. The other tokens have the usual limit ([`deviation_with_equal_experts`]).
const OTHER_EXPERTS_IN_Q8_0: &[&str] = &["mistral3-moe"];

/// Distance of the scores of the last expert selected and the first one not, in standard deviations of the scores, below which
/// products of 8 bits may exchange the two.
const NEAR_TIE: f32 = 0.05;

/// Supported recipes whose outputs change much with the last bits of GELU, which llama.cpp reads from a table of f16 values:
/// their limits in F32. With such a table, the deviation of nomic-bert-moe is 3.5e-9; `fixtures/reference` has exact logits of
/// Gemma 4 with experts.
const TABLED_GELU: &[(&str, f64)] = &[("gemma4-moe", 2e-3), ("nomic-bert-moe", 4e-3)];

/// Deviation of the worst prompt from the reference.
fn deviation(recipe: &Recipe, model: &Arc<Model>, chunked: bool) -> f64 {
    let mut worst = 0.0f64;
    for (ids, want) in recipe.prompts.iter().zip(recipe.expected()) {
        let outputs = |batch| outputs(recipe, model, (Cpu::detect(), KvType::F32), ids, batch);
        let whole = outputs(ids.len());
        let width = whole.len() / ids.len();
        worst = worst.max(nmse(&whole[(ids.len() - ROWS) * width..], &want.rows));
        if recipe.kind == "embedding" {
            let mut mean = vec![0.0f64; width];
            whole.chunks(width).for_each(|row| mean.iter_mut().zip(row).for_each(|(m, x)| *m += f64::from(*x)));
            let mean: Vec<f32> = mean.iter().map(|m| (*m / ids.len() as f64) as f32).collect();
            worst = worst.max(nmse(&mean, &want.mean));
        }
        for batch in [7, 1] {
            assert!(!chunked || outputs(batch) == whole, "{}: batches of {batch} tokens", recipe.name);
        }
    }
    worst
}

/// Logits of all tokens, and the scores of the experts, by layer and token.
fn routed(model: &Model, ids: &[u32]) -> (Vec<f32>, Vec<Vec<Vec<f32>>>) {
    let (mut logits, mut scores) = (Vec::new(), Vec::new());
    let mut trace = |stage: Stage, _: Option<usize>, rows: &mut dyn Iterator<Item = &[f32]>| {
        if stage == Stage::Router {
            scores.push(rows.map(<[f32]>::to_vec).collect::<Vec<_>>());
        }
    };
    let (cpu, batch, n_ctx) = (Cpu::detect(), ids.len(), ids.len());
    let evaluation = Evaluation { model, cpu, pool: &Inline, kv_type: KvType::F32, batch, n_ctx };
    let row = &mut |row: EvaluatedToken<'_>| {
        logits.extend_from_slice(row.logits);
        Ok(())
    };
    evaluation.run::<EvaluationError>(ids, 0, Some(&mut trace), row).expect("a text that fits");
    (logits, scores)
}

/// The experts with the `n` best scores, ascending, and the distance to the next score in standard deviations.
fn selected(scores: &[f32], n: usize) -> (Vec<usize>, f32) {
    let mut order: Vec<usize> = (0..scores.len()).collect();
    order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
    let margin = scores[order[n - 1]] - scores[order[n]];
    let mean = scores.iter().sum::<f32>() / scores.len() as f32;
    let deviation = (scores.iter().map(|s| (s - mean).powi(2)).sum::<f32>() / scores.len() as f32).sqrt();
    order.truncate(n);
    order.sort_unstable();
    (order, margin / deviation)
}

/// Deviation of the tokens whose experts are those of the F32 model, of the worst prompt. Where another expert was selected first,
/// its score in F32 must be near that of the one that it replaced.
fn deviation_with_equal_experts(recipe: &Recipe, exact: &Model, quantised: &Model) -> f64 {
    let n_used = exact.config.ffn.experts.expect("experts").n_used;
    let mut worst = 0.0f64;
    for (ids, want) in recipe.prompts.iter().zip(recipe.expected()) {
        let ((_, of_exact), (logits, of_quantised)) = (routed(exact, ids), routed(quantised, ids));
        let (mut got, mut kept) = (Vec::new(), Vec::new());
        for (row, i) in (ids.len() - ROWS..ids.len()).enumerate() {
            let layers = of_exact.iter().zip(&of_quantised);
            let mut other = layers.filter_map(|(a, b)| {
                let ((was, margin), (is, _)) = (selected(&a[i], n_used), selected(&b[i], n_used));
                (was != is).then_some(margin)
            });
            match other.next() {
                Some(margin) => assert!(margin < NEAR_TIE, "{}: token {i}, margin {margin}", recipe.name),
                None => {
                    got.extend_from_slice(&logits[i * recipe.n_vocab..][..recipe.n_vocab]);
                    kept.extend_from_slice(&want.rows[row * recipe.n_vocab..][..recipe.n_vocab]);
                }
            }
        }
        assert!(kept.len() >= ROWS / 2 * recipe.n_vocab, "{}: most tokens have other experts", recipe.name);
        worst = worst.max(nmse(&got, &kept));
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
    let in_q8_0 = load(Dtype::Q8_0).expect("a model");
    let quantised = match OTHER_EXPERTS_IN_Q8_0.contains(&name) {
        true => deviation_with_equal_experts(recipe, &model, &in_q8_0),
        false => deviation(recipe, &in_q8_0, false),
    };
    let tabled = TABLED_GELU.iter().find(|(tabled, _)| *tabled == name);
    let limits = [
        tabled.map_or(if recipe.gelu_f16_table { 5e-6 } else { 1e-6 }, |(_, limit)| *limit),
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

//! Models that generate by diffusion: their logits, the laws of generation, and which masks a step replaces.

use std::sync::Arc;

use starling::diffusion::{Algorithm, Diffusion, DiffusionOptions, Schedule};
use starling::engine::{Engine, EngineOptions, Request};
use starling::error::RequestError;
use starling::kernels::Cpu;
use starling::kernels::attention::KvType;
use starling::model::evaluate::{Evaluation, EvaluationError};
use starling::model::{Exec, Model};
use starling::pool::{Inline, Pool};
use starling::quant::Dtype;
use starling::sampler::SamplingOptions;
use starling_tests::architecture::{ROWS, nmse, outputs, recipe};
use starling_tests::pool::Threads;

const MODELS: [&str; 4] = ["dream", "llada", "llada-moe", "rnd1"];
/// A token of the recipes' vocabulary that no prompt has.
const MASK: u32 = 127;

/// A model whose file names the mask token.
fn model(name: &str, shifted: bool) -> Arc<Model> {
    let mut recipe = recipe(name);
    recipe.metadata.push(("tokenizer.ggml.mask_token_id".into(), "UINT32".into(), MASK.into()));
    recipe.metadata.push(("diffusion.shift_logits".into(), "BOOL".into(), shifted.into()));
    Arc::new(Model::load(&recipe.file(Dtype::F32), &Inline).expect("a model"))
}

fn options(length: usize, steps: usize, algorithm: Algorithm) -> DiffusionOptions {
    DiffusionOptions {
        length,
        steps,
        schedule: Schedule::Timesteps { eps: 1e-3 },
        algorithm,
        sampling: SamplingOptions { temperature: 0.8, top_k: 20, seed: 7, ..SamplingOptions::neutral() },
        kv_type: KvType::F32,
        n_ctx: 128,
    }
}

fn generate(model: &Model, (cpu, pool): (Cpu, &dyn Pool), prompt: &[u32], options: &DiffusionOptions) -> Vec<u32> {
    let mut diffusion = Diffusion::new(model, pool, prompt, options.clone()).expect("valid options");
    while diffusion.step(Exec { cpu, pool }).expect("finite logits") {}
    assert_eq!(diffusion.n_masked(), 0);
    diffusion.tokens().to_vec()
}

/// The logits of `Evaluation`, which `starling logits` prints, are llama.cpp's, whatever its batch.
#[test]
fn logits_are_those_of_llama_cpp() {
    for name in MODELS {
        let recipe = recipe(name);
        let model = Model::load(&recipe.file(Dtype::F32), &Inline).expect("a model");
        for (ids, want) in recipe.prompts.iter().zip(recipe.expected()) {
            let (cpu, n_ctx) = (Cpu::detect(), ids.len());
            let evaluation = Evaluation { model: &model, cpu, pool: &Inline, kv_type: KvType::F32, batch: 7, n_ctx };
            let mut got = Vec::new();
            let row = &mut |row: starling::model::evaluate::EvaluatedToken<'_>| {
                got.extend_from_slice(row.logits);
                Ok(())
            };
            evaluation.run::<EvaluationError>(ids, ids.len() - ROWS, None, row).expect("logits");
            assert!(nmse(&got, &want.rows) < 1e-6, "{name}");
        }
    }
}

#[test]
fn instruction_sets_and_threads_change_no_token() {
    let prompt: Vec<u32> = (3..12).collect();
    for (first, name) in MODELS.into_iter().enumerate() {
        let model = model(name, name == "dream");
        // each algorithm with one model or two
        for (i, algorithm) in Algorithm::ALL.into_iter().enumerate().skip(first).step_by(3) {
            let mut options = options(11, 5, algorithm);
            if i % 2 == 0 {
                options.schedule = Schedule::Blocks { length: 4 };
            }
            let want = generate(&model, (Cpu::SCALAR, &Inline), &prompt, &options);
            assert_eq!((&want[..prompt.len()], want.len()), (&prompt[..], prompt.len() + 11));
            assert!(!want.contains(&MASK), "{name}, {algorithm:?}");
            for cpu in Cpu::available() {
                let threads = Threads::new(1 + i % 3);
                let got = generate(&model, (cpu, &threads), &prompt, &options);
                assert_eq!(got, want, "{name}, {algorithm:?}, {cpu:?}");
            }
            options.sampling.seed += 1;
            assert_ne!(generate(&model, (Cpu::detect(), &Inline), &prompt, &options), want, "{name}: another seed");
        }
    }
}

/// At temperature 0: the tokens of highest probability, where the model is surest, by a plain definition.
#[test]
fn steps_replace_the_surest_masks() {
    let prompt: Vec<u32> = (20..31).collect();
    for (name, shifted) in [("llada", false), ("dream", true)] {
        let (recipe, model) = (recipe(name), model(name, shifted));
        for algorithm in [Algorithm::Confidence, Algorithm::Margin, Algorithm::Entropy] {
            let options = DiffusionOptions {
                schedule: Schedule::Blocks { length: 3 },
                sampling: SamplingOptions::greedy(),
                ..options(6, 6, algorithm)
            };
            let mut want = [&prompt[..], &[MASK; 6]].concat();
            for step in 0..6 {
                let logits = outputs(&recipe, &model, (Cpu::detect(), KvType::F32), &want, want.len());
                let block = prompt.len() + step / 3 * 3..prompt.len() + step / 3 * 3 + 3;
                let sure = |at: usize| {
                    let row = &logits[(at - usize::from(shifted)) * recipe.n_vocab..][..recipe.n_vocab];
                    let weights: Vec<f64> = row.iter().map(|x| f64::from(*x).exp()).collect();
                    let total: f64 = weights.iter().sum();
                    let mut p: Vec<(f64, u32)> = weights.iter().zip(0..).map(|(w, id)| (w / total, id)).collect();
                    p.sort_by(|a, b| b.0.total_cmp(&a.0));
                    let token = p.iter().find(|(_, id)| *id != MASK).expect("a token");
                    let by = match algorithm {
                        Algorithm::Margin => p[0].0 - p[1].0,
                        Algorithm::Entropy => p.iter().map(|(p, _)| p * p.ln()).sum(),
                        _ => token.0,
                    };
                    (by, at, token.1)
                };
                let (_, at, token) =
                    block.filter(|at| want[*at] == MASK).map(sure).max_by(|a, b| a.0.total_cmp(&b.0)).expect("a mask");
                want[at] = token;
            }
            assert_eq!(generate(&model, (Cpu::detect(), &Inline), &prompt, &options), want, "{name}, {algorithm:?}");
        }
    }
}

#[test]
fn wrong_requests_are_refused_by_name() {
    let refused = |model: &Model, prompt: &[u32], options: DiffusionOptions| {
        Diffusion::new(model, &Inline, prompt, options).err().expect("an error").to_string()
    };
    let (llada, ok) = (model("llada", false), options(4, 4, Algorithm::Random));
    for (found, options) in [
        ("length is 0", DiffusionOptions { length: 0, ..ok.clone() }),
        ("steps is 0", DiffusionOptions { steps: 0, ..ok.clone() }),
        ("block_length is 0", DiffusionOptions { schedule: Schedule::Blocks { length: 0 }, ..ok.clone() }),
        ("eps is NaN", DiffusionOptions { schedule: Schedule::Timesteps { eps: f32::NAN }, ..ok.clone() }),
        ("do not fit the context of 128", DiffusionOptions { length: usize::MAX, ..ok.clone() }),
        ("top_p", DiffusionOptions { sampling: SamplingOptions { top_p: 2.0, ..ok.sampling.clone() }, ..ok.clone() }),
    ] {
        let error = refused(&llada, &[5], options);
        assert!(error.contains(found), "{error}");
    }
    assert!(refused(&llada, &[128], ok.clone()).contains("token id 128"));
    let without = Model::load(&recipe("llada").file(Dtype::F32), &Inline).expect("a model");
    assert!(refused(&without, &[5], ok.clone()).contains("mask_token_id"));
    let causal = starling_tests::architecture::model("qwen3");
    assert!(refused(&causal, &[5], ok).contains("`qwen3` does not generate by diffusion"));

    let kv_bytes = EngineOptions::kv_bytes_of(&llada, KvType::F32, 64);
    let options = EngineOptions {
        kv_type: KvType::F32,
        n_ctx: 64,
        max_seqs: 1,
        batch_tokens: 64,
        prefill_chunk: 64,
        draft_rows: 0,
        kv_bytes,
        snapshots: Default::default(),
        model_sha256: None,
    };
    let mut engine = Engine::new(Arc::clone(&llada), &Inline, options).expect("an engine");
    assert_eq!(engine.submit(Request::new(vec![5])), Err(RequestError::Diffusion));
}

//! MTP heads (multi-token prediction, NextN): they compute what llama.cpp's do, and their drafts change no byte.

use std::fs;
use std::sync::Arc;

use starling::draft::Speculation;
use starling::engine::Engine;
use starling::error::LoadError;
use starling::gguf::Gguf;
use starling::kernels::Cpu;
use starling::kernels::attention::{KvMemory, KvType, PAGE};
use starling::kernels::recurrent::StateMemory;
use starling::model::{Exec, KvRef, Model, ModelLoader, Run, Scratch, ScratchSize, StreamLoader};
use starling::pool::Inline;
use starling::quant::Dtype;
use starling_tests::architecture::{Recipe, TensorRecipe, nmse, recipe};
use starling_tests::reference::fixtures;
use starling_tests::sequences::{engine, prompt, request, run, same};

const EXEC: Exec<'_> = Exec { cpu: Cpu::SCALAR, pool: &Inline };

/// The recipe of a family with one more layer.
fn with_layer(name: &str) -> Recipe {
    let mut recipe = recipe(name);
    recipe.add_nextn_layer();
    recipe
}

fn load(file: &[u8]) -> Result<Arc<Model>, LoadError> {
    let gguf = Gguf::parse(file)?;
    let mut loader = ModelLoader::with_mtp_head(std::slice::from_ref(&gguf))?;
    loader.weights().load_all(&[file], &Inline, &mut |_, _| {})?;
    loader.finish().map(Arc::new)
}

/// Runs a text as one batch after `prepare`, and gives the working memory and its logits.
fn forward(model: &Model, ids: &[u32], prepare: impl Fn(&mut Scratch)) -> (Scratch, Vec<f32>) {
    let layout = model.kv_layout(KvType::F32);
    let pages: Vec<u32> = (0..ids.len().div_ceil(PAGE) as u32).collect();
    let mut memory = KvMemory::zeroed(&layout, pages.len()).expect("memory");
    memory.states = StateMemory::zeroed(model.config.state_len(), 1).expect("memory");
    let size = ScratchSize { rows: ids.len(), logits: ids.len(), seqs: 1, n_ctx: ids.len() };
    let mut scratch = model.scratch(&Inline, KvType::F32, size).expect("memory");
    prepare(&mut scratch);
    let run = Run { tokens: ids, pos: 0, pages: &pages, state: 0, n_logits: ids.len() };
    let out = model.forward(EXEC, &[run], KvRef { layout: &layout, memory: &mut memory }, &mut scratch, None);
    let logits = (0..out.len()).flat_map(|row| out.logits(row).to_vec()).collect();
    (scratch, logits)
}

/// Logits of the head after each token of a text but the first.
fn head_logits(model: &Model, ids: &[u32]) -> Vec<f32> {
    let (head, d) = (model.mtp_head.as_ref().expect("a head"), model.config.n_embd);
    let (scratch, _) = forward(model, ids, |_| {});
    let hidden = model.hidden_states(EXEC, 0..ids.len() - 1, &scratch);
    forward(head, &ids[1..], |scratch| scratch.set_hidden_before(0, &hidden, d)).1
}

/// The logits of llama.cpp, of [`head_logits`] for the first prompt of the recipe.
#[test]
fn heads_compute_what_llama_cpp_computes() {
    for name in ["qwen35", "qwen35moe", "qwen3next", "glm4moe", "deepseek2", "hy_v3", "cohere2moe", "step35"] {
        let recipe = with_layer(name);
        let model = load(&recipe.file(Dtype::F32)).unwrap_or_else(|e| panic!("{name}: {e}"));
        let bytes = fs::read(fixtures().join(format!("mtp/{name}.f32"))).expect("a fixture");
        let want: Vec<f32> = bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
        let deviation = nmse(&head_logits(&model, &recipe.prompts[0]), &want);
        println!("{name}: {deviation:.1e}");
        assert!(deviation < 1e-6, "{name}: {deviation:e}");
    }
}

/// A file that comes in pieces gives the same head; without being asked for, none is loaded.
#[test]
fn a_stream_has_the_head() {
    let recipe = with_layer("glm4moe");
    let file = recipe.file(Dtype::F32);
    let stream = |has_head: bool| {
        let mut loader = StreamLoader::new(&[file.len() as u64], false);
        if has_head {
            loader.load_mtp_head();
        }
        file.chunks(10_007).for_each(|piece| assert!(loader.feed(0, piece).is_ok()));
        loader.finish().expect("a model").0
    };
    let ids = &recipe.prompts[0];
    assert_eq!(head_logits(&stream(true), ids), head_logits(&load(&file).expect("a model"), ids));
    assert!(stream(false).mtp_head.is_none());
}

/// An output of its own, whose largest logits are so large that the head is sure of its guesses.
fn confident(mut recipe: Recipe) -> Recipe {
    let layer = recipe.tensors.iter().find_map(|t| t.name.strip_suffix("nextn.eh_proj.weight").map(String::from));
    let name = format!("{}nextn.shared_head_head.weight", layer.expect("a layer"));
    let shape = vec![recipe.n_embd as u64, recipe.n_vocab as u64];
    let of_output = TensorRecipe { name, shape, rule: "matrix".into(), gain: 40.0, lo: 0.0, hi: 0.0, w: true };
    recipe.tensors.push(of_output);
    recipe
}

fn with_head(model: &Arc<Model>, mut engine: Engine) -> Engine {
    engine.set_draft_model(Arc::clone(model.mtp_head.as_ref().expect("a head")), &Inline).expect("memory");
    engine.set_step_costs(&[1.0]);
    engine.set_draft_cost(0.0);
    engine
}

/// Answers with drafts are those without, alone, together, with few pages and in a second turn; nothing is left behind.
#[test]
fn drafts_change_nothing() {
    for name in ["qwen35", "qwen3next", "glm4moe", "deepseek2", "hy_v3", "cohere2moe", "step35", "mimo2"] {
        let model = load(&confident(with_layer(name)).file(Dtype::F32)).unwrap_or_else(|e| panic!("{name}: {e}"));
        let plain: Vec<_> = (0..3)
            .map(|i| {
                let mut request = request(&prompt([5, 70, 23][i], i), [40, 24, 30][i], i as u64);
                request.sampling.temperature = [0.0, 0.9, 0.0][i];
                request.receipt = true;
                request
            })
            .collect();
        let drafted: Vec<_> = plain
            .iter()
            .cloned()
            .map(|mut request| {
                request.speculation = Speculation { max: 6, min_acceptance: 0.0, ..Speculation::default() };
                request
            })
            .collect();
        let alone: Vec<_> =
            plain.iter().map(|r| run(&mut engine(&model, 160, 1, 40), std::slice::from_ref(r), 0).remove(0)).collect();
        let mut n_drafted = 0;
        for (max_seqs, batch, apart) in [(1, 40, 0), (3, 40, 0), (3, 13, 2)] {
            let mut engine = with_head(&model, engine(&model, 160, max_seqs, batch));
            // the second time with a cached prefix
            for _ in 0..2 {
                let seen = run(&mut engine, &drafted, apart);
                n_drafted += seen.iter().map(|s| s.n_drafted).sum::<usize>();
                assert_eq!(same(&seen), same(&alone), "{name}");
            }
            let stats = engine.draft_kv_stats().expect("a head");
            assert_eq!((stats.in_use_bytes, stats.fragmented_bytes), (0, 0), "{name}");
        }
        assert!(n_drafted > 50, "{name}: {n_drafted} draft tokens");
    }
}

/// A file without such a layer, of a family whose layers are not used, or with a part of it, is refused by name.
#[test]
fn files_without_a_head() {
    let refusal = |recipe: &Recipe| load(&recipe.file(Dtype::F32)).err().expect("a refusal").to_string();
    assert!(refusal(&recipe("glm4moe")).contains("no layer for multi-token prediction"));
    assert!(refusal(&with_layer("exaone-moe")).contains("`exaone-moe`"));
    let mut partial = with_layer("glm4moe");
    partial.tensors.retain(|t| !t.name.contains("nextn.hnorm"));
    assert!(refusal(&partial).contains("blk.3.nextn.hnorm.weight"), "{}", refusal(&partial));
    assert!(Model::load(&partial.file(Dtype::F32), &Inline).is_ok());
}

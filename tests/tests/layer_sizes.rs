//! Models whose layers have heads of different sizes, or read keys and values of other layers: neither batches, chunks,
//! caches, preemption, exported pages nor windows change a bit of an answer.

use std::sync::Arc;

use proptest::prelude::*;
use serde_json::json;
use starling::engine::{EngineOptions, Request};
use starling::kernels::Cpu;
use starling::kernels::attention::{KvMemory, KvType, PAGE};
use starling::model::{Exec, KvRef, Model, Run, ScratchSize};
use starling::pool::Inline;
use starling::quant::Dtype;
use starling_tests::architecture::{model, recipe};
use starling_tests::embedding;
use starling_tests::sequences::{check_together, engine_with_pages, prompt, request, run, same};

/// Shared keys and values, heads per layer, keys longer than values, no attention in some layers, several passes.
const MODELS: [&str; 5] = ["gemma4", "gemma3n", "mimo2", "deci", "hrm_text"];

/// A page holds the keys and values of the layers that have their own, each of its size.
#[test]
fn pages_have_the_bytes_of_the_layers_that_own_keys_and_values() {
    // f32: four local layers with 2 heads of 32, two global ones with 2 heads of 64; of these the last two share
    assert_eq!(model("gemma4").kv_layout(KvType::F32).page_bytes(), (3 * 2 * 32 + 2 * 64) * 2 * PAGE * 4);
    assert_eq!(model("gemma3n").kv_layout(KvType::F32).page_bytes(), 20 * 2 * 16 * 2 * PAGE * 4);
    // keys of 64 elements, values of 48
    assert_eq!(model("mimo2").kv_layout(KvType::F32).page_bytes(), 16 * (64 + 48) * PAGE * 4);
    assert_eq!(model("deci").kv_layout(KvType::F32).page_bytes(), (2 + 4) * 64 * 2 * PAGE * 4);
    // two blocks of weights in six layers
    assert_eq!(model("hrm_text").kv_layout(KvType::F32).page_bytes(), 6 * 4 * 64 * 2 * PAGE * 4);
    assert_eq!(EngineOptions::kv_bytes_of(&model("deci"), KvType::F32, PAGE), 6 * 64 * 2 * PAGE * 4);
}

/// Pages for batches of whole texts are smaller, but for layers that others read.
#[test]
fn embedded_texts_have_the_states_of_a_forward_pass() {
    for name in MODELS {
        let model = model(name);
        let ids = prompt(45, 3);
        let layout = model.kv_layout(KvType::F32);
        let pages: Vec<u32> = (0..ids.len().div_ceil(PAGE) as u32).collect();
        let mut memory = KvMemory::zeroed(&layout, pages.len()).expect("memory");
        let size = ScratchSize { rows: ids.len(), logits: ids.len(), seqs: 1, n_ctx: ids.len() };
        let mut scratch = model.scratch(&Inline, KvType::F32, size).expect("memory");
        let run = Run { tokens: &ids, pos: 0, pages: &pages, state: 0, n_logits: ids.len() };
        let kv = KvRef { layout: &layout, memory: &mut memory };
        let exec = Exec { cpu: Cpu::detect(), pool: &Inline };
        let out = model.forward(exec, &[run], kv, &mut scratch, None);
        let want: Vec<f32> = (0..ids.len()).flat_map(|row| out.hidden(row).to_vec()).collect();
        assert!(embedding::states(&model, Cpu::detect(), &ids) == want, "{name}");
        let batch = model.config.batch_kv_layout(KvType::F32);
        assert!(batch.page_bytes() < layout.page_bytes() && batch.layers().len() == layout.layers().len(), "{name}");
    }
}

#[test]
fn exported_pages_are_imported() {
    for name in MODELS {
        let model = model(name);
        let mut a = engine_with_pages(&model, 256, 1, 64, 40);
        let first = prompt(50, 1);
        let seen = run(&mut a, &[request(&first, 40, 1)], 0).remove(0);
        let second: Vec<u32> = first.iter().copied().chain(seen.answer.iter().map(|(token, _)| *token)).collect();
        let exported = a.export_pages(&second, 0);
        let mut b = engine_with_pages(&model, 256, 1, 64, 40);
        assert_eq!(b.import_pages(&exported), Ok(80), "{name}");
        let seen = [&mut a, &mut b].map(|engine| run(engine, &[request(&second, 9, 2)], 0).remove(0));
        assert_eq!((seen[0].n_cached, seen[1].n_cached), (80, 80), "{name}");
        assert_eq!(same(&seen[..1]), same(&seen[1..]), "{name}");
        let mut other = engine_with_pages(&starling_tests::architecture::model("openelm"), 256, 1, 64, 40);
        assert!(other.import_pages(&exported).is_err(), "{name}: pages of another size");
    }
}

/// With windows in all layers a sequence uses its pages as a ring, those of shared keys and values too.
#[test]
fn windows_free_pages_that_layers_share() {
    let mut recipe = recipe("gemma3n");
    let local = vec![true; 22];
    recipe.metadata.push(("gemma3n.attention.sliding_window_pattern".into(), "ARRAY/BOOL".into(), json!(local)));
    let model = Arc::new(Model::load(&recipe.file(Dtype::F32), &Inline).expect("a model"));
    assert_eq!(model.config.window(), Some(16));
    assert_eq!(model.config.layers.iter().map(|l| l.attention.owns_kv).filter(|own| !own).count(), 2);
    let requests = [request(&prompt(40, 1), 150, 1), request(&prompt(90, 2), 60, 2)];
    let mut whole = engine_with_pages(&model, 256, 1, 16, 40);
    let want: Vec<_> = requests.iter().flat_map(|r| run(&mut whole, std::slice::from_ref(r), 0)).collect();
    // pages for two rings, but not for one whole sequence
    let mut bounded = engine_with_pages(&model, 256, 2, 16, 11);
    assert_eq!(same(&run(&mut bounded, &requests, 0)), same(&want));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]

    /// Batches, small batches, few pages (preemption), cached prefixes and speculation change no answer.
    #[test]
    fn answers_do_not_depend_on_others(
        name in prop::sample::select(&MODELS[..]),
        lens in prop::collection::vec((1usize..60, 1usize..30), 2..5),
        batch in 2usize..70,
        pages in 7usize..20,
        apart in 0usize..4,
    ) {
        let model = model(name);
        let requests: Vec<Request> =
            lens.iter().enumerate().map(|(i, (n, m))| request(&prompt(*n, i % 2), *m, i as u64)).collect();
        let engine = |max_seqs, batch_tokens, pages| engine_with_pages(&model, 256, max_seqs, batch_tokens, pages);
        check_together(engine, requests, (batch, pages, apart));
    }
}

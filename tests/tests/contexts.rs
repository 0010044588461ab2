//! Long contexts: sliding windows that reuse KV pages, RoPE scaling for long contexts, learned position embeddings.

use std::sync::Arc;

use starling::engine::{Engine, EngineOptions, Event, Request};
use starling::error::{LoadError, RequestError};
use starling::gguf::Value;
use starling::kernels::Cpu;
use starling::kernels::attention::{KvType, PAGE};
use starling::model::Model;
use starling::pool::Inline;
use starling::receipt::{Receipt, verify};
use starling_tests::reference;

const SHA256: [u8; 32] = [5; 32];

/// A reference model with changed metadata.
fn with_metadata(file: &str, change: &[(&str, u32)]) -> Result<Model, LoadError> {
    let change: Vec<_> = change.iter().map(|(key, value)| (*key, Value::U32(*value))).collect();
    reference::changed(file, &change, &reference::whole)
}

fn engine(model: &Arc<Model>, n_ctx: usize, batch_tokens: usize, pages: usize) -> Engine {
    let kv_type = KvType::F16;
    let kv_bytes = pages * model.kv_layout(kv_type).page_bytes();
    let options = EngineOptions {
        kv_type,
        n_ctx,
        max_seqs: 3,
        batch_tokens,
        prefill_chunk: batch_tokens,
        draft_rows: 0,
        kv_bytes,
        snapshots: Default::default(),
        model_sha256: Some(SHA256),
    };
    Engine::new(Arc::clone(model), &Inline, options).expect("memory")
}

fn request(n_prompt: usize, max_tokens: usize) -> Request {
    let tokens = (0..n_prompt as u32).map(|i| 3 + i * 37 % 300).collect();
    Request { max_tokens: Some(max_tokens), ignore_eos: true, receipt: true, ..Request::new(tokens) }
}

/// Receipts in order of submission; each hashes every state after the final norm.
fn receipts(engine: &mut Engine, requests: &[Request]) -> Vec<Receipt> {
    let ids: Vec<_> = requests.iter().map(|r| engine.submit(r.clone()).expect("room")).collect();
    let mut done = vec![None; ids.len()];
    while !engine.is_idle() {
        engine.step(Cpu::detect(), &Inline, &mut |event| {
            if let Event::Done { id, receipt, .. } = event {
                done[ids.iter().position(|i| *i == id).expect("a request")] = receipt.map(|r| *r);
            }
        });
    }
    done.into_iter().map(|r| r.expect("a receipt")).collect()
}

#[test]
fn windows_bound_the_memory_of_a_sequence() {
    for (window, batch) in [(24, 7), (16, 40), (1, 1), (33, 16)] {
        let change = [("llama.attention.sliding_window", window as u32)];
        let model = Arc::new(with_metadata("mistral-hd32-f16.gguf", &change).expect("a model"));
        let all = [request(5, 400), request(150, 250), request(3, 40)];
        let mut whole = engine(&model, 512, batch, 64);
        let want: Vec<Receipt> = all.iter().flat_map(|r| receipts(&mut whole, std::slice::from_ref(r))).collect();

        let ring = (window + batch - 1_usize).div_ceil(PAGE) + 1;
        // KV cache for two windows, but not for one whole long sequence
        let mut bounded = engine(&model, 512, batch, 2 * ring);
        assert_eq!(receipts(&mut bounded, &all[..2]), want[..2], "window {window}, batches of {batch}");
        assert!(bounded.kv_stats().committed_bytes <= 2 * ring * bounded.kv_stats().page_bytes);
        // reused pages are not in the prefix cache, and none leaks
        assert_eq!((bounded.kv_stats().cached_bytes, bounded.kv_stats().in_use_bytes), (0, 0));
        for _ in 0..2 {
            assert_eq!(receipts(&mut bounded, &all[2..]), want[2..]);
        }
        bounded.submit(all[0].clone()).expect("room");
        bounded.submit(all[1].clone()).expect("room");
        let third = bounded.submit(all[0].clone());
        assert!(matches!(third, Err(RequestError::NoCapacity { .. })), "{third:?}");
    }
}

#[test]
fn layers_that_see_everything_keep_their_pages() {
    let model = Arc::new(reference::load("gemma2-swa8-f32.gguf"));
    assert_eq!(model.config.window(), None);
    let refused = engine(&model, 512, 16, 8).submit(request(5, 200));
    assert!(matches!(refused, Err(RequestError::NoCapacity { .. })), "{refused:?}");
}

#[test]
fn long_contexts_rotate_otherwise() {
    let model = Arc::new(reference::load("phi3-longrope-short-f16.gguf"));
    let request = request(40, 8);
    let run = |n_ctx| receipts(&mut engine(&model, n_ctx, 16, 80), std::slice::from_ref(&request)).remove(0);
    let [short, also_short, long, longer] = [48, 512, 513, 1000].map(run);
    assert_eq!(short, also_short);
    assert_eq!(long, longer);
    assert!(!short.request.long_context && long.request.long_context);
    assert_ne!(short.digest, long.digest);
    for receipt in [&short, &long] {
        verify(&model, &SHA256, Cpu::SCALAR, &Inline, 64, receipt).expect("a true receipt");
        let mut other = receipt.clone();
        other.request.long_context ^= true;
        assert!(verify(&model, &SHA256, Cpu::SCALAR, &Inline, 64, &other).is_err());
    }
    // a model without long-context RoPE factors has no long contexts
    let model = reference::load("llama-yarn-f16.gguf");
    assert!(!model.is_long_context(usize::MAX));
}

#[test]
fn embedded_positions_end_the_context() {
    let model = Arc::new(reference::load("gpt2-4h-f16.gguf"));
    let mut engine = engine(&model, 4096, 64, 40);
    assert_eq!(engine.options().n_ctx, 256);
    let refused = engine.submit(request(250, 8));
    assert_eq!(refused, Err(RequestError::ContextLength { prompt: 250, max_tokens: 8, n_ctx: 256 }));
    let receipt = receipts(&mut engine, &[request(250, 7)]).remove(0);
    verify(&model, &SHA256, Cpu::SCALAR, &Inline, usize::MAX, &receipt).expect("a true receipt");
}

#[test]
fn patterns_of_windows() {
    let windows = |pattern: u32| {
        let key = "gemma3.attention.sliding_window_pattern";
        let config = with_metadata("gemma3-swa8-f16.gguf", &[(key, pattern)]).expect("a model").config;
        let local: Vec<bool> = config.layers.iter().map(|l| l.attention.window.left == 7).collect();
        // sliding-window layers have their own RoPE base
        assert!(
            config
                .layers
                .iter()
                .zip(&local)
                .all(|(l, local)| config.attention.ropes[l.attention.rope.unwrap()].base
                    == if *local { 1e4 } else { 1e6 })
        );
        (local, config.window())
    };
    assert_eq!(windows(6), (vec![true, true, true, true, true, false], None));
    assert_eq!(windows(2), (vec![true, false, true, false, true, false], None));
    assert_eq!(windows(1), (vec![false; 6], None));
    assert_eq!(windows(0), (vec![true; 6], Some(8)));
    let layers = reference::load("smollm3-nope-f16.gguf").config.layers;
    assert_eq!(layers.iter().map(|l| l.attention.rope.is_some()).collect::<Vec<_>>(), [true, true, true, false]);
}

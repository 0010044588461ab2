//! Long contexts: windows whose pages are used again, frequencies for long contexts, positions that are embedded.

use std::fs;
use std::sync::Arc;

use starling::engine::{Engine, EngineOptions, Event, Request};
use starling::error::RequestError;
use starling::gguf::{Gguf, GgufWriter, Value};
use starling::kernels::Cpu;
use starling::kernels::attention::{KvType, PAGE};
use starling::model::Model;
use starling::pool::Inline;
use starling::receipt::{Receipt, verify};
use starling_tests::reference::{self, fixtures};

const SHA256: [u8; 32] = [5; 32];

/// A reference model, its metadata changed.
fn with_metadata(file: &str, change: &[(&str, u32)]) -> Result<Model, starling::error::LoadError> {
    let bytes = fs::read(fixtures().join("reference").join(file)).expect("a model");
    let gguf = Gguf::parse(&bytes).expect("a model");
    let mut writer = GgufWriter::new();
    let old = gguf.metadata().iter().filter(|(key, _)| change.iter().all(|(k, _)| k != key));
    for (key, value) in old.filter(|(key, _)| *key != "general.alignment") {
        writer.metadata(key, value).expect("a value");
    }
    for (key, value) in change {
        writer.metadata(key, &Value::U32(*value)).expect("a value");
    }
    for t in gguf.tensors() {
        writer.tensor(t.name, t.dtype, &t.dims[..t.n_dims as usize]).expect("a tensor");
    }
    let mut file = writer.header();
    for t in gguf.tensors() {
        file.extend_from_slice(gguf.data(t).expect("data"));
        file.resize(file.len() + writer.padding(t.len_bytes), 0);
    }
    Model::load(&file, &Inline)
}

fn engine(model: &Arc<Model>, n_ctx: usize, batch_tokens: usize, pages: usize) -> Engine {
    let kv_type = KvType::F16;
    let kv_bytes = pages * model.kv_layout(kv_type).page_bytes();
    let options = EngineOptions { kv_type, n_ctx, max_seqs: 3, batch_tokens, kv_bytes, model_sha256: Some(SHA256) };
    Engine::new(Arc::clone(model), &Inline, options).expect("memory")
}

fn request(n_prompt: usize, max_tokens: usize) -> Request {
    let tokens = (0..n_prompt as u32).map(|i| 3 + i * 37 % 300).collect();
    Request { max_tokens: Some(max_tokens), ignore_eos: true, receipt: true, ..Request::new(tokens) }
}

/// Receipts in order of submission: they hold every state after the final norm, by hash.
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
        // room for two rings: not for one of the long sequences as a whole
        let mut bounded = engine(&model, 512, batch, 2 * ring);
        assert_eq!(receipts(&mut bounded, &all[..2]), want[..2], "window {window}, batches of {batch}");
        assert!(bounded.kv_stats().committed_bytes <= 2 * ring * bounded.kv_stats().page_bytes);
        // pages that were used again are known to nobody, and none is lost
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
    // a model without such frequencies has no long contexts
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
fn metadata_that_contradicts_is_refused() {
    let refused = |file: &str, key: &str, value: u32, words: &[&str]| {
        let error = with_metadata(file, &[(key, value)]).err().expect("a refusal").to_string();
        assert!(words.iter().all(|w| error.contains(w)), "{key} = {value}: {error}");
    };
    refused("mixtral-4x2-f16.gguf", "llama.expert_used_count", 5, &["expert_used_count", "found 5", "1 to 4"]);
    refused("mixtral-4x2-f16.gguf", "llama.expert_used_count", 0, &["expert_used_count", "found 0"]);
    refused("mixtral-4x2-f16.gguf", "llama.expert_count", 8, &["ffn_gate_exps", "shape [48, 64, 8]"]);
    refused("mixtral-4x2-f16.gguf", "llama.expert_count", 0, &["does not use"]);
    refused("mixtral-4x2-f16.gguf", "llama.expert_gating_func", 2, &["gating", "sigmoid", "softmax"]);
    refused("mixtral-4x2-f16.gguf", "llama.expert_group_count", 2, &["by groups"]);
    refused("gpt2-4h-f16.gguf", "gpt2.context_length", 512, &["position_embd.weight", "[48, 512]"]);
    refused("phi3-partial-f16.gguf", "phi3.feed_forward_length", 95, &["ffn_"]);
    refused("phi3-partial-f16.gguf", "phi3.rope.dimension_count", 11, &["even"]);
    refused("stablelm-parallel-qknorm-f16.gguf", "stablelm.attention.head_count", 8, &["attn_k_norm", "[8, 2]"]);
}

//! Embeddings against HF transformers, within the tolerances of `fixtures/reference/README.md`; equal bits alone and in
//! any batch; errors.

use std::sync::Arc;

use proptest::prelude::*;
use starling::embed::{Embedder, Pooling, Text};
use starling::engine::{Engine, EngineOptions, Request};
use starling::error::{LoadError, RequestError};
use starling::gguf::{Gguf, TensorInfo, Value};
use starling::kernels::Cpu;
use starling::kernels::attention::{KvMemory, KvType, PAGE};
use starling::model::{Exec, KvRef, Model, Run, ScratchSize};
use starling::pool::Inline;
use starling::quant::dequantise;
use starling::tokenizer::EncodeOptions;
use starling_tests::embedding::{embed, embedder};
use starling_tests::pool::Threads;
use starling_tests::reference::{self, Case, changed, whole};

fn largest_difference(got: &[f32], want: &[f32]) -> f32 {
    assert_eq!(got.len(), want.len());
    got.iter().zip(want).map(|(g, w)| (g - w).abs()).fold(0.0, f32::max)
}

fn check(case: &Case) {
    for file in &case.files {
        let model = Arc::new(reference::load(&file.file));
        let pooling = Pooling::of(&model.config).expect("a known pooling");
        assert_eq!(Some(pooling.name()), case.pooling.as_deref(), "{}", file.file);
        let mut e = embedder(&model, &Inline, 8, 512);
        for prompt in &case.prompts {
            let options = EncodeOptions { add_special: true, parse_special: false };
            assert_eq!(model.tokenizer.encode(&prompt.text, options), prompt.ids, "{}: {}", file.file, prompt.text);
            let text = Text { tokens: &prompt.ids, pooling, dimensions: None, normalise: true };
            let states = Text { pooling: Pooling::None, normalise: false, ..text };
            let got = embed(&mut e, Cpu::detect(), &Inline, &[text, states]);
            let want = prompt.embedding.as_ref().expect("an embedding");
            let max_abs = largest_difference(&got[0], want);
            let hidden_abs = largest_difference(&got[1], &prompt.hidden_all.as_ref().expect("states").values());
            let dot: f64 = got[0].iter().zip(want).map(|(g, w)| f64::from(*g) * f64::from(*w)).sum();
            println!("{:32} {max_abs:.2e}, states {hidden_abs:.2e}, 1 - cosine {:.2e}", file.file, 1.0 - dot);
            // activations are f32 for all weight types
            assert!(max_abs <= 5e-4 && 1.0 - dot <= 1e-6, "{}: {max_abs}, cosine {dot}", file.file);
            assert!(hidden_abs <= 1e-3, "{}: states {hidden_abs}", file.file);
        }
    }
}

#[test]
fn vectors_and_states_agree_with_transformers() {
    let cases = reference::cases("embedding");
    assert_eq!(cases.len(), 7, "reference cases are missing");
    cases.iter().for_each(check);
}

fn models() -> Vec<Arc<Model>> {
    let cases = reference::cases("embedding");
    let files = cases.iter().flat_map(|c| &c.files).map(|f| f.file.as_str());
    // decoders too: experts, sliding windows, learned position embeddings
    let files =
        files.chain(["mixtral-4x2-f16.gguf", "gemma2-swa8-f32.gguf", "gpt2-4h-f16.gguf", "llama-k256-q4_0.gguf"]);
    let heads = with_heads(24).expect("a model with heads");
    files.map(|file| Arc::new(reference::load(file))).chain([Arc::new(heads)]).collect()
}

const HEADED: &str = "gemma-embedding-mean-f16.gguf";

/// A model with two dense heads, of 60 rows and of `rows`, cut from other matrices.
fn with_heads(rows: u64) -> Result<Model, LoadError> {
    let pieces = |t: &TensorInfo<'_>| {
        let (k, mut all) = (t.dims[0], whole(t));
        let head = match t.name {
            "token_embd.weight" => Some(("dense_2.weight", 60)),
            "blk.0.ffn_down.weight" => Some(("dense_3.weight", rows)),
            _ => None,
        };
        all.extend(head.map(|(name, rows)| (name.into(), vec![k, rows], 0..(k * rows * 2) as usize)));
        all
    };
    changed(HEADED, &[], &pieces)
}

/// Computed in f64 from the states of transformers.
#[test]
fn heads_make_vectors_of_pooled_states() {
    let file = reference::read(HEADED);
    let gguf = Gguf::parse(&file).expect("a model");
    let product = |name: &str, rows: usize, x: &[f64]| -> Vec<f64> {
        let t = gguf.tensors().iter().find(|t| t.name == name).expect("a tensor");
        let mut w = vec![0.0; t.n_elements() as usize];
        dequantise(t.dtype, gguf.data(t).expect("data"), &mut w).expect("numbers");
        let row = |w: &[f32]| w.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum();
        w.chunks(x.len()).take(rows).map(row).collect()
    };
    let model = Arc::new(with_heads(24).expect("a model with heads"));
    assert_eq!((Pooling::Mean.width(&model), Pooling::None.width(&model)), (24, 36));
    let mut e = embedder(&model, &Inline, 8, 512);
    let case = reference::cases("embedding").into_iter().find(|c| c.files[0].file == HEADED).expect("the case");
    for prompt in &case.prompts {
        let states = prompt.hidden_all.as_ref().expect("states").values();
        let n = prompt.ids.len() as f64;
        let mean: Vec<f64> =
            (0..36).map(|i| states.iter().skip(i).step_by(36).map(|v| f64::from(*v)).sum::<f64>() / n).collect();
        let want = product("blk.0.ffn_down.weight", 24, &product("token_embd.weight", 60, &mean));
        let length = want.iter().map(|v| v * v).sum::<f64>().sqrt();
        let text = Text { tokens: &prompt.ids, pooling: Pooling::Mean, dimensions: None, normalise: true };
        let got = &embed(&mut e, Cpu::detect(), &Inline, &[text])[0];
        assert_eq!(got.len(), 24);
        for (got, want) in got.iter().zip(&want) {
            assert!((f64::from(*got) - want / length).abs() <= 5e-4, "{got}, expected {}", want / length);
        }
    }
    let error = changed(HEADED, &[], &|t| {
        let mut all = whole(t);
        if t.name == "blk.0.ffn_down.weight" {
            all.push(("dense_2.weight".into(), vec![60, 24], 0..60 * 24 * 2));
        }
        all
    });
    let error = error.err().expect("a head of other columns").to_string();
    assert!(error.contains("dense_2.weight") && error.contains("[36, 24]"), "{error}");
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|v| v.to_bits()).collect()
}

/// The vectors of a text that is computed `n_layers` layers at a time, after a batch that was given up.
fn by_layers(e: &mut Embedder, text: &Text<'_>, n_layers: usize) -> Vec<f32> {
    let (texts, cpu, mut vectors) = ([*text], Cpu::SCALAR, Vec::new());
    e.begin(&texts).expect("a valid text");
    assert_eq!(e.advance(cpu, &Inline, &texts, n_layers, &mut |_, _| {}), n_layers >= e.n_layers());
    e.begin(&texts).expect("a valid text");
    let mut n_parts = 1;
    while !e.advance(cpu, &Inline, &texts, n_layers, &mut |_, v| vectors = v.expect("finite numbers").to_vec()) {
        n_parts += 1;
    }
    assert_eq!(n_parts, e.n_layers().div_ceil(n_layers));
    vectors
}

#[test]
fn a_text_has_the_same_vectors_alone_and_in_any_batch() {
    for model in models() {
        let (n_vocab, n_ctx) = (model.config.n_vocab as u32, model.config.n_ctx_train);
        let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig::with_cases(4));
        let lens = prop::collection::vec((1..300.min(n_ctx), 0u32..1000, 0usize..4, any::<bool>()), 1..7);
        runner
            .run(&(lens, 1usize..4, 1usize..4), |(texts, threads, max_texts)| {
                let ids = |(n, seed, ..): &(usize, u32, usize, bool)| -> Vec<u32> {
                    (0..*n as u32).map(|i| (seed + i * (i + 7)) % n_vocab).collect()
                };
                let ids: Vec<Vec<u32>> = texts.iter().map(ids).collect();
                let forms = texts.iter().zip(&ids).map(|((n, _, pooling, normalise), tokens)| Text {
                    tokens,
                    pooling: Pooling::ALL[*pooling],
                    dimensions: (n % 3 == 0).then_some(1 + n % Pooling::ALL[*pooling].width(&model)),
                    normalise: *normalise,
                });
                let forms: Vec<Text<'_>> = forms.collect();
                let longest = ids.iter().map(Vec::len).max().unwrap_or(1);
                let pool = Threads::new(threads);
                let mut together = embedder(&model, &pool, max_texts, longest * max_texts);
                let mut alone = embedder(&model, &Inline, 1, longest);
                let all = embed(&mut together, Cpu::detect(), &pool, &forms);
                for (text, got) in forms.iter().zip(&all) {
                    let want = embed(&mut alone, Cpu::SCALAR, &Inline, &[*text]);
                    prop_assert_eq!(bits(got), bits(&want[0]));
                    let n_layers = 1 + threads % 3;
                    prop_assert_eq!(bits(got), bits(&by_layers(&mut alone, text, n_layers)));
                    let rows = if text.pooling == Pooling::None { text.tokens.len() } else { 1 };
                    prop_assert_eq!(got.len(), rows * text.dimensions.unwrap_or(text.pooling.width(&model)));
                    for v in got.chunks(got.len() / rows).filter(|_| text.normalise) {
                        let square: f64 = v.iter().map(|v| f64::from(*v).powi(2)).sum();
                        prop_assert!((square - 1.0).abs() < 1e-5);
                    }
                }
                Ok(())
            })
            .unwrap_or_else(|e| panic!("{}: {e}", model.config.arch.name));
    }
}

/// A decoder's embedding states are those from which it computes logits.
#[test]
fn decoders_embed_with_the_states_that_they_generate_from() {
    for file in ["qwen3-embedding-last-f16.gguf", "gemma2-swa8-f32.gguf", "olmo2-postnorm-f16.gguf"] {
        let model = Arc::new(reference::load(file));
        let ids: Vec<u32> = (0..300).map(|i| (i * i * 3 + 5) % model.config.n_vocab as u32).collect();
        let text = Text { tokens: &ids, pooling: Pooling::None, dimensions: None, normalise: false };
        let got = embed(&mut embedder(&model, &Inline, 1, 300), Cpu::detect(), &Inline, &[text]);
        let kv = model.kv_layout(KvType::F32);
        let pages: Vec<u32> = (0..300u32.div_ceil(PAGE as u32)).collect();
        let mut memory = KvMemory::zeroed(&kv, pages.len()).expect("memory");
        let size = ScratchSize { rows: 300, logits: 300, seqs: 1, n_ctx: 300 };
        let mut scratch = model.scratch(&Inline, KvType::F32, size).expect("memory");
        let run = Run { tokens: &ids, pos: 0, pages: &pages, state: 0, n_logits: 300 };
        let exec = Exec { cpu: Cpu::detect(), pool: &Inline };
        let out = model.forward(exec, &[run], KvRef { layout: &kv, memory: &mut memory }, &mut scratch, None);
        let want: Vec<f32> = (0..300).flat_map(|row| out.hidden(row)).copied().collect();
        assert_eq!(bits(&got[0]), bits(&want), "{file}");
    }
}

#[test]
fn the_first_dimensions_are_cut_before_the_length_is_taken() {
    let model = Arc::new(reference::load("gemma-embedding-mean-f16.gguf"));
    let mut e = embedder(&model, &Inline, 4, 64);
    let whole = Text { tokens: &[2, 50, 60], pooling: Pooling::Mean, dimensions: None, normalise: false };
    let cut = Text { dimensions: Some(7), normalise: true, ..whole };
    let all = embed(&mut e, Cpu::detect(), &Inline, &[whole, cut]);
    let length = all[0][..7].iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
    for (whole, cut) in all[0].iter().zip(&all[1]) {
        assert!((f64::from(*whole) / length - f64::from(*cut)).abs() < 1e-6);
    }
    assert_eq!(all[1].len(), 7);
}

#[test]
fn what_is_wrong_is_refused_and_nothing_computed() {
    let model = Arc::new(reference::load("gemma-embedding-mean-f16.gguf"));
    let mut e = embedder(&model, &Inline, 2, 1000);
    let long = vec![7; 513];
    let text = Text { tokens: &[2, 50], pooling: Pooling::Mean, dimensions: None, normalise: true };
    let mut refused = |texts: &[Text<'_>]| {
        let mut sink = |_, _: Option<&[f32]>| panic!("nothing is computed");
        e.embed(Cpu::detect(), &Inline, texts, &mut sink).expect_err("a refusal")
    };
    assert_eq!(refused(&[text, Text { tokens: &[], ..text }]), RequestError::EmptyText);
    let length = RequestError::TextLength { tokens: 513, n_ctx: 512, batch_tokens: 1000 };
    assert_eq!(refused(&[Text { tokens: &long, ..text }]), length);
    assert!(length.to_string().contains("513") && length.to_string().contains("512"));
    let token = RequestError::Token { token: 416, at: 1, n_vocab: 416 };
    assert_eq!(refused(&[Text { tokens: &[2, 416], ..text }]), token);
    assert!(matches!(refused(&[text; 3]), RequestError::NoCapacity { needed: 3, free: 2, .. }));
    for d in [0, 37] {
        let found = refused(&[Text { dimensions: Some(d), ..text }]).to_string();
        assert!(found.contains(&format!("{d} (the model has 36)")), "{found}");
    }
    let half = &long[..501];
    let two = [Text { tokens: half, ..text }; 2];
    assert!(matches!(refused(&two), RequestError::NoCapacity { needed: 2, free: 1, .. }));
    let e = embedder(&model, &Inline, 3, 20);
    assert_eq!(e.fit([10, 10, 1]), 2);
    assert_eq!(e.fit([1, 1, 1, 1]), 3);
    assert_eq!(e.fit([21, 1]), 0);
    let mut ids = vec![9; 30];
    e.truncate(&mut ids);
    assert_eq!(ids, [9; 20]);
}

#[test]
fn encoders_continue_nothing() {
    let model = Arc::new(reference::load("gemma-embedding-mean-f16.gguf"));
    let kv_bytes = EngineOptions::kv_bytes_of(&model, KvType::F16, 64);
    let options = EngineOptions {
        kv_type: KvType::F16,
        n_ctx: 64,
        max_seqs: 1,
        batch_tokens: 64,
        prefill_chunk: 64,
        draft_rows: 0,
        kv_bytes,
        snapshots: Default::default(),
        model_sha256: None,
    };
    let mut engine = Engine::new(model, &Inline, options).expect("memory");
    assert_eq!(engine.submit(Request::new(vec![2, 3])), Err(RequestError::Encoder));
}

#[test]
fn an_unknown_pooling_is_refused_by_name() {
    let with = |pooling: u32| {
        let changes = [("gemma-embedding.pooling_type", Value::U32(pooling))];
        changed("gemma-embedding-mean-f16.gguf", &changes, &whole).expect("a model")
    };
    assert_eq!(Pooling::of(&with(2).config), Ok(Pooling::Cls));
    assert_eq!(Pooling::of(&with(4).config), Ok(Pooling::Rank));
    for (pooling, name) in [(5, "5"), (7, "7")] {
        let error = Pooling::of(&with(pooling).config).expect_err("a refusal").to_string();
        assert!(error.contains(name) && error.contains("mean"), "{error}");
    }
    let without = |file: &str| reference::load(file).config;
    assert_eq!(Pooling::of(&without("llama-yarn-f16.gguf")), Ok(Pooling::Last));
}

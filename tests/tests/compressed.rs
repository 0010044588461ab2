//! Attention with compressed keys (DeepSeek-V4): keys of blocks follow from what KV pages hold, so neither the cut of a
//! prompt, nor batches, caches, preemption, speculation, threads or instruction sets change a bit of an answer.

use std::sync::Arc;

use proptest::prelude::*;
use starling::engine::{Engine, Request};
use starling::error::LoadError;
use starling::kernels::Cpu;
use starling::kernels::attention::{KvType, PAGE};
use starling::model::Model;
use starling::pool::{Inline, Pool};
use starling::quant::Dtype;
use starling::receipt::verify;
use starling_tests::architecture::{Recipe, TensorRecipe, model, recipe};
use starling_tests::pool::Threads;
use starling_tests::reference::logits_in_batches;
use starling_tests::sequences::{check_together, engine_of_type, prompt, request, run, same};

const NAME: &str = "deepseek4";

fn engine(model: &Arc<Model>, kv_type: KvType, batch_tokens: usize) -> Engine {
    engine_of_type(model, kv_type, 512, 2, batch_tokens, 64)
}

/// Sets values of the metadata, by key without the architecture.
fn set(recipe: &mut Recipe, changes: &[(&str, serde_json::Value)]) {
    for (name, new) in changes {
        let key = format!("{NAME}.{name}");
        match recipe.metadata.iter_mut().find(|(k, ..)| *k == key) {
            Some((_, _, value)) => *value = new.clone(),
            None => {
                let kind = match new {
                    serde_json::Value::String(_) => "STRING",
                    new if new.is_u64() => "UINT32",
                    _ => "FLOAT32",
                };
                recipe.metadata.push((key, kind.into(), new.clone()));
            }
        }
    }
}

/// The first `n` layers of the recipe select experts by token.
fn with_experts_by_token(n: usize) -> Recipe {
    let mut recipe = recipe(NAME);
    set(&mut recipe, &[("hash_layer_count", n.into())]);
    // real files have no width of dense feed-forwards, which no layer has
    recipe.metadata.retain(|(key, ..)| key != "deepseek4.feed_forward_length");
    for i in 0..n {
        recipe.tensors.retain(|t| t.name != format!("blk.{i}.exp_probs_b.bias"));
        let shape = vec![2, recipe.n_vocab as u64];
        let name = format!("blk.{i}.ffn_gate_tid2eid.weight");
        recipe.tensors.push(TensorRecipe { name, shape, rule: "ids".into(), gain: 1.0, lo: 0.0, hi: 8.0, w: false });
    }
    recipe
}

/// End of a tensor's name, its shape, and the shape that takes its place.
type Shapes = (&'static str, &'static [u64], &'static [u64]);

/// The shapes with heads of 40 elements and an indexer of 36 instead of 64.
const HEADS_OF_40: [Shapes; 16] = [
    ("attn_q_b.weight", &[64, 512], &[64, 320]),
    ("attn_kv.weight", &[256, 64], &[256, 40]),
    ("attn_kv_a_norm.weight", &[64], &[40]),
    ("attn_output_a.weight", &[128, 32, 4], &[80, 32, 4]),
    ("attn_compressor_kv.weight", &[256, 64], &[256, 40]),
    ("attn_compressor_kv.weight", &[256, 128], &[256, 80]),
    ("attn_compressor_gate.weight", &[256, 64], &[256, 40]),
    ("attn_compressor_gate.weight", &[256, 128], &[256, 80]),
    ("attn_compressor_ape.weight", &[64, 128], &[40, 128]),
    ("attn_compressor_ape.weight", &[128, 4], &[80, 4]),
    ("attn_compressor_norm.weight", &[64], &[40]),
    ("indexer.attn_q_b.weight", &[64, 256], &[64, 144]),
    ("indexer_compressor_norm.weight", &[64], &[36]),
    ("indexer_compressor_ape.weight", &[128, 4], &[72, 4]),
    ("indexer_compressor_kv.weight", &[256, 128], &[256, 72]),
    ("indexer_compressor_gate.weight", &[256, 128], &[256, 72]),
];

/// Groups whose projections are no whole panels, in one matrix; heads whose size is no multiple of 16, with YaRN.
fn other_sizes() -> Vec<Recipe> {
    let mut ranks = recipe(NAME);
    set(&mut ranks, &[("attention.output_lora_rank", 24.into())]);
    for t in &mut ranks.tensors {
        match t.name.rsplit_once("attn_output_") {
            Some((_, "a.weight")) => t.shape = vec![128, 24 * 4],
            Some((_, "b.weight")) => t.shape = vec![24 * 4, 256],
            _ => {}
        }
    }
    let mut heads = recipe(NAME);
    set(
        &mut heads,
        &[
            ("attention.key_length", 40.into()),
            ("attention.value_length", 40.into()),
            ("attention.indexer.key_length", 36.into()),
            ("rope.dimension_count", 20.into()),
            ("rope.scaling.type", "yarn".into()),
            ("rope.scaling.factor", 4.0.into()),
            ("rope.scaling.original_context_length", 64.into()),
        ],
    );
    for t in &mut heads.tensors {
        let is_of = |(part, old, _): &&Shapes| t.name.ends_with(part) && t.shape == *old;
        if let Some((.., new)) = HEADS_OF_40.iter().find(is_of) {
            t.shape = new.to_vec();
        }
    }
    vec![ranks, heads]
}

/// Bits of the logits of all tokens but the last, computed in batches.
fn bits(model: &Arc<Model>, tokens: &[u32], (cpu, pool): (Cpu, &dyn Pool), kv_type: KvType, batch: usize) -> Vec<u32> {
    logits_in_batches(model, (cpu, pool), kv_type, batch, tokens).into_iter().map(f32::to_bits).collect()
}

/// Of other sizes, with YaRN, and with experts by token.
#[test]
fn other_models_load_and_have_equal_bits() {
    for (i, recipe) in other_sizes().into_iter().chain([with_experts_by_token(2)]).enumerate() {
        let model = Arc::new(Model::load(&recipe.file(Dtype::F32), &Inline).expect("a model"));
        let tokens = prompt(150, i);
        let want = bits(&model, &tokens, (Cpu::SCALAR, &Inline), KvType::F32, 150);
        for batch in [1, 7, 64] {
            assert!(bits(&model, &tokens, (Cpu::detect(), &Inline), KvType::F32, batch) == want, "model {i}: {batch}");
        }
    }
}

/// A second turn reads the pages of the first, in the same engine and in one that imported them.
#[test]
fn a_second_turn_reads_cached_and_imported_pages() {
    let model = model(NAME);
    for kv_type in KvType::ALL {
        let mut warm = engine(&model, kv_type, 64);
        // so that blocks of both ratios end in cached pages, and blocks of 128 begin there
        for n in [121, 150, 259] {
            let first = prompt(n, n);
            let seen = run(&mut warm, &[request(&first, 30, 1)], 0).remove(0);
            let mut second = first;
            second.extend(seen.answer.iter().map(|(token, _)| *token));
            second.extend(prompt(90, 2));
            let request = request(&second, 12, 2);
            let exported = warm.export_pages(&second, 0);
            let cold = run(&mut engine(&model, kv_type, 512), std::slice::from_ref(&request), 0);
            let mut other = engine(&model, kv_type, 64);
            assert_eq!(other.import_pages(&exported), Ok((n + 29) / PAGE * PAGE), "{kv_type:?}");
            for engine in [&mut warm, &mut other] {
                let seen = run(engine, std::slice::from_ref(&request), 0);
                assert_eq!(same(&seen), same(&cold), "{kv_type:?}, {n} tokens");
                assert_eq!(seen[0].n_cached, (n + 29) / PAGE * PAGE, "{kv_type:?}");
            }
        }
    }
}

#[test]
fn a_receipt_is_verified() {
    let model = model(NAME);
    let mut request = request(&prompt(140, 4), 30, 5);
    request.receipt = true;
    let receipt = run(&mut engine(&model, KvType::F32, 64), &[request], 0).remove(0).receipt.expect("a receipt");
    assert!(verify(&model, &[7; 32], Cpu::detect(), &Inline, 256, &receipt).is_ok());
}

#[test]
fn what_a_model_cannot_have_is_refused_by_name() {
    let refused = |changes: &[(&str, serde_json::Value)], change: &dyn Fn(&mut Recipe)| {
        let mut recipe = recipe(NAME);
        set(&mut recipe, changes);
        change(&mut recipe);
        match Model::load(&recipe.file(Dtype::F32), &Inline) {
            Ok(_) => panic!("{changes:?}"),
            Err(e @ (LoadError::Metadata { .. } | LoadError::Tensor { .. } | LoadError::MissingTensor { .. })) => {
                e.to_string()
            }
            Err(e) => panic!("{changes:?}: {e}"),
        }
    };
    let cases: [(&str, serde_json::Value, &str); 7] = [
        ("attention.compress_ratios", [0, 4, 64, 4].into(), "64"),
        ("attention.compress_ratios", [0, 4].into(), "2 elements"),
        ("attention.head_count_kv", 2.into(), "head_count_kv"),
        ("attention.value_length", 32.into(), "value_length"),
        ("attention.output_group_count", 3.into(), "output_group_count"),
        ("rope.dimension_count", 31.into(), "an even number"),
        ("attention.sliding_window", 0.into(), "sliding_window"),
    ];
    for (key, value, found) in cases {
        let message = refused(&[(key, value)], &|_| {});
        assert!(message.contains(found), "{key}: {message}");
    }
    for missing in ["blk.1.attn_compressor_ape.weight", "blk.3.indexer.proj.weight", "output_hc_fn.weight"] {
        let message = refused(&[], &|recipe| recipe.tensors.retain(|t| t.name != missing));
        assert!(message.contains(missing), "{missing}: {message}");
    }
    let without_table = refused(&[("hash_layer_count", 1.into())], &|recipe| {
        recipe.tensors.retain(|t| t.name != "blk.0.exp_probs_b.bias");
    });
    assert!(without_table.contains("blk.0.ffn_gate_tid2eid.weight"), "{without_table}");
    let mut recipe = with_experts_by_token(1);
    recipe.tensors.iter_mut().filter(|t| t.rule == "ids").for_each(|t| t.hi = 9.0);
    let error = Model::load(&recipe.file(Dtype::F32), &Inline).err().expect("an expert that does not exist");
    assert!(error.to_string().contains("ffn_gate_tid2eid"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(5))]

    /// Chunks of any size, threads, and every instruction set give the bits of the scalar code token by token.
    #[test]
    fn chunks_equal_single_tokens(batch in 2usize..60, t in 0usize..4, n in 100usize..140, seed in 0usize..100) {
        let (model, kv_type, tokens) = (model(NAME), KvType::ALL[t], prompt(n, seed));
        let want = bits(&model, &tokens, (Cpu::available()[0], &Inline), kv_type, 1);
        for cpu in Cpu::available() {
            prop_assert!(bits(&model, &tokens, (cpu, &Threads::new(3)), kv_type, batch) == want);
        }
    }

    /// Batches, small batches, few pages (preemption), cached prefixes and speculation change no answer.
    #[test]
    fn answers_do_not_depend_on_others(
        lens in prop::collection::vec((1usize..150, 1usize..30), 2..5),
        batch in 2usize..70,
        pages in 12usize..30,
        t in 0usize..4,
        apart in 0usize..4,
    ) {
        let model = model(NAME);
        let requests: Vec<Request> = lens.iter().enumerate().map(|(i, (n, m))| {
            let mut request = request(&prompt(*n, i % 2), *m, i as u64);
            request.prompt_logprobs = i == 1;
            request
        }).collect();
        let engine = |max_seqs, batch, pages| engine_of_type(&model, KvType::ALL[t], 256, max_seqs, batch, pages);
        check_together(engine, requests, (batch, pages, apart));
    }
}

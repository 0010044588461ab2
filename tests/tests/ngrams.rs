//! Qwen4-Exp: embeddings of n-grams, gated hyper-connections and an indexer with means of blocks. What a token reads of those
//! before it, tokens, inputs of a convolution and keys of a block, does not depend on the cut of a prompt.

use std::sync::Arc;

use serde_json::{Value, json};
use starling::engine::Engine;
use starling::kernels::Cpu;
use starling::kernels::attention::{KvType, PAGE};
use starling::model::Model;
use starling::pool::{Inline, Pool};
use starling::quant::Dtype;
use starling_tests::architecture::{Recipe, model, recipe};
use starling_tests::pool::Threads;
use starling_tests::reference::logits_in_batches;
use starling_tests::sequences::{engine_of_type, prompt, request, run, same};

const NAME: &str = "qwen4exp";
/// The token that ends a text.
const END: u32 = 2;

/// The recipe with other values of the metadata, by key without the architecture; without those that become null.
fn changed(changes: &[(&str, Value)]) -> Recipe {
    let mut recipe = recipe(NAME);
    for (name, new) in changes {
        let key = format!("{NAME}.{name}");
        recipe.metadata.retain(|(k, ..)| *k != key || !new.is_null());
        if let Some((_, _, value)) = recipe.metadata.iter_mut().find(|(k, ..)| *k == key) {
            *value = new.clone();
        }
    }
    recipe
}

/// Changes the shape of tensors whose name has an end.
fn reshape(recipe: &mut Recipe, end: &str, shape: &[u64]) {
    let mut n = 0;
    for t in recipe.tensors.iter_mut().filter(|t| t.name.ends_with(end)) {
        (t.shape, n) = (shape.to_vec(), n + 1);
    }
    assert!(n > 0, "no tensor {end}");
}

/// Models of other sizes, and with parts missing.
fn others() -> Vec<(&'static str, Recipe)> {
    let mut later = changed(&[
        ("ple.layers", json!([2])),
        ("ple.ngram_size", json!(2)),
        ("ple.conv_kernel", json!(3)),
        ("ple.head_offsets", json!([7, 100])),
        ("ple.head_vocab_sizes", json!([90, 400])),
        ("embedding_length_per_layer_input", json!(128)),
    ]);
    later.tensors.iter_mut().for_each(|t| t.name = t.name.replace("blk.0.ple_", "blk.2.ple_"));
    reshape(&mut later, "ple_conv1d.weight", &[3, 1024]);
    reshape(&mut later, "per_layer_token_embd.weight", &[128, 640]);

    let mut longer = changed(&[
        ("ple.ngram_size", json!(5)),
        ("ple.heads_per_ngram", json!(1)),
        ("ple.conv_kernel", json!(1)),
        ("ple.layer_multipliers", json!([11_400_714_819_323_198_485u64, 3, 5, 7, 9])),
        ("attention.compress_ratios", json!([0, 7, 0, 3])),
    ]);
    reshape(&mut longer, "ple_conv1d.weight", &[1, 1024]);
    // in one dimension
    for end in ["hc_attn_norm.weight", "hc_ffn_norm.weight", "output_hc_norm.weight", "ple_norm_key.weight"] {
        reshape(&mut longer, end, &[1024]);
    }

    let mut plain = changed(&[("ple.layers", Value::Null), ("attention.compress_ratios", Value::Null)]);
    plain.tensors.retain(|t| !t.name.contains("ple_") && t.name != "per_layer_token_embd.weight");

    let one = changed(&[("attention.compress_ratios", json!([1, 1, 1, 64])), ("attention.indexer.top_k", json!(9))]);

    let mut two = changed(&[("hyper_connection.count", json!(2)), ("hyper_connection.low_rank", json!(24))]);
    for t in &mut two.tensors {
        match &t.name[..] {
            name if name.ends_with("_down.weight") && name.contains("hc_") => t.shape = vec![512, 24],
            name if name.ends_with("_up.weight") && name.contains("hc_") => t.shape = vec![24, 512],
            name if name.ends_with("_inject.weight") => t.shape = vec![512, 2],
            name if name.contains("ple_norm") || name.contains("hc_") => t.shape = vec![256, 2],
            name if name.ends_with("ple_key.weight") => t.shape = vec![256, 512],
            name if name.ends_with("ple_conv1d.weight") => t.shape = vec![4, 512],
            _ => {}
        }
    }
    vec![("later", later), ("longer", longer), ("plain", plain), ("one", one), ("two", two)]
}

fn load(recipe: &Recipe) -> Result<Arc<Model>, String> {
    Model::load(&recipe.file(Dtype::F32), &Inline).map(Arc::new).map_err(|e| e.to_string())
}

/// A text with several ends.
fn text(n: usize, seed: usize) -> Vec<u32> {
    let is_end = |i: usize| [5, 15, 16, 31, 47, 90].contains(&i);
    prompt(n, seed).into_iter().enumerate().map(|(i, token)| if is_end(i) { END } else { token }).collect()
}

/// Bits of the logits of all tokens, computed in batches.
fn bits(model: &Arc<Model>, tokens: &[u32], (cpu, pool): (Cpu, &dyn Pool), kv_type: KvType, batch: usize) -> Vec<u32> {
    logits_in_batches(model, (cpu, pool), kv_type, batch, tokens).into_iter().map(f32::to_bits).collect()
}

#[test]
fn batches_threads_and_instruction_sets_change_no_bit() {
    let recipes = [("the recipe", recipe(NAME))].into_iter().chain(others());
    for (i, (name, recipe)) in recipes.enumerate() {
        let (model, tokens) = (load(&recipe).expect(name), text(130, i));
        for kv_type in KvType::ALL {
            let want = bits(&model, &tokens, (Cpu::SCALAR, &Inline), kv_type, 130);
            for (batch, threads) in [(1, 1), (7, 3), (64, 2)] {
                let got = bits(&model, &tokens, (Cpu::detect(), &Threads::new(threads)), kv_type, batch);
                assert!(got == want, "{name}: {kv_type:?}, batches of {batch}");
            }
        }
    }
}

/// A second turn resumes inside an n-gram, a block and a convolution.
#[test]
fn a_second_turn_resumes_from_a_snapshot() {
    let engine = |model: &Arc<Model>| -> Engine { engine_of_type(model, KvType::F16, 512, 2, 64, 64) };
    for (i, (name, recipe)) in others().into_iter().enumerate() {
        let (model, first) = (load(&recipe).expect(name), text(50 + i, i));
        let mut warm = engine(&model);
        let seen = run(&mut warm, &[request(&first, 40, 1)], 0).remove(0);
        let answer = seen.answer.iter().map(|(token, _)| *token);
        let second: Vec<u32> = first.iter().copied().chain(answer).chain(text(9, i + 1)).collect();
        let (again, new) = (request(&second, 20, 2), engine(&model));
        let [warm, cold] = [warm, new].map(|mut engine| run(&mut engine, std::slice::from_ref(&again), 0).remove(0));
        assert_eq!((warm.n_cached, cold.n_cached), ((50 + i + 40 - 1) / PAGE * PAGE, 0), "{name}");
        assert_eq!(same(&[warm]), same(&[cold]), "{name}");
    }
}

/// Earlier tokens of an n-gram change what a later one adds, up to an end of text.
#[test]
fn tokens_before_an_end_of_text_are_hidden_from_ngrams() {
    // without attention and recurrences, only n-grams and the convolution read other tokens
    let mut recipe = changed(&[("ple.conv_kernel", json!(1))]);
    reshape(&mut recipe, "ple_conv1d.weight", &[1, 1024]);
    for t in recipe.tensors.iter_mut().filter(|t| ["ssm_out", "attn_output"].iter().any(|part| t.name.contains(part))) {
        t.gain = 0.0;
    }
    let model = load(&recipe).expect("a model");
    let last = |tokens: &[u32]| {
        let all = bits(&model, tokens, (Cpu::detect(), &Inline), KvType::F32, tokens.len());
        all[all.len() - recipe.n_vocab..].to_vec()
    };
    assert_ne!(last(&[50, 60, 70]), last(&[51, 60, 70]));
    assert_eq!(last(&[40, 50, 60, 70]), last(&[41, 50, 60, 70]));
    assert_eq!(last(&[50, END, 70]), last(&[51, END, 70]));
    assert_eq!(last(&[END, END, 70]), last(&[70]));
    assert_ne!(last(&[50, 60, END]), last(&[51, 60, END]));
}

#[test]
fn what_cannot_be_is_refused_by_name() {
    for (change, named) in [
        (("ple.layers", json!([1])), "ple.layers"),
        (("ple.layers", json!([0, 2])), "ple.layers"),
        (("ple.layers", json!([9])), "ple.layers"),
        (("ple.ngram_size", json!(1)), "ple.ngram_size"),
        (("ple.ngram_size", json!(9)), "ple.ngram_size"),
        (("ple.ngram_size", json!(4)), "ple.head_offsets"),
        (("ple.heads_per_ngram", json!(0)), "ple.heads_per_ngram"),
        (("ple.layer_multipliers", json!([1, 3])), "ple.layer_multipliers"),
        (("ple.head_vocab_sizes", json!([128, 127, 126, 0])), "ple.head_vocab_sizes"),
        (("ple.head_offsets", json!([0, 128, 256, u64::MAX])), "ple.head_vocab_sizes"),
        (("ple.head_offsets", json!([0, 128, 256, 385])), "per_layer_token_embd.weight"),
        (("ple.conv_kernel", json!(0)), "ple.conv_kernel"),
        (("ple.eos_token_id", Value::Null), "ple.eos_token_id"),
        (("embedding_length_per_layer_input", json!(32)), "embedding_length_per_layer_input"),
        (("hyper_connection.low_rank", Value::Null), "hyper_connection.low_rank"),
        (("hyper_connection.low_rank", json!(9)), "hc_"),
        (("hyper_connection.count", json!(1)), "hyper_connection.count"),
        (("hyper_connection.count", Value::Null), "hyper_connection.count"),
        (("attention.compress_ratios", json!([4, 65, 4, 4])), "attention.compress_ratios"),
        (("attention.indexer.top_k", json!(0)), "attention.indexer.top_k"),
    ] {
        let refusal = load(&changed(std::slice::from_ref(&change))).err().unwrap_or_else(|| panic!("{change:?}"));
        assert!(refusal.contains(named), "{change:?}: {refusal}");
    }
    for part in ["blk.0.hc_attn_inject", "blk.0.ple_value", "output_hc_up", "blk.3.indexer.k_norm", "blk.1.hc_ffn_norm"]
    {
        let (mut recipe, name) = (recipe(NAME), format!("{part}.weight"));
        recipe.tensors.retain(|t| t.name != name);
        let refusal = load(&recipe).err().unwrap_or_else(|| panic!("{name}"));
        assert!(refusal.contains(&name), "{name}: {refusal}");
    }
    assert!(model(NAME).config.state_len() > 0);
}

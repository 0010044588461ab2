//! Multi-head latent attention: the cache has one latent key per token and layer, and neither instruction sets, chunks,
//! batches, preemption nor cached pages change a bit of an answer.

use std::sync::Arc;

use proptest::prelude::*;
use starling::engine::{Engine, Request};
use starling::kernels::Cpu;
use starling::kernels::attention::{KvType, PAGE};
use starling::model::Model;
use starling::pool::Inline;
use starling_tests::architecture::model;
use starling_tests::reference::logits_in_batches;
use starling_tests::sequences::{check_together, engine_of_type, prompt, request, run, same};

/// Models with compressed and direct queries, with split and fused projections of the heads.
const MODELS: [&str; 3] = ["deepseek2", "minicpm3", "plm"];

fn engine(model: &Arc<Model>, kv_type: KvType, max_seqs: usize, batch_tokens: usize, pages: usize) -> Engine {
    engine_of_type(model, kv_type, 256, max_seqs, batch_tokens, pages)
}

/// 64 latent and 32 rotated elements for each token of 3 layers, whatever the number of heads; int8 with two scales.
#[test]
fn pages_have_one_latent_key_per_token() {
    for name in MODELS {
        for (kv_type, key) in [(KvType::F32, 96 * 4), (KvType::F16, 96 * 2), (KvType::K8, 96 + 2 * 4)] {
            assert_eq!(model(name).kv_layout(kv_type).page_bytes(), 3 * PAGE * key, "{name} {kv_type:?}");
        }
    }
}

/// Exported pages continue the answer in another engine.
#[test]
fn pages_move_between_engines() {
    for (name, kv_type) in MODELS.into_iter().zip(KvType::ALL) {
        let model = model(name);
        let mut a = engine(&model, kv_type, 1, 64, 40);
        let first = prompt(50, 1);
        let seen = run(&mut a, &[request(&first, 40, 1)], 0).remove(0);
        let second: Vec<u32> = first.iter().copied().chain(seen.answer.iter().map(|(token, _)| *token)).collect();
        let mut b = engine(&model, kv_type, 1, 64, 40);
        assert_eq!(b.import_pages(&a.export_pages(&second, 0)), Ok(80), "{name}");
        let seen = [&mut a, &mut b].map(|engine| run(engine, &[request(&second, 9, 2)], 0).remove(0));
        assert_eq!((seen[0].n_cached, seen[1].n_cached), (80, 80), "{name}");
        assert_eq!(same(&seen[..1]), same(&seen[1..]), "{name}");
    }
}

/// Int8 keys, with scales of their own for the latent and the rotated part, change logits little.
#[test]
fn smaller_types_are_close_to_f32() {
    for name in MODELS {
        let model = model(name);
        let logits = KvType::ALL.map(|kv_type| logits(&model, Cpu::detect(), kv_type, 64, &prompt(64, 3)));
        let [exact, half, k8, q8] = logits.map(|bits| bits.into_iter().map(f32::from_bits).collect::<Vec<_>>());
        let nmse = |got: &[f32]| {
            let difference: f64 = got.iter().zip(&exact).map(|(g, w)| f64::from(g - w).powi(2)).sum();
            difference / exact.iter().map(|w| f64::from(*w).powi(2)).sum::<f64>()
        };
        assert_eq!(k8, q8, "{name}: there are no values of their own");
        let (half, int8) = (nmse(&half), nmse(&k8));
        assert!(half < 1e-5 && int8 < 1e-2, "{name}: f16 {half:.1e}, k8 {int8:.1e}");
    }
}

/// Bits of the logits after each token, computed in batches of `batch` tokens.
fn logits(model: &Model, cpu: Cpu, kv_type: KvType, batch: usize, tokens: &[u32]) -> Vec<u32> {
    logits_in_batches(model, (cpu, &Inline), kv_type, batch, tokens).into_iter().map(f32::to_bits).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(6))]

    /// Chunks of any size and every instruction set give the bits of the scalar code token by token.
    #[test]
    fn chunks_equal_single_tokens(name in prop::sample::select(&MODELS[..]), t in 0..KvType::ALL.len(), batch in 2usize..40, seed in 0usize..100) {
        let (model, tokens, kv_type) = (model(name), prompt(41, seed), KvType::ALL[t]);
        let want = logits(&model, Cpu::SCALAR, kv_type, 1, &tokens);
        for cpu in Cpu::available() {
            prop_assert_eq!(&logits(&model, cpu, kv_type, batch, &tokens), &want, "{}", cpu.isa());
        }
    }

    /// Batches, small batches, few pages (preemption), cached prefixes and speculation change no answer.
    #[test]
    fn answers_do_not_depend_on_others(
        name in prop::sample::select(&MODELS[..]),
        t in 0..KvType::ALL.len(),
        lens in prop::collection::vec((1usize..60, 1usize..30), 2..5),
        batch in 2usize..70,
        pages in 7usize..20,
        apart in 0usize..4,
    ) {
        let (model, kv_type) = (model(name), KvType::ALL[t]);
        let requests: Vec<Request> =
            lens.iter().enumerate().map(|(i, (n, m))| request(&prompt(*n, i % 2), *m, i as u64)).collect();
        let engine = |max_seqs, batch_tokens, pages| engine(&model, kv_type, max_seqs, batch_tokens, pages);
        check_together(engine, requests, (batch, pages, apart));
    }
}

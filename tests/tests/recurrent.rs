//! Models with recurrent layers: neither batches, chunks, caches, preemption nor speculation change a bit of an answer,
//! and a second turn resumes from a snapshot of the state.

use std::sync::Arc;

use proptest::prelude::*;
use starling::draft::{Drafter, Speculation};
use starling::engine::{Engine, Event, Request};
use starling::kernels::Cpu;
use starling::kernels::attention::{KvType, PAGE};
use starling::kv::PageError;
use starling::model::Model;
use starling::model::evaluate::{Evaluation, EvaluationError};
use starling::pool::Inline;
use starling::quant::Dtype;
use starling::receipt::verify;
use starling::sampler::LogprobKind;
use starling_tests::architecture::{model, recipe};
use starling_tests::sequences::{check_together, engine_of_type, prompt, request, run, same};

/// A model of each kind of recurrent layer, alone or beside attention.
const MODELS: [&str; 13] = [
    "qwen35",
    "qwen3next",
    "qwen4exp",
    "lfm2",
    "granitehybrid",
    "falcon-h1",
    "mamba2",
    "jamba",
    "minimax-01",
    "rwkv6",
    "rwkv7",
    "arwkv7",
    "kimi-linear",
];

fn engine(model: &Arc<Model>, max_seqs: usize, batch_tokens: usize, pages: usize) -> Engine {
    engine_of_type(model, KvType::F32, 256, max_seqs, batch_tokens, pages)
}

/// A second turn computes only what is new: after the last page boundary of the first answer.
#[test]
fn a_second_turn_resumes_from_a_snapshot() {
    for name in MODELS {
        let model = model(name);
        let mut warm = engine(&model, 2, 64, 40);
        let first = prompt(70, 1);
        let seen = run(&mut warm, &[request(&first, 40, 1)], 0).remove(0);
        let mut second = first;
        second.extend(seen.answer.iter().map(|(token, _)| *token));
        second.extend(prompt(9, 2));
        let answers = [request(&second, 12, 2), request(&prompt(30, 3), 12, 3)];
        let cold: Vec<_> =
            answers.iter().map(|r| run(&mut engine(&model, 1, 64, 40), std::slice::from_ref(r), 0).remove(0)).collect();
        let seen = run(&mut warm, &answers, 0);
        assert_eq!(same(&seen), same(&cold), "{name}");
        // the last token of the first answer was never computed
        assert_eq!(seen[0].n_cached, (70 + 40 - 1) / PAGE * PAGE, "{name}");
        let states = warm.kv_stats().states;
        assert_eq!(states.snapshot_bytes, states.n_snapshots * model.state_bytes(), "{name}");
        assert!(states.n_snapshots > 0 && states.in_use_bytes == 0, "{name}: {states:?}");
        assert!(states.committed_bytes <= states.reserved_bytes, "{name}: {states:?}");
        assert_eq!(states.hits, 1, "{name}");
    }
}

/// Where prompts diverge inside a cached prefix, the third of them resumes there.
#[test]
fn a_shared_prefix_gets_a_snapshot_where_prompts_diverge() {
    let model = model("qwen35");
    let mut engine = engine(&model, 1, 64, 60);
    let prompts: Vec<Vec<u32>> = (0..3).map(|i| [prompt(70, 9), prompt(40, 20 + i)].concat()).collect();
    let cached: Vec<usize> =
        prompts.iter().map(|p| run(&mut engine, &[request(p, 2, 1)], 0).remove(0).n_cached).collect();
    assert_eq!(cached, [0, 0, 64]);
}

/// Exported pages end with the state, so that another engine resumes after them.
#[test]
fn exported_pages_carry_the_state() {
    for name in MODELS {
        let model = model(name);
        let mut a = engine(&model, 1, 64, 40);
        let first = prompt(50, 1);
        let seen = run(&mut a, &[request(&first, 40, 1)], 0).remove(0);
        let second: Vec<u32> = first.iter().copied().chain(seen.answer.iter().map(|(token, _)| *token)).collect();
        let exported = a.export_pages(&second, 0);
        let mut b = engine(&model, 1, 64, 40);
        assert_eq!(b.import_pages(&exported), Ok(80), "{name}");
        let seen = [&mut a, &mut b].map(|engine| run(engine, &[request(&second, 9, 2)], 0).remove(0));
        assert_eq!((seen[0].n_cached, seen[1].n_cached), (80, 80), "{name}");
        assert_eq!(same(&seen[..1]), same(&seen[1..]), "{name}");
        // damaged or of another model
        let mut damaged = exported.clone();
        let last = damaged.len() - 20;
        damaged[last] ^= 1;
        assert_eq!(engine(&model, 1, 64, 40).import_pages(&damaged), Err(PageError::Checksum), "{name}");
    }
}

/// What an engine reports as new is enough for another to continue: pages one by one, a snapshot in pieces.
#[test]
fn new_pages_and_snapshots_move_to_another_engine() {
    for name in MODELS {
        let model = model(name);
        let mut a = engine(&model, 1, 64, 40);
        a.track_new_pages(true);
        let first = prompt(50, 1);
        let seen = run(&mut a, &[request(&first, 40, 1)], 0).remove(0);
        let second: Vec<u32> = first.iter().copied().chain(seen.answer.iter().map(|(token, _)| *token)).collect();
        let keys = a.page_keys(&second, 0);
        let pages: Vec<_> = std::iter::from_fn(|| a.take_new_page()).collect();
        let snapshots: Vec<_> = std::iter::from_fn(|| a.take_new_snapshot()).collect();
        // the end of the prompt, and of the answer, whose last token was never computed
        assert_eq!(snapshots.iter().map(|s| s.n_tokens).collect::<Vec<_>>(), [48, 80], "{name}");
        assert_eq!(a.n_resumable_pages(&keys), 5, "{name}");

        let mut b = engine(&model, 1, 64, 40);
        for page in &pages {
            b.import_page(&a.export_page(&page.key).expect("cached")).expect("a page");
        }
        assert_eq!((b.n_cached_pages(&keys), b.n_resumable_pages(&keys)), (5, 0), "{name}");
        let record = b.exported_page_bytes();
        for snapshot in &snapshots {
            let bytes = a.export_snapshot(&snapshot.key).expect("cached");
            assert_eq!(bytes.len(), b.exported_snapshot_bytes(), "{name}");
            let mut damaged = bytes.clone();
            damaged[bytes.len() / 2] ^= 2;
            assert!(b.import_pages(&damaged).is_err(), "{name}");
            for part in bytes.chunks(3 * record) {
                b.import_pages(part).expect("a part");
            }
        }
        assert_eq!(b.n_resumable_pages(&keys), 5, "{name}");
        assert_eq!(b.take_new_snapshot(), None, "{name}");
        let seen = [&mut a, &mut b].map(|engine| run(engine, &[request(&second, 9, 2)], 0).remove(0));
        assert_eq!((seen[0].n_cached, seen[1].n_cached), (80, 80), "{name}");
        assert_eq!(same(&seen[..1]), same(&seen[1..]), "{name}");
    }
}

/// Leaves all drafts to the draft model.
#[derive(Debug, Clone)]
struct Silent;

impl Drafter for Silent {
    fn fork(&self) -> Box<dyn Drafter> {
        Box::new(Silent)
    }

    fn accept(&mut self, _: u32) {}

    fn propose(&mut self, _: usize, _: &mut Vec<u32>) -> usize {
        0
    }
}

/// A recurrent draft model that is the model itself guesses the most probable token of each position, also after wrong
/// guesses: a draft is accepted up to the first token that was sampled otherwise.
#[test]
fn a_recurrent_draft_model_returns_to_its_state() {
    for name in ["qwen35", "lfm2", "mamba2", "falcon-h1"] {
        let mut model = Model::load(&recipe(name).file(Dtype::F32), &Inline).expect("a model");
        // so that most guesses are probable enough
        model.config.output.scale *= 4.0;
        let model = Arc::new(model);
        let mut request = request(&prompt(75, 4), 120, 3);
        request.sampling.temperature = 2.0;
        request.sampling.logprobs = LogprobKind::Raw;
        request.sampling.top_logprobs = 1;
        let plain = run(&mut engine(&model, 2, 64, 40), std::slice::from_ref(&request), 0);
        request.speculation =
            Speculation { max: 5, min_acceptance: 0.0, drafter: Some(Arc::new(Silent)), ..Speculation::default() };
        let mut engine = engine(&model, 2, 64, 40);
        engine.set_draft_model(Arc::clone(&model), &Inline).expect("the same vocabulary");
        engine.set_step_costs(&[1.0]);
        engine.set_draft_cost(0.0);
        let (mut drafted, mut rejected, mut answer) = (0, 0, Vec::new());
        // the second time the prompt comes from the cache
        for _ in 0..2 {
            answer.clear();
            engine.submit(request.clone()).expect("room");
            while !engine.is_idle() {
                let (mut tokens, mut draft) = (Vec::new(), None);
                engine.step(Cpu::detect(), &Inline, &mut |event| match event {
                    Event::Token { token, top, .. } => tokens.push((token, top[0].0 == token)),
                    Event::Drafted { n_drafted, n_accepted, .. } => draft = Some((n_drafted, n_accepted)),
                    _ => {}
                });
                if let Some((n_drafted, n_accepted)) = draft {
                    let n_right = tokens.iter().take_while(|(_, is_most_probable)| *is_most_probable).count();
                    assert_eq!(n_accepted, n_right.min(n_drafted), "{name}: {tokens:?}");
                    (drafted, rejected) = (drafted + n_drafted, rejected + n_drafted - n_accepted);
                }
                answer.extend(tokens.iter().map(|(token, _)| *token));
            }
            assert_eq!(answer, plain[0].answer.iter().map(|(token, _)| *token).collect::<Vec<_>>(), "{name}");
        }
        assert!(drafted > 40 && rejected > 10, "{name}: {drafted} drafted, {rejected} rejected");
        let stats = engine.draft_kv_stats().expect("a draft model");
        assert_eq!((stats.in_use_bytes, stats.states.in_use_bytes), (0, 0), "{name}");
        assert!(stats.states.n_snapshots > 0, "{name}: {stats:?}");
    }
}

#[test]
fn a_receipt_is_verified() {
    let model = model("qwen35");
    let mut request = request(&prompt(40, 4), 30, 5);
    request.receipt = true;
    let receipt = run(&mut engine(&model, 1, 64, 40), &[request], 0).remove(0).receipt.expect("a receipt");
    assert!(verify(&model, &[7; 32], Cpu::detect(), &Inline, 256, &receipt).is_ok());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(6))]

    /// Chunks of any size and every instruction set give the bits of the scalar code token by token.
    #[test]
    fn chunks_equal_single_tokens(name in prop::sample::select(&MODELS[..]), batch in 2usize..40, seed in 0usize..100) {
        let model = model(name);
        let tokens = prompt(41, seed);
        let logits = |cpu: Cpu, batch: usize| {
            let evaluation =
                Evaluation { model: &model, cpu, pool: &Inline, kv_type: KvType::F32, batch, n_ctx: tokens.len() };
            let mut bits = Vec::new();
            evaluation
                .run::<EvaluationError>(&tokens, 0, None, &mut |row| {
                    bits.extend(row.logits.iter().map(|v| v.to_bits()));
                    Ok(())
                })
                .expect("a text that fits");
            bits
        };
        let want = logits(Cpu::available()[0], 1);
        for cpu in Cpu::available() {
            prop_assert!(logits(cpu, batch) == want);
        }
    }

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
        let requests: Vec<Request> = lens.iter().enumerate().map(|(i, (n, m))| {
            let mut request = request(&prompt(*n, i % 2), *m, i as u64);
            request.prompt_logprobs = i == 1;
            request
        }).collect();
        let engine = |max_seqs, batch_tokens, pages| engine(&model, max_seqs, batch_tokens, pages);
        check_together(engine, requests, (batch, pages, apart));
    }
}

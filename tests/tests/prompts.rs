//! Prompts: log-probabilities, scheduling of prefill, cancellation and preemption.

use proptest::prelude::*;
use starling::engine::{Engine, Event, FinishReason, Request, TokenLogprobs};
use starling::kernels::Cpu;
use starling::kernels::attention::KvType;
use starling::model::evaluate::{Evaluation, EvaluationError};
use starling::pool::Inline;
use starling::sampler::{LogprobKind, SamplingOptions};
use starling_tests::sequences::{Seen, engine, engine_with_pages, model, run, run_without, same};

const N_CTX: usize = 256;

fn prompt(n: usize, seed: usize) -> Vec<u32> {
    (0..n).map(|i| (3 + (i * 37 + seed * 11) % 300) as u32).collect()
}

/// A request for the log-probabilities of all prompt and output tokens.
fn scored(n: usize, seed: usize, max_tokens: usize) -> Request {
    let sampling = SamplingOptions { logprobs: LogprobKind::Raw, top_logprobs: 2, ..SamplingOptions::default() };
    let max_tokens = Some(max_tokens);
    Request { sampling, max_tokens, ignore_eos: true, prompt_logprobs: true, ..Request::new(prompt(n, seed)) }
}

#[test]
fn log_probabilities_are_those_of_the_logits() {
    let model = model();
    let request = scored(40, 1, 0);
    let seen = run(&mut engine(&model, N_CTX, 3, 16), std::slice::from_ref(&request), 0).remove(0);
    assert_eq!((seen.prompt.len(), seen.answer.len(), seen.reason), (39, 0, Some(FinishReason::Length)));
    let evaluation =
        Evaluation { model: &model, cpu: Cpu::detect(), pool: &Inline, kv_type: KvType::F16, batch: 40, n_ctx: N_CTX };
    let mut at = 0;
    let checked = evaluation.run::<EvaluationError>(&request.tokens, 0, None, &mut |row| {
        let Some((logprob, top)) = seen.prompt.get(row.pos) else { return Ok(()) };
        let total: f64 = row.logits.iter().map(|x| f64::from(*x).exp()).sum();
        let of = |token: u32| f64::from(row.logits[token as usize]) - total.ln();
        assert!((f64::from(*logprob) - of(request.tokens[row.pos + 1])).abs() < 1e-5, "token {}", row.pos + 1);
        let mut best: Vec<u32> = (0..row.logits.len() as u32).collect();
        best.sort_by(|a, b| row.logits[*b as usize].total_cmp(&row.logits[*a as usize]));
        assert_eq!(top.iter().map(|t| t.0).collect::<Vec<_>>(), best[..2]);
        assert!(top.iter().all(|(token, logprob)| (f64::from(*logprob) - of(*token)).abs() < 1e-5));
        at += 1;
        Ok(())
    });
    checked.expect("an evaluation");
    assert_eq!(at, 39);
}

#[test]
fn what_is_cached_has_log_probabilities_too() {
    let model = model();
    let mut engine = engine(&model, N_CTX, 2, 64);
    let request = scored(100, 2, 5);
    let plain = Request { prompt_logprobs: false, ..request.clone() };
    let first = run(&mut engine, std::slice::from_ref(&plain), 0).remove(0);
    let second = run(&mut engine, std::slice::from_ref(&request), 0).remove(0);
    let third = run(&mut engine, std::slice::from_ref(&plain), 0).remove(0);
    assert_eq!((first.n_cached, second.n_cached, third.n_cached), (0, 0, 96));
    assert_eq!((first.prompt.len(), second.prompt.len()), (0, 99));
    assert!(first.answer == second.answer && second.answer == third.answer);
    // the answer as a prompt has the log-probabilities it was sampled with
    let tokens = request.tokens.iter().copied().chain(first.answer.iter().map(|a| a.0)).collect();
    let replay = run(&mut engine, &[Request { tokens, max_tokens: Some(0), ..request }], 0).remove(0);
    let drawn: Vec<TokenLogprobs> = first.answer.iter().map(|a| a.1.clone()).collect();
    assert_eq!((&replay.prompt[..99], &replay.prompt[99..]), (&second.prompt[..], &drawn[..]));
    assert_eq!(engine.kv_stats().in_use_bytes, 0);
}

#[test]
fn an_answer_without_tokens_is_for_log_probabilities_only() {
    let model = model();
    let mut engine = engine(&model, N_CTX, 1, 8);
    assert!(engine.submit(Request { prompt_logprobs: false, ..scored(4, 0, 0) }).is_err());
    assert!(engine.submit(scored(N_CTX + 1, 0, 0)).is_err());
    let whole = run(&mut engine, &[scored(N_CTX, 0, 0)], 0).remove(0);
    assert_eq!(whole.prompt.len(), N_CTX - 1);
}

#[test]
fn a_short_prompt_does_not_wait_for_a_long_one() {
    let model = model();
    let requests = [scored(240, 0, 2), scored(10, 1, 2), scored(12, 2, 2)];
    let seen = run(&mut engine(&model, N_CTX, 4, 16), &requests, 1);
    // the long prompt takes 15 steps alone, and shares some with the others
    assert!(seen[1].first <= 2 && seen[2].first <= 4 && (15..20).contains(&seen[0].first), "{seen:?}");
}

/// After the cancellation of any request before any step, the others have the same bits, its pages are free, and its
/// cached pages are valid.
#[test]
fn a_request_may_go_at_any_step() {
    let model = model();
    let requests = [(40, 5), (90, 3), (17, 8)].map(|(n, max)| Request { prompt_logprobs: false, ..scored(n, n, max) });
    let alone =
        requests.each_ref().map(|r| run(&mut engine(&model, N_CTX, 1, 96), std::slice::from_ref(r), 0).remove(0));
    for gone in 0..requests.len() {
        for step in 0.. {
            let mut engine = engine(&model, N_CTX, 3, 16);
            let seen = run_without(&mut engine, &requests, 1, Some((gone, step)));
            assert_eq!(engine.kv_stats().in_use_bytes, 0, "request {gone} before step {step}");
            for (i, (seen, alone)) in same(&seen).iter().zip(&same(&alone)).enumerate() {
                assert!(i == gone || seen == alone, "request {i} without {gone} from step {step} on");
            }
            assert!(alone[gone].answer.starts_with(&seen[gone].answer));
            let again = run(&mut engine, &requests[gone..=gone], 0);
            assert_eq!(same(&again), same(&alone[gone..=gone]), "request {gone}, once more after step {step}");
            if seen[gone].reason.is_some() && step > gone {
                break;
            }
        }
    }
}

/// Requests that together exceed the KV cache run at once, are preempted, and have the same bits as alone.
#[test]
fn requests_share_what_memory_there_is() {
    let model = model();
    let long = |i: usize| Request {
        prompt_logprobs: i.is_multiple_of(2),
        max_tokens: Some(100 - 10 * i),
        ..scored(20 + 30 * i, i, 0)
    };
    let requests: Vec<Request> = (0..5).map(long).collect();
    let alone: Vec<Seen> =
        requests.iter().flat_map(|r| run(&mut engine(&model, N_CTX, 1, 96), std::slice::from_ref(r), 0)).collect();
    for (pages, batch) in [(16, 96), (16, 5), (20, 17), (40, 33)] {
        let mut engine = engine_with_pages(&model, N_CTX, 5, batch, pages);
        let together = run(&mut engine, &requests, 0);
        assert_eq!(same(&together), same(&alone), "{pages} pages");
        assert_eq!((together[0].preempted, engine.kv_stats().in_use_bytes), (0, 0), "the oldest goes on");
        assert!(pages == 40 || together.iter().any(|s| s.preempted > 0), "{pages} pages");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    /// Prompts and answers have the same bits alone and in any batches, with any neighbours in any order.
    #[test]
    fn the_order_of_prompts_changes_nothing(
        lengths in prop::collection::vec((1usize..90, 0usize..4), 1..7),
        batch in 1usize..50,
        max_seqs in 1usize..6,
        apart in 0usize..4,
        pages in 8usize..24,
    ) {
        let model = model();
        let requests: Vec<Request> = lengths.iter().enumerate().map(|(i, (n, max))| {
            let request = scored(*n, i % 3, *max);
            Request { prompt_logprobs: *max == 0 || i % 2 == 0, ..request }
        }).collect();
        let alone: Vec<Seen> =
            requests.iter().flat_map(|r| run(&mut engine(&model, N_CTX, 1, 96), std::slice::from_ref(r), 0)).collect();
        let together = run(&mut engine_with_pages(&model, N_CTX, max_seqs, batch, pages), &requests, apart);
        prop_assert_eq!(same(&together), same(&alone));
    }
}

/// Tokens with their text, then the end: the text held back, the reason and the number of tokens.
type Answer = (Vec<(u32, String)>, Option<(String, FinishReason, usize)>);

fn answer(engine: &mut Engine, request: Request) -> Answer {
    let mut all = Answer::default();
    engine.submit(request).expect("a valid request");
    while !engine.is_idle() {
        engine.step(Cpu::detect(), &Inline, &mut |event| match event {
            Event::Token { token, text, .. } => all.0.push((token, text)),
            Event::Done { text, reason, n_tokens, .. } => all.1 = Some((text, reason, n_tokens)),
            _ => {}
        });
    }
    all
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// An answer that another engine has begun goes on with the same bytes, from any of its tokens.
    #[test]
    fn an_answer_goes_on_in_another_engine(
        seed: u64, n in 1usize..60, max_tokens in 1usize..24, temperature in 0.0f32..2.0, repeat in 1.0f32..1.5,
        has_stop: bool, prompt_logprobs: bool, batch in 2usize..40,
    ) {
        let model = model();
        let sampling = SamplingOptions { seed, temperature, repeat_penalty: repeat, ..SamplingOptions::default() };
        let stop = if has_stop { vec!["e".into(), " t".into()] } else { Vec::new() };
        let request = Request {
            sampling, stop, prompt_logprobs, max_tokens: Some(max_tokens), ..Request::new(prompt(n, seed as usize % 97))
        };
        let whole = answer(&mut engine(&model, N_CTX, 1, 96), request.clone());
        let tokens: Vec<u32> = whole.0.iter().map(|(token, _)| *token).collect();
        for k in 0..=tokens.len() {
            let resumed = Request { generated: tokens[..k].to_vec(), ..request.clone() };
            let rest = answer(&mut engine(&model, N_CTX, 1, batch), resumed);
            prop_assert_eq!((&rest.0[..], &rest.1), (&whole.0[k..], &whole.1), "after {} tokens", k);
        }
    }
}

#[test]
fn tokens_generated_elsewhere_are_checked() {
    let model = model();
    let mut engine = engine(&model, N_CTX, 1, 8);
    let request = Request { max_tokens: Some(2), ..Request::new(prompt(4, 0)) };
    let error = |request: Request, engine: &mut Engine| engine.submit(request).expect_err("a refusal").to_string();
    assert!(error(Request { generated: vec![5; 3], ..request.clone() }, &mut engine).contains("at most max_tokens"));
    assert!(error(Request { generated: vec![u32::MAX], ..request.clone() }, &mut engine).contains("4294967295"));
    assert!(error(Request { generated: vec![5], receipt: true, ..request }, &mut engine).contains("generated"));
    assert!(engine.is_idle() && engine.kv_stats().in_use_bytes == 0);
}

#[test]
fn batch_limits_and_evictions_change_no_bit() {
    let model = model();
    let requests = [(40, 5), (90, 3), (17, 8)].map(|(n, max)| Request { prompt_logprobs: false, ..scored(n, n, max) });
    let expected = run(&mut engine(&model, N_CTX, 3, 64), &requests, 1);
    let mut changed = engine(&model, N_CTX, 3, 64);
    for (batch_tokens, prefill_chunk) in [(1, 1), (7, 3), (1 << 20, 1 << 20)] {
        changed.set_batch_limits(batch_tokens, prefill_chunk);
        assert!(changed.options().batch_tokens <= 64);
        assert_eq!(same(&run(&mut changed, &requests, 1)), same(&expected));
        let cached = changed.kv_stats().cached_bytes / changed.kv_stats().page_bytes;
        assert_eq!((changed.evict_cached(1), changed.evict_cached(usize::MAX)), (1, cached - 1));
        assert_eq!(changed.kv_stats().cached_bytes, 0);
    }
}

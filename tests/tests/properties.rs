//! Properties of the engine, each a test of its own name, on a small model: what is accepted, how batches are formed, what a
//! stream of events looks like, which cached pages are used and which make room. The server's are in
//! `host-native/tests/serve/properties.rs`.

use std::sync::Arc;

use proptest::prelude::*;
use starling::engine::{Engine, Event, FinishReason, Request, RequestId};
use starling::error::RequestError;
use starling::kernels::Cpu;
use starling::kernels::attention::PAGE;
use starling::model::Model;
use starling::pool::Inline;
use starling::receipt::Receipt;
use starling::sampler::{Constraint, ConstraintError, Dry, LogprobKind, PenaltyScope, SamplingOptions};
use starling::tokenizer::DecodeOptions;
use starling_tests::sequences::{Seen, engine, engine_with_pages, model, request, run, same};

const N_CTX: usize = 160;

fn tokens(n: usize, seed: usize) -> Vec<u32> {
    (0..n).map(|i| (3 + (i * i * 5 + i * 37 + seed * 101) % 300) as u32).collect()
}

/// Any options that are in range.
fn sampling() -> impl Strategy<Value = SamplingOptions> {
    let penalties = (0.1f32..2.0, 0u32..80, -2.0f32..2.0, -2.0f32..2.0, any::<bool>());
    let filters = (0u32..50, 0.01f32..=1.0, 0.01f32..=1.0, 0.0f32..=1.0, 0.0f32..3.0);
    let rest = (any::<u64>(), 0u32..5, any::<bool>(), prop::collection::btree_map(0u32..300, -5.0f32..5.0, 0..4));
    (penalties, filters, rest).prop_map(|(p, f, r)| SamplingOptions {
        logit_bias: r.3.into_iter().collect(),
        repeat_penalty: p.0,
        repeat_last_n: p.1,
        frequency_penalty: p.2,
        presence_penalty: p.3,
        penalty_scope: if p.4 { PenaltyScope::All } else { PenaltyScope::Answer },
        dry: r.2.then(|| Dry {
            multiplier: 0.8,
            base: 1.75,
            allowed_length: 2,
            last_n: 64,
            breakers: vec![vec![7, 8]],
        }),
        top_k: f.0,
        typical_p: f.1,
        top_p: f.2,
        min_p: f.3,
        temperature: f.4,
        seed: r.0,
        logprobs: if r.2 { LogprobKind::Raw } else { LogprobKind::Final },
        top_logprobs: r.1,
    })
}

/// Requests that fit the context: prompt length, tokens to generate, seed of the prompt.
fn lengths() -> impl Strategy<Value = Vec<(usize, usize, usize)>> {
    prop::collection::vec((1usize..70, 1usize..12, 0usize..50), 1..7)
}

fn requests(lengths: &[(usize, usize, usize)]) -> Vec<Request> {
    lengths.iter().map(|(n, max, seed)| request(&tokens(*n, *seed), *max, *seed as u64)).collect()
}

/// The answers of requests, each alone in an engine.
fn alone(model: &Arc<Model>, requests: &[Request]) -> Vec<Seen> {
    requests.iter().flat_map(|r| run(&mut engine(model, N_CTX, 1, 96), std::slice::from_ref(r), 0)).collect()
}

/// Submits all requests and runs the engine to its end; the events of each step.
fn steps(engine: &mut Engine, requests: Vec<Request>) -> (Vec<RequestId>, Vec<Vec<Event>>) {
    let ids = requests.into_iter().map(|request| engine.submit(request).expect("a valid request")).collect();
    let mut steps = Vec::new();
    while !engine.is_idle() {
        let mut events = Vec::new();
        engine.step(Cpu::detect(), &Inline, &mut |event| events.push(event));
        steps.push(events);
    }
    (ids, steps)
}

/// One fault in a valid request, and what the error must name.
#[derive(Debug, Clone, Copy)]
enum Fault {
    EmptyPrompt,
    UnknownToken,
    LongPrompt,
    ManyTokens,
    NoTokens,
    ManyStops,
    LongStop,
    UnknownStopToken,
    Option(fn(&mut SamplingOptions), &'static str),
}

const FAULTS: &[Fault] = &[
    Fault::EmptyPrompt,
    Fault::UnknownToken,
    Fault::LongPrompt,
    Fault::ManyTokens,
    Fault::NoTokens,
    Fault::ManyStops,
    Fault::LongStop,
    Fault::UnknownStopToken,
    Fault::Option(|o| o.temperature = -0.5, "temperature"),
    Fault::Option(|o| o.temperature = f32::NAN, "temperature"),
    Fault::Option(|o| o.top_p = 0.0, "top_p"),
    Fault::Option(|o| o.top_p = 1.5, "top_p"),
    Fault::Option(|o| o.min_p = -0.1, "min_p"),
    Fault::Option(|o| o.typical_p = f32::INFINITY, "typical_p"),
    Fault::Option(|o| o.repeat_penalty = 0.0, "repeat_penalty"),
    Fault::Option(|o| o.frequency_penalty = f32::NAN, "frequency_penalty"),
    Fault::Option(|o| o.top_logprobs = 201, "top_logprobs"),
    Fault::Option(|o| o.logit_bias = vec![(u32::MAX, 0.0)], "logit_bias"),
    Fault::Option(|o| o.logit_bias = vec![(5, 1.0), (5, 2.0)], "logit_bias"),
    Fault::Option(
        |o| o.dry = Some(Dry { multiplier: 1.0, base: 0.5, allowed_length: 2, last_n: 8, breakers: vec![] }),
        "dry.base",
    ),
];

impl Fault {
    fn apply(self, request: &mut Request) {
        match self {
            Fault::EmptyPrompt => request.tokens.clear(),
            Fault::UnknownToken => *request.tokens.last_mut().expect("a prompt") = u32::MAX,
            Fault::LongPrompt => request.tokens = tokens(N_CTX + 1, 1),
            Fault::ManyTokens => request.max_tokens = Some(N_CTX + 1),
            Fault::NoTokens => request.max_tokens = Some(0),
            Fault::ManyStops => request.stop = vec!["x".into(); 65],
            Fault::LongStop => request.stop = vec!["x".repeat(1025)],
            Fault::UnknownStopToken => request.stop_tokens = vec![1 << 30],
            Fault::Option(change, _) => change(&mut request.sampling),
        }
    }

    fn is_named_by(self, error: &RequestError) -> bool {
        match (self, error) {
            (Fault::EmptyPrompt, RequestError::EmptyPrompt)
            | (Fault::UnknownToken | Fault::UnknownStopToken, RequestError::Token { .. })
            | (Fault::LongPrompt | Fault::ManyTokens, RequestError::ContextLength { .. })
            | (Fault::NoTokens, RequestError::Option { name: "max_tokens", .. })
            | (Fault::ManyStops | Fault::LongStop, RequestError::Option { name: "stop", .. }) => true,
            (Fault::Option(_, field), RequestError::Option { name, .. }) => field == *name,
            _ => false,
        }
    }
}

/// A constraint that allows all tokens and fails after some.
#[derive(Debug, Clone)]
struct FailsAfter(usize);

impl Constraint for FailsAfter {
    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }

    fn allow(&mut self, mask: &mut [u32]) -> Result<bool, ConstraintError> {
        mask.fill(u32::MAX);
        Ok(false)
    }

    fn accept(&mut self, _: u32) -> Result<bool, ConstraintError> {
        self.0 = self.0.checked_sub(1).ok_or(ConstraintError::Failed)?;
        Ok(false)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// A request within all ranges is accepted, and ends by a reason of its own.
    #[test]
    fn valid_accepted(sampling in sampling(), n in 1usize..90, max in 1usize..20, stops in prop::collection::vec("[a-z ]{1,3}", 0..4)) {
        let mut engine = engine(&model(), N_CTX, 1, 32);
        let request = Request { sampling, stop: stops, max_tokens: Some(max), ..Request::new(tokens(n, n)) };
        let seen = run(&mut engine, &[request], 0).remove(0);
        prop_assert!(!seen.answer.is_empty() && seen.reason.is_some());
    }

    /// A request with one fault is refused by name, and changes neither the engine nor the answer of a neighbour.
    #[test]
    fn invalid_rejected(fault in prop::sample::select(FAULTS), sampling in sampling(), n in 2usize..60, step in 0usize..6) {
        let model = model();
        let neighbour = request(&tokens(40, 3), 4, 5);
        let expected = alone(&model, std::slice::from_ref(&neighbour)).remove(0).answer;
        let mut engine = engine(&model, N_CTX, 2, 16);
        engine.submit(neighbour).expect("a valid request");
        let mut answer = Vec::new();
        for at in 0.. {
            if at == step {
                let before = (engine.active(), engine.kv_stats());
                let mut request = Request { sampling: sampling.clone(), max_tokens: Some(8), ..Request::new(tokens(n, n)) };
                fault.apply(&mut request);
                let error = engine.submit(request).expect_err("a refusal");
                prop_assert!(fault.is_named_by(&error), "{:?}: {}", fault, error);
                prop_assert_eq!((engine.active(), engine.kv_stats()), before);
            }
            if engine.is_idle() && at >= step {
                break;
            }
            engine.step(Cpu::detect(), &Inline, &mut |event| if let Event::Token { token, logprob, top, .. } = event {
                answer.push((token, (logprob, top)));
            });
        }
        prop_assert_eq!(answer, expected);
    }

    /// An answer has at most `max_tokens` tokens, and as many if nothing else ends it; prompt and answer stay in the context.
    #[test]
    fn token_limit(lengths in lengths(), ignores: bool) {
        let model = model();
        let requests: Vec<Request> =
            requests(&lengths).into_iter().map(|r| Request { ignore_eos: ignores, ..r }).collect();
        for (seen, request) in run(&mut engine(&model, N_CTX, 4, 24), &requests, 1).iter().zip(&requests) {
            let max = request.max_tokens.expect("a limit");
            prop_assert!(seen.answer.len() <= max && request.tokens.len() + max <= N_CTX + 1);
            prop_assert!(seen.answer.len() == max || seen.reason != Some(FinishReason::Length));
            prop_assert!(!ignores || seen.answer.len() == max);
        }
        // without a limit, the context is one
        let unlimited = Request { max_tokens: None, ..request(&tokens(N_CTX - 5, 1), 1, 1) };
        prop_assert_eq!(run(&mut engine(&model, N_CTX, 1, 64), &[unlimited], 0)[0].answer.len(), 6);
    }

    /// A step computes at most `batch_tokens` tokens, and a token of each request whose prompt is computed; beside those at
    /// most `prefill_chunk` prompt tokens.
    #[test]
    fn batch_formation(lengths in lengths(), batch in 8usize..40) {
        let mut engine = engine(&model(), N_CTX, 8, batch);
        let chunk = engine.options().prefill_chunk;
        let (ids, steps) = steps(&mut engine, requests(&lengths));
        let mut decoding: Vec<RequestId> = Vec::new();
        for events in &steps {
            let computed: usize = events.iter().map(|e| if let Event::Computed { n_tokens } = e { *n_tokens } else { 0 }).sum();
            let sampled: Vec<RequestId> =
                events.iter().filter_map(|e| if let Event::Token { id, .. } = e { Some(*id) } else { None }).collect();
            prop_assert!((1..=batch).contains(&computed));
            prop_assert!(decoding.iter().all(|id| sampled.contains(id)), "{:?} wait in {:?}", decoding, events);
            // the last token of a prompt alone counts as a decode row, too: each samples a token
            prop_assert!(decoding.is_empty() || computed <= sampled.len() + chunk);
            decoding.extend(events.iter().filter_map(|e| if let Event::Prefilled { id, .. } = e { Some(*id) } else { None }));
            decoding.retain(|id| !events.iter().any(|e| matches!(e, Event::Done { id: done, .. } if done == id)));
        }
        prop_assert!(decoding.is_empty() && ids.len() == lengths.len());
    }

    /// No row is computed for padding: the tokens of all batches are those of prompts and answers, and the lengths of
    /// neighbours change no bit.
    #[test]
    fn padding_independence(lengths in lengths(), batch in 4usize..60) {
        let model = model();
        let requests = requests(&lengths);
        let (_, steps) = steps(&mut engine(&model, N_CTX, 8, batch), requests.clone());
        let (mut computed, mut wanted) = (0, 0);
        for event in steps.iter().flatten() {
            match event {
                Event::Computed { n_tokens } => computed += n_tokens,
                Event::Prefilled { n_prompt, n_cached, .. } => wanted += n_prompt - n_cached,
                // the last token is never input
                Event::Done { n_tokens, .. } => wanted += n_tokens - 1,
                _ => {}
            }
        }
        prop_assert_eq!(computed, wanted);
        prop_assert_eq!(same(&run(&mut engine(&model, N_CTX, 8, batch), &requests, 0)), same(&alone(&model, &requests)));
    }

    /// The events of a request: its prompt is computed once, then come its tokens, then one end with their number; the texts
    /// together are the text of the tokens.
    #[test]
    fn token_and_completion_events(lengths in lengths(), batch in 4usize..60) {
        let model = model();
        let (ids, steps) = steps(&mut engine(&model, N_CTX, 8, batch), requests(&lengths));
        for (id, (n_prompt, max, _)) in ids.iter().zip(&lengths) {
            let (mut found, mut text, mut ends, mut prefills) = (Vec::new(), String::new(), 0, 0);
            for event in steps.iter().flatten() {
                match event {
                    Event::Prefilled { id: of, n_prompt: n, .. } if of == id => {
                        prop_assert!(found.is_empty() && n == n_prompt);
                        prefills += 1;
                    }
                    Event::Token { id: of, token, text: piece, .. } if of == id => {
                        prop_assert!(prefills == 1 && ends == 0);
                        found.push(*token);
                        text.push_str(piece);
                    }
                    Event::Done { id: of, n_tokens, text: rest, reason, .. } if of == id => {
                        prop_assert_eq!((*n_tokens, *reason), (found.len(), FinishReason::Length));
                        text.push_str(rest);
                        ends += 1;
                    }
                    _ => {}
                }
            }
            prop_assert_eq!((prefills, ends, found.len()), (1, 1, *max));
            let mut bytes = Vec::new();
            model.tokenizer.decode_part(&found, DecodeOptions { skip_special: true }, &mut false, &mut bytes);
            prop_assert_eq!(text, String::from_utf8_lossy(&bytes));
        }
    }

    /// A request whose constraint fails ends with that error as its last event, after the tokens before it, and its
    /// neighbours have the bits that they have alone.
    #[test]
    fn error_events_and_isolation(lengths in lengths(), fails in prop::collection::vec(prop::option::of(0usize..6), 7), batch in 4usize..60) {
        let model = model();
        let plain = requests(&lengths);
        let expected = alone(&model, &plain);
        let faulty: Vec<Request> = plain.iter().zip(&fails).map(|(request, after)| Request {
            constraint: after.map(|n| Arc::new(FailsAfter(n)) as Arc<dyn Constraint>),
            ..request.clone()
        }).collect();
        let mut engine = engine(&model, N_CTX, 8, batch);
        let found = run(&mut engine, &faulty, 0);
        for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
            match fails[i].filter(|n| *n < expected.answer.len()) {
                None => prop_assert_eq!(&found.answer, &expected.answer),
                // the token that it cannot accept is the last
                Some(n) => {
                    prop_assert_eq!(found.reason, Some(FinishReason::Constraint(ConstraintError::Failed)));
                    prop_assert_eq!(&found.answer[..], &expected.answer[..=n]);
                }
            }
        }
        prop_assert_eq!(engine.kv_stats().in_use_bytes, 0);
    }

    /// Every request that was accepted comes to an end in any company, also when memory is short; then nothing is in use.
    #[test]
    fn batch_completion(lengths in lengths(), max_seqs in 1usize..6, batch in 1usize..40, pages in 6usize..20, apart in 0usize..4) {
        let model = model();
        let requests = requests(&lengths);
        let mut engine = engine_with_pages(&model, N_CTX, max_seqs, batch, pages);
        let found = run(&mut engine, &requests, apart);
        prop_assert_eq!(same(&found), same(&alone(&model, &requests)));
        prop_assert!(found.iter().all(|seen| seen.reason.is_some()));
        prop_assert_eq!((engine.is_idle(), engine.kv_stats().in_use_bytes), (true, 0));
    }

    /// A prompt reuses the whole pages of the longest prefix that it shares with a prompt before it, but never its last token.
    #[test]
    fn longest_prefix_reused(shared in prop::collection::vec((0usize..110, 0usize..4), 1..8)) {
        let mut engine = engine(&model(), N_CTX, 8, 64);
        let mut before: Vec<Vec<u32>> = Vec::new();
        for (i, (n, source)) in shared.iter().enumerate() {
            let mut prompt = before.get(*source).map(|p| p[..*n.min(&p.len())].to_vec()).unwrap_or_default();
            prompt.extend(tokens(20, 60 + i));
            let common = |p: &Vec<u32>| p.iter().zip(&prompt).take_while(|(a, b)| a == b).count();
            let longest = before.iter().map(common).max().unwrap_or(0).min(prompt.len() - 1);
            let seen = run(&mut engine, &[request(&prompt, 1, 0)], 0).remove(0);
            prop_assert_eq!(seen.n_cached, longest / PAGE * PAGE);
            before.push(prompt);
        }
    }

    /// When pages run out, the prompt that was used least recently loses its own. The account: room for three prompts of two
    /// whole pages each.
    #[test]
    fn lru(uses in prop::collection::vec(0usize..6, 1..30)) {
        let mut engine = engine_with_pages(&model(), N_CTX, 1, 64, 7);
        let mut recent: Vec<usize> = Vec::new();
        for prompt in uses {
            let seen = run(&mut engine, &[request(&tokens(2 * PAGE + 1, prompt), 1, 0)], 0).remove(0);
            let is_cached = recent.contains(&prompt);
            prop_assert_eq!(seen.n_cached, if is_cached { 2 * PAGE } else { 0 }, "{} after {:?}", prompt, recent);
            recent.retain(|p| *p != prompt);
            recent.push(prompt);
            recent.drain(..recent.len().saturating_sub(3));
        }
    }

    /// A hit counts as a use: of three cached prompts, the one used again outlives both others when two more come.
    #[test]
    fn access_time(again in 0usize..3, times in 1usize..4) {
        let mut engine = engine_with_pages(&model(), N_CTX, 1, 64, 7);
        let mut cached = |prompt: usize| run(&mut engine, &[request(&tokens(2 * PAGE + 1, prompt), 1, 0)], 0)[0].n_cached > 0;
        prop_assert!((0..3).all(|prompt| !cached(prompt)));
        prop_assert!((0..times).all(|_| cached(again)));
        prop_assert!(!cached(3) && !cached(4));
        prop_assert!(cached(again) && cached(3) && cached(4));
        prop_assert!((0..3).filter(|prompt| *prompt != again).all(|prompt| !cached(prompt)));
    }

    /// Options, receipts and exported pages are the same after they were written and read.
    #[test]
    fn serialisation_round_trip(sampling in sampling(), n in 33usize..90, max in 1usize..12) {
        let text = serde_json::to_string(&sampling).expect("JSON");
        prop_assert_eq!(&serde_json::from_str::<SamplingOptions>(&text).expect("options"), &sampling);
        let model = model();
        let mut first = engine(&model, N_CTX, 1, 64);
        let asked = Request { sampling, receipt: true, max_tokens: Some(max), ..Request::new(tokens(n, n)) };
        let seen = run(&mut first, std::slice::from_ref(&asked), 0).remove(0);
        let receipt = seen.receipt.clone().expect("a receipt");
        let text = serde_json::to_string(&receipt).expect("JSON");
        prop_assert_eq!(&serde_json::from_str::<Receipt>(&text).expect("a receipt"), &receipt);
        let mut second = engine(&model, N_CTX, 1, 64);
        let pages = first.export_pages(&asked.tokens, 0);
        prop_assert!(second.import_pages(&pages).expect("pages") >= n / PAGE);
        prop_assert_eq!(second.export_pages(&asked.tokens, 0), pages);
        let again = run(&mut second, &[asked], 0).remove(0);
        prop_assert!(again.n_cached > 0 && same(&[again]) == same(&[seen]));
    }
}

//! Speculative decoding: whatever a drafter proposes, outputs equal those without it, and rejected tokens leave no trace.

use std::fs;
use std::sync::{Arc, OnceLock};

use proptest::prelude::*;
use starling::draft::{Drafter, Speculation};
use starling::engine::{Engine, FinishReason, Request};
use starling::error::DraftModelError;
use starling::gguf::Value;
use starling::kernels::Cpu;
use starling::kernels::attention::PAGE;
use starling::kv::KvStats;
use starling::model::Model;
use starling::pool::Inline;
use starling::sampler::{ALL_TOKENS, Constraint, ConstraintError, Dry, LogprobKind, PenaltyScope, SamplingOptions};
use starling::tokenizer::EncodeOptions;
use starling_tests::reference;
use starling_tests::reference::fixtures;
use starling_tests::sequences::{Seen, engine, engine_with_pages, model, run, same};

const N_CTX: usize = 160;

fn hash(seed: u64, x: u64) -> u64 {
    let h = (seed ^ x).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    h ^ h >> 29
}

/// Proposes the sequence that it was made with, where a hash says so, and other tokens elsewhere; some are outside the
/// vocabulary, and some proposals are longer than allowed.
#[derive(Debug, Clone)]
struct Script {
    tokens: Vec<u32>,
    at: usize,
    seed: u64,
    /// Wrong tokens per 1000.
    lies: u64,
}

impl Drafter for Script {
    fn fork(&self) -> Box<dyn Drafter> {
        Box::new(self.clone())
    }

    fn accept(&mut self, _: u32) {
        self.at += 1;
    }

    fn propose(&mut self, max: usize, draft: &mut Vec<u32>) -> usize {
        self.seed = hash(self.seed, self.at as u64);
        let n = if self.seed.is_multiple_of(7) { max + 3 } else { max };
        for i in 0..n {
            let draw = hash(self.seed, i as u64) >> 7;
            let token = self.tokens.get(self.at + i).copied().unwrap_or(0);
            draft.push(if draw % 1000 < self.lies { (draw >> 12) as u32 % 400 } else { token });
        }
        (self.seed % 5) as usize
    }
}

/// A constraint in which a hash of the tokens so far decides what may follow.
#[derive(Debug, Clone)]
struct Chance {
    state: u64,
    n_vocab: u64,
    /// Allowed tokens per 1000.
    density: u64,
    /// Tokens left.
    length: usize,
}

impl Constraint for Chance {
    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }

    fn allow(&mut self, mask: &mut [u32]) -> Result<bool, ConstraintError> {
        for token in (0..self.n_vocab).filter(|t| hash(self.state, *t) >> 9 & 1023 < self.density) {
            mask[token as usize / 32] |= 1 << (token % 32);
        }
        Ok(self.state.is_multiple_of(4))
    }

    fn accept(&mut self, token: u32) -> Result<bool, ConstraintError> {
        (self.state, self.length) = (hash(self.state, u64::from(token)), self.length - 1);
        Ok(self.length == 0)
    }
}

fn sampling() -> impl Strategy<Value = SamplingOptions> {
    let off = |off: f32, on: std::ops::Range<f32>| prop_oneof![Just(off), on];
    let filters = (prop_oneof![Just(0u32), 1u32..40], off(1.0, 0.05..1.0), off(1.0, 0.05..1.0), off(0.0, 0.001..0.5));
    let penalties = (
        off(1.0, 1.0..1.5),
        prop_oneof![Just(0u32), 1u32..30, Just(ALL_TOKENS)],
        off(0.0, -1.0..1.0),
        off(0.0, -1.0..1.0),
        any::<bool>(),
    );
    let dry = prop::option::of((0.1f32..2.0, 1.0f32..2.0, 1u32..4));
    let bias = prop::collection::btree_map(0u32..300, -3f32..3.0, 0..5);
    let logprobs = (0..3usize, 0u32..4);
    let temperature = prop_oneof![Just(0.0f32), 0.2f32..1.5];
    (filters, penalties, dry, bias, logprobs, temperature, any::<u64>()).prop_map(
        |(f, p, dry, bias, l, temperature, seed)| {
            let dry = dry.map(|(multiplier, base, allowed_length)| Dry {
                multiplier,
                base,
                allowed_length,
                last_n: ALL_TOKENS,
                breakers: vec![vec![13]],
            });
            SamplingOptions {
                logit_bias: bias.into_iter().collect(),
                repeat_penalty: p.0,
                repeat_last_n: p.1,
                frequency_penalty: p.2,
                presence_penalty: p.3,
                penalty_scope: if p.4 { PenaltyScope::Answer } else { PenaltyScope::All },
                dry,
                top_k: f.0,
                top_p: f.1,
                typical_p: f.2,
                min_p: f.3,
                temperature,
                seed,
                logprobs: [LogprobKind::None, LogprobKind::Raw, LogprobKind::Final][l.0],
                top_logprobs: if l.0 == 0 { 0 } else { l.1 },
            }
        },
    )
}

/// What a request asks for besides its sampling options.
#[derive(Debug, Clone)]
struct Asked {
    sampling: SamplingOptions,
    n_prompt: usize,
    max_tokens: usize,
    density: Option<u64>,
    /// Where in the answer the stop string is taken from.
    stop: Option<(usize, usize)>,
    ignore_eos: bool,
    prompt_logprobs: bool,
    max_draft: usize,
    /// Lies of a script per 1000; `None` for lookup.
    lies: Option<u64>,
    resumed: usize,
}

fn asked() -> impl Strategy<Value = Asked> {
    let stop = prop::option::weighted(0.3, (0usize..40, 1usize..5));
    let lies = prop_oneof![Just(None), Just(Some(0)), Just(Some(1000)), (0u64..600).prop_map(Some)];
    let limits = (1usize..60, 1usize..50);
    let flags = (any::<bool>(), any::<bool>());
    (sampling(), limits, prop::option::weighted(0.3, 2u64..1000), stop, flags, 0usize..12, lies, 0usize..20).prop_map(
        |(sampling, (n_prompt, max_tokens), density, stop, flags, max_draft, lies, resumed)| Asked {
            sampling,
            n_prompt,
            max_tokens,
            density,
            stop,
            ignore_eos: flags.0,
            prompt_logprobs: flags.1,
            max_draft,
            lies,
            resumed,
        },
    )
}

/// The request without speculation.
fn plain(model: &Model, asked: &Asked) -> Request {
    let seed = asked.sampling.seed;
    let constraint = asked.density.map(|density| {
        let n_vocab = model.config.n_vocab as u64;
        Arc::new(Chance { state: seed, n_vocab, density, length: 30 }) as Arc<dyn Constraint>
    });
    Request {
        sampling: asked.sampling.clone(),
        max_tokens: Some(asked.max_tokens),
        receipt: constraint.is_none(),
        constraint,
        stop_tokens: vec![9, 200],
        ignore_eos: asked.ignore_eos,
        prompt_logprobs: asked.prompt_logprobs,
        sequence: seed % 3,
        // with repetitions, so that lookup finds something
        ..Request::new((0..asked.n_prompt as u64).map(|i| 3 + (hash(seed, i % 11) % 300) as u32).collect())
    }
}

fn alone(model: &Arc<Model>, request: &Request) -> Seen {
    same(&run(&mut engine(model, N_CTX, 1, 96), std::slice::from_ref(request), 0)).remove(0)
}

/// The speculation of a request whose answer is known.
fn speculation(asked: &Asked, request: &Request, seen: &Seen) -> Speculation {
    let answer: Vec<u32> = seen.answer.iter().map(|a| a.0).collect();
    let tokens = [&request.tokens[..], &answer].concat();
    let drafter = asked.lies.map(|lies| Script { tokens, at: 0, seed: asked.sampling.seed, lies });
    let prediction = if asked.sampling.seed.is_multiple_of(2) { answer } else { Vec::new() };
    let drafter = drafter.map(|script| Arc::new(script) as Arc<dyn Drafter>);
    Speculation { max: asked.max_draft, min_acceptance: 0.0, prediction, drafter }
}

/// Drafts cost nothing, so that all that may be drafted are.
fn free_drafts(mut engine: Engine) -> Engine {
    engine.set_step_costs(&[1.0]);
    engine.set_draft_cost(0.0);
    engine
}

/// The engine with a draft model, if there is one.
fn with_draft_model(mut engine: Engine, draft: Option<&Arc<Model>>) -> Engine {
    if let Some(draft) = draft {
        engine.set_draft_model(Arc::clone(draft), &Inline).expect("the same vocabulary");
    }
    engine
}

/// Models that draft for [`model`]: itself, and one that often guesses other tokens.
fn draft_models() -> &'static [Arc<Model>; 2] {
    static MODELS: OnceLock<[Arc<Model>; 2]> = OnceLock::new();
    MODELS.get_or_init(|| {
        let change = [("llama.attention.sliding_window", Value::U32(3))];
        let other = reference::changed("mistral-hd32-f16.gguf", &change, &reference::whole).expect("a model");
        [model(), Arc::new(other)]
    })
}

/// That no sequence holds pages of the draft model.
fn holds_no_draft_pages(engine: &Engine) -> bool {
    engine.draft_kv_stats().is_none_or(|stats| (stats.in_use_bytes, stats.fragmented_bytes) == (0, 0))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    /// Tokens, text, log-probabilities, receipts and reasons to end equal those without speculation, alone and among
    /// others, with few pages, and when an answer is continued.
    #[test]
    fn speculation_changes_nothing(
        asked in prop::collection::vec(asked(), 1..5),
        batch in 2usize..60,
        max_seqs in 1usize..5,
        apart in 0usize..4,
        pages in 0usize..30,
        costs in prop::collection::vec(1f32..3.0, 1..10),
        draft in prop::option::of((0usize..2, prop_oneof![Just(0f32), 0f32..0.5])),
    ) {
        let model = model();
        let (draft, draft_cost) = (draft.map(|draft| &draft_models()[draft.0]), draft.map_or(0.0, |draft| draft.1));
        let (mut requests, mut want) = (Vec::new(), Vec::new());
        for asked in &asked {
            let mut request = plain(&model, asked);
            let mut seen = alone(&model, &request);
            if let Some((at, length)) = asked.stop {
                let stop: String = seen.text.chars().skip(at).take(length).collect();
                request.stop = vec!["never".into(), stop];
                seen = alone(&model, &request);
            }
            request.speculation = speculation(asked, &request, &seen);
            requests.push(request);
            want.push(seen);
        }
        for (request, want) in requests.iter().zip(&want) {
            let mut alone = free_drafts(with_draft_model(engine(&model, N_CTX, 1, 96), draft));
            let one = run(&mut alone, std::slice::from_ref(request), 0);
            prop_assert_eq!(&same(&one)[0], want);
            prop_assert!(holds_no_draft_pages(&alone));
        }
        let pages = N_CTX.div_ceil(PAGE) + pages;
        let mut together = with_draft_model(engine_with_pages(&model, N_CTX, max_seqs, batch, pages), draft);
        together.set_step_costs(&costs);
        together.set_draft_cost(draft_cost);
        prop_assert_eq!(same(&run(&mut together, &requests, apart)), want.clone());
        prop_assert!(holds_no_draft_pages(&together));
        let stats = together.kv_stats();
        prop_assert_eq!((stats.in_use_bytes, stats.fragmented_bytes), (0, 0));

        for (i, (mut request, want)) in requests.into_iter().zip(want).enumerate() {
            if request.receipt {
                request.receipt = false;
            }
            let n = asked[i].resumed.min(want.answer.len());
            request.generated = want.answer[..n].iter().map(|a| a.0).collect();
            if matches!(want.reason, Some(FinishReason::StopToken(_))) && n == want.answer.len() {
                request.generated.pop();
            }
            let n = request.generated.len();
            let mut rest = free_drafts(with_draft_model(engine(&model, N_CTX, 1, 96), draft));
            let id = rest.submit(request).expect("room");
            let mut tokens = Vec::new();
            while !rest.is_idle() {
                rest.step(Cpu::detect(), &Inline, &mut |event| match event {
                    starling::engine::Event::Token { id: of, token, logprob, top, .. } if of == id => {
                        tokens.push((token, (logprob, top)));
                    }
                    _ => {}
                });
            }
            prop_assert_eq!(&tokens[..], &want.answer[n..]);
        }
    }
}

/// Statistics after each step that sampled the given number of tokens.
fn states(model: &Arc<Model>, request: &Request) -> Vec<Option<KvStats>> {
    let mut engine = free_drafts(engine(model, N_CTX, 1, 96));
    engine.submit(request.clone()).expect("room");
    let (mut states, mut n) = (vec![None; N_CTX], 0);
    while !engine.is_idle() {
        engine.step(Cpu::detect(), &Inline, &mut |event| {
            n += usize::from(matches!(event, starling::engine::Event::Token { .. }));
        });
        states[n] = Some(engine.kv_stats());
    }
    states
}

#[test]
fn rejected_tokens_leave_no_trace() {
    let model = model();
    let sampling = SamplingOptions { seed: 4, ..SamplingOptions::default() };
    let tokens = (0..40).map(|i| 3 + i * 7 % 90).collect();
    let request = Request { max_tokens: Some(90), ignore_eos: true, sampling, ..Request::new(tokens) };
    let seen = alone(&model, &request);
    let want = states(&model, &request);
    for lies in [0, 300, 1000] {
        let tokens = request.tokens.iter().copied().chain(seen.answer.iter().map(|a| a.0)).collect();
        let drafter = Some(Arc::new(Script { tokens, at: 0, seed: 5, lies }) as Arc<dyn Drafter>);
        let speculation = Speculation { max: 9, drafter, ..Speculation::default() };
        let found = states(&model, &Request { speculation, ..request.clone() });
        let mut n = 0;
        for (found, want) in found.iter().zip(&want).filter_map(|(f, w)| Some((f.as_ref()?, w.as_ref()?))) {
            // pages that were used once stay committed, and free
            let ignored = |s: &KvStats| KvStats { committed_bytes: 0, ..*s };
            assert_eq!(ignored(found), ignored(want), "{lies}");
            n += 1;
        }
        assert!(n >= 9, "{n} steps in common");
    }
}

#[test]
fn a_draft_evicts_and_preempts_nothing() {
    let model = model();
    let mut engine = free_drafts(engine_with_pages(&model, 64, 2, 64, 4));
    let prompt =
        |n: u32, first: u32| Request { max_tokens: Some(8), ..Request::new((0..n).map(|i| first + i).collect()) };
    // a cached page, and a request that may take the others
    run(&mut engine, &[Request { max_tokens: Some(1), ..prompt(17, 3) }], 0);
    assert!(engine.kv_stats().cached_bytes > 0);
    let script = Script { tokens: Vec::new(), at: 0, seed: 5, lies: 1000 };
    let speculation = Speculation { max: 24, drafter: Some(Arc::new(script)), ..Speculation::default() };
    let seen = run(&mut engine, &[Request { speculation, ignore_eos: true, ..prompt(30, 90) }], 0);
    assert!(seen[0].n_drafted > 0 && seen[0].answer.len() == 8);
    assert_eq!(engine.kv_stats().evictions, 0);
}

#[test]
fn windows_that_reuse_pages() {
    for (window, batch) in [(24, 7), (1, 2), (33, 16)] {
        let change = [("llama.attention.sliding_window", Value::U32(window))];
        let model = reference::changed("mistral-hd32-f16.gguf", &change, &reference::whole).expect("a model");
        let model = Arc::new(model);
        let tokens: Vec<u32> = (0..50).map(|i| 3 + i * 37 % 300).collect();
        let request =
            Request { max_tokens: Some(200), ignore_eos: true, receipt: true, ..Request::new(tokens.clone()) };
        let want = same(&run(&mut engine(&model, 256, 1, batch), std::slice::from_ref(&request), 0));
        let ring = (window as usize + batch - 1).div_ceil(PAGE) + 1;
        for lies in [0, 200, 1000] {
            let tokens = tokens.iter().copied().chain(want[0].answer.iter().map(|a| a.0)).collect();
            let drafter = Some(Arc::new(Script { tokens, at: 0, seed: 5, lies }) as Arc<dyn Drafter>);
            let speculation = Speculation { max: 8, drafter, ..Speculation::default() };
            let mut bounded = free_drafts(engine_with_pages(&model, 256, 1, batch, ring));
            let seen = run(&mut bounded, &[Request { speculation, ..request.clone() }], 0);
            assert_eq!(same(&seen), want, "window {window}, batches of {batch}");
            assert!(seen[0].n_drafted > 0 && (seen[0].n_accepted > 0) == (lies < 1000));
        }
    }
}

#[test]
fn drafting_follows_acceptance_and_costs() {
    let model = model();
    let request = Request { max_tokens: Some(120), ignore_eos: true, ..Request::new(vec![5, 6, 7]) };
    let seen = alone(&model, &request);
    let seen_with = |lies, costs: &[f32], min_acceptance| {
        let tokens = request.tokens.iter().copied().chain(seen.answer.iter().map(|a| a.0)).collect();
        let drafter = Some(Arc::new(Script { tokens, at: 0, seed: 5, lies }) as Arc<dyn Drafter>);
        let speculation = Speculation { max: 8, min_acceptance, drafter, ..Speculation::default() };
        let mut engine = engine(&model, N_CTX, 1, 96);
        engine.set_step_costs(costs);
        let found = run(&mut engine, &[Request { speculation, ..request.clone() }], 0).remove(0);
        assert_eq!(same(std::slice::from_ref(&found))[0], seen);
        (found.n_drafted, found.n_accepted)
    };
    let growing = [1.0, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7, 1.8, 1.9];
    let (drafted, accepted) = seen_with(0, &growing, 0.0);
    assert!(drafted > 90 && accepted * 10 > drafted * 9, "{accepted} of {drafted}");
    let (drafted, accepted) = seen_with(1000, &growing, 0.0);
    assert!(drafted < 150 && accepted < 5, "{accepted} of {drafted}");
    assert_eq!(seen_with(0, &[1.0, 3.0, 5.0, 7.0, 9.0], 0.0).0, 0);
    let (drafted, _) = seen_with(1000, &[1.0], 0.5);
    assert!(drafted < 150, "{drafted}");
}

fn tiny(dtype: &str) -> Arc<Model> {
    let file = fs::read(fixtures().join(format!("starling-tiny/starling-tiny-{dtype}.gguf"))).expect("a model");
    Arc::new(Model::load(&file, &Inline).expect("a model"))
}

fn text_request(model: &Model, text: &str, max_tokens: usize, sampling: SamplingOptions) -> Request {
    let tokens = model.tokenizer.encode(text, EncodeOptions { add_special: true, parse_special: false });
    let speculation = Speculation { max: 6, ..Speculation::default() };
    Request { max_tokens: Some(max_tokens), ignore_eos: true, sampling, speculation, ..Request::new(tokens) }
}

const TEXTS: [&str; 4] = ["Once upon a time", "The little dog", "\"Where is my hat?\" asked Tom.", "One day, Lily"];

#[test]
fn quantised_files_draft_for_each_other() {
    let models = ["f16", "q8_0", "q4_0"].map(tiny);
    for target in &models {
        for temperature in [0.0, 0.8] {
            let sampling = SamplingOptions { temperature, seed: 3, ..SamplingOptions::default() };
            let requests: Vec<Request> =
                TEXTS.iter().map(|text| text_request(target, text, 60, sampling.clone())).collect();
            let plain = requests.iter().map(|r| Request { speculation: Speculation::default(), ..r.clone() });
            let want = same(&run(&mut engine(target, 128, 4, 32), &plain.collect::<Vec<_>>(), 1));
            for draft in &models {
                for (max_seqs, batch, apart) in [(1, 32, 0), (4, 32, 1), (3, 4, 9)] {
                    let mut engine = free_drafts(with_draft_model(engine(target, 128, max_seqs, batch), Some(draft)));
                    let seen = run(&mut engine, &requests, apart);
                    assert_eq!(same(&seen), want);
                    assert!(holds_no_draft_pages(&engine));
                    let (drafted, accepted): (Vec<_>, Vec<_>) =
                        seen.iter().map(|s| (s.n_drafted, s.n_accepted)).unzip();
                    let (drafted, accepted) = (drafted.iter().sum::<usize>(), accepted.iter().sum::<usize>());
                    assert!(accepted > 60 || batch == 4, "{accepted} of {drafted} at {temperature}");
                }
            }
        }
    }
}

#[test]
fn a_draft_model_is_asked_where_it_pays() {
    let (target, draft) = (tiny("f16"), tiny("q8_0"));
    let request = text_request(&target, TEXTS[0], 100, SamplingOptions { temperature: 0.0, ..Default::default() });
    let accepted = |draft_cost, costs: &[f32]| {
        let mut engine = with_draft_model(engine(&target, 128, 1, 32), Some(&draft));
        engine.set_step_costs(costs);
        engine.set_draft_cost(draft_cost);
        let seen = run(&mut engine, std::slice::from_ref(&request), 0).remove(0);
        (seen.n_accepted, engine.draft_kv_stats().expect("a draft model"))
    };
    let (n, stats) = accepted(0.1, &[1.0, 1.1, 1.2, 1.3, 1.4]);
    assert!(n > 60, "{n}");
    // the prompt and answer stay in the prefix tree
    assert!(stats.cached_bytes > 0 && stats.in_use_bytes == 0);
    assert_eq!(stats.n_pages, 128 / PAGE);
    let (n, _) = accepted(0.9, &[1.0, 1.5, 2.0, 2.5, 3.0]);
    assert!(n < 20, "{n}");
}

#[test]
fn a_draft_model_keeps_prefixes() {
    let (target, draft) = (tiny("q8_0"), tiny("q4_0"));
    let request = text_request(&target, &TEXTS.join(" "), 20, SamplingOptions::default());
    let mut engine = free_drafts(with_draft_model(engine(&target, 128, 1, 32), Some(&draft)));
    let first = run(&mut engine, std::slice::from_ref(&request), 0);
    let hits = |engine: &Engine| engine.draft_kv_stats().expect("a draft model").cached_bytes;
    assert!(hits(&engine) > 0);
    let again = run(&mut engine, std::slice::from_ref(&request), 0);
    assert_eq!(same(&first), same(&again));
    engine.evict_prefix(&request.tokens, 0);
    engine.evict_cached(usize::MAX);
    assert_eq!(hits(&engine), 0);
    assert!(engine.release_memory());
    assert_eq!(engine.draft_kv_stats().expect("a draft model").committed_bytes, 0);
    assert_eq!(same(&first), same(&run(&mut engine, std::slice::from_ref(&request), 0)));
}

#[test]
fn a_draft_model_needs_the_same_vocabulary() {
    let mut engine = engine(&tiny("q8_0"), 64, 1, 16);
    let (found, expected) = (model().config.n_vocab, engine.model().config.n_vocab);
    let refused = engine.set_draft_model(model(), &Inline).expect_err("another size");
    assert_eq!(refused, DraftModelError::VocabularySize { draft: found, target: expected });
    let encoder = Arc::new(reference::load("bert-cls-f16.gguf"));
    assert_eq!(engine.set_draft_model(encoder, &Inline), Err(DraftModelError::Encoder));
    let mut other = fs::read(fixtures().join("starling-tiny/starling-tiny-q4_0.gguf")).expect("a model");
    let at = other.windows(7).position(|bytes| bytes == b"<|pad|>").expect("a token");
    other[at + 4] = b'X';
    let other = Arc::new(Model::load(&other, &Inline).expect("a model"));
    let refused = engine.set_draft_model(other, &Inline).expect_err("another token");
    let expected = concat!(
        "token 3 of the draft model is \"<|paX|>\", expected \"<|pad|>\", as in the model: ",
        "their vocabularies must be the same"
    );
    assert_eq!(refused.to_string(), expected);
    assert!(engine.draft_model().is_none());
}

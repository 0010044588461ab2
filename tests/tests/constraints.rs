//! Constraints: the sampler picks only allowed tokens, and nothing else changes.

use std::sync::Arc;

use proptest::prelude::*;
use starling::engine::{FinishReason, Request};
use starling::error::RequestError;
use starling::model::Model;
use starling::sampler::{Constraint, ConstraintError, LogprobKind, SamplingOptions};
use starling_tests::sequences::{Seen, engine, model, run, same};

const N_CTX: usize = 128;

/// A random constraint: a hash of the tokens so far decides which may follow.
#[derive(Debug, Clone)]
struct Chance {
    seed: u64,
    n_vocab: usize,
    /// Allowed tokens per 1000.
    density: u64,
    /// Length in tokens at which a text is complete.
    length: usize,
    /// Length in tokens at which the constraint fails.
    fails: usize,
    tokens: Vec<u32>,
}

impl Chance {
    fn new(model: &Model, seed: u64, density: u64, length: usize) -> Chance {
        Chance { seed, n_vocab: model.config.n_vocab, density, length, fails: usize::MAX, tokens: Vec::new() }
    }

    /// A hash of the text and `about`, below 1000.
    fn draw(&self, about: u64) -> u64 {
        let mut hash = self.seed;
        for x in self.tokens.iter().map(|t| u64::from(*t)).chain([about]) {
            hash = (hash ^ x).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            hash ^= hash >> 29;
        }
        hash % 1000
    }

    fn allows(&self, token: u32) -> bool {
        self.draw(u64::from(token) + 1) < self.density
    }

    fn may_end(&self) -> bool {
        self.draw(0) < 250
    }
}

impl Constraint for Chance {
    fn fork(&self) -> Box<dyn Constraint> {
        Box::new(self.clone())
    }

    fn allow(&mut self, mask: &mut [u32]) -> Result<bool, ConstraintError> {
        assert!(mask.len() == self.n_vocab.div_ceil(32) && mask.iter().all(|word| *word == 0), "an empty mask");
        if self.tokens.len() == self.fails {
            return Err(ConstraintError::TooComplex);
        }
        for token in (0..self.n_vocab as u32).filter(|t| self.allows(*t)) {
            mask[token as usize / 32] |= 1 << (token % 32);
        }
        Ok(self.may_end())
    }

    fn accept(&mut self, token: u32) -> Result<bool, ConstraintError> {
        self.tokens.push(token);
        Ok(self.tokens.len() == self.length)
    }
}

fn request(sampling: SamplingOptions, chance: Option<Chance>) -> Request {
    let constraint = chance.map(|c| Arc::new(c) as Arc<dyn Constraint>);
    let prompt = (0..20).map(|i| 3 + (i * 37) % 300).collect();
    Request { sampling, constraint, max_tokens: Some(24), ..Request::new(prompt) }
}

fn sampling() -> impl Strategy<Value = SamplingOptions> {
    let filters = (
        prop_oneof![Just(0u32), 1u32..40],
        prop_oneof![Just(1.0f32), 0.05f32..1.0],
        prop_oneof![Just(1.0f32), 0.05f32..1.0],
        prop_oneof![Just(0.0f32), 0.001f32..0.5],
        prop_oneof![Just(0.0f32), 0.5f32..2.0],
    );
    (filters, prop_oneof![Just(1.0f32), 1.0f32..1.5], any::<u64>()).prop_map(|(f, repeat_penalty, seed)| {
        SamplingOptions {
            top_k: f.0,
            top_p: f.1,
            typical_p: f.2,
            min_p: f.3,
            temperature: f.4,
            repeat_penalty,
            seed,
            logprobs: LogprobKind::Raw,
            ..SamplingOptions::neutral()
        }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// Every token is allowed, answers end where the constraint allows it, and log-probabilities are the unconstrained
    /// model's. Answers are equal alone and in a batch, whether the others have constraints or not.
    #[test]
    fn only_what_is_allowed_is_picked(
        asked in prop::collection::vec((sampling(), any::<u64>(), 2u64..400, 1usize..30, any::<bool>()), 1..5),
        batch in 1usize..40,
        max_seqs in 1usize..5,
        apart in 0usize..4,
    ) {
        let model = model();
        let requests: Vec<Request> = asked.iter().enumerate().map(|(i, (sampling, seed, density, length, ignores))| {
            let chance = (i % 3 != 2).then(|| Chance::new(&model, *seed, *density, *length));
            Request { ignore_eos: *ignores, stop_tokens: vec![9, 200], ..request(sampling.clone(), chance) }
        }).collect();
        let alone: Vec<Seen> =
            requests.iter().flat_map(|r| run(&mut engine(&model, N_CTX, 1, 96), std::slice::from_ref(r), 0)).collect();
        prop_assert_eq!(same(&run(&mut engine(&model, N_CTX, max_seqs, batch), &requests, apart)), same(&alone));
        for (i, ((seen, asked), request)) in alone.iter().zip(&asked).zip(&requests).enumerate() {
            // the answer as a prompt has the log-probabilities it was sampled with
            let tokens: Vec<u32> = request.tokens.iter().copied().chain(seen.answer.iter().map(|a| a.0)).collect();
            let (max_tokens, prompt_logprobs, constraint) = (Some(0), true, None);
            let again = Request { tokens, max_tokens, prompt_logprobs, constraint, ..request.clone() };
            let again = run(&mut engine(&model, N_CTX, 1, 96), &[again], 0).remove(0);
            let again: Vec<f32> = again.prompt[request.tokens.len() - 1..].iter().map(|l| l.0).collect();
            prop_assert_eq!(again, seen.answer.iter().map(|a| a.1.0).collect::<Vec<_>>());
            if i % 3 == 2 {
                continue;
            }
            let mut chance = Chance::new(&model, asked.1, asked.2, asked.3);
            let is_end = |t: u32| {
                request.stop_tokens.contains(&t) || (!request.ignore_eos && model.tokenizer.is_end_of_generation(t))
            };
            let reason = seen.reason.expect("an end");
            for (at, (token, _)) in seen.answer.iter().enumerate() {
                if is_end(*token) {
                    prop_assert!(chance.may_end() && at + 1 == seen.answer.len());
                    prop_assert_eq!(reason, FinishReason::StopToken(*token));
                } else {
                    prop_assert!(chance.allows(*token), "{token} at {at}");
                    chance.tokens.push(*token);
                }
            }
            let n = chance.tokens.len();
            let anything = (0..chance.n_vocab as u32).any(|t| if is_end(t) { chance.may_end() } else { chance.allows(t) });
            match reason {
                FinishReason::Complete => prop_assert!(n == chance.length || (chance.may_end() && !anything)),
                FinishReason::Length => prop_assert!(n == 24 && n != chance.length),
                FinishReason::Constraint(e) => {
                    prop_assert!(e == ConstraintError::NoToken && !anything && !chance.may_end());
                }
                FinishReason::StopToken(_) => {}
                other => panic!("{other:?}"),
            }
        }
    }
}

#[test]
fn a_constraint_that_allows_everything_changes_nothing() {
    let model = model();
    let sampling = SamplingOptions { seed: 3, logprobs: LogprobKind::Raw, ..SamplingOptions::default() };
    let everything = Chance::new(&model, 0, 1000, usize::MAX);
    let free = Request { ignore_eos: true, ..request(sampling.clone(), None) };
    let bound = Request { ignore_eos: true, ..request(sampling, Some(everything)) };
    let seen = run(&mut engine(&model, N_CTX, 2, 64), &[free, bound], 0);
    let seen = same(&seen);
    assert_eq!(seen[0], seen[1]);
    assert_eq!(seen[0].reason, Some(FinishReason::Length));
}

#[test]
fn ends_have_names() {
    let model = model();
    let ends = |chance: Chance| {
        let request = Request { ignore_eos: true, ..request(SamplingOptions::greedy(), Some(chance)) };
        let seen = run(&mut engine(&model, N_CTX, 1, 64), &[request], 0).remove(0);
        (seen.answer.len(), seen.reason.expect("an end"))
    };
    let whole = Chance::new(&model, 5, 500, 7);
    assert_eq!(ends(whole.clone()), (7, FinishReason::Complete));
    // complete at exactly max_tokens
    assert_eq!(ends(Chance { length: 24, ..whole.clone() }), (24, FinishReason::Complete));
    assert_eq!(ends(Chance { length: 25, ..whole.clone() }), (24, FinishReason::Length));
    let too_complex = FinishReason::Constraint(ConstraintError::TooComplex);
    assert_eq!(ends(Chance { fails: 3, ..whole.clone() }), (3, too_complex));
    // no token is allowed: the text is complete, or is a dead end
    let nothing = |may_end: bool| {
        let empty = |seed| Chance::new(&model, seed, 0, 7);
        (0..).map(empty).find(|c| c.may_end() == may_end).expect("a seed")
    };
    assert_eq!(ends(nothing(true)), (0, FinishReason::Complete));
    assert_eq!(ends(nothing(false)), (0, FinishReason::Constraint(ConstraintError::NoToken)));
    assert_eq!(FinishReason::Complete.name(), "stop");
}

#[test]
fn a_receipt_of_a_constrained_answer_is_refused() {
    let model = model();
    let chance = Chance::new(&model, 1, 500, 7);
    let request = Request { receipt: true, ..request(SamplingOptions::greedy(), Some(chance)) };
    let refused = engine(&model, N_CTX, 1, 64).submit(request);
    assert!(matches!(refused, Err(RequestError::Option { name: "receipt", .. })), "{refused:?}");
}

//! Answers from updates, token counts, and the errors of updates.

use serde_json::json;
use starling::engine::FinishReason;
use starling::error::RequestError;
use starling::sampler::ConstraintError;
use starling_api::answer::{Answer, Usage, token_text, token_text_lossy};
use starling_api::error::ApiError;
use starling_api::update::{Failed, Update};

use crate::vocabulary::{bytes, tokenizer};

fn token(token: u32, text: &str) -> Update {
    Update::Token { token, text: text.into(), logprob: -0.5, top: vec![(token, -0.5), (0, -2.0)] }
}

fn done(text: &str, reason: FinishReason, n_tokens: usize) -> Update {
    Update::Done { text: text.into(), reason, n_tokens, receipt: None }
}

fn answer(updates: impl IntoIterator<Item = Update>) -> Answer {
    let mut answer = Answer::default();
    updates.into_iter().for_each(|update| answer.add(update));
    answer
}

#[test]
fn the_end_token_is_counted_and_no_part_of_the_answer() {
    let updates = |reason| [Update::Started, token(5, "a"), token(6, "é"), done("b", reason, 2)];
    let cut = answer(updates(FinishReason::Length));
    assert_eq!((cut.text.as_str(), cut.n_tokens, cut.finish_reason()), ("aéb", 2, "length"));
    let sampled: Vec<_> = cut.tokens.iter().map(|sampled| (sampled.token, sampled.n_bytes)).collect();
    assert_eq!(sampled, [(5, 1), (6, 2)]);
    let ended = answer(updates(FinishReason::StopToken(6)));
    assert_eq!((ended.tokens.len(), ended.n_tokens, ended.finish_reason()), (1, 2, "stop"));
    assert_eq!(Answer::default().finish_reason(), "length");
}

#[test]
fn log_probabilities_of_prompt_and_answer_are_counted() {
    let prompt = vec![(-1.0, vec![(1, -1.0)]), (-2.0, vec![])];
    let found = answer([Update::Prefilled { n_cached: 3, prompt }, token(5, "a")]);
    // each token, and its alternatives
    assert_eq!((found.n_cached, found.n_logprobs()), (3, 2 + 1 + 3));
}

#[test]
fn usage_counts_each_prompt_once() {
    let of = |n_tokens, n_cached, drafts, n_reasoning| Answer {
        n_tokens,
        n_cached,
        drafts,
        n_reasoning,
        ..Answer::default()
    };
    // two prompts with two answers each
    let answers = [of(1, 8, None, 0), of(2, 99, None, 0), of(3, 16, None, 0), of(4, 99, None, 0)];
    let usage = json!(Usage::new(20, 2, &answers));
    let expected = json!({
        "prompt_tokens": 20,
        "completion_tokens": 10,
        "total_tokens": 30,
        "prompt_tokens_details": { "cached_tokens": 24 },
    });
    assert_eq!(usage, expected);
    let answers = [of(5, 0, Some((2, 1)), 3), of(5, 0, Some((1, 1)), 0)];
    let details = json!(Usage::new(1, 1, &answers).completion_tokens_details);
    let expected = json!({ "accepted_prediction_tokens": 3, "rejected_prediction_tokens": 2, "reasoning_tokens": 3 });
    assert_eq!(details, expected);
    // no answers, and no division by the number of choices
    assert_eq!(Usage::new(3, 0, []).total_tokens, 3);
}

#[test]
fn texts_of_tokens_that_are_not_utf8() {
    let tokenizer = tokenizer(&[]);
    let [first, _] = bytes("é")[..] else { panic!("expected two tokens") };
    assert_eq!(token_text(&tokenizer, bytes("a")[0]), Ok("a"));
    assert_eq!(token_text(&tokenizer, first), Err("\\xc3".into()));
    assert_eq!(token_text_lossy(&tokenizer, first), "\u{fffd}");
    assert_eq!(token_text_lossy(&tokenizer, u32::MAX), "");
}

#[test]
fn errors_of_updates() {
    let context = RequestError::ContextLength { prompt: 9, max_tokens: usize::MAX, n_ctx: 8 };
    let capacity = RequestError::NoCapacity { what: "KV pages", needed: 2, free: 1 };
    let ended = |reason| done("", reason, 1);
    let cases = [
        (Update::Failed(Failed::QueueTimeout(1.5)), 503, "queue_timeout"),
        (Update::Failed(Failed::Timeout(2.0)), 504, "request_timeout"),
        (Update::Failed(Failed::Shutdown), 503, "shutting_down"),
        (Update::Failed(Failed::Worker), 500, "worker_failed"),
        (Update::Failed(context.into()), 400, "context_length_exceeded"),
        (Update::Failed(capacity.into()), 503, ""),
        (Update::Vector { vector: None }, 500, "not_finite"),
        (ended(FinishReason::NotFinite), 500, "not_finite"),
        (ended(FinishReason::Constraint(ConstraintError::Failed)), 500, "grammar_failed"),
        (ended(FinishReason::Constraint(ConstraintError::NoToken)), 400, "invalid_grammar"),
        (ended(FinishReason::Constraint(ConstraintError::TooComplex)), 400, "invalid_grammar"),
    ];
    for (update, status, code) in cases {
        let error = update.error().unwrap_or_else(|| panic!("{update:?} is no error"));
        assert_eq!((error.status, error.code.unwrap_or_default()), (status, code), "{update:?}");
        // clients that may try again are told when
        assert_eq!(error.retry.is_some(), status == 503, "{update:?}");
    }
    for update in [Update::Started, Update::Vector { vector: Some(vec![]) }, ended(FinishReason::Length)] {
        assert_eq!(update.error(), None::<ApiError>, "{update:?}");
    }
}

//! Generation options: ranges, defaults, and the engine's request.

use serde_json::{Value, json};
use starling::engine::{EngineOptions, Request, SnapshotOptions};
use starling::kernels::attention::{KvType, PAGE};
use starling::sampler::{ALL_TOKENS, Dry, LogprobKind, PenaltyScope, SamplingOptions};
use starling_api::error::ApiError;
use starling_api::openai::options::{Limits, Logprobs, Options, Priority, RequestPlan};
use starling_api::parse::parse;

use crate::check_error;
use crate::vocabulary::MODEL;

fn options(body: &Value) -> Options {
    parse(body.to_string().as_bytes()).expect("options")
}

fn sampling(body: &Value) -> Result<SamplingOptions, ApiError> {
    options(body).sampling(Logprobs::default(), 7)
}

#[test]
fn neutral_without_options() {
    let expected = SamplingOptions { repeat_last_n: ALL_TOKENS, seed: 7, ..SamplingOptions::neutral() };
    assert_eq!(sampling(&json!({})), Ok(expected));
    let logprobs = Logprobs { is_requested: true, n_top: 3, of_prompt: false };
    let found = options(&json!({})).sampling(logprobs, 0).expect("options");
    assert_eq!((found.logprobs, found.top_logprobs), (LogprobKind::Raw, 3));
}

/// -1 is a random seed; 2^64 - 1, which has the same bits, is a seed.
#[test]
fn seeds_are_signed_or_unsigned() {
    let cases = [
        ("-1", None),
        ("-1.0", None),
        ("null", None),
        ("-2", Some(u64::MAX - 1)),
        ("18446744073709551615", Some(u64::MAX)),
        ("7.0", Some(7)),
        ("0", Some(0)),
    ];
    for (text, expected) in cases {
        let options: Options = parse(format!("{{\"seed\":{text}}}").as_bytes()).expect("options");
        assert_eq!(options.seed.map(|seed| seed.0), expected, "{text}");
    }
}

#[test]
fn options_as_the_engine_takes_them() {
    let found = |body: Value| sampling(&body).expect("options");
    // a total probability of 0 keeps the most probable token
    let greedy = found(json!({ "top_p": 0, "temperature": 1.5 }));
    assert_eq!((greedy.top_p, greedy.temperature), (1.0, 0.0));
    assert_eq!(found(json!({ "top_k": -1 })).top_k, 0);
    assert_eq!(found(json!({ "top_k": 1u64 << 40 })).top_k, u32::MAX);
    assert_eq!(found(json!({ "repeat_last_n": 0, "repeat_penalty": 1.5 })).repeat_last_n, 0);
    assert_eq!(found(json!({ "repeat_penalty": 1.5 })).repeat_penalty, 1.5);
    assert_eq!(found(json!({ "logit_bias": { "5": -100, "7": 1.5 } })).logit_bias, [(5, -100.0), (7, 1.5)]);
    // without penalties the scope has no effect, and equal requests have equal receipts
    let scope = |body: Value| found(body).penalty_scope;
    assert_eq!(scope(json!({ "penalty_scope": "answer" })), PenaltyScope::All);
    assert_eq!(scope(json!({ "penalty_scope": "answer", "presence_penalty": 0.5 })), PenaltyScope::Answer);
    assert_eq!(scope(json!({ "penalty_scope": "all", "presence_penalty": 0.5 })), PenaltyScope::All);
    let dry = |multiplier, last_n| Dry { multiplier, base: 1.75, allowed_length: 2, last_n, breakers: Vec::new() };
    assert_eq!(found(json!({ "dry_multiplier": 0.5 })).dry, Some(dry(0.5, ALL_TOKENS)));
    assert_eq!(found(json!({ "dry_multiplier": 0.5, "dry_penalty_last_n": 64 })).dry, Some(dry(0.5, 64)));
    assert_eq!(found(json!({ "dry_multiplier": 0, "dry_base": 3 })).dry, None);
}

#[test]
fn options_out_of_range_are_named() {
    let breakers = |texts: &[&str]| json!({ "dry_sequence_breakers": texts });
    let cases = [
        (json!({ "temperature": 2.1 }), "temperature", "expected a number from 0 to 2"),
        (json!({ "temperature": -0.1 }), "temperature", "-0.1"),
        (json!({ "top_p": 1.01 }), "top_p", "expected a number from 0 to 1"),
        (json!({ "min_p": -1 }), "min_p", "expected a number from 0 to 1"),
        (json!({ "top_k": -2 }), "top_k", "expected -1, 0 or more"),
        (json!({ "frequency_penalty": 2.5 }), "frequency_penalty", "from -2 to 2"),
        (json!({ "presence_penalty": -2.5 }), "presence_penalty", "from -2 to 2"),
        (json!({ "repeat_last_n": -2 }), "repeat_last_n", "expected -1, 0 or more"),
        (json!({ "dry_multiplier": -1 }), "dry_multiplier", "a number of 0 or more"),
        // infinite as a number of 32 bits
        (json!({ "dry_multiplier": 1e39 }), "dry_multiplier", "inf"),
        (json!({ "dry_multiplier": 1, "dry_base": 1e39 }), "dry_base", "inf"),
        (json!({ "dry_base": 0.5 }), "dry_base", "a number of 1 or more"),
        (json!({ "dry_allowed_length": 0 }), "dry_allowed_length", "a number of 1 or more"),
        (json!({ "dry_penalty_last_n": -2 }), "dry_penalty_last_n", "a number of -1 or more"),
        (breakers(&[""]), "dry_sequence_breakers", "strings of 1 to 40 bytes"),
        (breakers(&[&"x".repeat(41)]), "dry_sequence_breakers", "strings of 1 to 40 bytes"),
        (breakers(&["x"; 17]), "dry_sequence_breakers", "at most 16 strings"),
        (json!({ "logit_bias": { "x": 1 } }), "logit_bias", "expected token IDs"),
        (json!({ "logit_bias": { "5": 101 } }), "logit_bias", "from -100 to 100"),
    ];
    for (body, param, part) in cases {
        check_error(&sampling(&body).expect_err("out of range"), 400, Some(param), part);
    }
}

#[test]
fn choices_priority_and_salt() {
    let n = |body: Value| options(&body).n_choices(4);
    assert_eq!((n(json!({})), n(json!({ "n": 4 }))), (Ok(1), Ok(4)));
    for wrong in [0, 5] {
        check_error(
            &n(json!({ "n": wrong })).expect_err("out of range"),
            400,
            Some("n"),
            "expected a number from 1 to 4",
        );
    }
    let priority = |value: Value| options(&json!({ "priority": value })).priority();
    for (value, expected) in [
        (json!(null), None),
        (json!("high"), Some(Priority::High)),
        (json!("normal"), Some(Priority::Normal)),
        (json!("low"), Some(Priority::Low)),
        (json!(-3), Some(Priority::High)),
        (json!(0), Some(Priority::Normal)),
        (json!(u64::MAX), Some(Priority::Low)),
    ] {
        assert_eq!(priority(value), Ok(expected));
    }
    check_error(&priority(json!("urgent")).expect_err("unknown"), 400, Some("priority"), "urgent");
    let long = "s".repeat(1025);
    let salted = options(&json!({ "cache_salt": &long[1..] }));
    assert_eq!(salted.check_salt(), Ok(Some(&long[1..])));
    let error = options(&json!({ "cache_salt": long }));
    check_error(
        &error.check_salt().expect_err("too long"),
        400,
        Some("cache_salt"),
        "1025 bytes, expected at most 1024",
    );
}

const N_CTX: usize = 4 * PAGE;

/// The request of a prompt of `n_prompt` tokens on a server whose limits `limit` changes.
fn request(body: &Value, n_prompt: usize, limit: impl FnOnce(&mut Limits<'_>)) -> Result<Request, ApiError> {
    let engine = EngineOptions {
        kv_type: KvType::F16,
        n_ctx: N_CTX,
        max_seqs: 1,
        batch_tokens: 64,
        prefill_chunk: 64,
        draft_rows: 0,
        kv_bytes: 1 << 20,
        snapshots: SnapshotOptions::default(),
        model_sha256: None,
    };
    let mut limits = Limits { model: &MODEL, engine: Some(&engine), n_pages: 100, max_prompt: 0, max_tokens: 0 };
    limit(&mut limits);
    let options = options(body);
    let plan = RequestPlan {
        sampling: options.sampling(Logprobs::default(), 0)?,
        constraint: None,
        prompt_logprobs: false,
        default_tokens: None,
        cache_salt: 0,
    };
    options.request(&limits, &plan, vec![1; n_prompt], "prompt")
}

#[test]
fn answers_are_as_long_as_asked_and_as_fits() {
    let max_tokens = |body: Value, n_prompt, limit: fn(&mut Limits<'_>)| {
        request(&body, n_prompt, limit).expect("a request").max_tokens
    };
    let none = |_: &mut Limits<'_>| {};
    // the last token is never computed
    assert_eq!(max_tokens(json!({}), 10, none), Some(N_CTX + 1 - 10));
    assert_eq!(max_tokens(json!({ "max_tokens": 3 }), 10, none), Some(3));
    assert_eq!(max_tokens(json!({ "max_tokens": 3, "max_completion_tokens": 5 }), 10, none), Some(5));
    assert_eq!(max_tokens(json!({ "max_tokens": u64::MAX }), N_CTX, none), Some(1));
    assert_eq!(max_tokens(json!({ "max_tokens": 9 }), 10, |limits| limits.max_tokens = 4), Some(4));
    // two pages of KV memory
    assert_eq!(max_tokens(json!({}), 10, |limits| limits.n_pages = 2), Some(2 * PAGE + 1 - 10));
}

#[test]
fn requests_that_do_not_fit_are_refused() {
    let none = |_: &mut Limits<'_>| {};
    let check = |body: Value, n_prompt, limit: fn(&mut Limits<'_>), param: &str, part: &str| {
        let error = request(&body, n_prompt, limit).expect_err("does not fit");
        check_error(&error, 400, Some(param), part);
        error.code
    };
    let too_long = Some("context_length_exceeded");
    assert_eq!(check(json!({}), N_CTX + 1, none, "prompt", "maximum context length is 64 tokens"), too_long);
    assert_eq!(check(json!({}), 9, |limits| limits.max_prompt = 8, "prompt", "takes at most 8"), too_long);
    assert_eq!(check(json!({}), 20, |limits| limits.n_pages = 1, "prompt", "KV cache holds 16 tokens"), too_long);
    check(json!({}), 0, none, "prompt", "the prompt is empty");
    check(json!({}), 1, |limits| limits.engine = None, "model", "cannot generate");
    check(json!({ "max_tokens": 0 }), 1, none, "max_tokens", "max_tokens is 0, expected at least 1");
    check(json!({ "max_completion_tokens": 0 }), 1, none, "max_completion_tokens", "expected at least 1");
    check(json!({ "stop": ["a", ""] }), 1, none, "stop", "an empty string");
    check(json!({ "stop": vec!["a"; 65] }), 1, none, "stop", "at most 64 strings");
    check(json!({ "stop": "a".repeat(1025) }), 1, none, "stop", "at most 1024 bytes");
    check(json!({ "repetition_penalty": 0 }), 1, none, "repetition_penalty", "repetition_penalty is 0");
    check(json!({ "typical_p": 0 }), 1, none, "typical_p", "above 0, at most 1");
    check(json!({ "logit_bias": { "5": 1, "05": 2 } }), 1, none, "logit_bias", "one entry per token");
    check(json!({ "receipt": true }), 1, none, "receipt", "SHA-256 of the model file was not computed");
}

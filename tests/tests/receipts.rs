//! Every receipt verifies on every instruction set, whatever the batch and cache state of the answer; a changed receipt
//! does not.

use std::fs;
use std::sync::Arc;

use serde_json::{Value, json};
use starling::engine::{Engine, EngineOptions, Event, FinishReason, Request, RequestId};
use starling::gguf::Gguf;
use starling::kernels::Cpu;
use starling::kernels::attention::KvType;
use starling::model::Model;
use starling::pool::Inline;
use starling::receipt::{Difference, Hex, Mismatch, Receipt, VerifyError, verify};
use starling::sampler::{ALL_TOKENS, Dry, LogprobKind, SamplingOptions};
use starling_tests::reference::fixtures;

const MODELS: [&str; 8] = [
    "starling-tiny/starling-tiny-q8_0.gguf",
    "starling-tiny/starling-tiny-q4_0.gguf",
    "reference/llama-k256-q4_k_m.gguf",
    "reference/llama-gqa-untied-f16.gguf",
    "reference/llama-yarn-f16.gguf",
    "reference/mistral-hd32-f16.gguf",
    "reference/qwen2-untied-f16.gguf",
    "reference/qwen3-tied-f16.gguf",
];
const SHA256: [u8; 32] = [9; 32];
const N_CTX: usize = 96;

fn model(name: &str) -> Arc<Model> {
    let file = fs::read(fixtures().join(name)).expect("a model");
    Arc::new(Model::load(&file, &Inline).expect("a model"))
}

fn engine(model: &Arc<Model>, kv_type: KvType, batch_tokens: usize) -> Engine {
    let options = EngineOptions {
        kv_type,
        n_ctx: N_CTX,
        max_seqs: 4,
        batch_tokens,
        prefill_chunk: batch_tokens,
        draft_rows: 0,
        kv_bytes: 6 * EngineOptions::kv_bytes_of(model, kv_type, N_CTX),
        snapshots: Default::default(),
        model_sha256: Some(SHA256),
    };
    Engine::new(Arc::clone(model), &Inline, options).expect("memory")
}

/// An answer, from its last event.
struct Answer {
    id: RequestId,
    reason: FinishReason,
    tokens: Vec<u32>,
    n_cached: usize,
    receipt: Option<Receipt>,
}

/// Runs all requests together; the answers in the order of submission.
fn answers(engine: &mut Engine, requests: Vec<Request>) -> Vec<Answer> {
    let (mut waiting, mut answers): (Vec<Request>, Vec<Answer>) = (requests.into_iter().rev().collect(), Vec::new());
    let (mut tokens, mut cached) = (Vec::new(), Vec::new());
    loop {
        while engine.active() < engine.options().max_seqs {
            let Some(request) = waiting.pop() else { break };
            engine.submit(request).expect("a valid request");
        }
        let n = engine.step(Cpu::detect(), &Inline, &mut |event| match event {
            Event::Prefilled { id, n_cached, .. } => cached.push((id, n_cached)),
            Event::Token { id, token, .. } => tokens.push((id, token)),
            Event::Done { id, reason, receipt, .. } => answers.push(Answer {
                id,
                reason,
                tokens: tokens.iter().filter(|t| t.0 == id).map(|t| t.1).collect(),
                n_cached: cached.iter().find(|c| c.0 == id).map_or(0, |c| c.1),
                receipt: receipt.map(|r| *r),
            }),
            Event::Computed { .. } | Event::Preempted { .. } | Event::Prompt { .. } | Event::Drafted { .. } => {}
        });
        if n == 0 {
            answers.sort_by_key(|a| a.id);
            return answers;
        }
    }
}

/// Requests with every kind of sampling option and finish reason.
fn requests(model: &Model) -> Vec<Request> {
    let n_vocab = model.config.n_vocab as u32;
    let prompt = |n: u32| (0..n).map(|i| (i * 37 + 11) % n_vocab).collect::<Vec<u32>>();
    let new = |n, max| Request { max_tokens: Some(max), receipt: true, ..Request::new(prompt(n)) };
    let dry = Dry { multiplier: 0.8, base: 1.75, allowed_length: 1, last_n: ALL_TOKENS, breakers: vec![vec![3]] };
    let penalties = SamplingOptions {
        repeat_penalty: 1.3,
        frequency_penalty: 0.1,
        presence_penalty: -0.2,
        dry: Some(dry),
        logit_bias: vec![(7, 2.5), (8, -100.0)],
        seed: u64::MAX,
        ..SamplingOptions::default()
    };
    let neutral = SamplingOptions { temperature: 1.3, typical_p: 0.9, seed: 5, ..SamplingOptions::neutral() };
    let logprobs =
        SamplingOptions { logprobs: LogprobKind::Final, top_logprobs: 3, seed: 1, ..SamplingOptions::default() };
    let neighbour = Request { receipt: false, ..new(23, 9) };
    vec![
        Request { sampling: SamplingOptions::greedy(), ..new(1, 1) },
        Request { sampling: SamplingOptions::greedy(), ignore_eos: true, ..new(40, 30) },
        neighbour,
        Request { sampling: penalties, ..new(17, 20) },
        Request { sampling: neutral, sequence: 3, ..new(33, 20) },
        Request { stop_tokens: (0..n_vocab).step_by(3).collect(), ..new(5, 40) },
        Request { stop: ["a", "e", " ", "i", "o", "t"].map(String::from).into(), ..new(9, 40) },
        Request { sampling: logprobs, max_tokens: None, ignore_eos: true, ..new(16, 1) },
        // the first prompts again, now from the prefix cache
        Request { sampling: SamplingOptions::greedy(), ignore_eos: true, ..new(40, 30) },
        Request { ignore_eos: true, ..new(N_CTX as u32, 1) },
        new(48, 12),
    ]
}

fn replay(model: &Model, cpu: Cpu, receipt: &Receipt) -> Result<(), VerifyError> {
    verify(model, &SHA256, cpu, &Inline, N_CTX, receipt)
}

#[test]
fn every_receipt_verifies() {
    let (mut ends, mut cached) = ([0; 3], 0);
    for name in MODELS {
        let model = model(name);
        for (kv_type, batch) in [(KvType::F16, 64), (KvType::F32, 7), (KvType::K8, 1)] {
            let requests = requests(&model);
            let mut engine = engine(&model, kv_type, batch);
            for (answer, request) in answers(&mut engine, requests.clone()).into_iter().zip(requests) {
                assert_eq!(answer.receipt.is_some(), request.receipt, "{name}");
                let Some(receipt) = answer.receipt else { continue };
                assert_eq!(receipt.output, answer.tokens, "{name}: every token picked is in the receipt");
                assert_eq!(receipt.request.prompt, request.tokens);
                // slow instruction sets run once
                let cpus = if batch == 64 { Cpu::available() } else { vec![Cpu::detect()] };
                for cpu in cpus {
                    let what = format!("{name}, {}, {request:?}, {:?} on {}", kv_type.name(), answer.reason, cpu.isa());
                    assert_eq!(replay(&model, cpu, &receipt), Ok(()), "{what}");
                }
                cached += answer.n_cached;
                match answer.reason {
                    FinishReason::StopToken(token) => {
                        assert_eq!(receipt.output.last(), Some(&token));
                        ends[0] += 1;
                    }
                    FinishReason::StopString(_) => ends[1] += 1,
                    FinishReason::Length => ends[2] += 1,
                    other => panic!("{name}: {}", other.name()),
                }
            }
        }
    }
    assert!(ends.iter().all(|&n| n > 3) && cached > 0, "every end, and cached prompts: {ends:?}, {cached}");
}

#[test]
fn the_neighbours_and_the_cache_are_not_in_a_receipt() {
    let model = model(MODELS[0]);
    let requests = requests(&model);
    let together = answers(&mut engine(&model, KvType::F16, 64), requests.clone());
    for (answer, request) in together.into_iter().zip(requests) {
        let alone = answers(&mut engine(&model, KvType::F16, 5), vec![request]);
        assert_eq!(alone[0].receipt, answer.receipt);
    }
}

#[test]
fn an_answer_that_ends_without_a_token_verifies() {
    let name = "reference/llama-tied-llama3rope-f32.gguf";
    let mut file = fs::read(fixtures().join(name)).expect("a model");
    let gguf = Gguf::parse(&file).expect("a model");
    let norm = gguf.tensors().iter().find(|t| t.name == "output_norm.weight").expect("a norm");
    let (at, len) = (norm.offset as usize, norm.len_bytes as usize);
    file[at..at + len].chunks_exact_mut(4).for_each(|w| w.copy_from_slice(&f32::MAX.to_le_bytes()));
    let model = Arc::new(Model::load(&file, &Inline).expect("a model"));
    for n in [1, 2, 40] {
        let request = Request { receipt: true, ..Request::new((1..=n).collect()) };
        let answer = answers(&mut engine(&model, KvType::F16, 64), vec![request]).remove(0);
        assert_eq!(answer.reason, FinishReason::NotFinite);
        let mut receipt = answer.receipt.expect("a receipt");
        assert!(receipt.output.is_empty());
        assert_eq!(replay(&model, Cpu::detect(), &receipt), Ok(()));
        // a token without a sampling step
        receipt.output.push(1);
        receipt.steps.push(receipt.steps[0]);
        let expected = VerifyError::Mismatch(Mismatch { step: 0, difference: Difference::NotFinite });
        assert_eq!(replay(&model, Cpu::detect(), &receipt), Err(expected));
    }
}

#[test]
fn a_changed_receipt_is_caught_at_its_step() {
    let model = model(MODELS[0]);
    let request = requests(&model).remove(3);
    let receipt = answers(&mut engine(&model, KvType::F16, 64), vec![request]).remove(0).receipt.expect("a receipt");
    let step = receipt.output.len() / 2;
    let check = |change: &dyn Fn(&mut Receipt)| {
        let mut changed = receipt.clone();
        change(&mut changed);
        replay(&model, Cpu::detect(), &changed).expect_err("a change that was not noticed")
    };
    let at = |step, difference| VerifyError::Mismatch(Mismatch { step, difference });
    let (expected, found) = (receipt.output[step], (receipt.output[step] + 1) % model.config.n_vocab as u32);
    assert_eq!(check(&|r| r.output[step] = found), at(step, Difference::Token { found, expected }));
    assert_eq!(check(&|r| r.steps[step + 1].0[7] ^= 1), at(step, Difference::State));
    assert_eq!(check(&|r| r.digest.0[31] ^= 1), at(receipt.output.len() - 1, Difference::Digest));
    assert_eq!(check(&|r| r.request.sampling.seed -= 1), at(0, Difference::Start));
    assert_eq!(check(&|r| r.request.sampling.top_k += 1), at(0, Difference::Start));
    let mut other = Hex(SHA256);
    other.0[0] ^= 1;
    assert_eq!(check(&|r| r.model.0[0] ^= 1), VerifyError::Model(other));
    let short = verify(&model, &SHA256, Cpu::detect(), &Inline, 20, &receipt);
    assert!(matches!(short, Err(VerifyError::Request(_))), "a replay beyond the bound is refused");
}

#[test]
fn without_a_digest_of_the_model_there_are_no_receipts() {
    let model = model(MODELS[0]);
    let options = EngineOptions { model_sha256: None, ..*engine(&model, KvType::F16, 8).options() };
    let mut engine = Engine::new(Arc::clone(&model), &Inline, options).expect("memory");
    assert!(engine.submit(Request { receipt: true, ..Request::new(vec![1]) }).is_err());
    assert!(engine.submit(Request::new(vec![1])).is_ok());
}

/// JSON pointers to all leaf values of a document.
fn leaves(value: &Value, way: &str, all: &mut Vec<String>) {
    match value {
        Value::Object(map) => map.iter().for_each(|(key, value)| leaves(value, &format!("{way}/{key}"), all)),
        Value::Array(list) => {
            (0..).zip(list).for_each(|(i, value): (usize, _)| leaves(value, &format!("{way}/{i}"), all))
        }
        _ => all.push(way.into()),
    }
}

#[test]
fn every_value_of_a_receipt_counts_and_there_is_nothing_else_in_it() {
    let model = model(MODELS[0]);
    let request = requests(&model).remove(3);
    let receipt = answers(&mut engine(&model, KvType::F16, 64), vec![request]).remove(0).receipt.expect("a receipt");
    let json = json!(receipt);
    let verifies = |json: Value| {
        serde_json::from_value::<Receipt>(json).is_ok_and(|receipt| replay(&model, Cpu::detect(), &receipt).is_ok())
    };
    assert!(verifies(json.clone()));
    let mut all = Vec::new();
    leaves(&json, "", &mut all);
    assert!(all.len() > 80 && all.iter().any(|way| way == "/request/sampling/top_logprobs"), "{all:?}");
    for way in all {
        let mut other = json.clone();
        let value = other.pointer_mut(&way).expect("a value");
        *value = match value {
            Value::String(text) => json!(text.replace(|c: char| c.is_ascii_digit(), "a") + "a"),
            Value::Bool(truth) => json!(!*truth),
            Value::Number(n) if n.is_f64() => json!(n.as_f64().map(|x| x + 0.125)),
            Value::Number(n) => json!(n.as_u64().map(|x| x.wrapping_add(1))),
            _ => json!(1),
        };
        assert!(!verifies(other), "{way} was changed");
    }
    for place in ["", "/request", "/request/sampling", "/request/sampling/dry"] {
        let mut other = json.clone();
        other.pointer_mut(place).expect("an object")["more"] = json!(1);
        assert!(!verifies(other), "{place} has more");
    }
}

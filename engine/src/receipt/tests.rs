use alloc::vec;
use alloc::vec::Vec;

use proptest::prelude::*;

use super::*;
use crate::error::RequestError;
use crate::kernels::Cpu;
use crate::kernels::attention::{KvMemory, PAGE};
use crate::model::{Exec, KvRef, Model, Run, ScratchSize};
use crate::pool::Inline;
use crate::sampler::{Dry, LogprobKind, Sampler};

const MODEL_SHA256: [u8; 32] = [7; 32];

fn model() -> Model {
    let file = include_bytes!("../../../fixtures/reference/llama-gqa-untied-f16.gguf");
    Model::load(file, &Inline).expect("a model")
}

/// Generates token by token, as the engine does.
fn answer(model: &Model, request: ReceiptRequest, n: usize) -> Receipt {
    let kv = model.kv_layout(request.kv_type);
    let n_ctx = request.prompt.len() + n;
    let pages: Vec<u32> = (0..n_ctx.div_ceil(PAGE) as u32).rev().collect();
    let mut memory = KvMemory::zeroed(&kv, pages.len()).expect("memory");
    let size = ScratchSize { rows: n_ctx, logits: 1, seqs: 1, n_ctx };
    let mut scratch = model.scratch(&Inline, request.kv_type, size).expect("memory");
    let mut sampler = Sampler::new(request.sampling.clone(), model.config.n_vocab).expect("options");
    let mut chain = Chain::start(&MODEL_SHA256, &request);
    let mut tokens = request.prompt.clone();
    tokens.iter().for_each(|t| sampler.accept(*t));
    let mut done = 0;
    for _ in 0..n {
        let run = Run { tokens: &tokens[done..], pos: done, pages: &pages, state: 0, n_logits: 1 };
        let exec = Exec { cpu: Cpu::detect(), pool: &Inline };
        let out = model.forward(exec, &[run], KvRef { layout: &kv, memory: &mut memory }, &mut scratch, None);
        done = tokens.len();
        let pick = sampler.pick(Cpu::detect(), out.logits(0), request.sequence, done as u64, None);
        sampler.accept(pick.token);
        chain.step(out.hidden(0), pick.token);
        tokens.push(pick.token);
    }
    let output = tokens.split_off(request.prompt.len());
    chain.receipt(&MODEL_SHA256, request, output)
}

fn request() -> ReceiptRequest {
    let dry = Dry { multiplier: 0.8, base: 1.75, allowed_length: 2, last_n: 64, breakers: vec![vec![3], vec![5, 6]] };
    let sampling = SamplingOptions {
        dry: Some(dry),
        logit_bias: vec![(5, 0.5)],
        repeat_penalty: 1.1,
        seed: 42,
        logprobs: LogprobKind::None,
        ..SamplingOptions::default()
    };
    ReceiptRequest { prompt: (1..40).collect(), sampling, sequence: 3, kv_type: KvType::K8, long_context: false }
}

#[test]
fn an_answer_token_by_token_verifies_at_once_on_every_instruction_set() {
    let model = model();
    for kv_type in KvType::ALL {
        for n in [0, 1, 60] {
            let receipt = answer(&model, ReceiptRequest { kv_type, ..request() }, n);
            for cpu in Cpu::available() {
                assert_eq!(verify(&model, &MODEL_SHA256, cpu, &Inline, 4096, &receipt), Ok(()));
            }
        }
    }
}

fn rejected(model: &Model, receipt: &Receipt) -> VerifyError {
    verify(model, &MODEL_SHA256, Cpu::detect(), &Inline, 4096, receipt).expect_err("a change that was not noticed")
}

fn at(step: usize, difference: Difference) -> VerifyError {
    VerifyError::Mismatch(Mismatch { step, difference })
}

#[test]
fn a_changed_request_is_caught_at_the_start() {
    let model = model();
    let receipt = answer(&model, request(), 8);
    type Change = fn(&mut ReceiptRequest);
    let changes: [Change; 21] = [
        |r| r.prompt[3] += 1,
        |r| r.prompt.truncate(38),
        |r| r.sequence += 1,
        |r| r.kv_type = KvType::F32,
        |r| r.sampling.seed += 1,
        |r| r.sampling.temperature += 0.1,
        |r| r.sampling.top_k += 1,
        |r| r.sampling.top_p = 0.5,
        |r| r.sampling.min_p = 0.5,
        |r| r.sampling.typical_p = 0.5,
        |r| r.sampling.repeat_penalty = 1.2,
        |r| r.sampling.repeat_last_n += 1,
        |r| r.sampling.frequency_penalty = 0.1,
        |r| r.sampling.presence_penalty = 0.1,
        |r| r.sampling.dry = None,
        |r| r.sampling.dry.as_mut().expect("dry").base = 2.0,
        |r| r.sampling.dry.as_mut().expect("dry").breakers = vec![vec![3, 5], vec![6]],
        |r| r.sampling.logit_bias[0].1 = 0.25,
        |r| r.sampling.logit_bias.clear(),
        |r| r.sampling.logprobs = LogprobKind::Raw,
        |r| r.sampling.top_logprobs = 5,
    ];
    for change in changes {
        let mut other = receipt.clone();
        change(&mut other.request);
        assert_eq!(rejected(&model, &other), at(0, Difference::Start));
    }
}

#[test]
fn a_changed_header_is_caught_without_a_replay() {
    let model = model();
    let receipt = answer(&model, request(), 4);
    let model_digest = Receipt { model: Hex([8; 32]), ..receipt.clone() };
    assert_eq!(rejected(&model, &model_digest), VerifyError::Model(Hex([8; 32])));
    let numerics = Receipt { numerics: 0, ..receipt.clone() };
    assert_eq!(rejected(&model, &numerics), VerifyError::Numerics(0));
    let format = Receipt { format: "other".into(), ..receipt.clone() };
    assert_eq!(rejected(&model, &format), VerifyError::Format("other".into()));
    let short = Receipt { output: vec![1], ..receipt.clone() };
    assert_eq!(rejected(&model, &short), VerifyError::Steps { tokens: 1, steps: 5 });
    let mut unknown = receipt.clone();
    unknown.output[1] = u32::MAX;
    let n_vocab = model.config.n_vocab;
    let error = RequestError::Token { token: u32::MAX, at: request().prompt.len() + 1, n_vocab };
    assert_eq!(rejected(&model, &unknown), VerifyError::Request(error));
    let empty = Receipt { request: ReceiptRequest { prompt: vec![], ..request() }, ..receipt };
    assert_eq!(rejected(&model, &empty), VerifyError::Request(RequestError::EmptyPrompt));
}

#[test]
fn a_changed_step_is_named() {
    let model = model();
    let n = 70;
    let receipt = answer(&model, request(), n);
    let n_vocab = model.config.n_vocab as u32;
    proptest!(ProptestConfig::with_cases(24), |(step in 0..n, bit in 0..64usize, other in 1..n_vocab)| {
        let mut token = receipt.clone();
        token.output[step] = (token.output[step] + other) % n_vocab;
        let (found, expected) = (token.output[step], receipt.output[step]);
        prop_assert_eq!(rejected(&model, &token), at(step, Difference::Token { found, expected }));
        let mut state = receipt.clone();
        state.steps[step + 1].0[bit / 8] ^= 1 << (bit % 8);
        prop_assert_eq!(rejected(&model, &state), at(step, Difference::State));
        let mut digest = receipt.clone();
        digest.digest.0[bit / 8] ^= 1 << (bit % 8);
        prop_assert_eq!(rejected(&model, &digest), at(n - 1, Difference::Digest));
    });
}

#[cfg(feature = "serde")]
#[test]
fn json_keeps_every_bit() {
    let receipt = answer(&model(), request(), 5);
    let json = serde_json::to_string(&receipt).expect("json");
    assert_eq!(serde_json::from_str::<Receipt>(&json).expect("a receipt"), receipt);
    let broken = json.replacen("\"digest\":\"", "\"digest\":\"x", 1);
    assert!(serde_json::from_str::<Receipt>(&broken).is_err());
}

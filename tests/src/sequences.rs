//! Helpers for tests with several sequences at once: a decoder, an engine, and recorded results.

use std::sync::Arc;

use starling::draft::Speculation;
use starling::engine::{Engine, EngineOptions, Event, FinishReason, Request, RequestId, TokenLogprobs};
use starling::error::RequestError;
use starling::kernels::Cpu;
use starling::kernels::attention::{KvType, PAGE};
use starling::model::Model;
use starling::pool::Inline;
use starling::receipt::Receipt;

use crate::reference;

/// A plain decoder: no experts, windows or soft caps.
///
/// # Panics
/// If it does not load.
pub fn model() -> Arc<Model> {
    Arc::new(reference::load("mistral-hd32-f16.gguf"))
}

/// An engine with KV pages for `max_seqs` sequences of `n_ctx` tokens, and receipts enabled.
///
/// # Panics
/// If there is no memory.
pub fn engine(model: &Arc<Model>, n_ctx: usize, max_seqs: usize, batch_tokens: usize) -> Engine {
    engine_with_pages(model, n_ctx, max_seqs, batch_tokens, max_seqs * n_ctx.div_ceil(PAGE))
}

/// [`engine`] with `pages` KV pages.
///
/// # Panics
/// If there is no memory.
pub fn engine_with_pages(
    model: &Arc<Model>,
    n_ctx: usize,
    max_seqs: usize,
    batch_tokens: usize,
    pages: usize,
) -> Engine {
    engine_of_type(model, KvType::F16, n_ctx, max_seqs, batch_tokens, pages)
}

/// [`engine_with_pages`] with pages of another type.
///
/// # Panics
/// If there is no memory.
pub fn engine_of_type(
    model: &Arc<Model>,
    kv_type: KvType,
    n_ctx: usize,
    max_seqs: usize,
    batch_tokens: usize,
    pages: usize,
) -> Engine {
    let kv_bytes = EngineOptions::kv_bytes_of(model, kv_type, pages * PAGE);
    let options = EngineOptions {
        kv_type,
        n_ctx,
        max_seqs,
        batch_tokens,
        prefill_chunk: batch_tokens.div_ceil(2),
        draft_rows: 24,
        kv_bytes,
        snapshots: Default::default(),
        model_sha256: Some([7; 32]),
    };
    Engine::new(Arc::clone(model), &Inline, options).expect("memory")
}

/// A request for exactly `max_tokens` tokens.
pub fn request(tokens: &[u32], max_tokens: usize, seed: u64) -> Request {
    let mut request = Request::new(tokens.to_vec());
    request.max_tokens = Some(max_tokens);
    request.ignore_eos = true;
    request.sampling.seed = seed;
    request
}

/// A prompt for models of [`crate::architecture`].
pub fn prompt(n: usize, seed: usize) -> Vec<u32> {
    (0..n).map(|i| ((i * i * 31 + i * 7 + seed * 13) % 120) as u32 + 4).collect()
}

/// Recorded result of a request.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Seen {
    /// Log-probabilities of the prompt tokens after the first, if requested.
    pub prompt: Vec<TokenLogprobs>,
    /// Generated tokens.
    pub answer: Vec<(u32, TokenLogprobs)>,
    /// Prompt tokens found in the prefix cache.
    pub n_cached: usize,
    /// Step of the first token.
    pub first: usize,
    /// Number of preemptions.
    pub preempted: usize,
    /// Tokens drafted.
    pub n_drafted: usize,
    /// Drafted tokens that were sampled.
    pub n_accepted: usize,
    /// The receipt, if requested.
    pub receipt: Option<Receipt>,
    /// The text of all events.
    pub text: String,
    /// `None` while it runs, or if it was cancelled.
    pub reason: Option<FinishReason>,
}

/// Runs requests, the `i`th submitted before step `i * apart` or once there is room.
///
/// # Panics
/// If one is refused.
pub fn run(engine: &mut Engine, requests: &[Request], apart: usize) -> Vec<Seen> {
    run_without(engine, requests, apart, None)
}

/// [`run`], with the cancellation of one request before a step: `gone` has the indices of both.
///
/// # Panics
/// If one is refused.
pub fn run_without(engine: &mut Engine, requests: &[Request], apart: usize, gone: Option<(usize, usize)>) -> Vec<Seen> {
    let mut ids: Vec<RequestId> = Vec::new();
    let mut all = vec![Seen::default(); requests.len()];
    for step in 0.. {
        while ids.len() < requests.len() && ids.len() * apart <= step && engine.active() < engine.options().max_seqs {
            match engine.submit(requests[ids.len()].clone()) {
                Ok(id) => ids.push(id),
                Err(RequestError::NoCapacity { .. }) if !engine.is_idle() => break,
                Err(e) => panic!("{e}"),
            }
        }
        if let Some((i, _)) = gone.filter(|gone| gone.1 == step)
            && let Some(id) = ids.get(i)
        {
            assert_eq!(engine.cancel(*id), all[i].reason.is_none());
        }
        let at = |id| ids.iter().position(|i| *i == id).expect("a request");
        engine.step(Cpu::detect(), &Inline, &mut |event| match event {
            Event::Computed { .. } => {}
            Event::Drafted { id, n_drafted, n_accepted } => {
                assert!(n_accepted <= n_drafted);
                let seen = &mut all[at(id)];
                (seen.n_drafted, seen.n_accepted) = (seen.n_drafted + n_drafted, seen.n_accepted + n_accepted);
            }
            Event::Preempted { id } => all[at(id)].preempted += 1,
            Event::Prompt { id, logprobs } => {
                assert!(all[at(id)].answer.is_empty());
                all[at(id)].prompt.extend(logprobs);
            }
            Event::Prefilled { id, n_cached, .. } => all[at(id)].n_cached = n_cached,
            Event::Token { id, token, text, logprob, top } => {
                let seen = &mut all[at(id)];
                seen.text.push_str(&text);
                if seen.answer.is_empty() {
                    seen.first = step;
                }
                seen.answer.push((token, (logprob, top)));
            }
            Event::Done { id, text, reason, n_tokens, receipt } => {
                let seen = &mut all[at(id)];
                assert_eq!(seen.answer.len(), n_tokens);
                seen.text.push_str(&text);
                seen.receipt = receipt.map(|receipt| *receipt);
                seen.reason = Some(reason);
            }
        });
        if ids.len() == requests.len() && engine.is_idle() {
            break;
        }
    }
    all
}

/// Asserts that requests have the same answers together as alone, in engines that `engine` makes for `max_seqs`,
/// `batch_tokens` and `pages`. Together they run twice, the `i`th from step `i * apart`; every second one drafts its answer
/// with some wrong tokens.
///
/// # Panics
/// If an answer differs.
pub fn check_together(
    engine: impl Fn(usize, usize, usize) -> Engine,
    mut requests: Vec<Request>,
    (batch_tokens, pages, apart): (usize, usize, usize),
) {
    let alone: Vec<Seen> =
        requests.iter().map(|r| run(&mut engine(1, 512, 40), std::slice::from_ref(r), 0).remove(0)).collect();
    for (request, seen) in requests.iter_mut().zip(&alone).step_by(2) {
        let prediction = seen.answer.iter().enumerate().map(|(i, (t, _))| if i % 7 == 5 { 5 } else { *t }).collect();
        request.speculation = Speculation { max: 6, min_acceptance: 0.0, prediction, ..Speculation::default() };
    }
    let mut shared = engine(3, batch_tokens, pages);
    for _ in 0..2 {
        assert_eq!(same(&run(&mut shared, &requests, apart)), same(&alone));
    }
}

/// The results without the fields that depend on timing and cache state.
pub fn same(seen: &[Seen]) -> Vec<Seen> {
    seen.iter()
        .cloned()
        .map(|s| Seen { first: 0, preempted: 0, n_cached: 0, n_drafted: 0, n_accepted: 0, ..s })
        .collect()
}

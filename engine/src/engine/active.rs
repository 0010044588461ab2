//! A request on its way: what is known of it, and the picking of its tokens.

use alloc::boxed::Box;
use alloc::string::String;
use alloc::vec::Vec;
use core::mem;

use super::EngineOptions;
use super::request::{Event, FinishReason, Request, RequestId};
use crate::kernels::Cpu;
use crate::kernels::attention::PAGE;
use crate::kv::{KvArena, SeqPages};
use crate::model::Model;
use crate::receipt::{Chain, Receipt, ReceiptRequest};
use crate::sampler::{Guide, LogprobKind, Sampler, SamplingOptions};
use crate::text::TextStream;

/// A request on its way.
pub(super) struct Active {
    pub(super) id: RequestId,
    pub(super) request: Request,
    pub(super) sampler: Sampler,
    pub(super) text: TextStream,
    /// None while it is preempted.
    pub(super) pages: SeqPages,
    /// Tokens of the prompt that were found in the cache when it came.
    pub(super) n_cached: usize,
    /// Page of each [`PAGE`] positions, where pages are used again and again; otherwise they are those of `pages`.
    pub(super) ring: Option<Vec<u32>>,
    /// Prompt and answer so far.
    pub(super) tokens: Vec<u32>,
    pub(super) n_prompt: usize,
    /// Tokens whose keys and values are in the pages.
    pub(super) n_done: usize,
    /// Tokens of prompt and answer, at most.
    pub(super) limit: usize,
    /// What the answer has to be, if that is asked for.
    pub(super) guide: Option<Guide>,
    /// Of the answer so far, if a receipt was asked for.
    pub(super) chain: Option<Chain>,
    /// The token that ended the answer, which is not among `tokens`.
    pub(super) end: Option<u32>,
    /// Tokens of the prompt whose successors have their log-probabilities, if those are asked for.
    pub(super) n_scored: usize,
    /// Whether all numbers of the prompt's log-probabilities were.
    pub(super) is_finite: bool,
}

impl Active {
    /// Gives its pages back; those that are full stay known to later prompts.
    pub(super) fn give_up_pages(&mut self, arena: &mut KvArena) {
        if self.ring.is_none() {
            arena.publish(&self.pages, &self.tokens[..self.n_done], self.request.cache_salt);
        }
        arena.release(mem::take(&mut self.pages));
        self.n_done = 0;
    }

    /// Whether it gave up its pages.
    pub(super) fn is_preempted(&self) -> bool {
        self.pages.pages.is_empty()
    }

    /// Whether it may need more pages than it has now.
    pub(super) fn may_grow(&self) -> bool {
        // the last token is not computed
        !self.is_preempted() && self.ring.is_none() && (self.limit - 1).div_ceil(PAGE) > self.pages.pages.len()
    }

    /// Tokens that are known and can be computed.
    pub(super) fn waiting(&self) -> usize {
        if self.is_preempted() { 0 } else { self.tokens.len() - self.n_done }
    }

    /// Whether a token is picked once `n` more are computed.
    pub(super) fn picks_after(&self, n: usize) -> bool {
        self.n_done + n == self.tokens.len() && self.tokens.len() < self.limit
    }

    /// Picks the next token; returns the final event if the answer is complete.
    pub(super) fn pick(
        &mut self,
        model: &Model,
        cpu: Cpu,
        hidden: &[f32],
        logits: &[f32],
        sink: &mut dyn FnMut(Event),
    ) -> Option<Event> {
        let n_tokens = self.tokens.len() - self.n_prompt;
        if !hidden.iter().chain(logits).all(|v| v.is_finite()) {
            return Some(self.done(FinishReason::NotFinite, n_tokens));
        }
        if let Some(guide) = &mut self.guide {
            let model_ends = if self.request.ignore_eos { &[] } else { model.tokenizer.end_tokens() };
            match guide.look(model_ends.iter().chain(&self.request.stop_tokens).copied()) {
                Ok(true) => {}
                Ok(false) => return Some(self.done(FinishReason::Complete, n_tokens)),
                Err(e) => return Some(self.done(FinishReason::Constraint(e), n_tokens)),
            }
        }
        let allowed = self.guide.as_ref().map(Guide::mask);
        let pick = self.sampler.pick(cpu, logits, self.request.sequence, self.tokens.len() as u64, allowed);
        let token = pick.token;
        if let Some(chain) = &mut self.chain {
            chain.step(hidden, token);
        }
        let ends = !self.request.ignore_eos && model.tokenizer.is_end_of_generation(token);
        if ends || self.request.stop_tokens.contains(&token) {
            self.end = Some(token);
            sink(Event::Token { id: self.id, token, text: String::new(), logprob: pick.logprob, top: pick.top });
            return Some(self.done(FinishReason::StopToken(token), n_tokens + 1));
        }
        self.sampler.accept(token);
        self.tokens.push(token);
        let bytes = match model.tokenizer.piece(token) {
            Some(bytes) if !model.tokenizer.is_control(token) => bytes,
            _ => &[],
        };
        let piece = self.text.push(bytes);
        sink(Event::Token { id: self.id, token, text: piece.text, logprob: pick.logprob, top: pick.top });
        if let Some(stop) = piece.stopped {
            // what came before the stop string was sent with its last token
            return Some(Event::Done {
                id: self.id,
                text: String::new(),
                reason: FinishReason::StopString(stop),
                n_tokens: n_tokens + 1,
                receipt: None,
            });
        }
        match self.guide.as_mut().map(|guide| guide.accept(token)) {
            Some(Ok(true)) => return Some(self.done(FinishReason::Complete, n_tokens + 1)),
            Some(Err(e)) => return Some(self.done(FinishReason::Constraint(e), n_tokens + 1)),
            _ => {}
        }
        if self.tokens.len() == self.limit {
            return Some(self.done(FinishReason::Length, n_tokens + 1));
        }
        None
    }

    /// The final event.
    pub(super) fn done(&mut self, reason: FinishReason, n_tokens: usize) -> Event {
        let piece = self.text.finish();
        let reason = piece.stopped.map_or(reason, FinishReason::StopString);
        Event::Done { id: self.id, text: piece.text, reason, n_tokens, receipt: None }
    }

    /// The receipt of the complete answer, if one was asked for.
    pub(super) fn receipt(&mut self, model: &Model, options: &EngineOptions) -> Option<Box<Receipt>> {
        let (chain, sha256) = (self.chain.take()?, options.model_sha256?);
        let request = asked(&self.request, model, options);
        let output = self.tokens[self.n_prompt..].iter().copied().chain(self.end).collect();
        Some(Box::new(chain.receipt(&sha256, request, output)))
    }
}

/// What a receipt says of a request.
pub(super) fn asked(request: &Request, model: &Model, options: &EngineOptions) -> ReceiptRequest {
    let Request { tokens, sampling, sequence, .. } = request;
    ReceiptRequest {
        prompt: tokens.clone(),
        // what was told of tokens changes none
        sampling: SamplingOptions { logprobs: LogprobKind::None, top_logprobs: 0, ..sampling.clone() },
        sequence: *sequence,
        kv_type: options.kv_type,
        long_context: model.is_long_context(options.n_ctx),
    }
}

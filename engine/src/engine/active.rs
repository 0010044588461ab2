//! An accepted request: its state, and how its next token is sampled.

use alloc::boxed::Box;
use alloc::string::String;
use alloc::vec::Vec;
use core::mem;

use super::EngineOptions;
use super::request::{Event, FinishReason, Request, RequestId};
use crate::draft::Speculator;
use crate::kernels::Cpu;
use crate::kernels::attention::PAGE;
use crate::kv::{KvArena, SeqPages};
use crate::model::Model;
use crate::receipt::{Chain, Receipt, ReceiptRequest};
use crate::sampler::{Guide, LogprobKind, Sampler, SamplingOptions};
use crate::text::TextStream;

/// An accepted request, running or preempted.
pub(super) struct ActiveRequest {
    pub(super) id: RequestId,
    pub(super) request: Request,
    pub(super) sampler: Sampler,
    pub(super) text: TextStream,
    /// Empty while the request is preempted.
    pub(super) pages: SeqPages,
    /// Prompt tokens found in the prefix cache at submission.
    pub(super) n_cached: usize,
    /// With a ring of pages: the page of each [`PAGE`] positions, with repetitions. Otherwise `pages` has them.
    pub(super) ring: Option<Vec<u32>>,
    /// Prompt and generated tokens.
    pub(super) tokens: Vec<u32>,
    pub(super) n_prompt: usize,
    /// Tokens whose keys and values are in the pages.
    pub(super) n_computed: usize,
    /// Pages that [`Engine::publish_running`](super::Engine::publish_running) has seen.
    pub(super) n_published: usize,
    /// Tokens before the last snapshot taken while decoding; the next one replaces it.
    pub(super) tail_snapshot: Option<usize>,
    /// Maximal number of prompt and generated tokens.
    pub(super) max_len: usize,
    /// State of the request's constraint.
    pub(super) guide: Option<Guide>,
    /// Speculative decoding, if the request wants it.
    pub(super) speculator: Option<Speculator>,
    /// Hash chain of the generated tokens, if the request wants a receipt.
    pub(super) chain: Option<Chain>,
    /// The end or stop token that ended the request; it is not in `tokens`.
    pub(super) end_token: Option<u32>,
    /// Prompt tokens whose rows have given log-probabilities, if the request wants those.
    pub(super) n_scored: usize,
    /// Whether all logits of the scored prompt rows were finite.
    pub(super) is_finite: bool,
    /// The last event, if a token of [`Request::generated`] has ended the request.
    pub(super) done: Option<Event>,
}

impl ActiveRequest {
    /// Releases the pages. Full pages stay in the prefix cache.
    pub(super) fn release_pages(&mut self, arena: &mut KvArena) {
        if self.ring.is_none() {
            arena.publish(&self.pages, &self.tokens[..self.n_computed], self.request.cache_salt);
        }
        if let Some(end) = self.tail_snapshot {
            arena.note_snapshot(&self.tokens[..end], self.request.cache_salt);
        }
        arena.release(mem::take(&mut self.pages));
        (self.n_computed, self.n_published, self.tail_snapshot) = (0, 0, None);
    }

    /// The next token count at which the computation of known tokens pauses for a snapshot of the recurrent state: every
    /// `every` tokens, where the prompt leaves a cached prefix, and at its last page boundaries.
    pub(super) fn next_snapshot(&self, every: usize) -> usize {
        let (n, all) = (self.n_computed, self.tokens.len());
        let ends = [self.pages.n_matched, (all - 1) / PAGE * PAGE, all / PAGE * PAGE, all];
        let next = ends.into_iter().filter(|&end| end > n).min().unwrap_or(all);
        next.min((n / every + 1).saturating_mul(every))
    }

    /// Takes a snapshot of the recurrent state after a batch, if one is due. While decoding, at each page boundary.
    pub(super) fn take_snapshot(&mut self, arena: &mut KvArena, every: usize) {
        let (end, all) = (self.n_computed, self.tokens.len());
        if end == 0 || !end.is_multiple_of(PAGE) {
            return;
        }
        let is_regular = end == self.pages.n_matched || end.is_multiple_of(every);
        if !is_regular && end + PAGE < all {
            return;
        }
        let is_kept = is_regular || end <= self.n_prompt;
        arena.snapshot(&self.pages, &self.tokens[..end], self.request.cache_salt);
        if is_kept {
            arena.note_snapshot(&self.tokens[..end], self.request.cache_salt);
        }
        if let Some(last) = self.tail_snapshot.take() {
            arena.drop_snapshot(&self.pages, last);
        }
        self.tail_snapshot = (!is_kept).then_some(end);
    }

    pub(super) fn is_preempted(&self) -> bool {
        self.pages.pages.is_empty()
    }

    /// Whether the request may need more pages than it has now.
    pub(super) fn may_need_pages(&self) -> bool {
        // - 1: the last token generated is never input
        !self.is_preempted() && self.ring.is_none() && (self.max_len - 1).div_ceil(PAGE) > self.pages.pages.len()
    }

    /// Tokens that the next batches can compute: 1 when decoding, more during prefill, 0 while preempted.
    pub(super) fn n_pending(&self) -> usize {
        if self.is_preempted() { 0 } else { self.tokens.len() - self.n_computed }
    }

    /// Whether a token is sampled after `n` more tokens are computed.
    pub(super) fn samples_after(&self, n: usize) -> bool {
        self.n_computed + n == self.tokens.len() && self.tokens.len() < self.max_len
    }

    /// Maximal number of draft tokens after the next row; `None` if that row samples no token, or without speculation.
    pub(super) fn max_draft(&self, arena: &KvArena) -> Option<usize> {
        self.speculator.as_ref().filter(|_| self.n_pending() == 1 && self.samples_after(1) && self.is_finite)?;
        // the row of the last draft token samples the last token of the answer
        let left = self.max_len - 1 - self.tokens.len();
        Some(if self.ring.is_some() { left } else { left.min(arena.free_positions(&self.pages)) })
    }

    /// After a draft of `n_rows` rows that began at token `start`: keeps the recurrent state if all were accepted.
    /// Otherwise returns to the state before them; the accepted tokens are computed again.
    pub(super) fn settle_draft(&mut self, arena: &mut KvArena, start: usize, n_rows: usize, every: usize) {
        let keeps = self.n_computed == start + n_rows;
        arena.settle_state(&mut self.pages, keeps);
        if keeps {
            self.take_snapshot(arena, every);
        } else {
            self.n_computed = start;
        }
    }

    /// Whether the last token equals the `i`th draft token, from 1.
    pub(super) fn is_drafted(&self, i: usize) -> bool {
        self.speculator.as_ref().and_then(|s| s.rows().get(i)) == self.tokens.last()
    }

    /// Ends the draft of a step before which there were `n_before` tokens: reports and learns what was accepted. `cost` is
    /// the cost of the step in those of the same step without drafts.
    pub(super) fn end_draft(&mut self, n_drafted: usize, n_before: usize, cost: f32, sink: &mut dyn FnMut(Event)) {
        let Some(speculator) = &mut self.speculator else { return };
        if n_drafted > 0 {
            let pairs = speculator.rows()[1..].iter().zip(&self.tokens[n_before..]);
            let n_accepted = pairs.take_while(|(drafted, token)| drafted == token).count();
            sink(Event::Drafted { id: self.id, n_drafted, n_accepted });
        }
        speculator.learn(&self.tokens[n_before..], cost);
    }

    /// Samples the next token and emits it. Returns the final event if the request has ended.
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
            return Some(self.final_event(FinishReason::NotFinite, n_tokens));
        }
        if let Some(guide) = &mut self.guide {
            let model_ends = if self.request.ignore_eos { &[] } else { model.tokenizer.end_tokens() };
            match guide.update_mask(model_ends.iter().chain(&self.request.stop_tokens).copied()) {
                Ok(true) => {}
                Ok(false) => return Some(self.final_event(FinishReason::Complete, n_tokens)),
                Err(e) => return Some(self.final_event(FinishReason::Constraint(e), n_tokens)),
            }
        }
        let allowed = self.guide.as_ref().map(Guide::mask);
        let pick = self.sampler.pick(cpu, logits, self.request.sequence, self.tokens.len() as u64, allowed);
        let token = pick.token;
        if let Some(chain) = &mut self.chain {
            chain.step(hidden, token);
        }
        let (text, done) = self.append(model, token);
        sink(Event::Token { id: self.id, token, text, logprob: pick.logprob, top: pick.top });
        done
    }

    /// Replays [`Request::generated`]: the state becomes that after the last of its tokens.
    pub(super) fn replay(&mut self, model: &Model) {
        for token in mem::take(&mut self.request.generated) {
            if self.done.is_some() {
                return;
            }
            if let Some(guide) = &mut self.guide {
                // a mask that fails or allows nothing ended the request before this token could be sampled
                let model_ends = if self.request.ignore_eos { &[] } else { model.tokenizer.end_tokens() };
                let _ = guide.update_mask(model_ends.iter().chain(&self.request.stop_tokens).copied());
            }
            self.done = self.append(model, token).1;
        }
    }

    /// Appends a token to the answer. Returns its text, and the final event if the request has ended.
    fn append(&mut self, model: &Model, token: u32) -> (String, Option<Event>) {
        let n_tokens = self.tokens.len() - self.n_prompt + 1;
        let ends = !self.request.ignore_eos && model.tokenizer.is_end_of_generation(token);
        if ends || self.request.stop_tokens.contains(&token) {
            self.end_token = Some(token);
            return (String::new(), Some(self.final_event(FinishReason::StopToken(token), n_tokens)));
        }
        self.sampler.accept(token);
        if let Some(speculator) = &mut self.speculator {
            speculator.accept(token);
        }
        self.tokens.push(token);
        let bytes = match model.tokenizer.piece(token) {
            Some(bytes) if !model.tokenizer.is_control(token) || self.request.visible.binary_search(&token).is_ok() => {
                bytes
            }
            _ => &[],
        };
        let piece = self.text.push(bytes);
        if let Some(stop) = piece.stopped {
            // the event of its last token has carried the text before the stop string
            let (text, reason) = (String::new(), FinishReason::StopString(stop));
            return (piece.text, Some(Event::Done { id: self.id, text, reason, n_tokens, receipt: None }));
        }
        let done = match self.guide.as_mut().map(|guide| guide.accept(token)) {
            Some(Ok(true)) => Some(FinishReason::Complete),
            Some(Err(e)) => Some(FinishReason::Constraint(e)),
            _ => (self.tokens.len() == self.max_len).then_some(FinishReason::Length),
        };
        (piece.text, done.map(|reason| self.final_event(reason, n_tokens)))
    }

    /// The [`Event::Done`] with the text still held back.
    pub(super) fn final_event(&mut self, reason: FinishReason, n_tokens: usize) -> Event {
        let piece = self.text.finish();
        let reason = piece.stopped.map_or(reason, FinishReason::StopString);
        Event::Done { id: self.id, text: piece.text, reason, n_tokens, receipt: None }
    }

    /// The receipt of the ended request, if it wants one.
    pub(super) fn receipt(&mut self, model: &Model, options: &EngineOptions) -> Option<Box<Receipt>> {
        let (chain, sha256) = (self.chain.take()?, options.model_sha256?);
        let request = canonical_request(&self.request, model, options);
        let output = self.tokens[self.n_prompt..].iter().copied().chain(self.end_token).collect();
        Some(Box::new(chain.receipt(&sha256, request, output)))
    }
}

/// The canonical request of a receipt: everything in it that determines the output.
pub(super) fn canonical_request(request: &Request, model: &Model, options: &EngineOptions) -> ReceiptRequest {
    let Request { tokens, sampling, sequence, .. } = request;
    ReceiptRequest {
        prompt: tokens.clone(),
        // log-probabilities are a report and change no token
        sampling: SamplingOptions { logprobs: LogprobKind::None, top_logprobs: 0, ..sampling.clone() },
        sequence: *sequence,
        kv_type: options.kv_type,
        long_context: model.is_long_context(options.n_ctx),
    }
}

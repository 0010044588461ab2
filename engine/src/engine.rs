//! The engine: takes requests, runs continuous batches, and emits events.
//!
//! What can fail, fails in [`Engine::submit`]: it checks the request, checks that its maximal length fits the KV
//! memory, and reserves KV pages for its prompt. [`Engine::step`] runs one batch (decode rows first, then prompt tokens
//! within a budget) and cannot fail; a fault in one request ends that request only. Generated tokens take KV pages on
//! demand. If no page is free, the youngest request is preempted: it loses its pages and is recomputed later (as in
//! vLLM, arXiv:2309.06180, section 4.5). Neither preemption nor other requests change the tokens of a request.

mod active;
mod drafts;
mod pages;
mod plan;
mod request;

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::sync::Arc;
use alloc::vec::Vec;

pub use request::{Event, FinishReason, Request, RequestId, TokenLogprobs};

use sha2::{Digest, Sha256};

use crate::draft::{DraftCost, DraftModel, DraftSource, Speculator, StepCosts};
use crate::error::{MemoryError, RequestError};
use crate::kernels::Cpu;
use crate::kernels::attention::{KvType, PAGE};
use crate::kv::{KvArena, KvStats, SeqPages};
use crate::model::{Exec, KvRef, Model, Run, Scratch, ScratchSize, logits_rows};
use crate::pool::Pool;
use crate::receipt::Chain;
use crate::sampler::{Guide, Sampler};
use crate::text::TextStream;
use active::{ActiveRequest, canonical_request};
use plan::{BatchEntry, plan};

/// Sizes of an engine. All memory is reserved at construction; in WebAssembly, KV pages are allocated on first use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineOptions {
    /// Element type of the KV cache. Changes results.
    pub kv_type: KvType,
    /// Maximal tokens of a sequence, prompt and generated; reduced to [`Config::max_context`](crate::model::Config::max_context).
    /// With LongRoPE it selects the frequencies and so changes results ([`Model::is_long_context`]).
    pub n_ctx: usize,
    /// Maximal number of concurrent requests.
    pub max_seqs: usize,
    /// Maximal tokens of a batch.
    pub batch_tokens: usize,
    /// Maximal prompt tokens of a batch that also has decode rows: bounds the latency that prefill adds to the next
    /// token of running requests. Does not change results.
    pub prefill_chunk: usize,
    /// Maximal draft tokens of a batch, for all requests with [`Request::speculation`]; working memory for their logits is
    /// reserved. 0 turns speculation off. Does not change results.
    pub draft_rows: usize,
    /// Bytes of KV memory, rounded down to whole pages.
    pub kv_bytes: usize,
    /// Recurrent states, for models that have them.
    pub snapshots: SnapshotOptions,
    /// SHA-256 of the model file (of a split model: [`receipt::split_sha256`](crate::receipt::split_sha256)). It
    /// identifies the model in receipts and exported pages. Requests for receipts are refused without it.
    pub model_sha256: Option<[u8; 32]>,
}

/// Memory of the recurrent states, besides one per concurrent request, which models with recurrent layers need. A snapshot
/// of the state is kept at some page boundaries; a prompt resumes from the last one that its prefix has. Changes no result.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SnapshotOptions {
    /// Maximal number of snapshots; `None` for as many as take the memory of the KV pages, and at least two more than
    /// concurrent requests.
    pub max: Option<usize>,
    /// Pages from one snapshot to the next in a long prompt, besides those at its end and where prompts diverge; `None`
    /// for as many as take the memory of a snapshot, from 8 to 128.
    pub every: Option<usize>,
}

impl SnapshotOptions {
    /// [`SnapshotOptions::every`] with its default for `model`.
    pub fn pages(&self, model: &Model, kv_type: KvType) -> usize {
        let page = model.kv_layout(kv_type).page_bytes();
        let every = self.every.unwrap_or_else(|| (model.state_bytes() / page).clamp(8, 128));
        every.clamp(1, usize::MAX / PAGE)
    }
}

impl EngineOptions {
    /// Slots for recurrent states of sequences and snapshots.
    fn n_states(&self, model: &Model) -> usize {
        let default = (self.kv_bytes / model.state_bytes().max(1)).max(self.max_seqs.saturating_add(2));
        self.max_seqs.saturating_add(self.snapshots.max.unwrap_or(default))
    }

    /// Bytes of the recurrent states of sequences and snapshots, which are beside [`EngineOptions::kv_bytes`]; 0 for a
    /// model without recurrent layers.
    pub fn state_bytes(&self, model: &Model) -> usize {
        self.n_states(model).saturating_mul(model.state_bytes())
    }

    /// Bytes of the KV pages for `tokens` tokens of `model`.
    pub fn kv_bytes_of(model: &Model, kv_type: KvType, tokens: usize) -> usize {
        tokens.div_ceil(PAGE).saturating_mul(model.kv_layout(kv_type).page_bytes())
    }

    /// Bytes of the KV pages of a draft model in an engine of `target`: for as many tokens as the engine's, at most for
    /// the contexts of its sequences.
    pub fn draft_kv_bytes(&self, draft: &Model, target: &Model) -> usize {
        DraftModel::kv_bytes(draft, target, self)
    }
}

/// Runs requests on a model in continuous batches.
pub struct Engine {
    model: Arc<Model>,
    options: EngineOptions,
    arena: KvArena,
    scratch: Scratch,
    /// Accepted requests, running and preempted, in order of submission.
    active: VecDeque<ActiveRequest>,
    next_id: u64,
    /// [`EngineOptions::batch_tokens`] at construction, for which memory is reserved.
    max_batch_tokens: usize,
    /// Tokens from one snapshot of the recurrent state to the next; `None` for models without recurrent layers.
    snapshot_tokens: Option<usize>,
    /// Cost of a step by its rows, for the number of draft tokens.
    costs: StepCosts,
    /// Rows of the last step, if it had decode and draft rows only.
    decode_rows: Option<usize>,
    draft_model: Option<DraftSource>,
    draft_cost: DraftCost,
    /// Batches of the draft model in the last step; `None` if one caught up with many tokens.
    draft_batches: Option<usize>,
}

impl Engine {
    /// Creates an engine for `model` and reserves its memory.
    ///
    /// # Errors
    /// [`MemoryError`] if an allocation fails, or working memory would exceed [`Model::max_scratch_bytes`].
    pub fn new(model: Arc<Model>, pool: &dyn Pool, mut options: EngineOptions) -> Result<Engine, MemoryError> {
        options.n_ctx = options.n_ctx.min(model.config.max_context());
        let layout = model.kv_layout(options.kv_type);
        let n_pages = u32::try_from(options.kv_bytes / layout.page_bytes()).unwrap_or(u32::MAX);
        let mut fingerprint = options.model_sha256.unwrap_or_default();
        if model.is_long_context(options.n_ctx) {
            // keys of long contexts use other RoPE frequencies, so their pages must not match those of short contexts
            fingerprint = Sha256::new_with_prefix(fingerprint).chain_update("long context").finalize().into();
        }
        let mut arena = KvArena::new(layout, n_pages, fingerprint)?;
        let is_recurrent = model.config.recurrent.is_some();
        let snapshot_tokens = is_recurrent.then(|| options.snapshots.pages(&model, options.kv_type) * PAGE);
        if is_recurrent {
            arena.reserve_states(model.config.state_len(), options.n_states(&model))?;
        }
        let (max_seqs, n_ctx) = (options.max_seqs, options.n_ctx);
        let rows = options.batch_tokens.max(max_seqs);
        let logits = max_seqs.saturating_add(options.draft_rows);
        let scratch = model.scratch(pool, options.kv_type, ScratchSize { rows, logits, seqs: max_seqs, n_ctx })?;
        let max_batch_tokens = options.batch_tokens;
        Ok(Engine {
            model,
            options,
            arena,
            scratch,
            active: VecDeque::new(),
            next_id: 0,
            max_batch_tokens,
            snapshot_tokens,
            costs: StepCosts::default(),
            decode_rows: None,
            draft_model: None,
            draft_cost: DraftCost::estimated(0.0),
            draft_batches: Some(0),
        })
    }

    /// The model that the engine runs.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// The options given to [`Engine::new`], with `n_ctx` as reduced there.
    pub fn options(&self) -> &EngineOptions {
        &self.options
    }

    /// Changes the maximal tokens of a batch, up to those at construction, and of a batch with decode rows. Changes no
    /// result.
    pub fn set_batch_limits(&mut self, batch_tokens: usize, prefill_chunk: usize) {
        self.options.batch_tokens = batch_tokens.clamp(1, self.max_batch_tokens);
        self.options.prefill_chunk = prefill_chunk;
    }

    /// Statistics of KV memory and the prefix cache.
    pub fn kv_stats(&self) -> KvStats {
        self.arena.stats()
    }

    /// Number of accepted requests that have not ended, preempted ones included.
    pub fn active(&self) -> usize {
        self.active.len()
    }

    /// Whether no request is active, so that [`Engine::step`] would do nothing.
    pub fn is_idle(&self) -> bool {
        self.active.is_empty()
    }

    /// Checks a request, reserves KV pages for its prompt and adds it to the batch schedule.
    ///
    /// # Errors
    /// [`RequestError`] names the field that is invalid, or the resource that is short. The engine has not changed.
    pub fn submit(&mut self, request: Request) -> Result<RequestId, RequestError> {
        self.try_submit(Box::new(request)).map_err(|(e, _)| e)
    }

    /// As [`Engine::submit`], but returns a refused request, so that it can be retried without a copy.
    ///
    /// # Errors
    /// The error of [`Engine::submit`], and the request.
    pub fn try_submit(&mut self, request: Box<Request>) -> Result<RequestId, (RequestError, Box<Request>)> {
        let max_len = match request.check(&self.model, &self.options) {
            Ok(max_tokens) => request.tokens.len() + max_tokens,
            Err(e) => return Err((e, request)),
        };
        let is_resumed = !request.generated.is_empty();
        if self.active.len() == self.options.max_seqs {
            return Err((RequestError::NoCapacity { what: "sequences", needed: 1, free: 0 }, request));
        }
        let (pages, ring) = match self.reserve(&request, request.tokens.len().max(max_len - 1)) {
            Ok(reserved) => reserved,
            Err(e) => return Err((e, request)),
        };
        let request = *request;
        let (n_prompt, n_vocab) = (request.tokens.len(), self.model.config.n_vocab);
        self.arena.record_lookup(cacheable_prefix(&request, &request.tokens, 0), pages.n_cached);
        let mut sampler = Sampler::checked(request.sampling.clone(), n_vocab);
        request.tokens.iter().for_each(|&t| sampler.accept_prompt(t));
        let mut tokens = Vec::with_capacity(max_len);
        tokens.extend_from_slice(&request.tokens);
        let id = RequestId(self.next_id);
        self.next_id += 1;
        let text = TextStream::new(request.stop.clone());
        let n_cached = pages.n_cached;
        let chain = self.chain(&request);
        let guide = request.constraint.as_deref().map(|constraint| Guide::new(constraint, n_vocab));
        let n_scored = if is_resumed { n_prompt - 1 } else { 0 };
        let speculates = self.options.draft_rows > 0;
        let options = Some(&request.speculation).filter(|_| speculates);
        let speculator = options.and_then(|options| Speculator::new(options, &request.tokens, self.options.n_ctx));
        let mut active = ActiveRequest {
            id,
            request,
            sampler,
            text,
            pages,
            n_cached,
            ring,
            tokens,
            n_prompt,
            n_computed: n_cached,
            n_published: 0,
            tail_snapshot: None,
            max_len,
            guide,
            speculator,
            chain,
            end_token: None,
            n_scored,
            is_finite: true,
            done: None,
        };
        active.replay(&self.model);
        self.active.push_back(active);
        Ok(id)
    }

    /// KV pages for the prompt of a request of at most `n_tokens` tokens. If all its pages never fit the arena, or the
    /// prompt does not fit now, and all layers have a sliding window: a ring of pages, each reused once its tokens have
    /// left the window. The second value maps every page index of the sequence to a page of the ring.
    fn reserve(&mut self, request: &Request, n_tokens: usize) -> Result<(SeqPages, Option<Vec<u32>>), RequestError> {
        let (n_pages, all, growing) = (n_tokens.div_ceil(PAGE), self.arena.n_pages(), self.n_growing());
        let no_capacity = if n_pages > all {
            RequestError::NoCapacity { what: "KV pages", needed: n_pages, free: all }
        } else if self.active.iter().any(ActiveRequest::is_preempted) {
            // preempted requests go first
            return Err(RequestError::NoCapacity { what: "KV pages", needed: n_pages, free: 0 });
        } else {
            let tokens = [&request.tokens[..], &request.generated].concat();
            let n_scored = if request.generated.is_empty() { 0 } else { tokens.len() };
            match allocate_pages(
                &mut self.arena,
                cacheable_prefix(request, &tokens, n_scored),
                tokens.len(),
                request.cache_salt,
                growing,
            ) {
                Ok(pages) => return Ok((pages, None)),
                Err(no_capacity) => no_capacity,
            }
        };
        let Some(window) = self.model.config.window() else { return Err(no_capacity) };
        // the window of the first row of a batch plus the positions that the batch writes, at any offset in a page
        let span = window.saturating_add(self.max_batch_tokens.max(1) - 1);
        let ring = span.div_ceil(PAGE) + 1;
        if ring >= n_pages || ring + growing > self.arena.available_pages() {
            return Err(no_capacity);
        }
        let mut pages = self.arena.acquire(&[], request.cache_salt);
        if let Err(e) = self.arena.extend(&mut pages, ring * PAGE) {
            self.arena.release(pages);
            return Err(e);
        }
        let ring = pages.pages.iter().copied().cycle().take(n_pages).collect();
        Ok((pages, Some(ring)))
    }

    /// Number of running requests that may need more pages than they have.
    fn n_growing(&self) -> usize {
        self.active.iter().filter(|a| a.may_need_pages()).count()
    }

    /// The hash chain of a receipt, if the request wants one.
    fn chain(&self, request: &Request) -> Option<Chain> {
        let model = self.options.model_sha256.filter(|_| request.receipt)?;
        Some(Chain::start(&model, &canonical_request(request, &self.model, &self.options)))
    }

    /// Removes a request and frees its pages at once. Returns whether it was active.
    pub fn cancel(&mut self, id: RequestId) -> bool {
        let Some(i) = self.active.iter().position(|a| a.id == id) else { return false };
        self.retire(i);
        true
    }

    /// Ends a request with what it has generated, e.g. at a deadline, and frees its pages. Returns its last event; `None`
    /// if it is not active.
    pub fn finish(&mut self, id: RequestId) -> Option<Event> {
        let i = self.active.iter().position(|a| a.id == id)?;
        let a = &mut self.active[i];
        let mut done = a.final_event(FinishReason::Deadline, a.tokens.len() - a.n_prompt);
        if let Event::Done { receipt, .. } = &mut done {
            *receipt = a.receipt(&self.model, &self.options);
        }
        self.retire(i);
        Some(done)
    }

    /// Releases the memory of the KV cache to the system, and with it the prefix cache, if no request is active. Returns
    /// whether it did.
    pub fn release_memory(&mut self) -> bool {
        if !self.is_idle() || self.arena.stats().committed_bytes == 0 {
            return false;
        }
        self.draft_model.iter_mut().for_each(DraftSource::release_memory);
        self.arena.renew().is_ok()
    }

    /// Evicts the cached pages of a prefix, e.g. of a closed conversation, from its end up to the first page that
    /// another prefix or a running request uses. Returns the number of pages freed.
    pub fn evict_prefix(&mut self, tokens: &[u32], cache_salt: u64) -> usize {
        self.draft_model.iter_mut().for_each(|draft| draft.evict_prefix(tokens, cache_salt));
        self.arena.evict_prefix(tokens, cache_salt)
    }

    /// Evicts up to `n_pages` cached pages that no request uses, the least recently used first. Returns the number
    /// evicted.
    pub fn evict_cached(&mut self, n_pages: usize) -> usize {
        self.draft_model.iter_mut().for_each(|draft| draft.evict_idle(n_pages));
        self.arena.evict_idle(n_pages)
    }

    /// Removes a request by its index in `active` and frees its pages.
    fn retire(&mut self, i: usize) {
        if let Some(mut a) = self.active.remove(i) {
            a.release_pages(&mut self.arena);
            if let Some(draft) = &mut self.draft_model {
                draft.release(a.id, &a.tokens, a.request.cache_salt);
            }
        }
    }

    /// Composes the next batch and allocates its KV pages, preempting requests if needed.
    fn next_batch(&mut self, sink: &mut dyn FnMut(Event)) -> Vec<BatchEntry> {
        self.resume_preempted(sink);
        loop {
            let pending: Vec<usize> = self.active.iter().map(ActiveRequest::n_pending).collect();
            let mut plan = plan(&pending, self.options.batch_tokens, self.options.prefill_chunk);
            if let Some(every) = self.snapshot_tokens {
                for p in &mut plan {
                    let a = &self.active[p.request];
                    p.n_tokens = p.n_tokens.min(a.next_snapshot(every) - a.n_computed);
                }
            }
            if self.allocate_batch(&plan, sink) {
                return plan;
            }
            // resume only if all are preempted: otherwise the resumed request would be preempted again at once
            if self.active.iter().all(ActiveRequest::is_preempted) {
                self.resume_preempted(sink);
            }
        }
    }

    /// Allocates the KV pages that a batch writes. Returns false if they do not suffice; then the youngest running
    /// request without a ring has been preempted.
    fn allocate_batch(&mut self, plan: &[BatchEntry], sink: &mut dyn FnMut(Event)) -> bool {
        for p in plan {
            let a = &mut self.active[p.request];
            if a.ring.is_some() || self.arena.extend(&mut a.pages, a.n_computed + p.n_tokens).is_ok() {
                continue;
            }
            let youngest = self.active.iter_mut().rev().find(|a| a.ring.is_none() && !a.is_preempted());
            if let Some(a) = youngest {
                a.release_pages(&mut self.arena);
                sink(Event::Preempted { id: a.id });
            }
            return false;
        }
        true
    }

    /// Resumes preempted requests, the oldest first, while pages are available. A request always fits alone, because
    /// `submit` checked its maximal length, unless the system cannot commit the reserved memory: then the request ends.
    fn resume_preempted(&mut self, sink: &mut dyn FnMut(Event)) {
        while let Some(i) = self.active.iter().position(ActiveRequest::is_preempted) {
            let (growing, is_alone) = (self.n_growing(), self.active.iter().all(ActiveRequest::is_preempted));
            let a = &mut self.active[i];
            let prefix = cacheable_prefix(&a.request, &a.tokens, a.n_scored);
            match allocate_pages(&mut self.arena, prefix, a.tokens.len(), a.request.cache_salt, growing) {
                Ok(pages) => (a.n_computed, a.pages) = (pages.n_cached, pages),
                Err(_) if is_alone => {
                    sink(a.final_event(FinishReason::NoMemory, a.tokens.len() - a.n_prompt));
                    self.retire(i);
                }
                Err(_) => return,
            }
        }
    }

    /// Runs one batch and calls `sink` for each event. Returns the number of tokens computed, 0 if no request is
    /// active.
    pub fn step(&mut self, cpu: Cpu, pool: &dyn Pool, sink: &mut dyn FnMut(Event)) -> usize {
        self.end_replayed(sink);
        let mut plan = self.next_batch(sink);
        if plan.is_empty() {
            return 0;
        }
        let exec = Exec { cpu, pool };
        let spent = self.add_drafts(exec, &mut plan);
        let n_tokens: usize = plan.iter().map(BatchEntry::n_rows).sum();
        let n_plain: usize = plan.iter().map(|p| p.n_tokens).sum();
        let cost = (self.costs.at(n_tokens) + spent) / self.costs.at(n_plain);
        self.decode_rows = plan.iter().all(|p| p.n_tokens == 1).then_some(n_tokens);
        let layout = self.arena.layout().clone();
        let Ok(memory) = self.arena.memory_mut(&layout) else { return 0 };
        let runs: Vec<Run<'_>> = plan
            .iter()
            .map(|p| {
                let a = &self.active[p.request];
                let tokens = match &a.speculator {
                    Some(speculator) if p.n_draft > 0 => speculator.rows(),
                    _ => &a.tokens[a.n_computed..a.n_computed + p.n_tokens],
                };
                let n_logits = usize::from(a.samples_after(p.n_tokens)) + p.n_draft;
                let pages = a.ring.as_deref().unwrap_or(&a.pages.pages);
                Run { tokens, pos: a.n_computed, pages, state: a.pages.state.unwrap_or(0), n_logits }
            })
            .collect();
        self.model.batch(exec, &runs, KvRef { layout: &layout, memory }, &mut self.scratch, None);
        let picks = logits_rows(&runs);
        drop(runs);
        let hidden = self.hidden_of_drafts(exec, &plan);
        sink(Event::Computed { n_tokens });
        self.score_prompts(exec, &plan, sink);
        let out = self.model.logits(exec, &picks, &mut self.scratch, None);
        let (mut row, mut ended) = (0, Vec::new());
        for p in &plan {
            let a = &mut self.active[p.request];
            let n_computed = a.n_computed;
            a.n_computed += p.n_tokens;
            if let Some(every) = self.snapshot_tokens
                && p.n_draft == 0
            {
                a.take_snapshot(&mut self.arena, every);
            }
            if a.n_computed < a.tokens.len() {
                continue;
            }
            if a.n_computed == a.n_prompt {
                if a.ring.is_none() {
                    self.arena.publish(&a.pages, &a.tokens, a.request.cache_salt);
                }
                sink(Event::Prefilled { id: a.id, n_prompt: a.n_prompt, n_cached: a.n_cached });
            }
            let (picks, mine) = (a.samples_after(0), row);
            row += usize::from(picks) + p.n_draft;
            if !picks || !a.is_finite {
                let reason = if a.is_finite { FinishReason::Length } else { FinishReason::NotFinite };
                sink(a.final_event(reason, 0));
                ended.push(p.request);
                continue;
            }
            let n_before = a.tokens.len();
            let mut done = a.pick(&self.model, cpu, out.hidden(mine), out.logits(mine), sink);
            for i in 1..=p.n_draft {
                if done.is_some() || !a.is_drafted(i) {
                    break;
                }
                a.n_computed += 1;
                done = a.pick(&self.model, cpu, out.hidden(mine + i), out.logits(mine + i), sink);
            }
            a.end_draft(p.n_draft, n_before, cost, sink);
            if let Some(every) = self.snapshot_tokens
                && p.n_draft > 0
            {
                a.settle_draft(&mut self.arena, n_computed, p.n_rows(), every);
            }
            if p.n_draft > 0 && a.ring.is_none() {
                // keys and values of rejected tokens
                self.arena.truncate(&mut a.pages, a.n_computed);
            }
            if let Some(mut done) = done {
                if let Event::Done { receipt, .. } = &mut done {
                    *receipt = a.receipt(&self.model, &self.options);
                }
                sink(done);
                ended.push(p.request);
            }
        }
        self.retire_all(ended);
        self.show_hidden(exec, &hidden);
        n_tokens
    }

    /// Ends the requests that a token of [`Request::generated`] has ended.
    fn end_replayed(&mut self, sink: &mut dyn FnMut(Event)) {
        let ended = (0..self.active.len()).filter(|&i| self.active[i].done.take().map(&mut *sink).is_some()).collect();
        self.retire_all(ended);
    }

    /// Removes requests by their indices in `active`.
    fn retire_all(&mut self, mut ended: Vec<usize>) {
        ended.sort_unstable();
        ended.into_iter().rev().for_each(|i| self.retire(i));
    }

    /// Emits the prompt log-probabilities of the requests that want them, for the rows of this batch. Logits are
    /// computed for at most `max_seqs` rows at a time, which is what the scratch memory holds.
    fn score_prompts(&mut self, exec: Exec<'_>, plan: &[BatchEntry], sink: &mut dyn FnMut(Event)) {
        let mut end = 0;
        for p in plan {
            let (a, first) = (&mut self.active[p.request], end);
            end += p.n_rows();
            // the row of the last prompt token predicts the first generated one; rows recomputed after a preemption are
            // done
            let (from, to) = (a.n_computed.max(a.n_scored), (a.n_computed + p.n_tokens).min(a.n_prompt - 1));
            if !a.request.prompt_logprobs || from >= to {
                continue;
            }
            let (first, n) = (first + from - a.n_computed, to - from);
            a.n_scored = to;
            let mut logprobs = Vec::with_capacity(n);
            let mut next = a.tokens[from + 1..].iter();
            for from in (first..first + n).step_by(self.options.max_seqs) {
                let rows = from..(first + n).min(from + self.options.max_seqs);
                let out = self.model.logits(exec, core::slice::from_ref(&rows), &mut self.scratch, None);
                for (row, token) in (0..out.len()).zip(&mut next) {
                    let (hidden, logits) = (out.hidden(row), out.logits(row));
                    a.is_finite &= hidden.iter().chain(logits).all(|v| v.is_finite());
                    // non-finite logits have no log-probability; they end the request in `step`
                    logprobs.push(if a.is_finite {
                        a.sampler.score(exec.cpu, logits, *token)
                    } else {
                        (0.0, Vec::new())
                    });
                }
            }
            sink(Event::Prompt { id: a.id, logprobs });
        }
    }
}

/// Allocates KV pages for `n_tokens` tokens; those of `prefix` come from the cache where possible. Fails unless one
/// more page stays available for each of the `n_growing` requests, so that this one is not preempted at once.
fn allocate_pages(
    arena: &mut KvArena,
    prefix: &[u32],
    n_tokens: usize,
    salt: u64,
    n_growing: usize,
) -> Result<SeqPages, RequestError> {
    let mut pages = arena.acquire(prefix, salt);
    if arena.has_states() && pages.state.is_none() {
        arena.release(pages);
        return Err(RequestError::NoCapacity { what: "memory for recurrent states", needed: 1, free: 0 });
    }
    let needed = n_tokens.div_ceil(PAGE) - pages.pages.len() + n_growing;
    let free = arena.available_pages();
    let allocated = if needed <= free {
        arena.extend(&mut pages, n_tokens)
    } else {
        Err(RequestError::NoCapacity { what: "KV pages", needed, free })
    };
    match allocated {
        Ok(()) => Ok(pages),
        Err(no_capacity) => {
            arena.release(pages);
            Err(no_capacity)
        }
    }
}

/// The tokens of a request whose KV pages may come from the prefix cache. Prompt log-probabilities need every row of
/// the prompt computed once, so until a row is scored its page is not taken from the cache.
fn cacheable_prefix<'a>(request: &Request, tokens: &'a [u32], n_scored: usize) -> &'a [u32] {
    let is_scored = !request.prompt_logprobs || n_scored + 1 >= request.tokens.len();
    if is_scored { tokens } else { &tokens[..n_scored] }
}

//! Requests in, events out: batching, and the life of a request.
//!
//! Everything that can fail fails in [`Engine::submit`]: it checks the request, whose whole length must fit into the
//! memory there is, and reserves the pages of its prompt. [`Engine::step`] runs one batch, decode rows first, then prefill
//! up to a budget of tokens, and cannot fail; a fault inside one request ends that request alone. Answers take pages as
//! they grow. When there are no more, the youngest request gives up its own and is computed again later (after vLLM,
//! arXiv:2309.06180, section 4.5), which makes no difference to its tokens. Those do not depend on other requests at all.

mod active;
mod plan;
mod request;

use alloc::boxed::Box;
use alloc::collections::VecDeque;
use alloc::sync::Arc;
use alloc::vec::Vec;

pub use request::{Event, FinishReason, Request, RequestId, TokenLogprobs};

use sha2::{Digest, Sha256};

use crate::error::{MemoryError, RequestError};
use crate::kernels::Cpu;
use crate::kernels::attention::{KvType, PAGE};
use crate::kv::{KvArena, KvStats, PageError, SeqPages};
use crate::model::{Model, Run, Scratch, logits_rows};
use crate::pool::Pool;
use crate::receipt::Chain;
use crate::sampler::{Guide, Sampler};
use crate::text::TextStream;
use active::{Active, asked};
use plan::{Part, plan};

/// Sizes of an engine; all memory is reserved from them at construction (in WebAssembly that of keys and values is taken
/// as they are written, up to these sizes).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineOptions {
    /// How keys and values are kept. Changes numbers.
    pub kv_type: KvType,
    /// Tokens of a sequence, prompt and answer, at most; as many as the model can tell apart, if those are fewer. Changes
    /// numbers of models that rotate by other frequencies in long contexts ([`Model::is_long_context`]).
    pub n_ctx: usize,
    /// Sequences at once.
    pub max_seqs: usize,
    /// Tokens of a batch.
    pub batch_tokens: usize,
    /// Tokens of prompts in a batch that answers have rows in, at most: what bounds how much longer than usual a prompt
    /// makes them wait for their next token. Changes no number.
    pub prefill_chunk: usize,
    /// Bytes for keys and values, rounded down to whole pages.
    pub kv_bytes: usize,
    /// SHA-256 of the model's file (of a split model [`receipt::split_sha256`](crate::receipt::split_sha256)): names
    /// the model in receipts and exported pages. Without it there are no receipts.
    pub model_sha256: Option<[u8; 32]>,
}

impl EngineOptions {
    /// Bytes of keys and values of `tokens` tokens of `model`.
    pub fn kv_bytes_of(model: &Model, kv_type: KvType, tokens: usize) -> usize {
        tokens.div_ceil(PAGE).saturating_mul(model.kv_layout(kv_type).page_bytes())
    }
}

/// A model at work on requests.
pub struct Engine {
    model: Arc<Model>,
    options: EngineOptions,
    arena: KvArena,
    scratch: Scratch,
    /// In order of submission.
    active: VecDeque<Active>,
    next_id: u64,
}

impl Engine {
    /// An engine for `model`, with all its memory.
    ///
    /// # Errors
    /// If there is not enough, or the model may not have as much.
    pub fn new(model: Arc<Model>, pool: &dyn Pool, mut options: EngineOptions) -> Result<Engine, MemoryError> {
        options.n_ctx = options.n_ctx.min(model.config.max_context());
        let layout = model.kv_layout(options.kv_type);
        let n_pages = u32::try_from(options.kv_bytes / layout.page_bytes()).unwrap_or(u32::MAX);
        let mut fingerprint = options.model_sha256.unwrap_or_default();
        if model.is_long_context(options.n_ctx) {
            // keys are rotated otherwise: those of short contexts are another model's
            fingerprint = Sha256::new_with_prefix(fingerprint).chain_update("long context").finalize().into();
        }
        let arena = KvArena::new(layout, n_pages, fingerprint)?;
        let rows = options.batch_tokens.max(options.max_seqs);
        let scratch = model.scratch(pool, options.kv_type, rows, options.max_seqs, options.max_seqs, options.n_ctx)?;
        Ok(Engine { model, options, arena, scratch, active: VecDeque::new(), next_id: 0 })
    }

    /// The model.
    pub fn model(&self) -> &Arc<Model> {
        &self.model
    }

    /// The sizes.
    pub fn options(&self) -> &EngineOptions {
        &self.options
    }

    /// Memory of keys and values.
    pub fn kv_stats(&self) -> KvStats {
        self.arena.stats()
    }

    /// Requests on their way.
    pub fn active(&self) -> usize {
        self.active.len()
    }

    /// Whether there is nothing to do.
    pub fn is_idle(&self) -> bool {
        self.active.is_empty()
    }

    /// Takes a request: checks all of it and reserves room for its prompt.
    ///
    /// # Errors
    /// What is wrong with it, or that there is no capacity now.
    pub fn submit(&mut self, request: Request) -> Result<RequestId, RequestError> {
        self.try_submit(Box::new(request)).map_err(|(e, _)| e)
    }

    /// The same, but gives a refused request back: one without capacity now can be tried again without a copy.
    ///
    /// # Errors
    /// What is wrong with it, or that there is no capacity now; and the request.
    pub fn try_submit(&mut self, request: Box<Request>) -> Result<RequestId, (RequestError, Box<Request>)> {
        let limit = match request.check(&self.model, &self.options) {
            Ok(max_tokens) => request.tokens.len() + max_tokens,
            Err(e) => return Err((e, request)),
        };
        if self.active.len() == self.options.max_seqs {
            return Err((RequestError::NoCapacity { what: "sequences", needed: 1, free: 0 }, request));
        }
        let (pages, ring) = match self.reserve(&request, request.tokens.len().max(limit - 1)) {
            Ok(reserved) => reserved,
            Err(e) => return Err((e, request)),
        };
        let request = *request;
        let (n_prompt, n_vocab) = (request.tokens.len(), self.model.config.n_vocab);
        self.arena.count(known(&request, &request.tokens, 0), pages.n_cached);
        let mut sampler = Sampler::checked(request.sampling.clone(), n_vocab);
        request.tokens.iter().for_each(|&t| sampler.accept_prompt(t));
        let mut tokens = Vec::with_capacity(limit);
        tokens.extend_from_slice(&request.tokens);
        let id = RequestId(self.next_id);
        self.next_id += 1;
        let text = TextStream::new(request.stop.clone());
        let n_cached = pages.n_cached;
        let chain = self.chain(&request);
        let guide = request.constraint.as_deref().map(|constraint| Guide::new(constraint, n_vocab));
        self.active.push_back(Active {
            id,
            request,
            sampler,
            text,
            pages,
            n_cached,
            ring,
            tokens,
            n_prompt,
            n_done: n_cached,
            limit,
            guide,
            chain,
            end: None,
            n_scored: 0,
            is_finite: true,
        });
        Ok(id)
    }

    /// Pages for the prompt of a request that may grow to `n_tokens`. If there never is room for all of them, or not for the
    /// prompt now, and no layer ever looks far back, a ring of pages: each is used again once all of its tokens are out of
    /// sight.
    fn reserve(&mut self, request: &Request, n_tokens: usize) -> Result<(SeqPages, Option<Vec<u32>>), RequestError> {
        let (n_pages, all, growing) = (n_tokens.div_ceil(PAGE), self.arena.n_pages(), self.growing());
        let no_room = if n_pages > all {
            RequestError::NoCapacity { what: "KV pages", needed: n_pages, free: all }
        } else if self.active.iter().any(Active::is_preempted) {
            // nobody overtakes those
            return Err(RequestError::NoCapacity { what: "KV pages", needed: n_pages, free: 0 });
        } else {
            let tokens = &request.tokens;
            match room(&mut self.arena, known(request, tokens, 0), tokens.len(), request.cache_salt, growing) {
                Ok(pages) => return Ok((pages, None)),
                Err(no_room) => no_room,
            }
        };
        let Some(window) = self.model.config.window() else { return Err(no_room) };
        // what the first row of a batch sees and what all of them write, wherever that starts in a page
        let span = window.saturating_add(self.options.batch_tokens.max(1) - 1);
        let ring = span.div_ceil(PAGE) + 1;
        if ring >= n_pages || ring + growing > self.arena.available_pages() {
            return Err(no_room);
        }
        let mut pages = self.arena.acquire(&[], request.cache_salt);
        if let Err(e) = self.arena.extend(&mut pages, ring * PAGE) {
            self.arena.release(pages);
            return Err(e);
        }
        let ring = pages.pages.iter().copied().cycle().take(n_pages).collect();
        Ok((pages, Some(ring)))
    }

    /// Requests that may need more pages than they have.
    fn growing(&self) -> usize {
        self.active.iter().filter(|a| a.may_grow()).count()
    }

    /// The start of a receipt, if one is asked for.
    fn chain(&self, request: &Request) -> Option<Chain> {
        let model = self.options.model_sha256.filter(|_| request.receipt)?;
        Some(Chain::start(&model, &asked(request, &self.model, &self.options)))
    }

    /// Forgets a request; its pages are free at once. Says whether it was there.
    pub fn cancel(&mut self, id: RequestId) -> bool {
        let Some(i) = self.active.iter().position(|a| a.id == id) else { return false };
        self.retire(i);
        true
    }

    /// Frees the cached pages of a conversation that will not go on, as far as no other needs them. Returns how many.
    pub fn forget(&mut self, tokens: &[u32], cache_salt: u64) -> usize {
        self.arena.forget(tokens, cache_salt)
    }

    /// The cached pages of the longest known prefix of `tokens`, one after the other, as bytes that
    /// [`Engine::import_pages`] takes; empty if none is known.
    pub fn export_pages(&self, tokens: &[u32], cache_salt: u64) -> Vec<u8> {
        self.arena.export_prefix(tokens, cache_salt)
    }

    /// Puts exported pages into the cache, for prompts of the same salt that begin with their tokens. Returns their
    /// tokens.
    ///
    /// # Errors
    /// [`PageError`] of the first page that is not taken, for any bytes whatever; those before it were.
    pub fn import_pages(&mut self, bytes: &[u8]) -> Result<usize, PageError> {
        let size = self.arena.exported_bytes();
        bytes.chunks(size).try_for_each(|page| self.arena.import_page(page).map(drop))?;
        Ok(bytes.len() / size * PAGE)
    }

    /// Ends a request, by its place among the active ones.
    fn retire(&mut self, i: usize) {
        if let Some(mut a) = self.active.remove(i) {
            a.give_up_pages(&mut self.arena);
        }
    }

    /// The next batch, with memory for it.
    fn next_batch(&mut self, sink: &mut dyn FnMut(Event)) -> Vec<Part> {
        self.resume(sink);
        loop {
            let waiting: Vec<usize> = self.active.iter().map(Active::waiting).collect();
            let plan = plan(&waiting, self.options.batch_tokens, self.options.prefill_chunk);
            if self.grow(&plan, sink) {
                return plan;
            }
            // none but the last one comes back at once: it would only be preempted again
            if self.active.iter().all(Active::is_preempted) {
                self.resume(sink);
            }
        }
    }

    /// Gives the requests of a batch the pages that they will write to. Says whether there were enough; if not, the
    /// youngest request with pages of its own has given them up.
    fn grow(&mut self, plan: &[Part], sink: &mut dyn FnMut(Event)) -> bool {
        for p in plan {
            let a = &mut self.active[p.active];
            if a.ring.is_some() || self.arena.extend(&mut a.pages, a.n_done + p.n).is_ok() {
                continue;
            }
            let youngest = self.active.iter_mut().rev().find(|a| a.ring.is_none() && !a.is_preempted());
            if let Some(a) = youngest {
                a.give_up_pages(&mut self.arena);
                sink(Event::Preempted { id: a.id });
            }
            return false;
        }
        true
    }

    /// Lets preempted requests go on, the oldest first, as far as there is room. What a request may grow to fits when it is
    /// alone, unless the system has less memory than the arena may take: then it ends.
    fn resume(&mut self, sink: &mut dyn FnMut(Event)) {
        while let Some(i) = self.active.iter().position(Active::is_preempted) {
            let (growing, is_alone) = (self.growing(), self.active.iter().all(Active::is_preempted));
            let a = &mut self.active[i];
            let known = known(&a.request, &a.tokens, a.n_scored);
            match room(&mut self.arena, known, a.tokens.len(), a.request.cache_salt, growing) {
                Ok(pages) => (a.n_done, a.pages) = (pages.n_cached, pages),
                Err(_) if is_alone => {
                    sink(a.done(FinishReason::NoMemory, a.tokens.len() - a.n_prompt));
                    self.retire(i);
                }
                Err(_) => return,
            }
        }
    }

    /// Runs one batch and reports what came of it. Returns the number of tokens processed, 0 if there is nothing to do.
    pub fn step(&mut self, cpu: Cpu, pool: &dyn Pool, sink: &mut dyn FnMut(Event)) -> usize {
        let plan = self.next_batch(sink);
        if plan.is_empty() {
            return 0;
        }
        let n_tokens = plan.iter().map(|p| p.n).sum();
        let layout = *self.arena.layout();
        let Ok(memory) = self.arena.memory_mut(&layout) else { return 0 };
        let runs: Vec<Run<'_>> = plan
            .iter()
            .map(|p| {
                let a = &self.active[p.active];
                let tokens = &a.tokens[a.n_done..a.n_done + p.n];
                let n_logits = usize::from(a.picks_after(p.n));
                Run { tokens, pos: a.n_done, pages: a.ring.as_deref().unwrap_or(&a.pages.pages), n_logits }
            })
            .collect();
        self.model.batch(cpu, pool, &runs, &layout, memory, &mut self.scratch, None);
        let picks = logits_rows(&runs);
        drop(runs);
        sink(Event::Computed { n_tokens });
        self.score(cpu, pool, &plan, sink);
        let out = self.model.logits(cpu, pool, &picks, &mut self.scratch, None);
        let (mut row, mut ended) = (0, Vec::new());
        for p in &plan {
            let a = &mut self.active[p.active];
            a.n_done += p.n;
            if a.n_done < a.tokens.len() {
                continue;
            }
            if a.n_done == a.n_prompt {
                if a.ring.is_none() {
                    self.arena.publish(&a.pages, &a.tokens, a.request.cache_salt);
                }
                sink(Event::Prefilled { id: a.id, n_prompt: a.n_prompt, n_cached: a.n_cached });
            }
            let (picks, mine) = (a.picks_after(0), row);
            row += usize::from(picks);
            if !picks || !a.is_finite {
                let reason = if a.is_finite { FinishReason::Length } else { FinishReason::NotFinite };
                sink(a.done(reason, 0));
                ended.push(p.active);
                continue;
            }
            let (hidden, logits) = (out.hidden(mine), out.logits(mine));
            if let Some(mut done) = a.pick(&self.model, cpu, hidden, logits, sink) {
                if let Event::Done { receipt, .. } = &mut done {
                    *receipt = a.receipt(&self.model, &self.options);
                }
                sink(done);
                ended.push(p.active);
            }
        }
        self.retire_all(ended);
        n_tokens
    }

    /// Retires requests, by their places among the active ones.
    fn retire_all(&mut self, mut ended: Vec<usize>) {
        ended.sort_unstable();
        ended.into_iter().rev().for_each(|i| self.retire(i));
    }

    /// Log-probabilities of the prompts' tokens that are asked for, as far as this batch has them. Logits are made for as
    /// many rows at once as there is memory for.
    fn score(&mut self, cpu: Cpu, pool: &dyn Pool, plan: &[Part], sink: &mut dyn FnMut(Event)) {
        let mut end = 0;
        for p in plan {
            let (a, first) = (&mut self.active[p.active], end);
            end += p.n;
            // the last token's row is for the first of the answer, and those computed a second time have been looked at
            let (from, to) = (a.n_done.max(a.n_scored), (a.n_done + p.n).min(a.n_prompt - 1));
            if !a.request.prompt_logprobs || from >= to {
                continue;
            }
            let (first, n) = (first + from - a.n_done, to - from);
            a.n_scored = to;
            let mut logprobs = Vec::with_capacity(n);
            let mut next = a.tokens[from + 1..].iter();
            for from in (first..first + n).step_by(self.options.max_seqs) {
                let rows = from..(first + n).min(from + self.options.max_seqs);
                let out = self.model.logits(cpu, pool, core::slice::from_ref(&rows), &mut self.scratch, None);
                for (row, token) in (0..out.len()).zip(&mut next) {
                    let (hidden, logits) = (out.hidden(row), out.logits(row));
                    a.is_finite &= hidden.iter().chain(logits).all(|v| v.is_finite());
                    // numbers that are none end the request; until then they have no logarithm
                    logprobs.push(if a.is_finite { a.sampler.score(cpu, logits, *token) } else { (0.0, Vec::new()) });
                }
            }
            sink(Event::Prompt { id: a.id, logprobs });
        }
    }
}

/// Pages for `n_tokens`, those of `known` tokens from the cache, and beside them one for each of the `growing` requests, so
/// that this one does not come only to be preempted.
fn room(
    arena: &mut KvArena,
    known: &[u32],
    n_tokens: usize,
    salt: u64,
    growing: usize,
) -> Result<SeqPages, RequestError> {
    let mut pages = arena.acquire(known, salt);
    let needed = n_tokens.div_ceil(PAGE) - pages.pages.len() + growing;
    let free = arena.available_pages();
    let has_room = if needed <= free {
        arena.extend(&mut pages, n_tokens)
    } else {
        Err(RequestError::NoCapacity { what: "KV pages", needed, free })
    };
    match has_room {
        Ok(()) => Ok(pages),
        Err(no_room) => {
            arena.release(pages);
            Err(no_room)
        }
    }
}

/// Tokens of a request whose pages it may take from the cache. Log-probabilities need the rows of all tokens of a prompt,
/// the known ones too, if only once.
fn known<'a>(request: &Request, tokens: &'a [u32], n_scored: usize) -> &'a [u32] {
    let is_scored = !request.prompt_logprobs || n_scored + 1 >= request.tokens.len();
    if is_scored { tokens } else { &tokens[..n_scored] }
}

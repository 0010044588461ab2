//! Requests in, events out: batching, and the life of a request.
//!
//! Everything that can fail fails in [`Engine::submit`]: it checks the request and reserves the pages that prompt and
//! answer may need. [`Engine::step`] runs one batch, decode rows first, then prefill up to a budget of tokens, and
//! cannot fail; a fault inside one request ends that request alone. A request's tokens do not depend on the others.

use alloc::boxed::Box;
use alloc::collections::{TryReserveError, VecDeque};
use alloc::string::{String, ToString};
use alloc::sync::Arc;
use alloc::vec::Vec;

use sha2::{Digest, Sha256};

use crate::error::RequestError;
use crate::kernels::Cpu;
use crate::kernels::attention::{KvType, PAGE};
use crate::kv::{KvArena, KvStats, PageError, SeqPages};
use crate::model::{Model, Run, Scratch};
use crate::pool::Pool;
use crate::receipt::{Chain, Receipt, ReceiptRequest};
use crate::sampler::{Sampler, SamplingOptions};
use crate::sort::sort_by;
use crate::text::TextStream;

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

/// A prompt to be continued.
#[derive(Debug, Clone, PartialEq)]
pub struct Request {
    /// The prompt.
    pub tokens: Vec<u32>,
    /// How tokens are picked.
    pub sampling: SamplingOptions,
    /// Tokens to generate, at most; `None` for as many as the context holds.
    pub max_tokens: Option<usize>,
    /// Texts that end the answer; they are not part of it.
    pub stop: Vec<String>,
    /// Tokens that end the answer, besides the model's own.
    pub stop_tokens: Vec<u32>,
    /// Whether the model's own end tokens do not end the answer.
    pub ignore_eos: bool,
    /// Which of several answers to one prompt this is: part of the key of the draws.
    pub sequence: u64,
    /// Prompts share cached pages only with prompts of the same salt.
    pub cache_salt: u64,
    /// Whether the answer comes with a receipt.
    pub receipt: bool,
}

impl Request {
    /// A request with default options.
    pub fn new(tokens: Vec<u32>) -> Request {
        Request {
            tokens,
            sampling: SamplingOptions::default(),
            max_tokens: None,
            stop: Vec::new(),
            stop_tokens: Vec::new(),
            ignore_eos: false,
            sequence: 0,
            cache_salt: 0,
            receipt: false,
        }
    }

    /// Checks everything that does not depend on other requests, as [`Engine::submit`] will. Returns how many tokens
    /// the answer may have.
    ///
    /// # Errors
    /// The first thing that is wrong.
    pub fn check(&self, model: &Model, options: &EngineOptions) -> Result<usize, RequestError> {
        let (n_prompt, n_vocab) = (self.tokens.len(), model.config.n_vocab);
        let n_ctx = options.n_ctx.min(model.config.max_context());
        if !model.config.causal {
            return Err(RequestError::Encoder);
        }
        if n_prompt == 0 {
            return Err(RequestError::EmptyPrompt);
        }
        model.check_tokens(self.tokens.iter().chain(&self.stop_tokens))?;
        // the last token generated needs no place of its own
        let max_tokens = self.max_tokens.unwrap_or((n_ctx + 1).saturating_sub(n_prompt).max(1));
        if n_prompt > n_ctx || n_prompt.saturating_add(max_tokens) > n_ctx + 1 {
            return Err(RequestError::ContextLength { prompt: n_prompt, max_tokens, n_ctx });
        }
        if max_tokens == 0 {
            let found = max_tokens.to_string();
            return Err(RequestError::Option { name: "max_tokens", found, expected: "at least 1" });
        }
        if self.stop.len() > MAX_STOPS || self.stop.iter().any(|s| s.len() > MAX_STOP_BYTES) {
            let found = self.stop.len().to_string() + " texts";
            return Err(RequestError::Option { name: "stop", found, expected: "at most 64 texts of 1024 bytes" });
        }
        self.sampling.check(n_vocab)?;
        if self.receipt && options.model_sha256.is_none() {
            let expected = "false: the engine was not given the SHA-256 of its model";
            return Err(RequestError::Option { name: "receipt", found: "true".into(), expected });
        }
        Ok(max_tokens)
    }
}

/// Names a request of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// Why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// The model's end token, or one of the request's.
    StopToken(u32),
    /// A stop string, by its index in the request.
    StopString(usize),
    /// As many tokens as were asked for, or as the context holds.
    Length,
    /// The numbers were no longer finite: a fault of the model's weights with this prompt.
    NotFinite,
    /// There was no memory for more keys and values; only where it could not be reserved when the engine was made.
    NoMemory,
}

impl FinishReason {
    /// The name in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            FinishReason::StopToken(_) | FinishReason::StopString(_) => "stop",
            FinishReason::Length => "length",
            FinishReason::NotFinite => "not_finite",
            FinishReason::NoMemory => "no_memory",
        }
    }
}

/// What happened to a request.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// Its prompt was processed.
    Prefilled {
        /// The request.
        id: RequestId,
        /// Tokens of the prompt, and how many of them were found in the cache.
        n_prompt: usize,
        /// Tokens found in the cache.
        n_cached: usize,
    },
    /// A token was picked.
    Token {
        /// The request.
        id: RequestId,
        /// The token.
        token: u32,
        /// Text that is certain now; may be empty.
        text: String,
        /// Natural logarithm of its probability, if asked for.
        logprob: f32,
        /// The most probable tokens with theirs, if asked for.
        top: Vec<(u32, f32)>,
    },
    /// The answer is complete; the request is forgotten.
    Done {
        /// The request.
        id: RequestId,
        /// Text that was held back.
        text: String,
        /// Why.
        reason: FinishReason,
        /// Tokens picked.
        n_tokens: usize,
        /// What it takes to check the answer, if asked for. Its tokens are all that were picked: an end token is one.
        receipt: Option<Box<Receipt>>,
    },
}

/// Stop strings of a request, and their length: each token's text is searched for all of them.
const MAX_STOPS: usize = 64;
const MAX_STOP_BYTES: usize = 1024;

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

/// A request on its way.
struct Active {
    id: RequestId,
    request: Request,
    sampler: Sampler,
    text: TextStream,
    pages: SeqPages,
    /// Page of each [`PAGE`] positions, where pages are used again and again; otherwise they are those of `pages`.
    ring: Option<Vec<u32>>,
    /// Prompt and answer so far.
    tokens: Vec<u32>,
    n_prompt: usize,
    /// Tokens whose keys and values are in the pages.
    n_done: usize,
    /// Tokens of prompt and answer, at most.
    limit: usize,
    /// Of the answer so far, if a receipt was asked for.
    chain: Option<Chain>,
    /// The token that ended the answer, which is not among `tokens`.
    end: Option<u32>,
}

impl Engine {
    /// An engine for `model`, with all its memory.
    ///
    /// # Errors
    /// If there is not enough.
    pub fn new(model: Arc<Model>, pool: &dyn Pool, mut options: EngineOptions) -> Result<Engine, TryReserveError> {
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

    /// Takes a request: checks all of it and reserves what it may need.
    ///
    /// # Errors
    /// What is wrong with it, or that there is no capacity now.
    pub fn submit(&mut self, request: Request) -> Result<RequestId, RequestError> {
        let max_tokens = request.check(&self.model, &self.options)?;
        let (n_prompt, n_vocab) = (request.tokens.len(), self.model.config.n_vocab);
        if self.active.len() == self.options.max_seqs {
            return Err(RequestError::NoCapacity { what: "sequences", needed: 1, free: 0 });
        }
        let mut sampler = Sampler::new(request.sampling.clone(), n_vocab)?;
        let chain = self.chain(&request);
        let limit = n_prompt + max_tokens;
        let (pages, ring) = self.reserve(&request, limit - 1)?;
        request.tokens.iter().for_each(|&t| sampler.accept(t));
        let mut tokens = Vec::with_capacity(limit);
        tokens.extend_from_slice(&request.tokens);
        let id = RequestId(self.next_id);
        self.next_id += 1;
        let text = TextStream::new(request.stop.clone());
        let n_done = pages.n_cached;
        let end = None;
        let active = Active { id, request, sampler, text, pages, ring, tokens, n_prompt, n_done, limit, chain, end };
        self.active.push_back(active);
        Ok(id)
    }

    /// Pages for `n_tokens` of a request. If there is no room for all of them, and no layer ever looks far back, a ring
    /// of pages: each is used again once all of its tokens are out of sight.
    fn reserve(&mut self, request: &Request, n_tokens: usize) -> Result<(SeqPages, Option<Vec<u32>>), RequestError> {
        let mut pages = self.arena.acquire(&request.tokens, request.cache_salt);
        let Err(no_room) = self.arena.extend(&mut pages, n_tokens) else { return Ok((pages, None)) };
        self.arena.release(pages);
        let Some(window) = self.model.config.window() else { return Err(no_room) };
        // what the first row of a batch sees and what all of them write, wherever that starts in a page
        let span = window.saturating_add(self.options.batch_tokens.max(1) - 1);
        let (n_pages, ring) = (n_tokens.div_ceil(PAGE), span.div_ceil(PAGE) + 1);
        if ring >= n_pages {
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

    /// The start of a receipt, if one is asked for.
    fn chain(&self, request: &Request) -> Option<Chain> {
        let model = self.options.model_sha256.filter(|_| request.receipt)?;
        Some(Chain::start(&model, &asked(request, &self.model, &self.options)))
    }

    /// Forgets a request; its pages are free at once. Says whether it was there.
    pub fn cancel(&mut self, id: RequestId) -> bool {
        let Some(i) = self.active.iter().position(|a| a.id == id) else { return false };
        if let Some(a) = self.active.remove(i) {
            self.retire(a);
        }
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

    /// Gives a request's pages back; those that are full stay known to later prompts.
    fn retire(&mut self, a: Active) {
        if a.ring.is_none() {
            self.arena.publish(&a.pages, &a.tokens[..a.n_done], a.request.cache_salt);
        }
        self.arena.release(a.pages);
    }

    /// Runs one batch and reports what came of it. Returns the number of tokens processed, 0 if there is nothing to do.
    pub fn step(&mut self, cpu: Cpu, pool: &dyn Pool, sink: &mut dyn FnMut(Event)) -> usize {
        let mut plan = self.plan();
        if plan.is_empty() {
            return 0;
        }
        let mut ended = Vec::new();
        plan.retain(|p| {
            let a = &mut self.active[p.active];
            let pages = a.ring.as_deref().unwrap_or(&a.pages.pages);
            let committed = self.arena.commit(&pages[a.n_done / PAGE..(a.n_done + p.n).div_ceil(PAGE)]);
            if committed.is_err() {
                sink(a.done(FinishReason::NoMemory, a.tokens.len() - a.n_prompt));
                ended.push(p.active);
            }
            committed.is_ok()
        });
        if plan.is_empty() {
            self.retire_all(ended);
            return 0;
        }
        let layout = *self.arena.layout();
        let Ok(memory) = self.arena.memory_mut(&layout) else { return 0 };
        let runs: Vec<Run<'_>> = plan
            .iter()
            .map(|p| {
                let a = &self.active[p.active];
                let tokens = &a.tokens[a.n_done..a.n_done + p.n];
                let n_logits = usize::from(a.n_done + p.n == a.tokens.len());
                Run { tokens, pos: a.n_done, pages: a.ring.as_deref().unwrap_or(&a.pages.pages), n_logits }
            })
            .collect();
        let out = self.model.forward(cpu, pool, &runs, &layout, memory, &mut self.scratch, None);
        drop(runs);
        let mut row = 0;
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
                sink(Event::Prefilled { id: a.id, n_prompt: a.n_prompt, n_cached: a.pages.n_cached });
            }
            let (hidden, logits) = (out.hidden(row), out.logits(row));
            row += 1;
            if let Some(mut done) = a.pick(&self.model, cpu, hidden, logits, sink) {
                if let Event::Done { receipt, .. } = &mut done {
                    *receipt = a.receipt(&self.model, &self.options);
                }
                sink(done);
                ended.push(p.active);
            }
        }
        let n = plan.iter().map(|p| p.n).sum();
        self.retire_all(ended);
        n
    }

    /// Retires requests, by their places among the active ones.
    fn retire_all(&mut self, mut ended: Vec<usize>) {
        sort_by(&mut ended, usize::cmp);
        for i in ended.into_iter().rev() {
            if let Some(a) = self.active.remove(i) {
                self.retire(a);
            }
        }
    }

    /// Decode rows of all sequences, then prefill in order of submission, up to the budget.
    fn plan(&self) -> Vec<Part> {
        let mut plan = Vec::with_capacity(self.active.len());
        let waiting = |a: &Active| a.tokens.len() - a.n_done;
        plan.extend(
            (0..self.active.len()).filter(|&i| waiting(&self.active[i]) == 1).map(|active| Part { active, n: 1 }),
        );
        let mut budget = self.options.batch_tokens.saturating_sub(plan.len());
        for (active, a) in self.active.iter().enumerate().filter(|(_, a)| waiting(a) > 1) {
            if budget == 0 {
                break;
            }
            let n = waiting(a).min(budget);
            budget -= n;
            plan.push(Part { active, n });
        }
        plan
    }
}

/// What a receipt says of a request.
fn asked(request: &Request, model: &Model, options: &EngineOptions) -> ReceiptRequest {
    let Request { tokens, sampling, sequence, .. } = request;
    ReceiptRequest {
        prompt: tokens.clone(),
        sampling: sampling.clone(),
        sequence: *sequence,
        kv_type: options.kv_type,
        long_context: model.is_long_context(options.n_ctx),
    }
}

/// A request's share of a batch.
struct Part {
    active: usize,
    n: usize,
}

impl Active {
    /// Picks the next token; returns the final event if the answer is complete.
    fn pick(
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
        let pick = self.sampler.pick(cpu, logits, self.request.sequence, self.tokens.len() as u64, None);
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
        if self.tokens.len() == self.limit {
            return Some(self.done(FinishReason::Length, n_tokens + 1));
        }
        None
    }

    fn done(&mut self, reason: FinishReason, n_tokens: usize) -> Event {
        let piece = self.text.finish();
        let reason = piece.stopped.map_or(reason, FinishReason::StopString);
        Event::Done { id: self.id, text: piece.text, reason, n_tokens, receipt: None }
    }

    /// The receipt of the complete answer, if one was asked for.
    fn receipt(&mut self, model: &Model, options: &EngineOptions) -> Option<Box<Receipt>> {
        let (chain, sha256) = (self.chain.take()?, options.model_sha256?);
        let request = asked(&self.request, model, options);
        let output = self.tokens[self.n_prompt..].iter().copied().chain(self.end).collect();
        Some(Box::new(chain.receipt(&sha256, request, output)))
    }
}

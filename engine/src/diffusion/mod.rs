//! Generation by diffusion (Nie et al., arXiv:2502.09992, LLaDA; Dream; RND1): an answer of fixed length begins as mask tokens.
//! Each step computes the logits of the whole text in one pass and replaces some masks by tokens.
//!
//! ```text
//! x = prompt + mask * length
//! for each block of the answer, for each of its steps:
//!     logits = forward(x);  token[p], confidence[p] = sample(logits[p]) for each mask p of the block
//!     replace the masks of the highest confidence; how many is the schedule's
//! ```
//!
//! As llama.cpp's `examples/diffusion`, with these differences: the mask token is never sampled, so no mask is left; at
//! temperature 0 the most probable token is taken; [`Algorithm::Entropy`] prefers low entropy, as Dream does.
//!
//! Prompt, options, seed and KV type determine every token: draws are keyed by step and position, sums of the schedule
//! and of confidences have one order.

mod confidence;
mod schedule;
#[cfg(test)]
mod tests;

use alloc::format;
use alloc::string::ToString;
use alloc::vec;
use alloc::vec::Vec;

use thiserror::Error;

use self::confidence::Confidence;
use self::schedule::Plan;
pub use self::schedule::Schedule;
use crate::error::{MemoryError, RequestError};
use crate::kernels::attention::{KvLayout, KvMemory, KvType, PAGE};
use crate::kernels::recurrent::StateMemory;
use crate::model::{Exec, KvRef, Model, Run, Scratch, ScratchSize};
use crate::pool::Pool;
use crate::sampler::{LogprobKind, Sampler, SamplingOptions, uniform};

/// Most steps: one pass over the whole text each.
pub const MAX_STEPS: usize = 1 << 16;

/// Which masks are replaced first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Algorithm {
    /// Each mask by chance, so that the expected number is the schedule's.
    Origin,
    /// Those whose distribution has the lowest entropy.
    Entropy,
    /// Those whose two most probable tokens differ most in probability.
    Margin,
    /// In random order.
    Random,
    /// Those whose sampled token is the most probable.
    #[default]
    Confidence,
}

impl Algorithm {
    /// All algorithms, by llama.cpp's numbers.
    pub const ALL: [Algorithm; 5] =
        [Algorithm::Origin, Algorithm::Entropy, Algorithm::Margin, Algorithm::Random, Algorithm::Confidence];

    /// The name of the algorithm.
    pub fn name(self) -> &'static str {
        match self {
            Algorithm::Origin => "origin",
            Algorithm::Entropy => "entropy",
            Algorithm::Margin => "margin",
            Algorithm::Random => "random",
            Algorithm::Confidence => "confidence",
        }
    }
}

/// Options of generation by diffusion.
#[derive(Debug, Clone, PartialEq)]
pub struct DiffusionOptions {
    /// Tokens of the answer.
    pub length: usize,
    /// Steps in total, at most [`MAX_STEPS`]; each block has at least one.
    pub steps: usize,
    /// How many masks a step replaces.
    pub schedule: Schedule,
    /// Which masks a step replaces.
    pub algorithm: Algorithm,
    /// Filters, temperature and seed of the sampled tokens. Penalties are not applied.
    pub sampling: SamplingOptions,
    /// Element type of keys and values. Changes results.
    pub kv_type: KvType,
    /// Tokens of prompt and answer together, at most.
    pub n_ctx: usize,
}

/// Why an answer was not generated.
#[derive(Debug, Clone, PartialEq, Error)]
#[non_exhaustive]
pub enum DiffusionError {
    /// The model generates token by token, or not at all.
    #[error("the architecture `{0}` does not generate by diffusion")]
    Architecture(&'static str),
    /// The file does not say which token is the mask.
    #[error("`tokenizer.ggml.mask_token_id` is nothing, expected the id of the mask token, which diffusion needs")]
    NoMask,
    /// Prompt or options are invalid.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// There is not enough memory.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// A logit is infinite or NaN.
    #[error("the model produced a logit that is not finite in step {step}: its weights are damaged")]
    NotFinite {
        /// The step, counted from 0.
        step: usize,
    },
}

/// An answer that is being generated.
pub struct Diffusion<'m> {
    model: &'m Model,
    options: DiffusionOptions,
    mask: u32,
    /// 1 if the logits of a token are at the position before it.
    shift: usize,
    n_prompt: usize,
    /// Prompt and answer.
    tokens: Vec<u32>,
    /// Whether a token of the answer is a mask still.
    is_masked: Vec<bool>,
    plan: Plan,
    kv: KvLayout,
    memory: KvMemory,
    pages: Vec<u32>,
    scratch: Scratch,
    sampler: Sampler,
    confidence: Confidence,
    /// All tokens but the mask, as a mask of [`Sampler::pick`].
    allowed: Vec<u32>,
}

impl<'m> Diffusion<'m> {
    /// Checks prompt and options, and reserves the memory.
    ///
    /// # Errors
    /// [`DiffusionError`] names what is wrong. Nothing was computed.
    pub fn new(
        model: &'m Model,
        pool: &dyn Pool,
        prompt: &[u32],
        options: DiffusionOptions,
    ) -> Result<Diffusion<'m>, DiffusionError> {
        let config = model.config.diffusion.ok_or(DiffusionError::Architecture(model.config.arch.name))?;
        let mask = config.mask.ok_or(DiffusionError::NoMask)?;
        let n = check(model, prompt, &options)?;
        let n_vocab = model.config.n_vocab;
        let n_first = prompt.len().saturating_sub(usize::from(config.shifted));
        let size = ScratchSize { rows: n, logits: n - n_first, seqs: 1, n_ctx: n };
        let kv = model.config.batch_kv_layout(options.kv_type);
        let pages: Vec<u32> = (0..n.div_ceil(PAGE) as u32).collect();
        let mut memory = KvMemory::zeroed(&kv, pages.len()).map_err(MemoryError::from)?;
        memory.states = StateMemory::zeroed(model.config.state_len(), 1).map_err(MemoryError::from)?;
        let logprobs = if options.sampling.temperature == 0.0 { LogprobKind::Raw } else { LogprobKind::Final };
        let top_logprobs = if options.algorithm == Algorithm::Margin { 2 } else { 0 };
        let sampling = SamplingOptions { logprobs, top_logprobs, ..options.sampling.clone() };
        let mut allowed = vec![u32::MAX; n_vocab.div_ceil(32)];
        allowed[mask as usize / 32] &= !(1 << (mask % 32));
        Ok(Diffusion {
            model,
            mask,
            shift: usize::from(config.shifted),
            n_prompt: prompt.len(),
            tokens: [prompt, &vec![mask; options.length]].concat(),
            is_masked: vec![true; options.length],
            plan: Plan::new(options.schedule, options.length, options.steps),
            kv,
            memory,
            pages,
            scratch: model.scratch(pool, options.kv_type, size)?,
            sampler: Sampler::new(sampling, n_vocab)?,
            confidence: Confidence::new(options.algorithm, n_vocab),
            options,
            allowed,
        })
    }

    /// Prompt and answer, with mask tokens where nothing is generated yet.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The answer, up to the first token that ends a text.
    pub fn answer(&self) -> &[u32] {
        let answer = &self.tokens[self.n_prompt..];
        let end = answer.iter().position(|token| self.model.tokenizer.is_end_of_generation(*token));
        &answer[..end.unwrap_or(answer.len())]
    }

    /// Mask tokens that are left.
    pub fn n_masked(&self) -> usize {
        self.is_masked.iter().filter(|masked| **masked).count()
    }

    /// Steps that were computed or had nothing to compute, and their number in total.
    pub fn progress(&self) -> (usize, usize) {
        (self.plan.step(), self.plan.n_steps())
    }

    /// Computes the next step that replaces a mask: one pass over the whole text. Returns whether more steps follow.
    ///
    /// # Errors
    /// [`DiffusionError::NotFinite`].
    pub fn step(&mut self, exec: Exec<'_>) -> Result<bool, DiffusionError> {
        let is_masked = &self.is_masked;
        let masks_of = |block: core::ops::Range<usize>| block.filter(|at| is_masked[*at]).collect::<Vec<usize>>();
        let Some((step, block, n)) = self.plan.next(|block| masks_of(block).len()) else { return Ok(false) };
        let masks = masks_of(block);
        // the first position whose logits are needed
        let first = (self.n_prompt + masks[0]).saturating_sub(self.shift);
        let n_logits = self.tokens.len() - first;
        let run = Run { tokens: &self.tokens, pos: 0, pages: &self.pages, state: 0, n_logits };
        let kv = KvRef { layout: &self.kv, memory: &mut self.memory };
        let out = self.model.forward(exec, &[run], kv, &mut self.scratch, None);
        let row_of = |at: usize| (self.n_prompt + at).saturating_sub(self.shift) - first;
        if masks.iter().any(|at| out.logits(row_of(*at)).iter().any(|x| !x.is_finite())) {
            return Err(DiffusionError::NotFinite { step });
        }
        // draws of tokens and of the order have sequences of their own
        let [of_tokens, of_order] = [2 * step as u64, 2 * step as u64 + 1];
        let seed = self.options.sampling.seed;
        let chance = n as f64 / masks.len() as f64;
        let mut found = Vec::with_capacity(masks.len());
        for at in masks {
            let position = (self.n_prompt + at) as u64;
            let draw = uniform(seed, of_order, position);
            if self.options.algorithm == Algorithm::Origin && draw >= chance {
                continue;
            }
            let logits = out.logits(row_of(at));
            let pick = self.sampler.pick(exec.cpu, logits, of_tokens, position, Some(&self.allowed));
            found.push((self.confidence.of(exec.cpu, logits, &pick, draw), at, pick.token));
        }
        if self.options.algorithm != Algorithm::Origin {
            found.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
            found.truncate(n);
        }
        for (_, at, token) in found {
            (self.tokens[self.n_prompt + at], self.is_masked[at]) = (token, false);
        }
        debug_assert!(self.plan.step() < self.plan.n_steps() || self.n_masked() == 0);
        Ok(self.n_masked() > 0)
    }

    /// The id of the mask token.
    pub fn mask(&self) -> u32 {
        self.mask
    }
}

/// Checks prompt and options; returns the tokens of prompt and answer together.
fn check(model: &Model, prompt: &[u32], options: &DiffusionOptions) -> Result<usize, RequestError> {
    let option = |name, found: usize, expected| RequestError::Option { name, found: found.to_string(), expected };
    model.check_tokens(prompt)?;
    options.sampling.check(model.config.n_vocab)?;
    if options.length == 0 {
        return Err(option("length", 0, "at least 1 token"));
    }
    let n_ctx = options.n_ctx.min(model.config.max_context());
    let n = prompt.len().saturating_add(options.length);
    if n > n_ctx {
        return Err(RequestError::ContextLength { prompt: prompt.len(), max_tokens: options.length, n_ctx });
    }
    if !(1..=MAX_STEPS).contains(&options.steps) {
        return Err(option("steps", options.steps, "1 to 65536"));
    }
    match options.schedule {
        Schedule::Blocks { length: 0 } => Err(option("block_length", 0, "at least 1 token")),
        Schedule::Timesteps { eps } if !(eps > 0.0 && eps < 1.0) => {
            Err(RequestError::Option { name: "eps", found: format!("{eps}"), expected: "a number above 0 and below 1" })
        }
        _ => Ok(n),
    }
}

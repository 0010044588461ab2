//! What goes in and what comes out of an engine.

use alloc::boxed::Box;
use alloc::string::{String, ToString};
use alloc::sync::Arc;
use alloc::vec::Vec;

use super::EngineOptions;
use crate::error::RequestError;
use crate::model::Model;
use crate::receipt::Receipt;
use crate::sampler::{Constraint, ConstraintError, SamplingOptions};

/// Stop strings of a request, and their length: each token's text is searched for all of them.
const MAX_STOPS: usize = 64;
const MAX_STOP_BYTES: usize = 1024;

/// A prompt to be continued.
#[derive(Debug, Clone)]
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
    /// Whether each token of the prompt comes with its log-probability and those of [`SamplingOptions::top_logprobs`]
    /// others, as [`LogprobKind::Raw`](crate::sampler::LogprobKind). Then the prompt is computed whole, whatever the
    /// cache has of it, and the answer may have no tokens.
    pub prompt_logprobs: bool,
    /// What the answer has to be: only tokens are picked that it allows, and those that end the answer exactly where the
    /// text may end. The request starts where the constraint stands, and does not change it. Stop strings cut what was
    /// made by it.
    pub constraint: Option<Arc<dyn Constraint>>,
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
            prompt_logprobs: false,
            constraint: None,
        }
    }

    /// Checks everything that does not depend on other requests, as [`Engine::submit`](super::Engine::submit) will.
    /// Returns how many tokens the answer may have.
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
        if max_tokens == 0 && (self.receipt || !self.prompt_logprobs) {
            let found = max_tokens.to_string();
            return Err(RequestError::Option { name: "max_tokens", found, expected: "at least 1" });
        }
        if self.stop.len() > MAX_STOPS || self.stop.iter().any(|s| s.len() > MAX_STOP_BYTES) {
            let found = self.stop.len().to_string() + " texts";
            return Err(RequestError::Option { name: "stop", found, expected: "at most 64 texts of 1024 bytes" });
        }
        self.sampling.check(n_vocab)?;
        if self.receipt && options.model_sha256.is_none() {
            let expected = "false: the SHA-256 of the model file was not computed at load";
            return Err(RequestError::Option { name: "receipt", found: "true".into(), expected });
        }
        if self.receipt && self.constraint.is_some() {
            let expected = "false with a constraint: a receipt does not record it, so its replay would differ";
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
    /// The constraint allows nothing more.
    Complete,
    /// As many tokens as were asked for, or as the context holds.
    Length,
    /// The numbers were no longer finite: a fault of the model's weights with this prompt.
    NotFinite,
    /// There was no memory for more keys and values; only where it could not be reserved when the engine was made.
    NoMemory,
    /// The constraint cannot go on.
    Constraint(ConstraintError),
}

impl FinishReason {
    /// The name in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            FinishReason::StopToken(_) | FinishReason::StopString(_) | FinishReason::Complete => "stop",
            FinishReason::Length => "length",
            FinishReason::NotFinite => "not_finite",
            FinishReason::NoMemory => "no_memory",
            FinishReason::Constraint(_) => "constraint",
        }
    }
}

/// A token's log-probability, and the most probable tokens with theirs.
pub type TokenLogprobs = (f32, Vec<(u32, f32)>);

/// What happened in a step.
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// The batch went through the model; the events after this one are of its rows. For hosts that measure.
    Computed {
        /// Tokens of the batch.
        n_tokens: usize,
    },
    /// There is no room to go on with all requests: this one, the youngest, gave up its pages. It goes on by itself, with
    /// the same tokens, once there is room again; nothing is said twice.
    Preempted {
        /// The request.
        id: RequestId,
    },
    /// Some tokens of a prompt have their log-probabilities; those of its first token are none.
    Prompt {
        /// The request.
        id: RequestId,
        /// Of the next tokens, in order.
        logprobs: Vec<TokenLogprobs>,
    },
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

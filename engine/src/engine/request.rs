//! Requests and events: the input and output of an engine.

use alloc::boxed::Box;
use alloc::format;
use alloc::string::{String, ToString};
use alloc::sync::Arc;
use alloc::vec::Vec;

use super::EngineOptions;
use crate::draft::Speculation;
use crate::error::RequestError;
use crate::model::Model;
use crate::receipt::Receipt;
use crate::sampler::{Constraint, ConstraintError, SamplingOptions};

/// Limits of stop strings: the text of each token is searched for all of them.
const MAX_STOPS: usize = 64;
const MAX_STOP_BYTES: usize = 1024;

/// A prompt, and how to continue it.
#[derive(Debug, Clone)]
pub struct Request {
    /// Token ids of the prompt.
    pub tokens: Vec<u32>,
    /// Sampling options.
    pub sampling: SamplingOptions,
    /// Maximal number of tokens to generate; `None` for as many as the context holds.
    pub max_tokens: Option<usize>,
    /// Stop strings: generation ends before the first that occurs. At most 64, of at most 1024 bytes.
    pub stop: Vec<String>,
    /// Tokens that end generation, besides the model's end tokens.
    pub stop_tokens: Vec<u32>,
    /// Whether generation continues after the model's end tokens.
    pub ignore_eos: bool,
    /// Control tokens whose text is part of the output, ascending. That of others is not.
    pub visible: Vec<u32>,
    /// Index of this answer among several to one prompt; part of the key of the random draws.
    pub sequence: u64,
    /// Prompts reuse cached pages only of prompts with the same salt.
    pub cache_salt: u64,
    /// Whether [`Event::Done`] carries a receipt.
    pub receipt: bool,
    /// Whether each prompt token is reported with its log-probability and the [`SamplingOptions::top_logprobs`] most
    /// probable tokens, as [`LogprobKind::Raw`](crate::sampler::LogprobKind). Then no cached page is reused, since
    /// every row must be computed, and `max_tokens` may be 0.
    pub prompt_logprobs: bool,
    /// Constraint on the generated text, e.g. a grammar: only tokens that it allows are sampled, and end tokens only
    /// where the text may end. The request works on a fork of it. Stop strings apply to the text as without a
    /// constraint.
    pub constraint: Option<Arc<dyn Constraint>>,
    /// Tokens that another engine has generated for this request before it failed. They are computed like a prompt, and
    /// the answer goes on after them with the same bytes; their events are not repeated. `max_tokens` counts them.
    pub generated: Vec<u32>,
    /// Speculative decoding; changes no byte of the output. Off by default.
    pub speculation: Speculation,
}

impl Request {
    /// A request to continue `tokens` with default sampling options and no limits but the context.
    pub fn new(tokens: Vec<u32>) -> Request {
        Request {
            tokens,
            sampling: SamplingOptions::default(),
            max_tokens: None,
            stop: Vec::new(),
            stop_tokens: Vec::new(),
            ignore_eos: false,
            visible: Vec::new(),
            sequence: 0,
            cache_salt: 0,
            receipt: false,
            prompt_logprobs: false,
            constraint: None,
            generated: Vec::new(),
            speculation: Speculation::default(),
        }
    }

    /// Checks everything that does not depend on other requests, as [`Engine::submit`](super::Engine::submit) does.
    /// Returns the maximal number of tokens to generate.
    ///
    /// # Errors
    /// [`RequestError`] of the first field that is invalid.
    pub fn check(&self, model: &Model, options: &EngineOptions) -> Result<usize, RequestError> {
        let (n_prompt, n_vocab) = (self.tokens.len(), model.config.n_vocab);
        let n_ctx = options.n_ctx.min(model.config.max_context());
        model.config.check_generates()?;
        if n_prompt == 0 {
            return Err(RequestError::EmptyPrompt);
        }
        model.check_tokens(self.tokens.iter().chain(&self.stop_tokens).chain(&self.generated))?;
        // + 1: the last token generated is never input, so it needs no position
        let max_tokens = self.max_tokens.unwrap_or((n_ctx + 1).saturating_sub(n_prompt).max(1));
        if n_prompt > n_ctx || n_prompt.saturating_add(max_tokens) > n_ctx + 1 {
            return Err(RequestError::ContextLength { prompt: n_prompt, max_tokens, n_ctx });
        }
        if self.generated.len() > max_tokens {
            let found = format!("{} tokens", self.generated.len());
            return Err(RequestError::Option { name: "generated", found, expected: "at most max_tokens" });
        }
        if self.receipt && !self.generated.is_empty() {
            let expected = "no tokens with a receipt, which needs the hidden states of all of them";
            return Err(RequestError::Option { name: "generated", found: "tokens".into(), expected });
        }
        if max_tokens == 0 && (self.receipt || !self.prompt_logprobs) {
            let found = max_tokens.to_string();
            return Err(RequestError::Option { name: "max_tokens", found, expected: "at least 1" });
        }
        if self.stop.len() > MAX_STOPS {
            let found = format!("a list of {} strings", self.stop.len());
            return Err(RequestError::Option { name: "stop", found, expected: "at most 64 strings" });
        }
        if let Some(text) = self.stop.iter().find(|text| text.len() > MAX_STOP_BYTES) {
            let found = format!("a string of {} bytes", text.len());
            return Err(RequestError::Option { name: "stop", found, expected: "strings of at most 1024 bytes" });
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

/// Identifies a request within its engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// Why generation ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// An end token of the model or a stop token of the request was sampled.
    StopToken(u32),
    /// A stop string occurred; its index in [`Request::stop`].
    StopString(usize),
    /// The constraint allows no further token.
    Complete,
    /// `max_tokens` or the context is reached.
    Length,
    /// The host has ended the request at its deadline ([`Engine::finish`](super::Engine::finish)).
    Deadline,
    /// The host has ended the answer because its text is not allowed.
    ContentFilter,
    /// Hidden state or logits contain an infinity or NaN, caused by the model's weights with this prompt.
    NotFinite,
    /// A KV page could not be allocated; only where the system cannot commit the memory that the engine reserved.
    NoMemory,
    /// The constraint failed.
    Constraint(ConstraintError),
}

impl FinishReason {
    /// The reason's name in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            FinishReason::StopToken(_) | FinishReason::StopString(_) | FinishReason::Complete => "stop",
            FinishReason::Length => "length",
            FinishReason::Deadline => "timeout",
            FinishReason::ContentFilter => "content_filter",
            FinishReason::NotFinite => "not_finite",
            FinishReason::NoMemory => "no_memory",
            FinishReason::Constraint(_) => "constraint",
        }
    }
}

/// The log-probability of a token, and the most probable tokens with theirs.
pub type TokenLogprobs = (f32, Vec<(u32, f32)>);

/// An event of [`Engine::step`](super::Engine::step).
#[derive(Debug, Clone, PartialEq)]
pub enum Event {
    /// The forward pass of the batch is done; the following events are of its rows. For hosts that measure time.
    Computed {
        /// Tokens of the batch, draft tokens included.
        n_tokens: usize,
    },
    /// KV pages ran out, and the engine preempted this request, the youngest. It resumes by itself with the same tokens
    /// when pages are free; no event is repeated.
    Preempted {
        /// The request.
        id: RequestId,
    },
    /// Log-probabilities of the next prompt tokens. The first prompt token has none.
    Prompt {
        /// The request.
        id: RequestId,
        /// One entry per token, in order; they continue those of the request's events before this one.
        logprobs: Vec<TokenLogprobs>,
    },
    /// The prompt is computed.
    Prefilled {
        /// The request.
        id: RequestId,
        /// Tokens of the prompt.
        n_prompt: usize,
        /// Prompt tokens found in the prefix cache.
        n_cached: usize,
    },
    /// A token was sampled.
    Token {
        /// The request.
        id: RequestId,
        /// The token id.
        token: u32,
        /// Text to append to the output; empty while the bytes may begin a character or a stop string.
        text: String,
        /// Natural logarithm of the token's probability, if requested, else 0.
        logprob: f32,
        /// The most probable tokens with their log-probabilities, if requested.
        top: Vec<(u32, f32)>,
    },
    /// A step drafted tokens of the request; the events of the accepted ones, and of the one sampled after them, come
    /// before this.
    Drafted {
        /// The request.
        id: RequestId,
        /// Tokens drafted.
        n_drafted: usize,
        /// Drafted tokens that were sampled.
        n_accepted: usize,
    },
    /// The request has ended and is no longer active.
    Done {
        /// The request.
        id: RequestId,
        /// Text that was held back.
        text: String,
        /// Why generation ended.
        reason: FinishReason,
        /// Number of sampled tokens, an end token included.
        n_tokens: usize,
        /// The receipt, if requested. Its output has all sampled tokens, an end token included.
        receipt: Option<Box<Receipt>>,
    },
}

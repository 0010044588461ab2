//! Options that all generation endpoints share: their types, ranges and conversion to the engine's request.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use starling::engine::{EngineOptions, Request};
use starling::error::RequestError;
use starling::kernels::attention::PAGE;
use starling::model::Model;
use starling::sampler::{ALL_TOKENS, Constraint, DRY_BREAKERS, Dry, LogprobKind, PenaltyScope, SamplingOptions};
use starling::tokenizer::Tokenizer;

use crate::error::{ApiError, quoted};
use crate::whole::{integer, limit};

/// DRY sequence breakers of a request, at most, and bytes of one, at most.
const MAX_BREAKERS: usize = 16;
const MAX_BREAKER: usize = 40;
/// Bytes of `cache_salt`, at most: it is hashed for each prompt.
const MAX_SALT: usize = 1024;

/// Generation options: OpenAI's; others have their names in llama-server and vLLM.
#[derive(Debug, Clone, Default, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Options {
    /// Model name. Default: the model that the server has.
    pub model: Option<String>,
    /// Stream the response as server-sent events.
    pub stream: Option<bool>,
    /// Options of the stream.
    pub stream_options: Option<StreamOptions>,
    /// Number of choices for each prompt. Default: 1.
    #[cfg_attr(feature = "openapi", schema(minimum = 1, maximum = 128))]
    pub n: Option<u32>,
    /// Maximum number of tokens to generate; a number larger than what fits the context is cut to it. -1: as many as fit.
    #[serde(default, deserialize_with = "limit")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<i64>, minimum = -1))]
    pub max_tokens: Option<u64>,
    /// Maximum number of tokens to generate; takes precedence over `max_tokens`. -1: as many as fit.
    #[serde(default, deserialize_with = "limit")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<i64>, minimum = -1))]
    pub max_completion_tokens: Option<u64>,
    /// Stop strings: generation ends before the first of them.
    pub stop: Option<OneOrMany>,
    /// Token IDs that end generation, besides the model's end tokens.
    pub stop_token_ids: Option<Vec<u32>>,
    /// Continue after the model's end token.
    pub ignore_eos: Option<bool>,
    /// Random seed: the same request with the same seed has the same output. -1: another one for each request.
    #[serde(default, deserialize_with = "seed")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<i64>))]
    pub seed: Option<Seed>,
    /// Sampling temperature, 0 to 2; 0 always takes the most probable token. Default: 1.
    #[cfg_attr(feature = "openapi", schema(minimum = 0, maximum = 2))]
    pub temperature: Option<f32>,
    /// Nucleus sampling: keep the most probable tokens with this total probability. 1, the default, keeps all; 0 keeps one,
    /// as `temperature` 0 does.
    #[cfg_attr(feature = "openapi", schema(minimum = 0, maximum = 1))]
    pub top_p: Option<f32>,
    /// Keep this number of the most probable tokens. 0 or -1, the default, keeps all.
    #[cfg_attr(feature = "openapi", schema(minimum = -1))]
    pub top_k: Option<i64>,
    /// Keep tokens at least this fraction as probable as the most probable one. Default: 0.
    #[cfg_attr(feature = "openapi", schema(minimum = 0, maximum = 1))]
    pub min_p: Option<f32>,
    /// Locally typical sampling: keep the most typical tokens with this total probability. Default: 1.
    #[cfg_attr(feature = "openapi", schema(exclusive_minimum = 0, maximum = 1))]
    pub typical_p: Option<f32>,
    /// Added to the logits of tokens, by token ID; -100 to 100.
    pub logit_bias: Option<BTreeMap<String, f32>>,
    /// OpenAI frequency penalty, -2 to 2: subtracted from the logit of a token for each occurrence in the tokens of
    /// `penalty_scope`.
    #[cfg_attr(feature = "openapi", schema(minimum = -2, maximum = 2))]
    pub frequency_penalty: Option<f32>,
    /// OpenAI presence penalty, -2 to 2: subtracted once from the logit of a token that occurs in the tokens of
    /// `penalty_scope`.
    #[cfg_attr(feature = "openapi", schema(minimum = -2, maximum = 2))]
    pub presence_penalty: Option<f32>,
    /// Tokens that `frequency_penalty` and `presence_penalty` count: `answer`, generated tokens, as OpenAI and vLLM do;
    /// `all`, prompt tokens too, as llama.cpp does. Default: `all` on `/v1/generate` and `/execute`, else `answer`.
    pub penalty_scope: Option<Scope>,
    /// Repetition penalty: divides the positive logits of tokens of the prompt or the output, multiplies the negative ones.
    #[serde(alias = "repeat_penalty")]
    #[cfg_attr(feature = "openapi", schema(exclusive_minimum = 0))]
    pub repetition_penalty: Option<f32>,
    /// Number of last tokens that penalties count (llama-server); -1, the default, for all, 0 turns penalties off.
    #[cfg_attr(feature = "openapi", schema(minimum = -1))]
    pub repeat_last_n: Option<i64>,
    /// Strength of the DRY penalty on repeated sequences. 0, the default, is off.
    #[cfg_attr(feature = "openapi", schema(minimum = 0))]
    pub dry_multiplier: Option<f32>,
    /// Growth of the DRY penalty with each repeated token. Default: 1.75.
    #[cfg_attr(feature = "openapi", schema(minimum = 1))]
    pub dry_base: Option<f32>,
    /// Length of repeated sequences without a DRY penalty. Default: 2.
    #[cfg_attr(feature = "openapi", schema(minimum = 1))]
    pub dry_allowed_length: Option<u32>,
    /// Number of last tokens that DRY searches for repeated sequences; -1, the default, for all.
    #[cfg_attr(feature = "openapi", schema(minimum = -1))]
    pub dry_penalty_last_n: Option<i64>,
    /// Strings that end a repeated sequence: at most 16, of at most 40 bytes. Default: newline, colon, quotation mark and
    /// asterisk.
    pub dry_sequence_breakers: Option<Vec<String>>,
    /// Scheduling priority: `high`, `normal` or `low`, or a number: below 0 is high, above 0 is low.
    pub priority: Option<PriorityName>,
    /// Session ID.
    pub session_id: Option<String>,
    /// Slot that keeps the conversation (llama-server); -1, the default, for the one unused longest.
    #[cfg_attr(feature = "openapi", schema(minimum = -1))]
    pub id_slot: Option<i64>,
    /// Salt of the prefix cache: requests share cached prompts only with those of the same salt and tenant.
    pub cache_salt: Option<String>,
    /// Return a receipt, by which anyone can replay and verify the output.
    pub receipt: Option<bool>,
    /// Time limit of the request in seconds, queue included; at most that of the server. The header `x-request-timeout` is
    /// another way to give it; the smaller one counts.
    #[cfg_attr(feature = "openapi", schema(exclusive_minimum = 0))]
    pub timeout: Option<f64>,
    /// At the time limit, return what has been generated, with `finish_reason` `timeout`, rather than an error.
    pub timeout_partial: Option<bool>,
    /// End user: the users of a tenant are scheduled in turn.
    pub user: Option<String>,
}

/// Tokens that penalties count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// Prompt and generated tokens.
    All,
    /// Generated tokens.
    Answer,
}

/// Options of a stream.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct StreamOptions {
    /// Send the token counts as the last chunk.
    pub include_usage: Option<bool>,
}

/// A string or a list of strings.
#[derive(Debug, Clone, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(untagged)]
pub enum OneOrMany {
    /// One string.
    One(String),
    /// Several strings.
    Many(Vec<String>),
}

/// Random seed: any 64-bit integer, signed or unsigned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seed(pub u64);

/// Scheduling priority by name or number.
#[derive(Debug, Clone, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(untagged)]
pub enum PriorityName {
    /// `high`, `normal` or `low`.
    Name(String),
    /// Below 0 is high, above 0 is low.
    Number(i64),
}

/// Scheduling priority.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Priority {
    /// Before normal requests.
    High,
    /// The default.
    Normal,
    /// After normal requests.
    Low,
}

/// Implements `Deserialize` for a type with several JSON forms; the error names the expected forms.
macro_rules! deserialize_forms {
    ($kind:ty, $expected:literal, $($method:ident($arg:ident: $of:ty) => $value:expr),*) => {
        impl<'de> Deserialize<'de> for $kind {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                struct Visitor;
                impl<'de> serde::de::Visitor<'de> for Visitor {
                    type Value = $kind;
                    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                        f.write_str($expected)
                    }
                    $(fn $method<E: serde::de::Error>(self, $arg: $of) -> Result<$kind, E> { $value })*
                    fn visit_seq<A: serde::de::SeqAccess<'de>>(self, seq: A) -> Result<$kind, A::Error> {
                        <$kind>::list(seq)
                    }
                }
                deserializer.deserialize_any(Visitor)
            }
        }
    };
}

deserialize_forms!(OneOrMany, "a string or a list of strings", visit_str(text: &str) => Ok(OneOrMany::One(text.into())));
deserialize_forms!(PriorityName, "high, normal, low, or a whole number",
visit_str(text: &str) => Ok(PriorityName::Name(text.into())),
visit_u64(n: u64) => Ok(PriorityName::Number(i64::try_from(n).unwrap_or(i64::MAX))),
visit_i64(n: i64) => Ok(PriorityName::Number(n)),
visit_f64(x: f64) => match integer(x) {
    Some(n) => Ok(PriorityName::Number(n)),
    None => Err(E::invalid_type(serde::de::Unexpected::Float(x), &"high, normal, low, or a whole number")),
});

/// The seed of a request; -1 is none, as in llama.cpp, vLLM and Ollama. The seed with the same bits, 2^64 - 1, is a seed.
struct SeedField(Option<Seed>);

impl SeedField {
    fn signed(n: i64) -> SeedField {
        SeedField((n != -1).then(|| Seed(n.cast_unsigned())))
    }

    fn list<'de, A: serde::de::SeqAccess<'de>>(_: A) -> Result<Self, A::Error> {
        reject_list::<Self, A>("a whole number")
    }
}

deserialize_forms!(SeedField, "a whole number",
visit_u64(n: u64) => Ok(SeedField(Some(Seed(n)))),
visit_i64(n: i64) => Ok(SeedField::signed(n)),
visit_f64(x: f64) => match integer(x) {
    Some(n) => Ok(SeedField::signed(n)),
    None => Err(E::invalid_type(serde::de::Unexpected::Float(x), &"a whole number")),
});

/// Reads an optional seed; -1 is none.
pub(crate) fn seed<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Option<Seed>, D::Error> {
    Ok(Option::<SeedField>::deserialize(deserializer)?.and_then(|field| field.0))
}

fn reject_list<'de, T, A: serde::de::SeqAccess<'de>>(expected: &str) -> Result<T, A::Error> {
    let found = serde::de::Unexpected::Seq;
    Err(serde::de::Error::invalid_type(found, &expected))
}

impl OneOrMany {
    fn list<'de, A: serde::de::SeqAccess<'de>>(mut seq: A) -> Result<Self, A::Error> {
        let mut texts = Vec::new();
        while let Some(text) = seq.next_element()? {
            texts.push(text);
        }
        Ok(OneOrMany::Many(texts))
    }

    /// All strings.
    pub fn into_vec(self) -> Vec<String> {
        match self {
            OneOrMany::One(text) => vec![text],
            OneOrMany::Many(texts) => texts,
        }
    }
}

impl PriorityName {
    fn list<'de, A: serde::de::SeqAccess<'de>>(_: A) -> Result<Self, A::Error> {
        reject_list::<_, A>("high, normal, low, or a whole number")
    }
}

/// Log-probabilities that a request asks for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Logprobs {
    /// Of generated tokens.
    pub is_requested: bool,
    /// Number of alternatives for each token.
    pub n_top: u32,
    /// Of prompt tokens too; then `max_tokens` may be 0.
    pub of_prompt: bool,
}

/// Alternatives for each token, at most.
pub const MAX_TOP: u32 = 20;

impl Logprobs {
    /// Those of `logprobs` and `top_logprobs`.
    ///
    /// # Errors
    /// `top_logprobs` out of range or without `logprobs`.
    pub(crate) fn of_answer(logprobs: Option<bool>, top_logprobs: Option<u32>) -> Result<Logprobs, ApiError> {
        let (is_requested, n_top) = (logprobs == Some(true), top_logprobs.unwrap_or(0));
        if n_top > MAX_TOP {
            let message = format!("top_logprobs is {n_top}, expected a number from 0 to {MAX_TOP}");
            return Err(ApiError::param("top_logprobs", message));
        }
        if n_top > 0 && !is_requested {
            return Err(ApiError::param("top_logprobs", "top_logprobs is given, expected logprobs to be true then"));
        }
        Ok(Logprobs { is_requested, n_top, of_prompt: false })
    }
}

/// Limits of a server or page that bound requests.
#[derive(Clone, Copy)]
pub struct Limits<'a> {
    /// The model.
    pub model: &'a Model,
    /// Options of the engine; `None` for models that only embed.
    pub engine: Option<&'a EngineOptions>,
    /// KV pages of the engine.
    pub n_pages: usize,
    /// Tokens of a prompt; 0 is no limit of its own.
    pub max_prompt: usize,
    /// Generated tokens; 0 is no limit of its own.
    pub max_tokens: usize,
}

/// What a host adds to the options of a request, the same for all of its prompts.
#[derive(Clone)]
pub struct RequestPlan {
    /// Sampling options; see [`Options::sampling`].
    pub sampling: SamplingOptions,
    /// Output constraint.
    pub constraint: Option<Arc<dyn Constraint>>,
    /// Whether to return log-probabilities of the prompt.
    pub prompt_logprobs: bool,
    /// Tokens to generate if the request has no `max_tokens`; `None` for as many as fit.
    pub default_tokens: Option<usize>,
    /// Salt of the prefix cache.
    pub cache_salt: u64,
}

impl Options {
    /// Whether the response is a stream.
    pub fn is_stream(&self) -> bool {
        self.stream == Some(true)
    }

    /// Stop strings.
    pub fn stops(&self) -> Vec<String> {
        self.stop.clone().map_or_else(Vec::new, OneOrMany::into_vec)
    }

    /// Whether the stream ends with a chunk of token counts.
    pub fn includes_usage(&self) -> bool {
        self.stream_options.and_then(|o| o.include_usage) == Some(true)
    }

    /// Number of choices, 1 to `max`.
    ///
    /// # Errors
    /// A number out of range.
    pub fn n_choices(&self, max: usize) -> Result<usize, ApiError> {
        let n = self.n.unwrap_or(1) as usize;
        if n == 0 || n > max {
            return Err(ApiError::param("n", format!("n is {n}, expected a number from 1 to {max}")));
        }
        Ok(n)
    }

    /// Scheduling priority, if the request has one.
    ///
    /// # Errors
    /// An unknown name.
    pub fn priority(&self) -> Result<Option<Priority>, ApiError> {
        match &self.priority {
            None => Ok(None),
            Some(PriorityName::Number(n)) => Ok(Some(match n.signum() {
                -1 => Priority::High,
                0 => Priority::Normal,
                _ => Priority::Low,
            })),
            Some(PriorityName::Name(name)) => match name.as_str() {
                "high" => Ok(Some(Priority::High)),
                "normal" => Ok(Some(Priority::Normal)),
                "low" => Ok(Some(Priority::Low)),
                _ => {
                    let message =
                        format!("priority is {:?}, expected high, normal, low, or a whole number", quoted(name));
                    Err(ApiError::param("priority", message))
                }
            },
        }
    }

    /// Checks the length of `cache_salt`.
    ///
    /// # Errors
    /// If it is too long.
    pub fn check_salt(&self) -> Result<Option<&str>, ApiError> {
        let salt = self.cache_salt.as_deref();
        match salt.map(str::len) {
            Some(n) if n > MAX_SALT => {
                let message = format!("cache_salt has {n} bytes, expected at most {MAX_SALT}");
                Err(ApiError::param("cache_salt", message))
            }
            _ => Ok(salt),
        }
    }

    /// The engine's request for the prompt `tokens`, checked against the model and `limits`. `param` is the field that
    /// holds the prompt.
    ///
    /// # Errors
    /// An option out of range, or a request that does not fit.
    pub fn request(
        &self,
        limits: &Limits<'_>,
        plan: &RequestPlan,
        tokens: Vec<u32>,
        param: &str,
    ) -> Result<Request, ApiError> {
        let Some(engine) = limits.engine else {
            let error = limits.model.config.check_generates().err().unwrap_or(RequestError::Encoder);
            return Err(ApiError::refused(&error, "model"));
        };
        let n_prompt = tokens.len();
        let max_prompt = limits.max_prompt;
        if max_prompt > 0 && n_prompt > max_prompt {
            let message = format!("the prompt has {n_prompt} tokens, this server takes at most {max_prompt}");
            return Err(ApiError::param(param, message).code("context_length_exceeded"));
        }
        let request = Request {
            sampling: plan.sampling.clone(),
            max_tokens: Some(self.max_tokens(limits, engine, n_prompt, plan)?),
            stop: self.stops(),
            stop_tokens: self.stop_token_ids.clone().unwrap_or_default(),
            ignore_eos: self.ignore_eos.unwrap_or(false),
            cache_salt: plan.cache_salt,
            receipt: self.receipt.unwrap_or(false),
            prompt_logprobs: plan.prompt_logprobs,
            constraint: plan.constraint.clone(),
            ..Request::new(tokens)
        };
        if request.stop.iter().any(String::is_empty) {
            return Err(ApiError::param("stop", "stop has an empty string"));
        }
        let max_tokens = request.check(limits.model, engine).map_err(|e| match e {
            RequestError::Option { name: "repeat_penalty", found, expected } => {
                ApiError::param("repetition_penalty", format!("repetition_penalty is {found}, expected {expected}"))
            }
            e => ApiError::refused(&e, param),
        })?;
        // the last token is never computed
        let n_tokens = n_prompt + max_tokens.max(1) - 1;
        if n_tokens.div_ceil(PAGE) > limits.n_pages && limits.model.config.window().is_none() {
            let message = format!(
                "this server's KV cache holds {} tokens, but {n_tokens} were requested: {n_prompt} in the prompt and \
                 {max_tokens} in the answer",
                limits.n_pages * PAGE
            );
            return Err(ApiError::param(param, message).code("context_length_exceeded"));
        }
        Ok(Request { max_tokens: Some(max_tokens), ..request })
    }

    /// Tokens to generate: the number of the request, else the default, but at most as many as fit.
    fn max_tokens(
        &self,
        limits: &Limits<'_>,
        engine: &EngineOptions,
        n_prompt: usize,
        plan: &RequestPlan,
    ) -> Result<usize, ApiError> {
        let min = usize::from(!plan.prompt_logprobs);
        let max = Some(limits.max_tokens).filter(|n| *n > 0);
        let (name, requested) = match (self.max_completion_tokens, self.max_tokens) {
            (Some(n), _) => ("max_completion_tokens", Some(n)),
            (None, n) => ("max_tokens", n),
        };
        let requested = requested.map(|n| usize::try_from(n).unwrap_or(usize::MAX));
        if let Some(n) = requested.filter(|n| *n < min) {
            return Err(ApiError::param(name, format!("{name} is {n}, expected at least {min}")));
        }
        let n_ctx = match limits.model.config.window() {
            Some(_) => engine.n_ctx,
            None => engine.n_ctx.min(limits.n_pages * PAGE),
        };
        let fits = (n_ctx + 1).saturating_sub(n_prompt).max(1);
        let wanted = requested.or(plan.default_tokens).unwrap_or(usize::MAX);
        Ok(wanted.min(fits).min(max.unwrap_or(usize::MAX)))
    }

    /// The tokens of DRY's sequence breakers. Searches the whole vocabulary, which takes long: once per request, and only
    /// if [`Options::sampling`] has DRY on.
    pub fn dry_breakers(&self, tokenizer: &Tokenizer) -> Vec<Vec<u32>> {
        match &self.dry_sequence_breakers {
            Some(texts) => tokenizer.dry_breakers(texts),
            None => tokenizer.dry_breakers(&DRY_BREAKERS),
        }
    }

    /// The engine's sampling options; where DRY is on, the host adds [`Options::dry_breakers`].
    ///
    /// # Errors
    /// An option out of range.
    pub fn sampling(&self, logprobs: Logprobs, seed: u64) -> Result<SamplingOptions, ApiError> {
        let within = |name: &'static str, value: Option<f32>, low: f32, high: f32, default: f32| match value {
            Some(x) if !(low..=high).contains(&x) => {
                Err(ApiError::param(name, format!("{name} is {x}, expected a number from {low} to {high}")))
            }
            other => Ok(other.unwrap_or(default)),
        };
        let top_k = self.top_k.unwrap_or(0);
        if top_k < -1 {
            return Err(ApiError::param("top_k", format!("top_k is {top_k}, expected -1, 0 or more")));
        }
        let top_p = within("top_p", self.top_p, 0.0, 1.0, 1.0)?;
        let temperature = within("temperature", self.temperature, 0.0, 2.0, 1.0)?;
        // a total probability of 0 keeps only the most probable token
        let is_greedy = top_p == 0.0;
        // without penalties the scope has no effect: one value of it, so that receipts of equal requests are equal
        let has_counts = [self.frequency_penalty, self.presence_penalty].iter().flatten().any(|x| *x != 0.0);
        Ok(SamplingOptions {
            logit_bias: self.bias()?,
            repeat_penalty: self.repetition_penalty.unwrap_or(1.0),
            repeat_last_n: self.repeat_last_n()?,
            penalty_scope: match self.penalty_scope {
                Some(Scope::Answer) if has_counts => PenaltyScope::Answer,
                _ => PenaltyScope::All,
            },
            frequency_penalty: within("frequency_penalty", self.frequency_penalty, -2.0, 2.0, 0.0)?,
            presence_penalty: within("presence_penalty", self.presence_penalty, -2.0, 2.0, 0.0)?,
            dry: self.dry()?,
            top_k: u32::try_from(top_k.max(0)).unwrap_or(u32::MAX),
            typical_p: self.typical_p.unwrap_or(1.0),
            top_p: if is_greedy { 1.0 } else { top_p },
            min_p: within("min_p", self.min_p, 0.0, 1.0, 0.0)?,
            temperature: if is_greedy { 0.0 } else { temperature },
            seed,
            logprobs: if logprobs.is_requested { LogprobKind::Raw } else { LogprobKind::None },
            top_logprobs: logprobs.n_top,
        })
    }

    fn repeat_last_n(&self) -> Result<u32, ApiError> {
        match self.repeat_last_n.unwrap_or(-1) {
            -1 => Ok(ALL_TOKENS),
            n => u32::try_from(n)
                .map_err(|_| ApiError::param("repeat_last_n", format!("repeat_last_n is {n}, expected -1, 0 or more"))),
        }
    }

    /// DRY's options, without sequence breakers.
    fn dry(&self) -> Result<Option<Dry>, ApiError> {
        let at_least = |name: &'static str, value: f64, least: f64| {
            let message = || format!("{name} is {value}, expected a number of {least} or more");
            if value >= least && value.is_finite() { Ok(()) } else { Err(ApiError::param(name, message())) }
        };
        let (multiplier, base) = (self.dry_multiplier.unwrap_or(0.0), self.dry_base.unwrap_or(1.75));
        let (allowed_length, last_n) = (self.dry_allowed_length.unwrap_or(2), self.dry_penalty_last_n.unwrap_or(-1));
        at_least("dry_multiplier", multiplier.into(), 0.0)?;
        at_least("dry_base", base.into(), 1.0)?;
        at_least("dry_allowed_length", allowed_length.into(), 1.0)?;
        at_least("dry_penalty_last_n", last_n as f64, -1.0)?;
        let texts = self.dry_sequence_breakers.as_deref();
        if texts.is_some_and(|t| t.len() > MAX_BREAKERS || t.iter().any(|t| !(1..=MAX_BREAKER).contains(&t.len()))) {
            let message = format!("expected at most {MAX_BREAKERS} strings of 1 to {MAX_BREAKER} bytes");
            return Err(ApiError::param("dry_sequence_breakers", message));
        }
        let last_n = u32::try_from(last_n).unwrap_or(ALL_TOKENS);
        Ok((multiplier > 0.0).then(|| Dry { multiplier, base, allowed_length, last_n, breakers: Vec::new() }))
    }

    fn bias(&self) -> Result<Vec<(u32, f32)>, ApiError> {
        let entry = |(id, bias): (&String, &f32)| {
            let wrong = |what: String| ApiError::param("logit_bias", what);
            let token =
                id.parse().map_err(|_| wrong(format!("logit_bias has {:?}, expected token IDs", quoted(id))))?;
            if !(-100.0..=100.0).contains(bias) {
                return Err(wrong(format!("logit_bias of {id} is {bias}, expected a number from -100 to 100")));
            }
            Ok((token, *bias))
        };
        self.logit_bias.iter().flatten().map(entry).collect()
    }
}

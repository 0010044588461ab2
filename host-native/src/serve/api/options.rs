//! What requests for answers have in common: options, their ranges, and how they become the engine's.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use starling::engine::Request;
use starling::error::RequestError;
use starling::sampler::{ALL_TOKENS, Constraint, DRY_BREAKERS, Dry, LogprobKind, PenaltyScope, SamplingOptions};
use utoipa::ToSchema;

use super::super::offload::offload;
use super::super::scheduler::{Flow, Priority};
use super::super::sessions::MAX_NAME;
use super::super::state::{App, Caller, random};
use super::error::{ApiError, quoted};
use crate::sampling::breakers;

/// Texts that DRY's repetitions do not reach over, at most, and bytes of one.
const MAX_BREAKERS: usize = 16;
const MAX_BREAKER: usize = 40;
/// Bytes of a salt of the prefix cache: it is hashed for each prompt.
const MAX_SALT: usize = 1024;

/// Options of an answer: OpenAI's, and as llama-server and vLLM name them the others.
#[derive(Debug, Clone, Default, Deserialize, ToSchema)]
pub struct Options {
    /// The model's name; the one that is served if there is none.
    pub model: Option<String>,
    /// Whether the answer comes piece by piece, as server-sent events.
    pub stream: Option<bool>,
    /// Options of such an answer.
    pub stream_options: Option<StreamOptions>,
    /// How many answers.
    #[schema(minimum = 1, maximum = 128)]
    pub n: Option<u32>,
    /// Tokens of the answer, at most.
    #[schema(minimum = 0)]
    pub max_tokens: Option<u64>,
    /// The newer name of `max_tokens`.
    #[schema(minimum = 0)]
    pub max_completion_tokens: Option<u64>,
    /// Texts that end the answer; they are not part of it.
    pub stop: Option<OneOrMany>,
    /// Tokens that end the answer, besides the model's own.
    pub stop_token_ids: Option<Vec<u32>>,
    /// Whether the answer goes on where the model would end it.
    pub ignore_eos: Option<bool>,
    /// Key of the draws: the same request with the same seed has the same answer.
    #[schema(value_type = Option<i64>)]
    pub seed: Option<Seed>,
    /// 0 takes the most probable token; 1 is the default.
    #[schema(minimum = 0, maximum = 2)]
    pub temperature: Option<f32>,
    /// Keep the most probable tokens of this mass; 1, the default, keeps all, and 0 only the most probable one, as
    /// `temperature` 0 does.
    #[schema(minimum = 0, maximum = 1)]
    pub top_p: Option<f32>,
    /// Keep this many of the most probable tokens; 0 or -1, the default, keeps all.
    #[schema(minimum = -1)]
    pub top_k: Option<i64>,
    /// Keep tokens at least this fraction as probable as the most probable.
    #[schema(minimum = 0, maximum = 1)]
    pub min_p: Option<f32>,
    /// Keep the most typical tokens of this mass.
    #[schema(exclusive_minimum = 0, maximum = 1)]
    pub typical_p: Option<f32>,
    /// Added to logits, by token id.
    pub logit_bias: Option<BTreeMap<String, f32>>,
    /// Subtracted from the logit of a token for each time it occurs, in the tokens that `penalty_scope` says.
    #[schema(minimum = -2, maximum = 2)]
    pub frequency_penalty: Option<f32>,
    /// Subtracted once from the logit of a token that occurs, in the tokens that `penalty_scope` says.
    #[schema(minimum = -2, maximum = 2)]
    pub presence_penalty: Option<f32>,
    /// Which tokens `frequency_penalty` and `presence_penalty` count: `answer`, those of the answer, as OpenAI and vLLM
    /// do and these endpoints by default; `all`, those of the prompt too, as llama.cpp does and `/v1/generate` and
    /// `/execute` by default.
    pub penalty_scope: Option<Scope>,
    /// Divides the positive logits of tokens that occur in the prompt or in the answer, and multiplies the others.
    #[serde(alias = "repeat_penalty")]
    #[schema(exclusive_minimum = 0)]
    pub repetition_penalty: Option<f32>,
    /// Penalty on continuing a repetition (DRY); 0, the default, is off.
    #[schema(minimum = 0)]
    pub dry_multiplier: Option<f32>,
    /// Growth of that penalty with each token of the repetition, 1.75 by default.
    #[schema(minimum = 1)]
    pub dry_base: Option<f32>,
    /// Tokens of a repetition that has no penalty, 2 by default.
    #[schema(minimum = 1)]
    pub dry_allowed_length: Option<u32>,
    /// Tokens that are looked back at; -1, the default, for all.
    #[schema(minimum = -1)]
    pub dry_penalty_last_n: Option<i64>,
    /// Texts that no repetition reaches over: at most 16, of at most 40 bytes; by default newline, colon, quotation mark and
    /// asterisk.
    pub dry_sequence_breakers: Option<Vec<String>>,
    /// `high`, `normal` or `low`; or a number, of which those below 0 are urgent and those above are not.
    pub priority: Option<PriorityName>,
    /// The conversation this belongs to.
    pub session_id: Option<String>,
    /// Requests share cached prompts only with those of the same salt (and of the same tenant).
    pub cache_salt: Option<String>,
    /// Whether the answer comes with a receipt.
    pub receipt: Option<bool>,
    /// Who the request is for: the people of a tenant take turns.
    pub user: Option<String>,
}

/// Which tokens penalties count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Scope {
    /// Those of the prompt and of the answer.
    All,
    /// Those of the answer.
    Answer,
}

/// Options of answers in pieces.
#[derive(Debug, Clone, Copy, Default, Deserialize, ToSchema)]
pub struct StreamOptions {
    /// Whether a last piece has the numbers of tokens.
    pub include_usage: Option<bool>,
}

/// A text or several.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[serde(untagged)]
pub enum OneOrMany {
    /// One.
    One(String),
    /// Several.
    Many(Vec<String>),
}

/// A seed: any whole number of 64 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seed(pub u64);

/// How urgent a request is.
#[derive(Debug, Clone, Serialize, ToSchema)]
#[serde(untagged)]
pub enum PriorityName {
    /// By name.
    Name(String),
    /// By number.
    Number(i64),
}

/// Reads a value of several forms from what the JSON has, saying what was expected where it has none of them.
macro_rules! forms {
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

forms!(OneOrMany, "a string or a list of strings", visit_str(text: &str) => Ok(OneOrMany::One(text.into())));
forms!(Seed, "a whole number",
    visit_u64(n: u64) => Ok(Seed(n)),
    visit_i64(n: i64) => Ok(Seed(n.cast_unsigned())));
forms!(PriorityName, "high, normal, low, or a whole number",
    visit_str(text: &str) => Ok(PriorityName::Name(text.into())),
    visit_u64(n: u64) => Ok(PriorityName::Number(i64::try_from(n).unwrap_or(i64::MAX))),
    visit_i64(n: i64) => Ok(PriorityName::Number(n)));

fn no_list<'de, T, A: serde::de::SeqAccess<'de>>(expected: &str) -> Result<T, A::Error> {
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

    /// All of them.
    pub fn into_vec(self) -> Vec<String> {
        match self {
            OneOrMany::One(text) => vec![text],
            OneOrMany::Many(texts) => texts,
        }
    }
}

impl Seed {
    fn list<'de, A: serde::de::SeqAccess<'de>>(_: A) -> Result<Self, A::Error> {
        no_list::<_, A>("a whole number")
    }
}

impl PriorityName {
    fn list<'de, A: serde::de::SeqAccess<'de>>(_: A) -> Result<Self, A::Error> {
        no_list::<_, A>("high, normal, low, or a whole number")
    }
}

/// Which log-probabilities are wanted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Logprobs {
    /// Any at all.
    pub wanted: bool,
    /// Of how many alternatives.
    pub top: u32,
    /// Of the prompt's tokens too; then there may be none of an answer.
    pub prompt: bool,
}

/// Alternatives of a token, at most.
pub const MAX_TOP: u32 = 20;

impl Options {
    /// Checks that the model is the one that is served.
    ///
    /// # Errors
    /// If it is not.
    pub fn check_model(&self, app: &App) -> Result<(), ApiError> {
        check_model(app, self.model.as_deref())
    }

    /// Whether the answer comes in pieces.
    pub fn streams(&self) -> bool {
        self.stream == Some(true)
    }

    /// Whether the numbers of tokens come as a last piece.
    pub fn includes_usage(&self) -> bool {
        self.stream_options.and_then(|o| o.include_usage) == Some(true)
    }

    /// How many answers.
    ///
    /// # Errors
    /// None, or more than the server gives.
    pub fn count(&self, app: &App) -> Result<usize, ApiError> {
        let (n, most) = (self.n.unwrap_or(1) as usize, app.settings.max_n);
        if n == 0 || n > most {
            return Err(ApiError::param("n", format!("n is {n}, expected a number from 1 to {most}")));
        }
        Ok(n)
    }

    /// The session by name.
    ///
    /// # Errors
    /// If the name is empty or too long.
    pub fn session<'a>(&'a self, caller: &'a Caller) -> Result<Option<&'a str>, ApiError> {
        let name = self.session_id.as_deref().or(caller.session.as_deref());
        match name {
            Some(name) if name.is_empty() || name.len() > MAX_NAME => {
                let message = format!("session_id has {} bytes, expected 1 to {MAX_NAME}", name.len());
                Err(ApiError::param("session_id", message))
            }
            name => Ok(name),
        }
    }

    /// The request's place among others.
    ///
    /// # Errors
    /// A priority that is not known.
    pub fn flow(&self, caller: &Caller) -> Result<Flow, ApiError> {
        let priority = match &self.priority {
            None => None,
            Some(PriorityName::Number(n)) => Some(match n.signum() {
                -1 => Priority::High,
                0 => Priority::Normal,
                _ => Priority::Low,
            }),
            Some(PriorityName::Name(name)) => {
                let found = Priority::ALL.into_iter().find(|p| p.name() == name);
                let message =
                    || format!("priority is {:?}, expected high, normal, low, or a whole number", quoted(name));
                Some(found.ok_or_else(|| ApiError::param("priority", message()))?)
            }
        };
        // without a conversation, the people of one tenant take turns
        Ok(caller.flow(self.session(caller)?.or(self.user.as_deref()), priority))
    }

    /// The seed in effect.
    pub fn effective_seed(&self, app: &App) -> u64 {
        // below 2^53, so that a client that reads numbers as floats gets the same one back
        self.seed.map(|s| s.0).or(app.settings.seed).unwrap_or_else(|| random() >> 11)
    }

    /// The engine's request for a prompt, the answer to which follows a constraint if there is one: with the sampling
    /// options, whether the prompt's log-probabilities are wanted, and the length of answers that ask for none.
    ///
    /// # Errors
    /// What is out of range, or does not fit.
    pub fn request(
        &self,
        app: &App,
        caller: &Caller,
        tokens: Vec<u32>,
        constraint: Option<Arc<dyn Constraint>>,
        (sampling, prompt_logprobs, default): (SamplingOptions, bool, Option<usize>),
        param: &str,
    ) -> Result<Request, ApiError> {
        let Some(sizes) = &app.engine else {
            return Err(ApiError::refused(&RequestError::Encoder, "model"));
        };
        let n_prompt = tokens.len();
        let most = app.settings.max_prompt;
        if most > 0 && n_prompt > most {
            let message = format!("the prompt has {n_prompt} tokens, this server takes at most {most}");
            return Err(ApiError::param(param, message).code("context_length_exceeded"));
        }
        let request = Request {
            sampling,
            max_tokens: self.max_tokens(app, n_prompt, default, usize::from(!prompt_logprobs))?,
            stop: self.stop.clone().map_or_else(Vec::new, OneOrMany::into_vec),
            stop_tokens: self.stop_token_ids.clone().unwrap_or_default(),
            ignore_eos: self.ignore_eos.unwrap_or(false),
            cache_salt: self.salt(app, caller)?,
            receipt: self.receipt.unwrap_or(false),
            prompt_logprobs,
            constraint,
            ..Request::new(tokens)
        };
        if request.stop.iter().any(String::is_empty) {
            return Err(ApiError::param("stop", "stop has an empty text"));
        }
        let max_tokens = request.check(&app.model, sizes).map_err(|e| match e {
            RequestError::Option { name: "repeat_penalty", found, expected } => {
                ApiError::param("repetition_penalty", format!("repetition_penalty is {found}, expected {expected}"))
            }
            e => ApiError::refused(&e, param),
        })?;
        let n_tokens = n_prompt + max_tokens.max(1) - 1;
        let needed = n_tokens.div_ceil(starling::kernels::attention::PAGE);
        if needed > app.n_pages && app.model.config.window().is_none() {
            let (have, message) =
                (app.n_pages * starling::kernels::attention::PAGE, "this server's memory for keys and values holds");
            let message = format!(
                "{message} {have} tokens, but {n_tokens} were requested: {n_prompt} in the prompt and {max_tokens} in the answer"
            );
            return Err(ApiError::param(param, message).code("context_length_exceeded"));
        }
        Ok(Request { max_tokens: Some(max_tokens), ..request })
    }

    /// Tokens of the answer: those asked for, `least` or more, or the default, or what room there is.
    fn max_tokens(
        &self,
        app: &App,
        n_prompt: usize,
        default: Option<usize>,
        least: usize,
    ) -> Result<Option<usize>, ApiError> {
        let most = Some(app.settings.max_tokens).filter(|n| *n > 0);
        let (name, asked) = match (self.max_completion_tokens, self.max_tokens) {
            (Some(n), _) => ("max_completion_tokens", Some(n)),
            (None, n) => ("max_tokens", n),
        };
        if let Some(n) = asked {
            let n = usize::try_from(n).unwrap_or(usize::MAX);
            if n < least || most.is_some_and(|most| n > most) {
                let range = most.map_or(format!("at least {least}"), |most| format!("a number from {least} to {most}"));
                return Err(ApiError::param(name, format!("{name} is {n}, expected {range}")));
            }
            return Ok(Some(n));
        }
        let sizes = app.engine.as_ref().map_or(0, |e| e.n_ctx);
        let room = |n: usize| (n + 1).saturating_sub(n_prompt).max(1);
        let fits = match app.model.config.window() {
            Some(_) => room(sizes),
            None => room(sizes.min(app.n_pages * starling::kernels::attention::PAGE)),
        };
        Ok(Some(fits.min(most.unwrap_or(usize::MAX)).min(default.unwrap_or(usize::MAX))))
    }

    /// The salt of the prefix cache.
    ///
    /// # Errors
    /// If what the request gives is too long.
    pub fn salt(&self, app: &App, caller: &Caller) -> Result<u64, ApiError> {
        let salt = self.cache_salt.as_deref();
        match salt.map(str::len) {
            Some(n) if n > MAX_SALT => {
                let message = format!("cache_salt has {n} bytes, expected at most {MAX_SALT}");
                Err(ApiError::param("cache_salt", message))
            }
            _ => Ok(app.salt(&caller.tenant.name, salt)),
        }
    }

    /// The sampling options of the engine, once for all prompts of a request: DRY's breakers are looked up in the whole
    /// vocabulary, which takes long.
    ///
    /// # Errors
    /// What is out of range.
    pub async fn sampling(&self, app: &Arc<App>, logprobs: Logprobs, seed: u64) -> Result<SamplingOptions, ApiError> {
        let mut sampling = self.ranged(logprobs, seed)?;
        if let Some(dry) = &mut sampling.dry {
            let (model, texts) = (Arc::clone(&app.model), self.dry_sequence_breakers.clone());
            let look_up = move || match texts {
                Some(texts) => breakers(&model.tokenizer, &texts),
                None => breakers(&model.tokenizer, &DRY_BREAKERS),
            };
            dry.breakers = offload(usize::MAX, look_up).await?;
        }
        Ok(sampling)
    }

    /// The sampling options without DRY's breakers.
    fn ranged(&self, logprobs: Logprobs, seed: u64) -> Result<SamplingOptions, ApiError> {
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
        // the most probable token always stays, and of a mass of 0 no other does
        let is_greedy = top_p == 0.0;
        // a scope that changes nothing is left out, so that receipts of the same answer are the same
        let has_counts = [self.frequency_penalty, self.presence_penalty].iter().flatten().any(|x| *x != 0.0);
        Ok(SamplingOptions {
            logit_bias: self.bias()?,
            repeat_penalty: self.repetition_penalty.unwrap_or(1.0),
            repeat_last_n: starling::sampler::ALL_TOKENS,
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
            logprobs: if logprobs.wanted { LogprobKind::Raw } else { LogprobKind::None },
            top_logprobs: logprobs.top,
        })
    }

    /// DRY's options, without breakers.
    fn dry(&self) -> Result<Option<Dry>, ApiError> {
        let at_least = |name: &'static str, value: f64, least: f64| {
            let message = || format!("{name} is {value}, expected a number of {least} or more");
            if value >= least { Ok(()) } else { Err(ApiError::param(name, message())) }
        };
        let (multiplier, base) = (self.dry_multiplier.unwrap_or(0.0), self.dry_base.unwrap_or(1.75));
        let (allowed_length, last_n) = (self.dry_allowed_length.unwrap_or(2), self.dry_penalty_last_n.unwrap_or(-1));
        at_least("dry_multiplier", multiplier.into(), 0.0)?;
        at_least("dry_base", base.into(), 1.0)?;
        at_least("dry_allowed_length", allowed_length.into(), 1.0)?;
        at_least("dry_penalty_last_n", last_n as f64, -1.0)?;
        let texts = self.dry_sequence_breakers.as_deref();
        if texts.is_some_and(|t| t.len() > MAX_BREAKERS || t.iter().any(|t| !(1..=MAX_BREAKER).contains(&t.len()))) {
            let message = format!("expected at most {MAX_BREAKERS} texts of 1 to {MAX_BREAKER} bytes");
            return Err(ApiError::param("dry_sequence_breakers", message));
        }
        let last_n = u32::try_from(last_n).unwrap_or(ALL_TOKENS);
        Ok((multiplier > 0.0).then(|| Dry { multiplier, base, allowed_length, last_n, breakers: Vec::new() }))
    }

    fn bias(&self) -> Result<Vec<(u32, f32)>, ApiError> {
        let entry = |(id, bias): (&String, &f32)| {
            let wrong = |what: String| ApiError::param("logit_bias", what);
            let token =
                id.parse().map_err(|_| wrong(format!("logit_bias has {:?}, expected ids of tokens", quoted(id))))?;
            if !(-100.0..=100.0).contains(bias) {
                return Err(wrong(format!("logit_bias of {id} is {bias}, expected a number from -100 to 100")));
            }
            Ok((token, *bias))
        };
        self.logit_bias.iter().flatten().map(entry).collect()
    }
}

/// Checks that the model is the one that is served.
///
/// # Errors
/// If it is not.
pub fn check_model(app: &App, name: Option<&str>) -> Result<(), ApiError> {
    match name {
        Some(name) if name != app.model_name => Err(ApiError::no_model(name, &app.model_name)),
        _ => Ok(()),
    }
}

/// A name as handlers share it.
#[derive(Debug, Clone)]
pub struct Name(pub Arc<str>);

impl Serialize for Name {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0)
    }
}

/// A name to be shared.
pub fn shared(name: &str) -> Name {
    Name(name.into())
}

//! What the updates of a request add up to.

use serde::Serialize;
use starling::engine::{FinishReason, TokenLogprobs};
use starling::receipt::Receipt;
use starling::sampler::ConstraintError;
use starling::tokenizer::Tokenizer;
use utoipa::ToSchema;

use super::super::queue::Update;
use super::super::state::{App, fresh_name, unix_now};
use super::error::ApiError;
use super::shared::{Name, shared};
use super::sse::engine_failed;
use super::submit::Updates;

/// One answer.
#[derive(Debug, Default)]
pub struct Answer {
    /// Its text.
    pub text: String,
    /// Its tokens, without the one that ended it.
    pub tokens: Vec<Pick>,
    /// Why it ended.
    pub finish: Option<FinishReason>,
    /// Tokens picked, the one that ended it included.
    pub n_tokens: usize,
    /// Tokens of the prompt found in the cache.
    pub n_cached: usize,
    /// If asked for.
    pub receipt: Option<Box<Receipt>>,
    /// Log-probabilities of the prompt's tokens after the first, if asked for.
    pub prompt: Vec<TokenLogprobs>,
}

/// Answers in OpenAI's form, or pieces of them.
#[derive(Debug, Serialize, ToSchema)]
pub struct Answers<C> {
    /// The name of them all.
    #[schema(value_type = String)]
    pub id: Name,
    /// What this is, as OpenAI names it.
    pub object: &'static str,
    /// Seconds since 1970.
    pub created: u64,
    /// The model's name.
    #[schema(value_type = String)]
    pub model: Name,
    /// The answers, those to the first prompt first; or what is new in some of them.
    pub choices: Vec<C>,
    /// Numbers of tokens; of pieces only in the last, if asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Usage>)]
    pub usage: Option<Option<Usage>>,
    /// Which model, engine and numbers answer.
    #[schema(value_type = String)]
    pub system_fingerprint: Name,
    /// The seed in effect.
    pub seed: u64,
    /// The session, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub session_id: Option<Name>,
}

impl<C> Answers<C> {
    /// None yet, of a name that begins with `prefix`.
    pub fn new(app: &App, prefix: &str, object: &'static str, seed: u64, session: Option<&str>) -> Answers<C> {
        Answers {
            id: shared(&fresh_name(prefix)),
            object,
            created: unix_now(),
            model: shared(&app.model_name),
            choices: Vec::new(),
            usage: None,
            system_fingerprint: shared(&app.fingerprint),
            seed,
            session_id: session.map(shared),
        }
    }
}

/// A token, and what was asked for about it.
#[derive(Debug, Clone, PartialEq)]
pub struct Pick {
    /// The token.
    pub token: u32,
    /// Natural logarithm of its probability.
    pub logprob: f32,
    /// The most probable tokens, with theirs.
    pub top: Vec<(u32, f32)>,
}

impl Answer {
    /// Takes an update; the token that ends an answer waits for the next, which says so.
    pub fn take(&mut self, update: Update) {
        match update {
            Update::Prefilled { n_cached, prompt } => (self.n_cached, self.prompt) = (n_cached, prompt),
            Update::Token { token, text, logprob, top } => {
                self.tokens.push(Pick { token, logprob, top });
                self.text.push_str(&text);
            }
            Update::Done { text, reason, n_tokens, receipt } => {
                if matches!(reason, FinishReason::StopToken(_)) {
                    self.tokens.pop();
                }
                self.text.push_str(&text);
                self.finish = Some(reason);
                self.n_tokens = n_tokens;
                self.receipt = receipt;
            }
            Update::Started | Update::Vector { .. } | Update::Failed(_) => {}
        }
    }

    /// Values that a response with its log-probabilities has.
    pub fn n_values(&self) -> usize {
        let of_tokens: usize = self.tokens.iter().map(|pick| 1 + pick.top.len()).sum();
        of_tokens + self.prompt.iter().map(|(_, top)| 1 + top.len()).sum::<usize>()
    }

    /// Why it ended, as OpenAI names it.
    pub fn finish_name(&self) -> &'static str {
        self.finish.map_or("length", FinishReason::name)
    }
}

/// The model's numbers are not finite for this prompt.
fn not_finite() -> ApiError {
    ApiError::internal("the model's numbers are not finite with this prompt: a fault of its weights").code("not_finite")
}

/// Why there will be no more of an answer or a vector, if that is what an update says.
pub fn fault(update: &Update) -> Option<ApiError> {
    match update {
        Update::Failed(failed) => Some(failed.clone().into()),
        Update::Vector { vector: None } => Some(not_finite()),
        Update::Done { reason: FinishReason::NotFinite, .. } => Some(not_finite()),
        Update::Done { reason: FinishReason::Constraint(e), .. } => Some(match e {
            ConstraintError::Failed => ApiError::internal(e.to_string()).code("grammar_failed"),
            _ => ApiError::invalid(e.to_string()).code("invalid_grammar"),
        }),
        _ => None,
    }
}

/// Waits for all of `n` answers.
///
/// # Errors
/// If one fails; the others are given up.
pub async fn collect(mut updates: Updates, n: usize) -> Result<Vec<Answer>, ApiError> {
    let mut answers: Vec<Answer> = (0..n).map(|_| Answer::default()).collect();
    let mut left = n;
    while left > 0 {
        let (index, update) = updates.recv().await.ok_or_else(engine_failed)?;
        if let Some(error) = fault(&update) {
            return Err(error);
        }
        left -= usize::from(matches!(update, Update::Done { .. }));
        if let Some(answer) = answers.get_mut(index) {
            answer.take(update);
        }
    }
    Ok(answers)
}

/// Numbers of tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct Usage {
    /// Tokens of the prompts.
    pub prompt_tokens: usize,
    /// Tokens of the answers, those that end them included.
    pub completion_tokens: usize,
    /// Both.
    pub total_tokens: usize,
    /// More about the prompts.
    pub prompt_tokens_details: PromptDetails,
}

/// More about the tokens of prompts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct PromptDetails {
    /// How many were found in the prefix cache.
    pub cached_tokens: usize,
}

impl Usage {
    /// Of prompts of `prompt_tokens` tokens, `n` answers each. A prompt counts once, with what the first of its answers
    /// found in the cache.
    pub fn new<'a>(prompt_tokens: usize, n: usize, answers: impl IntoIterator<Item = &'a Answer>) -> Usage {
        let mut usage = Usage { prompt_tokens, ..Usage::default() };
        for (i, answer) in answers.into_iter().enumerate() {
            usage.completion_tokens += answer.n_tokens;
            if i % n.max(1) == 0 {
                usage.prompt_tokens_details.cached_tokens += answer.n_cached;
            }
        }
        usage.total_tokens = prompt_tokens + usage.completion_tokens;
        usage
    }
}

/// A token as text.
///
/// # Errors
/// If its bytes are not UTF-8: `\x` and each of them in hexadecimal.
pub fn escaped(tokenizer: &Tokenizer, token: u32) -> Result<&str, String> {
    let bytes = tokenizer.piece(token).unwrap_or_default();
    std::str::from_utf8(bytes).map_err(|_| bytes.iter().map(|byte| format!("\\x{byte:02x}")).collect())
}

/// A token as text; where its bytes are not, with replacement characters.
pub fn piece(tokenizer: &Tokenizer, token: u32) -> String {
    String::from_utf8_lossy(tokenizer.piece(token).unwrap_or_default()).into_owned()
}

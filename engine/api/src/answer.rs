//! Answers and token counts, accumulated from updates.

use serde::Serialize;
use starling::engine::{FinishReason, TokenLogprobs};
use starling::receipt::Receipt;
use starling::tokenizer::Tokenizer;

use crate::update::Update;

/// An answer so far.
#[derive(Debug, Clone, Default)]
pub struct Answer {
    /// Its text.
    pub text: String,
    /// Its tokens, without the end token.
    pub tokens: Vec<SampledToken>,
    /// Why it ended; `None` before.
    pub finish: Option<FinishReason>,
    /// Tokens sampled, the end token included.
    pub n_tokens: usize,
    /// Prompt tokens found in the prefix cache.
    pub n_cached: usize,
    /// Draft tokens that are in the answer, and those that are not, if the request has a prediction.
    pub drafts: Option<(usize, usize)>,
    /// Tokens of reasoning with its markers, the end token excluded; counted by the writer of the response.
    pub n_reasoning: usize,
    /// The receipt, if requested.
    pub receipt: Option<Box<Receipt>>,
    /// Log-probabilities of the prompt tokens after the first, if requested.
    pub prompt_logprobs: Vec<TokenLogprobs>,
}

/// A token with its log-probabilities.
#[derive(Debug, Clone, PartialEq)]
pub struct SampledToken {
    /// The token.
    pub token: u32,
    /// Its log-probability, if requested.
    pub logprob: f32,
    /// The most probable tokens and their log-probabilities, if requested.
    pub top: Vec<(u32, f32)>,
    /// Bytes of the answer's text that became final with it.
    pub n_bytes: usize,
}

impl Answer {
    /// Adds an update. The end token is added as others are, and removed by the update that names it as the reason.
    pub fn add(&mut self, update: Update) {
        match update {
            Update::Prefilled { n_cached, prompt } => (self.n_cached, self.prompt_logprobs) = (n_cached, prompt),
            Update::Token { token, text, logprob, top } => {
                self.tokens.push(SampledToken { token, logprob, top, n_bytes: text.len() });
                self.text.push_str(&text);
            }
            Update::Drafted { n_accepted, n_rejected } => self.drafts = Some((n_accepted, n_rejected)),
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

    /// Log-probabilities of the answer and its prompt: a measure of the work to serialise it.
    pub fn n_logprobs(&self) -> usize {
        let of_tokens: usize = self.tokens.iter().map(|token| 1 + token.top.len()).sum();
        of_tokens + self.prompt_logprobs.iter().map(|(_, top)| 1 + top.len()).sum::<usize>()
    }

    /// OpenAI's `finish_reason`.
    pub fn finish_reason(&self) -> &'static str {
        self.finish.map_or("length", FinishReason::name)
    }
}

/// Token counts of a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Usage {
    /// Tokens of all prompts.
    pub prompt_tokens: usize,
    /// Generated tokens of all choices, end tokens included.
    pub completion_tokens: usize,
    /// Prompt and generated tokens.
    pub total_tokens: usize,
    /// Breakdown of `prompt_tokens`.
    pub prompt_tokens_details: PromptDetails,
    /// Breakdown of `completion_tokens`, if the request has a `prediction` or the answers have reasoning.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completion_tokens_details: Option<CompletionDetails>,
}

/// Breakdown of the prompt tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct PromptDetails {
    /// Prompt tokens found in the prefix cache.
    pub cached_tokens: usize,
}

/// Breakdown of the generated tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CompletionDetails {
    /// Draft tokens that are in the answers. Like `rejected_prediction_tokens` it depends on what was worth drafting, so
    /// it may differ between equal requests.
    pub accepted_prediction_tokens: usize,
    /// Draft tokens that are not in the answers.
    pub rejected_prediction_tokens: usize,
    /// Tokens of the model's reasoning.
    #[serde(skip_serializing_if = "is_zero")]
    pub reasoning_tokens: usize,
}

fn is_zero(n: &usize) -> bool {
    *n == 0
}

impl Usage {
    /// Token counts of prompts of `prompt_tokens` tokens in all, with `n` answers each. A prompt counts once, with the
    /// cached tokens of its first answer.
    pub fn new<'a>(prompt_tokens: usize, n: usize, answers: impl IntoIterator<Item = &'a Answer>) -> Usage {
        let mut usage = Usage { prompt_tokens, ..Usage::default() };
        for (i, answer) in answers.into_iter().enumerate() {
            usage.completion_tokens += answer.n_tokens;
            if let Some((n_accepted, n_rejected)) = answer.drafts {
                let details = usage.completion_tokens_details.get_or_insert_default();
                details.accepted_prediction_tokens += n_accepted;
                details.rejected_prediction_tokens += n_rejected;
            }
            usage.add_reasoning(answer.n_reasoning);
            if i % n.max(1) == 0 {
                usage.prompt_tokens_details.cached_tokens += answer.n_cached;
            }
        }
        usage.total_tokens = prompt_tokens + usage.completion_tokens;
        usage
    }

    /// Adds tokens of reasoning, which `completion_tokens` counts already.
    pub fn add_reasoning(&mut self, n: usize) {
        if n > 0 {
            self.completion_tokens_details.get_or_insert_default().reasoning_tokens += n;
        }
    }
}

/// The text of a token.
///
/// # Errors
/// If its bytes are not UTF-8: the bytes, each as `\x` and two hexadecimal digits.
pub fn token_text(tokenizer: &Tokenizer, token: u32) -> Result<&str, String> {
    let bytes = tokenizer.piece(token).unwrap_or_default();
    std::str::from_utf8(bytes).map_err(|_| bytes.iter().map(|byte| format!("\\x{byte:02x}")).collect())
}

/// The text of a token, with replacement characters where its bytes are not UTF-8.
pub fn token_text_lossy(tokenizer: &Tokenizer, token: u32) -> String {
    String::from_utf8_lossy(tokenizer.piece(token).unwrap_or_default()).into_owned()
}

//! `POST /v1/generate` and `/v1/session/close`.

use serde::{Deserialize, Serialize};
use starling::chat::Json;
use starling::receipt::Receipt;
use starling::tokenizer::Tokenizer;

use crate::answer::{Answer, Usage};
use crate::error::{ApiError, ErrorBody};
use crate::openai::chat::{ChatLogprobs, TokenLogprob};
use crate::openai::options::{Logprobs, Options};
use crate::openai::response::ResponseHead;
use crate::parse::{ParseBody, parse};
use crate::parse_whole;
use crate::shared::SharedStr;
use crate::stream::{EventSink, StreamWriter, send};
use crate::structure::OutputConstraint;
use crate::update::Update;

/// Request to continue a prompt or messages, with or without a session.
#[derive(Debug, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct GenerateRequest {
    /// Generation options; `session_id` opens or continues a session.
    #[serde(flatten)]
    pub options: Options,
    /// Output constraint.
    #[serde(flatten)]
    pub constraint: OutputConstraint,
    /// Prompt or messages.
    #[serde(flatten)]
    pub generate: GenerateFields,
}

/// Prompt or messages.
#[derive(Debug, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct GenerateFields {
    /// Prompt. In a session, the text after the last answer.
    pub prompt: Option<String>,
    /// Messages. In a session, the new messages.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Vec<Object>>))]
    pub messages: Option<Vec<Json>>,
    /// Open a session with a new ID, which the response returns.
    pub open_session: Option<bool>,
    /// Parse control tokens such as `<|fim_prefix|>` in `prompt`. Default: true. Never applies to messages.
    pub parse_special: Option<bool>,
    /// Return log-probabilities of the generated tokens.
    pub logprobs: Option<bool>,
    /// Number of most probable tokens to return for each token, 0 to 20; requires `logprobs`.
    #[cfg_attr(feature = "openapi", schema(minimum = 0, maximum = 20))]
    pub top_logprobs: Option<u32>,
}

impl GenerateFields {
    /// The requested log-probabilities.
    ///
    /// # Errors
    /// `top_logprobs` out of range or without `logprobs`.
    pub fn logprobs(&self) -> Result<Logprobs, ApiError> {
        Logprobs::of_answer(self.logprobs, self.top_logprobs)
    }
}

impl ParseBody for GenerateRequest {
    fn parse_body(json: &[u8]) -> Result<Self, ApiError> {
        Ok(GenerateRequest { options: parse(json)?, constraint: parse(json)?, generate: parse(json)? })
    }
}

/// Generated text.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct GenerateResponse {
    /// ID of the response.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub id: SharedStr,
    /// Generated text.
    pub text: String,
    /// Generated token IDs.
    pub tokens: Vec<u32>,
    /// Log-probabilities of these tokens, if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logprobs: Option<Vec<TokenLogprob>>,
    /// `stop` or `length`.
    pub finish_reason: &'static str,
    /// Token counts.
    pub usage: Usage,
    /// Random seed that was used.
    pub seed: u64,
    /// Fingerprint of the model file, the engine and its numerics: equal fingerprints have equal outputs.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub system_fingerprint: SharedStr,
    /// Session ID, if there is a session.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<String>))]
    pub session_id: Option<SharedStr>,
    /// Receipt, if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Object>))]
    pub receipt: Option<Box<Receipt>>,
}

impl GenerateResponse {
    /// The response with a complete answer to a prompt of `n_prompt` tokens. With a `tokenizer` it has log-probabilities.
    pub fn new(head: ResponseHead, n_prompt: usize, answer: Answer, tokenizer: Option<&Tokenizer>) -> GenerateResponse {
        GenerateResponse {
            logprobs: tokenizer.map(|tokenizer| ChatLogprobs::new(tokenizer, &answer.tokens).content),
            id: head.id,
            finish_reason: answer.finish_reason(),
            usage: Usage::new(n_prompt, 1, [&answer]),
            tokens: answer.tokens.iter().map(|sampled| sampled.token).collect(),
            text: answer.text,
            seed: head.seed,
            system_fingerprint: head.system_fingerprint,
            session_id: head.session_id,
            receipt: answer.receipt,
        }
    }
}

/// Data of an event `token`; an event `end` with a [`GenerateResponse`] follows the last.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct GenerateToken {
    /// New text.
    pub text: String,
    /// Token ID.
    pub token: u32,
    /// Index among the generated tokens.
    pub index: usize,
    /// Log-probability of the token, if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub logprob: Option<f32>,
    /// Most probable token IDs at this position and their log-probabilities, if requested.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub top: Vec<(u32, f32)>,
}

/// Request to close a session.
#[derive(Debug, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CloseRequest {
    /// Session ID.
    pub session_id: String,
}

parse_whole!(CloseRequest);

/// Confirms that a session was closed.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CloseResponse {
    /// Session ID.
    pub session_id: String,
    /// Always true.
    pub closed: bool,
}

/// Writes an answer as events `token`, and `end` with the response that `end` makes of it.
pub struct GenerateWriter<F> {
    answer: Answer,
    has_logprobs: bool,
    end: Option<F>,
}

impl<F: FnOnce(Answer) -> GenerateResponse> GenerateWriter<F> {
    /// A writer of tokens, with their log-probabilities if they are requested; `end` is called once, with the complete answer.
    pub fn new(has_logprobs: bool, end: F) -> GenerateWriter<F> {
        GenerateWriter { answer: Answer::default(), has_logprobs, end: Some(end) }
    }
}

impl<F: FnOnce(Answer) -> GenerateResponse> StreamWriter for GenerateWriter<F> {
    fn update(&mut self, _: usize, update: Update, sink: &mut dyn EventSink) -> bool {
        if let Update::Token { text, token, logprob, top } = &update {
            let (index, logprob) = (self.answer.tokens.len(), self.has_logprobs.then_some(*logprob));
            let (text, top) = (text.clone(), top.clone());
            send(sink, Some("token"), &GenerateToken { text, token: *token, index, logprob, top });
        }
        let is_done = matches!(update, Update::Done { .. });
        self.answer.add(update);
        if let Some(end) = self.end.take_if(|_| is_done) {
            send(sink, Some("end"), &end(std::mem::take(&mut self.answer)));
        }
        is_done
    }

    fn fail(&mut self, error: &ErrorBody, sink: &mut dyn EventSink) {
        send(sink, Some("error"), error);
    }
}

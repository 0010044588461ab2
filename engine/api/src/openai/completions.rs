//! `POST /v1/completions`.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use starling::engine::{FinishReason, TokenLogprobs};
use starling::model::Model;
use starling::receipt::Receipt;
use starling::tokenizer::{DecodeOptions, EncodeOptions, Tokenizer};

use super::options::{Logprobs, MAX_TOP, Options};
use super::response::{CompletionResponse, ResponseHead};
use crate::answer::{Answer, SampledToken, Usage, token_text, token_text_lossy};
use crate::error::ApiError;
use crate::infill::Infill;
use crate::input::Input;
use crate::parse::{ParseBody, parse};
use crate::stream::{EventSink, StreamWriter, send};
use crate::structure::OutputConstraint;
use crate::update::Update;

/// Request for completions of prompts.
#[derive(Debug, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CompletionRequest {
    /// Generation options.
    #[serde(flatten)]
    pub options: Options,
    /// Output constraint.
    #[serde(flatten)]
    pub constraint: OutputConstraint,
    /// Prompts, and options of completions.
    #[serde(flatten)]
    pub completion: CompletionFields,
}

/// Prompts, and options of completions.
#[derive(Debug, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CompletionFields {
    /// Prompt as text or token IDs, or a list of prompts.
    pub prompt: Input,
    /// Begin the text of each choice with its prompt.
    pub echo: Option<bool>,
    /// Number of most probable tokens to return for each token, 0 to 20; with `echo` for prompt tokens too.
    #[cfg_attr(feature = "openapi", schema(minimum = 0, maximum = 20))]
    pub logprobs: Option<u32>,
    /// Must equal `n`.
    pub best_of: Option<u32>,
    /// Text after the answer: the model fills in between, if it has fill-in-the-middle tokens. Prompts must be text.
    pub suffix: Option<String>,
    /// Parse control tokens such as `<|fim_prefix|>` in the prompt, as vLLM and llama-server do. Default: true.
    pub parse_special: Option<bool>,
}

impl ParseBody for CompletionRequest {
    fn parse_body(json: &[u8]) -> Result<Self, ApiError> {
        Ok(CompletionRequest { options: parse(json)?, constraint: parse(json)?, completion: parse(json)? })
    }
}

/// Choice of a completion, or a new part of one.
#[derive(Debug, Default, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CompletionChoice {
    /// Text.
    pub text: String,
    /// Index of the choice.
    pub index: usize,
    /// Log-probabilities, if requested.
    pub logprobs: Option<CompletionLogprobs>,
    /// `stop` or `length`.
    pub finish_reason: Option<&'static str>,
    /// Receipt, if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Object>))]
    pub receipt: Option<Box<Receipt>>,
}

/// Log-probabilities of a choice, as lists of the same length.
#[derive(Debug, Default, Clone, PartialEq, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct CompletionLogprobs {
    /// Text of each token; if its bytes are not UTF-8, `bytes:` and each byte as `\x` and two hexadecimal digits.
    pub tokens: Vec<String>,
    /// Log-probability of each token (natural logarithm); null for the first token of a prompt.
    pub token_logprobs: Vec<Option<f32>>,
    /// Most probable tokens at each position, in the form of `tokens`; of tokens with the same text the most probable.
    pub top_logprobs: Vec<Option<BTreeMap<String, f32>>>,
    /// Offset of each token, in characters from the beginning of the text.
    pub text_offset: Vec<usize>,
}

/// Tokens to generate if the request has no `max_tokens`.
pub const DEFAULT_TOKENS: usize = 16;

impl CompletionFields {
    /// Whether choices begin with their prompt.
    pub fn is_echo(&self) -> bool {
        self.echo == Some(true)
    }

    /// Whether there is text after the answer.
    pub fn has_suffix(&self) -> bool {
        self.suffix.as_deref().is_some_and(|suffix| !suffix.is_empty())
    }

    /// Checks the options; returns the requested log-probabilities.
    ///
    /// # Errors
    /// `best_of` that is not `n`, a `suffix` with log-probabilities of the prompt, `logprobs` out of range.
    pub fn check(&self, n: usize) -> Result<Logprobs, ApiError> {
        if self.best_of.is_some_and(|best| best as usize != n) {
            return Err(ApiError::unsupported("best_of", "this server supports best_of only where it equals n"));
        }
        if self.has_suffix() && self.is_echo() && self.logprobs.is_some() {
            return Err(ApiError::unsupported("suffix", "suffix: not together with echo and logprobs"));
        }
        match self.logprobs {
            Some(top) if top > MAX_TOP => {
                let message = format!("logprobs is {top}, expected a number from 0 to {MAX_TOP}");
                Err(ApiError::param("logprobs", message))
            }
            top => Ok(Logprobs {
                is_requested: top.is_some(),
                n_top: top.unwrap_or(0),
                of_prompt: self.is_echo() && top.is_some(),
            }),
        }
    }
}

impl Options {
    /// Whether a request for the prompt's log-probabilities asks for no generated tokens.
    pub fn is_prompt_only(&self) -> bool {
        self.max_tokens == Some(0) && self.max_completion_tokens.is_none()
    }
}

/// A prompt of a completion.
#[derive(Debug, Clone)]
pub struct Prompt {
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// Its text.
    pub text: String,
    /// Offsets of its tokens in the text, in characters; empty if not requested.
    offsets: Vec<usize>,
}

impl Prompt {
    /// Tokenises the prompts of a request. A prompt of token IDs is echoed as their text.
    pub fn encode(tokenizer: &Tokenizer, input: Input, parse_special: bool, with_offsets: bool) -> Vec<Prompt> {
        let options = EncodeOptions { add_special: true, parse_special };
        let from_text = |text: String| {
            let (tokens, ranges) = tokenizer.encode_with_offsets(&text, options);
            let offsets = if with_offsets { char_offsets(&text, &ranges) } else { Vec::new() };
            Prompt { tokens, text, offsets }
        };
        let from_tokens = |tokens: Vec<u32>| {
            let text = tokenizer.decode(&tokens, DecodeOptions { skip_special: false });
            let offsets = if with_offsets { token_offsets(tokenizer, &tokens) } else { Vec::new() };
            Prompt { text: String::from_utf8_lossy(&text).into_owned(), tokens, offsets }
        };
        input.each(from_text, from_tokens)
    }

    /// Tokenises prompts with text after the answer.
    ///
    /// # Errors
    /// A model without tokens for it, or prompts of tokens.
    pub fn encode_infill(tokenizer: &Tokenizer, input: Input, suffix: &str) -> Result<Vec<Prompt>, ApiError> {
        let from_text = |text: String| {
            let infill = Infill { prefix: text, suffix: suffix.into(), files: Vec::new() };
            let tokens = infill.encode(tokenizer, "suffix")?;
            Ok(Prompt { tokens, text: infill.prefix, offsets: Vec::new() })
        };
        let from_tokens = |_| Err(ApiError::param("prompt", "prompt has token IDs, expected text beside suffix"));
        input.each(from_text, from_tokens).into_iter().collect()
    }

    /// Log-probabilities of the prompt from those of its tokens after the first.
    fn logprobs(&self, tokenizer: &Tokenizer, scores: &[TokenLogprobs]) -> CompletionLogprobs {
        let mut all = CompletionLogprobs::default();
        let scores = std::iter::once(None).chain(scores.iter().map(Some));
        for ((token, offset), score) in self.tokens.iter().zip(&self.offsets).zip(scores) {
            all.push(tokenizer, *token, *offset, score.map(|(logprob, top)| (*logprob, top.as_slice())));
        }
        all
    }
}

impl CompletionLogprobs {
    /// Adds a token at `offset`; returns its length in characters.
    fn push(&mut self, tokenizer: &Tokenizer, token: u32, offset: usize, score: Option<(f32, &[(u32, f32)])>) -> usize {
        let n = token_text_lossy(tokenizer, token).chars().count();
        self.tokens.push(token_name(tokenizer, token));
        self.text_offset.push(offset);
        self.token_logprobs.push(score.map(|(logprob, _)| logprob));
        let by_name = |top: &[(u32, f32)]| {
            let mut names = BTreeMap::new();
            // sorted by probability: the first of a name stays
            top.iter().for_each(|(t, logprob)| _ = names.entry(token_name(tokenizer, *t)).or_insert(*logprob));
            names
        };
        self.top_logprobs.push(score.map(|(_, top)| by_name(top)));
        n
    }

    /// Adds generated tokens from `offset` on, which moves past them.
    fn extend(&mut self, tokenizer: &Tokenizer, tokens: &[SampledToken], offset: &mut usize) {
        for sampled in tokens {
            *offset += self.push(tokenizer, sampled.token, *offset, Some((sampled.logprob, &sampled.top)));
        }
    }
}

/// The text of a token as OpenAI's completions write it.
fn token_name(tokenizer: &Tokenizer, token: u32) -> String {
    token_text(tokenizer, token).map_or_else(|bytes| format!("bytes:{bytes}"), str::to_string)
}

/// Starts of ascending byte ranges of a text, in characters.
fn char_offsets(text: &str, ranges: &[Range<usize>]) -> Vec<usize> {
    let mut ends = text.char_indices().map(|(at, c)| at + c.len_utf8()).peekable();
    let mut n_chars = 0;
    let mut chars_before = |at: usize| {
        while ends.next_if(|end| *end <= at).is_some() {
            n_chars += 1;
        }
        n_chars
    };
    ranges.iter().map(|range| chars_before(range.start)).collect()
}

/// Starts of tokens in their text, in characters.
fn token_offsets(tokenizer: &Tokenizer, tokens: &[u32]) -> Vec<usize> {
    let mut offset = 0;
    let start = |token: &u32| {
        let at = offset;
        offset += token_text_lossy(tokenizer, *token).chars().count();
        at
    };
    tokens.iter().map(start).collect()
}

/// How completions are written.
pub struct CompletionPlan {
    /// The model, for the text of tokens.
    pub model: Arc<Model>,
    /// The prompts.
    pub prompts: Vec<Prompt>,
    /// Choices for each prompt.
    pub n: usize,
    /// Whether choices begin with their prompt.
    pub echo: bool,
    /// Log-probabilities.
    pub logprobs: Logprobs,
    /// Whether a stream ends with token counts.
    pub stream_usage: bool,
}

impl CompletionPlan {
    /// Number of choices of all prompts.
    pub fn n_choices(&self) -> usize {
        self.prompts.len() * self.n
    }

    fn n_prompt(&self) -> usize {
        self.prompts.iter().map(|prompt| prompt.tokens.len()).sum()
    }

    /// The prompt's text if choices begin with it, else nothing.
    fn echoed(&self, index: usize) -> &str {
        if self.echo { &self.prompts[index / self.n].text } else { "" }
    }

    fn usage(&self, answers: &[Answer]) -> Usage {
        Usage::new(self.n_prompt(), self.n, answers)
    }

    /// The response to a request without log-probabilities and generated tokens: its prompts, if they are echoed.
    pub fn prompt_response(&self, head: ResponseHead) -> CompletionResponse<CompletionChoice> {
        let choice = |index: usize| CompletionChoice {
            text: self.echoed(index).into(),
            index,
            finish_reason: Some("length"),
            ..CompletionChoice::default()
        };
        let mut response = CompletionResponse::new(head, "text_completion");
        response.choices = (0..self.n_choices()).map(choice).collect();
        response.usage = Some(Some(self.usage(&[])));
        response
    }

    /// The response with the complete `answers`, those to the first prompt first.
    pub fn response(&self, head: ResponseHead, answers: Vec<Answer>) -> CompletionResponse<CompletionChoice> {
        let mut response = CompletionResponse::new(head, "text_completion");
        response.usage = Some(Some(self.usage(&answers)));
        let tokenizer = &self.model.tokenizer;
        let of_prompts: Vec<CompletionLogprobs> = (self.prompts.iter().zip(answers.chunks(self.n)))
            .map(|(prompt, answers)| prompt.logprobs(tokenizer, &answers[0].prompt_logprobs))
            .collect();
        let choice = |(index, answer): (usize, Answer)| {
            let echoed = self.echoed(index);
            let mut logprobs = of_prompts[index / self.n].clone();
            logprobs.extend(tokenizer, &answer.tokens, &mut echoed.chars().count());
            CompletionChoice {
                logprobs: self.logprobs.is_requested.then_some(logprobs),
                finish_reason: Some(answer.finish_reason()),
                text: echoed.to_string() + &answer.text,
                index,
                receipt: answer.receipt,
            }
        };
        response.choices = answers.into_iter().enumerate().map(choice).collect();
        response
    }
}

/// Writes completions as chunks.
pub struct CompletionWriter {
    plan: CompletionPlan,
    response: CompletionResponse<CompletionChoice>,
    /// Log-probabilities of each prompt, once they are known.
    prompt_logprobs: Vec<Option<CompletionLogprobs>>,
    /// Length of the text of each choice, in characters.
    offsets: Vec<usize>,
    answers: Vec<Answer>,
    /// Text and log-probabilities of the last token of each choice, held until it is known not to be the end token.
    pending: Vec<Option<(String, SampledToken)>>,
}

impl CompletionWriter {
    /// A writer of a stream without chunks yet.
    pub fn new(plan: CompletionPlan, head: ResponseHead) -> CompletionWriter {
        let count = plan.n_choices();
        CompletionWriter {
            response: CompletionResponse::new(head, "text_completion"),
            prompt_logprobs: vec![None; plan.prompts.len()],
            offsets: (0..count).map(|index| plan.echoed(index).chars().count()).collect(),
            answers: (0..count).map(|_| Answer::default()).collect(),
            pending: (0..count).map(|_| None).collect(),
            plan,
        }
    }

    fn chunk(&mut self, choices: Vec<CompletionChoice>, usage: Option<Usage>, sink: &mut dyn EventSink) {
        self.response.choices = choices;
        self.response.usage = self.plan.stream_usage.then_some(usage);
        send(sink, None, &self.response);
    }

    fn text(&mut self, index: usize, text: String, token: Option<SampledToken>, sink: &mut dyn EventSink) {
        let logprobs = self.plan.logprobs.is_requested.then(|| {
            let mut logprobs = CompletionLogprobs::default();
            logprobs.extend(&self.plan.model.tokenizer, token.as_slice(), &mut self.offsets[index]);
            logprobs
        });
        self.chunk(vec![CompletionChoice { text, index, logprobs, ..CompletionChoice::default() }], None, sink);
    }

    /// Writes the prompt with its log-probabilities, which come with its first answer.
    fn prompt(&mut self, index: usize, scores: &[TokenLogprobs], sink: &mut dyn EventSink) {
        let i = index / self.plan.n;
        let (prompt, tokenizer) = (&self.plan.prompts[i], &self.plan.model.tokenizer);
        let logprobs = self.prompt_logprobs[i].get_or_insert_with(|| prompt.logprobs(tokenizer, scores)).clone();
        let text = self.plan.echoed(index).to_string();
        let choice = CompletionChoice { text, index, logprobs: Some(logprobs), ..CompletionChoice::default() };
        self.chunk(vec![choice], None, sink);
    }

    /// Writes the held token.
    fn flush(&mut self, index: usize, sink: &mut dyn EventSink) {
        if let Some((text, token)) = self.pending[index].take() {
            self.text(index, text, Some(token), sink);
        }
    }
}

impl StreamWriter for CompletionWriter {
    fn update(&mut self, index: usize, update: Update, sink: &mut dyn EventSink) -> bool {
        match &update {
            Update::Started if !self.plan.logprobs.of_prompt && !self.plan.echoed(index).is_empty() => {
                let text = self.plan.echoed(index).to_string();
                self.text(index, text, None, sink);
            }
            Update::Prefilled { prompt, .. } if self.plan.logprobs.of_prompt => self.prompt(index, prompt, sink),
            Update::Token { token, text, logprob, top } => {
                self.flush(index, sink);
                if self.plan.logprobs.is_requested {
                    let n_bytes = text.len();
                    let token = SampledToken { token: *token, logprob: *logprob, top: top.clone(), n_bytes };
                    self.pending[index] = Some((text.clone(), token));
                } else if !text.is_empty() {
                    self.text(index, text.clone(), None, sink);
                }
            }
            Update::Done { text, reason, .. } => {
                if matches!(reason, FinishReason::StopToken(_)) {
                    self.pending[index] = None;
                }
                self.flush(index, sink);
                if !text.is_empty() {
                    self.text(index, text.clone(), None, sink);
                }
            }
            _ => {}
        }
        let is_done = matches!(update, Update::Done { .. });
        self.answers[index].add(update);
        if !is_done {
            return false;
        }
        let finish_reason = Some(self.answers[index].finish_reason());
        let receipt = self.answers[index].receipt.take();
        let last = CompletionChoice { index, finish_reason, receipt, ..CompletionChoice::default() };
        self.chunk(vec![last], None, sink);
        if self.answers.iter().any(|answer| answer.finish.is_none()) {
            return false;
        }
        if self.plan.stream_usage {
            let usage = self.plan.usage(&self.answers);
            self.chunk(Vec::new(), Some(usage), sink);
        }
        sink.done();
        true
    }
}

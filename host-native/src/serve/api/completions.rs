//! `POST /v1/completions`.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use serde::{Deserialize, Serialize};
use starling::engine::{FinishReason, TokenLogprobs};
use starling::receipt::Receipt;
use starling::tokenizer::{DecodeOptions, EncodeOptions, Tokenizer};
use utoipa::ToSchema;

use super::super::offload::offload;
use super::super::queue::Update;
use super::super::state::{App, Caller};
use super::answer::{Answer, Answers, Pick, Usage, collect, escaped, piece};
use super::body::Body;
use super::error::{ApiError, ErrorBody, HttpError, json};
use super::messages::beside;
use super::options::{check_model, flow, limits, salt, sampling, seed};
use super::sse::{Events, ServerSentEvent, Writer, stream};
use super::structure::compile_constraint;
use super::submit::{check_count, submit};
use starling_api::input::Input;
use starling_api::openai::options::{Logprobs, MAX_TOP, Options, RequestPlan, Scope};
use starling_api::parse::{ParseBody, parse};
use starling_api::structure::OutputConstraint;

/// Prompts to be continued.
#[derive(Debug, Deserialize, ToSchema)]
pub struct CompletionRequest {
    /// Options of the answers.
    #[serde(flatten)]
    pub options: Options,
    /// What they have to be.
    #[serde(flatten)]
    pub constraint: OutputConstraint,
    /// The prompts themselves.
    #[serde(flatten)]
    pub completion: Completion,
}

/// Prompts, and what is special to them.
#[derive(Debug, Deserialize, ToSchema)]
pub struct Completion {
    /// A text, tokens, or a list of either.
    pub prompt: Input,
    /// Whether answers begin with their prompt.
    pub echo: Option<bool>,
    /// Of how many alternatives of each token there are log-probabilities; with `echo` of the prompt's tokens too.
    #[schema(minimum = 0, maximum = 20)]
    pub logprobs: Option<u32>,
    /// Only as many as are asked for.
    pub best_of: Option<u32>,
    /// Text after the answer is not supported.
    pub suffix: Option<String>,
    /// Whether names of control tokens in the prompt, such as `<|fim_prefix|>`, stand for those tokens; true by default,
    /// as with vLLM and llama-server.
    pub parse_special: Option<bool>,
}

impl ParseBody for CompletionRequest {
    fn parse_body(json: &[u8]) -> Result<Self, ApiError> {
        Ok(CompletionRequest { options: parse(json)?, constraint: parse(json)?, completion: parse(json)? })
    }
}

/// One answer, or a piece of one.
#[derive(Debug, Default, Serialize, ToSchema)]
pub struct CompletionChoice {
    /// The text.
    pub text: String,
    /// Which of several.
    pub index: usize,
    /// Log-probabilities, if asked for.
    pub logprobs: Option<CompletionLogprobs>,
    /// `stop` or `length`.
    pub finish_reason: Option<&'static str>,
    /// If asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub receipt: Option<Box<Receipt>>,
}

/// Log-probabilities, in lists of the same length.
#[derive(Debug, Default, Clone, PartialEq, Serialize, ToSchema)]
pub struct CompletionLogprobs {
    /// The tokens as text; those whose bytes are not text as `bytes:\x` and the bytes in hexadecimal.
    pub tokens: Vec<String>,
    /// Natural logarithms of their probabilities; the first token of a prompt has none.
    pub token_logprobs: Vec<Option<f32>>,
    /// The most probable tokens, in the form of `tokens`, with theirs; of tokens with the same text the most probable.
    pub top_logprobs: Vec<Option<BTreeMap<String, f32>>>,
    /// Where each token begins, in characters from the beginning of the text.
    pub text_offset: Vec<usize>,
}

/// Tokens of an answer that asks for no number.
const DEFAULT_TOKENS: usize = 16;

/// Continues prompts.
///
/// # Errors
/// What is wrong with the request, or with the server now.
#[utoipa::path(post, path = "/v1/completions", tag = "OpenAI", request_body = CompletionRequest, responses(
    (status = 200, description = "The answers; with `stream` as server-sent events", content(
        (Answers<CompletionChoice> = "application/json"), (ServerSentEvent = "text/event-stream"),
    )),
    (status = "4XX", description = "The request is wrong, or too many wait", body = ErrorBody),
    (status = "5XX", description = "The server cannot answer now", body = ErrorBody),
))]
pub async fn completions(
    State(app): State<Arc<App>>,
    caller: Caller,
    Body(body): Body<CompletionRequest>,
) -> Result<Response, HttpError> {
    let CompletionRequest { mut options, constraint, completion } = body;
    check_model(&app, options.model.as_deref())?;
    options.penalty_scope.get_or_insert(Scope::Answer);
    let echo = completion.echo == Some(true);
    let logprobs = completion.check(echo)?;
    let (n, flow) = (options.n_choices(app.settings.max_n)?, flow(&options, &caller)?);
    if completion.best_of.is_some_and(|best| best as usize != n) {
        return Err(ApiError::unsupported("best_of", "this server supports best_of only where it is n").into());
    }
    if completion.prompt.len() > app.settings.max_inputs {
        let (found, most) = (completion.prompt.len(), app.settings.max_inputs);
        return Err(ApiError::param("prompt", format!("{found} prompts, expected at most {most}")).into());
    }
    check_count(&app, completion.prompt.len() * n)?;
    let special = EncodeOptions { add_special: true, parse_special: completion.parse_special != Some(false) };
    let (model, size) = (Arc::clone(&app.model), completion.prompt.bytes());
    let input = completion.prompt;
    // a prompt in tokens is echoed as their text, one in text as it is
    let prompts: Vec<Head> = beside(size, move || {
        let encode = |text: String| {
            let (tokens, ranges) = model.tokenizer.encode_with_offsets(&text, special);
            let offsets = if logprobs.of_prompt { in_characters(&text, &ranges) } else { Vec::new() };
            Head { tokens, text, offsets }
        };
        let decode = |tokens: Vec<u32>| {
            let text = model.tokenizer.decode(&tokens, DecodeOptions { skip_special: false });
            let offsets = if logprobs.of_prompt { of_pieces(&model.tokenizer, &tokens) } else { Vec::new() };
            Head { text: String::from_utf8_lossy(&text).into_owned(), tokens, offsets }
        };
        Ok(input.each(encode, decode))
    })
    .await?;
    let seed = seed(&options, &app);
    let nothing_asked = !logprobs.of_prompt && options.max_tokens == Some(0) && options.max_completion_tokens.is_none();
    let options = if nothing_asked { Options { max_tokens: Some(1), ..options } } else { options };
    let constraint = compile_constraint(&app, constraint).await?;
    let sampling = sampling(&options, &app, logprobs, seed).await?;
    let (streams, usage) = (options.is_stream(), options.includes_usage());
    let cache_salt = salt(&options, &app, &caller)?;
    let plan = RequestPlan {
        sampling,
        constraint,
        prompt_logprobs: logprobs.of_prompt,
        default_tokens: Some(DEFAULT_TOKENS),
        cache_salt,
    };
    let inner = Arc::clone(&app);
    let build = move || {
        let limits = limits(&inner);
        let request = |head: &Head| options.request(&limits, &plan, head.tokens.clone(), "prompt");
        let requests = prompts.iter().map(request).collect::<Result<Vec<_>, _>>()?;
        Ok::<_, ApiError>((prompts, requests))
    };
    let (mut heads, requests) = offload(usize::MAX, build).await??;
    if !echo {
        heads.iter_mut().for_each(|head| head.text.clear());
    }
    if requests.is_empty() {
        return Err(ApiError::param("prompt", "prompt is empty, expected at least one prompt").into());
    }
    let n_prompt = requests.iter().map(|r| r.tokens.len()).sum();
    let count = requests.len() * n;
    let mut response = Answers::new(&app, "cmpl-", "text_completion", seed, None);
    if nothing_asked {
        // only the prompt is wanted back
        let choice = |index: usize| CompletionChoice {
            text: heads[index / n].text.clone(),
            index,
            finish_reason: Some("length"),
            ..CompletionChoice::default()
        };
        response.choices = (0..count).map(choice).collect();
        response.usage = Some(Some(Usage::new(n_prompt, n, [])));
        return Ok(json(StatusCode::OK, &response));
    }
    let updates = submit(&app, &caller, &flow, requests, n)?;
    if streams {
        let keep_alive = app.settings.sse_keep_alive;
        let writer = CompletionWriter {
            app,
            response,
            n_prompt,
            n,
            offsets: (0..count).map(|i| heads[i / n].text.chars().count()).collect(),
            scored: vec![None; heads.len()],
            heads,
            answers: (0..count).map(|_| Answer::default()).collect(),
            pending: (0..count).map(|_| None).collect(),
            logprobs,
            usage,
        };
        return Ok(stream(updates, writer, keep_alive));
    }
    let answers = collect(updates, count).await?;
    response.usage = Some(Some(Usage::new(n_prompt, n, &answers)));
    let size = answers.iter().map(Answer::n_values).sum();
    let build = move || {
        let tokenizer = &app.model.tokenizer;
        let scored: Vec<_> =
            heads.iter().zip(answers.chunks(n)).map(|(h, a)| h.logprobs(tokenizer, &a[0].prompt)).collect();
        let choice = |(index, answer): (usize, Answer)| {
            let head = &heads[index / n];
            let mut lists = scored[index / n].clone();
            lists.extend(tokenizer, &answer.tokens, &mut head.text.chars().count());
            CompletionChoice {
                logprobs: logprobs.is_requested.then_some(lists),
                finish_reason: Some(answer.finish_name()),
                text: head.text.clone() + &answer.text,
                index,
                receipt: answer.receipt,
            }
        };
        response.choices = answers.into_iter().enumerate().map(choice).collect();
        json(StatusCode::OK, &response)
    };
    Ok(offload(size, build).await?)
}

impl Completion {
    /// Checks what is special to completions; says which log-probabilities are wanted.
    fn check(&self, echo: bool) -> Result<Logprobs, ApiError> {
        if self.suffix.as_deref().is_some_and(|suffix| !suffix.is_empty()) {
            return Err(ApiError::unsupported("suffix", "this server does not support suffix"));
        }
        match self.logprobs {
            Some(top) if top > MAX_TOP => {
                let message = format!("logprobs is {top}, expected a number from 0 to {MAX_TOP}");
                Err(ApiError::param("logprobs", message))
            }
            top => {
                Ok(Logprobs { is_requested: top.is_some(), n_top: top.unwrap_or(0), of_prompt: echo && top.is_some() })
            }
        }
    }
}

/// A prompt, as answers begin with it.
struct Head {
    tokens: Vec<u32>,
    text: String,
    /// Where its tokens begin, in characters, if that is wanted.
    offsets: Vec<usize>,
}

impl Head {
    /// Its lists: of the first token nothing is known.
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
    /// Adds a token that begins at `offset`; returns its characters.
    fn push(&mut self, tokenizer: &Tokenizer, token: u32, offset: usize, score: Option<(f32, &[(u32, f32)])>) -> usize {
        let n = piece(tokenizer, token).chars().count();
        self.tokens.push(name(tokenizer, token));
        self.text_offset.push(offset);
        self.token_logprobs.push(score.map(|(logprob, _)| logprob));
        let names = |top: &[(u32, f32)]| {
            let mut names = BTreeMap::new();
            // the best come first
            top.iter().for_each(|(t, logprob)| _ = names.entry(name(tokenizer, *t)).or_insert(*logprob));
            names
        };
        self.top_logprobs.push(score.map(|(_, top)| names(top)));
        n
    }

    /// Adds tokens of an answer, the first of which begins at `offset`.
    fn extend(&mut self, tokenizer: &Tokenizer, picks: &[Pick], offset: &mut usize) {
        for pick in picks {
            *offset += self.push(tokenizer, pick.token, *offset, Some((pick.logprob, &pick.top)));
        }
    }
}

/// A token as OpenAI's completions write it.
fn name(tokenizer: &Tokenizer, token: u32) -> String {
    escaped(tokenizer, token).map_or_else(|bytes| format!("bytes:{bytes}"), str::to_string)
}

/// Where ranges of bytes of a text begin, in characters; they ascend.
fn in_characters(text: &str, ranges: &[Range<usize>]) -> Vec<usize> {
    let mut ends = text.char_indices().map(|(at, c)| at + c.len_utf8()).peekable();
    let mut characters = 0;
    let mut before = |at: usize| {
        while ends.next_if(|end| *end <= at).is_some() {
            characters += 1;
        }
        characters
    };
    ranges.iter().map(|range| before(range.start)).collect()
}

/// Where tokens begin in their text, in characters.
fn of_pieces(tokenizer: &Tokenizer, tokens: &[u32]) -> Vec<usize> {
    let mut offset = 0;
    let begins = |token: &u32| {
        let at = offset;
        offset += piece(tokenizer, *token).chars().count();
        at
    };
    tokens.iter().map(begins).collect()
}

/// Writes answers as pieces.
struct CompletionWriter {
    app: Arc<App>,
    response: Answers<CompletionChoice>,
    n_prompt: usize,
    n: usize,
    /// What the answers to each prompt begin with, and its log-probabilities once they are known.
    heads: Vec<Head>,
    scored: Vec<Option<CompletionLogprobs>>,
    offsets: Vec<usize>,
    answers: Vec<Answer>,
    /// Text and log-probabilities of a token, held until it is known not to be the one that ends the answer.
    pending: Vec<Option<(String, Pick)>>,
    logprobs: Logprobs,
    usage: bool,
}

impl CompletionWriter {
    fn send(&mut self, choices: Vec<CompletionChoice>, usage: Option<Usage>, events: &mut Events) {
        self.response.choices = choices;
        self.response.usage = self.usage.then_some(usage);
        events.json(&self.response);
    }

    fn piece(&mut self, index: usize, text: String, pick: Option<Pick>, events: &mut Events) {
        let logprobs = self.logprobs.is_requested.then(|| {
            let mut lists = CompletionLogprobs::default();
            lists.extend(&self.app.model.tokenizer, pick.as_slice(), &mut self.offsets[index]);
            lists
        });
        self.send(vec![CompletionChoice { text, index, logprobs, ..CompletionChoice::default() }], None, events);
    }

    /// The prompt, once its log-probabilities are known: they are those of the first answer to it.
    fn head(&mut self, index: usize, scores: &[TokenLogprobs], events: &mut Events) {
        let i = index / self.n;
        let tokenizer = &self.app.model.tokenizer;
        let logprobs = self.scored[i].get_or_insert_with(|| self.heads[i].logprobs(tokenizer, scores)).clone();
        let text = self.heads[i].text.clone();
        let choice = CompletionChoice { text, index, logprobs: Some(logprobs), ..CompletionChoice::default() };
        self.send(vec![choice], None, events);
    }

    fn flush(&mut self, index: usize, events: &mut Events) {
        if let Some((text, pick)) = self.pending[index].take() {
            self.piece(index, text, Some(pick), events);
        }
    }
}

impl Writer for CompletionWriter {
    fn update(&mut self, index: usize, update: Update, events: &mut Events) -> bool {
        match &update {
            Update::Started if !self.logprobs.of_prompt && !self.heads[index / self.n].text.is_empty() => {
                let head = self.heads[index / self.n].text.clone();
                self.piece(index, head, None, events);
            }
            Update::Prefilled { prompt, .. } if self.logprobs.of_prompt => self.head(index, prompt, events),
            Update::Token { token, text, logprob, top } => {
                self.flush(index, events);
                if self.logprobs.is_requested {
                    let pick = Pick { token: *token, logprob: *logprob, top: top.clone() };
                    self.pending[index] = Some((text.clone(), pick));
                } else if !text.is_empty() {
                    self.piece(index, text.clone(), None, events);
                }
            }
            Update::Done { text, reason, .. } => {
                if matches!(reason, FinishReason::StopToken(_)) {
                    self.pending[index] = None;
                }
                self.flush(index, events);
                if !text.is_empty() {
                    self.piece(index, text.clone(), None, events);
                }
            }
            _ => {}
        }
        let is_done = matches!(update, Update::Done { .. });
        self.answers[index].take(update);
        if !is_done {
            return false;
        }
        let finish_reason = Some(self.answers[index].finish_name());
        let receipt = self.answers[index].receipt.take();
        self.send(
            vec![CompletionChoice { index, finish_reason, receipt, ..CompletionChoice::default() }],
            None,
            events,
        );
        if self.answers.iter().any(|a| a.finish.is_none()) {
            return false;
        }
        if self.usage {
            let usage = Usage::new(self.n_prompt, self.n, &self.answers);
            self.send(Vec::new(), Some(usage), events);
        }
        events.done();
        true
    }
}

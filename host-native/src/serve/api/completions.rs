//! `POST /v1/completions`.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use serde::{Deserialize, Serialize};
use starling::engine::FinishReason;
use starling::receipt::Receipt;
use starling::tokenizer::{DecodeOptions, EncodeOptions, Tokenizer};
use utoipa::ToSchema;

use super::super::queue::Update;
use super::super::state::{App, Caller, fresh_name, unix_now};
use super::answer::{Answer, Pick, Usage, collect, not_finite, piece};
use super::body::{Body, Read, parse};
use super::error::{ApiError, ErrorBody, json};
use super::input::Input;
use super::messages::beside;
use super::options::{Logprobs, MAX_TOP, Name, Options, shared};
use super::sse::{Events, ServerSentEvent, Writer, stream};
use super::submit::submit;

/// Prompts to be continued.
#[derive(Debug, Deserialize, ToSchema)]
pub struct CompletionRequest {
    /// Options of the answers.
    #[serde(flatten)]
    pub options: Options,
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
    /// Of how many alternatives of each token there are log-probabilities.
    #[schema(minimum = 0, maximum = 20)]
    pub logprobs: Option<u32>,
    /// Only as many as are asked for.
    pub best_of: Option<u32>,
    /// Text after the answer is not supported.
    pub suffix: Option<String>,
    /// Whether names of control tokens in the prompt stand for those tokens.
    pub parse_special: Option<bool>,
}

impl Read for CompletionRequest {
    fn read(json: &[u8]) -> Result<Self, ApiError> {
        Ok(CompletionRequest { options: parse(json)?, completion: parse(json)? })
    }
}

/// Answers to prompts; the same for pieces of them.
#[derive(Debug, Serialize, ToSchema)]
pub struct CompletionResponse {
    /// Its name.
    #[schema(value_type = String)]
    pub id: Name,
    /// `text_completion`.
    pub object: &'static str,
    /// Seconds since 1970.
    pub created: u64,
    /// The model's name.
    #[schema(value_type = String)]
    pub model: Name,
    /// The answers, those to the first prompt first.
    pub choices: Vec<CompletionChoice>,
    /// Numbers of tokens; of pieces only in the last, if asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Usage>)]
    pub usage: Option<Option<Usage>>,
    /// Which model, engine and numbers answer.
    #[schema(value_type = String)]
    pub system_fingerprint: Name,
    /// The seed in effect.
    pub seed: u64,
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
    /// The tokens as text.
    pub tokens: Vec<String>,
    /// Natural logarithms of their probabilities.
    pub token_logprobs: Vec<f32>,
    /// The most probable tokens, with theirs.
    pub top_logprobs: Vec<BTreeMap<String, f32>>,
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
        (CompletionResponse = "application/json"), (ServerSentEvent = "text/event-stream"),
    )),
    (status = "4XX", description = "The request is wrong, or too many wait", body = ErrorBody),
    (status = "5XX", description = "The server cannot answer now", body = ErrorBody),
))]
pub async fn completions(
    State(app): State<Arc<App>>,
    caller: Caller,
    Body(body): Body<CompletionRequest>,
) -> Result<Response, ApiError> {
    let CompletionRequest { options, completion } = body;
    options.check_model(&app)?;
    let echo = completion.echo == Some(true);
    let logprobs = completion.check(echo)?;
    let (n, flow) = (options.count(&app)?, options.flow(&caller)?);
    if completion.best_of.is_some_and(|best| best as usize != n) {
        return Err(ApiError::unsupported("best_of", "this server supports best_of only where it is n"));
    }
    if completion.prompt.len() > app.settings.max_inputs {
        let (found, most) = (completion.prompt.len(), app.settings.max_inputs);
        return Err(ApiError::param("prompt", format!("{found} prompts, expected at most {most}")));
    }
    let special = EncodeOptions { add_special: true, parse_special: completion.parse_special == Some(true) };
    let (model, size) = (Arc::clone(&app.model), completion.prompt.bytes());
    let input = completion.prompt;
    // a prompt in tokens is echoed as their text, one in text as it is
    let prompts: Vec<(Vec<u32>, String)> = beside(size, move || {
        let encode = |text: String| (model.tokenizer.encode(&text, special), text);
        let decode = |tokens: Vec<u32>| {
            let text = model.tokenizer.decode(&tokens, DecodeOptions { skip_special: false });
            (tokens, String::from_utf8_lossy(&text).into_owned())
        };
        Ok(input.each(encode, decode))
    })
    .await?;
    let seed = options.effective_seed(&app);
    let heads: Vec<String> = prompts.iter().map(|(_, text)| if echo { text.clone() } else { String::new() }).collect();
    let nothing_asked = options.max_tokens == Some(0) && options.max_completion_tokens.is_none();
    let options = if nothing_asked { Options { max_tokens: Some(1), ..options } } else { options };
    let request =
        |(tokens, _)| options.request(&app, &caller, tokens, (logprobs, seed, Some(DEFAULT_TOKENS)), "prompt");
    let requests = prompts.into_iter().map(request).collect::<Result<Vec<_>, _>>()?;
    if requests.is_empty() {
        return Err(ApiError::param("prompt", "prompt is empty, expected at least one prompt"));
    }
    let n_prompt = requests.iter().map(|r| r.tokens.len()).sum();
    let count = requests.len() * n;
    let mut response = CompletionResponse {
        id: shared(&fresh_name("cmpl-")),
        object: "text_completion",
        created: unix_now(),
        model: shared(&app.model_name),
        choices: Vec::new(),
        usage: None,
        system_fingerprint: shared(&app.fingerprint),
        seed,
    };
    if nothing_asked {
        // only the prompt is wanted back
        let choice = |index: usize| CompletionChoice {
            text: heads[index / n].clone(),
            index,
            finish_reason: Some("length"),
            ..CompletionChoice::default()
        };
        response.choices = (0..count).map(choice).collect();
        response.usage = Some(Some(Usage::new(n_prompt, n, [])));
        return Ok(json(StatusCode::OK, &response));
    }
    let updates = submit(&app, &caller, &flow, requests, n)?;
    if options.streams() {
        let writer = CompletionWriter {
            app,
            response,
            n_prompt,
            n,
            offsets: (0..count).map(|i| heads[i / n].chars().count()).collect(),
            heads,
            answers: (0..count).map(|_| Answer::default()).collect(),
            pending: (0..count).map(|_| None).collect(),
            logprobs: logprobs.wanted,
            usage: options.includes_usage(),
        };
        return stream(updates, writer).await;
    }
    let answers = collect(updates, count).await?;
    response.usage = Some(Some(Usage::new(n_prompt, n, &answers)));
    let choice = |(index, answer): (usize, Answer)| {
        let head = &heads[index / n];
        let mut offset = head.chars().count();
        CompletionChoice {
            logprobs: logprobs.wanted.then(|| list(&app.model.tokenizer, &answer.tokens, &mut offset)),
            finish_reason: Some(answer.finish_name()),
            text: head.clone() + &answer.text,
            index,
            receipt: answer.receipt,
        }
    };
    response.choices = answers.into_iter().enumerate().map(choice).collect();
    Ok(json(StatusCode::OK, &response))
}

impl Completion {
    /// Checks what is special to completions; says which log-probabilities are wanted.
    fn check(&self, echo: bool) -> Result<Logprobs, ApiError> {
        if self.suffix.as_deref().is_some_and(|suffix| !suffix.is_empty()) {
            return Err(ApiError::unsupported("suffix", "this server does not support suffix"));
        }
        if echo && self.logprobs.is_some() {
            let message = "this server has no log-probabilities of prompts: echo and logprobs exclude each other";
            return Err(ApiError::unsupported("logprobs", message));
        }
        match self.logprobs {
            Some(top) if top > MAX_TOP => {
                let message = format!("logprobs is {top}, expected a number from 0 to {MAX_TOP}");
                Err(ApiError::param("logprobs", message))
            }
            top => Ok(Logprobs { wanted: top.is_some(), top: top.unwrap_or(0) }),
        }
    }
}

/// Log-probabilities of tokens, the first of which begins at `offset`.
fn list(tokenizer: &Tokenizer, picks: &[Pick], offset: &mut usize) -> CompletionLogprobs {
    let mut all = CompletionLogprobs::default();
    for pick in picks {
        let text = piece(tokenizer, pick.token);
        all.text_offset.push(*offset);
        *offset += text.chars().count();
        all.tokens.push(text);
        all.token_logprobs.push(pick.logprob);
        all.top_logprobs.push(pick.top.iter().map(|(t, logprob)| (piece(tokenizer, *t), *logprob)).collect());
    }
    all
}

/// Writes answers as pieces.
struct CompletionWriter {
    app: Arc<App>,
    response: CompletionResponse,
    n_prompt: usize,
    n: usize,
    /// What each answer begins with.
    heads: Vec<String>,
    offsets: Vec<usize>,
    answers: Vec<Answer>,
    /// Text and log-probabilities of a token, held until it is known not to be the one that ends the answer.
    pending: Vec<Option<(String, Pick)>>,
    logprobs: bool,
    usage: bool,
}

impl CompletionWriter {
    fn send(&mut self, choices: Vec<CompletionChoice>, usage: Option<Usage>, events: &mut Events) {
        self.response.choices = choices;
        self.response.usage = self.usage.then_some(usage);
        events.json(&self.response);
    }

    fn piece(&mut self, index: usize, text: String, pick: Option<Pick>, events: &mut Events) {
        let picks = pick.as_slice();
        let logprobs = self.logprobs.then(|| list(&self.app.model.tokenizer, picks, &mut self.offsets[index]));
        self.send(vec![CompletionChoice { text, index, logprobs, ..CompletionChoice::default() }], None, events);
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
            Update::Started if !self.heads[index / self.n].is_empty() => {
                let head = self.heads[index / self.n].clone();
                self.piece(index, head, None, events);
            }
            Update::Token { token, text, logprob, top } => {
                self.flush(index, events);
                if self.logprobs {
                    let pick = Pick { token: *token, logprob: *logprob, top: top.clone() };
                    self.pending[index] = Some((text.clone(), pick));
                } else if !text.is_empty() {
                    self.piece(index, text.clone(), None, events);
                }
            }
            Update::Done { reason: FinishReason::NotFinite, .. } => {
                self.failed(&not_finite(), events);
                return true;
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

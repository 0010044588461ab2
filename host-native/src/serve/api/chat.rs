//! `POST /v1/chat/completions`.

use std::sync::Arc;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use starling::chat::Json;
use starling::receipt::Receipt;
use starling::tokenizer::Tokenizer;
use utoipa::ToSchema;

use super::super::offload::offload;
use super::super::queue::Update;
use super::super::sessions::Visit;
use super::super::state::{App, Caller, random};
use super::answer::{Answer, Answers, Pick, Usage, collect, escaped};
use super::body::Body;
use super::error::{ApiError, ErrorBody, HttpError, json};
use super::messages::{opening, render};
use super::options::{check_model, flow, limits, salt, sampling, seed, session};
use super::sse::{Events, ServerSentEvent, Writer, stream};
use super::structure::{compile_calls, compile_form};
use super::submit::submit;
use starling_api::openai::options::{Logprobs, MAX_TOP, Options, RequestPlan, Scope};
use starling_api::parse::{ParseBody, parse};
use starling_api::structure::OutputConstraint;
use starling_api::tools::{
    CallIds, RenderedTools, ToolCall, ToolCallParser, ToolChoice, is_truncated, parse_tool_choice,
};

/// A conversation to be continued.
#[derive(Debug, Deserialize, ToSchema)]
pub struct ChatCompletionRequest {
    /// Options of the answer.
    #[serde(flatten)]
    pub options: Options,
    /// What it has to be.
    #[serde(flatten)]
    pub constraint: OutputConstraint,
    /// The conversation itself.
    #[serde(flatten)]
    pub chat: Chat,
}

/// A conversation, and what is special to it.
#[derive(Debug, Default, Deserialize, ToSchema)]
pub struct Chat {
    /// Messages with `role` and `content`.
    #[schema(value_type = Vec<Object>, min_items = 1)]
    pub messages: Vec<Json>,
    /// Whether the answer has log-probabilities.
    pub logprobs: Option<bool>,
    /// Of how many alternatives for each token.
    #[schema(minimum = 0, maximum = 20)]
    pub top_logprobs: Option<u32>,
    /// Continue the last message, which must be the assistant's, instead of starting a new one. Default: false.
    pub continue_final_message: Option<bool>,
    /// Append the generation prompt of the chat template. Default: true, unless the last message is continued.
    pub add_generation_prompt: Option<bool>,
    /// More variables for the chat template, by name.
    #[schema(value_type = Option<Object>)]
    pub chat_template_kwargs: Option<Json>,
    /// Functions that the model may call. With `response_format` or its kin, an answer is either calls or of that form.
    #[schema(value_type = Option<Vec<Object>>)]
    pub tools: Option<Value>,
    /// Whether the model calls: `auto`, the default, as it likes, with arguments by the schema of functions that are
    /// `strict`; `none`; `required` at least one; `{"type": "function", "function": {"name": ...}}` that one.
    pub tool_choice: Option<ToolChoice>,
    /// Whether an answer may have several calls; it may unless this is false. Applies where calls are forced or strict.
    pub parallel_tool_calls: Option<bool>,
}

impl ParseBody for ChatCompletionRequest {
    fn parse_body(json: &[u8]) -> Result<Self, ApiError> {
        Ok(ChatCompletionRequest { options: parse(json)?, constraint: parse(json)?, chat: parse(json)? })
    }
}

/// One answer.
#[derive(Debug, Serialize, ToSchema)]
pub struct ChatChoice {
    /// Which of several.
    pub index: usize,
    /// What the model says.
    pub message: Message,
    /// Log-probabilities, if asked for.
    pub logprobs: Option<ChatLogprobs>,
    /// `stop`, `length` or `tool_calls`.
    pub finish_reason: &'static str,
    /// If asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub receipt: Option<Box<Receipt>>,
}

/// What the model says.
#[derive(Debug, Serialize, ToSchema)]
pub struct Message {
    /// `assistant`.
    pub role: &'static str,
    /// The text; none where there are only calls.
    pub content: Option<String>,
    /// What the model calls, if it was told of tools.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// Always nothing: this server refuses nothing for its content.
    pub refusal: Option<String>,
}

/// Log-probabilities of an answer.
#[derive(Debug, Serialize, ToSchema)]
pub struct ChatLogprobs {
    /// Of each token.
    pub content: Vec<TokenLogprob>,
}

/// A token with its log-probability and those of others.
#[derive(Debug, Serialize, ToSchema)]
pub struct TokenLogprob {
    /// The token as text; where its bytes are not text, `\x` and each of them in hexadecimal.
    pub token: String,
    /// Natural logarithm of its probability.
    pub logprob: f32,
    /// Its bytes.
    pub bytes: Vec<u8>,
    /// The most probable tokens.
    pub top_logprobs: Vec<Alternative>,
}

/// A token that might have been.
#[derive(Debug, Serialize, ToSchema)]
pub struct Alternative {
    /// The token as text; where its bytes are not text, `\x` and each of them in hexadecimal.
    pub token: String,
    /// Natural logarithm of its probability.
    pub logprob: f32,
    /// Its bytes.
    pub bytes: Vec<u8>,
}

/// What is new in an answer.
#[derive(Debug, Default, Serialize, ToSchema)]
pub struct ChatDelta {
    /// Which of several.
    pub index: usize,
    /// What is new.
    pub delta: Delta,
    /// Log-probabilities of new tokens, if asked for.
    pub logprobs: Option<ChatLogprobs>,
    /// Why the answer ended, in its last piece.
    pub finish_reason: Option<&'static str>,
    /// If asked for, in its last piece.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub receipt: Option<Box<Receipt>>,
}

/// New text.
#[derive(Debug, Default, Serialize, ToSchema)]
pub struct Delta {
    /// In the first piece.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<&'static str>,
    /// The text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
    /// Calls, each whole.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
}

/// Answers a conversation.
///
/// # Errors
/// What is wrong with the request, or with the server now.
#[utoipa::path(post, path = "/v1/chat/completions", tag = "OpenAI", request_body = ChatCompletionRequest, responses(
    (status = 200, description = "The answer; with `stream` as server-sent events of `Answers_ChatDelta`", content(
        (Answers<ChatChoice> = "application/json"), (ServerSentEvent = "text/event-stream"),
    )),
    (status = "4XX", description = "The request is wrong, or too many wait", body = ErrorBody),
    (status = "5XX", description = "The server cannot answer now", body = ErrorBody),
))]
pub async fn chat_completions(
    State(app): State<Arc<App>>,
    caller: Caller,
    Body(body): Body<ChatCompletionRequest>,
) -> Result<Response, HttpError> {
    let ChatCompletionRequest { mut options, constraint, chat } = body;
    check_model(&app, options.model.as_deref())?;
    options.penalty_scope.get_or_insert(Scope::Answer);
    let logprobs = chat.logprobs()?;
    let (n, flow) = (options.n_choices(app.settings.max_n)?, flow(&options, &caller)?);
    let session = session(&options, &caller)?.map(str::to_string);
    let variables = chat.variables()?;
    let (inner, tools, choice) = (Arc::clone(&app), chat.tools, chat.tool_choice);
    let (size, parallel) = (if tools.is_some() { usize::MAX } else { 0 }, chat.parallel_tool_calls != Some(false));
    let check = move || parse_tool_choice(inner.template.source(), tools, choice, parallel);
    let RenderedTools { tools, calls, is_constrained, is_forced } = offload(size, check).await??;
    let form = constraint.form()?;
    let has_schema = form.is_some();
    // without tools, the answer has no calls
    let parser = tools.is_some().then(|| {
        let ids = CallIds::new(u128::from(random()) << 64 | u128::from(random()));
        move |index| ToolCallParser::new(has_schema, ids.choice(index))
    });
    let constraint = match (form, calls) {
        (Some((param, _)), _) if is_forced => {
            return Err(ApiError::param(&param, format!("{param} is given, but tool_choice asks for a call")).into());
        }
        (Some(form), Some(calls)) => Some(compile_calls(&app, calls, Some(form)).await?),
        (Some((param, form)), None) => Some(compile_form(&app, param, form).await?),
        (None, Some(calls)) if is_constrained => Some(compile_calls(&app, calls, None).await?),
        (None, _) => None,
    };
    let opening = opening(chat.continue_final_message, chat.add_generation_prompt)?;
    let tokens = render(&app, chat.messages, tools, variables, opening).await?;
    let (n_prompt, seed) = (tokens.len(), seed(&options, &app));
    let sampling = sampling(&options, &app, logprobs, seed).await?;
    let cache_salt = salt(&options, &app, &caller)?;
    let plan = RequestPlan { sampling, constraint, prompt_logprobs: false, default_tokens: None, cache_salt };
    let request = options.request(&limits(&app), &plan, tokens, "messages")?;
    let conversation = session.as_deref().map(|name| (Arc::from(name), request.cache_salt, request.tokens.clone()));
    let updates = submit(&app, &caller, &flow, vec![request], n)?;
    let mut note = Note::new(&app, &caller, conversation);
    if options.is_stream() {
        let keep_alive = app.settings.sse_keep_alive;
        let response = Answers::new(&app, "chatcmpl-", "chat.completion.chunk", seed, session.as_deref());
        let writer = ChatWriter {
            app,
            response,
            n_prompt,
            answers: (0..n).map(|_| Answer::default()).collect(),
            pending: (0..n).map(|_| None).collect(),
            parsers: (0..n).map(|index| parser.map(|parser| parser(index))).collect(),
            logprobs: logprobs.is_requested,
            usage: options.includes_usage(),
            note,
        };
        return Ok(stream(updates, writer, keep_alive));
    }
    let answers = collect(updates, n).await?;
    let usage = Usage::new(n_prompt, n, &answers);
    note.answered(&answers[0]);
    let mut response = Answers::new(&app, "chatcmpl-", "chat.completion", seed, session.as_deref());
    response.usage = Some(Some(usage));
    let size = answers.iter().map(Answer::n_values).sum();
    let build = move || {
        let choice = |(index, answer): (usize, Answer)| {
            let finish = answer.finish_name();
            let message = Message::new(answer.text, parser.map(|parser| parser(index)), is_truncated(answer.finish));
            ChatChoice {
                index,
                logprobs: logprobs.is_requested.then(|| ChatLogprobs::of(&app.model.tokenizer, &answer.tokens)),
                finish_reason: finish_reason(finish, message.tool_calls.len()),
                message,
                receipt: answer.receipt,
            }
        };
        response.choices = answers.into_iter().enumerate().map(choice).collect();
        json(StatusCode::OK, &response)
    };
    Ok(offload(size, build).await?)
}

impl Message {
    /// The message of an answer; `parser` finds its tool calls.
    fn new(text: String, parser: Option<ToolCallParser>, truncated: bool) -> Message {
        let (content, tool_calls) = match parser {
            None => (text, Vec::new()),
            Some(mut parser) => {
                let ((content, calls), (rest, last)) = (parser.push(&text), parser.finish(truncated));
                (content + &rest, calls.into_iter().chain(last).collect())
            }
        };
        let content = (tool_calls.is_empty() || !content.is_empty()).then_some(content);
        Message { role: "assistant", content, tool_calls, refusal: None }
    }
}

/// Why an answer ended, if it made so many calls.
fn finish_reason(name: &'static str, calls: usize) -> &'static str {
    if calls > 0 && name == "stop" { "tool_calls" } else { name }
}

impl Chat {
    fn logprobs(&self) -> Result<Logprobs, ApiError> {
        let (wanted, top) = (self.logprobs == Some(true), self.top_logprobs.unwrap_or(0));
        if top > MAX_TOP {
            let message = format!("top_logprobs is {top}, expected a number from 0 to {MAX_TOP}");
            return Err(ApiError::param("top_logprobs", message));
        }
        if top > 0 && !wanted {
            return Err(ApiError::param("top_logprobs", "top_logprobs is given, expected logprobs to be true then"));
        }
        Ok(Logprobs { is_requested: wanted, n_top: top, of_prompt: false })
    }

    fn variables(&self) -> Result<Vec<(String, Json)>, ApiError> {
        match &self.chat_template_kwargs {
            None | Some(Json::Null) => Ok(Vec::new()),
            Some(Json::Object(variables)) => Ok(variables.clone()),
            Some(_) => Err(ApiError::param("chat_template_kwargs", "chat_template_kwargs is not an object")),
        }
    }
}

impl ChatLogprobs {
    fn of(tokenizer: &Tokenizer, picks: &[Pick]) -> ChatLogprobs {
        let bytes = |token| tokenizer.piece(token).unwrap_or_default().to_vec();
        let name = |token| escaped(tokenizer, token).map_or_else(|bytes| bytes, str::to_string);
        let alternative = |(token, logprob): &(u32, f32)| Alternative {
            token: name(*token),
            logprob: *logprob,
            bytes: bytes(*token),
        };
        let of = |pick: &Pick| TokenLogprob {
            token: name(pick.token),
            logprob: pick.logprob,
            bytes: bytes(pick.token),
            top_logprobs: pick.top.iter().map(alternative).collect(),
        };
        ChatLogprobs { content: picks.iter().map(of).collect() }
    }
}

/// Remembers what a conversation of a session has in the cache, so that it is freed when the session ends.
struct Note {
    app: Arc<App>,
    /// The session and the tokens of the prompt.
    conversation: Option<(Visit, Vec<u32>)>,
}

impl Note {
    /// Of a request with a session: its name, cache salt and prompt.
    fn new(app: &Arc<App>, caller: &Caller, conversation: Option<(Arc<str>, u64, Vec<u32>)>) -> Note {
        let now = std::time::Instant::now();
        let conversation = conversation.and_then(|(name, salt, tokens)| {
            // where all sessions are in use, the cache's own age frees the pages
            let (visit, forget) = app.sessions.visit(&caller.tenant.name, &name, salt, now).ok()?;
            app.queue.forget(forget);
            Some((visit, tokens))
        });
        Note { app: Arc::clone(app), conversation }
    }

    fn answered(&mut self, answer: &Answer) {
        let Some((visit, mut tokens)) = self.conversation.take() else { return };
        tokens.extend(answer.tokens.iter().map(|pick| pick.token));
        self.app.queue.forget(visit.note(tokens));
    }
}

/// Writes the answers to a conversation as pieces.
struct ChatWriter {
    app: Arc<App>,
    response: Answers<ChatDelta>,
    n_prompt: usize,
    answers: Vec<Answer>,
    /// Text and log-probabilities of a token, held until it is known not to be the one that ends the answer.
    pending: Vec<Option<(String, Pick)>>,
    /// Of each choice, if there are tools.
    parsers: Vec<Option<ToolCallParser>>,
    logprobs: bool,
    usage: bool,
    note: Note,
}

impl ChatWriter {
    fn send(&mut self, choices: Vec<ChatDelta>, usage: Option<Usage>, events: &mut Events) {
        self.response.choices = choices;
        self.response.usage = self.usage.then_some(usage);
        events.json(&self.response);
    }

    /// Sends new text and the calls in it, with the tokens' log-probabilities if they are wanted.
    fn piece(&mut self, index: usize, text: String, picks: &[Pick], events: &mut Events) {
        let (content, tool_calls) = match &mut self.parsers[index] {
            Some(parser) => parser.push(&text),
            None => (text, Vec::new()),
        };
        self.delta(index, content, tool_calls, picks, events);
    }

    fn delta(&mut self, index: usize, text: String, tool_calls: Vec<ToolCall>, picks: &[Pick], events: &mut Events) {
        if text.is_empty() && tool_calls.is_empty() && picks.is_empty() {
            return;
        }
        let logprobs = self.logprobs.then(|| ChatLogprobs::of(&self.app.model.tokenizer, picks));
        let content = (tool_calls.is_empty() || !text.is_empty()).then_some(text);
        let delta = Delta { role: None, content, tool_calls };
        self.send(vec![ChatDelta { index, delta, logprobs, ..ChatDelta::default() }], None, events);
    }

    /// Sends the token held back, if it says anything.
    fn flush(&mut self, index: usize, events: &mut Events) {
        if let Some((text, pick)) = self.pending[index].take()
            && (self.logprobs || !text.is_empty())
        {
            self.piece(index, text, &[pick], events);
        }
    }
}

impl Writer for ChatWriter {
    fn update(&mut self, index: usize, update: Update, events: &mut Events) -> bool {
        match &update {
            Update::Started => {
                let delta = Delta { role: Some("assistant"), content: Some(String::new()), tool_calls: Vec::new() };
                self.send(vec![ChatDelta { index, delta, ..ChatDelta::default() }], None, events);
            }
            Update::Token { token, text, logprob, top } => {
                self.flush(index, events);
                let pick = Pick { token: *token, logprob: *logprob, top: top.clone() };
                // only log-probabilities need to know whether a token is the last
                if self.logprobs {
                    self.pending[index] = Some((text.clone(), pick));
                } else if !text.is_empty() {
                    self.piece(index, text.clone(), &[], events);
                }
            }
            Update::Done { text, reason, .. } => {
                if matches!(reason, starling::engine::FinishReason::StopToken(_)) {
                    self.pending[index] = None;
                }
                self.flush(index, events);
                if !text.is_empty() {
                    self.piece(index, text.clone(), &[], events);
                }
            }
            _ => {}
        }
        let is_done = matches!(update, Update::Done { .. });
        self.answers[index].take(update);
        if !is_done {
            return false;
        }
        let truncated = is_truncated(self.answers[index].finish);
        if let Some((text, calls)) = self.parsers[index].as_mut().map(|parser| parser.finish(truncated)) {
            self.delta(index, text, calls, &[], events);
        }
        let calls = self.parsers[index].as_ref().map_or(0, ToolCallParser::n_calls);
        let finish_reason = Some(finish_reason(self.answers[index].finish_name(), calls));
        let receipt = self.answers[index].receipt.take();
        self.send(vec![ChatDelta { index, finish_reason, receipt, ..ChatDelta::default() }], None, events);
        if self.answers.iter().any(|a| a.finish.is_none()) {
            return false;
        }
        if self.usage {
            let usage = Usage::new(self.n_prompt, self.answers.len(), &self.answers);
            self.send(Vec::new(), Some(usage), events);
        }
        events.done();
        self.note.answered(&self.answers[0]);
        true
    }
}

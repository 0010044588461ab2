//! `POST /v1/generate`: a prompt or a conversation, with or without a session. A session remembers what was said, so
//! that a later request brings only what is new.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use serde::{Deserialize, Serialize};
use starling::chat::Json;
use starling::receipt::Receipt;
use starling::tokenizer::EncodeOptions;
use utoipa::ToSchema;

use super::super::queue::{Forget, Update};
use super::super::sessions::{Conversation, History, Turn};
use super::super::state::{App, Caller, fresh_name};
use super::answer::{Answer, Usage, collect};
use super::body::Body;
use super::error::{ApiError, ErrorBody, HttpError, INVALID_REQUEST, json, request_id};
use super::messages::{Opening, beside, checked, render};
use super::options::{check_model, flow, limits, salt, sampling, seed, session};
use super::shared::{Name, shared};
use super::sse::{Events, ServerSentEvent, Writer, stream};
use super::structure::compile_constraint;
use super::submit::submit;
use starling_api::openai::options::{Logprobs, Options, RequestPlan};
use starling_api::parse::{ParseBody, parse};
use starling_api::parse_whole;
use starling_api::structure::OutputConstraint;

/// A prompt or messages to be continued.
#[derive(Debug, Deserialize, ToSchema)]
pub struct GenerateRequest {
    /// Options of the answer; `session_id` opens or continues a session.
    #[serde(flatten)]
    pub options: Options,
    /// What it has to be.
    #[serde(flatten)]
    pub constraint: OutputConstraint,
    /// The prompt itself.
    #[serde(flatten)]
    pub generate: Generate,
}

/// A prompt or messages.
#[derive(Debug, Deserialize, ToSchema)]
pub struct Generate {
    /// A text. In a session it goes on where the last answer ended.
    pub prompt: Option<String>,
    /// Messages. In a session they follow those before.
    #[schema(value_type = Option<Vec<Object>>)]
    pub messages: Option<Vec<Json>>,
    /// Whether to open a session of a new name, which the answer tells.
    pub open_session: Option<bool>,
    /// Whether names of control tokens in `prompt`, such as `<|fim_prefix|>`, stand for those tokens; true by default.
    /// Text of messages never does.
    pub parse_special: Option<bool>,
}

impl ParseBody for GenerateRequest {
    fn parse_body(json: &[u8]) -> Result<Self, ApiError> {
        Ok(GenerateRequest { options: parse(json)?, constraint: parse(json)?, generate: parse(json)? })
    }
}

/// An answer.
#[derive(Debug, Serialize, ToSchema)]
pub struct GenerateResponse {
    /// Its name.
    #[schema(value_type = String)]
    pub id: Name,
    /// The text.
    pub text: String,
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// `stop` or `length`.
    pub finish_reason: &'static str,
    /// Numbers of tokens.
    pub usage: Usage,
    /// The seed in effect.
    pub seed: u64,
    /// Which model, engine and numbers answered.
    #[schema(value_type = String)]
    pub system_fingerprint: Name,
    /// The session, if there is one.
    #[schema(value_type = Option<String>)]
    pub session_id: Option<Name>,
    /// If asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub receipt: Option<Box<Receipt>>,
}

/// A token of an answer, as an event `token`; an event `end` with a [`GenerateResponse`] follows the last.
#[derive(Debug, Serialize, ToSchema)]
pub struct GenerateToken {
    /// Text that is certain now.
    pub text: String,
    /// The token.
    pub token: u32,
    /// Which of the answer.
    pub index: usize,
}

/// A session to be closed.
#[derive(Debug, Deserialize, ToSchema)]
pub struct CloseRequest {
    /// Its name.
    pub session_id: String,
}

parse_whole!(CloseRequest);

/// That a session was closed.
#[derive(Debug, Serialize, ToSchema)]
pub struct CloseResponse {
    /// Its name.
    pub session_id: String,
    /// Always true.
    pub closed: bool,
}

/// Continues a prompt or a conversation.
///
/// # Errors
/// What is wrong with the request, or with the server now.
#[utoipa::path(post, path = "/v1/generate", tag = "Starling", request_body = GenerateRequest, responses(
    (status = 200, description = "The answer; with `stream` as server-sent events `token`, and `end` with the whole", content(
        (GenerateResponse = "application/json"), (ServerSentEvent = "text/event-stream"),
    )),
    (status = "4XX", description = "The request is wrong, or too many wait", body = ErrorBody),
    (status = "5XX", description = "The server cannot answer now", body = ErrorBody),
))]
pub async fn generate(
    State(app): State<Arc<App>>,
    caller: Caller,
    Body(body): Body<GenerateRequest>,
) -> Result<Response, HttpError> {
    let GenerateRequest { mut options, constraint, generate } = body;
    check_model(&app, options.model.as_deref())?;
    if options.n.is_some_and(|n| n != 1) {
        return Err(ApiError::param("n", "n is more than 1, expected one answer; /v1/completions gives several").into());
    }
    if generate.open_session == Some(true) && options.session_id.is_none() {
        options.session_id = Some(fresh_name("session-"));
    }
    let name = session(&options, &caller)?.map(shared);
    let salt = salt(&options, &app, &caller)?;
    let turn = name.as_ref().map(|name| app.sessions.begin(&caller.tenant.name, &name.0, salt, Instant::now()));
    let turn = match turn.transpose()? {
        Some((turn, out)) => {
            app.queue.forget(out);
            Some(turn)
        }
        None => None,
    };
    let constraint = compile_constraint(&app, constraint).await?;
    let (tokens, history) = prompt(&app, generate, turn.as_ref()).await?;
    let (n_prompt, seed, flow) = (tokens.len(), seed(&options, &app), flow(&options, &caller)?);
    let sampling = sampling(&options, &app, Logprobs::default(), seed).await?;
    let plan = RequestPlan { sampling, constraint, prompt_logprobs: false, default_tokens: None, cache_salt: salt };
    let request = options.request(&limits(&app), &plan, tokens, "prompt")?;
    let tokens = if turn.is_some() { request.tokens.clone() } else { Vec::new() };
    let updates = submit(&app, &caller, &flow, vec![request], 1)?;
    let ending = Ending {
        app: Arc::clone(&app),
        turn: turn.map(|turn| (turn, tokens, history)),
        response: GenerateResponse {
            id: shared(&fresh_name("gen-")),
            text: String::new(),
            tokens: Vec::new(),
            finish_reason: "length",
            usage: Usage::default(),
            seed,
            system_fingerprint: shared(&app.fingerprint),
            session_id: name,
            receipt: None,
        },
        n_prompt,
    };
    if options.is_stream() {
        let writer = GenerateWriter { answer: Answer::default(), ending: Some(ending) };
        return Ok(stream(updates, writer, app.settings.sse_keep_alive));
    }
    let answer = collect(updates, 1).await?.remove(0);
    Ok(json(StatusCode::OK, &ending.end(answer)))
}

/// Fields of a message that a session keeps and gives to the template: those that chat APIs define.
const MESSAGE_FIELDS: [&str; 9] = [
    "role",
    "content",
    "name",
    "tool_calls",
    "tool_call_id",
    "function_call",
    "reasoning_content",
    "reasoning",
    "thinking",
];

/// The messages of a session before this turn, and those of the turn.
fn conversation(before: &History, messages: Vec<Json>) -> Vec<Json> {
    let mut all = if let History::Messages(messages) = before { messages.to_vec() } else { Vec::new() };
    all.extend(messages.into_iter().map(|message| match message {
        Json::Object(mut fields) => {
            fields.retain(|(name, _)| MESSAGE_FIELDS.contains(&name.as_str()));
            Json::Object(fields)
        }
        other => other,
    }));
    all
}

/// The tokens to continue, and the conversation so far if it is one of messages.
async fn prompt(
    app: &Arc<App>,
    generate: Generate,
    turn: Option<&Turn>,
) -> Result<(Vec<u32>, Option<Vec<Json>>), ApiError> {
    let before = turn.map(|turn| turn.conversation.clone()).unwrap_or_default();
    let mixed = |now: &str, before: &str| {
        let message = format!("{now} is given, but this session was begun with {before}");
        Err(ApiError::param(now, message))
    };
    let reserve = |tokens: &Arc<Vec<u32>>, history: History| -> Result<(), ApiError> {
        let Some(turn) = turn else { return Ok(()) };
        app.queue.forget(turn.reserve(&Conversation { tokens: Arc::clone(tokens), history })?);
        Ok(())
    };
    match (generate.prompt, generate.messages, before.history) {
        (Some(_), Some(_), _) | (None, None, _) => Err(ApiError::param("prompt", "expected either prompt or messages")),
        (Some(_), None, History::Messages(_)) => mixed("prompt", "messages"),
        (None, Some(_), History::Text) => mixed("messages", "a prompt"),
        (Some(text), None, history) => {
            // without a history, the tokens are of requests that brought everything themselves
            let mut tokens = if history == History::None { Vec::new() } else { Arc::unwrap_or_clone(before.tokens) };
            let options =
                EncodeOptions { add_special: tokens.is_empty(), parse_special: generate.parse_special != Some(false) };
            let model = Arc::clone(&app.model);
            let new = beside(text.len(), move || Ok(model.tokenizer.encode(&text, options))).await?;
            tokens.extend(new);
            let tokens = Arc::new(tokens);
            reserve(&tokens, History::Text)?;
            Ok((Arc::unwrap_or_clone(tokens), None))
        }
        (None, Some(messages), history) => {
            if turn.is_none() {
                return Ok((render(app, messages, None, Vec::new(), Opening::Answer).await?, None));
            }
            let all = move || Ok(Arc::new(conversation(&history, checked(messages)?)));
            let all = beside(usize::MAX, all).await?;
            reserve(&before.tokens, History::Messages(Arc::clone(&all)))?;
            let all = Arc::unwrap_or_clone(all);
            let tokens = render(app, all.clone(), None, Vec::new(), Opening::Answer).await?;
            Ok((tokens, Some(all)))
        }
    }
}

/// What is left to do when the answer is complete.
struct Ending {
    app: Arc<App>,
    /// The session, the tokens of the prompt, and the messages if it is a conversation.
    turn: Option<(Turn, Vec<u32>, Option<Vec<Json>>)>,
    response: GenerateResponse,
    n_prompt: usize,
}

impl Ending {
    fn end(self, answer: Answer) -> GenerateResponse {
        let usage = Usage::new(self.n_prompt, 1, [&answer]);
        let finish_reason = answer.finish_name();
        let tokens: Vec<u32> = answer.tokens.iter().map(|pick| pick.token).collect();
        if let Some((turn, mut all, messages)) = self.turn {
            all.extend(&tokens);
            let history = match messages {
                Some(mut messages) => {
                    messages.push(Json::message("assistant", &answer.text));
                    History::Messages(Arc::new(messages))
                }
                None => History::Text,
            };
            self.app.queue.forget(turn.end(Conversation { tokens: Arc::new(all), history }));
        }
        let (text, receipt) = (answer.text, answer.receipt);
        GenerateResponse { text, tokens, finish_reason, usage, receipt, ..self.response }
    }
}

struct GenerateWriter {
    answer: Answer,
    ending: Option<Ending>,
}

impl Writer for GenerateWriter {
    fn update(&mut self, _: usize, update: Update, events: &mut Events) -> bool {
        if let Update::Token { text, token, .. } = &update {
            let index = self.answer.tokens.len();
            events.named("token", &GenerateToken { text: text.clone(), token: *token, index });
        }
        let is_done = matches!(update, Update::Done { .. });
        self.answer.take(update);
        if let (true, Some(ending)) = (is_done, self.ending.take_if(|_| is_done)) {
            events.named("end", &ending.end(std::mem::take(&mut self.answer)));
        }
        is_done
    }

    fn failed(&mut self, error: &ApiError, events: &mut Events) {
        events.named("error", &error.body(request_id()));
    }
}

/// Closes a session: what only it has in the cache is freed.
///
/// # Errors
/// If there is none of that name.
#[utoipa::path(post, path = "/v1/session/close", tag = "Starling", request_body = CloseRequest, responses(
    (status = 200, description = "It is closed", body = CloseResponse),
    (status = "4XX", description = "No such session", body = ErrorBody),
))]
pub async fn close_session(
    State(app): State<Arc<App>>,
    caller: Caller,
    Body(body): Body<CloseRequest>,
) -> Result<Response, HttpError> {
    let Some(left) = app.sessions.close(&caller.tenant.name, &shared(&body.session_id).0) else {
        let error = ApiError::new(StatusCode::NOT_FOUND.as_u16(), INVALID_REQUEST, "there is no such session");
        return Err(ApiError { param: Some("session_id".into()), ..error }.code("session_not_found").into());
    };
    let left: Option<Forget> = left;
    app.queue.forget(left);
    Ok(json(StatusCode::OK, &CloseResponse { session_id: body.session_id, closed: true }))
}

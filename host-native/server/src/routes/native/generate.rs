//! `POST /v1/generate`: a prompt or a conversation, with or without a session. A session remembers what was said, so
//! that a later request brings only what is new.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use starling::chat::Json;
use starling::tokenizer::EncodeOptions;
use starling_api::answer::Answer;
use starling_api::messages::{check_messages, continue_conversation};
use starling_api::native::generate::{
    CloseRequest, CloseResponse, GenerateFields, GenerateRequest, GenerateResponse, GenerateWriter,
};
use starling_api::openai::options::RequestPlan;
use starling_api::stream::ServerSentEvent;
use starling_host::clock::random_id;

use crate::guard::policy::{apply_to_messages, apply_to_seam, apply_to_text};
use crate::http::body::Body;
use crate::http::error::{ApiError, ErrorBody, HttpError, INVALID_REQUEST, json};
use crate::models::instance::ModelInstance;
use crate::routes::common::answer::{collect, response_head};
use crate::routes::common::messages::{ChatPrompt, offload_tokenize, tokenize_chat};
use crate::routes::common::options::{flow, is_seeded, limits, salt, sampling, seed, session, slot, sticky};
use crate::routes::common::sse::stream_with_writes;
use crate::routes::common::structure::{Compilation, Compiled};
use crate::routes::common::submit::{Submission, submit};
use crate::routes::common::writes::{Writes, state_error};
use crate::schedule::offload::offload;
use crate::server::{Caller, Server};
use crate::state::sessions::{Conversation, History, Turn};
use crate::state::store::{SessionJournal, StateError};

/// Continue a prompt or messages, with or without a session.
///
/// # Errors
/// A wrong request, or a server that cannot answer now.
#[utoipa::path(post, path = "/v1/generate", tag = "Starling", request_body = GenerateRequest, responses(
    (status = 200, description = "Generated text; with `stream` server-sent events `token`, then `end` with the response", content(
        (GenerateResponse = "application/json"), (ServerSentEvent = "text/event-stream"),
    )),
    (status = "4XX", description = "The request is wrong, or too many requests are queued", body = ErrorBody),
    (status = "5XX", description = "The server cannot answer now", body = ErrorBody),
))]
pub async fn generate(
    State(server): State<Arc<Server>>,
    caller: Caller,
    Body(body): Body<GenerateRequest>,
) -> Result<Response, HttpError> {
    let GenerateRequest { mut options, constraint, mut generate } = body;
    caller.limit_time(options.timeout)?;
    let logprobs = generate.logprobs()?;
    let instance = server.model(options.model.as_deref(), sticky(&options), &caller).await?;
    if options.n.is_some_and(|n| n != 1) {
        return Err(ApiError::param("n", "n is more than 1, expected one answer; /v1/completions gives several").into());
    }
    if generate.open_session == Some(true) && options.session_id.is_none() {
        options.session_id = Some(random_id("session-"));
    }
    let id = session(&options, &caller)?.map(str::to_string);
    let partial = options.timeout_partial == Some(true);
    let salt = salt(&options, &instance, &caller)?;
    let turn = id
        .as_deref()
        .map(|id| instance.sessions.begin(&caller.identity.tenant.name, &Arc::from(id), salt, Instant::now()));
    let turn = match turn.transpose()? {
        Some((turn, out)) => {
            instance.queue.evict_prefixes(out);
            Some(turn)
        }
        None => None,
    };
    let (constraint, form) = Compiled::unzip(
        Compilation { server: &server, caller: &caller, instance: &instance }.constraint(constraint).await?,
    );
    if let Some(text) = &mut generate.prompt {
        apply_to_text(&caller.prompt_check(&instance), text).await?;
    }
    if let Some(messages) = &mut generate.messages {
        apply_to_messages(&caller.prompt_check(&instance), messages).await?;
    }
    let (tokens, history) = prompt(&caller, &instance, generate, turn.as_ref()).await?;
    let (n_prompt, seed, flow) = (tokens.len(), seed(&options, &instance), flow(&options, &caller)?);
    let is_seeded = is_seeded(&options, &instance);
    let sampling = sampling(&options, &instance, logprobs, seed).await?;
    let plan = RequestPlan { sampling, constraint, prompt_logprobs: false, default_tokens: None, cache_salt: salt };
    let request = options.request(&limits(&instance), &plan, tokens, "prompt")?;
    let tokens = if turn.is_some() { request.tokens.clone() } else { Vec::new() };
    let submission = Submission { requests: vec![request], n: 1, partial, is_seeded, form, slot: slot(&options) };
    let updates = submit(&server, &instance, &caller, &flow, submission).await?;
    let head = response_head(&instance, "gen-", seed, id.as_deref());
    let turn: Option<SessionTurn> = turn.map(|turn| (turn, tokens, history));
    let (inner, writes) = (Arc::clone(&instance), Writes::default());
    let inner_writes = writes.clone();
    let end = move |answer: Answer| {
        if let Some(turn) = turn {
            end_turn(&inner, turn, &answer, &inner_writes);
        }
        let tokenizer = logprobs.is_requested.then(|| &*inner.model.tokenizer);
        GenerateResponse::new(head, n_prompt, answer, tokenizer)
    };
    if options.is_stream() {
        let keep_alive = instance.settings().sse_keep_alive;
        return Ok(stream_with_writes(updates, GenerateWriter::new(logprobs.is_requested, end), keep_alive, writes));
    }
    let response = end(collect(updates, 1).await?.remove(0));
    writes.durable().await?;
    Ok(json(StatusCode::OK, &response))
}

/// A turn of a session, the tokens of its prompt, and the messages so far if it is a chat.
type SessionTurn = (Turn, Vec<u32>, Option<Vec<Json>>);

/// The tokens to continue, and the conversation so far if it is one of messages.
async fn prompt(
    caller: &Caller,
    instance: &Arc<ModelInstance>,
    generate: GenerateFields,
    turn: Option<&Turn>,
) -> Result<(Vec<u32>, Option<Vec<Json>>), ApiError> {
    let before = turn.map(|turn| turn.conversation.clone()).unwrap_or_default();
    let mixed = |now: &str, before: &str| {
        let message = format!("{now} is given, but this session was begun with {before}");
        Err(ApiError::param(now, message))
    };
    let reserve = |tokens: &Arc<Vec<u32>>, history: History| -> Result<(), ApiError> {
        let Some(turn) = turn else { return Ok(()) };
        instance.queue.evict_prefixes(turn.reserve(&Conversation { tokens: Arc::clone(tokens), history })?);
        Ok(())
    };
    match (generate.prompt, generate.messages, before.history) {
        (Some(_), Some(_), _) | (None, None, _) => Err(ApiError::param("prompt", "expected either prompt or messages")),
        (Some(_), None, History::Messages(_)) => mixed("prompt", "messages"),
        (None, Some(_), History::Text | History::Decoded(_)) => mixed("messages", "a prompt"),
        (Some(text), None, history) => {
            let (model, parse_special) = (Arc::clone(&instance.model), generate.parse_special != Some(false));
            let encode = move |text: &str, add_special, parse_special| {
                model.tokenizer.encode(text, EncodeOptions { add_special, parse_special })
            };
            let before = match history {
                History::Decoded(text) => {
                    let encode = encode.clone();
                    offload_tokenize(text.len(), move || Ok(encode(&text, true, false))).await?
                }
                History::Text => Arc::unwrap_or_clone(before.tokens),
                // without a history, the tokens are of requests that brought everything themselves
                _ => Vec::new(),
            };
            let is_first = before.is_empty();
            apply_to_seam(&caller.prompt_check(instance), instance, &before, &text).await?;
            let new = offload_tokenize(text.len(), move || Ok(encode(&text, is_first, parse_special))).await?;
            let tokens = [before, new].concat();
            let tokens = Arc::new(tokens);
            reserve(&tokens, History::Text)?;
            Ok((Arc::unwrap_or_clone(tokens), None))
        }
        (None, Some(messages), history) => {
            if turn.is_none() {
                return Ok((tokenize_chat(caller, instance, ChatPrompt::of_messages(messages)).await?, None));
            }
            let all = move || {
                let before: &[Json] = if let History::Messages(before) = &history { before } else { &[] };
                Ok(Arc::new(continue_conversation(before, check_messages(messages)?)))
            };
            let all = offload_tokenize(usize::MAX, all).await?;
            reserve(&before.tokens, History::Messages(Arc::clone(&all)))?;
            let all = Arc::unwrap_or_clone(all);
            let tokens = tokenize_chat(caller, instance, ChatPrompt::of_messages(all.clone())).await?;
            Ok((tokens, Some(all)))
        }
    }
}

/// Ends the session's turn with a complete answer: the prompt, its messages if it is a chat, and the answer. A session that is
/// stored ends it when its row is durable, and without a row keeps the turns before.
fn end_turn(instance: &Arc<ModelInstance>, turn: SessionTurn, answer: &Answer, writes: &Writes) {
    let (turn, mut tokens, messages) = turn;
    tokens.extend(answer.tokens.iter().map(|sampled| sampled.token));
    let history = match messages {
        Some(mut messages) => {
            messages.push(Json::message("assistant", &answer.text));
            History::Messages(Arc::new(messages))
        }
        None => History::Text,
    };
    let conversation = Conversation { tokens: Arc::new(tokens), history };
    match &instance.journal {
        None => keep_turn(instance, turn, conversation),
        Some(journal) => {
            let (instance, journal) = (Arc::clone(instance), Arc::clone(journal));
            writes.add(async move {
                let conversation = write_turn(&instance, &journal, &turn, conversation).await?;
                keep_turn(&instance, turn, conversation);
                Ok(())
            });
        }
    }
}

/// Makes a turn durable, unless its session was closed.
async fn write_turn(
    instance: &Arc<ModelInstance>,
    journal: &SessionJournal,
    turn: &Turn,
    conversation: Conversation,
) -> Result<Conversation, StateError> {
    let (inner, salt) = (Arc::clone(instance), turn.guard().salt());
    let encode = move || (inner.session_row(salt, &conversation), conversation);
    let (row, conversation) = offload(usize::MAX, encode).await.map_err(|_| StateError::Ended)?;
    let written = turn.write(|| journal.put(turn.guard().tenant(), turn.guard().name(), row));
    if let Some(written) = written {
        written.durable().await?;
    }
    Ok(conversation)
}

fn keep_turn(instance: &ModelInstance, turn: Turn, mut conversation: Conversation) {
    if turn.is_detached() {
        conversation = conversation.detach(|tokens| instance.text(tokens));
    }
    instance.queue.evict_prefixes(turn.end(conversation));
}

/// Close a session and free its part of the prefix cache.
///
/// # Errors
/// No session has this ID.
#[utoipa::path(post, path = "/v1/session/close", tag = "Starling", request_body = CloseRequest, responses(
    (status = 200, description = "The session is closed", body = CloseResponse),
    (status = "4XX", description = "No such session", body = ErrorBody),
))]
pub async fn close_session(
    State(server): State<Arc<Server>>,
    caller: Caller,
    Body(body): Body<CloseRequest>,
) -> Result<Response, HttpError> {
    let (tenant, id) = (&caller.identity.tenant.name, Arc::from(body.session_id.as_str()));
    let mut is_closed = false;
    // a session belongs to the model that it was opened with
    for entry in server.pool.entries() {
        let left = entry.sessions.close(tenant, &id);
        is_closed |= left.is_some();
        if let Some((left, instance)) = left.zip(entry.instance()) {
            instance.queue.evict_prefixes(left);
        }
        // of a model that was not loaded yet, too
        if let Some(journal) = entry.journal.as_ref().filter(|journal| journal.has(tenant, &id)) {
            is_closed = true;
            journal.delete(tenant, &id).durable().await.map_err(|e| state_error(&e))?;
        }
    }
    if !is_closed {
        let error = ApiError::new(StatusCode::NOT_FOUND.as_u16(), INVALID_REQUEST, "there is no such session");
        return Err(ApiError { param: Some("session_id".into()), ..error }.code("session_not_found").into());
    }
    Ok(json(StatusCode::OK, &CloseResponse { session_id: body.session_id, closed: true }))
}

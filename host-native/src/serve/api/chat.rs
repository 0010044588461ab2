//! `POST /v1/chat/completions`.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use starling::tokenizer::EncodeOptions;
use starling_api::answer::Answer;
use starling_api::messages::chat_end;
use starling_api::openai::chat::{ChatChoice, ChatCompletionRequest, ChatPlan, ChatWriter, Prediction};
use starling_api::openai::options::{RequestPlan, Scope};
use starling_api::openai::response::{CompletionResponse, ResponseHead};
use starling_api::stream::{EventSink, ServerSentEvent, StreamWriter};
use starling_api::structure::constraint_plan;
use starling_api::tools::{CallIds, parse_tool_choice};

use super::super::models::instance::ModelInstance;
use super::super::offload::offload;
use super::super::policy::apply_to_messages;
use super::super::queue::Update;
use super::super::sessions::{Conversation, History, SessionGuard};
use super::super::state::{Caller, Server, random};
use super::super::state_store::SessionJournal;
use super::answer::{collect, response_head};
use super::body::Body;
use super::error::{ApiError, ErrorBody, HttpError, json};
use super::messages::{offload_tokenize, tokenize_chat};
use super::options::{flow, is_seeded, limits, salt, sampling, seed, session, sticky};
use super::sse::stream_with_writes;
use super::stored::Recorder;
use super::structure::{Compiled, compile_plan};
use super::submit::{Submission, submit};
use super::writes::Writes;

/// Create a chat completion.
///
/// # Errors
/// A wrong request, or a server that cannot answer now.
#[utoipa::path(post, path = "/v1/chat/completions", tag = "OpenAI", request_body = ChatCompletionRequest, responses(
    (status = 200, description = "Completion; with `stream` server-sent events of `CompletionResponse_ChatDelta`", content(
        (CompletionResponse<ChatChoice> = "application/json"), (ServerSentEvent = "text/event-stream"),
    )),
    (status = "4XX", description = "The request is wrong, or too many requests are queued", body = ErrorBody),
    (status = "5XX", description = "The server cannot answer now", body = ErrorBody),
))]
pub async fn chat_completions(
    State(server): State<Arc<Server>>,
    caller: Caller,
    Body(body): Body<ChatCompletionRequest>,
) -> Result<Response, HttpError> {
    let ChatCompletionRequest { mut options, constraint, chat } = body;
    let instance = server.model(options.model.as_deref(), sticky(&options), &caller).await?;
    options.penalty_scope.get_or_insert(Scope::Answer);
    let partial = options.timeout_partial == Some(true);
    let logprobs = chat.logprobs()?;
    let (n, flow) = (options.n_choices(instance.settings().max_n)?, flow(&options, &caller)?);
    let session = session(&options, &caller)?.map(str::to_string);
    let variables = chat.template_variables()?;
    let (inner, tools, choice) = (Arc::clone(&instance), chat.tools, chat.tool_choice);
    let (size, parallel) = (if tools.is_some() { usize::MAX } else { 0 }, chat.parallel_tool_calls != Some(false));
    let check = move || parse_tool_choice(inner.template.source(), tools, choice, parallel);
    let mut tools = offload(size, check).await??;
    let form = constraint.form()?;
    let has_schema = form.is_some();
    let compiled = match constraint_plan(form, &mut tools)? {
        Some(plan) => Some(compile_plan(&instance, plan).await?),
        None => None,
    };
    let (constraint, form) = Compiled::unzip(compiled);
    let tools = tools.tools;
    let call_ids = tools.is_some().then(|| CallIds::new(u128::from(random()) << 64 | u128::from(random())));
    let end = chat_end(chat.continue_final_message, chat.add_generation_prompt)?;
    let mut messages = chat.messages;
    apply_to_messages(&caller, &instance, &mut messages).await?;
    let stored = match chat.store {
        Some(true) => Some(Recorder::new(&server, &caller, chat.metadata, messages.clone())?),
        _ => None,
    };
    let tokens = tokenize_chat(&instance, messages, tools, variables, end).await?;
    let prediction = tokenize_prediction(&instance, chat.prediction).await?;
    let (seed, is_seeded) = (seed(&options, &instance), is_seeded(&options, &instance));
    let chat_plan = ChatPlan {
        model: Arc::clone(&instance.model),
        n_prompt: tokens.len(),
        n,
        logprobs: logprobs.is_requested,
        stream_usage: options.includes_usage(),
        call_ids,
        has_schema,
    };
    let sampling = sampling(&options, &instance, logprobs, seed).await?;
    let cache_salt = salt(&options, &instance, &caller)?;
    let plan = RequestPlan { sampling, constraint, prompt_logprobs: false, default_tokens: None, cache_salt };
    let mut request = options.request(&limits(&instance), &plan, tokens, "messages")?;
    request.speculation.prediction = prediction;
    let conversation = session.as_deref().map(|id| (Arc::from(id), cache_salt, request.tokens.clone()));
    let submission = Submission { requests: vec![request], n, partial, is_seeded, form };
    let updates = submit(&instance, &caller, &flow, submission).await?;
    let mut recorder = SessionRecorder::new(&instance, &caller, conversation);
    let head = response_head(&instance, "chatcmpl-", seed, session.as_deref());
    if options.is_stream() {
        let writes = Writes::default();
        let stored = stored.map(|recorder| {
            let (plan, head, writes) = (chat_plan.clone(), head.clone(), writes.clone());
            StoredStream { recorder, plan, head, writes, answers: (0..n).map(|_| Answer::default()).collect() }
        });
        let writer = ChatStream { writer: ChatWriter::new(chat_plan, head), session: recorder, stored };
        return Ok(stream_with_writes(updates, writer, instance.settings().sse_keep_alive, writes));
    }
    let answers = collect(updates, n).await?;
    recorder.end(&answers[0]);
    if let Some(recorder) = stored {
        let writes = Writes::default();
        writes.add(recorder.write(chat_plan.clone(), head.clone(), answers.clone()));
        writes.durable().await?;
    }
    let size = answers.iter().map(Answer::n_logprobs).sum();
    Ok(offload(size, move || json(StatusCode::OK, &chat_plan.response(head, answers))).await?)
}

/// The tokens of a prediction, as many as the context holds.
async fn tokenize_prediction(
    instance: &Arc<ModelInstance>,
    prediction: Option<Prediction>,
) -> Result<Vec<u32>, ApiError> {
    let Some(text) = prediction.map(|prediction| prediction.text()) else { return Ok(Vec::new()) };
    let model = Arc::clone(&instance.model);
    let n_ctx = instance.engine.map_or(0, |options| options.n_ctx);
    offload_tokenize(text.len(), move || {
        let mut tokens = model.tokenizer.encode(&text, EncodeOptions::default());
        tokens.truncate(n_ctx);
        Ok(tokens)
    })
    .await
}

/// Stores in the session of a request which tokens the prefix cache holds for it: closing the session evicts them.
struct SessionRecorder {
    instance: Arc<ModelInstance>,
    /// The session and the tokens of the prompt; `None` without a session, and after [`SessionRecorder::end`].
    guard: Option<(SessionGuard, Vec<u32>)>,
}

impl SessionRecorder {
    /// `conversation` is the session ID, the cache salt and the prompt of a request with a session.
    fn new(
        instance: &Arc<ModelInstance>,
        caller: &Caller,
        conversation: Option<(Arc<str>, u64, Vec<u32>)>,
    ) -> SessionRecorder {
        let guard = conversation.and_then(|(id, salt, tokens)| {
            // where all sessions are in use, the pages are evicted by age
            let (guard, evicted) = instance.sessions.acquire(&caller.tenant.name, &id, salt, Instant::now()).ok()?;
            instance.queue.evict_prefixes(evicted);
            Some((guard, tokens))
        });
        SessionRecorder { instance: Arc::clone(instance), guard }
    }

    /// Stores the prompt and its answer, which is now in the cache. The response does not wait for the session's row: without
    /// it, closing the session after a restart leaves pages on disk until they are evicted.
    fn end(&mut self, answer: &Answer) {
        let Some((guard, mut tokens)) = self.guard.take() else { return };
        tokens.extend(answer.tokens.iter().map(|sampled| sampled.token));
        let (tenant, name) = (Arc::<str>::from(guard.tenant()), Arc::<str>::from(guard.name()));
        let write = self.instance.journal.as_ref().map(|journal| {
            let conversation = Conversation { tokens: Arc::new(tokens.clone()), history: History::None };
            let row = SessionJournal::encode(&self.instance, guard.salt(), &conversation);
            move || drop(journal.put(&tenant, &name, row))
        });
        self.instance.queue.evict_prefixes(guard.store_tokens(tokens, write));
    }
}

/// Writes a stream, and stores its answer in the session, and all answers if they are to be kept.
struct ChatStream {
    writer: ChatWriter,
    session: SessionRecorder,
    stored: Option<StoredStream>,
}

/// Answers of a stream that is to be kept. Its last events wait for the row.
struct StoredStream {
    recorder: Recorder,
    plan: ChatPlan,
    head: ResponseHead,
    writes: Writes,
    answers: Vec<Answer>,
}

impl StreamWriter for ChatStream {
    fn update(&mut self, index: usize, update: Update, sink: &mut dyn EventSink) -> bool {
        if let Some(answer) = self.stored.as_mut().and_then(|stored| stored.answers.get_mut(index)) {
            answer.add(update.clone());
        }
        let is_complete = self.writer.update(index, update, sink);
        if is_complete {
            self.session.end(&self.writer.answers()[0]);
            if let Some(StoredStream { recorder, plan, head, writes, answers }) = self.stored.take() {
                writes.add(recorder.write(plan, head, answers));
            }
        }
        is_complete
    }
}

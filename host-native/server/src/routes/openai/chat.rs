//! `POST /v1/chat/completions`.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::Response;
use serde::Serialize;
use sha2::{Digest, Sha256};
use starling::tokenizer::EncodeOptions;
use starling_api::answer::Answer;
use starling_api::messages::chat_end;
use starling_api::openai::chat::{ChatChoice, ChatCompletionRequest, ChatPlan, ChatWriter, Prediction};
use starling_api::openai::options::{RequestPlan, Scope};
use starling_api::openai::response::{CompletionResponse, ResponseHead};
use starling_api::output::{SyntaxNames, reasoning_constraint};
use starling_api::parts::{AnswerWriter, WireFormat};
use starling_api::stream::{EventSink, Framing, ServerSentEvent, StreamWriter};
use starling_api::structure::constraint_plan;
use starling_api::tools::{CallIds, parse_tool_choice};
use starling_host::clock::random;

use super::stored::Recorder;
use crate::guard::policy::apply_to_messages;
use crate::http::body::Body;
use crate::http::error::{ApiError, ErrorBody, HttpError, json};
use crate::models::instance::ModelInstance;
use crate::routes::common::answer::{Delivery, collect, respond, response_head};
use crate::routes::common::messages::{ChatPrompt, offload_tokenize, preview_chat, tokenize_chat};
use crate::routes::common::options::{flow, is_seeded, limits, salt, sampling, seed, session, slot, sticky};
use crate::routes::common::sse::stream_with_writes;
use crate::routes::common::structure::{Compilation, Compiled};
use crate::routes::common::submit::{Submission, Updates, submit};
use crate::routes::common::writes::Writes;
use crate::schedule::offload::offload;
use crate::schedule::queue::Update;
use crate::server::{Caller, Server};
use crate::state::sessions::{Conversation, History, SessionGuard};

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
    let chat = start_chat(&server, &caller, body, "chatcmpl-").await?;
    let StartedChat { instance, updates, plan, head, is_stream, mut recorder, writes, stored, .. } = chat;
    let n = plan.n;
    if is_stream {
        let stored = stored.map(|recorder| {
            let (plan, head, writes) = (plan.clone(), head.clone(), writes.clone());
            StoredStream { recorder, plan, head, writes, answers: (0..n).map(|_| Answer::default()).collect() }
        });
        let writer = RecordedStream { writer: ChatWriter::new(plan, head), session: recorder, stored };
        return Ok(stream_with_writes(updates, writer, instance.settings().sse_keep_alive, writes));
    }
    let answers = collect(updates, n).await?;
    recorder.end(&answers[0]);
    if let Some(recorder) = stored {
        writes.add(recorder.write(plan.clone(), head.clone(), answers.clone()));
        writes.durable().await?;
    }
    let size = answers.iter().map(Answer::n_logprobs).sum();
    Ok(offload(size, move || json(StatusCode::OK, &plan.response(head, answers))).await?)
}

/// A chat in the queue.
pub struct StartedChat {
    pub instance: Arc<ModelInstance>,
    pub updates: Updates,
    pub plan: ChatPlan,
    pub head: ResponseHead,
    pub is_stream: bool,
    /// Stop strings of the request.
    pub stops: Vec<String>,
    pub recorder: SessionRecorder,
    /// Writes that the response waits for.
    pub writes: Writes,
    /// Keeps the answers, if the request says so.
    stored: Option<Recorder>,
}

/// The path of the chat requests of all APIs: checks, prompt, constraint, queue. `prefix` begins the ID of the response.
///
/// # Errors
/// A wrong request, or a server that cannot answer now.
pub async fn start_chat(
    server: &Server,
    caller: &Caller,
    request: ChatCompletionRequest,
    prefix: &str,
) -> Result<StartedChat, ApiError> {
    let ChatCompletionRequest { mut options, constraint, chat } = request;
    caller.limit_time(options.timeout)?;
    let instance = server.model(options.model.as_deref(), sticky(&options), caller).await?;
    options.penalty_scope.get_or_insert(Scope::Answer);
    let partial = options.timeout_partial == Some(true);
    let logprobs = chat.logprobs()?;
    let (n, flow) = (options.n_choices(instance.settings().max_n)?, flow(&options, caller)?);
    let session = session(&options, caller)?.map(str::to_string);
    let variables = chat.template_variables()?;
    let settings = instance.settings();
    let names = SyntaxNames { calls: Some(&settings.tool_call_format), reasoning: Some(&settings.reasoning_format) };
    let output = chat.output(instance.forms, names)?;
    let budget = chat.thinking_budget_tokens;
    let (inner, tools, choice) = (Arc::clone(&instance), chat.tools, chat.tool_choice);
    let (size, parallel) = (if tools.is_some() { usize::MAX } else { 0 }, chat.parallel_tool_calls != Some(false));
    let check = move || parse_tool_choice(inner.template.source(), tools, choice, parallel);
    let mut tools = offload(size, check).await??;
    let grammar = constraint.source()?;
    let call_ids = CallIds::new(u128::from(random()) << 64 | u128::from(random()));
    let output = tools.output(&instance.model, output, call_ids, grammar.is_some());
    let compiled = match constraint_plan(grammar, &mut tools)? {
        Some(plan) => Some(Compilation { server, caller, instance: &instance }.plan(plan).await?),
        None => None,
    };
    let (constraint, form) = Compiled::unzip(compiled);
    let tools = tools.tools;
    let end = chat_end(chat.continue_final_message, chat.add_generation_prompt)?;
    let mut messages = chat.messages;
    apply_to_messages(&caller.prompt_check(&instance), &mut messages).await?;
    let stored = match chat.store {
        Some(true) => Some(Recorder::new(server, caller, chat.metadata, messages.clone())?),
        _ => None,
    };
    let tokens = tokenize_chat(caller, &instance, ChatPrompt { messages, tools, variables, end }).await?;
    let output = output.prompt(&instance.model.tokenizer, &tokens);
    let prediction = tokenize_prediction(&instance, chat.prediction).await?;
    let (seed, is_seeded) = (seed(&options, &instance), is_seeded(&options, &instance));
    let constraint = reasoning_constraint(&output, &instance.model, budget, constraint);
    let visible = output.visible().to_vec();
    let form = output_digest(form, budget);
    let chat_plan = ChatPlan {
        model: Arc::clone(&instance.model),
        n_prompt: tokens.len(),
        n,
        logprobs: logprobs.is_requested,
        stream_usage: options.includes_usage(),
        output,
    };
    let sampling = sampling(&options, &instance, logprobs, seed).await?;
    let cache_salt = salt(&options, &instance, caller)?;
    let plan = RequestPlan { sampling, constraint, prompt_logprobs: false, default_tokens: None, cache_salt };
    let mut request = options.request(&limits(&instance), &plan, tokens, "messages")?;
    request.speculation.prediction = prediction;
    request.visible = visible;
    let conversation = session.as_deref().map(|id| (Arc::from(id), cache_salt, request.tokens.clone()));
    let submission = Submission { requests: vec![request], n, partial, is_seeded, form, slot: slot(&options) };
    let updates = submit(server, &instance, caller, &flow, submission).await?;
    let recorder = SessionRecorder::new(&instance, caller, conversation);
    let head = response_head(&instance, prefix, seed, session.as_deref());
    let stops = options.stops();
    let is_stream = options.is_stream();
    let writes = Writes::default();
    Ok(StartedChat { instance, updates, plan: chat_plan, head, is_stream, stops, recorder, writes, stored })
}

/// Digest of the constraint of an answer: its grammar, and the budget of reasoning tokens.
fn output_digest(form: Option<[u8; 32]>, budget: Option<usize>) -> Option<[u8; 32]> {
    match budget {
        None => form,
        Some(budget) => Some(Sha256::digest(format!("{form:?} {budget}")).into()),
    }
}

/// The number of prompt tokens of a chat request. Nothing is computed.
///
/// # Errors
/// A wrong request, or an error of the template.
pub async fn count_chat(server: &Server, caller: &Caller, request: ChatCompletionRequest) -> Result<usize, ApiError> {
    let ChatCompletionRequest { options, chat, .. } = request;
    let instance = server.model(options.model.as_deref(), sticky(&options), caller).await?;
    let rendered = preview_chat(caller, &instance, chat).await?;
    let size = rendered.text.len();
    offload_tokenize(size, move || Ok(rendered.encode(&instance.model.tokenizer).len())).await
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
pub struct SessionRecorder {
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
            let (guard, evicted) =
                instance.sessions.acquire(&caller.identity.tenant.name, &id, salt, Instant::now()).ok()?;
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
            let row = self.instance.session_row(guard.salt(), &conversation);
            move || drop(journal.put(&tenant, &name, row))
        });
        self.instance.queue.evict_prefixes(guard.store_tokens(tokens, write));
    }
}

/// Answers of a stream that is to be kept. Its last events wait for the row.
struct StoredStream {
    recorder: Recorder,
    plan: ChatPlan,
    head: ResponseHead,
    writes: Writes,
    answers: Vec<Answer>,
}

/// Writes a stream, and stores its answer in the session, and all answers if they are to be kept.
pub struct RecordedStream<W> {
    writer: W,
    session: SessionRecorder,
    stored: Option<StoredStream>,
}

impl<W: RecordedAnswer> StreamWriter for RecordedStream<W> {
    fn update(&mut self, index: usize, update: Update, sink: &mut dyn EventSink) -> bool {
        if let Some(answer) = self.stored.as_mut().and_then(|stored| stored.answers.get_mut(index)) {
            answer.add(update.clone());
        }
        let is_complete = self.writer.update(index, update, sink);
        if is_complete {
            self.session.end(self.writer.first_answer());
            if let Some(StoredStream { recorder, plan, head, writes, answers }) = self.stored.take() {
                writes.add(recorder.write(plan, head, answers));
            }
        }
        is_complete
    }

    fn keep_alive(&mut self, sink: &mut dyn EventSink) -> bool {
        self.writer.keep_alive(sink)
    }

    fn fail(&mut self, error: &ErrorBody, sink: &mut dyn EventSink) {
        self.writer.fail(error, sink);
    }
}

/// A writer that has the answer that a session keeps.
pub trait RecordedAnswer: StreamWriter {
    fn first_answer(&self) -> &Answer;
}

impl RecordedAnswer for ChatWriter {
    fn first_answer(&self) -> &Answer {
        &self.answers()[0]
    }
}

impl<F: WireFormat> RecordedAnswer for AnswerWriter<F> {
    fn first_answer(&self) -> &Answer {
        self.answer()
    }
}

impl StartedChat {
    /// The response in the form of an API: `build` makes the whole from the form. A stream has `framing`.
    ///
    /// # Errors
    /// An answer that fails, if the response is not a stream.
    pub async fn respond<F, T>(
        self,
        form: F,
        framing: Framing,
        build: impl FnOnce(F) -> T + Send + 'static,
    ) -> Result<Response, ApiError>
    where
        F: WireFormat + Send + Unpin + 'static,
        T: Serialize,
    {
        let StartedChat { instance, updates, plan, is_stream, recorder, writes, .. } = self;
        let writer =
            RecordedStream { writer: AnswerWriter::new(plan.output.parser(0), form), session: recorder, stored: None };
        let size = if plan.logprobs { usize::MAX } else { 0 };
        let delivery = Delivery { framing: is_stream.then_some(framing), size, writes };
        let build = move |done: RecordedStream<AnswerWriter<F>>| build(done.writer.into_format());
        respond(&instance, updates, writer, delivery, build).await
    }
}

//! Chat completions, and the same in the forms of OpenAI's Responses and Anthropic's Messages, with the functions of
//! `starling-api` that the server uses.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::mem;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use starling::chat::{ChatError, ChatTemplate, Now};
use starling::engine::{Event, FinishReason, Request, RequestId};
use starling::sampler::{ALL_TOKENS, Constraint};
use starling_api::answer::Answer;
use starling_api::anthropic::request::MessagesRequest;
use starling_api::anthropic::response::MessageFormat;
use starling_api::error::ApiError;
use starling_api::messages::{chat_end, chat_request, check_messages};
use starling_api::openai::chat::{ChatCompletionRequest, ChatPlan, ChatWriter};
use starling_api::openai::options::{Limits, Options, RequestPlan, Scope};
use starling_api::openai::response::{ResponseHead, system_fingerprint};
use starling_api::output::{ModelSyntax, OutputPlan, SyntaxNames, detect_syntaxes, reasoning_constraint};
use starling_api::parse::ParseBody;
use starling_api::parts::{AnswerWriter, WireFormat};
use starling_api::responses::request::ResponsesRequest;
use starling_api::responses::response::ResponsesFormat;
use starling_api::stream::{EventSink, NoEvents, StreamWriter};
use starling_api::structure::{ConstraintPlan, constraint_plan};
use starling_api::tools::{CallIds, parse_tool_choice};
use starling_api::update::Update;

use crate::reply::json;
use crate::session::{Error, Session};

/// Choices of a completion, at most: the highest limit that the server can have.
const MAX_N: usize = 128;
/// Open completions, at most: each keeps its prompt and its answers.
const MAX_OPEN: usize = 1024;

/// The `code` in JavaScript of an error.
pub(crate) fn kind(error: &ApiError) -> &'static str {
    match (error.status, error.code, error.param.as_deref()) {
        (_, Some("chat_template"), _) => "template",
        (_, Some("unsupported_parameter"), Some("tools")) => "unsupported",
        (_, Some("not_finite"), _) => "model",
        _ => "request",
    }
}

impl From<ApiError> for Error {
    fn from(error: ApiError) -> Error {
        Error::Api(error)
    }
}

/// What the page adds to a body.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Page {
    /// The API that the body is of.
    #[serde(default)]
    api: Api,
    /// Only count the tokens of the prompt.
    #[serde(default)]
    counts: bool,
    /// Random digits, in hexadecimal: the IDs of tool calls.
    random: String,
    /// Seconds since 1970.
    created: u64,
    /// Local time as seconds since 1970, for templates that show a date.
    now: i64,
    /// Jinja template in place of the model's.
    #[serde(default)]
    template: Option<String>,
    /// Tokens that penalties look back at; by default all.
    #[serde(default)]
    repeat_last_n: Option<i64>,
}

/// The API of a body.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Api {
    #[default]
    ChatCompletions,
    Responses,
    Messages,
}

/// A request of any API: as a chat completion, and what the form of its answer needs.
struct Parsed {
    chat: ChatCompletionRequest,
    /// A response repeats fields of its request.
    response: Option<Box<ResponsesRequest>>,
}

impl Api {
    /// Beginning of the IDs of answers.
    fn prefix(self) -> &'static str {
        match self {
            Api::ChatCompletions => "chatcmpl-",
            Api::Responses => "resp_",
            Api::Messages => "msg_",
        }
    }

    fn parse(self, body: &[u8], counts: bool) -> Result<Parsed, ApiError> {
        let (chat, response) = match self {
            Api::ChatCompletions => (ChatCompletionRequest::parse_body(body)?, None),
            Api::Responses => {
                let mut request = ResponsesRequest::parse_body(body)?;
                if request.previous_response_id.is_some() {
                    let message =
                        "previous_response_id: the page keeps no responses; send the items of the conversation";
                    return Err(ApiError::unsupported("previous_response_id", message));
                }
                let input = request.input.take();
                let echo = Box::new(request.clone());
                request.input = input;
                (request.into_chat(Vec::new())?.chat, Some(echo))
            }
            Api::Messages => {
                let request = MessagesRequest::parse_body(body)?;
                if !counts {
                    request.check_max_tokens()?;
                }
                (request.into_chat()?.0, None)
            }
        };
        Ok(Parsed { chat, response })
    }

    /// What takes the updates of the answers.
    fn output(
        self,
        request: Option<&ResponsesRequest>,
        plan: ChatPlan,
        head: ResponseHead,
        options: &Options,
    ) -> Output {
        let is_stream = options.is_stream();
        let (parser, n_prompt) = (plan.output.parser(0), plan.n_prompt);
        let form: Box<dyn FormatWriter> = match (self, request) {
            (Api::Responses, Some(request)) => {
                let model = plan.logprobs.then(|| Arc::clone(&plan.model));
                let form = ResponsesFormat::new(head, request, n_prompt).with_logprobs(model);
                Box::new((AnswerWriter::new(parser, form), ResponsesFormat::into_response as fn(_) -> _))
            }
            (Api::Messages, _) => {
                let form = MessageFormat::new(head, n_prompt, options.stops());
                Box::new((AnswerWriter::new(parser, form), MessageFormat::into_response as fn(_) -> _))
            }
            _ if is_stream => return Output::Stream(Box::new(ChatWriter::new(plan, head))),
            _ => {
                let answers = (0..plan.n).map(|_| Answer::default()).collect();
                return Output::Whole { plan: Box::new(plan), head, answers };
            }
        };
        Output::Formatted { writer: Some(form), is_stream }
    }
}

/// Writes the one answer of another API.
trait FormatWriter {
    /// Returns whether it is complete.
    fn update(&mut self, update: Update, sink: &mut dyn EventSink) -> bool;

    /// The whole response.
    fn response(self: Box<Self>) -> Option<Box<RawValue>>;
}

impl<F: WireFormat, T: Serialize> FormatWriter for (AnswerWriter<F>, fn(F) -> T) {
    fn update(&mut self, update: Update, sink: &mut dyn EventSink) -> bool {
        self.0.update(0, update, sink)
    }

    fn response(self: Box<Self>) -> Option<Box<RawValue>> {
        let (writer, build) = *self;
        serde_json::value::to_raw_value(&build(writer.into_format())).ok()
    }
}

/// An open completion.
#[derive(Serialize)]
pub(crate) struct Opened {
    completion: u32,
    /// Tokens of the prompt.
    prompt_tokens: usize,
    n: usize,
    stream: bool,
    /// The constraint, for the grammar module.
    #[serde(skip_serializing_if = "Option::is_none")]
    constraint: Option<ConstraintPlan>,
    /// Path of the request field that defines it; the grammar module names the fields of tools itself.
    #[serde(skip_serializing_if = "Option::is_none")]
    param: Option<String>,
}

/// New output of a choice.
#[derive(Serialize)]
pub(crate) struct CompletionEvent {
    id: u64,
    /// Chunks of the stream.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    chunks: Vec<Box<RawValue>>,
    /// Whether the choice has ended.
    is_done: bool,
    /// The response, with the last choice.
    #[serde(skip_serializing_if = "Option::is_none")]
    response: Option<Box<RawValue>>,
    /// Receipts by choice: JSON as strings, since a 64-bit seed does not fit a JavaScript number.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    receipts: BTreeMap<usize, String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<EventError>,
}

#[derive(Serialize)]
struct EventError {
    code: &'static str,
    message: String,
}

enum Output {
    Stream(Box<ChatWriter>),
    Whole {
        plan: Box<ChatPlan>,
        head: ResponseHead,
        answers: Vec<Answer>,
    },
    /// The writer, until the response is whole.
    Formatted {
        writer: Option<Box<dyn FormatWriter>>,
        is_stream: bool,
    },
}

struct Completion {
    request: Request,
    /// Tokens of reasoning, at most.
    budget: Option<usize>,
    plan: OutputPlan,
    output: Output,
    chunks: Chunks,
    receipts: BTreeMap<usize, String>,
}

/// Collects the chunks of a stream.
#[derive(Default)]
struct Chunks(Vec<Box<RawValue>>);

impl EventSink for Chunks {
    fn event(&mut self, _: Option<&str>, json: &[u8]) {
        // chunks are JSON that was serialised just now
        self.0.extend(serde_json::from_slice::<Box<RawValue>>(json));
    }

    fn done(&mut self) {}
}

/// Open completions, and the requests of their choices.
#[derive(Default)]
pub(crate) struct Completions {
    next: u32,
    open: BTreeMap<u32, Completion>,
    /// The forms of the model with the template used last; requests rarely change it.
    forms: RefCell<Option<(String, ModelSyntax)>>,
    requests: BTreeMap<RequestId, (u32, usize)>,
}

impl Completions {
    pub(crate) fn close(&mut self, completion: u32) {
        self.open.remove(&completion);
    }

    /// The prompt of an open completion.
    #[cfg(feature = "bindgen")]
    fn prompt(&self, completion: u32) -> Option<&[u32]> {
        Some(&self.open.get(&completion)?.request.tokens)
    }

    pub(crate) fn forget(&mut self, id: RequestId) {
        self.requests.remove(&id);
    }

    /// The output of an event.
    ///
    /// # Errors
    /// The event, if it is of no completion.
    pub(crate) fn take(&mut self, event: Event) -> Result<Option<CompletionEvent>, Event> {
        let id = match &event {
            Event::Prefilled { id, .. } | Event::Token { id, .. } | Event::Done { id, .. } => *id,
            _ => return Err(event),
        };
        let Some(&(completion, index)) = self.requests.get(&id) else { return Err(event) };
        let Some((_, update)) = Update::from_event(event) else { return Ok(None) };
        let is_done = matches!(update, Update::Done { .. });
        if is_done {
            self.requests.remove(&id);
        }
        Ok(self.open.get_mut(&completion).and_then(|completion| completion.update(id, index, update, is_done)))
    }
}

impl Completion {
    fn update(&mut self, id: RequestId, index: usize, mut update: Update, is_done: bool) -> Option<CompletionEvent> {
        let no_memory = || EventError {
            code: "memory",
            message: "the module's memory cannot grow: no room for more KV pages".into(),
        };
        let error = match &update {
            Update::Done { reason: FinishReason::NoMemory, .. } => Some(no_memory()),
            update => update.error().map(|e| EventError { code: kind(&e), message: e.message }),
        };
        if error.is_some() {
            let (chunks, receipts) = (Vec::new(), BTreeMap::new());
            return Some(CompletionEvent { id: id.0, chunks, is_done, response: None, receipts, error });
        }
        if let Update::Done { receipt, .. } = &mut update {
            self.receipts.extend(receipt.take().map(|receipt| (index, json(&receipt))));
        }
        let mut response = None;
        match &mut self.output {
            Output::Stream(writer) => {
                writer.update(index, update, &mut self.chunks);
            }
            Output::Whole { plan, head, answers } => {
                if let Some(answer) = answers.get_mut(index) {
                    answer.add(update);
                }
                if is_done && answers.iter().all(|answer| answer.finish.is_some()) {
                    let whole = plan.response(head.clone(), mem::take(answers));
                    response = serde_json::value::to_raw_value(&whole).ok();
                }
            }
            Output::Formatted { writer, is_stream } => {
                let sink: &mut dyn EventSink = if *is_stream { &mut self.chunks } else { &mut NoEvents };
                let is_complete = writer.as_mut().is_some_and(|writer| writer.update(update, sink));
                if is_complete && !*is_stream {
                    response = writer.take().and_then(|writer| writer.response());
                }
            }
        }
        let chunks = mem::take(&mut self.chunks.0);
        let is_over = response.is_some() || (is_done && matches!(self.output, Output::Stream(_)));
        let receipts = if is_over { mem::take(&mut self.receipts) } else { BTreeMap::new() };
        (is_done || !chunks.is_empty()).then_some(CompletionEvent {
            id: id.0,
            chunks,
            is_done,
            response,
            receipts,
            error: None,
        })
    }
}

impl Session {
    /// Checks the body of a chat completion, or of a request of another API, and tokenises its prompt.
    ///
    /// # Errors
    /// Those of the server for the same body.
    pub(crate) fn open_completion(&mut self, body: &str, page: Page) -> Result<Opened, Error> {
        if self.completions.open.len() >= MAX_OPEN {
            let message = format!("{MAX_OPEN} completions are open, expected one to end first");
            return Err(ApiError::unavailable(message).into());
        }
        let Parsed { chat: ChatCompletionRequest { mut options, constraint, chat }, response } =
            page.api.parse(body.as_bytes(), page.counts)?;
        if options.session_id.is_some() {
            return Err(ApiError::unsupported("session_id", "session_id is given, but the page has no sessions").into());
        }
        options.penalty_scope.get_or_insert(Scope::Answer);
        let logprobs = chat.logprobs()?;
        let n = options.n_choices(MAX_N)?;
        options.priority()?;
        let variables = chat.template_variables()?;
        let parallel = chat.parallel_tool_calls != Some(false);
        let source = self.template_source(page.template.as_deref());
        let output = chat.output(self.forms(source).map_err(ApiError::from)?, SyntaxNames::default())?;
        let budget = chat.thinking_budget_tokens;
        let mut tools = parse_tool_choice(source, chat.tools, chat.tool_choice, parallel)?;
        let grammar = constraint.source()?;
        let random = u128::from_str_radix(&page.random, 16)
            .map_err(|_| Error::Option("random: expected hexadecimal digits".into()))?;
        let output = tools.output(&self.model, output, CallIds::new(random), grammar.is_some());
        let constraint = constraint_plan(grammar, &mut tools)?;
        let end = chat_end(chat.continue_final_message, chat.add_generation_prompt)?;
        let messages = check_messages(chat.messages)?;
        let chat_request = chat_request(messages, tools.tools, variables, end, Now::from_unix(page.now));
        let tokens = self.render_by(source, &chat_request).map_err(ApiError::from)?.ids;
        let prompt_tokens = tokens.len();
        if page.counts {
            return Ok(Opened { completion: 0, prompt_tokens, n: 0, stream: false, constraint: None, param: None });
        }
        let output = output.prompt(&self.model.tokenizer, &tokens);
        let visible = output.visible().to_vec();
        // as many bits as a number of JavaScript has
        let seed = options.seed.map_or((random >> 75) as u64, |seed| seed.0);
        let plan = ChatPlan {
            model: Arc::clone(&self.model),
            n_prompt: prompt_tokens,
            n,
            logprobs: logprobs.is_requested,
            stream_usage: options.includes_usage(),
            output,
        };
        let mut sampling = options.sampling(logprobs, seed)?;
        if let Some(n) = page.repeat_last_n {
            let last_n = if n == -1 { Some(ALL_TOKENS) } else { u32::try_from(n).ok() };
            let wrong = || ApiError::param("repeat_last_n", format!("repeat_last_n is {n}, expected -1, 0 or more"));
            sampling.repeat_last_n = last_n.ok_or_else(wrong)?;
        }
        if let Some(dry) = &mut sampling.dry {
            dry.breakers = options.dry_breakers(&self.model.tokenizer);
        }
        options.check_salt()?;
        let limits = Limits {
            model: &self.model,
            engine: Some(self.engine.options()),
            n_pages: self.engine.kv_stats().n_pages,
            max_prompt: 0,
            max_tokens: 0,
        };
        let request_plan =
            RequestPlan { sampling, constraint: None, prompt_logprobs: false, default_tokens: None, cache_salt: 0 };
        let request = Request {
            visible,
            speculation: self.speculation(),
            ..options.request(&limits, &request_plan, tokens, "messages")?
        };
        let number = self.completions.next;
        let head = ResponseHead {
            id: format!("{}{}", page.api.prefix(), page.random).as_str().into(),
            created: page.created,
            model: self.model.name.as_deref().unwrap_or(self.model.config.arch.name).into(),
            system_fingerprint: system_fingerprint(&self.engine.options().model_sha256.unwrap_or_default())
                .as_str()
                .into(),
            seed,
            session_id: None,
        };
        let stream = options.is_stream();
        let parsed = plan.output.clone();
        let output = page.api.output(response.as_deref(), plan, head, &options);
        let completion =
            Completion { request, budget, plan: parsed, output, chunks: Chunks::default(), receipts: BTreeMap::new() };
        self.completions.next = number.wrapping_add(1);
        self.completions.open.insert(number, completion);
        let param = match &constraint {
            Some(ConstraintPlan::Grammar(plan)) => Some(plan.param.clone()),
            _ => None,
        };
        Ok(Opened { completion: number, prompt_tokens, n, stream, constraint, param })
    }

    /// The forms of calls and reasoning with the template `source`.
    fn forms(&self, source: &str) -> Result<ModelSyntax, ChatError> {
        let mut known = self.completions.forms.borrow_mut();
        let forms = match known.as_ref().filter(|(known, _)| known == source) {
            Some((_, forms)) => *forms,
            None => detect_syntaxes(&ChatTemplate::new(source)?, &self.model.tokenizer),
        };
        *known = Some((source.into(), forms));
        Ok(forms)
    }

    /// Starts a choice of a completion; returns the id of its request.
    ///
    /// # Errors
    /// If the request is invalid or there is no capacity.
    pub(crate) fn submit_choice(
        &mut self,
        completion: u32,
        index: usize,
        constraint: Option<Arc<dyn Constraint>>,
    ) -> Result<u64, Error> {
        #[cfg(feature = "bindgen")]
        if let Some(tokens) = self.completions.prompt(completion).map(<[u32]>::to_vec) {
            self.restore_pages(&tokens);
        }
        let closed = || Error::Option(format!("completion {completion} is not open"));
        let Completion { request, budget, plan, output, chunks, .. } =
            self.completions.open.get_mut(&completion).ok_or_else(closed)?;
        let constraint = reasoning_constraint(plan, &self.model, *budget, constraint);
        let request = Request { sequence: index as u64, constraint, ..request.clone() };
        let id = self.engine.submit(request)?;
        match output {
            Output::Stream(writer) => {
                writer.update(index, Update::Started, chunks);
            }
            Output::Formatted { writer: Some(writer), is_stream } => {
                let sink: &mut dyn EventSink = if *is_stream { chunks } else { &mut NoEvents };
                writer.update(Update::Started, sink);
            }
            Output::Whole { .. } | Output::Formatted { writer: None, .. } => {}
        }
        self.completions.requests.insert(id, (completion, index));
        Ok(id.0)
    }
}

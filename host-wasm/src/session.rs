//! A loaded model and its requests, with JSON in and out.

#[cfg(feature = "chat")]
use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
#[cfg(feature = "chat")]
use starling::chat::{ChatError, ChatRequest, ChatTemplate, DEFAULT_TEMPLATE, Json, Now};
use starling::draft::Speculation;
use starling::embed::{Embedder, EmbedderOptions, Pooling, Text};
use starling::engine::{Engine, EngineOptions, Event, Request, RequestId};
use starling::error::{DraftModelError, LoadError, MemoryError, RequestError};
use starling::kernels::attention::KvType;
use starling::kernels::{Cpu, UnknownIsa};
use starling::kv::PageError;
use starling::model::evaluate::{Evaluation, EvaluationError};
use starling::model::{Model, StreamError, StreamLoader};
use starling::pool::Pool;
use starling::receipt::{Mismatch, Receipt, VerifyError, verify};
use starling::sampler::{Constraint, DRY_BREAKERS, SamplingOptions};
use starling::tokenizer::{DecodeOptions, EncodeOptions};

#[cfg(feature = "openai")]
use crate::completion;
#[cfg(feature = "bindgen")]
use crate::pacer::Pacer;
#[cfg(feature = "bindgen")]
use crate::pages::Pages;
use crate::threads;

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The model is malformed or unsupported.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// A file of the model is malformed, unsupported, or not the expected one.
    #[error(transparent)]
    Stream(#[from] StreamError),
    /// The request is invalid, or there is no capacity now.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// The instruction set is unknown.
    #[error(transparent)]
    Isa(#[from] UnknownIsa),
    /// The JSON does not match the schema of the call.
    #[error("invalid JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// An option is invalid.
    #[error("{0}")]
    Option(String),
    /// An exported KV cache cannot be imported.
    #[error("saved cache: {0}")]
    Page(#[from] PageError),
    /// A chat completion is wrong.
    #[cfg(feature = "openai")]
    #[error("{}", .0.message)]
    Api(starling_api::error::ApiError),
    /// The chat template fails.
    #[cfg(feature = "chat")]
    #[error(transparent)]
    Template(#[from] ChatError),
    /// The draft model does not fit the model.
    #[error(transparent)]
    Draft(DraftModelError),
    /// The KV cache or the working memory cannot be allocated.
    #[error("not enough memory for the context of {n_ctx} tokens")]
    Memory {
        /// Context length in tokens.
        n_ctx: usize,
    },
    /// The model needs more working memory than the limit.
    #[error("{0}: if you trust the model, raise working_memory")]
    WorkingMemory(MemoryError),
}

impl From<EvaluationError> for Error {
    fn from(error: EvaluationError) -> Error {
        match error {
            EvaluationError::Request(e) => Error::Request(e),
            EvaluationError::Memory { n_ctx, source } => Error::memory(n_ctx)(source),
        }
    }
}

impl Error {
    /// The error of an allocation for a context of `n_ctx` tokens.
    fn memory(n_ctx: usize) -> impl Fn(MemoryError) -> Error {
        move |error| match error {
            MemoryError::Limit { .. } => Error::WorkingMemory(error),
            _ => Error::Memory { n_ctx },
        }
    }

    /// Index of the file of the model that is wrong, and what is wrong with it: for hosts that know the file's name.
    pub fn in_file(&self) -> Option<(usize, String)> {
        match self {
            Error::Stream(StreamError::File { file, source }) => Some((*file, source.to_string())),
            Error::Stream(StreamError::Length { file, found, expected }) => {
                Some((*file, format!("the file has {found} bytes, expected {expected}")))
            }
            _ => None,
        }
    }

    /// The kind of failure, for programs.
    pub fn kind(&self) -> &'static str {
        match self {
            Error::Load(LoadError::OutOfMemory { .. })
            | Error::Stream(
                StreamError::Load(LoadError::OutOfMemory { .. })
                | StreamError::File { source: LoadError::OutOfMemory { .. }, .. },
            )
            | Error::Memory { .. }
            | Error::WorkingMemory(_) => "memory",
            Error::Stream(StreamError::Order { .. }) => "request",
            Error::Load(_) | Error::Stream(_) | Error::Draft(_) => "model",
            #[cfg(feature = "openai")]
            Error::Api(e) => completion::kind(e),
            #[cfg(feature = "chat")]
            Error::Template(_) => "template",
            Error::Request(RequestError::NoCapacity { .. }) | Error::Page(PageError::NoCapacity) => "capacity",
            Error::Page(PageError::Checksum) => "checksum",
            Error::Page(_) | Error::Request(_) | Error::Json(_) | Error::Option(_) | Error::Isa(_) => "request",
        }
    }
}

/// Options of a session.
#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct Options {
    /// Context length in tokens; by default that of training, at most 4096.
    pub(crate) n_ctx: Option<usize>,
    /// Sequences that run at once.
    pub(crate) max_seqs: usize,
    /// Tokens of a batch, which bounds the duration of a step.
    pub(crate) batch_tokens: usize,
    /// Limit of working memory in bytes; by default 2 GiB, or the size of the weights if that is more.
    pub(crate) working_memory: Option<usize>,
    /// `f32`, `f16`, `k8` or `q8`.
    pub(crate) kv_type: String,
    /// Instruction set; by default the fastest.
    pub(crate) isa: Option<String>,
    /// Number of threads, this one included; the page has started the others.
    pub(crate) threads: usize,
    /// Maximal draft tokens of a step; 0 turns speculation off.
    pub(crate) draft_max: usize,
    /// Milliseconds of a step, as far as a smaller batch can shorten it.
    #[cfg(feature = "bindgen")]
    pub(crate) max_step_ms: Option<f64>,
}

impl Default for Options {
    fn default() -> Self {
        Options {
            n_ctx: None,
            max_seqs: 1,
            batch_tokens: 64,
            working_memory: None,
            kv_type: "f16".into(),
            isa: None,
            threads: 1,
            draft_max: 0,
            #[cfg(feature = "bindgen")]
            max_step_ms: None,
        }
    }
}

/// Maximum context length by default.
const DEFAULT_CTX: usize = 4096;
/// Limit of `draft_max`, as for the command.
const MAX_DRAFT: usize = 64;
/// Share of draft tokens that should be accepted, as for the command.
const DRAFT_MIN_ACCEPTANCE: f32 = 0.3;

/// A conversation in JSON.
#[cfg(feature = "chat")]
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ChatJson {
    messages: Vec<Json>,
    #[serde(default)]
    tools: Option<Json>,
    #[serde(default = "yes")]
    add_generation_prompt: bool,
    #[serde(default)]
    continue_final_message: bool,
    /// Additional variables of the template: an object.
    #[serde(default)]
    variables: Option<Json>,
    /// Local time as seconds since 1970, for templates that show a date.
    #[serde(default)]
    now: Option<i64>,
    /// Jinja template in place of the model's.
    #[serde(default)]
    template: Option<String>,
}

#[cfg(feature = "chat")]
fn yes() -> bool {
    true
}

#[cfg(feature = "chat")]
pub(crate) type Chat = ChatJson;
/// Builds without templates refuse conversations.
#[cfg(not(feature = "chat"))]
pub(crate) type Chat = serde::de::IgnoredAny;

/// A request in JSON: `prompt`, `ids` or `chat`, and options.
#[derive(Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct RequestJson {
    pub(crate) prompt: Option<String>,
    pub(crate) ids: Option<Vec<u32>>,
    pub(crate) chat: Option<Chat>,
    /// Parse special tokens in the prompt.
    pub(crate) parse_special: bool,
    pub(crate) add_special: bool,
    pub(crate) max_tokens: Option<usize>,
    pub(crate) stop: Vec<String>,
    pub(crate) stop_tokens: Vec<u32>,
    pub(crate) ignore_eos: bool,
    /// Index of the answer among several to one prompt: part of the random generator's key.
    pub(crate) sequence: u64,
    /// Return a receipt with the event `done`; the loader must have computed the digest.
    pub(crate) receipt: bool,
    pub(crate) sampling: SamplingOptions,
    /// DRY sequence breakers as texts, in addition to the tokens of `sampling.dry.breakers`; the default ones if both are
    /// missing.
    pub(crate) dry_breakers: Option<Vec<String>>,
}

impl Default for RequestJson {
    fn default() -> Self {
        RequestJson {
            prompt: None,
            ids: None,
            chat: None,
            parse_special: false,
            add_special: true,
            max_tokens: None,
            stop: Vec::new(),
            stop_tokens: Vec::new(),
            ignore_eos: false,
            sequence: 0,
            receipt: false,
            sampling: SamplingOptions::default(),
            dry_breakers: None,
        }
    }
}

/// A rendered conversation and its tokens.
#[derive(Serialize)]
pub(crate) struct Conversation {
    pub(crate) text: String,
    pub(crate) ids: Vec<u32>,
}

/// Result of verifying a receipt.
#[derive(Serialize)]
#[serde(untagged)]
pub(crate) enum Verdict {
    /// Every step agrees.
    Right { verified: bool, tokens: usize },
    /// `step` is the first that differs; `None` if nothing was recomputed.
    Wrong { verified: bool, step: Option<usize>, reason: String },
}

/// A loaded model and its requests.
pub struct Session {
    pub(crate) model: Arc<Model>,
    pub(crate) engine: Engine,
    /// Allocated for the longest text so far.
    embedder: Option<Embedder>,
    pub(crate) cpu: Cpu,
    pub(crate) pool: Box<dyn Pool>,
    /// The template compiled last; requests rarely change it.
    #[cfg(feature = "chat")]
    template: RefCell<Option<ChatTemplate>>,
    #[cfg(feature = "openai")]
    pub(crate) completions: completion::Completions,
    #[cfg(feature = "bindgen")]
    pub(crate) pacer: Option<Pacer>,
    #[cfg(feature = "bindgen")]
    pub(crate) pages: Pages,
}

impl Session {
    /// Creates a session from a complete `loader`; `options` is a JSON object, or empty for defaults.
    ///
    /// # Errors
    /// If a file or an option is wrong.
    pub fn new(loader: StreamLoader, options: &str) -> Result<Session, Error> {
        Session::with_draft(loader, None, options)
    }

    /// As [`Session::new`], with the model of `draft`, which drafts.
    ///
    /// # Errors
    /// Also if its vocabulary is another.
    pub fn with_draft(loader: StreamLoader, draft: Option<StreamLoader>, options: &str) -> Result<Session, Error> {
        let options = if options.is_empty() { Options::default() } else { serde_json::from_str(options)? };
        Session::open(loader, draft, options)
    }

    /// As [`Session::with_draft`].
    pub(crate) fn open(loader: StreamLoader, draft: Option<StreamLoader>, options: Options) -> Result<Session, Error> {
        let cpu = options.isa.as_deref().map_or_else(|| Ok(Cpu::detect()), Cpu::named)?;
        let names = || KvType::ALL.map(KvType::name).join(", ");
        let kv_type = *KvType::ALL
            .iter()
            .find(|t| t.name() == options.kv_type)
            .ok_or_else(|| Error::Option(format!("kv_type is {:?}, expected one of {}", options.kv_type, names())))?;
        let pool = threads::pool(options.threads)?;
        let (mut model, model_sha256) = loader.finish()?;
        model.max_scratch_bytes = options.working_memory.unwrap_or(model.max_scratch_bytes);
        let model = Arc::new(model);
        let n_ctx = options.n_ctx.unwrap_or(model.config.n_ctx_train.min(DEFAULT_CTX)).max(1);
        let max_seqs = options.max_seqs.max(1);
        let sizes = EngineOptions {
            kv_type,
            n_ctx,
            max_seqs,
            batch_tokens: options.batch_tokens.max(1),
            prefill_chunk: options.batch_tokens / 2,
            draft_rows: options.draft_max.min(MAX_DRAFT),
            kv_bytes: max_seqs.saturating_mul(EngineOptions::kv_bytes_of(&model, kv_type, n_ctx)),
            snapshots: Default::default(),
            model_sha256,
        };
        let mut engine = Engine::new(Arc::clone(&model), &*pool, sizes).map_err(Error::memory(n_ctx))?;
        let draft = draft.map(StreamLoader::finish).transpose()?.map(|(draft, _)| Arc::new(draft));
        if let Some(draft) = draft.or_else(|| model.mtp_head.clone()).filter(|_| options.draft_max > 0) {
            engine.set_draft_model(draft, &*pool).map_err(|error| match error {
                DraftModelError::Memory(error) => Error::memory(n_ctx)(error),
                error => Error::Draft(error),
            })?;
        }
        #[cfg_attr(not(feature = "bindgen"), expect(unused_mut))]
        let mut session = Session {
            model,
            engine,
            embedder: None,
            cpu,
            pool,
            #[cfg(feature = "chat")]
            template: RefCell::new(None),
            #[cfg(feature = "openai")]
            completions: completion::Completions::default(),
            #[cfg(feature = "bindgen")]
            pacer: options.max_step_ms.map(|ms| Pacer::new(ms, options.batch_tokens)),
            #[cfg(feature = "bindgen")]
            pages: Pages::default(),
        };
        #[cfg(feature = "bindgen")]
        session.limit_batch();
        Ok(session)
    }

    /// Submits a request, a JSON object; returns its id.
    ///
    /// # Errors
    /// If it is invalid or there is no capacity.
    pub fn submit(&mut self, request: &str) -> Result<u64, Error> {
        self.start(serde_json::from_str(request)?, None)
    }

    /// As [`Session::submit`], with a constraint of the answer.
    pub(crate) fn start(&mut self, r: RequestJson, constraint: Option<Arc<dyn Constraint>>) -> Result<u64, Error> {
        let mut r = r;
        let tokens = self.prompt(&mut r)?;
        #[cfg(feature = "bindgen")]
        self.restore_pages(&tokens);
        let mut sampling = r.sampling;
        if let Some(dry) = &mut sampling.dry {
            let tokenizer = &self.model.tokenizer;
            dry.breakers.extend(match r.dry_breakers {
                Some(texts) => tokenizer.dry_breakers(&texts),
                None if dry.breakers.is_empty() => tokenizer.dry_breakers(&DRY_BREAKERS),
                None => Vec::new(),
            });
        }
        let request = Request {
            sampling,
            max_tokens: r.max_tokens.map(|n| self.at_most_the_context(n, tokens.len())),
            stop: r.stop,
            stop_tokens: r.stop_tokens,
            ignore_eos: r.ignore_eos,
            sequence: r.sequence,
            receipt: r.receipt,
            constraint,
            speculation: self.speculation(),
            ..Request::new(tokens)
        };
        Ok(self.engine.submit(request)?.0)
    }

    /// The tokens of a request's prompt; takes `prompt`, `ids` and `chat`.
    pub(crate) fn prompt(&self, r: &mut RequestJson) -> Result<Vec<u32>, Error> {
        match (r.prompt.take(), r.ids.take(), r.chat.take()) {
            (Some(text), None, None) => {
                let options = EncodeOptions { add_special: r.add_special, parse_special: r.parse_special };
                Ok(self.model.tokenizer.encode(&text, options))
            }
            (None, Some(ids), None) => Ok(ids),
            (None, None, Some(chat)) => Ok(self.chat(chat)?.ids),
            _ => Err(Error::Option("expected exactly one of prompt, ids and chat".into())),
        }
    }

    /// The limit of an answer: `max_tokens`, or what the context has left after the prompt if that is less.
    fn at_most_the_context(&self, max_tokens: usize, n_prompt: usize) -> usize {
        // the engine refuses a prompt that leaves nothing
        max_tokens.min((self.engine.options().n_ctx + 1).saturating_sub(n_prompt).max(1))
    }

    /// Speculative decoding of all requests.
    pub(crate) fn speculation(&self) -> Speculation {
        let max = self.engine.options().draft_rows;
        Speculation { max, min_acceptance: DRAFT_MIN_ACCEPTANCE, ..Speculation::default() }
    }

    #[cfg(not(feature = "chat"))]
    fn chat(&self, _: Chat) -> Result<Conversation, Error> {
        Err(Error::Option(
            "this build has no chat templates: pass prompt or ids, or build with the feature `chat`".into(),
        ))
    }

    /// Renders a conversation with the chat template.
    #[cfg(feature = "chat")]
    fn chat(&self, chat: Chat) -> Result<Conversation, Error> {
        let request = ChatRequest {
            messages: chat.messages,
            tools: chat.tools,
            add_generation_prompt: chat.add_generation_prompt,
            continue_final_message: chat.continue_final_message,
            variables: match chat.variables {
                None => Vec::new(),
                Some(Json::Object(variables)) => variables,
                Some(_) => return Err(Error::Option("chat.variables: expected an object".into())),
            },
            now: chat.now.map(Now::from_unix),
        };
        Ok(self.render_by(self.template_source(chat.template.as_deref()), &request)?)
    }

    /// The source of a request's own template, else of the model's.
    #[cfg(feature = "chat")]
    pub(crate) fn template_source<'a>(&'a self, own: Option<&'a str>) -> &'a str {
        own.or(self.model.chat_template.as_deref()).unwrap_or(DEFAULT_TEMPLATE)
    }

    /// Renders a conversation with the template `source`.
    #[cfg(feature = "chat")]
    pub(crate) fn render_by(&self, source: &str, request: &ChatRequest) -> Result<Conversation, ChatError> {
        let compiled = self.template.take().filter(|template| template.source() == source);
        let template = compiled.map_or_else(|| ChatTemplate::new(source), Ok)?;
        let rendered = template.render(request, &self.model.tokenizer);
        self.template.replace(Some(template));
        let rendered = rendered?;
        let ids = rendered.encode(&self.model.tokenizer);
        Ok(Conversation { text: rendered.text, ids })
    }

    /// Renders a conversation: a JSON object like `chat` of a request.
    ///
    /// # Errors
    /// If the conversation or the template is invalid.
    pub(crate) fn render(&self, chat: &str) -> Result<Conversation, Error> {
        self.chat(serde_json::from_str(chat)?)
    }

    /// Exports the KV cache of the longest cached prefix of a prompt, in whole pages of 16 tokens; empty if nothing is cached.
    ///
    /// # Errors
    /// If the loader computed no digest, which identifies the model in the export.
    pub fn save(&self, ids: &[u32]) -> Result<Vec<u8>, Error> {
        self.digest()?;
        Ok(self.engine.export_pages(ids, 0))
    }

    /// Imports a KV cache from [`Session::save`]; returns its number of tokens.
    ///
    /// # Errors
    /// If it is damaged or of another model, or there is no capacity; pages before the fault are imported.
    pub fn restore(&mut self, bytes: &[u8]) -> Result<usize, Error> {
        self.digest()?;
        Ok(self.engine.import_pages(bytes)?)
    }

    /// SHA-256 of the model.
    pub(crate) fn digest(&self) -> Result<[u8; 32], Error> {
        let digest = self.engine.options().model_sha256;
        digest.ok_or_else(|| Error::Option("the loader made no digest of the model".into()))
    }

    /// Runs one batch: the tokens processed; what came of them goes to `sink`.
    pub(crate) fn run(&mut self, sink: &mut dyn FnMut(Event)) -> usize {
        self.engine.step(self.cpu, &*self.pool, sink)
    }

    /// Forgets a request; says whether it was there.
    pub fn cancel(&mut self, id: u64) -> bool {
        #[cfg(feature = "openai")]
        self.completions.forget(RequestId(id));
        self.engine.cancel(RequestId(id))
    }

    /// The tokens of a text, and where in it they stand, in bytes.
    pub(crate) fn encode(&self, text: &str, add_special: bool, parse_special: bool) -> (Vec<u32>, Vec<Range<usize>>) {
        self.model.tokenizer.encode_with_offsets(text, EncodeOptions { add_special, parse_special })
    }

    /// The bytes of tokens.
    ///
    /// # Errors
    /// If one is not the model's.
    pub fn detokenize(&self, ids: &[u32]) -> Result<Vec<u8>, Error> {
        self.model.check_tokens(ids)?;
        Ok(self.model.tokenizer.decode(ids, DecodeOptions { skip_special: false }))
    }

    /// The bytes a token stands for; none if there is no such token.
    pub fn piece(&self, id: u32) -> &[u8] {
        self.model.tokenizer.piece(id).unwrap_or_default()
    }

    /// Replays the answer of a receipt, a JSON object.
    ///
    /// # Errors
    /// If this is no receipt, the loader made no digest of the model, or there is too little memory.
    pub(crate) fn verify(&self, receipt: &str) -> Result<Verdict, Error> {
        let receipt: Receipt = serde_json::from_str(receipt)?;
        let (n_ctx, model) = (self.engine.options().n_ctx, self.digest()?);
        Ok(match verify(&self.model, &model, self.cpu, &*self.pool, n_ctx, &receipt) {
            Ok(()) => Verdict::Right { verified: true, tokens: receipt.output.len() },
            Err(VerifyError::Memory(e)) => return Err(Error::memory(n_ctx)(e)),
            Err(e) => {
                let step = if let VerifyError::Mismatch(Mismatch { step, .. }) = &e { Some(*step) } else { None };
                Verdict::Wrong { verified: false, step, reason: e.to_string() }
            }
        })
    }

    /// The embedding of a text, normalised to length 1, with the pooling of the model file; with pooling `none` the
    /// embeddings of all tokens, concatenated.
    ///
    /// # Errors
    /// If a token is not in the vocabulary, there are more than the context length, or the pooling is unknown.
    pub fn embed(&mut self, ids: &[u32]) -> Result<Vec<f32>, Error> {
        let pooling = Pooling::of(&self.model.config)?;
        let EngineOptions { n_ctx, .. } = *self.engine.options();
        let text = Text { tokens: ids, pooling, dimensions: None, normalise: true };
        if self.embedder.as_ref().is_none_or(|e| e.options().batch_tokens < ids.len().min(n_ctx)) {
            // sized by the longest text, not by the context
            let batch_tokens = ids.len().next_power_of_two().min(n_ctx).max(1);
            let sizes = EmbedderOptions { max_texts: 1, batch_tokens, n_ctx };
            self.embedder = None;
            let embedder = Embedder::new(Arc::clone(&self.model), &*self.pool, sizes).map_err(Error::memory(n_ctx))?;
            self.embedder = Some(embedder);
        }
        let Some(embedder) = &mut self.embedder else { return Err(Error::Memory { n_ctx }) };
        let mut reply =
            Err(Error::Option("the embedding is not finite (NaN or infinity): the weights are faulty".into()));
        embedder.embed(self.cpu, &*self.pool, &[text], &mut |_, vector| {
            if let Some(vector) = vector {
                reply = Ok(vector.to_vec());
            }
        })?;
        reply
    }

    /// SHA-256 of the logits after each of the tokens, f32 little-endian, row by row: the digest that tests compare
    /// between targets.
    ///
    /// # Errors
    /// If a token is not in the vocabulary, or there are more than the context length.
    pub fn logits_sha256(&self, ids: &[u32]) -> Result<String, Error> {
        let EngineOptions { kv_type, batch_tokens, n_ctx, .. } = *self.engine.options();
        if ids.len() > n_ctx {
            return Err(RequestError::ContextLength { prompt: ids.len(), max_tokens: 0, n_ctx }.into());
        }
        let evaluation = Evaluation {
            model: &self.model,
            cpu: self.cpu,
            pool: &*self.pool,
            kv_type,
            batch: batch_tokens,
            n_ctx: ids.len(),
        };
        let mut hash = Sha256::new();
        evaluation.run::<Error>(ids, 0, None, &mut |row| {
            row.logits.iter().for_each(|v| hash.update(v.to_le_bytes()));
            Ok(())
        })?;
        Ok(hash.finalize().iter().map(|b| format!("{b:02x}")).collect())
    }
}

//! `starling run`: generates from one prompt and streams the text.

use std::fs;
use std::io::{IsTerminal, Write, stdin, stdout};
use std::mem;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use serde_json::json;
use starling::engine::{Engine, EngineOptions, Event, FinishReason, Request};
use starling::model::Model;
use starling::receipt::Receipt;
use starling::sampler::Constraint;
use starling::structure::{GrammarSource, Limits};
use starling::tokenizer::EncodeOptions;
use starling_host::error::Failure;
use starling_host::load::{self, DEFAULT_CTX, ModelOptions};
use starling_host::machine;
use starling_host::pool::ThreadPool;
use starling_host::progress::remark;
use starling_host::session_file::{self, Conversation};
use starling_host::structure::Grammars;
use starling_host::template::template;
use starling_host::text_file::text_file;

use crate::cli::{DraftArgs, RunArgs};
use crate::{chat, diffusion, interrupt, tokens};

/// Prefill batch size in tokens.
pub const BATCH: usize = 128;

/// # Errors
/// If the model does not load, the prompt does not fit, or output fails.
pub fn run(model_args: &ModelOptions, args: &RunArgs) -> Result<(), Failure> {
    let start = Instant::now();
    let cpu = load::cpu(model_args)?;
    let pool = load::pool(model_args)?;
    let model = Arc::new(load::model_and_head(model_args, args.draft.loads_mtp(), &pool)?);
    let load_seconds = start.elapsed().as_secs_f64();
    args.diffusion.check(&model, args)?;
    let needs_sha256 = args.receipt.is_some() || args.session.is_some();
    let model_sha256 = needs_sha256.then(|| load::sha256(model_args)).transpose()?;
    let session = args.session.as_deref().zip(model_sha256.as_ref());
    let session = session.map(|(path, sha256)| session_file::read(path, sha256)).transpose()?;
    let (mut conversation, pages) = session.unwrap_or_default();
    // the bundled model tells stories better than it chats
    let has_template = model_args.model.is_some() && model.chat_template.is_some();
    let mode = Mode::of(has_template, args, &conversation);
    let n_ctx = args.ctx_size.unwrap_or(model.config.n_ctx_train.min(DEFAULT_CTX)).max(1);
    let request = request(&model, args, mode, n_ctx, &mut conversation)?;
    if !args.quiet {
        remark(format_args!("{}", mode.explain(has_template, args)));
    }
    if model.config.diffusion.is_some() {
        let (model, pool, mode) = (&model, &pool, mode.name());
        let host = diffusion::Host { model, model_args, args, cpu, pool, n_ctx, mode, load_seconds };
        return diffusion::generate(&host, request);
    }
    let (seed, is_greedy) = (request.sampling.seed, request.sampling.temperature == 0.0);
    let is_cut = request.max_tokens < args.max_tokens;
    let mut engine = engine(&model, &pool, model_args, &args.draft, n_ctx, model_sha256)?;
    if let Some(path) = &args.session {
        session_file::import(&mut engine, path, &pages);
        drop(pages);
        conversation.tokens.clone_from(&request.tokens);
    }
    engine.submit(request)?;

    let start = Instant::now();
    let (mut first, mut answer) = (None, Answer::default());
    let mut out = stdout().lock();
    interrupt::defer();
    while answer.finish.is_none() && !interrupt::is_requested() {
        let (mut failed, begin) = (Ok(()), Instant::now());
        engine.step(cpu, &pool, &mut |event| {
            if matches!(event, Event::Token { .. } | Event::Done { .. }) {
                first.get_or_insert_with(Instant::now);
            }
            let text = answer.take(event);
            if !args.json && failed.is_ok() {
                failed = out.write_all(text.as_bytes()).and_then(|()| out.flush());
            }
        });
        failed?;
        engine.record_step_time(begin.elapsed().as_secs_f32());
    }
    let (end, first) = (Instant::now(), first.unwrap_or(start));
    let (prefill, decode) = ((first - start).as_secs_f64(), (end - first).as_secs_f64());
    let timings = json!({
        "load_seconds": load_seconds,
        "prompt_tokens": answer.n_prompt,
        "cached_tokens": answer.n_cached,
        "prefill_seconds": prefill,
        "prefill_tokens_per_second": answer.n_prompt as f64 / prefill,
        "drafted_tokens": answer.n_drafted,
        "accepted_tokens": answer.n_accepted,
        "decode_seconds": decode,
        "decode_tokens_per_second": answer.tokens.len().saturating_sub(1) as f64 / decode.max(1e-9),
    });
    if args.json {
        let json = json!({
            "text": answer.text,
            "ids": answer.tokens,
            "finish_reason": answer.finish.map_or("interrupted", FinishReason::name),
            "mode": mode.name(),
            "seed": seed,
            "isa": cpu.isa().name(),
            "threads": starling::pool::Pool::threads(&pool),
            "timings": timings,
        });
        writeln!(out, "{json:#}")?;
    } else {
        writeln!(out)?;
        if !args.quiet {
            let drafts = match answer.n_drafted {
                0 => String::new(),
                n => format!(" | {} of {n} draft tokens accepted", answer.n_accepted),
            };
            let seed = if is_greedy { String::new() } else { format!(" | seed {seed}") };
            if is_cut && answer.finish == Some(FinishReason::Length) {
                remark(format_args!("the context of {n_ctx} tokens is full; --ctx-size makes it larger"));
            }
            remark(format_args!(
                "load {load_seconds:.2} s | prompt {} tokens, {:.1} tok/s | answer {} tokens, {:.1} tok/s{drafts}{seed} | {}, {} threads",
                answer.n_prompt,
                answer.n_prompt as f64 / prefill,
                answer.tokens.len(),
                answer.tokens.len().saturating_sub(1) as f64 / decode.max(1e-9),
                cpu.isa(),
                starling::pool::Pool::threads(&pool),
            ));
        }
    }
    if answer.finish.is_none() {
        return Err(Failure::Interrupted);
    }
    if let (Some(path), Some(receipt)) = (&args.receipt, &answer.receipt) {
        let json = serde_json::to_string(receipt).map_err(std::io::Error::other)?;
        fs::write(path, json + "\n").map_err(|source| Failure::File { path: path.clone(), source })?;
    }
    if let Some(fault) = answer.fault() {
        return Err(fault);
    }
    if let Some(path) = &args.session {
        conversation.tokens.extend(&answer.tokens);
        if mode == Mode::Chat {
            conversation.messages.push(("assistant".into(), answer.text));
        }
        let pages = engine.export_pages(&conversation.tokens, 0);
        session_file::write(path, &conversation, &pages)?;
    }
    Ok(())
}

/// An engine for one sequence, with its draft model. The KV caches are limited to the free memory of this process; an
/// answer that needs more ends there.
///
/// # Errors
/// If there is not enough memory, or the draft model cannot be used.
pub fn engine(
    model: &Arc<Model>,
    pool: &ThreadPool,
    args: &ModelOptions,
    drafts: &DraftArgs,
    n_ctx: usize,
    model_sha256: Option<[u8; 32]>,
) -> Result<Engine, Failure> {
    let kv_type = args.kv_type();
    let draft = drafts.draft_model.as_deref().filter(|_| drafts.draft_max > 0);
    let draft = draft.map(|source| load::resolve_source(args, source)).transpose()?;
    let draft = draft.map(|args| Ok::<_, Failure>((load::draft_model(&args, model, pool)?, load::path(&args))));
    let draft = draft.transpose()?.or_else(|| Some((Arc::clone(model.mtp_head.as_ref()?), load::path(args))));
    let weights = model.weight_bytes() + draft.as_ref().map_or(0, |(draft, _)| draft.weight_bytes());
    let mut left = machine::left(weights as u64);
    if let Some((draft, _)) = &draft {
        // both caches hold the same tokens
        let [page, draft_page] = [model, draft].map(|m| EngineOptions::kv_bytes_of(m, kv_type, 1) as u128);
        left = (u128::from(left) * page / (page + draft_page)) as u64;
    }
    if model.state_bytes() > 0 {
        // snapshots of recurrent states take as much as the pages
        left /= 2;
    }
    let options = EngineOptions {
        kv_type,
        n_ctx,
        max_seqs: 1,
        batch_tokens: BATCH.min(n_ctx),
        prefill_chunk: BATCH,
        draft_rows: drafts.draft_max.into(),
        kv_bytes: EngineOptions::kv_bytes_of(model, kv_type, n_ctx).min(usize::try_from(left).unwrap_or(usize::MAX)),
        snapshots: Default::default(),
        model_sha256,
    };
    let mut engine = Engine::new(Arc::clone(model), pool, options).map_err(Failure::memory("the context"))?;
    if let Some((draft, path)) = draft {
        engine.set_draft_model(draft, pool).map_err(|source| Failure::DraftModel { path, source })?;
    }
    Ok(engine)
}

/// The answer, collected from the events of a request.
#[derive(Debug, Default)]
pub struct Answer {
    /// Prompt tokens.
    pub n_prompt: usize,
    /// Prompt tokens found in the prefix cache.
    pub n_cached: usize,
    /// Generated tokens.
    pub tokens: Vec<u32>,
    pub text: String,
    /// Tokens drafted by speculation, and those of them that were sampled.
    pub n_drafted: usize,
    pub n_accepted: usize,
    /// Set when the answer is complete.
    pub finish: Option<FinishReason>,
    pub receipt: Option<Box<Receipt>>,
}

impl Answer {
    /// Adds an event; returns its text.
    pub fn take(&mut self, event: Event) -> String {
        let text = match event {
            Event::Computed { .. } | Event::Preempted { .. } | Event::Prompt { .. } => String::new(),
            Event::Drafted { n_drafted, n_accepted, .. } => {
                self.n_drafted += n_drafted;
                self.n_accepted += n_accepted;
                String::new()
            }
            Event::Prefilled { n_prompt, n_cached, .. } => {
                (self.n_prompt, self.n_cached) = (n_prompt, n_cached);
                String::new()
            }
            Event::Token { token, text, .. } => {
                self.tokens.push(token);
                text
            }
            Event::Done { text, reason, receipt, .. } => {
                self.finish = Some(reason);
                self.receipt = receipt;
                text
            }
        };
        self.text.push_str(&text);
        text
    }

    /// The error, if the engine ended the answer early.
    pub fn fault(&self) -> Option<Failure> {
        match self.finish? {
            FinishReason::NotFinite => Some(Failure::NotFinite),
            FinishReason::NoMemory => Some(Failure::Memory("the KV cache".into())),
            FinishReason::Constraint(e) => Some(Failure::Usage(e.to_string())),
            FinishReason::StopToken(_)
            | FinishReason::StopString(_)
            | FinishReason::Complete
            | FinishReason::Length
            | FinishReason::Deadline
            | FinishReason::ContentFilter => None,
        }
    }
}

/// What the prompt is to the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// A user message in the chat template.
    Chat,
    /// Text that the model continues.
    Raw,
}

impl Mode {
    /// The mode of the options, of the session, or else of the model: an instruct model has a chat template.
    fn of(has_template: bool, args: &RunArgs, conversation: &Conversation) -> Mode {
        let is_chat = if args.raw || args.special {
            false
        } else if args.chat || args.system.is_some() || args.chat_template.is_some() {
            true
        } else if conversation.tokens.is_empty() {
            has_template
        } else {
            !conversation.messages.is_empty()
        };
        if is_chat { Mode::Chat } else { Mode::Raw }
    }

    fn name(self) -> &'static str {
        match self {
            Mode::Chat => "chat",
            Mode::Raw => "raw",
        }
    }

    /// The line that tells the user which mode it is, and how to get the other.
    fn explain(self, has_template: bool, args: &RunArgs) -> &'static str {
        match self {
            Mode::Chat if args.chat => "chat: the model answers the prompt as a message",
            Mode::Chat => "chat: the model answers the prompt as a message; --raw continues it as text",
            Mode::Raw if has_template => "raw: the model continues the prompt as text",
            Mode::Raw => "raw: the model continues the prompt as text; --chat answers it as a message",
        }
    }
}

/// The request that continues a conversation in a context of `n_ctx` tokens. Adds the user's message to a chat.
fn request(
    model: &Model,
    args: &RunArgs,
    mode: Mode,
    n_ctx: usize,
    conversation: &mut Conversation,
) -> Result<Request, Failure> {
    let text = prompt(args)?;
    let is_new = conversation.tokens.is_empty();
    if !is_new && (mode == Mode::Chat) == conversation.messages.is_empty() {
        let expected =
            if mode == Mode::Chat { "a session that began with --chat" } else { "--chat, as this session began" };
        return Err(Failure::Usage(format!("--session: expected {expected}")));
    }
    let tokens = if mode == Mode::Chat {
        let messages = &mut conversation.messages;
        let system = messages.first().filter(|(role, _)| role == "system").map(|(_, content)| content);
        if !is_new && args.system.is_some() && args.system.as_ref() != system {
            return Err(Failure::Usage("--system: the session has another system message, expected the same".into()));
        }
        if let Some(system) = args.system.as_ref().filter(|_| is_new) {
            messages.push(("system".into(), system.clone()));
        }
        messages.push(("user".into(), text));
        let turns: Vec<(&str, &str)> = messages.iter().map(|(role, content)| (&**role, &**content)).collect();
        chat::prompt(model, &template(model, args.chat_template.as_deref())?, None, &turns)?
    } else {
        let options = EncodeOptions { add_special: is_new, parse_special: args.special };
        [mem::take(&mut conversation.tokens), model.tokenizer.encode(&text, options)].concat()
    };
    let prediction = args.prediction.as_deref().map(text_file).transpose()?;
    let prediction = prediction.map(|text| model.tokenizer.encode(&text, EncodeOptions::default())).unwrap_or_default();
    Ok(Request {
        sampling: args.sampling.options(model),
        max_tokens: args.max_tokens.map(|n| n.min(tokens_left(model, n_ctx, tokens.len()))),
        stop: args.stop.clone(),
        ignore_eos: args.ignore_eos,
        receipt: args.receipt.is_some(),
        constraint: constraint(model, args)?,
        speculation: args.draft.speculation(prediction),
        ..Request::new(tokens)
    })
}

/// Tokens that can be generated after a prompt in a context of `n_ctx` tokens, at least 1: a prompt that does not fit is
/// refused by the engine.
pub fn tokens_left(model: &Model, n_ctx: usize, n_prompt: usize) -> usize {
    // + 1: the last token generated is never input, so it needs no position
    (n_ctx.min(model.config.max_context()) + 1).saturating_sub(n_prompt).max(1)
}

/// The constraint of `--json-schema`, `--grammar` or `--regex`.
fn constraint(model: &Model, args: &RunArgs) -> Result<Option<Arc<dyn Constraint>>, Failure> {
    let (name, form) = if let Some(schema) = &args.json_schema {
        let is_file = !schema.trim_start().starts_with('{');
        let text = if is_file { text_file(Path::new(schema))? } else { schema.clone() };
        let schema = serde_json::from_str(&text).map_err(|e| Failure::Usage(format!("--json-schema: {e}")))?;
        ("--json-schema", GrammarSource::Schema(schema))
    } else if let Some(path) = &args.grammar {
        ("--grammar", GrammarSource::Lark(text_file(path)?, Vec::new()))
    } else if let Some(text) = &args.regex {
        ("--regex", GrammarSource::Regex(text.clone()))
    } else {
        return Ok(None);
    };
    let made = Grammars::new(Limits::DEFAULT).constraint(model, &form, &AtomicBool::new(false));
    made.map(Some).map_err(|e| Failure::Usage(format!("{name}: {e}")))
}

fn prompt(args: &RunArgs) -> Result<String, Failure> {
    let prompt = args.text.text.as_deref();
    if prompt.is_none() && args.file.is_none() && stdin().is_terminal() {
        let message = "no prompt: give it as an argument in quotes, by --file or on standard input; `starling chat` asks for \
                       messages";
        return Err(Failure::Usage(message.into()));
    }
    let text = tokens::text(prompt, args.file.as_deref())?;
    if text.is_empty() && args.file.is_none() && prompt.is_none_or(|prompt| prompt == "-") {
        return Err(Failure::Usage("no prompt: standard input is empty".into()));
    }
    // editors end a file with a newline, which is not part of the prompt
    Ok(if args.file.is_some() { tokens::without_final_newline(text) } else { text })
}

//! Selection of the chat template, and `starling chat`: an interactive conversation.

use std::io::{self, BufRead, IsTerminal, Write, stdin, stdout};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Instant, SystemTime};

use rustyline::error::ReadlineError;
use starling::chat::{
    ChatRequest, ChatTemplate, DEFAULT_TEMPLATE, Json, Now, builtin_template, builtin_template_names,
};
use starling::engine::{Engine, Request};
use starling::kernels::Cpu;
use starling::model::Model;
use starling::pool::Pool;
use starling::sampler::SamplingOptions;

use crate::cli::{ChatArgs, DraftArgs, ModelArgs};
use crate::error::Failure;
use crate::load;
use crate::pool::ThreadPool;
use crate::progress::remark;
use crate::run::{Answer, DEFAULT_CTX, engine};
use crate::tokens::{text_file, utf8};

/// The chat template: the one of `--chat-template` (a built-in name or a file), the model's, or ChatML.
///
/// # Errors
/// If there is no such template, or it does not parse.
pub fn template(model: &Model, wanted: Option<&str>) -> Result<ChatTemplate, Failure> {
    let source = match wanted {
        None => model.chat_template.clone().unwrap_or_else(|| DEFAULT_TEMPLATE.into()),
        Some(name) => match builtin_template(name) {
            Some(source) => source.into(),
            None if Path::new(name).exists() => text_file(Path::new(name))?,
            None => {
                let names = builtin_template_names().collect::<Vec<_>>().join(", ");
                return Err(Failure::Usage(format!(
                    "no built-in template or file {name}; built-in templates: {names}"
                )));
            }
        },
    };
    ChatTemplate::new(&source).map_err(|e| match wanted {
        Some(name) => Failure::Usage(format!("--chat-template {name}: {e}")),
        None => e.into(),
    })
}

/// Renders and tokenises a conversation of (role, content), with the generation prompt.
///
/// # Errors
/// If the template fails.
pub fn prompt(
    model: &Model,
    template: &ChatTemplate,
    system: Option<&str>,
    turns: &[(&str, &str)],
) -> Result<Vec<u32>, Failure> {
    let system = system.map(|content| ("system", content));
    let messages = system.iter().chain(turns).map(|&(role, content)| Json::message(role, content)).collect();
    let seconds = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |time| time.as_secs());
    let now = Some(Now::from_unix(seconds.cast_signed()));
    let request = ChatRequest { messages, add_generation_prompt: true, now, ..ChatRequest::default() };
    Ok(template.render(&request, &model.tokenizer)?.encode(&model.tokenizer))
}

/// Tokens of the context kept free for an answer where `--max-tokens` is not given.
const ROOM: usize = 64;
const HELP: &str = "\
/help            show this list
/clear           delete the conversation
/system [TEXT]   set or remove the system message, and delete the conversation
/again           regenerate the last answer with the next seed
/seed N          set the seed of the next answer
/exit            exit (also Ctrl-D); Ctrl-C stops an answer";

struct Chat<'a> {
    model: &'a Arc<Model>,
    template: ChatTemplate,
    pool: &'a ThreadPool,
    cpu: Cpu,
    engine: Engine,
    sampling: SamplingOptions,
    draft: DraftArgs,
    /// Whether an answer has used the seed; `/again` increments it then.
    seed_is_used: bool,
    max_tokens: Option<usize>,
    system: Option<String>,
    /// (role, content)
    turns: Vec<(&'static str, String)>,
    /// Set by Ctrl-C.
    stop: Arc<AtomicBool>,
    /// Whether standard input is a terminal: an error then does not end the conversation.
    is_interactive: bool,
}

/// # Errors
/// If the model does not load or the terminal fails.
pub fn run(model_args: &ModelArgs, args: &ChatArgs) -> Result<(), Failure> {
    let (cpu, pool) = (load::cpu(model_args)?, load::pool(model_args)?);
    let model = Arc::new(load::model(model_args, &pool)?);
    let n_ctx = args.ctx_size.unwrap_or(model.config.n_ctx_train.min(DEFAULT_CTX)).max(1);
    let engine = engine(&model, &pool, model_args, &args.draft, n_ctx, None)?;
    let sampling = args.sampling.options(&model.tokenizer);
    // invalid options are an error before the first message
    let max_tokens = args.max_tokens.map(|n| n.min(1));
    Request { sampling: sampling.clone(), max_tokens, ..Request::new(vec![0]) }.check(&model, engine.options())?;
    let stop = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&stop);
    ctrlc::set_handler(move || flag.store(true, Ordering::Relaxed)).map_err(io::Error::other)?;
    let mut chat = Chat {
        template: template(&model, args.chat_template.as_deref())?,
        model: &model,
        pool: &pool,
        cpu,
        engine,
        sampling,
        draft: args.draft.clone(),
        seed_is_used: false,
        max_tokens: args.max_tokens,
        system: args.system.clone(),
        turns: Vec::new(),
        stop,
        is_interactive: stdin().is_terminal(),
    };
    let name = model.name.as_deref().unwrap_or("the model");
    if chat.is_interactive {
        writeln!(stdout(), "{name}, {}, {} threads. /help lists the commands.", cpu.isa(), pool.threads())?;
        return chat.terminal();
    }
    for (number, line) in (1..).zip(stdin().lock().split(b'\n')) {
        if !chat.line(&utf8(&format!("standard input, line {number}"), line?)?)? {
            break;
        }
    }
    Ok(())
}

impl Chat<'_> {
    fn terminal(&mut self) -> Result<(), Failure> {
        let mut editor = rustyline::DefaultEditor::new().map_err(io::Error::other)?;
        loop {
            match editor.readline("> ") {
                Ok(line) => {
                    editor.add_history_entry(&line).map_err(io::Error::other)?;
                    if !self.line(&line)? {
                        return Ok(());
                    }
                }
                Err(ReadlineError::Interrupted) => writeln!(stdout(), "(Ctrl-D or /exit to exit)")?,
                Err(ReadlineError::Eof) => return Ok(()),
                Err(e) => return Err(io::Error::other(e).into()),
            }
        }
    }

    /// Handles a line; false ends the conversation.
    fn line(&mut self, line: &str) -> Result<bool, Failure> {
        let line = line.trim();
        let (command, rest) = line.split_once(' ').map_or((line, ""), |(c, r)| (c, r.trim()));
        match command {
            "" => {}
            "/help" => writeln!(stdout(), "{HELP}")?,
            "/exit" | "/quit" | "/bye" => return Ok(false),
            "/clear" => self.turns.clear(),
            "/system" => {
                self.turns.clear();
                self.system = (!rest.is_empty()).then(|| rest.into());
            }
            "/seed" => match rest.parse() {
                Ok(seed) => (self.sampling.seed, self.seed_is_used) = (seed, false),
                Err(_) => writeln!(stdout(), "/seed takes a number, e.g. /seed 7")?,
            },
            "/again" => {
                if self.turns.last().is_some_and(|(role, _)| *role == "assistant") {
                    self.turns.pop();
                }
                if !self.turns.is_empty() {
                    let step = u64::from(self.seed_is_used);
                    self.sampling.seed = self.sampling.seed.wrapping_add(step);
                    self.answer()?;
                }
            }
            _ if command.starts_with('/') => writeln!(stdout(), "unknown command {command}; /help lists all commands")?,
            _ => {
                self.turns.push(("user", line.into()));
                self.answer()?;
            }
        }
        Ok(true)
    }

    /// Generates the answer to the conversation so far.
    fn answer(&mut self) -> Result<(), Failure> {
        let tokens = match self.prompt() {
            Ok(tokens) => tokens,
            Err(refused @ Failure::Template(_)) => return self.unanswered(refused),
            Err(e) => return Err(e),
        };
        let left = (self.n_ctx() + 1).saturating_sub(tokens.len()).max(1);
        let max_tokens = self.max_tokens.map(|n| n.min(left));
        let (sampling, speculation) = (self.sampling.clone(), self.draft.speculation(Vec::new()));
        let request = Request { sampling, max_tokens, speculation, ..Request::new(tokens) };
        let id = match self.engine.submit(request) {
            Ok(id) => id,
            Err(e) => return self.unanswered(e.into()),
        };
        self.seed_is_used = true;
        self.stop.store(false, Ordering::Relaxed);
        let mut answer = Answer::default();
        let mut out = stdout().lock();
        while answer.finish.is_none() && !self.stop.load(Ordering::Relaxed) {
            let (mut failed, begin) = (Ok(()), Instant::now());
            self.engine.step(self.cpu, self.pool, &mut |event| {
                let text = answer.take(event);
                if failed.is_ok() {
                    failed = out.write_all(text.as_bytes()).and_then(|()| out.flush());
                }
            });
            failed?;
            self.engine.record_step_time(begin.elapsed().as_secs_f32());
        }
        self.engine.cancel(id);
        writeln!(out)?;
        drop(out);
        if let Some(fault) = answer.fault() {
            return self.unanswered(fault);
        }
        self.turns.push(("assistant", answer.text));
        Ok(())
    }

    /// Removes the last message and reports the error, which ends a conversation that is not interactive.
    fn unanswered(&mut self, why: Failure) -> Result<(), Failure> {
        self.turns.pop();
        if !self.is_interactive {
            return Err(why);
        }
        Ok(writeln!(stdout(), "{why}")?)
    }

    /// Context size in tokens.
    fn n_ctx(&self) -> usize {
        self.engine.options().n_ctx.min(self.model.config.max_context())
    }

    /// The tokens of the conversation; drops the oldest turns when the context is full.
    fn prompt(&mut self) -> Result<Vec<u32>, Failure> {
        let room = self.max_tokens.map_or(ROOM, |n| n.min(self.n_ctx() / 2));
        loop {
            let turns: Vec<(&str, &str)> = self.turns.iter().map(|(role, text)| (*role, text.as_str())).collect();
            let tokens = prompt(self.model, &self.template, self.system.as_deref(), &turns)?;
            if tokens.len() + room <= self.n_ctx() || self.turns.len() <= 2 {
                return Ok(tokens);
            }
            self.turns.drain(..2);
            remark(format_args!("(context full: dropped the oldest question and answer)"));
        }
    }
}

//! Selection of the chat template, and `starling chat`: an interactive conversation.

mod input;
mod wrap;

use std::fs;
use std::io::{self, IsTerminal, Write, stdout};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Instant, SystemTime};

use serde::{Deserialize, Serialize};
use starling::chat::{ChatRequest, ChatTemplate, Json, Now};
use starling::engine::{Engine, Request};
use starling::kernels::Cpu;
use starling::model::Model;
use starling::pool::Pool;
use starling::sampler::SamplingOptions;
use starling_host::error::Failure;
use starling_host::load::{self, DEFAULT_CTX, ModelOptions};
use starling_host::pool::ThreadPool;
use starling_host::progress::remark;
use starling_host::template::template;
use starling_host::text_file::text_file;

use crate::cli::ChatArgs;
use crate::run::{Answer, engine, tokens_left};
use crate::sampling::{Seed, random_seed};
use input::Input;
use wrap::Wrap;

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
/regen           generate the last answer again, with another seed
/edit [TEXT]     change your last message and answer it again
/seed [N]        set the seed of the next answer, `random` for a new one each time; without N: show the last one
/save FILE       write the conversation to a file (JSON)
/load FILE       continue the conversation of a file
/model [MODEL]   load another model and keep the conversation; without MODEL: show the model
/tokens          show how many tokens of the context the conversation uses
/stats           print tokens per second and the seed after each answer, or stop it
/exit            exit (also Ctrl-D); Ctrl-C stops an answer

A message of several lines: Alt-Enter or a backslash at the end of a line goes on in the next one; \"\"\" begins and ends
a block of lines. The arrow keys bring back earlier messages, Ctrl-R searches them.";

/// A conversation in the file of `/save`.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Saved {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    model: Option<String>,
    messages: Vec<Message>,
}

/// As in OpenAI's API.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Message {
    role: String,
    content: String,
}

const SYSTEM: &str = "system";
const USER: &str = "user";
const ASSISTANT: &str = "assistant";

/// What belongs to the model.
struct Loaded {
    model: Arc<Model>,
    template: ChatTemplate,
    engine: Engine,
    sampling: SamplingOptions,
}

impl Loaded {
    fn new(model_args: &ModelOptions, args: &ChatArgs, pool: &ThreadPool) -> Result<Loaded, Failure> {
        let model = Arc::new(load::model_and_head(model_args, args.draft.loads_mtp(), pool)?);
        let n_ctx = args.ctx_size.unwrap_or(model.config.n_ctx_train.min(DEFAULT_CTX)).max(1);
        let engine = engine(&model, pool, model_args, &args.draft, n_ctx, None)?;
        let sampling = args.sampling.options(&model);
        // invalid options are an error before the first message
        let max_tokens = args.max_tokens.map(|n| n.min(1));
        Request { sampling: sampling.clone(), max_tokens, ..Request::new(vec![0]) }.check(&model, engine.options())?;
        let template = template(&model, args.chat_template.as_deref())?;
        Ok(Loaded { model, template, engine, sampling })
    }

    /// Context size in tokens.
    fn n_ctx(&self) -> usize {
        self.engine.options().n_ctx.min(self.model.config.max_context())
    }

    fn name(&self) -> &str {
        self.model.name.as_deref().unwrap_or("the model")
    }
}

struct Chat<'a> {
    loaded: Loaded,
    model_args: ModelOptions,
    args: &'a ChatArgs,
    pool: &'a ThreadPool,
    cpu: Cpu,
    /// The seed given, of which `/regen` takes the next; `None`: a random one for each answer.
    seed: Option<u64>,
    /// Whether an answer has used the seed.
    seed_is_used: bool,
    stats: bool,
    system: Option<String>,
    turns: Vec<Message>,
    input: Input,
    /// Set by Ctrl-C.
    stop: Arc<AtomicBool>,
}

/// # Errors
/// If the model does not load or the terminal fails.
pub fn run(model_args: &ModelOptions, args: &ChatArgs) -> Result<(), Failure> {
    let (cpu, pool) = (load::cpu(model_args)?, load::pool(model_args)?);
    let loaded = Loaded::new(model_args, args, &pool)?;
    let stop = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&stop);
    ctrlc::set_handler(move || flag.store(true, Ordering::Relaxed)).map_err(io::Error::other)?;
    let mut chat = Chat {
        loaded,
        model_args: model_args.clone(),
        args,
        pool: &pool,
        cpu,
        seed: args.sampling.fixed_seed(),
        seed_is_used: false,
        stats: args.stats,
        system: args.system.clone(),
        turns: Vec::new(),
        input: Input::new(!args.no_history)?,
        stop,
    };
    if chat.input.is_terminal() {
        let (name, threads) = (chat.loaded.name(), pool.threads());
        writeln!(stdout(), "{name}, {}, {threads} threads. /help lists the commands.", cpu.isa())?;
        if chat.loaded.model.chat_template.is_none() && args.chat_template.is_none() {
            writeln!(stdout(), "The model file has no chat template, so chatml is used; answers may be poor.")?;
        }
    }
    while let Some(message) = chat.input.message()? {
        if !chat.line(&message)? {
            break;
        }
    }
    Ok(())
}

impl Chat<'_> {
    /// Handles a message or command; false ends the conversation.
    fn line(&mut self, line: &str) -> Result<bool, Failure> {
        let line = line.trim();
        let (command, rest) = line.split_once(char::is_whitespace).map_or((line, ""), |(c, r)| (c, r.trim()));
        match command {
            "" => {}
            "/help" | "/?" => writeln!(stdout(), "{HELP}")?,
            "/exit" | "/quit" | "/bye" => return Ok(false),
            "/clear" => self.turns.clear(),
            "/system" => {
                self.turns.clear();
                self.system = (!rest.is_empty()).then(|| rest.into());
            }
            "/seed" => self.set_seed(rest)?,
            "/regen" | "/again" => self.regenerate()?,
            "/edit" => self.edit(rest)?,
            "/tokens" => {
                let (used, n_ctx) = (self.tokens()?.len(), self.loaded.n_ctx());
                writeln!(stdout(), "{used} of {n_ctx} tokens, {} messages", self.turns.len())?;
            }
            "/stats" => {
                self.stats = !self.stats;
                writeln!(stdout(), "statistics: {}", if self.stats { "on" } else { "off" })?;
            }
            "/save" | "/load" if rest.is_empty() => writeln!(stdout(), "{command} takes the name of a file")?,
            "/save" => {
                let done = self.save(Path::new(rest));
                self.report(done)?;
            }
            "/load" => {
                let done = self.load(Path::new(rest));
                self.report(done)?;
            }
            "/model" if rest.is_empty() => {
                writeln!(stdout(), "{}: {}", self.loaded.name(), load::path(&self.model_args).display())?;
            }
            "/model" => {
                let done = self.load_model(rest);
                self.report(done)?;
            }
            _ if command.starts_with('/') => writeln!(stdout(), "unknown command {command}; /help lists all commands")?,
            _ => {
                self.turns.push(Message { role: USER.into(), content: line.into() });
                self.answer()?;
            }
        }
        Ok(true)
    }

    /// Prints what a command has done; its error ends only a conversation that is not interactive.
    fn report(&self, done: Result<String, Failure>) -> Result<(), Failure> {
        match done {
            Ok(done) => Ok(writeln!(stdout(), "{done}")?),
            Err(e) if self.input.is_terminal() => Ok(writeln!(stdout(), "{e}")?),
            Err(e) => Err(e),
        }
    }

    fn set_seed(&mut self, text: &str) -> Result<(), Failure> {
        if text.is_empty() {
            return Ok(writeln!(stdout(), "seed {}", self.loaded.sampling.seed)?);
        }
        match Seed::read(text) {
            Ok(Seed(seed)) => (self.seed, self.seed_is_used) = (seed, false),
            Err(_) => writeln!(stdout(), "/seed takes a number or random, e.g. /seed 7")?,
        }
        Ok(())
    }

    /// Generates the last answer again.
    fn regenerate(&mut self) -> Result<(), Failure> {
        if self.turns.last().is_some_and(|turn| turn.role == ASSISTANT) {
            self.turns.pop();
        }
        if self.turns.is_empty() {
            return Ok(());
        }
        let step = u64::from(self.seed_is_used);
        self.seed = self.seed.map(|seed| seed.wrapping_add(step));
        self.answer()
    }

    /// Replaces the last message of the user and answers it.
    fn edit(&mut self, text: &str) -> Result<(), Failure> {
        let Some(last) = self.turns.iter().rposition(|turn| turn.role == USER) else {
            return Ok(writeln!(stdout(), "there is no message to edit")?);
        };
        let text = match text {
            "" => self.input.edit(&self.turns[last].content)?,
            text => Some(text.to_string()),
        };
        let Some(text) = text.filter(|text| !text.trim().is_empty()) else { return Ok(()) };
        self.turns.truncate(last);
        self.turns.push(Message { role: USER.into(), content: text.trim().into() });
        self.answer()
    }

    fn messages(&self) -> Vec<Message> {
        let system = self.system.iter().map(|content| Message { role: SYSTEM.into(), content: content.clone() });
        system.chain(self.turns.iter().cloned()).collect()
    }

    fn save(&self, path: &Path) -> Result<String, Failure> {
        let saved = Saved { model: self.loaded.model.name.clone(), messages: self.messages() };
        let json = serde_json::to_string_pretty(&saved).map_err(io::Error::other)?;
        fs::write(path, json + "\n").map_err(|source| Failure::File { path: path.into(), source })?;
        Ok(format!("{} messages written to {}", saved.messages.len(), path.display()))
    }

    fn load(&mut self, path: &Path) -> Result<String, Failure> {
        let wrong = |why: String| {
            let expected = "expected a conversation written by /save: {\"messages\": [{\"role\": …, \"content\": …}]}";
            Failure::Usage(format!("{}: {why}; {expected}", path.display()))
        };
        let saved: Saved = serde_json::from_str(&text_file(path)?).map_err(|e| wrong(e.to_string()))?;
        let mut messages = saved.messages;
        let has_system = messages.first().is_some_and(|message| message.role == SYSTEM);
        let system = has_system.then(|| messages.remove(0).content);
        if let Some(other) = messages.iter().find(|message| message.role != USER && message.role != ASSISTANT) {
            return Err(wrong(format!("found a message of {:?}", other.role)));
        }
        (self.system, self.turns) = (system, messages);
        Ok(format!("{} messages read from {}", self.turns.len(), path.display()))
    }

    fn load_model(&mut self, source: &str) -> Result<String, Failure> {
        let args = load::resolve_source(&self.model_args, Path::new(source))?;
        self.loaded = Loaded::new(&args, self.args, self.pool)?;
        self.model_args = args;
        Ok(format!("loaded {}", self.loaded.name()))
    }

    /// Generates the answer to the conversation so far.
    fn answer(&mut self) -> Result<(), Failure> {
        let tokens = match self.prompt() {
            Ok(tokens) => tokens,
            Err(refused @ Failure::Template(_)) => return self.unanswered(refused),
            Err(e) => return Err(e),
        };
        self.loaded.sampling.seed = self.seed.unwrap_or_else(random_seed);
        let is_terminal = self.input.is_terminal() && stdout().is_terminal();
        let Loaded { model, engine, sampling, .. } = &mut self.loaded;
        let left = tokens_left(model, engine.options().n_ctx, tokens.len());
        let max_tokens = self.args.max_tokens.map(|n| n.min(left));
        let (sampling, speculation) = (sampling.clone(), self.args.draft.speculation(Vec::new()));
        let (seed, is_greedy) = (sampling.seed, sampling.temperature == 0.0);
        let request = Request { sampling, max_tokens, speculation, ..Request::new(tokens) };
        let id = match engine.submit(request) {
            Ok(id) => id,
            Err(e) => return self.unanswered(e.into()),
        };
        self.seed_is_used = true;
        self.stop.store(false, Ordering::Relaxed);
        let (start, mut first) = (Instant::now(), None);
        let mut answer = Answer::default();
        let mut wrap = Wrap::new(is_terminal.then(input::width).flatten());
        let mut out = stdout().lock();
        while answer.finish.is_none() && !self.stop.load(Ordering::Relaxed) {
            let (mut failed, begin) = (Ok(()), Instant::now());
            engine.step(self.cpu, self.pool, &mut |event| {
                let text = wrap.push(&answer.take(event));
                if failed.is_ok() {
                    failed = out.write_all(text.as_bytes()).and_then(|()| out.flush());
                }
            });
            failed?;
            if !answer.tokens.is_empty() {
                first.get_or_insert_with(Instant::now);
            }
            engine.record_step_time(begin.elapsed().as_secs_f32());
        }
        engine.cancel(id);
        writeln!(out, "{}", wrap.finish())?;
        drop(out);
        if let Some(fault) = answer.fault() {
            return self.unanswered(fault);
        }
        if self.stats {
            let (n, end) = (answer.tokens.len(), Instant::now());
            let decode = (end - first.unwrap_or(end)).as_secs_f64();
            let (wait, rate) =
                ((first.unwrap_or(end) - start).as_secs_f64(), n.saturating_sub(1) as f64 / decode.max(1e-9));
            let seed = if is_greedy { String::new() } else { format!(" | seed {seed}") };
            remark(format_args!("{n} tokens, {rate:.1} tok/s, first after {wait:.2} s{seed}"));
        }
        self.turns.push(Message { role: ASSISTANT.into(), content: answer.text });
        Ok(())
    }

    /// Removes the last message and reports the error, which ends a conversation that is not interactive.
    fn unanswered(&mut self, why: Failure) -> Result<(), Failure> {
        self.turns.pop();
        self.report(Err(why))
    }

    /// The tokens of the conversation with the generation prompt.
    fn tokens(&self) -> Result<Vec<u32>, Failure> {
        let turns: Vec<(&str, &str)> = self.turns.iter().map(|turn| (&*turn.role, &*turn.content)).collect();
        prompt(&self.loaded.model, &self.loaded.template, self.system.as_deref(), &turns)
    }

    /// The tokens of the conversation; drops the oldest turns when the context is full.
    fn prompt(&mut self) -> Result<Vec<u32>, Failure> {
        let n_ctx = self.loaded.n_ctx();
        let room = self.args.max_tokens.map_or(ROOM, |n| n.min(n_ctx / 2));
        loop {
            let tokens = self.tokens()?;
            if tokens.len() + room <= n_ctx || self.turns.len() <= 2 {
                return Ok(tokens);
            }
            self.turns.drain(..2);
            remark(format_args!("(context full: dropped the oldest question and answer)"));
        }
    }
}

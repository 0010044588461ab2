//! Chat templates: renders conversations to text with the Jinja template of a model, as Hugging Face transformers does.
//!
//! Only the template's own text, and names that it builds around roles, can become control tokens. Where text from the
//! request contains a control token or the beginning of one, its first character is replaced by a private-use
//! placeholder while the template runs, and restored afterwards. So the template may trim, cut or quote the text.
//! [`Rendered::literals`] lists the restored characters, and [`Rendered::encode`] parses no control token there.

mod builtin;
mod environment;
mod filters;
mod json;
mod messages;
mod meter;
mod methods;
mod nesting;
mod shield;
mod time;

use alloc::borrow::ToOwned;
use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::{String, ToString};
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;
use core::panic::AssertUnwindSafe;
use std::panic::catch_unwind;

use minijinja::machinery::{CompiledTemplate, Instructions, TemplateConfig, eval, make_string_output};
use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Environment, ErrorKind, Value};
use self_cell::self_cell;

pub use self::builtin::{DEFAULT_TEMPLATE, builtin_template, builtin_template_names};
pub use self::json::Json;
use self::meter::Budget;
use self::shield::Shield;
pub use self::time::Now;
use crate::tokenizer::{EncodeOptions, Tokenizer};

/// Limits of one rendering. Templates are programs from untrusted files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChatLimits {
    /// Maximal number of template instructions; default 5 million.
    pub fuel: u64,
    /// Maximal depth of macros and nested blocks; default 64.
    pub recursion: usize,
    /// Maximal bytes of rendered text; default 16 MiB.
    pub output_bytes: usize,
    /// Maximal bytes of all strings that operations read or create, plus 32 per list element; default 64 MiB. Bounds
    /// memory, and together with `fuel` time.
    pub work_bytes: u64,
}

impl Default for ChatLimits {
    fn default() -> Self {
        ChatLimits { fuel: 5_000_000, recursion: 64, output_bytes: 16 << 20, work_bytes: 64 << 20 }
    }
}

/// Why a conversation could not be rendered.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ChatError {
    /// The template has a syntax error, or fails on this conversation.
    #[error("chat template, line {line}: {message}")]
    Template {
        /// Line, from 1; 0 if it is not known.
        line: usize,
        /// The message of the template engine.
        message: String,
    },
    /// The template called `raise_exception`.
    #[error("the chat template refuses this conversation: {0}")]
    Refused(String),
    /// [`ChatRequest::continue_final_message`] is set, but the final message cannot be continued.
    #[error("the final message cannot be continued: {0}")]
    Continue(&'static str),
    /// One of [`ChatRequest::variables`] is a name that the engine sets.
    #[error("the variable {0:?} of the chat template is set from other parts of the request")]
    Reserved(String),
    /// The template exceeds a limit of [`ChatLimits`].
    #[error("the chat template exceeds the limit of {limit} {what}")]
    Limit {
        /// The quantity that is limited.
        what: &'static str,
        /// The limit.
        limit: u64,
    },
}

/// A conversation, and the other inputs of a template.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ChatRequest {
    /// Message objects with `role`, `content` (a string or an array of parts), and optionally `tool_calls`,
    /// `tool_call_id`, `name`, `reasoning_content` or others that the template reads.
    pub messages: Vec<Json>,
    /// Tools that the model may call: an array of objects as in OpenAI's API.
    pub tools: Option<Json>,
    /// Whether the text ends with the beginning of an assistant message.
    pub add_generation_prompt: bool,
    /// Whether the text ends inside the last message, the assistant's, so that the model continues it. Takes precedence
    /// over [`add_generation_prompt`](Self::add_generation_prompt).
    pub continue_final_message: bool,
    /// Further variables by name, such as `documents` or `enable_thinking`. See [`is_reserved_variable`].
    pub variables: Vec<(String, Json)>,
    /// Time for `strftime_now`. The engine reads no clock; with `None` templates have no `strftime_now`.
    pub now: Option<Now>,
}

/// Variables and functions that the engine sets. In place of them, a variable of the request would change the conversation
/// after it was checked.
const RESERVED: [&str; 18] = [
    "add_generation_prompt",
    "bos_token",
    "caller",
    "continue_final_message",
    "cycler",
    "dict",
    "eos_token",
    "joiner",
    "lipsum",
    "loop",
    "messages",
    "namespace",
    "raise_exception",
    "range",
    "self",
    "strftime_now",
    "super",
    "tools",
];

/// Whether a variable of this name is refused in [`ChatRequest::variables`]: the engine sets it.
pub fn is_reserved_variable(name: &str) -> bool {
    RESERVED.contains(&name)
}

/// A rendered conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rendered {
    /// The rendered text.
    pub text: String,
    /// Byte offsets, ascending, of characters from the request at which no control token may begin.
    pub literals: Vec<usize>,
}

impl Rendered {
    /// Encodes the text, without added special tokens: templates contain those that begin a text.
    pub fn encode(&self, tokenizer: &Tokenizer) -> Vec<u32> {
        let options = EncodeOptions { add_special: false, parse_special: true };
        tokenizer.encode_with_literals(&self.text, options, &self.literals)
    }
}

/// A compiled template. Clones share the program.
#[derive(Debug, Clone)]
pub struct ChatTemplate {
    source: String,
    program: Arc<ProgramCell>,
    limits: ChatLimits,
    /// Whether the role `developer` is one of its own; if not, it is given `system`.
    has_developer_role: bool,
    /// Names that it has for earlier reasoning.
    reasoning_names: Arc<[&'static str]>,
}

const NAME: &str = "chat";

/// The instructions of a template, instrumented by [`meter`].
struct Program<'s> {
    main: Instructions<'s>,
    blocks: BTreeMap<&'s str, Instructions<'s>>,
}

self_cell! {
    /// The program with the source that it borrows from.
    struct ProgramCell {
        owner: String,
        #[covariant]
        dependent: Program,
    }
}

impl fmt::Debug for ProgramCell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Program").finish_non_exhaustive()
    }
}

impl ChatTemplate {
    /// Compiles a Jinja template with default limits.
    ///
    /// # Errors
    /// [`ChatError`] if the template has a syntax error or is nested too deeply.
    pub fn new(source: &str) -> Result<ChatTemplate, ChatError> {
        ChatTemplate::with_limits(source, ChatLimits::default())
    }

    /// Compiles a Jinja template.
    ///
    /// # Errors
    /// [`ChatError`] if the template has a syntax error or is nested too deeply.
    pub fn with_limits(source: &str, limits: ChatLimits) -> Result<ChatTemplate, ChatError> {
        let failed = |e| failure(&e, limits);
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(failed)?;
        let accepted = without_generation_tags(&with_unix_newlines(source));
        nesting::check(&accepted, syntax.clone(), limits)?;
        let config = TemplateConfig { syntax_config: syntax, default_auto_escape: Arc::new(|_| AutoEscape::None) };
        let program = ProgramCell::try_new(accepted, |accepted| {
            let compiled = CompiledTemplate::new(NAME, accepted, &config).map_err(failed)?;
            let blocks = compiled.blocks.iter().map(|(name, block)| (*name, meter::instrument(block))).collect();
            Ok(Program { main: meter::instrument(&compiled.instructions), blocks })
        })?;
        let has_developer_role = messages::has_developer_role(source);
        let (source, program) = (source.to_owned(), Arc::new(program));
        let reasoning_names = messages::reasoning_names(&source).into();
        Ok(ChatTemplate { source, program, limits, has_developer_role, reasoning_names })
    }

    fn environment(&self, budget: &Budget) -> Environment<'static> {
        let mut env = Environment::empty();
        env.set_fuel(Some(self.limits.fuel));
        env.set_recursion_limit(self.limits.recursion);
        let operation_budget = budget.clone();
        env.set_unknown_method_callback(move |state, value, name, args| {
            meter::method(&operation_budget, value, name, args, || methods::call(state, value, name, args))
        });
        env.add_function("raise_exception", |message: String| -> Result<String, minijinja::Error> {
            Err(minijinja::Error::new(ErrorKind::InvalidOperation, format!("{RAISED}{message}")))
        });
        environment::install(&mut env, budget);
        meter::install(&mut env, budget);
        env
    }

    /// The source of the template.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Renders a conversation for a tokenizer. No text of the request becomes a control token.
    ///
    /// # Errors
    /// [`ChatError`] if the template fails, refuses the conversation or exceeds a limit.
    pub fn render(&self, request: &ChatRequest, tokenizer: &Tokenizer) -> Result<Rendered, ChatError> {
        if let Some((name, _)) = request.variables.iter().find(|(name, _)| is_reserved_variable(name)) {
            return Err(ChatError::Reserved(name.clone()));
        }
        let messages = messages::prepare(request, self.has_developer_role, &self.reasoning_names)?;
        match self.render_messages(request, &messages, tokenizer) {
            Err(refused @ ChatError::Refused(_)) => match messages::merge_reasoning(&messages) {
                Some(merged) => self.render_messages(request, &merged, tokenizer).map_err(|_| refused),
                None => Err(refused),
            },
            result => result,
        }
    }

    fn render_messages(
        &self,
        request: &ChatRequest,
        messages: &[Json],
        tokenizer: &Tokenizer,
    ) -> Result<Rendered, ChatError> {
        let strings = messages.iter().chain(&request.tools);
        let shield = Shield::new(tokenizer, strings.chain(request.variables.iter().map(|(_, value)| value)));
        let token = |id: Option<u32>| {
            let text = id.and_then(|id| tokenizer.token_text(id)).unwrap_or_default();
            Value::from(String::from_utf8_lossy(text).into_owned())
        };
        let mut context: Vec<(String, Value)> = [
            ("bos_token", token(tokenizer.bos())),
            ("eos_token", token(tokenizer.eos())),
            ("messages", Value::from_iter(messages.iter().map(|message| shield.value(message)))),
            ("tools", request.tools.as_ref().map_or(Value::from(()), |tools| shield.value(tools))),
            ("documents", Value::from(())),
            ("add_generation_prompt", Value::from(request.add_generation_prompt && !request.continue_final_message)),
        ]
        .map(|(name, value)| (name.to_string(), value))
        .into();
        context.extend(request.variables.iter().map(|(name, value)| (name.clone(), shield.value(value))));
        if let Some(now) = request.now {
            context.push(("strftime_now".to_string(), Value::from_function(move |format: String| now.format(&format))));
        }
        let budget = Budget::new(self.limits.work_bytes);
        let env = self.environment(&budget);
        let mut text = String::new();
        let mut out = make_string_output(&mut text);
        // the template engine may panic on some expressions
        let render = AssertUnwindSafe(|| {
            let Program { main, blocks } = self.program.borrow_dependent();
            eval(&env, main, Value::from_pairs(context), blocks, &mut out, AutoEscape::None).map(|_| ())
        });
        let result = catch_unwind(render).map_err(|_| {
            let message = "the template engine panicked on an expression".to_string();
            ChatError::Template { line: 0, message }
        })?;
        if budget.is_exhausted() {
            return Err(ChatError::Limit { what: "bytes of work", limit: self.limits.work_bytes });
        }
        result.map_err(|e| failure(&e, self.limits))?;
        if text.len() > self.limits.output_bytes {
            return Err(ChatError::Limit { what: "bytes of text", limit: self.limits.output_bytes as u64 });
        }
        let rendered = shield.restore(&text);
        if request.continue_final_message { messages::truncate_at_mark(rendered) } else { Ok(rendered) }
    }
}

/// Prefix of the error messages of `raise_exception`.
const RAISED: &str = "raised: ";

fn failure(error: &minijinja::Error, limits: ChatLimits) -> ChatError {
    if error.kind() == ErrorKind::OutOfFuel {
        return ChatError::Limit { what: "instructions", limit: limits.fuel };
    }
    match error.detail().and_then(|detail| detail.strip_prefix(RAISED)) {
        Some(message) => ChatError::Refused(message.to_owned()),
        None => {
            let detail = error.detail().map_or(String::new(), |detail| format!(": {detail}"));
            ChatError::Template { line: error.line().unwrap_or(0), message: format!("{}{detail}", error.kind()) }
        }
    }
}

/// Converts line ends to `\n`, as jinja2 does.
fn with_unix_newlines(source: &str) -> String {
    source.replace("\r\n", "\n").replace('\r', "\n")
}

/// Replaces `{% generation %}` by a condition that is always true. The tag is an extension of transformers that marks
/// training text and does not change the rendered text.
fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some((before, tag)) = rest.split_once("{%") {
        let word = tag.trim_start_matches(['-', '+']).trim_start();
        let head = &tag[..tag.len() - word.len()];
        out.push_str(before);
        out.push_str("{%");
        out.push_str(head);
        let names = [("generation", "if true"), ("endgeneration", "endif")];
        let found = names.into_iter().find_map(|(name, plain)| {
            let after = word.strip_prefix(name)?;
            after.trim_start_matches(['-', '+', ' ', '\n', '\t']).starts_with("%}").then_some((plain, after))
        });
        rest = match found {
            Some((plain, after)) => {
                out.push_str(plain);
                after
            }
            None => word,
        };
    }
    out.push_str(rest);
    out
}

//! Structured output: compiles JSON schemas, regular expressions, choices, grammars and tool calls with `llguidance` to a
//! [`Constraint`], which tells the engine the allowed tokens of each step.

mod annotations;
mod calls;
#[cfg(test)]
mod dead_ends;
mod gbnf;
mod intersections;
mod productive;
mod schema;
#[cfg(test)]
mod speculation;
#[cfg(test)]
pub(crate) mod tests;
mod tools_size;

use alloc::boxed::Box;
use alloc::format;
use alloc::string::{String, ToString};
use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;
use core::fmt;
use core::panic::AssertUnwindSafe;
use core::sync::atomic::{AtomicBool, Ordering};
use std::sync::OnceLock;

use llguidance::api::{GrammarWithLexer, ParserLimits, StopReason, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::panic_utils::catch_unwind;
use llguidance::toktrie::{ApproximateTokEnv, INVALID_TOKEN, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};
use llguidance::{ParserFactory, TokenParser};
use serde_json::{Value, json};

pub use self::calls::Calls;
pub use crate::grammar_source::GrammarSource;
use crate::sampler::{Constraint, ConstraintError};
use crate::tokenizer::CONTROL_MARK;

/// Limits of one grammar.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Size of its text in bytes; for a schema, of its JSON.
    pub bytes: usize,
    /// Parser items per token. The lexer has four steps per item.
    pub items: usize,
}

impl Limits {
    /// For untrusted callers.
    pub const DEFAULT: Limits = Limits { bytes: 64 << 10, items: 50_000 };

    /// Stack size in bytes for compiling a grammar.
    pub fn stack(&self) -> usize {
        self.bytes.max(64 << 10).saturating_mul(1024)
    }
}

/// Symbols of a grammar after repetitions are expanded.
const MAX_SYMBOLS: usize = 100_000;
/// Lexer states per answer, 1 to 2 kB each.
const MAX_LEXER_STATES: usize = 16_384;
/// Fuel of `llguidance` for the lexer of a grammar: at most 1 s, and 150 MB.
const LEXER_FUEL: u64 = 400_000;
/// Longest token in bytes that a grammar may allow.
const MAX_TOKEN: usize = 512;
const _: () = assert!(CONTROL_MARK == TokTrie::SPECIAL_TOKEN_MARKER);
/// Whitespace in JSON: a space, or line breaks and an indentation. Models that repeat whitespace would otherwise fill the
/// answer with it.
const JSON_SPACE: &str = r"\x20|\x0A{1,2}[\x20\x09]{0,20}";
/// Maximum length in characters of an error message of `llguidance`; the middle is cut out.
const MAX_MESSAGE: usize = 500;

/// Why a constraint was not compiled.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StructureError {
    /// The schema or grammar is too long.
    #[error("has {found} bytes, expected at most {most}")]
    TooLong {
        /// Its size in bytes.
        found: usize,
        /// The limit in bytes.
        most: usize,
    },
    /// The schema or grammar is invalid, not supported, or has no valid text.
    #[error("{0}")]
    Invalid(String),
    /// The model's vocabulary cannot be used with grammars.
    #[error("is not possible with this model: its vocabulary cannot be used with grammars: {0}")]
    Vocabulary(String),
    /// The caller has stopped the compilation.
    #[error("was not compiled: the request was cancelled")]
    Stopped,
}

/// The part of a request with tools that an error is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallsPart {
    /// The parameters of the tool with this index.
    Tool(usize),
    /// All tools together.
    Tools,
    /// The constraint of answers without calls.
    Answer,
}

/// Compiles constraints for one model.
pub struct Structures {
    limits: Limits,
    /// Holds the vocabulary as a trie; built for the first constraint.
    factory: OnceLock<Result<ParserFactory, StructureError>>,
}

impl Structures {
    /// A compiler with these limits per constraint.
    pub fn new(limits: Limits) -> Structures {
        Structures { limits, factory: OnceLock::new() }
    }

    /// Compiles a constraint. `vocabulary` returns the model's
    /// [`grammar_vocabulary`](crate::tokenizer::Tokenizer::grammar_vocabulary), the same in all calls; only the first
    /// constraint calls it. Takes some 10 ms, the first time more.
    ///
    /// Recursion is bounded: 128 levels of JSON, 30 of Lark, 250 of a regular expression, and one for each rule that only
    /// names another, of at least 8 bytes of text each. [`Limits::stack`] is the stack that this needs.
    ///
    /// # Errors
    /// [`StructureError`]: what is invalid, and where.
    pub fn constraint(
        &self,
        vocabulary: &dyn Fn() -> Vec<u8>,
        source: &GrammarSource,
    ) -> Result<Arc<dyn Constraint>, StructureError> {
        self.constraint_unless(vocabulary, source, &AtomicBool::new(false))
    }

    /// As [`Structures::constraint`], until `stop` is set, which is checked between the steps of the compilation.
    ///
    /// # Errors
    /// [`StructureError`]: what is invalid, and where; or that it was stopped.
    pub fn constraint_unless(
        &self,
        vocabulary: &dyn Fn() -> Vec<u8>,
        source: &GrammarSource,
        stop: &AtomicBool,
    ) -> Result<Arc<dyn Constraint>, StructureError> {
        let go_on = || if stop.load(Ordering::Relaxed) { Err(StructureError::Stopped) } else { Ok(()) };
        go_on()?;
        let (found, most) = (source.len_bytes(), self.limits.bytes);
        if found > most {
            return Err(StructureError::TooLong { found, most });
        }
        let grammar = source.grammar()?;
        go_on()?;
        let factory = self.factory.get_or_init(|| parser_factory(&vocabulary(), self.limits)).as_ref();
        let mut parser =
            factory.map_err(Clone::clone)?.create_parser(grammar).map_err(|e| invalid(&format!("{e:#}")))?;
        go_on()?;
        parser.start_without_prompt();
        productive::check(parser.parser.grammar(), self.limits)?;
        go_on()?;
        let n_vocab = parser.token_env.tok_trie().vocab_size();
        let mut constraint = ParserConstraint(parser);
        // refuse a constraint that allows no first token
        let mut mask = vec![0; n_vocab.div_ceil(32)];
        let may_end = constraint.allow(&mut mask).map_err(|e| invalid(&e.to_string()))?;
        if !may_end && mask.iter().all(|word| *word == 0) {
            return Err(invalid(&ConstraintError::NoToken.to_string()));
        }
        Ok(Arc::new(constraint))
    }

    /// Compiles a constraint for answers with tool calls, as [`Structures::constraint`] does; with `answer`, for answers
    /// that are either calls or of that form.
    ///
    /// # Errors
    /// The part of the request that is invalid, and its error.
    pub fn calls(
        &self,
        vocabulary: &dyn Fn() -> Vec<u8>,
        calls: &Calls,
        answer: Option<&GrammarSource>,
    ) -> Result<Arc<dyn Constraint>, (CallsPart, StructureError)> {
        self.calls_unless(vocabulary, calls, answer, &AtomicBool::new(false))
    }

    /// As [`Structures::calls`], until `stop` is set.
    ///
    /// # Errors
    /// As those of [`Structures::calls`]; or that it was stopped.
    pub fn calls_unless(
        &self,
        vocabulary: &dyn Fn() -> Vec<u8>,
        calls: &Calls,
        answer: Option<&GrammarSource>,
        stop: &AtomicBool,
    ) -> Result<Arc<dyn Constraint>, (CallsPart, StructureError)> {
        let whole = answer.map_or_else(|| calls.source(), |answer| calls.or(answer.clone()));
        let error = match self.constraint_unless(vocabulary, &whole, stop) {
            Ok(constraint) => return Ok(constraint),
            Err(error) => error,
        };
        if error == StructureError::Stopped {
            return Err((CallsPart::Tools, error));
        }
        // compile the parts one by one to find the invalid one
        if let Some(answer) = answer {
            self.constraint_unless(vocabulary, answer, stop).map_err(|e| (CallsPart::Answer, e))?;
        }
        for (i, schema) in calls.schemas() {
            let schema = GrammarSource::Schema(schema.clone());
            self.constraint_unless(vocabulary, &schema, stop).map_err(|e| (CallsPart::Tool(*i), e))?;
        }
        Err((CallsPart::Tools, error))
    }
}

/// Shortens an error message of `llguidance` and removes its internal details.
fn shorten(message: &str) -> String {
    let message = message.split("\n<").next().unwrap_or_default().trim();
    let n = message.chars().count();
    if n <= MAX_MESSAGE {
        return message.into();
    }
    let half = |skip: usize| message.chars().skip(skip).take(MAX_MESSAGE / 2).collect::<String>();
    half(0) + " ... " + &half(n - MAX_MESSAGE / 2)
}

fn invalid(message: &str) -> StructureError {
    StructureError::Invalid(shorten(message))
}

impl GrammarSource {
    /// Size of its text in bytes, for [`Limits::bytes`].
    fn len_bytes(&self) -> usize {
        match self {
            GrammarSource::Schema(schema) => schema.to_string().len(),
            GrammarSource::Regex(text) => text.len(),
            GrammarSource::Choice(texts) => texts.iter().map(|text| text.len() + 1).sum(),
            GrammarSource::Lark(text, schemas) => {
                text.len() + schemas.iter().map(|s| s.to_string().len()).sum::<usize>()
            }
            GrammarSource::LarkOr(text, schemas, answer) => {
                text.len() + schemas.iter().map(|s| s.to_string().len()).sum::<usize>() + answer.len_bytes()
            }
        }
    }

    /// What of its schemas is accepted and not enforced, such as `format=phone`. A text may violate it.
    pub fn unenforced(&self) -> Vec<String> {
        let of = |schemas: &[Value]| schemas.iter().flat_map(annotations::unenforced).collect::<Vec<_>>();
        match self {
            GrammarSource::Schema(schema) => annotations::unenforced(schema),
            GrammarSource::Regex(_) | GrammarSource::Choice(_) => Vec::new(),
            GrammarSource::Lark(_, schemas) => of(schemas),
            GrammarSource::LarkOr(_, schemas, answer) => [of(schemas), answer.unenforced()].concat(),
        }
    }

    fn grammar(&self) -> Result<TopLevelGrammar, StructureError> {
        Ok(match self {
            GrammarSource::Schema(schema) => TopLevelGrammar::from_json_schema(prepare_schema(schema)?),
            GrammarSource::Regex(text) if text.is_empty() => return Err(invalid("is empty")),
            GrammarSource::Regex(text) => TopLevelGrammar::from_regex(text),
            GrammarSource::Choice(texts) if texts.is_empty() => return Err(invalid("has no texts")),
            GrammarSource::Choice(texts) => {
                let texts: Vec<String> = texts.iter().map(|text| literal(text)).collect();
                TopLevelGrammar::from_lark(format!("start: CHOICE\nCHOICE: {}", texts.join(" | ")))
            }
            GrammarSource::Lark(text, schemas) => {
                if gbnf_line(text).is_some() {
                    let text = gbnf::lark(text).map_err(|e| invalid(&format!("is no valid GBNF: {e}")))?;
                    return Ok(TopLevelGrammar::from_lark(text));
                }
                intersections::check_lark(text)?;
                lark(text, schemas)?
            }
            GrammarSource::LarkOr(text, schemas, answer) => {
                let mut whole = lark(text, schemas)?;
                // of the answer's grammars, the first is its start; callers' forms have only one
                let answer = answer.grammar()?.grammars.into_iter().take(1);
                let name = Some(calls::ANSWER.to_string());
                whole.grammars.extend(answer.map(|grammar| GrammarWithLexer { name: name.clone(), ..grammar }));
                whole
            }
        })
    }
}

/// A Lark grammar and the schemas that it refers to as `@schema_0` and so on.
fn lark(text: &str, schemas: &[Value]) -> Result<TopLevelGrammar, StructureError> {
    let mut grammars = vec![GrammarWithLexer::from_lark(text.into())];
    for (i, schema) in schemas.iter().enumerate() {
        let schema = GrammarWithLexer::from_json_schema(prepare_schema(schema)?);
        grammars.push(GrammarWithLexer { name: Some(format!("schema_{i}")), ..schema });
    }
    Ok(TopLevelGrammar { grammars, max_tokens: None })
}

/// Quotes a text as a Lark literal.
fn literal(text: &str) -> String {
    // Lark's literals are JSON's, but do not allow DEL
    Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}

/// Prepares a schema for `llguidance` and limits whitespace, unless the schema sets `x-guidance` itself.
fn prepare_schema(schema: &Value) -> Result<Value, StructureError> {
    let (mut schema, compares_keys) = match schema {
        Value::Bool(true) => (json!({}), false),
        Value::Object(_) => schema::prepare(schema)?,
        _ => return Err(invalid("is not a schema: expected an object or true")),
    };
    if schema.get("x-guidance").is_none() {
        schema["x-guidance"] = json!({ "whitespace_pattern": JSON_SPACE });
        if compares_keys {
            // a listed key written as `\u0061` would be compared as an unlisted one
            schema["x-guidance"]["json_allowed_escapes"] = "nrbtf\\\"".into();
        }
    }
    Ok(schema)
}

/// The first line that is a rule in llama.cpp's GBNF.
fn gbnf_line(text: &str) -> Option<&str> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    text.lines().map(str::trim).find(|line| {
        let rest = line.trim_start_matches(is_name);
        rest.len() < line.len() && rest.trim_start().starts_with("::=")
    })
}

/// Parses a [`grammar_vocabulary`](crate::tokenizer::Tokenizer::grammar_vocabulary): the tokens' bytes, and the ids of the
/// tokens that end an answer. `None` if the bytes are cut short.
fn parse_vocabulary(mut bytes: &[u8]) -> Option<(Vec<Vec<u8>>, Vec<u32>)> {
    let number = |bytes: &mut &[u8]| -> Option<u32> {
        let (number, rest) = bytes.split_first_chunk()?;
        *bytes = rest;
        Some(u32::from_le_bytes(*number))
    };
    let mut tokens = Vec::new();
    for _ in 0..number(&mut bytes)? {
        let len = number(&mut bytes)? as usize;
        let (token, rest) = bytes.split_at_checked(len)?;
        bytes = rest;
        // an empty token is never allowed
        let is_control = token.first() == Some(&CONTROL_MARK);
        tokens.push(if is_control || len <= MAX_TOKEN { token.to_vec() } else { Vec::new() });
    }
    let mut ends = Vec::new();
    while !bytes.is_empty() {
        ends.push(number(&mut bytes)?);
    }
    Some((tokens, ends))
}

fn parser_factory(vocabulary: &[u8], limits: Limits) -> Result<ParserFactory, StructureError> {
    let truncated = || StructureError::Vocabulary("its tokens are cut short".into());
    let (tokens, ends) = parse_vocabulary(vocabulary).ok_or_else(truncated)?;
    let factory = catch_unwind(AssertUnwindSafe(|| {
        let info = TokRxInfo::new(tokens.len() as u32, INVALID_TOKEN);
        let trie = TokTrie::from(&info, &tokens);
        let trie = if ends.is_empty() { trie } else { trie.with_eos_tokens(&ends) };
        // not canonical: the model may write a text that the grammar forces in any tokens
        let environment: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let slices = SlicedBiasComputer::general_slices();
        ParserFactory::new(&environment, InferenceCapabilities::default(), &slices)
    }));
    let mut factory = factory.map_err(|e| StructureError::Vocabulary(shorten(&format!("{e:#}"))))?;
    factory.quiet();
    *factory.limits_mut() = ParserLimits {
        initial_lexer_fuel: LEXER_FUEL,
        step_max_items: limits.items,
        step_lexer_fuel: 4 * limits.items as u64,
        max_lexer_states: MAX_LEXER_STATES,
        max_grammar_size: MAX_SYMBOLS,
        verbose_errors: false,
        ..ParserLimits::default()
    };
    Ok(factory)
}

/// The parser's state after the tokens of an answer.
struct ParserConstraint(TokenParser);

impl fmt::Debug for ParserConstraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ParserConstraint").field("tokens", &self.0.num_tokens()).finish()
    }
}

impl ParserConstraint {
    /// Why the parser stopped. Its own messages are not passed on: they may contain text of the answer.
    fn error(&self) -> ConstraintError {
        match self.0.stop_reason() {
            StopReason::LexerTooComplex | StopReason::ParserTooComplex => ConstraintError::TooComplex,
            _ => ConstraintError::Failed,
        }
    }
}

impl Constraint for ParserConstraint {
    fn fork(&self) -> Box<dyn Constraint> {
        // with its caches: whether a token exceeds the limits must not depend on other answers
        Box::new(ParserConstraint(self.0.deep_clone()))
    }

    fn allow(&mut self, mask: &mut [u32]) -> Result<bool, ConstraintError> {
        let parser = &mut self.0;
        match catch_unwind(AssertUnwindSafe(|| parser.compute_mask())) {
            Ok(allowed) => mask.iter_mut().zip(allowed.as_slice()).for_each(|(to, from)| *to = *from),
            // no token is allowed
            Err(_) if self.0.stop_reason() == StopReason::NoExtensionBias => {}
            Err(_) => return Err(self.error()),
        }
        Ok(self.0.is_accepting())
    }

    fn accept(&mut self, token: u32) -> Result<bool, ConstraintError> {
        let parser = &mut self.0;
        let is_complete = catch_unwind(AssertUnwindSafe(|| {
            parser.consume_token(token)?;
            parser.check_stop()
        }));
        is_complete.map_err(|_| self.error())
    }
}

//! Answers that follow a schema, an expression or a grammar: from what a caller wants to what the engine asks token by
//! token. `llguidance` reads the grammars and parses the texts.

mod calls;
#[cfg(test)]
mod dead_ends;
mod productive;
mod schema;

use alloc::boxed::Box;
use alloc::format;
use alloc::string::{String, ToString};
use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;
use core::fmt;
use core::panic::AssertUnwindSafe;
use std::sync::OnceLock;

use llguidance::api::{GrammarWithLexer, ParserLimits, StopReason, TopLevelGrammar};
use llguidance::earley::SlicedBiasComputer;
use llguidance::panic_utils::catch_unwind;
use llguidance::toktrie::{ApproximateTokEnv, INVALID_TOKEN, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};
use llguidance::{ParserFactory, TokenParser};
use serde_json::{Value, json};

pub use self::calls::{CALL_CLOSE, CALL_OPEN, Calls};
pub use crate::form::Form;
use crate::sampler::{Constraint, ConstraintError};
use crate::tokenizer::CONTROL_MARK;

/// How much a grammar may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of its text; of a schema, those of its JSON.
    pub bytes: usize,
    /// Items of the parser for one token. The lexer may spend four steps for each.
    pub items: usize,
}

impl Limits {
    /// For texts of callers who are not trusted.
    pub const DEFAULT: Limits = Limits { bytes: 64 << 10, items: 50_000 };

    /// Bytes of the stack that reading a grammar may take.
    pub fn stack(&self) -> usize {
        self.bytes.max(64 << 10).saturating_mul(1024)
    }
}

/// Symbols of a grammar when repetitions are written out.
const MAX_SYMBOLS: usize = 100_000;
/// States of an answer's lexer, of 1 to 2 kB each.
const MAX_LEXER_STATES: usize = 16_384;
/// Longest token that a grammar may use; others are never allowed.
const MAX_TOKEN: usize = 512;
const _: () = assert!(CONTROL_MARK == TokTrie::SPECIAL_TOKEN_MARKER);
/// White space in JSON: where there may be any, a space, or line ends and an indentation. Models that find no end to
/// white space would fill an answer with it.
const JSON_SPACE: &str = r"\x20|\x0A{1,2}[\x20\x09]{0,20}";
/// Characters of a message about a grammar, half of them from its beginning.
const MAX_MESSAGE: usize = 500;

/// Why there is no constraint for a form.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum StructureError {
    /// Its text is too long.
    #[error("has {found} bytes, expected at most {most}")]
    TooLong {
        /// Bytes of the text.
        found: usize,
        /// Bytes that it may have.
        most: usize,
    },
    /// It says nothing that an answer can follow.
    #[error("{0}")]
    Wrong(String),
    /// The model's vocabulary cannot be used with grammars.
    #[error("is not possible with this model: its vocabulary cannot be used with grammars: {0}")]
    Vocabulary(String),
}

/// Which part of a request that may call tools is wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallsPart {
    /// The parameters of this tool.
    Tool(usize),
    /// The tools together.
    Tools,
    /// The form of an answer that calls none.
    Answer,
}

/// Makes constraints for one model.
pub struct Structures {
    limits: Limits,
    /// The vocabulary as a tree of bytes; made for the first request that needs it.
    factory: OnceLock<Result<ParserFactory, StructureError>>,
}

impl Structures {
    /// With these limits.
    pub fn new(limits: Limits) -> Structures {
        Structures { limits, factory: OnceLock::new() }
    }

    /// A constraint for answers of the model whose [`vocabulary`](crate::tokenizer::Tokenizer::grammar_vocabulary) this is, one model in
    /// all calls. This may take some ten milliseconds, and for the first, which asks for the words, more.
    ///
    /// Depth of the stack is bounded by JSON's 128 levels, Lark's 30, an expression's 250 and, for names that stand for
    /// others, by the text: with 8 bytes for a name, by an eighth of it. [`Limits::stack`] says how much that takes.
    ///
    /// # Errors
    /// What is wrong with the form, and where.
    pub fn constraint(&self, words: &dyn Fn() -> Vec<u8>, form: &Form) -> Result<Arc<dyn Constraint>, StructureError> {
        let (found, most) = (form.bytes(), self.limits.bytes);
        if found > most {
            return Err(StructureError::TooLong { found, most });
        }
        let grammar = form.grammar()?;
        let made = self.factory.get_or_init(|| factory(&words(), self.limits)).as_ref();
        let mut parser = made.map_err(Clone::clone)?.create_parser(grammar).map_err(|e| wrong(&format!("{e:#}")))?;
        parser.start_without_prompt();
        productive::check(parser.parser.grammar(), self.limits)?;
        let n_vocab = parser.token_env.tok_trie().vocab_size();
        let mut grammar = Grammar(parser);
        // whether an answer can begin at all
        let mut mask = vec![0; n_vocab.div_ceil(32)];
        let may_end = grammar.allow(&mut mask).map_err(|e| wrong(&e.to_string()))?;
        if !may_end && mask.iter().all(|word| *word == 0) {
            return Err(wrong(&ConstraintError::NoToken.to_string()));
        }
        Ok(Arc::new(grammar))
    }

    /// A constraint for answers that call tools, as [`Structures::constraint`]; with `answer` for those that either call
    /// tools or are of that form.
    ///
    /// # Errors
    /// What is wrong, and with which part.
    pub fn calls(
        &self,
        words: &dyn Fn() -> Vec<u8>,
        calls: &Calls,
        answer: Option<&Form>,
    ) -> Result<Arc<dyn Constraint>, (CallsPart, StructureError)> {
        let all = self.constraint(words, &answer.map_or_else(|| calls.form(), |answer| calls.or(answer.clone())));
        let error = match all {
            Ok(constraint) => return Ok(constraint),
            Err(error) => error,
        };
        if let Some(answer) = answer {
            self.constraint(words, answer).map_err(|e| (CallsPart::Answer, e))?;
        }
        for (i, schema) in calls.schemas() {
            self.constraint(words, &Form::Schema(schema.clone())).map_err(|e| (CallsPart::Tool(*i), e))?;
        }
        Err((CallsPart::Tools, error))
    }
}

/// The message of a fault, without what only its makers can use.
fn brief(message: &str) -> String {
    let message = message.split("\n<").next().unwrap_or_default().trim();
    let n = message.chars().count();
    if n <= MAX_MESSAGE {
        return message.into();
    }
    let part = |skip: usize| message.chars().skip(skip).take(MAX_MESSAGE / 2).collect::<String>();
    part(0) + " ... " + &part(n - MAX_MESSAGE / 2)
}

fn wrong(message: &str) -> StructureError {
    StructureError::Wrong(brief(message))
}

impl Form {
    fn bytes(&self) -> usize {
        match self {
            Form::Schema(schema) => schema.to_string().len(),
            Form::Regex(text) => text.len(),
            Form::Choice(texts) => texts.iter().map(|text| text.len() + 1).sum(),
            Form::Lark(text, schemas) => text.len() + schemas.iter().map(|s| s.to_string().len()).sum::<usize>(),
            Form::LarkOr(text, schemas, answer) => {
                text.len() + schemas.iter().map(|s| s.to_string().len()).sum::<usize>() + answer.bytes()
            }
        }
    }

    fn grammar(&self) -> Result<TopLevelGrammar, StructureError> {
        Ok(match self {
            Form::Schema(schema) => TopLevelGrammar::from_json_schema(spaced(schema)?),
            Form::Regex(text) if text.is_empty() => return Err(wrong("is empty")),
            Form::Regex(text) => TopLevelGrammar::from_regex(text),
            Form::Choice(texts) if texts.is_empty() => return Err(wrong("has no texts")),
            Form::Choice(texts) => {
                let texts: Vec<String> = texts.iter().map(|text| literal(text)).collect();
                TopLevelGrammar::from_lark(format!("start: CHOICE\nCHOICE: {}", texts.join(" | ")))
            }
            Form::Lark(text, schemas) => {
                if let Some(line) = gbnf_line(text) {
                    let message = "is in llama.cpp's GBNF, expected Lark's syntax, where a rule is `name: ...` and the \
                                   first is `start`";
                    return Err(wrong(&format!("{message}; found `{line}`")));
                }
                lark(text, schemas)?
            }
            Form::LarkOr(text, schemas, answer) => {
                let mut whole = lark(text, schemas)?;
                // the first is the whole answer; forms of callers have no others
                let answer = answer.grammar()?.grammars.into_iter().take(1);
                let name = Some(calls::ANSWER.to_string());
                whole.grammars.extend(answer.map(|grammar| GrammarWithLexer { name: name.clone(), ..grammar }));
                whole
            }
        })
    }
}

/// A grammar in Lark's syntax, and the schemas that it names.
fn lark(text: &str, schemas: &[Value]) -> Result<TopLevelGrammar, StructureError> {
    let mut grammars = vec![GrammarWithLexer::from_lark(text.into())];
    for (i, schema) in schemas.iter().enumerate() {
        let schema = GrammarWithLexer::from_json_schema(spaced(schema)?);
        grammars.push(GrammarWithLexer { name: Some(format!("schema_{i}")), ..schema });
    }
    Ok(TopLevelGrammar { grammars, max_tokens: None })
}

/// A text as a literal of Lark's.
fn literal(text: &str) -> String {
    // JSON's literals, but for a character that Lark has not in them
    Value::from(text).to_string().replace('\u{7f}', "\\u007f")
}

/// A schema that says which white space there may be, if it does not say so itself.
fn spaced(schema: &Value) -> Result<Value, StructureError> {
    let (mut schema, compares_keys) = match schema {
        Value::Bool(true) => (json!({}), false),
        Value::Object(_) => schema::prepared(schema)?,
        _ => return Err(wrong("is not a schema: found something else than an object")),
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

/// The first rule in GBNF, if there is one.
fn gbnf_line(text: &str) -> Option<&str> {
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
    text.lines().map(str::trim).find(|line| {
        let rest = line.trim_start_matches(is_name);
        rest.len() < line.len() && rest.trim_start().starts_with("::=")
    })
}

/// The tokens of a model, and those that end an answer; nothing if the bytes are none of
/// [`words`](crate::tokenizer::Tokenizer::words).
fn vocabulary(mut words: &[u8]) -> Option<(Vec<Vec<u8>>, Vec<u32>)> {
    let number = |bytes: &mut &[u8]| -> Option<u32> {
        let (number, rest) = bytes.split_first_chunk()?;
        *bytes = rest;
        Some(u32::from_le_bytes(*number))
    };
    let mut tokens = Vec::new();
    for _ in 0..number(&mut words)? {
        let len = number(&mut words)? as usize;
        let (word, rest) = words.split_at_checked(len)?;
        words = rest;
        // what grammars cannot use
        let is_control = word.first() == Some(&CONTROL_MARK);
        tokens.push(if is_control || len <= MAX_TOKEN { word.to_vec() } else { Vec::new() });
    }
    let mut ends = Vec::new();
    while !words.is_empty() {
        ends.push(number(&mut words)?);
    }
    Some((tokens, ends))
}

/// What makes parsers for a model.
fn factory(words: &[u8], limits: Limits) -> Result<ParserFactory, StructureError> {
    let cut = || StructureError::Vocabulary("its tokens are cut short".into());
    let (words, ends) = vocabulary(words).ok_or_else(cut)?;
    let made = catch_unwind(AssertUnwindSafe(|| {
        let info = TokRxInfo::new(words.len() as u32, INVALID_TOKEN);
        let trie = TokTrie::from(&info, &words);
        let trie = if ends.is_empty() { trie } else { trie.with_eos_tokens(&ends) };
        // not canonical: a text that the grammar forces may be in any tokens, as the model likes
        let environment: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
        let slices = SlicedBiasComputer::general_slices();
        ParserFactory::new(&environment, InferenceCapabilities::default(), &slices)
    }));
    let mut factory = made.map_err(|e| StructureError::Vocabulary(brief(&format!("{e:#}"))))?;
    factory.quiet();
    *factory.limits_mut() = ParserLimits {
        step_max_items: limits.items,
        step_lexer_fuel: 4 * limits.items as u64,
        max_lexer_states: MAX_LEXER_STATES,
        max_grammar_size: MAX_SYMBOLS,
        verbose_errors: false,
        ..ParserLimits::default()
    };
    Ok(factory)
}

/// A text on its way through a grammar.
struct Grammar(TokenParser);

impl fmt::Debug for Grammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Grammar").field("tokens", &self.0.num_tokens()).finish()
    }
}

impl Grammar {
    /// What has ended the parser. Its messages are not for the log: they may have text of the answer.
    fn why(&self) -> ConstraintError {
        match self.0.stop_reason() {
            StopReason::LexerTooComplex | StopReason::ParserTooComplex => ConstraintError::TooComplex,
            _ => ConstraintError::Failed,
        }
    }
}

impl Constraint for Grammar {
    fn fork(&self) -> Box<dyn Constraint> {
        // caches too: what a token takes, and so whether it takes too much, must not depend on other answers
        Box::new(Grammar(self.0.deep_clone()))
    }

    fn allow(&mut self, mask: &mut [u32]) -> Result<bool, ConstraintError> {
        let parser = &mut self.0;
        match catch_unwind(AssertUnwindSafe(|| parser.compute_mask())) {
            Ok(allowed) => mask.iter_mut().zip(allowed.as_slice()).for_each(|(to, from)| *to = *from),
            // nothing is allowed
            Err(_) if self.0.stop_reason() == StopReason::NoExtensionBias => {}
            Err(_) => return Err(self.why()),
        }
        Ok(self.0.is_accepting())
    }

    fn accept(&mut self, token: u32) -> Result<bool, ConstraintError> {
        let parser = &mut self.0;
        let taken = catch_unwind(AssertUnwindSafe(|| {
            parser.consume_token(token)?;
            parser.check_stop()
        }));
        taken.map_err(|_| self.why())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Whether a text is of the form, begins one, or neither.
    pub(crate) fn judge(form: &Form, text: &str) -> Option<bool> {
        let vocabulary = ApproximateTokEnv::single_byte_env();
        let mut factory = ParserFactory::new_simple(&vocabulary).expect("a factory");
        let mut parser = factory.quiet().create_parser(form.grammar().expect("a grammar")).expect("a parser");
        parser.start_without_prompt();
        let bytes: Vec<u32> = text.bytes().map(u32::from).collect();
        let taken = parser.validate_tokens_raw(&bytes).expect("an answer");
        if taken < bytes.len() {
            return None;
        }
        bytes.iter().for_each(|byte| assert_eq!(parser.consume_token(*byte).expect("a byte"), 0));
        Some(parser.is_accepting())
    }

    #[test]
    fn json_has_little_space() {
        let form = Form::Schema(
            json!({ "type": "object", "properties": { "a": { "type": "array" } }, "additionalProperties": false }),
        );
        for text in ["{}", "{\"a\":[1,2]}", "{ \"a\": [1, 2] }", "{\n  \"a\": [\n    1\n  ]\n}", "{\n\n\t\"a\" : []}"] {
            assert_eq!(judge(&form, text), Some(true), "{text}");
        }
        for text in [" {}", "{  }", "{\n\n\n}", "{\r}", "{} ", "{\"b\": 1}"] {
            assert_eq!(judge(&form, text), None, "{text}");
        }
        let own =
            json!({ "x-guidance": { "whitespace_flexible": false }, "type": "array", "items": { "type": "null" } });
        assert_eq!(judge(&Form::Schema(own.clone()), "[null,null]"), Some(true));
        assert_eq!(judge(&Form::Schema(own), "[null, null]"), None);
        // properties keep the order of the schema
        let ordered: Value =
            serde_json::from_str(r#"{"type": "object", "properties": {"z": true, "a": true}}"#).expect("JSON");
        assert_eq!(judge(&Form::Schema(ordered.clone()), r#"{"z": 1, "a": 2}"#), Some(true));
        assert_eq!(judge(&Form::Schema(ordered), r#"{"a": 2, "z": 1}"#), None);
    }

    #[test]
    fn a_key_with_escapes_does_not_bypass_its_schema() {
        let listed = json!({ "type": "object", "properties": { "a": { "type": "integer" } } });
        let closed = json!({ "type": "object", "properties": { "a": { "type": "string" } }, "required": ["a"],
            "additionalProperties": false });
        let patterns = json!({ "type": "object", "patternProperties": { "^a$": { "type": "integer" } } });
        for (schema, text, judged) in [
            (&listed, r#"{"a": 1, "b": "x"}"#, Some(true)),
            (&listed, r#"{"b": "\u0061"}"#, None),
            (&listed, r#"{"\u0061": "x"}"#, None),
            (&listed, r#"{"b\n": "\""}"#, Some(true)),
            (&patterns, r#"{"\u0061": "x"}"#, None),
            // where all keys are known, texts may have escapes for control characters
            (&closed, r#"{"a": "\u001b"}"#, Some(true)),
            (&closed, r#"{"\u0061": "x"}"#, None),
            (&json!({ "type": "object" }), r#"{"\u0061": "\u001b"}"#, Some(true)),
        ] {
            assert_eq!(judge(&Form::Schema(schema.clone()), text), judged, "{schema} {text}");
        }
    }

    #[test]
    fn a_vocabulary_that_is_cut_short_is_refused() {
        let (mut words, tokens): (_, [&[u8]; 5]) =
            (5u32.to_le_bytes().to_vec(), [b"a", b"b", b"", b"ab", b"\xFF<end>"]);
        for token in tokens {
            words.extend((token.len() as u32).to_le_bytes());
            words.extend(token);
        }
        words.extend(4u32.to_le_bytes());
        let form = Form::Regex("a+b".into());
        for n in 0..words.len() {
            // without the last number there is no end, which is a vocabulary too
            if n == words.len() - 4 {
                continue;
            }
            let made = Structures::new(Limits::DEFAULT).constraint(&|| words[..n].to_vec(), &form);
            assert!(matches!(made, Err(StructureError::Vocabulary(_))), "{n} bytes: {made:?}");
        }
        let structures = Structures::new(Limits::DEFAULT);
        let mut constraint = structures.constraint(&|| words.clone(), &form).expect("a constraint").fork();
        let allowed = |constraint: &mut dyn Constraint| {
            let mut mask = [0];
            (constraint.allow(&mut mask).expect("an answer"), mask[0] & 0b1111)
        };
        assert_eq!(allowed(&mut *constraint), (false, 0b1001));
        assert_eq!(constraint.accept(0), Ok(false));
        assert_eq!(allowed(&mut *constraint), (false, 0b1011));
        assert_eq!(constraint.accept(3), Ok(true), "complete");
    }

    #[test]
    fn grammars_of_llama_cpp_are_known() {
        for text in ["root ::= \"a\"", "# x\n  my-rule  ::= [a-z]+\nroot ::= my-rule", "root::= x"] {
            assert!(gbnf_line(text).is_some(), "{text}");
        }
        for text in ["start: \"a ::= b\"", "start: /::=/", "start: a\na: \"::=\"", "::= x"] {
            assert_eq!(gbnf_line(text), None);
        }
    }
}

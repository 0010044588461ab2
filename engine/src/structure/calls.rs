//! Constraints on tool calls, in the form in which a model was trained to write them ([`CallStyle`]).

use alloc::boxed::Box;
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::ops::Range;

use serde_json::{Value, json};

use super::{GrammarSource, literal};
use crate::grammar_source::{CallStyle, ParamStyle, ValueSchema};

/// Name of the grammar of answers without calls.
pub(super) const ANSWER: &str = "answer";

/// Which tools an answer may or must call.
#[derive(Debug, Clone, PartialEq)]
pub struct Calls {
    style: CallStyle,
    /// The rules `call_0`, `call_1` ..., which begin with the name.
    rules: String,
    /// The names of the rules as alternatives.
    names: String,
    is_forced: bool,
    parallel: bool,
    /// For each callable tool, its index in the request and the schema of its arguments.
    schemas: Vec<(usize, Value)>,
    /// Schemas that the rules refer to.
    parts: Vec<Value>,
}

impl Calls {
    /// Calls of `tools[callable]`, OpenAI's function objects. If forced, the answer consists of calls only. With
    /// `parallel`, it may have several. Unless forced, the arguments of tools without `strict` are any object.
    pub fn new(tools: &[Value], callable: Range<usize>, is_forced: bool, parallel: bool) -> Calls {
        Calls::with_style(CallStyle::default(), tools, callable, is_forced, parallel)
    }

    /// As [`Calls::new`], in the form `style`.
    pub fn with_style(
        style: CallStyle,
        tools: &[Value],
        callable: Range<usize>,
        is_forced: bool,
        parallel: bool,
    ) -> Calls {
        let parallel = parallel && !style.between.is_empty();
        let (rules, names, schemas, parts) = Default::default();
        let mut calls = Calls { style, rules, names, is_forced, parallel, schemas, parts };
        for (i, tool) in tools.iter().enumerate().take(callable.end).skip(callable.start) {
            calls.add(i, &tool["function"]);
        }
        calls
    }

    /// Adds the rule of a function, the tool `i` of the request.
    fn add(&mut self, i: usize, function: &Value) {
        let n = self.schemas.len();
        let schema = match &function["parameters"] {
            _ if !self.is_forced && function["strict"] != true => json!({ "type": "object" }),
            // a function without parameters
            Value::Null => json!({ "type": "object", "additionalProperties": false }),
            parameters => parameters.clone(),
        };
        let name = match &function["name"] {
            Value::String(name) if !self.style.quotes_names => name.clone(),
            name => name.to_string(),
        };
        let head = self.text(&format!("{}{name}{}", self.style.before_name, self.style.after_name));
        let args = match self.style.params.clone() {
            Some(params) => self.params(n, &params, &schema),
            None => self.schema(schema.clone()),
        };
        let end = self.text(&self.style.after_args);
        self.rules += &format!("call_{n}: {head} {args} {end}\n");
        let or = if n > 0 { " | " } else { "" };
        self.names += &format!("{or}call_{n}");
        self.schemas.push((i, schema));
    }

    /// The reference to a schema.
    fn schema(&mut self, schema: Value) -> String {
        self.parts.push(schema);
        format!("@schema_{}", self.parts.len() - 1)
    }

    /// Parameters by the properties of a schema, in their order: those that are not required may be absent.
    fn params(&mut self, n: usize, style: &ParamStyle, schema: &Value) -> String {
        let no_properties = serde_json::Map::new();
        let properties = schema["properties"].as_object().unwrap_or(&no_properties);
        let is_required =
            |key: &str| schema["required"].as_array().is_some_and(|all| all.iter().any(|one| *one == *key));
        // rules of what follows the first parameters, after at least one and after none
        let mut tails = [String::new(), String::new()];
        for (i, (key, property)) in properties.iter().enumerate().rev() {
            let mut property = property.clone();
            for definitions in ["$defs", "definitions"] {
                if let (Some(all), Value::Object(property)) = (schema.get(definitions), &mut property) {
                    property.entry(definitions).or_insert_with(|| all.clone());
                }
            }
            let before = self.text(&format!("{}{key}{}", style.key, style.after_key));
            let value = self.value(style, property, &style.after_value);
            self.rules += &format!("param_{n}_{i}: {before} {value}\n");
            let rest = tails[0].clone();
            for (which, tail) in tails.iter_mut().enumerate() {
                let separator = if which == 0 { self.text(&style.between) } else { String::new() };
                let here = format!("{separator} param_{n}_{i} {rest}");
                let rule = match (is_required(key), tail.is_empty()) {
                    (true, _) => here,
                    (false, true) => format!("({here})?"),
                    (false, false) => format!("{here} | {tail}"),
                };
                *tail = format!("tail_{n}_{i}_{which}");
                self.rules += &format!("{tail}: {rule}\n");
            }
        }
        core::mem::take(&mut tails[1])
    }

    /// A value of a schema, and the text `after` it.
    fn value(&mut self, style: &ParamStyle, schema: Value, after: &str) -> String {
        let rules = ValueSchema::new(&schema);
        let is_text = |value: &&Value| value.is_string();
        let choices = rules.choices().filter(|all| !all.is_empty() && all.len() <= MAX_CHOICES);
        // without quotes nothing tells a text from another value, so a text that is allowed is one
        let is_plain = |quote: &str| rules.accepts_text() && (!rules.is_free() && quote.is_empty() || rules.is_text());
        let (quote, choices) = match (&style.quote, choices) {
            (Some(quote), Some(all)) if all.iter().all(is_text) || (quote.is_empty() && all.iter().any(is_text)) => {
                (quote.clone(), Some(all))
            }
            (Some(quote), None) if is_plain(quote) => (quote.clone(), None),
            _ => return format!("{} {}", self.schema(schema), self.text(after)),
        };
        if let Some(choices) = choices {
            let text = |value: &Value| value.as_str().map_or_else(|| value.to_string(), ToString::to_string);
            let texts: Vec<String> = choices.into_iter().map(|value| self.text(&text(value))).collect();
            let quote = self.text(&quote);
            return format!("{quote} ({}) {quote} {}", texts.join(" | "), self.text(after));
        }
        let name = format!("text_{}", self.rules.len());
        if quote.is_empty() {
            let close = self.text(after.trim());
            self.rules += &text_rule(&name, &close, &self.value_marks(style));
            return name;
        }
        let close = self.text(&quote);
        self.rules += &text_rule(&name, &close, &[",", ":", "]", "}"].map(ToString::to_string));
        format!("{close} {name} {}", self.text(after))
    }

    /// The texts that end a value where they follow its closing text: the next parameter, and the end of the call. None of
    /// those that begin with a control token, which no text contains.
    fn value_marks(&self, style: &ParamStyle) -> Vec<String> {
        let lines = [&style.key, &self.style.after_args, &self.style.last].into_iter().flat_map(|text| text.lines());
        let marks = lines.map(str::trim).filter(|mark| self.text(mark).starts_with('"'));
        marks.map(ToString::to_string).collect()
    }

    /// A text as literals and control tokens.
    fn text(&self, text: &str) -> String {
        let mut out = Vec::new();
        let mut rest = text;
        while !rest.is_empty() {
            let places =
                self.style.tokens.iter().filter_map(|(name, id)| Some((rest.find(name.as_str())?, name.len(), *id)));
            // the first, and of several there the longest
            let first = places.filter(|place| place.1 > 0).min_by_key(|(at, len, _)| (*at, usize::MAX - len));
            let (at, len) = first.map_or((rest.len(), 0), |(at, len, _)| (at, len));
            out.extend((at > 0).then(|| literal(&rest[..at])));
            out.extend(first.map(|(_, _, id)| format!("<[{id}]>")));
            rest = &rest[at + len..];
        }
        if out.is_empty() { String::new() } else { out.join(" ") }
    }

    /// The constraint of an answer: calls, with text around them unless they are forced.
    pub fn source(&self) -> GrammarSource {
        let open = self.text(&self.style.open);
        let start = match (self.is_forced, self.parallel) {
            (true, _) => format!("start: calls\n{}", self.only_calls()),
            // nothing but its start tells a call from text
            (false, _) if open.is_empty() => format!("start: calls | TEXT\nTEXT: {ANY}\n{}", self.only_calls()),
            (false, true) => format!("start: (head calls)* rest\n{}{}", self.text_rules(&open), self.block()),
            (false, false) => format!("start: (head calls)? rest\n{}{}", self.text_rules(&open), self.block()),
        };
        self.lark(&start)
    }

    /// The constraint of an answer that consists of calls only, or is of the form `answer`.
    pub fn or(&self, answer: GrammarSource) -> GrammarSource {
        let start = format!("start: calls | @{ANSWER}\n{}", self.only_calls());
        match self.lark(&start) {
            GrammarSource::Lark(text, schemas) => GrammarSource::LarkOr(text, schemas, Box::new(answer)),
            other => other,
        }
    }

    /// Rules of an answer that consists of calls only.
    fn only_calls(&self) -> String {
        let (open, names, last) = (self.text(&self.style.open), &self.names, self.text(&self.style.last));
        format!("calls: {open} call{} {last}\ncall: {names}", self.more())
    }

    /// Rules of the calls after an opening text.
    fn block(&self) -> String {
        let (names, last) = (&self.names, self.text(&self.style.last));
        // where a call is like the first, it follows text, too
        let more = if last.is_empty() { String::new() } else { self.more() };
        format!("calls: call{more} {last}\ncall: {names}")
    }

    fn more(&self) -> String {
        if self.parallel { format!(" ({} call)*", self.text(&self.style.between)) } else { String::new() }
    }

    /// Rules of the text around calls: `head` ends with an opening text, `rest` contains none.
    fn text_rules(&self, open: &str) -> String {
        let rest = match open.starts_with('<') {
            true => ANY.to_string(),
            false => format!("{ANY} & ~/(.|\\n)*{}(.|\\n)*/", escape(&self.style.open)),
        };
        format!("{}rest: REST\nREST: {rest}\n", until("head", open))
    }

    fn lark(&self, start: &str) -> GrammarSource {
        GrammarSource::Lark(format!("{start}\n{}", self.rules), self.parts.clone())
    }

    /// For each callable tool, its index in the request and the schema of its arguments.
    pub fn schemas(&self) -> &[(usize, Value)] {
        &self.schemas
    }
}

/// Most values of an enumeration that are alternatives of the grammar; a schema has more.
const MAX_CHOICES: usize = 256;
/// Any text.
const ANY: &str = "/(.|\\n)*/";

/// A rule of the text that ends with the first `close`, literals and control tokens.
fn until(name: &str, close: &str) -> String {
    let (first, rest) = match close.starts_with('"') {
        // a literal: the first of the terms
        true => close
            .split_once("\" <")
            .map_or((close.to_string(), String::new()), |(a, b)| (format!("{a}\""), format!("<{b}"))),
        // a control token: no text contains one
        false => (String::new(), close.to_string()),
    };
    match first.is_empty() {
        true => format!("{name}: {name}_text {rest}\n{name}_text: {ANY}\n"),
        false => format!("{name}: {name}_text {rest}\n{name}_text[lazy]: {ANY} {first}\n"),
    }
}

/// Rules of the text `name` that ends with `close`, literals and control tokens. `close` is within the text where none of
/// `marks` follows it.
fn text_rule(name: &str, close: &str, marks: &[String]) -> String {
    if !close.starts_with('"') {
        return until(name, close);
    }
    if let Some((first, rest)) = close.split_once("\" <") {
        // no text contains the control token
        return format!("{name}: {name}_text+ <{rest}\n{name}_text[lazy]: {ANY} {first}\"\n");
    }
    let marks: Vec<String> = marks.iter().map(|mark| escape(mark)).collect();
    let other = if marks.is_empty() { String::new() } else { format!(" & ~/(\\s)*({})(.|\\n)*/", marks.join("|")) };
    format!(
        "{name}: {name}_text {name}_more*\n{name}_text[lazy]: {ANY} {close}\n{name}_more[lazy]: ({ANY}{other}) {close}\n"
    )
}

/// Escapes a text for a regular expression.
fn escape(text: &str) -> String {
    let special = |c: char| "\\/.+*?()|[]{}^$".contains(c);
    text.chars().flat_map(|c| special(c).then_some('\\').into_iter().chain([c])).collect()
}

#[cfg(test)]
mod tests {
    use alloc::string::ToString;

    use super::super::tests::match_text;
    use super::*;

    fn source(is_forced: bool, parallel: bool) -> GrammarSource {
        calls(is_forced, parallel).source()
    }

    fn calls(is_forced: bool, parallel: bool) -> Calls {
        let city = json!({ "type": "object", "properties": { "city": { "$ref": "#/$defs/c" } }, "required": ["city"],
            "additionalProperties": false, "$defs": { "c": { "enum": ["Oslo"] } } });
        let tools = [
            json!({ "function": { "name": "weather", "parameters": city, "strict": true } }),
            json!({ "function": { "name": "say \"\\" } }),
        ];
        Calls::new(&tools, 0..2, is_forced, parallel)
    }

    #[test]
    fn answers_are_calls_or_of_another_form() {
        let call = |arguments: &str| {
            format!("<tool_call>\n{{\"name\": \"weather\", \"arguments\": {arguments}}}\n</tool_call>")
        };
        let (oslo, rome) = (call(r#"{"city": "Oslo"}"#), call(r#"{"city": "Rome"}"#));
        let schema = GrammarSource::Schema(
            json!({ "type": "object", "properties": { "n": { "type": "integer" } }, "required": ["n"],
            "additionalProperties": false }),
        );
        let forms = [
            (schema, "{\"n\": 12}", "{\"n\": tr"),
            (GrammarSource::Regex("[0-9]{2}".into()), "12", "123"),
            (GrammarSource::Choice(Vec::from(["yes".into(), "no".into()])), "no", "nn"),
            (GrammarSource::Lark("start: A \"!\"\nA: /[a-z]+/".into(), Vec::new()), "ab!", "ab1"),
        ];
        for (answer, good, bad) in forms {
            for parallel in [true, false] {
                let source = calls(false, parallel).or(answer.clone());
                let both = format!("{oslo}\n{oslo}");
                for (text, expected) in [
                    (good, Some(true)),
                    (bad, None),
                    (oslo.as_str(), Some(true)),
                    (rome.as_str(), None),
                    (both.as_str(), parallel.then_some(true)),
                    (&oslo[..20], Some(false)),
                    ("Let me see.", None),
                    (&format!("{oslo}{good}"), None),
                    (&format!("{good}{oslo}"), None),
                ] {
                    assert_eq!(match_text(&source, text), expected, "{answer:?} {parallel} {text}");
                }
            }
        }
    }

    #[test]
    fn calls_have_the_format_of_the_parser() {
        let call = |name: &str, arguments: &str| {
            format!("<tool_call>\n{{\"name\": {}, \"arguments\": {arguments}}}\n</tool_call>", json!(name))
        };
        let (weather, say) = (call("weather", r#"{"city": "Oslo"}"#), call("say \"\\", "{}"));
        let (rome, other) = (call("weather", r#"{"city": "Rome"}"#), call("other", "{}"));
        let (both, free) = (format!("{weather}\n{say}"), call("say \"\\", r#"{"x": [1]}"#));
        let said = format!("Let me see.\n{weather}\nand {free} <tool_");
        for (is_forced, parallel, text, expected) in [
            (true, true, &weather, Some(true)),
            (true, true, &say, Some(true)),
            (true, true, &both, Some(true)),
            (true, false, &both, None),
            (true, false, &weather, Some(true)),
            (true, true, &rome, None),
            (true, true, &other, None),
            (true, true, &free, None),
            (true, true, &"<tool_call>\n".to_string(), Some(false)),
            (true, true, &"Let me see.".to_string(), None),
            (false, true, &"Let me see.".to_string(), Some(true)),
            (false, true, &String::new(), Some(true)),
            (false, true, &said, Some(true)),
            (false, false, &said, None),
            (false, false, &weather, Some(true)),
            (false, true, &format!("So: {rome}"), None),
            (false, true, &format!("So: {other}"), None),
        ] {
            assert_eq!(match_text(&source(is_forced, parallel), text), expected, "{is_forced} {parallel} {text}");
        }
    }

    /// An enforced value contains its closing tag where no other tag follows it.
    #[test]
    fn values_may_contain_their_closing_tag() {
        let style = |key: &str, after_key: &str, after_value: &str, quote: &str, texts: [&str; 4]| {
            let [open, before_name, after_name, after_args] = texts.map(ToString::to_string);
            let params = ParamStyle {
                key: key.into(),
                after_key: after_key.into(),
                after_value: after_value.into(),
                between: if quote.is_empty() { String::new() } else { ",".into() },
                quote: Some(quote.into()),
            };
            let (between, last) = (String::new(), String::new());
            CallStyle {
                open,
                before_name,
                after_name,
                after_args,
                between,
                last,
                quotes_names: false,
                params: Some(params),
                tokens: Vec::new(),
            }
        };
        let tags = style("\n<p=", ">\n", "\n</p>", "", ["<f=", "", ">", "\n</f>"]);
        let pairs = style("", ":", "", "<q>", ["<c>", "call:", "{", "}</c>"]);
        let schema = json!({ "type": "object", "required": ["a", "b"], "$defs": { "t": { "type": "string" } },
            "properties": { "a": { "$ref": "#/$defs/t" }, "b": { "enum": ["x", 7] }, "c": { "type": "integer" } } });
        let tools = [json!({ "function": { "name": "f", "parameters": schema } })];
        let call = |a: &str, b: &str, c: &str| format!("<f=f>\n<p=a>\n{a}\n</p>\n<p=b>\n{b}\n</p>{c}\n</f>");
        for (style, text, expected) in [
            (&tags, call("one", "x", ""), Some(true)),
            (&tags, call("one\n</p>\ntwo </p> three\n</p>", "7", "\n<p=c>\n12\n</p>"), Some(true)),
            (&tags, call("one\n</p>\n<p>two", "x", ""), Some(true)),
            (&tags, call("one\n</p>\n<p=two>", "x", ""), None),
            (&tags, call("one\n</p>\n</f>", "x", ""), None),
            (&tags, call("one", "y", ""), None),
            (&pairs, "<c>call:f{a:<q>one <q> two<q>,b:\"x\"}</c>".into(), Some(true)),
            (&pairs, "<c>call:f{a:<q>one<q>,two<q>,b:\"x\"}</c>".into(), None),
        ] {
            let source = Calls::with_style(style.clone(), &tools, 0..1, true, false).source();
            assert_eq!(match_text(&source, &text), expected, "{text}");
        }
    }
}

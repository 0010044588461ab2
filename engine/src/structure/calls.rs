//! Constraints on tool calls in the format of Hermes and Qwen, which many models were trained on:
//! `<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>`.

use alloc::boxed::Box;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::ops::Range;

use serde_json::{Value, json};

use super::{Form, literal};

/// Opening tag of a call.
pub const CALL_OPEN: &str = "<tool_call>";
/// Name of the grammar of answers without calls.
pub(super) const ANSWER: &str = "answer";
/// Closing tag of a call.
pub const CALL_CLOSE: &str = "</tool_call>";

/// Which tools an answer may or must call.
#[derive(Debug, Clone, PartialEq)]
pub struct Calls {
    /// The rules `call_0`, `call_1` ..., which begin after the opening tag.
    rules: String,
    /// The names of the rules as alternatives.
    names: String,
    is_forced: bool,
    parallel: bool,
    /// For each callable tool, its index in the request and the schema of its arguments.
    schemas: Vec<(usize, Value)>,
}

impl Calls {
    /// Calls of `tools[callable]`, OpenAI's function objects. If forced, the answer consists of calls only. With
    /// `parallel`, it may have several. Unless forced, the arguments of tools without `strict` are any object.
    pub fn new(tools: &[Value], callable: Range<usize>, is_forced: bool, parallel: bool) -> Calls {
        let (mut rules, mut names, mut schemas) = (String::new(), Vec::new(), Vec::new());
        for (i, tool) in tools.iter().enumerate().take(callable.end).skip(callable.start) {
            let function = &tool["function"];
            let n = schemas.len();
            let schema = match &function["parameters"] {
                _ if !is_forced && function["strict"] != true => json!({ "type": "object" }),
                // a function without parameters
                Value::Null => json!({ "type": "object", "additionalProperties": false }),
                parameters => parameters.clone(),
            };
            schemas.push((i, schema));
            let head = literal(&format!("\n{{\"name\": {}, \"arguments\": ", function["name"]));
            rules += &format!("call_{n}: {head} @schema_{n} {}\n", literal(&format!("}}\n{CALL_CLOSE}")));
            names.push(format!("call_{n}"));
        }
        Calls { rules, names: names.join(" | "), is_forced, parallel, schemas }
    }

    /// The constraint of an answer: calls, with text around them unless they are forced.
    pub fn form(&self) -> Form {
        let (names, text) = (&self.names, text_rules());
        let start = match (self.is_forced, self.parallel) {
            (true, _) => format!("start: calls\n{}", self.only_calls()),
            (false, true) => format!("start: (head ({names}))* rest\n{text}"),
            (false, false) => format!("start: (head ({names}))? rest\n{text}"),
        };
        self.lark(&start)
    }

    /// The constraint of an answer that consists of calls only, or is of the form `answer`.
    pub fn or(&self, answer: Form) -> Form {
        let start = format!("start: calls | @{ANSWER}\n{}", self.only_calls());
        match self.lark(&start) {
            Form::Lark(text, schemas) => Form::LarkOr(text, schemas, Box::new(answer)),
            other => other,
        }
    }

    /// Rules of an answer that consists of calls only.
    fn only_calls(&self) -> String {
        let (open, names) = (literal(CALL_OPEN), &self.names);
        let more = if self.parallel { " (\"\\n\" call)*" } else { "" };
        format!("calls: call{more}\ncall: {open} ({names})")
    }

    fn lark(&self, start: &str) -> Form {
        let schemas = self.schemas.iter().map(|(_, schema)| schema.clone()).collect();
        Form::Lark(format!("{start}\n{}", self.rules), schemas)
    }

    /// For each callable tool, its index in the request and the schema of its arguments.
    pub fn schemas(&self) -> &[(usize, Value)] {
        &self.schemas
    }
}

/// Rules of the text around calls: `head` ends with an opening tag, `rest` contains none.
fn text_rules() -> String {
    let open = literal(CALL_OPEN);
    format!("head[lazy]: /(.|\\n)*/ {open}\nrest: REST\nREST: /(.|\\n)*/ & ~/(.|\\n)*{CALL_OPEN}(.|\\n)*/\n")
}

#[cfg(test)]
mod tests {
    use alloc::string::ToString;

    use super::super::tests::match_text;
    use super::*;

    fn form(is_forced: bool, parallel: bool) -> Form {
        calls(is_forced, parallel).form()
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
        let schema =
            Form::Schema(json!({ "type": "object", "properties": { "n": { "type": "integer" } }, "required": ["n"],
            "additionalProperties": false }));
        let forms = [
            (schema, "{\"n\": 12}", "{\"n\": tr"),
            (Form::Regex("[0-9]{2}".into()), "12", "123"),
            (Form::Choice(Vec::from(["yes".into(), "no".into()])), "no", "nn"),
            (Form::Lark("start: A \"!\"\nA: /[a-z]+/".into(), Vec::new()), "ab!", "ab1"),
        ];
        for (answer, good, bad) in forms {
            for parallel in [true, false] {
                let form = calls(false, parallel).or(answer.clone());
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
                    assert_eq!(match_text(&form, text), expected, "{answer:?} {parallel} {text}");
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
            assert_eq!(match_text(&form(is_forced, parallel), text), expected, "{is_forced} {parallel} {text}");
        }
    }
}

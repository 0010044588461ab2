//! Calls of tools as answers have to write them, in the form that Hermes and Qwen have taught many models:
//! `<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>`.

use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::ops::Range;

use serde_json::{Value, json};

use super::{Form, literal};

/// What a call begins with.
pub const CALL_OPEN: &str = "<tool_call>";
/// What a call ends with.
pub const CALL_CLOSE: &str = "</tool_call>";

/// How an answer has to call tools.
#[derive(Debug, Clone, PartialEq)]
pub struct Calls {
    grammar: String,
    /// Of the tools that may be called: which of the request, and the schema of its arguments.
    schemas: Vec<(usize, Value)>,
}

impl Calls {
    /// Calls of some of the tools, which are functions with names as OpenAI's clients send them: all of the answer if
    /// they are forced; several only if they may be `parallel`. Where they are not forced, the arguments of those that
    /// are not strict may be any.
    pub fn new(tools: &[Value], which: Range<usize>, is_forced: bool, parallel: bool) -> Calls {
        let (mut rules, mut names, mut schemas) = (String::new(), Vec::new(), Vec::new());
        for (i, tool) in tools.iter().enumerate().take(which.end).skip(which.start) {
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
        let (open, names) = (literal(CALL_OPEN), names.join(" | "));
        let start = match (is_forced, parallel) {
            (true, true) => format!("start: call (\"\\n\" call)*\ncall: {open} ({names})"),
            (true, false) => format!("start: {open} ({names})"),
            (false, true) => format!("start: (head ({names}))* rest\n{}", free_text()),
            (false, false) => format!("start: (head ({names}))? rest\n{}", free_text()),
        };
        Calls { grammar: format!("{start}\n{rules}"), schemas }
    }

    /// What the answer has to be.
    pub fn form(&self) -> Form {
        Form::Lark(self.grammar.clone(), self.schemas.iter().map(|(_, schema)| schema.clone()).collect())
    }

    /// Of the tools that may be called: which of the request, and the schema of its arguments.
    pub fn schemas(&self) -> &[(usize, Value)] {
        &self.schemas
    }
}

/// Rules of text with calls: up to a tag that begins one, and what has none.
fn free_text() -> String {
    let open = literal(CALL_OPEN);
    format!("head[lazy]: /(.|\\n)*/ {open}\nrest: REST\nREST: /(.|\\n)*/ & ~/(.|\\n)*{CALL_OPEN}(.|\\n)*/\n")
}

#[cfg(test)]
mod tests {
    use alloc::string::ToString;

    use super::super::tests::judge;
    use super::*;

    fn form(is_forced: bool, parallel: bool) -> Form {
        let city = json!({ "type": "object", "properties": { "city": { "$ref": "#/$defs/c" } }, "required": ["city"],
            "additionalProperties": false, "$defs": { "c": { "enum": ["Oslo"] } } });
        let tools = [
            json!({ "function": { "name": "weather", "parameters": city, "strict": true } }),
            json!({ "function": { "name": "say \"\\" } }),
        ];
        Calls::new(&tools, 0..2, is_forced, parallel).form()
    }

    #[test]
    fn calls_are_as_they_are_read() {
        let call = |name: &str, arguments: &str| {
            format!("<tool_call>\n{{\"name\": {}, \"arguments\": {arguments}}}\n</tool_call>", json!(name))
        };
        let (weather, say) = (call("weather", r#"{"city": "Oslo"}"#), call("say \"\\", "{}"));
        let (rome, other) = (call("weather", r#"{"city": "Rome"}"#), call("other", "{}"));
        let (both, free) = (format!("{weather}\n{say}"), call("say \"\\", r#"{"x": [1]}"#));
        let said = format!("Let me see.\n{weather}\nand {free} <tool_");
        for (is_forced, parallel, text, judged) in [
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
            assert_eq!(judge(&form(is_forced, parallel), text), judged, "{is_forced} {parallel} {text}");
        }
    }
}

//! Calls of tools in the text of an answer, in the form that Hermes and Qwen have taught many models:
//! `<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>`.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use starling::chat::Json;
use starling::structure::{CALL_CLOSE as CLOSE, CALL_OPEN as OPEN, Calls};
use utoipa::ToSchema;

use super::super::state::{App, fresh_name};
use super::error::ApiError;

/// A call of a tool.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub struct ToolCall {
    /// Which of the answer.
    pub index: usize,
    /// Its name, for the tool's answer.
    pub id: String,
    /// `function`.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// What is called.
    pub function: FunctionCall,
}

/// A function by name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, ToSchema)]
pub struct FunctionCall {
    /// Its name.
    pub name: String,
    /// What it is given, as a text of JSON.
    pub arguments: String,
}

/// A call as models write it.
#[derive(Deserialize)]
struct Written {
    name: String,
    #[serde(alias = "parameters")]
    arguments: Option<Value>,
}

/// What a request says of tools.
pub struct Told {
    /// Those that the model is told of.
    pub tools: Option<Json>,
    /// How the answer has to call them, if that is asked for.
    pub calls: Option<Calls>,
    /// Whether the answer is nothing but calls.
    pub is_forced: bool,
}

/// Whether the model calls, and what.
#[derive(Debug, Clone, PartialEq, Deserialize, ToSchema)]
#[serde(untagged, expecting = "expected auto, none, required, or an object that names a function")]
pub enum ToolChoice {
    /// In general.
    Mode(ToolMode),
    /// One function.
    Function {
        /// `function`.
        #[serde(rename = "type")]
        kind: ToolKind,
        /// Which.
        function: FunctionName,
    },
}

/// Whether the model calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ToolMode {
    /// As it likes.
    Auto,
    /// It is not told of tools.
    None,
    /// At least once.
    Required,
}

/// What is called.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ToolKind {
    /// A function.
    Function,
}

/// A function by its name.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, ToSchema)]
pub struct FunctionName {
    /// The name.
    pub name: String,
}

/// What a request says of tools; `parallel` is whether an answer may have several calls.
///
/// # Errors
/// What the request asks for that cannot be had.
pub fn told(app: &App, tools: Option<Value>, choice: Option<ToolChoice>, parallel: bool) -> Result<Told, ApiError> {
    let tools = match tools {
        None => Vec::new(),
        Some(Value::Array(tools)) => tools,
        Some(_) => return Err(ApiError::param("tools", "tools is not a list")),
    };
    let choice = choice.unwrap_or(ToolChoice::Mode(ToolMode::Auto));
    let is_forced = matches!(choice, ToolChoice::Mode(ToolMode::Required) | ToolChoice::Function { .. });
    if tools.is_empty() || choice == ToolChoice::Mode(ToolMode::None) {
        if is_forced {
            return Err(ApiError::param("tool_choice", "tool_choice asks for a call, but the request has no tools"));
        }
        return Ok(Told { tools: None, calls: None, is_forced: false });
    }
    for (i, tool) in tools.iter().enumerate() {
        if tool["type"] != "function" || !tool["function"]["name"].is_string() {
            let at = format!("tools[{i}]");
            return Err(ApiError::param(&at, format!("{at} is not a function with a name")));
        }
    }
    if !app.template.source().contains("tools") {
        let message = "this model's chat template does not tell of tools; see --chat-template";
        return Err(ApiError::unsupported("tools", message));
    }
    let is_strict = |tool: &Value| tool["function"]["strict"] == true;
    let named = |name: &str| tools.iter().position(|tool| tool["function"]["name"] == name);
    let calls = match choice {
        ToolChoice::Mode(ToolMode::Required) => Some(Calls::new(&tools, 0..tools.len(), true, parallel)),
        ToolChoice::Function { function, .. } => {
            let name = &function.name;
            let message = || format!("tool_choice asks for {name:?}, which is not among the tools");
            let i = named(name).ok_or_else(|| ApiError::param("tool_choice", message()))?;
            Some(Calls::new(&tools, i..i + 1, true, false))
        }
        ToolChoice::Mode(_) => tools.iter().any(is_strict).then(|| Calls::new(&tools, 0..tools.len(), false, parallel)),
    };
    let tools = serde_json::from_value(Value::Array(tools)).map_err(|e| ApiError::param("tools", e.to_string()))?;
    Ok(Told { tools: Some(tools), calls, is_forced })
}

/// Calls of an earlier answer as templates want them: with arguments that are data, not text of it.
pub fn with_data(message: &mut [(String, Json)]) {
    let calls = message.iter_mut().find(|(name, _)| name == "tool_calls");
    let Some((_, Json::Array(calls))) = calls else { return };
    for call in calls {
        let Json::Object(call) = call else { continue };
        let Some((_, Json::Object(function))) = call.iter_mut().find(|(name, _)| name == "function") else { continue };
        if let Some((_, arguments)) = function.iter_mut().find(|(name, _)| name == "arguments")
            && let Json::Str(text) = arguments
            && let Ok(data) = serde_json::from_str(text)
        {
            *arguments = data;
        }
    }
}

/// Divides the text of an answer into what is said and what is called, as it comes.
#[derive(Debug, Clone, Default)]
pub struct Divider {
    /// Text that is not known to be either; inside of a call, all of it.
    held: String,
    inside: bool,
    n_calls: usize,
}

/// New text, and new calls.
pub type Divided = (String, Vec<ToolCall>);

impl Divider {
    /// How many calls there were.
    pub fn calls(&self) -> usize {
        self.n_calls
    }

    /// Takes text.
    pub fn push(&mut self, text: &str) -> Divided {
        self.held.push_str(text);
        let (mut said, mut calls) = (String::new(), Vec::new());
        while let Some(at) = self.held.find(if self.inside { CLOSE } else { OPEN }) {
            let before = self.held[..at].to_string();
            if self.inside {
                self.held.drain(..at + CLOSE.len());
                match self.call(&before) {
                    Some(call) => calls.push(call),
                    // whatever this is, it is what the model says
                    None => said.extend([OPEN, &before, CLOSE]),
                }
            } else {
                self.held.drain(..at + OPEN.len());
                said.push_str(before.trim_end());
            }
            self.inside = !self.inside;
        }
        if !self.inside {
            let kept = kept(&self.held);
            said.extend(self.held.drain(..self.held.len() - kept));
        }
        (said, calls)
    }

    /// The end of the text.
    pub fn finish(&mut self) -> Divided {
        let held = std::mem::take(&mut self.held);
        if !std::mem::take(&mut self.inside) {
            // only white space between calls and the end says nothing
            let says = self.n_calls == 0 || !held.trim().is_empty();
            return (if says { held } else { String::new() }, Vec::new());
        }
        match self.call(&held) {
            Some(call) => (String::new(), vec![call]),
            None => (OPEN.to_string() + &held, Vec::new()),
        }
    }

    fn call(&mut self, text: &str) -> Option<ToolCall> {
        let Written { name, arguments } = serde_json::from_str(text.trim()).ok()?;
        let arguments = match arguments {
            Some(Value::String(text)) => text,
            Some(value) => value.to_string(),
            None => "{}".into(),
        };
        self.n_calls += 1;
        let function = FunctionCall { name, arguments };
        Some(ToolCall { index: self.n_calls - 1, id: fresh_name("call_"), kind: "function", function })
    }
}

/// Bytes at the end that may belong to the beginning of a call: white space, and a part of the tag.
fn kept(text: &str) -> usize {
    let tag = (1..OPEN.len()).rev().find(|n| text.ends_with(&OPEN[..*n])).unwrap_or(0);
    let before = &text[..text.len() - tag];
    tag + before.len() - before.trim_end().len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// What is said and what is called, with names and arguments.
    fn divide(pieces: &[&str]) -> (String, Vec<(String, String)>) {
        let mut divider = Divider::default();
        let (mut said, mut called) = (String::new(), Vec::new());
        let mut take = |(text, calls): Divided| {
            said.push_str(&text);
            called.extend(calls.into_iter().map(|call| (call.function.name, call.function.arguments)));
        };
        pieces.iter().for_each(|piece| take(divider.push(piece)));
        take(divider.finish());
        (said, called)
    }

    #[test]
    fn calls_are_found_and_the_rest_is_said() {
        let weather = r#"{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}"#;
        let called = |n| vec![("weather".to_string(), r#"{"city":"Oslo","days":2}"#.to_string()); n];
        let call = format!("<tool_call>\n{weather}\n</tool_call>");
        for (text, said, n) in [
            (call.clone(), "", 1),
            (format!("Let me see.\n\n{call}\n{call}\n"), "Let me see.", 2),
            // the tag that ends is often the end of the answer
            (format!("<tool_call>{weather}"), "", 1),
            (format!("{call} and more"), " and more", 1),
            ("no call < here <tool".into(), "no call < here <tool", 0),
            ("<tool_call>not JSON</tool_call> x".into(), "<tool_call>not JSON</tool_call> x", 0),
            ("<tool_call>{\"name\": 1}".into(), "<tool_call>{\"name\": 1}", 0),
            ("text \n".into(), "text \n", 0),
        ] {
            assert_eq!(divide(&[&text]), (said.to_string(), called(n)), "{text}");
        }
        let forms = [r#"{"name": "f", "parameters": {}}"#, r#"{"name": "f"}"#, r#"{"name": "f", "arguments": "{}"}"#];
        for form in forms {
            assert_eq!(divide(&["<tool_call>", form, "</tool_call>"]).1, [("f".to_string(), "{}".to_string())]);
        }
    }

    proptest! {
        /// Wherever the text is cut, the same is said and called; and what is said is text of the answer.
        #[test]
        fn the_pieces_do_not_matter(
            parts in prop::collection::vec(prop::sample::select(vec![
                "<tool_call>", "</tool_call>", "{\"name\": \"f\"}", "{\"name\": \"g\", \"arguments\": {\"é\": [1]}}",
                "héllo ", "\n", " ", "<", "<tool", "_call>", "</", "{",
            ]), 0..10),
            cut in 1usize..7,
        ) {
            let text: String = parts.concat();
            let characters: Vec<char> = text.chars().collect();
            let pieces: Vec<String> = characters.chunks(cut).map(|c| c.iter().collect()).collect();
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            prop_assert_eq!(divide(&pieces), divide(&[&text]));
            if !text.contains(OPEN) {
                prop_assert_eq!(divide(&[&text]), (text, Vec::new()));
            }
        }
    }
}

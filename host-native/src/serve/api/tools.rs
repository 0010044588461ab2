//! Calls of tools in the text of an answer, in the form that Hermes and Qwen have taught many models:
//! `<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>`.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use starling::chat::Json;
use starling::engine::FinishReason;
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
    /// How an answer calls them; nothing if there are none.
    pub calls: Option<Calls>,
    /// Whether the answer has to keep to that: a call is asked for, or a tool is strict.
    pub is_bound: bool,
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
        return Ok(Told { tools: None, calls: None, is_bound: false, is_forced: false });
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
    let is_bound = is_forced || tools.iter().any(is_strict);
    let calls = match choice {
        ToolChoice::Function { function, .. } => {
            let name = &function.name;
            let message = || format!("tool_choice asks for {name:?}, which is not among the tools");
            let i = named(name).ok_or_else(|| ApiError::param("tool_choice", message()))?;
            Calls::new(&tools, i..i + 1, true, false)
        }
        ToolChoice::Mode(_) => Calls::new(&tools, 0..tools.len(), is_forced, parallel),
    };
    let tools = serde_json::from_value(Value::Array(tools)).map_err(|e| ApiError::param("tools", e.to_string()))?;
    Ok(Told { tools: Some(tools), calls: Some(calls), is_bound, is_forced })
}

/// Checks the calls of an earlier answer, a message that stands at `at`, and makes them what templates want: with
/// arguments that are data, not text of it. Arguments that are missing, null or empty are `{}`.
///
/// # Errors
/// The part that is wrong, by its name.
pub fn check_calls(message: &mut Vec<(String, Json)>, at: &str) -> Result<(), ApiError> {
    // clients write what is not there as null
    message.retain(|(name, value)| name != "tool_calls" || *value != Json::Null);
    let Some((_, calls)) = message.iter_mut().find(|(name, _)| name == "tool_calls") else { return Ok(()) };
    let at = format!("{at}.tool_calls");
    let Json::Array(calls) = calls else { return Err(wrong(&at, "is not a list")) };
    calls.iter_mut().enumerate().try_for_each(|(i, call)| check_call(call, &format!("{at}[{i}]")))
}

fn check_call(call: &mut Json, at: &str) -> Result<(), ApiError> {
    let Json::Object(call) = call else { return Err(wrong(at, "is not an object")) };
    if let Some((_, kind)) = call.iter().find(|(name, _)| name == "type")
        && *kind != Json::Str("function".into())
        && *kind != Json::Null
    {
        return Err(wrong(&format!("{at}.type"), "is not \"function\""));
    }
    if let Some((_, id)) = call.iter().find(|(name, _)| name == "id")
        && !matches!(id, Json::Str(_) | Json::Null)
    {
        return Err(wrong(&format!("{at}.id"), "is not a string"));
    }
    let at = format!("{at}.function");
    let function = match call.iter_mut().find(|(name, _)| name == "function") {
        Some((_, Json::Object(function))) => function,
        Some(_) => return Err(wrong(&at, "is not an object")),
        None => return Err(wrong(&at, "is missing")),
    };
    match function.iter().find(|(name, _)| name == "name") {
        Some((_, Json::Str(name))) if !name.is_empty() => {}
        Some((_, Json::Str(_))) => return Err(wrong(&format!("{at}.name"), "is empty")),
        Some(_) => return Err(wrong(&format!("{at}.name"), "is not a string")),
        None => return Err(wrong(&format!("{at}.name"), "is missing")),
    }
    match function.iter_mut().find(|(name, _)| name == "arguments") {
        None => function.push(("arguments".into(), Json::Object(Vec::new()))),
        Some((_, Json::Object(_))) => {}
        Some((_, arguments @ Json::Null)) => *arguments = Json::Object(Vec::new()),
        Some((_, Json::Str(text))) if text.trim().is_empty() => *text = "{}".into(),
        Some((_, Json::Str(_))) => {}
        Some(_) => return Err(wrong(&format!("{at}.arguments"), "is neither a string nor an object")),
    }
    if let Some((_, arguments)) = function.iter_mut().find(|(name, _)| name == "arguments")
        && let Json::Str(text) = arguments
        && let Ok(data) = serde_json::from_str(text)
    {
        *arguments = data;
    }
    Ok(())
}

fn wrong(at: &str, what: &str) -> ApiError {
    ApiError::param(at, format!("{at} {what}"))
}

/// Whether an answer that ended so may have been in the middle of something.
pub fn is_cut(reason: Option<FinishReason>) -> bool {
    !matches!(reason, Some(FinishReason::StopToken(_) | FinishReason::Complete))
}

/// Divides the text of an answer into what is said and what is called, as it comes.
#[derive(Debug, Clone, Default)]
pub struct Divider {
    /// Text that is not known to be either; inside of a call, all of it.
    held: String,
    inside: bool,
    n_calls: usize,
    /// Text that does not begin with a call has none: it is of a form of its own, which may spell the tags.
    is_formed: bool,
    /// That such a text has begun.
    is_text: bool,
}

/// New text, and new calls.
pub type Divided = (String, Vec<ToolCall>);

impl Divider {
    /// For answers that are either calls or, if they are `formed`, a text of a form that may spell their tags.
    pub fn new(is_formed: bool) -> Divider {
        Divider { is_formed, ..Divider::default() }
    }

    /// How many calls there were.
    pub fn calls(&self) -> usize {
        self.n_calls
    }

    /// Takes text.
    pub fn push(&mut self, text: &str) -> Divided {
        self.held.push_str(text);
        let (mut said, mut calls) = (String::new(), Vec::new());
        if self.is_formed && !self.is_text && !self.inside && self.n_calls == 0 {
            let n = self.held.len().min(OPEN.len());
            self.is_text = self.held.as_bytes()[..n] != OPEN.as_bytes()[..n];
        }
        if self.is_text {
            return (std::mem::take(&mut self.held), calls);
        }
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

    /// The end of the text. If it is `cut`, a call that is not complete, or text that may begin one, is dropped.
    pub fn finish(&mut self, cut: bool) -> Divided {
        let held = std::mem::take(&mut self.held);
        if std::mem::take(&mut self.inside) {
            let tag = beginning(CLOSE, &held);
            return match self.call(&held[..held.len() - tag]) {
                Some(call) => (String::new(), vec![call]),
                None if cut => (String::new(), Vec::new()),
                None => (OPEN.to_string() + &held, Vec::new()),
            };
        }
        let tag = beginning(OPEN, &held);
        let said = if cut && tag > 0 { held[..held.len() - tag].trim_end() } else { &held };
        // only white space between calls and the end says nothing
        let says = self.n_calls == 0 || !said.trim().is_empty();
        (if says { said.to_string() } else { String::new() }, Vec::new())
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
    let tag = beginning(OPEN, text);
    let before = &text[..text.len() - tag];
    tag + before.len() - before.trim_end().len()
}

/// Bytes at the end of a text that are the beginning of a tag.
fn beginning(tag: &str, text: &str) -> usize {
    (1..tag.len()).rev().find(|n| text.ends_with(&tag[..*n])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// What is said and what is called, with names and arguments.
    fn divide(pieces: &[&str]) -> (String, Vec<(String, String)>) {
        divided(Divider::default(), pieces, false)
    }

    fn divided(mut divider: Divider, pieces: &[&str], cut: bool) -> (String, Vec<(String, String)>) {
        let (mut said, mut called) = (String::new(), Vec::new());
        let mut take = |(text, calls): Divided| {
            said.push_str(&text);
            called.extend(calls.into_iter().map(|call| (call.function.name, call.function.arguments)));
        };
        pieces.iter().for_each(|piece| take(divider.push(piece)));
        take(divider.finish(cut));
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

    #[test]
    fn a_cut_call_is_not_said() {
        let whole = "Hm.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>";
        for n in 1..whole.len() {
            let (said, calls) = divided(Divider::default(), &[&whole[..n]], true);
            assert!("Hm.\n".starts_with(&said), "{n}: {said:?}");
            assert_eq!(calls.len(), usize::from(n >= whole.len() - CLOSE.len() - 1), "{n}");
        }
        // what the model ends itself is what it says
        assert_eq!(divide(&["a <tool_call>{"]).0, "a<tool_call>{");
        assert_eq!(divide(&["a <"]).0, "a <");
    }

    #[test]
    fn a_text_of_a_form_may_spell_tags() {
        let text = "{\"a\": \"<tool_call>{\\\"name\\\": 1}</tool_call>\"}";
        let call = "<tool_call>\n{\"name\": \"f\"}\n</tool_call>";
        for n in 1..text.len() {
            assert_eq!(divided(Divider::new(true), &[&text[..n], &text[n..]], false), (text.to_string(), Vec::new()));
        }
        for n in 1..call.len() {
            let called = vec![("f".to_string(), "{}".to_string())];
            assert_eq!(divided(Divider::new(true), &[&call[..n], &call[n..]], false), (String::new(), called));
        }
        assert_eq!(divided(Divider::new(true), &["<tool"], true).0, "");
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

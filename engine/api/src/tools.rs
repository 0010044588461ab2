//! Tool calls in the text of an answer, in the format of Hermes and Qwen:
//! `<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>`.

#[cfg(feature = "forms")]
use std::ops::Range;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use starling::chat::Json;
use starling::engine::FinishReason;
#[cfg(feature = "forms")]
use starling::form::Form;

use crate::error::{ApiError, quoted};

/// Opening tag of a tool call.
const OPEN: &str = "<tool_call>";
/// Closing tag of a tool call.
const CLOSE: &str = "</tool_call>";

/// Tool call of an answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ToolCall {
    /// Position among the calls of the answer, from 0.
    pub index: usize,
    /// ID of the call, for `tool_call_id` in the message with its result.
    pub id: String,
    /// Always `function`.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// Function to call.
    pub function: FunctionCall,
}

/// Function and arguments of a tool call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct FunctionCall {
    /// Name of the function.
    pub name: String,
    /// Arguments as JSON text.
    pub arguments: String,
}

/// The JSON object between the tags of a call.
#[derive(Deserialize)]
struct CallMarkup {
    name: String,
    #[serde(alias = "parameters")]
    arguments: Option<Value>,
}

/// Tools of a request, checked against `tool_choice`.
#[derive(Debug)]
pub struct RenderedTools {
    /// Tools for the chat template; `None` if the model is to see none.
    pub tools: Option<Json>,
    /// The calls that the answer may have; `None` without tools.
    #[cfg(feature = "forms")]
    pub calls: Option<AllowedCalls>,
    /// Whether the answer is constrained to that grammar: a call is forced, or a tool is strict.
    pub is_constrained: bool,
    /// Whether the answer consists of calls only.
    pub is_forced: bool,
}

/// Tool calls that an answer may have: the arguments of `starling::structure::Calls::new`.
#[cfg(feature = "forms")]
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct AllowedCalls {
    /// Tools of the request.
    pub tools: Vec<Value>,
    /// Indices of the tools that may be called.
    #[serde(rename = "which")]
    pub callable: Range<usize>,
    /// Whether the answer consists of calls only.
    #[serde(rename = "forced")]
    pub is_forced: bool,
    /// Whether an answer may have several calls.
    pub parallel: bool,
    /// Output constraint of an answer without calls, and the path of the request field that defines it.
    pub answer: Option<(String, Form)>,
}

/// Controls tool calls.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(untagged, expecting = "expected auto, none, required, or an object that names a function")]
pub enum ToolChoice {
    /// `auto`, `none` or `required`.
    Mode(ToolMode),
    /// Calls one function.
    Function {
        /// Always `function`.
        #[serde(rename = "type")]
        kind: ToolKind,
        /// Function to call.
        function: FunctionName,
    },
}

/// Mode of tool calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum ToolMode {
    /// The model decides.
    Auto,
    /// The model does not see the tools.
    None,
    /// The answer has at least one call.
    Required,
}

/// Kind of a tool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum ToolKind {
    /// Function.
    Function,
}

/// Name of a function.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct FunctionName {
    /// The name.
    pub name: String,
}

/// Checks `tools` and `tool_choice` for a model with the chat template `template`. `parallel` allows several calls in one
/// answer.
///
/// # Errors
/// A tool that is not a function, a `tool_choice` without such a tool, a template that does not render tools.
pub fn parse_tool_choice(
    template: &str,
    tools: Option<Value>,
    choice: Option<ToolChoice>,
    parallel: bool,
) -> Result<RenderedTools, ApiError> {
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
        return Ok(RenderedTools {
            tools: None,
            #[cfg(feature = "forms")]
            calls: None,
            is_constrained: false,
            is_forced: false,
        });
    }
    for (i, tool) in tools.iter().enumerate() {
        if tool["type"] != "function" || !tool["function"]["name"].is_string() {
            let at = format!("tools[{i}]");
            return Err(ApiError::param(&at, format!("{at} is not a function with a name")));
        }
    }
    if !template.contains("tools") {
        let message = "this model's chat template does not render tools; see --chat-template";
        return Err(ApiError::unsupported("tools", message));
    }
    let is_strict = |tool: &Value| tool["function"]["strict"] == true;
    let is_constrained = is_forced || tools.iter().any(is_strict);
    let (callable, parallel) = match choice {
        ToolChoice::Function { function, .. } => {
            let name = &function.name;
            let message = || format!("tool_choice asks for {:?}, which is not among the tools", quoted(name));
            let i = tools.iter().position(|tool| tool["function"]["name"] == *name);
            let i = i.ok_or_else(|| ApiError::param("tool_choice", message()))?;
            // a function that the request names is called once
            (i..i + 1, false)
        }
        ToolChoice::Mode(_) => (0..tools.len(), parallel),
    };
    #[cfg(not(feature = "forms"))]
    if is_constrained {
        let _ = (callable, parallel);
        return Err(ApiError::unsupported("tools", "this build of Starling does not enforce tool calls"));
    }
    #[cfg(feature = "forms")]
    let calls = AllowedCalls { tools: tools.clone(), callable, is_forced, parallel, answer: None };
    let tools = serde_json::from_value(Value::Array(tools)).map_err(|e| ApiError::param("tools", e.to_string()))?;
    Ok(RenderedTools {
        tools: Some(tools),
        #[cfg(feature = "forms")]
        calls: Some(calls),
        is_constrained,
        is_forced,
    })
}

/// Checks `tool_calls` of an assistant's message and parses their arguments, which templates expect as objects. Arguments
/// that are missing, null or empty become `{}`. `at` is the path of the message, for errors.
///
/// # Errors
/// The first field that is wrong, by its path.
pub fn normalise_tool_calls(message: &mut Vec<(String, Json)>, at: &str) -> Result<(), ApiError> {
    // clients write absent calls as null
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

/// Whether an answer that ended with `reason` may have ended inside a tool call: only the model's own end does not cut.
pub fn is_truncated(reason: Option<FinishReason>) -> bool {
    !matches!(reason, Some(FinishReason::StopToken(_) | FinishReason::Complete))
}

/// IDs of tool calls: distinct within a response, and between responses whose hosts draw distinct numbers.
#[derive(Debug, Clone, Copy, Default)]
pub struct CallIds {
    first: u128,
}

impl CallIds {
    /// IDs of a response from 128 random bits.
    pub fn new(random: u128) -> CallIds {
        CallIds { first: random }
    }

    /// IDs of the choice `index` of the response: up to 2^32 calls each.
    pub fn choice(self, index: usize) -> CallIds {
        CallIds { first: self.first.wrapping_add((index as u128) << 32) }
    }

    fn id(self, call: usize) -> String {
        format!("call_{:032x}", self.first.wrapping_add(call as u128))
    }
}

/// Splits the streamed text of an answer into content and tool calls.
#[derive(Debug, Clone, Default)]
pub struct ToolCallParser {
    ids: CallIds,
    /// Buffered text: a possible start of a tag, or the text of an open call.
    buffer: String,
    in_call: bool,
    n_calls: usize,
    /// Whether text that does not start with a call has no calls: it follows a schema, and its strings may contain tags.
    has_schema: bool,
    /// Whether such a text has started.
    is_text: bool,
}

/// Content and tool calls that a piece of text completes.
pub type ParsedText = (String, Vec<ToolCall>);

impl ToolCallParser {
    /// A parser for an answer; with `has_schema`, the answer is either tool calls or text that follows a schema.
    pub fn new(has_schema: bool, ids: CallIds) -> ToolCallParser {
        ToolCallParser { ids, has_schema, ..ToolCallParser::default() }
    }

    /// Number of complete calls so far.
    pub fn n_calls(&self) -> usize {
        self.n_calls
    }

    /// Parses the next piece of text.
    pub fn push(&mut self, text: &str) -> ParsedText {
        self.buffer.push_str(text);
        let (mut content, mut calls) = (String::new(), Vec::new());
        if self.has_schema && !self.is_text && !self.in_call && self.n_calls == 0 {
            let n = self.buffer.len().min(OPEN.len());
            self.is_text = self.buffer.as_bytes()[..n] != OPEN.as_bytes()[..n];
        }
        if self.is_text {
            return (std::mem::take(&mut self.buffer), calls);
        }
        while let Some(at) = self.buffer.find(if self.in_call { CLOSE } else { OPEN }) {
            let before = self.buffer[..at].to_string();
            if self.in_call {
                self.buffer.drain(..at + CLOSE.len());
                match self.parse_call(&before) {
                    Some(call) => calls.push(call),
                    // not a call: the model's text
                    None => content.extend([OPEN, &before, CLOSE]),
                }
            } else {
                self.buffer.drain(..at + OPEN.len());
                content.push_str(before.trim_end());
            }
            self.in_call = !self.in_call;
        }
        if !self.in_call {
            let n_held = n_held(&self.buffer);
            content.extend(self.buffer.drain(..self.buffer.len() - n_held));
        }
        (content, calls)
    }

    /// Ends the text. If it is `truncated`, an incomplete call or a partial tag is dropped.
    pub fn finish(&mut self, truncated: bool) -> ParsedText {
        let held = std::mem::take(&mut self.buffer);
        if std::mem::take(&mut self.in_call) {
            let tag = partial_tag(CLOSE, &held);
            return match self.parse_call(&held[..held.len() - tag]) {
                Some(call) => (String::new(), vec![call]),
                None if truncated => (String::new(), Vec::new()),
                None => (OPEN.to_string() + &held, Vec::new()),
            };
        }
        let tag = partial_tag(OPEN, &held);
        let content = if truncated && tag > 0 { held[..held.len() - tag].trim_end() } else { &held };
        // white space after calls is not content
        let is_content = self.n_calls == 0 || !content.trim().is_empty();
        (if is_content { content.to_string() } else { String::new() }, Vec::new())
    }

    fn parse_call(&mut self, text: &str) -> Option<ToolCall> {
        let CallMarkup { name, arguments } = serde_json::from_str(text.trim()).ok()?;
        let arguments = match arguments {
            Some(Value::String(text)) => text,
            Some(value) => value.to_string(),
            None => "{}".into(),
        };
        let index = self.n_calls;
        self.n_calls += 1;
        let function = FunctionCall { name, arguments };
        Some(ToolCall { index, id: self.ids.id(index), kind: "function", function })
    }
}

/// Bytes at the end of a text that may belong to a call: white space and the start of an opening tag.
fn n_held(text: &str) -> usize {
    let tag = partial_tag(OPEN, text);
    let before = &text[..text.len() - tag];
    tag + before.len() - before.trim_end().len()
}

/// Bytes at the end of a text that are a proper prefix of a tag.
fn partial_tag(tag: &str, text: &str) -> usize {
    (1..tag.len()).rev().find(|n| text.ends_with(&tag[..*n])).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Content, and the names and arguments of calls.
    fn parse(pieces: &[&str]) -> (String, Vec<(String, String)>) {
        parse_pieces(ToolCallParser::default(), pieces, false)
    }

    fn parse_pieces(mut parser: ToolCallParser, pieces: &[&str], truncated: bool) -> (String, Vec<(String, String)>) {
        let (mut content, mut called) = (String::new(), Vec::new());
        let mut take = |(text, calls): ParsedText| {
            content.push_str(&text);
            called.extend(calls.into_iter().map(|call| (call.function.name, call.function.arguments)));
        };
        pieces.iter().for_each(|piece| take(parser.push(piece)));
        take(parser.finish(truncated));
        (content, called)
    }

    #[test]
    fn calls_are_parsed_and_the_rest_is_content() {
        let weather = r#"{"name": "weather", "arguments": {"city": "Oslo", "days": 2}}"#;
        let called = |n| vec![("weather".to_string(), r#"{"city":"Oslo","days":2}"#.to_string()); n];
        let call = format!("<tool_call>\n{weather}\n</tool_call>");
        for (text, content, n) in [
            (call.clone(), "", 1),
            (format!("Let me see.\n\n{call}\n{call}\n"), "Let me see.", 2),
            // models often end the answer in place of the closing tag
            (format!("<tool_call>{weather}"), "", 1),
            (format!("{call} and more"), " and more", 1),
            ("no call < here <tool".into(), "no call < here <tool", 0),
            ("<tool_call>not JSON</tool_call> x".into(), "<tool_call>not JSON</tool_call> x", 0),
            ("<tool_call>{\"name\": 1}".into(), "<tool_call>{\"name\": 1}", 0),
            ("text \n".into(), "text \n", 0),
        ] {
            assert_eq!(parse(&[&text]), (content.to_string(), called(n)), "{text}");
        }
        let forms = [r#"{"name": "f", "parameters": {}}"#, r#"{"name": "f"}"#, r#"{"name": "f", "arguments": "{}"}"#];
        for form in forms {
            assert_eq!(parse(&["<tool_call>", form, "</tool_call>"]).1, [("f".to_string(), "{}".to_string())]);
        }
    }

    #[test]
    fn a_truncated_call_is_dropped() {
        let whole = "Hm.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>";
        for n in 1..whole.len() {
            let (content, calls) = parse_pieces(ToolCallParser::default(), &[&whole[..n]], true);
            assert!("Hm.\n".starts_with(&content), "{n}: {content:?}");
            assert_eq!(calls.len(), usize::from(n >= whole.len() - CLOSE.len() - 1), "{n}");
        }
        // a call that the model itself leaves incomplete is content
        assert_eq!(parse(&["a <tool_call>{"]).0, "a<tool_call>{");
        assert_eq!(parse(&["a <"]).0, "a <");
    }

    #[test]
    fn text_with_a_schema_may_contain_tags() {
        let text = "{\"a\": \"<tool_call>{\\\"name\\\": 1}</tool_call>\"}";
        let call = "<tool_call>\n{\"name\": \"f\"}\n</tool_call>";
        for n in 1..text.len() {
            assert_eq!(
                parse_pieces(ToolCallParser::new(true, CallIds::default()), &[&text[..n], &text[n..]], false),
                (text.to_string(), Vec::new())
            );
        }
        for n in 1..call.len() {
            let called = vec![("f".to_string(), "{}".to_string())];
            assert_eq!(
                parse_pieces(ToolCallParser::new(true, CallIds::default()), &[&call[..n], &call[n..]], false),
                (String::new(), called)
            );
        }
        assert_eq!(parse_pieces(ToolCallParser::new(true, CallIds::default()), &["<tool"], true).0, "");
    }

    #[test]
    fn call_ids_are_distinct() {
        let call = "<tool_call>{\"name\": \"f\"}</tool_call>";
        let ids = CallIds::new(u128::MAX);
        let mut parsers = [0, 1].map(|i| ToolCallParser::new(false, ids.choice(i)));
        let calls = parsers.iter_mut().flat_map(|parser| parser.push(&call.repeat(2)).1);
        let ids: std::collections::BTreeSet<String> = calls.map(|call| call.id).collect();
        assert_eq!(ids.len(), 4);
        assert!(ids.iter().all(|id| id.len() == "call_".len() + 32));
    }

    #[cfg(feature = "structure")]
    #[test]
    fn tags_are_those_of_the_grammar() {
        assert_eq!((OPEN, CLOSE), (starling::structure::CALL_OPEN, starling::structure::CALL_CLOSE));
    }

    proptest! {
        /// Content and calls do not depend on how the text is cut into pieces.
        #[test]
        fn the_pieces_do_not_matter(
            parts in prop::collection::vec(prop::sample::select(vec![
                "<tool_call>", "</tool_call>", "{\"name\": \"f\"}", "{\"name\": \"g\", \"arguments\": {\"é\": [1]}}",
                "héllo ", "\n", " ", "<", "<tool", "_call>", "</", "{",
            ]), 0..10),
            n_chars in 1usize..7,
        ) {
            let text: String = parts.concat();
            let characters: Vec<char> = text.chars().collect();
            let pieces: Vec<String> = characters.chunks(n_chars).map(|c| c.iter().collect()).collect();
            let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
            prop_assert_eq!(parse(&pieces), parse(&[&text]));
            if !text.contains(OPEN) {
                prop_assert_eq!(parse(&[&text]), (text, Vec::new()));
            }
        }
    }
}

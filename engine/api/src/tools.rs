//! Tools of a request, and the calls of an answer.

#[cfg(feature = "grammar-sources")]
use std::ops::Range;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use starling::chat::Json;
use starling::engine::FinishReason;
#[cfg(feature = "grammar-sources")]
use starling::grammar_source::{CallStyle, GrammarSource};
use starling::model::Model;

use crate::error::{ApiError, quoted};
use crate::output::{CallIdSyntax, OutputPlan};

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

/// Part of a tool call, in a stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ToolCallDelta {
    /// Position among the calls of the answer, from 0.
    pub index: usize,
    /// ID of the call, in its first part.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// `function`, in the first part of the call.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<&'static str>,
    /// Function and new arguments.
    pub function: FunctionDelta,
}

/// Part of the function of a tool call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct FunctionDelta {
    /// Name of the function, in the first part of the call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// New part of the JSON text of the arguments.
    pub arguments: String,
}

/// Tools of a request, checked against `tool_choice`.
#[derive(Debug)]
pub struct RenderedTools {
    /// Tools for the chat template; `None` if the model is to see none.
    pub tools: Option<Json>,
    /// The same tools, for the parser of the answers.
    pub list: Option<Arc<[Value]>>,
    /// The calls that the answer may have; `None` without tools.
    #[cfg(feature = "grammar-sources")]
    pub calls: Option<AllowedCalls>,
    /// Whether the answer is constrained to that grammar: a call is forced, or a tool is strict.
    pub is_constrained: bool,
    /// Whether the answer consists of calls only.
    pub is_forced: bool,
}

/// Tool calls that an answer may have: the arguments of `starling::structure::Calls::with_style`.
#[cfg(feature = "grammar-sources")]
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
    /// Syntax of the calls.
    pub style: Box<CallStyle>,
    /// Output constraint of an answer without calls, and the path of the request field that defines it.
    pub answer: Option<(String, GrammarSource)>,
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
            list: None,
            #[cfg(feature = "grammar-sources")]
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
    #[cfg(not(feature = "grammar-sources"))]
    if is_constrained {
        let _ = (callable, parallel);
        return Err(ApiError::unsupported("tools", "this build of Starling does not enforce tool calls"));
    }
    #[cfg(feature = "grammar-sources")]
    let calls =
        AllowedCalls { tools: tools.clone(), callable, is_forced, parallel, style: Box::default(), answer: None };
    let list = Some(Arc::from(tools.clone()));
    let tools = serde_json::from_value(Value::Array(tools)).map_err(|e| ApiError::param("tools", e.to_string()))?;
    Ok(RenderedTools {
        tools: Some(tools),
        list,
        #[cfg(feature = "grammar-sources")]
        calls: Some(calls),
        is_constrained,
        is_forced,
    })
}

/// Fills the description and the parameters that functions lack, for templates that fail without them. Returns whether one
/// was missing.
pub fn fill_tools(tools: &mut Json) -> bool {
    let Json::Array(tools) = tools else { return false };
    let mut is_filled = false;
    for tool in tools {
        let Json::Object(tool) = tool else { continue };
        let Some((_, Json::Object(function))) = tool.iter_mut().find(|(name, _)| name == "function") else { continue };
        let no_properties = || {
            let fields = [("type", Json::Str("object".into())), ("properties", Json::Object(Vec::new()))];
            Json::Object(fields.map(|(name, value)| (name.into(), value)).into())
        };
        is_filled |= fill(function, "description", || Json::Str(String::new()));
        is_filled |= fill(function, "parameters", no_properties);
        if let Some((_, Json::Object(parameters))) = function.iter_mut().find(|(name, _)| name == "parameters") {
            is_filled |= fill(parameters, "type", || Json::Str("object".into()));
            is_filled |= fill(parameters, "properties", || Json::Object(Vec::new()));
        }
    }
    is_filled
}

/// Sets a field that is absent or null.
fn fill(object: &mut Vec<(String, Json)>, name: &str, value: impl Fn() -> Json) -> bool {
    match object.iter_mut().find(|(other, _)| other == name) {
        Some((_, old @ Json::Null)) => *old = value(),
        Some(_) => return false,
        None => object.push((name.into(), value())),
    }
    true
}

impl RenderedTools {
    /// How answers are parsed that may call these tools, of a model with this chat template. Enforced calls get the form
    /// that is parsed. `ids` are those of the calls; with `has_schema`, other answers follow a schema.
    pub fn output(&mut self, model: &Model, plan: OutputPlan, ids: CallIds, has_schema: bool) -> OutputPlan {
        let _ = model;
        let plan = plan.schema(has_schema).enforced(self.is_constrained);
        #[cfg(feature = "grammar-sources")]
        if let Some(calls) = &mut self.calls {
            *calls.style = plan.call_style(&model.tokenizer);
        }
        match &self.list {
            Some(list) => plan.tools(Arc::clone(list), ids),
            None => plan,
        }
    }
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

    /// The ID of the call `call` of the function `name`.
    pub(crate) fn id(self, call: usize, source: CallIdSyntax, name: &str) -> String {
        let number = self.first.wrapping_add(call as u128);
        match source {
            CallIdSyntax::Hex => format!("call_{number:032x}"),
            CallIdSyntax::Named => format!("functions.{name}:{call}"),
            CallIdSyntax::Nine => {
                // all bits of the number reach the digits
                let mixed = (number ^ number >> 64).wrapping_mul(0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835);
                let mut rest = mixed ^ mixed >> 67;
                let digit = |rest: &mut u128| {
                    let digits = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
                    let digit = digits[(*rest % 62) as usize];
                    *rest /= 62;
                    char::from(digit)
                };
                (0..9).map(|_| digit(&mut rest)).collect()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn tools_are_filled_once() {
        let parse = |text: &str| serde_json::from_str::<Json>(text).expect("JSON");
        let mut tools = parse(
            r#"[{"type":"function","function":{"name":"f"}},
                {"type":"function","function":{"name":"g","description":null,"parameters":{"required":[]}}}]"#,
        );
        assert!(fill_tools(&mut tools));
        let filled = parse(
            r#"[{"type":"function","function":{"name":"f","description":"","parameters":{"type":"object","properties":{}}}},
                {"type":"function","function":{"name":"g","description":"","parameters":{"required":[],"type":"object","properties":{}}}}]"#,
        );
        assert_eq!(tools, filled);
        assert!(!fill_tools(&mut tools));
    }

    #[test]
    fn call_ids_are_distinct() {
        for source in [CallIdSyntax::Hex, CallIdSyntax::Nine] {
            let ids = [0, u128::MAX << 100, 1 << 64].map(CallIds::new);
            let choices = ids.iter().flat_map(|ids| (0..3).map(|choice| ids.choice(choice)));
            let all: Vec<String> = choices.flat_map(|ids| (0..3).map(move |call| ids.id(call, source, "f"))).collect();
            let n = if source == CallIdSyntax::Hex { "call_".len() + 32 } else { 9 };
            assert!(all.iter().all(|id| id.len() == n), "{all:?}");
            assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), all.len(), "{all:?}");
        }
        assert_eq!(CallIds::default().id(2, CallIdSyntax::Named, "f"), "functions.f:2");
    }
}

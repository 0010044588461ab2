//! `POST /v1/responses` and `/v1/responses/input_tokens`: requests.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use starling::chat::Json;

use super::namespaces::{flat_name, flatten};
use crate::error::{ApiError, quoted};
use crate::fields::{AssistantMessage, Fields, call, function_tool, tool_message, unread_in_result, unreadable, wrong};
use crate::openai::chat::{ChatCompletionRequest, ChatFields};
use crate::openai::options::{Options, Seed, seed};
use crate::parse_whole;
use crate::structure::{NamedSchema, OutputConstraint, ResponseFormat};
use crate::tools::{FunctionName, ToolChoice, ToolKind, ToolMode};
use crate::whole::limit;

/// Request for a response. Fields that only concern OpenAI's service (`service_tier`, `prompt_cache_key`) are accepted and
/// have no effect: the prefix cache needs no key.
#[derive(Debug, Clone, Default, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ResponsesRequest {
    /// Model name. Default: the model that the server has.
    pub model: Option<String>,
    /// Text, or a list of items: `message`, `function_call`, `function_call_output` and `reasoning`. Items of other types are
    /// skipped, and named in the response header `x-starling-skipped`. An empty list has an empty response.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Object>))]
    pub input: Option<InputItems>,
    /// System prompt.
    pub instructions: Option<String>,
    /// Functions that the model may call, alone or in tools of type `namespace`. Tools of other types are skipped, and named in
    /// the response header.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Vec<Object>>))]
    pub tools: Option<Vec<Value>>,
    /// `auto`, `none`, `required`, or `{"type": "function", "name": ...}`.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Object>))]
    pub tool_choice: Option<Value>,
    /// Allow several tool calls in one answer. Default: true.
    pub parallel_tool_calls: Option<bool>,
    /// Format of the text.
    pub text: Option<TextConfig>,
    /// Reasoning: `effort` is a variable of the chat template.
    pub reasoning: Option<ReasoningConfig>,
    /// Maximum number of tokens to generate. -1: as many as fit.
    #[serde(default, deserialize_with = "limit")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<i64>, minimum = -1))]
    pub max_output_tokens: Option<u64>,
    /// `message.output_text.logprobs` returns log-probabilities; others have no effect.
    pub include: Option<Vec<String>>,
    /// Returned with the response: of a response that is stored at most 16 strings by name.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Object>))]
    pub metadata: Option<Map<String, Value>>,
    /// Keep the response, to be continued and retrieved by its ID. Default: true if the server has a state store.
    pub store: Option<bool>,
    /// Accepted.
    pub prompt_cache_key: Option<String>,
    /// ID of the stored response that this one continues: its input and output come before `input`, without its
    /// `instructions`.
    pub previous_response_id: Option<String>,
    /// Stream the response as server-sent events.
    pub stream: Option<bool>,
    /// False: an empty response at once, as clients ask for that warm up a conversation.
    pub generate: Option<bool>,
    /// Sampling temperature, 0 to 2.
    #[cfg_attr(feature = "openapi", schema(minimum = 0, maximum = 2))]
    pub temperature: Option<f32>,
    /// Nucleus sampling.
    #[cfg_attr(feature = "openapi", schema(minimum = 0, maximum = 1))]
    pub top_p: Option<f32>,
    /// Number of most probable tokens to return for each token, 0 to 20.
    #[cfg_attr(feature = "openapi", schema(minimum = 0, maximum = 20))]
    pub top_logprobs: Option<u32>,
    /// Random seed (not OpenAI's); -1: another one for each request.
    #[serde(default, deserialize_with = "seed")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<i64>))]
    pub seed: Option<Seed>,
    /// Time limit of the request in seconds (not OpenAI's), as in `/v1/chat/completions`.
    #[cfg_attr(feature = "openapi", schema(exclusive_minimum = 0))]
    pub timeout: Option<f64>,
    /// `disabled`; `auto` is not supported: no input is cut.
    pub truncation: Option<String>,
    /// End user: the users of a tenant are scheduled in turn.
    pub user: Option<String>,
    /// End user, where `user` is not given.
    pub safety_identifier: Option<String>,
    /// Not supported.
    pub background: Option<bool>,
    /// Not supported.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Object>))]
    pub conversation: Option<Value>,
    /// Not supported: a stored prompt.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Object>))]
    pub prompt: Option<Value>,
}

parse_whole!(ResponsesRequest);

/// Input of a response.
#[derive(Debug, Clone, Deserialize)]
#[serde(untagged, expecting = "expected a string or a list of items")]
pub enum InputItems {
    /// The text of a user.
    Text(String),
    /// Items.
    Items(Vec<Json>),
}

/// Format of the text.
#[derive(Debug, Clone, Default, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TextConfig {
    /// `{"type": "text"}`, `{"type": "json_object"}`, or `{"type": "json_schema", "schema": {...}}`.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Object>))]
    pub format: Option<Value>,
    /// Accepted.
    pub verbosity: Option<String>,
}

/// Reasoning.
#[derive(Debug, Clone, Default, Deserialize, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ReasoningConfig {
    /// `none`, `minimal`, `low`, `medium`, `high` or `xhigh`.
    pub effort: Option<String>,
    /// Accepted; reasoning is returned as it is.
    pub summary: Option<String>,
}

/// Response to `POST /v1/responses/input_tokens`.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct InputTokens {
    /// Always `response.input_tokens`.
    pub object: &'static str,
    /// Tokens of the prompt.
    pub input_tokens: usize,
}

/// What a request becomes.
#[derive(Debug)]
pub struct ConvertedResponse {
    /// The request for a chat completion.
    pub chat: ChatCompletionRequest,
    /// Types of tools and items that were skipped.
    pub skipped: Vec<String>,
}

/// The include that asks for log-probabilities.
const LOGPROBS: &str = "message.output_text.logprobs";

impl ResponsesRequest {
    /// Whether the response is empty: a client only probes the server. `has_previous` says whether the request continues a
    /// response.
    pub fn is_probe(&self, has_previous: bool) -> bool {
        let is_empty = match &self.input {
            None => true,
            Some(InputItems::Text(_)) => false,
            Some(InputItems::Items(items)) => items.is_empty(),
        };
        self.generate == Some(false) || is_empty && !has_previous
    }

    /// Refuses what this server does not have.
    ///
    /// # Errors
    /// The first such field.
    pub fn check_supported(&self) -> Result<(), ApiError> {
        let is_given = |value: &Option<Value>| value.as_ref().is_some_and(|value| !value.is_null());
        let refused = [
            ("background", self.background == Some(true), "this server answers within the request"),
            ("conversation", is_given(&self.conversation), "this server stores no conversations"),
            ("prompt", is_given(&self.prompt), "this server stores no prompts"),
            ("truncation", self.truncation.as_deref() == Some("auto"), "no input is cut; expected disabled"),
        ];
        match refused.into_iter().find(|(_, is_given, _)| *is_given) {
            Some((name, _, why)) => Err(ApiError::unsupported(name, format!("{name}: {why}"))),
            None => Ok(()),
        }
    }

    /// The request for a chat completion. The items of a previous response are `before`.
    ///
    /// # Errors
    /// The first field that is wrong or not supported, by its path.
    pub fn into_chat(self, before: Vec<Json>) -> Result<ConvertedResponse, ApiError> {
        self.check_supported()?;
        let mut skipped = Vec::new();
        let tools = tools(self.tools.unwrap_or_default(), &mut skipped)?;
        let tool_choice = self.tool_choice.map(|choice| tool_choice(&choice)).transpose()?.flatten();
        let mut messages: Vec<Json> = Vec::new();
        if let Some(instructions) = self.instructions.filter(|text| !text.is_empty()) {
            messages.push(Json::message("system", &instructions));
        }
        let new = match self.input {
            None => Vec::new(),
            Some(InputItems::Text(text)) => vec![Json::message("user", &text)],
            Some(InputItems::Items(items)) => items,
        };
        let before = before.into_iter().enumerate().map(|(i, item)| (format!("previous_response_id: item {i}"), item));
        let new = new.into_iter().enumerate().map(|(i, item)| (format!("input[{i}]"), item));
        add_items(before.chain(new), &mut messages, &mut skipped)?;
        if messages.is_empty() {
            return Err(wrong("input", "has no message"));
        }
        let logprobs = self.include.is_some_and(|names| names.iter().any(|name| name == LOGPROBS));
        let effort = self.reasoning.and_then(|reasoning| reasoning.effort);
        let kwargs = effort.map(|effort| {
            let on = Json::Bool(effort != "none");
            Json::Object(vec![("reasoning_effort".into(), Json::Str(effort)), ("enable_thinking".into(), on)])
        });
        let chat = ChatFields {
            messages,
            logprobs: (logprobs || self.top_logprobs.is_some_and(|n| n > 0)).then_some(true),
            top_logprobs: self.top_logprobs.filter(|n| *n > 0),
            chat_template_kwargs: kwargs,
            tool_choice: tool_choice.filter(|choice| !tools.is_empty() || *choice != ToolChoice::Mode(ToolMode::Auto)),
            tools: (!tools.is_empty()).then_some(Value::Array(tools)),
            parallel_tool_calls: self.parallel_tool_calls,
            ..ChatFields::default()
        };
        let options = Options {
            model: self.model,
            stream: self.stream,
            max_tokens: self.max_output_tokens,
            temperature: self.temperature,
            top_p: self.top_p,
            seed: self.seed,
            timeout: self.timeout,
            user: self.user.or(self.safety_identifier),
            ..Options::default()
        };
        let response_format = self.text.and_then(|text| text.format).map(format).transpose()?;
        let constraint = OutputConstraint { response_format, ..OutputConstraint::default() };
        Ok(ConvertedResponse { chat: ChatCompletionRequest { options, constraint, chat }, skipped })
    }
}

/// Functions, those of namespaces under flat names; tools of other types are skipped.
fn tools(tools: Vec<Value>, skipped: &mut Vec<String>) -> Result<Vec<Value>, ApiError> {
    let mut functions = Vec::new();
    for (at, mut tool) in flatten(tools)? {
        match tool["type"].as_str() {
            Some("function") => {}
            Some(kind) => {
                skipped.push(quoted(kind));
                continue;
            }
            None => return Err(wrong(&format!("{at}.type"), "is missing or not a string")),
        }
        if !tool["name"].is_string() {
            return Err(wrong(&format!("{at}.name"), "is missing or not a string"));
        }
        let mut take = |name: &str| tool.get_mut(name).map_or(Value::Null, Value::take);
        // OpenAI's default is strict, but its clients say so where they rely on it
        functions.push(function_tool(take("name"), take("description"), take("parameters"), take("strict")));
    }
    Ok(functions)
}

/// The choice; `None` for one that names a tool of another type, which is skipped as its tool is.
fn tool_choice(choice: &Value) -> Result<Option<ToolChoice>, ApiError> {
    if let Some(mode) = choice.as_str() {
        return match mode {
            "auto" => Ok(Some(ToolChoice::Mode(ToolMode::Auto))),
            "none" => Ok(Some(ToolChoice::Mode(ToolMode::None))),
            "required" => Ok(Some(ToolChoice::Mode(ToolMode::Required))),
            _ => Err(wrong("tool_choice", "is neither auto, none, required nor an object that names a function")),
        };
    }
    match (choice["type"].as_str(), choice["name"].as_str()) {
        (Some("function"), Some(name)) => {
            let name = choice["namespace"].as_str().map_or_else(|| name.into(), |namespace| flat_name(namespace, name));
            let function = FunctionName { name };
            Ok(Some(ToolChoice::Function { kind: ToolKind::Function, function }))
        }
        (Some("function"), None) => Err(wrong("tool_choice.name", "is missing or not a string")),
        (Some("allowed_tools"), _) => {
            let message = "tool_choice.type is allowed_tools: send only the tools that are allowed";
            Err(ApiError::unsupported("tool_choice", message))
        }
        (Some(_), _) => Ok(None),
        (None, _) => Err(wrong("tool_choice", "is neither auto, none, required nor an object that names a function")),
    }
}

/// The format of the text as OpenAI's chat completions have it.
fn format(mut format: Value) -> Result<ResponseFormat, ApiError> {
    let Some(kind) = format["type"].as_str().map(str::to_string) else {
        return Err(wrong("text.format.type", "is missing or not a string"));
    };
    let json_schema = match kind.as_str() {
        "text" | "json_object" => None,
        "json_schema" => match format.get_mut("schema").map(Value::take) {
            Some(schema @ Value::Object(_)) => Some(NamedSchema { schema: Some(schema) }),
            _ => return Err(wrong("text.format.schema", "is missing or not an object")),
        },
        _ => return Err(wrong("text.format.type", "is neither text, json_object nor json_schema")),
    };
    Ok(ResponseFormat { kind, json_schema, schema: None })
}

/// Adds items with their paths as messages of chat templates. Reasoning, text and calls of the assistant in a row are one message.
fn add_items(
    items: impl Iterator<Item = (String, Json)>,
    messages: &mut Vec<Json>,
    skipped: &mut Vec<String>,
) -> Result<(), ApiError> {
    let mut assistant = AssistantMessage::default();
    for (at, item) in items {
        let mut item = Fields::new(item, at.clone())?;
        match item.kind("message")?.as_str() {
            "message" => {
                let role = item.text("role")?;
                let path = item.path("content");
                let content = item.take("content").ok_or_else(|| wrong(&path, "is missing"))?;
                let text = text_of(content, &path)?;
                if role == "assistant" {
                    // a text after calls begins a new message
                    if !assistant.calls.is_empty() {
                        messages.push(std::mem::take(&mut assistant).into_message());
                    }
                    assistant.texts.push(text);
                    continue;
                }
                if !["user", "system", "developer"].contains(&role.as_str()) {
                    let what = format!("is {:?}, expected user, assistant, system or developer", quoted(&role));
                    return Err(wrong(&item.path("role"), &what));
                }
                flush(&mut assistant, messages);
                messages.push(Json::message(&role, &text));
            }
            "function_call" => {
                let (id, name, arguments) = (item.text("call_id")?, item.text("name")?, item.text("arguments")?);
                let name = item.maybe_text("namespace")?.map_or_else(|| name.clone(), |of| flat_name(&of, &name));
                assistant.calls.push(call(id, name, Json::Str(arguments)));
            }
            "function_call_output" => {
                let id = item.text("call_id")?;
                let path = item.path("output");
                let output = item.take("output").ok_or_else(|| wrong(&path, "is missing"))?;
                flush(&mut assistant, messages);
                messages.push(tool_message(id, result_text(output, &path)?));
            }
            "reasoning" => {
                if !assistant.calls.is_empty() || !assistant.texts.is_empty() {
                    flush(&mut assistant, messages);
                }
                let path = item.path("content");
                let text = match item.take("content") {
                    Some(content) => text_of(content, &path)?,
                    None => String::new(),
                };
                if !text.is_empty() {
                    assistant.reasoning.push(text);
                }
            }
            "item_reference" => {
                return Err(ApiError::unsupported(&at, format!("{at} refers to a stored item: send the item itself")));
            }
            kind => skipped.push(quoted(kind)),
        }
    }
    flush(&mut assistant, messages);
    Ok(())
}

fn flush(assistant: &mut AssistantMessage, messages: &mut Vec<Json>) {
    if !assistant.is_empty() {
        messages.push(std::mem::take(assistant).into_message());
    }
}

/// The text of a content: a string, or parts with text.
fn text_of(content: Json, at: &str) -> Result<String, ApiError> {
    join_parts(content, at, |at, kind| Err(unreadable(at, kind)))
}

/// The text of a result of a tool, in which a text stands for parts that are not text.
fn result_text(content: Json, at: &str) -> Result<String, ApiError> {
    join_parts(content, at, |_, kind| Ok(unread_in_result(kind).into()))
}

/// Joins the texts of parts. `other` is the text of a part of another type, by its path and type.
fn join_parts(
    content: Json,
    at: &str,
    other: impl Fn(&str, &str) -> Result<String, ApiError>,
) -> Result<String, ApiError> {
    let parts = match content {
        Json::Str(text) => return Ok(text),
        Json::Array(parts) => parts,
        _ => return Err(wrong(at, "is neither a string nor a list of parts")),
    };
    let text = |(i, part): (usize, Json)| {
        let at = format!("{at}[{i}]");
        let mut part = Fields::new(part, at.clone())?;
        match part.kind("input_text")?.as_str() {
            "input_text" | "output_text" | "reasoning_text" | "summary_text" | "text" => part.text("text"),
            "refusal" => part.text("refusal"),
            kind => other(&at, kind),
        }
    };
    let texts: Vec<String> = parts.into_iter().enumerate().map(text).collect::<Result<_, _>>()?;
    Ok(texts.join("\n"))
}

#[cfg(test)]
mod tests;

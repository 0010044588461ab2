//! `POST /v1/messages` and `/v1/messages/count_tokens`: requests.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use starling::chat::Json;

use super::system::move_volatile_lines;
use crate::error::{ApiError, quoted};
use crate::fields::{AssistantMessage, Fields, call, function_tool, tool_message, unread_in_result, unreadable, wrong};
use crate::openai::chat::{ChatCompletionRequest, ChatFields};
use crate::openai::options::{OneOrMany, Options};
use crate::parse_whole;
use crate::structure::OutputConstraint;
use crate::tools::{FunctionName, ToolChoice, ToolKind, ToolMode};

/// Request for a message. Fields of Anthropic's service that have no meaning here (`service_tier`, `context_management`,
/// `cache_control`) are ignored.
#[derive(Debug, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct MessagesRequest {
    /// Model name.
    pub model: String,
    /// Messages of `user` and `assistant`, and `system` within a conversation. Content is text or a list of blocks: `text`,
    /// `tool_use`, `tool_result`, `thinking`, `redacted_thinking`, and `document` with plain text. A last message of the
    /// assistant is continued.
    #[cfg_attr(feature = "openapi", schema(value_type = Vec<Object>, min_items = 1))]
    pub messages: Vec<Json>,
    /// Maximum number of tokens to generate; required but by `count_tokens`.
    #[cfg_attr(feature = "openapi", schema(minimum = 1))]
    pub max_tokens: Option<u64>,
    /// System prompt: text, or a list of text blocks. Lines in front that change with each request
    /// (`x-anthropic-billing-header: …`) are moved behind it, so that they do not break the prefix cache.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Object>))]
    pub system: Option<Json>,
    /// Functions that the model may call. Tools that Anthropic's service runs (with a `type` other than `custom`) are
    /// skipped, and named in the response header `x-starling-skipped`.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Vec<Object>>))]
    pub tools: Option<Vec<Value>>,
    /// Controls tool calls.
    pub tool_choice: Option<AnthropicToolChoice>,
    /// Stop strings.
    pub stop_sequences: Option<Vec<String>>,
    /// Sampling temperature. Default: that of the server.
    #[cfg_attr(feature = "openapi", schema(minimum = 0, maximum = 2))]
    pub temperature: Option<f32>,
    /// Nucleus sampling.
    #[cfg_attr(feature = "openapi", schema(minimum = 0, maximum = 1))]
    pub top_p: Option<f32>,
    /// Keep this number of the most probable tokens.
    #[cfg_attr(feature = "openapi", schema(minimum = 0))]
    pub top_k: Option<i64>,
    /// Stream the response as server-sent events.
    pub stream: Option<bool>,
    /// Thinking: turns the reasoning of templates with `enable_thinking` on or off.
    pub thinking: Option<Thinking>,
    /// Metadata.
    pub metadata: Option<Metadata>,
    /// Format of the answer.
    pub output_config: Option<OutputConfig>,
    /// Format of the answer, by its older name.
    pub output_format: Option<OutputFormat>,
    /// Not supported.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Vec<Object>>))]
    pub mcp_servers: Option<Vec<Value>>,
    /// Not supported.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Object>))]
    pub container: Option<Value>,
    /// Time limit of the request in seconds (not Anthropic's), as in `/v1/chat/completions`.
    #[cfg_attr(feature = "openapi", schema(exclusive_minimum = 0))]
    pub timeout: Option<f64>,
}

parse_whole!(MessagesRequest);

/// Controls tool calls.
#[derive(Debug, Clone, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct AnthropicToolChoice {
    /// `auto`, `any`, `tool` or `none`.
    #[serde(rename = "type")]
    pub kind: AnthropicToolMode,
    /// Function to call, if `type` is `tool`.
    pub name: Option<String>,
    /// At most one call.
    pub disable_parallel_tool_use: Option<bool>,
}

/// Mode of tool calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum AnthropicToolMode {
    /// The model decides.
    Auto,
    /// At least one call.
    Any,
    /// A call of one function.
    Tool,
    /// No calls.
    None,
}

/// Thinking.
#[derive(Debug, Clone, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Thinking {
    /// `enabled`, `adaptive` or `disabled`.
    #[serde(rename = "type")]
    pub kind: ThinkingMode,
    /// Maximum number of tokens of thinking; then its end is forced. They count towards `max_tokens`.
    #[cfg_attr(feature = "openapi", schema(minimum = 0))]
    pub budget_tokens: Option<usize>,
}

/// Mode of thinking.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "lowercase")]
pub enum ThinkingMode {
    /// On.
    Enabled,
    /// On; the model decides how much.
    Adaptive,
    /// Off.
    Disabled,
}

/// Metadata of a request.
#[derive(Debug, Clone, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Metadata {
    /// End user: the users of a tenant are scheduled in turn.
    pub user_id: Option<String>,
}

/// Format of the answer.
#[derive(Debug, Clone, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct OutputConfig {
    /// `{"type": "json_schema", "schema": {...}}`.
    pub format: Option<OutputFormat>,
}

/// JSON schema of the answer.
#[derive(Debug, Clone, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct OutputFormat {
    /// Always `json_schema`.
    #[serde(rename = "type")]
    pub kind: OutputFormatType,
    /// The schema.
    #[cfg_attr(feature = "openapi", schema(value_type = Object))]
    pub schema: Value,
}

/// Type of an [`OutputFormat`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum OutputFormatType {
    /// JSON schema.
    JsonSchema,
}

/// Response to `POST /v1/messages/count_tokens`.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TokenCount {
    /// Tokens of the prompt.
    pub input_tokens: usize,
}

impl MessagesRequest {
    /// Checks that `max_tokens` is there, which only `count_tokens` may leave out.
    ///
    /// # Errors
    /// If it is not.
    pub fn check_max_tokens(&self) -> Result<(), ApiError> {
        match self.max_tokens {
            Some(_) => Ok(()),
            None => Err(wrong("max_tokens", "is missing")),
        }
    }

    /// The request for a chat completion, and the tools that were skipped.
    ///
    /// # Errors
    /// The first field that is wrong or not supported, by its path.
    pub fn into_chat(self) -> Result<(ChatCompletionRequest, Vec<String>), ApiError> {
        let unsupported = |name: &str, what: &str| ApiError::unsupported(name, format!("{name}: {what}"));
        if self.mcp_servers.is_some_and(|servers| !servers.is_empty()) {
            return Err(unsupported("mcp_servers", "this server connects to no MCP servers"));
        }
        if self.container.is_some_and(|container| !container.is_null()) {
            return Err(unsupported("container", "this server has no containers"));
        }
        let (tools, skipped) = tools(self.tools.unwrap_or_default())?;
        let parallel = self.tool_choice.as_ref().and_then(|choice| choice.disable_parallel_tool_use).map(|off| !off);
        let tool_choice = self.tool_choice.map(AnthropicToolChoice::into_choice).transpose()?;
        let mut messages = Vec::new();
        if let Some(system) = self.system.filter(|system| *system != Json::Null) {
            let text = texts(system, "system", &["text"])?.join("\n");
            if !text.is_empty() {
                messages.push(Json::message("system", &move_volatile_lines(&text)));
            }
        }
        let n = self.messages.len();
        if n == 0 {
            return Err(wrong("messages", "is empty, expected at least one message"));
        }
        let mut is_prefill = false;
        for (i, message) in self.messages.into_iter().enumerate() {
            is_prefill = add_message(message, format!("messages[{i}]"), &mut messages)? && i + 1 == n;
        }
        let is_on = |thinking: &&Thinking| thinking.kind != ThinkingMode::Disabled;
        let budget = self.thinking.as_ref().filter(is_on).and_then(|thinking| thinking.budget_tokens);
        let thinking = self.thinking.as_ref().map(|thinking| Json::Bool(is_on(&thinking)));
        let chat = ChatFields {
            messages,
            continue_final_message: is_prefill.then_some(true),
            chat_template_kwargs: thinking.map(|on| Json::Object(vec![("enable_thinking".into(), on)])),
            tools: (!tools.is_empty()).then_some(Value::Array(tools)),
            tool_choice,
            parallel_tool_calls: parallel,
            thinking_budget_tokens: budget,
            ..ChatFields::default()
        };
        let options = Options {
            model: Some(self.model),
            stream: self.stream,
            max_tokens: self.max_tokens,
            stop: self.stop_sequences.filter(|stops| !stops.is_empty()).map(OneOrMany::Many),
            temperature: self.temperature,
            top_p: self.top_p,
            top_k: self.top_k,
            timeout: self.timeout,
            user: self.metadata.and_then(|metadata| metadata.user_id),
            ..Options::default()
        };
        let format = match (self.output_config.and_then(|config| config.format), self.output_format) {
            (Some(_), Some(_)) => {
                return Err(wrong("output_format", "is given beside output_config.format, expected one of them"));
            }
            (new, old) => new.or(old),
        };
        let json_schema = format.map(|format| format.schema);
        let constraint = OutputConstraint { json_schema, ..OutputConstraint::default() };
        Ok((ChatCompletionRequest { options, constraint, chat }, skipped))
    }
}

impl AnthropicToolChoice {
    fn into_choice(self) -> Result<ToolChoice, ApiError> {
        Ok(match (self.kind, self.name) {
            (AnthropicToolMode::Auto, _) => ToolChoice::Mode(ToolMode::Auto),
            (AnthropicToolMode::Any, _) => ToolChoice::Mode(ToolMode::Required),
            (AnthropicToolMode::None, _) => ToolChoice::Mode(ToolMode::None),
            (AnthropicToolMode::Tool, None) => return Err(wrong("tool_choice.name", "is missing")),
            (AnthropicToolMode::Tool, Some(name)) => {
                ToolChoice::Function { kind: ToolKind::Function, function: FunctionName { name } }
            }
        })
    }
}

/// Client tools as functions; those that the vendor's service runs are skipped.
fn tools(tools: Vec<Value>) -> Result<(Vec<Value>, Vec<String>), ApiError> {
    let (mut functions, mut skipped) = (Vec::new(), Vec::new());
    for (i, mut tool) in tools.into_iter().enumerate() {
        let at = format!("tools[{i}]");
        let kind = tool["type"].as_str().unwrap_or("custom");
        if kind != "custom" {
            skipped.push(quoted(kind));
            continue;
        }
        if !tool["name"].is_string() {
            return Err(wrong(&format!("{at}.name"), "is missing or not a string"));
        }
        if !tool["input_schema"].is_object() {
            return Err(wrong(&format!("{at}.input_schema"), "is missing or not an object"));
        }
        let mut take = |name: &str| tool.get_mut(name).map_or(Value::Null, Value::take);
        functions.push(function_tool(take("name"), take("description"), take("input_schema"), take("strict")));
    }
    Ok((functions, skipped))
}

/// The texts of `content`: a string, or blocks of the types `kinds`.
fn texts(content: Json, at: &str, kinds: &[&str]) -> Result<Vec<String>, ApiError> {
    let blocks = match content {
        Json::Str(text) => return Ok(vec![text]),
        Json::Array(blocks) => blocks,
        _ => return Err(wrong(at, "is neither a string nor a list of blocks")),
    };
    let text = |(i, block): (usize, Json)| {
        let at = format!("{at}[{i}]");
        let mut block = Fields::new(block, at.clone())?;
        match block.kind("text")? {
            kind if !kinds.contains(&kind.as_str()) => Err(unreadable(&at, &kind)),
            kind if kind == "document" => document(&mut block, &at),
            _ => block.text("text"),
        }
    };
    blocks.into_iter().enumerate().map(text).collect()
}

/// The text of a result of a tool, in which a text stands for blocks that are not text.
fn result_text(content: Json, at: &str) -> Result<String, ApiError> {
    let Json::Array(blocks) = content else { return Ok(texts(content, at, &[])?.join("\n")) };
    let text = |(i, block): (usize, Json)| {
        let at = format!("{at}[{i}]");
        let mut block = Fields::new(block, at.clone())?;
        match block.kind("text")?.as_str() {
            "text" => block.text("text"),
            "document" => document(&mut block, &at).or_else(|_| Ok(unread_in_result("document").into())),
            kind => Ok(unread_in_result(kind).into()),
        }
    };
    Ok(blocks.into_iter().enumerate().map(text).collect::<Result<Vec<_>, _>>()?.join("\n"))
}

/// The text of a document.
fn document(block: &mut Fields, at: &str) -> Result<String, ApiError> {
    let at = format!("{at}.source");
    let mut source = Fields::new(block.take("source").unwrap_or(Json::Null), at.clone())?;
    match source.kind("")?.as_str() {
        "text" => source.text("data"),
        kind => Err(unreadable(&at, kind)),
    }
}

/// Adds a message as messages of chat templates. Returns whether it is a text of the assistant, which an answer continues.
fn add_message(message: Json, at: String, messages: &mut Vec<Json>) -> Result<bool, ApiError> {
    let mut message = Fields::new(message, at.clone())?;
    let role = message.text("role")?;
    let at = format!("{at}.content");
    let content = message.take("content").ok_or_else(|| wrong(&at, "is missing"))?;
    match role.as_str() {
        "user" => add_user(content, &at, messages).map(|()| false),
        "assistant" => {
            let (message, is_text) = assistant(content, &at)?;
            messages.push(message);
            Ok(is_text)
        }
        "system" => {
            messages.push(Json::message("system", &texts(content, &at, &["text"])?.join("\n")));
            Ok(false)
        }
        _ => {
            let what = format!("is {:?}, expected user, assistant or system", quoted(&role));
            Err(wrong(&message.path("role"), &what))
        }
    }
}

/// Results of tools become messages of their own, in the order of the blocks.
fn add_user(content: Json, at: &str, messages: &mut Vec<Json>) -> Result<(), ApiError> {
    let Json::Array(blocks) = content else {
        messages.push(Json::message("user", &texts(content, at, &[])?.join("\n")));
        return Ok(());
    };
    let mut texts_before: Vec<String> = Vec::new();
    let is_empty = blocks.is_empty();
    for (i, block) in blocks.into_iter().enumerate() {
        let at = format!("{at}[{i}]");
        let mut block = Fields::new(block, at.clone())?;
        match block.kind("text")?.as_str() {
            "text" => texts_before.push(block.text("text")?),
            "document" => texts_before.push(document(&mut block, &at)?),
            "tool_result" => {
                if !texts_before.is_empty() {
                    messages.push(Json::message("user", &std::mem::take(&mut texts_before).join("\n")));
                }
                let id = block.text("tool_use_id")?;
                let result = match block.take("content") {
                    None => String::new(),
                    Some(content) => result_text(content, &format!("{at}.content"))?,
                };
                messages.push(tool_message(id, result));
            }
            kind => return Err(unreadable(&at, kind)),
        }
    }
    if !texts_before.is_empty() || is_empty {
        messages.push(Json::message("user", &texts_before.join("\n")));
    }
    Ok(())
}

/// A message of the assistant, and whether it is text alone.
fn assistant(content: Json, at: &str) -> Result<(Json, bool), ApiError> {
    let mut message = AssistantMessage::default();
    let Json::Array(blocks) = content else {
        message.texts = texts(content, at, &[])?;
        return Ok((message.into_message(), true));
    };
    for (i, block) in blocks.into_iter().enumerate() {
        let at = format!("{at}[{i}]");
        let mut block = Fields::new(block, at.clone())?;
        match block.kind("text")?.as_str() {
            "text" => message.texts.push(block.text("text")?),
            "thinking" => message.reasoning.push(block.text("thinking")?),
            // encrypted for Anthropic's own models
            "redacted_thinking" => {}
            "tool_use" => {
                let (id, name) = (block.text("id")?, block.text("name")?);
                let input = block.take("input").unwrap_or(Json::Object(Vec::new()));
                if !matches!(input, Json::Object(_)) {
                    return Err(wrong(&block.path("input"), "is not an object"));
                }
                message.calls.push(call(id, name, input));
            }
            kind => return Err(unreadable(&at, kind)),
        }
    }
    let is_text = message.calls.is_empty() && !message.texts.is_empty();
    Ok((message.into_message(), is_text))
}

#[cfg(test)]
mod tests;

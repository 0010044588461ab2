//! `POST /api/chat` and `/api/generate`: requests.

use serde::Deserialize;
use serde_json::Value;
use starling::chat::Json;

use crate::error::ApiError;
use crate::fields::{AssistantMessage, Fields, object, unread_in_result, wrong};
use crate::openai::chat::{ChatCompletionRequest, ChatFields};
use crate::openai::options::{OneOrMany, Options, Seed, seed};
use crate::parse_whole;
use crate::structure::{OutputConstraint, ResponseFormat};

/// Request of `POST /api/chat`.
#[derive(Debug, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct OllamaChatRequest {
    /// Model name; `:latest` may be appended.
    pub model: String,
    /// Messages with `role`, `content`, `thinking`, `tool_calls` and `tool_name`. None: the model is loaded, or unloaded with
    /// `keep_alive` 0.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(value_type = Vec<Object>))]
    pub messages: Vec<Json>,
    /// Functions that the model may call.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Vec<Object>>))]
    pub tools: Option<Vec<Value>>,
    /// Stream the response as lines of JSON. Default: true.
    pub stream: Option<bool>,
    /// Format of the answer: `json`, or a JSON schema.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Object>))]
    pub format: Option<Value>,
    /// Sampling options.
    pub options: Option<OllamaOptions>,
    /// 0 without messages unloads the model; else accepted: the server's settings say when models are unloaded.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Object>))]
    pub keep_alive: Option<Value>,
    /// Turns the reasoning of templates with `enable_thinking` on or off; `low`, `medium` or `high` for templates with
    /// `reasoning_effort`.
    pub think: Option<Think>,
    /// Not supported.
    pub logprobs: Option<bool>,
    /// Time limit of the request in seconds (not Ollama's), as in `/v1/chat/completions`.
    #[cfg_attr(feature = "openapi", schema(exclusive_minimum = 0))]
    pub timeout: Option<f64>,
}

/// Request of `POST /api/generate`.
#[derive(Debug, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct OllamaGenerateRequest {
    /// Model name; `:latest` may be appended.
    pub model: String,
    /// Prompt. Empty: the model is loaded, or unloaded with `keep_alive` 0.
    #[serde(default)]
    pub prompt: String,
    /// Text after the answer: the model fills in between.
    pub suffix: Option<String>,
    /// System prompt.
    pub system: Option<String>,
    /// Use the prompt as it is, without the chat template.
    pub raw: Option<bool>,
    /// Stream the response as lines of JSON. Default: true.
    pub stream: Option<bool>,
    /// Format of the answer: `json`, or a JSON schema.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Object>))]
    pub format: Option<Value>,
    /// Sampling options.
    pub options: Option<OllamaOptions>,
    /// 0 without a prompt unloads the model; else accepted.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Object>))]
    pub keep_alive: Option<Value>,
    /// As in `/api/chat`.
    pub think: Option<Think>,
    /// Not supported: images.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Vec<Object>>))]
    pub images: Option<Vec<Value>>,
    /// Not supported: a chat template in Go's syntax.
    pub template: Option<String>,
    /// Not supported: tokens of an earlier answer; use `/api/chat`.
    pub context: Option<Vec<i64>>,
    /// Not supported.
    pub logprobs: Option<bool>,
    /// Time limit of the request in seconds (not Ollama's), as in `/v1/chat/completions`.
    #[cfg_attr(feature = "openapi", schema(exclusive_minimum = 0))]
    pub timeout: Option<f64>,
}

parse_whole!(OllamaChatRequest, OllamaGenerateRequest);

/// Sampling options. Those that a request does not give have the server's defaults. Options of Ollama's runner
/// (`num_ctx`, `num_gpu`, `num_thread`, `num_batch`, …) are ignored: a prompt that exceeds the context is an error.
#[derive(Debug, Clone, Default, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct OllamaOptions {
    /// Maximum number of tokens to generate; 0, -1 and -2 for as many as fit.
    #[cfg_attr(feature = "openapi", schema(minimum = -2))]
    pub num_predict: Option<i64>,
    /// Random seed; -1: another one for each request.
    #[serde(default, deserialize_with = "seed")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<i64>))]
    pub seed: Option<Seed>,
    /// Stop strings.
    pub stop: Option<OneOrMany>,
    /// Sampling temperature.
    #[cfg_attr(feature = "openapi", schema(minimum = 0, maximum = 2))]
    pub temperature: Option<f32>,
    /// Keep this number of the most probable tokens; 0 keeps all.
    pub top_k: Option<i64>,
    /// Nucleus sampling.
    #[cfg_attr(feature = "openapi", schema(minimum = 0, maximum = 1))]
    pub top_p: Option<f32>,
    /// Keep tokens at least this fraction as probable as the most probable one.
    #[cfg_attr(feature = "openapi", schema(minimum = 0, maximum = 1))]
    pub min_p: Option<f32>,
    /// Locally typical sampling.
    pub typical_p: Option<f32>,
    /// Number of last tokens that penalties count; -1 for all, 0 turns penalties off.
    #[cfg_attr(feature = "openapi", schema(minimum = -1))]
    pub repeat_last_n: Option<i64>,
    /// Repetition penalty.
    pub repeat_penalty: Option<f32>,
    /// Presence penalty.
    pub presence_penalty: Option<f32>,
    /// Frequency penalty.
    pub frequency_penalty: Option<f32>,
    /// Not supported but as 0.
    pub mirostat: Option<i64>,
    /// Not supported but as 1.
    pub tfs_z: Option<f32>,
    /// Not supported but as true.
    pub penalize_newline: Option<bool>,
}

/// Thinking: on, off, or how much.
#[derive(Debug, Clone, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(untagged, expecting = "expected true, false, or low, medium or high")]
pub enum Think {
    /// On or off.
    Switch(bool),
    /// `low`, `medium` or `high`.
    Effort(String),
}

impl Think {
    /// Variables for the chat template.
    fn variables(self) -> Result<Json, ApiError> {
        let on = |on: bool| ("enable_thinking", Json::Bool(on));
        Ok(match self {
            Think::Switch(switch) => object(vec![on(switch)]),
            Think::Effort(effort) if ["low", "medium", "high"].contains(&effort.as_str()) => {
                object(vec![on(true), ("reasoning_effort", Json::Str(effort))])
            }
            Think::Effort(_) => return Err(wrong("think", "is neither true, false, low, medium nor high")),
        })
    }
}

/// What a request without a prompt asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LoadOrUnload {
    /// Load the model.
    Load,
    /// Unload the model: `keep_alive` is 0.
    Unload,
}

impl LoadOrUnload {
    fn of(keep_alive: Option<&Value>) -> LoadOrUnload {
        let is_zero = |value: &Value| match value {
            Value::Number(n) => n.as_f64() == Some(0.0),
            Value::String(text) => matches!(text.as_str(), "0" | "0s" | "0m" | "0h"),
            _ => false,
        };
        if keep_alive.is_some_and(is_zero) { LoadOrUnload::Unload } else { LoadOrUnload::Load }
    }

    /// Ollama's `done_reason`.
    pub fn name(self) -> &'static str {
        match self {
            LoadOrUnload::Load => "load",
            LoadOrUnload::Unload => "unload",
        }
    }
}

/// The prompt of `POST /api/generate`.
#[derive(Debug)]
pub enum GeneratePrompt {
    /// Messages for the chat template.
    Chat(Box<ChatCompletionRequest>),
    /// The prompt as it is.
    Raw(Box<RawPrompt>),
}

/// A prompt without a chat template.
#[derive(Debug)]
pub struct RawPrompt {
    /// Options of the request.
    pub options: Options,
    /// Output constraint.
    pub constraint: OutputConstraint,
    /// Text before the answer.
    pub prompt: String,
    /// Text after it, for infill.
    pub suffix: Option<String>,
}

/// A model name without Ollama's tag `:latest`.
pub fn model_name(name: &str) -> &str {
    name.strip_suffix(":latest").unwrap_or(name)
}

fn options(model: &str, stream: Option<bool>, given: Option<OllamaOptions>) -> Result<Options, ApiError> {
    let given = given.unwrap_or_default();
    let unsupported = [
        ("options.mirostat", given.mirostat.is_some_and(|kind| kind != 0)),
        ("options.tfs_z", given.tfs_z.is_some_and(|z| z != 1.0)),
        ("options.penalize_newline", given.penalize_newline == Some(false)),
    ];
    if let Some((name, _)) = unsupported.into_iter().find(|(_, is_given)| *is_given) {
        return Err(ApiError::unsupported(name, format!("{name}: this server does not have this sampler")));
    }
    let max_tokens = match given.num_predict {
        // as in Ollama's runner, 0 is no limit
        None | Some(-2..=0) => None,
        Some(n) => match u64::try_from(n) {
            Ok(n) => Some(n),
            Err(_) => return Err(wrong("options.num_predict", &format!("is {n}, expected -2 or more"))),
        },
    };
    Ok(Options {
        model: Some(model_name(model).into()),
        stream: Some(stream != Some(false)),
        max_tokens,
        stop: given.stop,
        seed: given.seed,
        temperature: given.temperature,
        top_k: given.top_k,
        top_p: given.top_p,
        min_p: given.min_p,
        typical_p: given.typical_p,
        repeat_last_n: given.repeat_last_n,
        repetition_penalty: given.repeat_penalty,
        presence_penalty: given.presence_penalty,
        frequency_penalty: given.frequency_penalty,
        ..Options::default()
    })
}

fn constraint(format: Option<Value>) -> Result<OutputConstraint, ApiError> {
    let mut constraint = OutputConstraint::default();
    match format {
        None | Some(Value::Null) => {}
        Some(Value::String(text)) if text.is_empty() => {}
        Some(Value::String(text)) if text == "json" => {
            let kind = "json_object".into();
            constraint.response_format = Some(ResponseFormat { kind, json_schema: None, schema: None });
        }
        Some(schema @ Value::Object(_)) => constraint.json_schema = Some(schema),
        Some(_) => return Err(wrong("format", "is neither \"json\" nor a JSON schema")),
    }
    Ok(constraint)
}

fn no_logprobs(logprobs: Option<bool>) -> Result<(), ApiError> {
    match logprobs {
        Some(true) => Err(ApiError::unsupported("logprobs", "logprobs: use /v1/chat/completions or /completion")),
        _ => Ok(()),
    }
}

impl OllamaChatRequest {
    /// Whether the request only loads or unloads the model.
    pub fn load_only(&self) -> Option<LoadOrUnload> {
        self.messages.is_empty().then(|| LoadOrUnload::of(self.keep_alive.as_ref()))
    }

    /// The request for a chat completion.
    ///
    /// # Errors
    /// The first field that is wrong or not supported, by its path.
    pub fn into_chat(self) -> Result<ChatCompletionRequest, ApiError> {
        no_logprobs(self.logprobs)?;
        let messages = self.messages.into_iter().enumerate().map(|(i, m)| message(m, format!("messages[{i}]")));
        let chat = ChatFields {
            messages: messages.collect::<Result<_, _>>()?,
            chat_template_kwargs: self.think.map(Think::variables).transpose()?,
            tools: self.tools.filter(|tools| !tools.is_empty()).map(Value::Array),
            ..ChatFields::default()
        };
        let (mut options, constraint) = (options(&self.model, self.stream, self.options)?, constraint(self.format)?);
        options.timeout = self.timeout;
        Ok(ChatCompletionRequest { options, constraint, chat })
    }
}

impl OllamaGenerateRequest {
    /// Whether the request only loads or unloads the model.
    pub fn load_only(&self) -> Option<LoadOrUnload> {
        let is_empty = self.prompt.is_empty() && self.suffix.as_deref().unwrap_or_default().is_empty();
        is_empty.then(|| LoadOrUnload::of(self.keep_alive.as_ref()))
    }

    /// The prompt, with its options.
    ///
    /// # Errors
    /// The first field that is wrong or not supported, by its path.
    pub fn into_prompt(self) -> Result<GeneratePrompt, ApiError> {
        no_logprobs(self.logprobs)?;
        let refused = [
            ("images", self.images.is_some_and(|images| !images.is_empty()), "this model reads only text"),
            ("template", self.template.is_some_and(|text| !text.is_empty()), "templates are set by --chat-template"),
            ("context", self.context.is_some_and(|tokens| !tokens.is_empty()), "use /api/chat with all messages"),
        ];
        if let Some((name, _, why)) = refused.into_iter().find(|(_, is_given, _)| *is_given) {
            return Err(ApiError::unsupported(name, format!("{name}: {why}")));
        }
        let (mut options, constraint) = (options(&self.model, self.stream, self.options)?, constraint(self.format)?);
        options.timeout = self.timeout;
        let suffix = self.suffix.filter(|suffix| !suffix.is_empty());
        if suffix.is_some() || self.raw == Some(true) {
            return Ok(GeneratePrompt::Raw(Box::new(RawPrompt { options, constraint, prompt: self.prompt, suffix })));
        }
        let system = self.system.filter(|system| !system.is_empty());
        let system = system.map(|system| Json::message("system", &system));
        let chat = ChatFields {
            messages: system.into_iter().chain([Json::message("user", &self.prompt)]).collect(),
            chat_template_kwargs: self.think.map(Think::variables).transpose()?,
            ..ChatFields::default()
        };
        Ok(GeneratePrompt::Chat(Box::new(ChatCompletionRequest { options, constraint, chat })))
    }
}

/// A message as chat templates take it.
fn message(message: Json, at: String) -> Result<Json, ApiError> {
    let mut message = Fields::new(message, at.clone())?;
    let role = message.text("role")?;
    let mut content = message.maybe_text("content")?.unwrap_or_default();
    if let Some(Json::Array(images)) = message.take("images")
        && !images.is_empty()
    {
        if role == "tool" {
            let notices = images.iter().map(|_| unread_in_result("image"));
            content = [content.as_str()]
                .into_iter()
                .filter(|text| !text.is_empty())
                .chain(notices)
                .collect::<Vec<_>>()
                .join("\n");
        } else {
            let at = message.path("images");
            return Err(ApiError::unsupported(&at, format!("{at}: this model reads only text")));
        }
    }
    if role != "assistant" {
        let mut fields = vec![("role", Json::Str(role)), ("content", Json::Str(content))];
        for (name, own) in [("tool_name", "name"), ("tool_call_id", "tool_call_id")] {
            if let Some(text) = message.maybe_text(name)? {
                fields.push((own, Json::Str(text)));
            }
        }
        return Ok(object(fields));
    }
    let thinking = message.maybe_text("thinking")?;
    let calls = match message.take("tool_calls") {
        None => Vec::new(),
        Some(Json::Array(calls)) => calls,
        Some(_) => return Err(wrong(&message.path("tool_calls"), "is not a list")),
    };
    let answer = AssistantMessage { texts: vec![content], reasoning: thinking.into_iter().collect(), calls };
    Ok(answer.into_message())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::parse::ParseBody;

    fn chat(fields: Value) -> Result<ChatCompletionRequest, ApiError> {
        let mut body = json!({ "model": "m:latest", "messages": [{ "role": "user", "content": "Hi" }] });
        for (name, value) in fields.as_object().expect("an object") {
            body[name] = value.clone();
        }
        OllamaChatRequest::parse_body(body.to_string().as_bytes())?.into_chat()
    }

    #[test]
    fn options_and_messages_become_those_of_a_chat() {
        let request = chat(json!({
            "messages": [
                { "role": "user", "content": "Weather?" },
                { "role": "assistant", "thinking": "Look.", "tool_calls": [{ "function": { "name": "f", "arguments": { "a": 1 } } }] },
                { "role": "tool", "tool_name": "f", "content": "4" },
            ],
            "options": { "num_predict": 5.0, "num_ctx": 4096, "stop": "x", "repeat_penalty": 1.1, "repeat_last_n": 64, "seed": 7 },
            "format": "json", "think": "high", "keep_alive": "5m", "tools": [],
        }))
        .expect("a request");
        let expected: Vec<Json> = serde_json::from_value(json!([
            { "role": "user", "content": "Weather?" },
            { "role": "assistant", "content": "", "reasoning_content": "Look.",
              "tool_calls": [{ "function": { "name": "f", "arguments": { "a": 1 } } }] },
            { "role": "tool", "content": "4", "name": "f" },
        ]))
        .expect("messages");
        assert_eq!(request.chat.messages, expected);
        let options = request.options;
        assert_eq!((options.model.as_deref(), options.stream, options.max_tokens), (Some("m"), Some(true), Some(5)));
        assert_eq!((options.repetition_penalty, options.repeat_last_n), (Some(1.1), Some(64)));
        assert_eq!(request.constraint.response_format.map(|format| format.kind).as_deref(), Some("json_object"));
        assert!(request.chat.tools.is_none());
        let schema = chat(json!({ "format": { "type": "object" }, "stream": false })).expect("a request");
        assert_eq!(
            (schema.constraint.json_schema, schema.options.stream),
            (Some(json!({ "type": "object" })), Some(false))
        );
        let free = chat(json!({ "options": { "num_predict": 0 }, "format": "" })).expect("a request");
        assert_eq!(free.options.max_tokens, None);
    }

    /// An agent that sends a screenshot as a result goes on without it.
    #[test]
    fn an_image_in_a_result_becomes_a_text() {
        let result = json!({ "role": "tool", "tool_name": "f", "content": "a page", "images": ["AA==", "AA=="] });
        let request = chat(json!({ "messages": [result] })).expect("a request");
        let notice = unread_in_result("image");
        let expected = json!([{ "role": "tool", "content": format!("a page\n{notice}\n{notice}"), "name": "f" }]);
        let expected: Vec<Json> = serde_json::from_value(expected).expect("messages");
        assert_eq!(request.chat.messages, expected);
    }

    #[test]
    fn limits_and_seeds_have_the_vendors_words() {
        for (options, max_tokens) in [
            (json!({ "num_predict": 5.0, "num_ctx": 4096.0, "top_k": 40.0, "seed": 7.0 }), Some(5)),
            (json!({ "num_predict": -1.0, "seed": 7 }), None),
            (json!({ "num_predict": -2, "seed": 7 }), None),
        ] {
            let found = chat(json!({ "options": options, "timeout": 2.5 })).expect("a request").options;
            assert_eq!((found.max_tokens, found.seed, found.timeout), (max_tokens, Some(Seed(7)), Some(2.5)));
        }
        assert_eq!(chat(json!({ "options": { "seed": -1 } })).expect("a request").options.seed, None);
        assert!(chat(json!({ "options": { "num_predict": 5.5 } })).is_err());
    }

    #[test]
    fn prompts_are_chats_unless_they_are_raw() {
        let generate = |fields: Value| {
            let mut body = json!({ "model": "m", "prompt": "def f(" });
            for (name, value) in fields.as_object().expect("an object") {
                body[name] = value.clone();
            }
            OllamaGenerateRequest::parse_body(body.to_string().as_bytes()).and_then(OllamaGenerateRequest::into_prompt)
        };
        let Ok(GeneratePrompt::Chat(request)) = generate(json!({ "system": "Be brief." })) else { panic!("a chat") };
        assert_eq!(request.chat.messages, [Json::message("system", "Be brief."), Json::message("user", "def f(")]);
        let Ok(GeneratePrompt::Raw(raw)) = generate(json!({ "suffix": "return x" })) else { panic!("a prompt") };
        assert_eq!((raw.prompt.as_str(), raw.suffix.as_deref()), ("def f(", Some("return x")));
        assert!(matches!(generate(json!({ "raw": true })), Ok(GeneratePrompt::Raw(_))));
        for (fields, param) in [
            (json!({ "images": ["AA=="] }), "images"),
            (json!({ "template": "{{ .Prompt }}" }), "template"),
            (json!({ "context": [1] }), "context"),
            (json!({ "logprobs": true }), "logprobs"),
            (json!({ "options": { "mirostat": 1 } }), "options.mirostat"),
            (json!({ "options": { "num_predict": -3 } }), "options.num_predict"),
            (json!({ "format": 3 }), "format"),
            (json!({ "think": "some" }), "think"),
        ] {
            assert_eq!(generate(fields.clone()).expect_err("an error").param.as_deref(), Some(param), "{fields}");
        }
        assert_eq!(
            chat(json!({ "messages": [{ "role": "user", "content": "x", "images": ["AA=="] }] }))
                .expect_err("an error")
                .param
                .as_deref(),
            Some("messages[0].images")
        );
    }

    #[test]
    fn an_empty_request_loads_or_unloads() {
        let only = |json: &str| OllamaChatRequest::parse_body(json.as_bytes()).expect("a request").load_only();
        assert_eq!(only(r#"{"model": "m"}"#), Some(LoadOrUnload::Load));
        assert_eq!(only(r#"{"model": "m", "messages": [], "keep_alive": "0s"}"#), Some(LoadOrUnload::Unload));
        assert_eq!(only(r#"{"model": "m", "keep_alive": 0}"#), Some(LoadOrUnload::Unload));
        assert_eq!(only(r#"{"model": "m", "keep_alive": -1}"#), Some(LoadOrUnload::Load));
        assert_eq!(only(r#"{"model": "m", "messages": [{}]}"#), None);
    }
}

//! Fields of JSON objects that are read by hand, with the path of what is wrong.

use serde_json::Value;
use starling::chat::Json;

use crate::error::{ApiError, quoted};

/// An object of a request, whose fields are taken one by one.
#[derive(Debug)]
pub(crate) struct Fields {
    at: String,
    fields: Vec<(String, Json)>,
}

impl Fields {
    /// The object `value` at the path `at`.
    pub(crate) fn new(value: Json, at: String) -> Result<Fields, ApiError> {
        match value {
            Json::Object(fields) => Ok(Fields { at, fields }),
            _ => Err(wrong(&at, "is not an object")),
        }
    }

    /// Path of the field `name`.
    pub(crate) fn path(&self, name: &str) -> String {
        format!("{}.{name}", self.at)
    }

    /// Takes a field; `None` if it is absent or null.
    pub(crate) fn take(&mut self, name: &str) -> Option<Json> {
        let (_, value) = self.fields.iter_mut().find(|(known, _)| known == name)?;
        let value = std::mem::replace(value, Json::Null);
        (value != Json::Null).then_some(value)
    }

    /// Takes a text; `None` if it is absent or null.
    pub(crate) fn maybe_text(&mut self, name: &str) -> Result<Option<String>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Json::Str(text)) => Ok(Some(text)),
            Some(_) => Err(wrong(&self.path(name), "is not a string")),
        }
    }

    /// Takes a text.
    pub(crate) fn text(&mut self, name: &str) -> Result<String, ApiError> {
        self.maybe_text(name)?.ok_or_else(|| wrong(&self.path(name), "is missing"))
    }

    /// The type of a block. Blocks without one are of type `default`.
    pub(crate) fn kind(&mut self, default: &str) -> Result<String, ApiError> {
        Ok(self.maybe_text("type")?.unwrap_or_else(|| default.into()))
    }
}

/// The error of the field at the path `at`.
pub(crate) fn wrong(at: &str, what: &str) -> ApiError {
    ApiError::param(at, format!("{at} {what}"))
}

/// The error of a content block of a kind that the model cannot read.
pub(crate) fn unreadable(at: &str, kind: &str) -> ApiError {
    ApiError::unsupported(at, format!("{at}.type is {}; this model reads only text", quoted(kind)))
}

/// The text that stands in the result of a tool for content that the model cannot read: the conversation goes on. The words
/// are this table's and none of the client, whose texts are checked elsewhere.
pub(crate) fn unread_in_result(kind: &str) -> &'static str {
    match kind {
        "image" | "image_url" | "input_image" => "[an image is left out: this model reads only text]",
        "audio" | "audio_url" | "input_audio" => "[audio is left out: this model reads only text]",
        "video" | "video_url" | "input_video" => "[a video is left out: this model reads only text]",
        "document" | "file" | "input_file" => "[a file is left out: this model reads only text]",
        _ => "[content is left out: this model reads only text]",
    }
}

/// A JSON object with these fields.
pub(crate) fn object(fields: Vec<(&str, Json)>) -> Json {
    Json::Object(fields.into_iter().map(|(name, value)| (name.to_string(), value)).collect())
}

/// A tool call in an assistant's message.
pub(crate) fn call(id: String, name: String, arguments: Json) -> Json {
    let function = object(vec![("name", Json::Str(name)), ("arguments", arguments)]);
    object(vec![("id", Json::Str(id)), ("type", Json::Str("function".into())), ("function", function)])
}

/// An assistant's message in the making: text, reasoning and calls.
#[derive(Debug, Default)]
pub(crate) struct AssistantMessage {
    pub(crate) texts: Vec<String>,
    pub(crate) reasoning: Vec<String>,
    pub(crate) calls: Vec<Json>,
}

impl AssistantMessage {
    /// Whether nothing was added.
    pub(crate) fn is_empty(&self) -> bool {
        self.texts.is_empty() && self.reasoning.is_empty() && self.calls.is_empty()
    }

    /// The message for the chat template.
    pub(crate) fn into_message(self) -> Json {
        let mut fields = vec![("role", Json::Str("assistant".into())), ("content", Json::Str(self.texts.join("\n")))];
        if !self.reasoning.is_empty() {
            fields.push(("reasoning_content", Json::Str(self.reasoning.join("\n"))));
        }
        if !self.calls.is_empty() {
            fields.push(("tool_calls", Json::Array(self.calls)));
        }
        object(fields)
    }
}

/// The message with the result of a tool call.
pub(crate) fn tool_message(id: String, content: String) -> Json {
    object(vec![("role", Json::Str("tool".into())), ("tool_call_id", Json::Str(id)), ("content", Json::Str(content))])
}

/// A function in OpenAI's form, as chat templates take it.
pub(crate) fn function_tool(name: Value, description: Value, parameters: Value, strict: Value) -> Value {
    let mut function = serde_json::Map::new();
    function.insert("name".into(), name);
    for (key, value) in [("description", description), ("parameters", parameters), ("strict", strict)] {
        if !value.is_null() {
            function.insert(key.into(), value);
        }
    }
    serde_json::json!({ "type": "function", "function": function })
}

//! `POST /v1/responses`: responses and streams.

use std::sync::Arc;

use serde::Serialize;
use serde_json::{Map, Value, json};
use starling::engine::FinishReason;
use starling::model::Model;

use super::namespaces::Namespaces;
use super::request::{ReasoningConfig, ResponsesRequest};
use crate::answer::Answer;
use crate::error::ErrorBody;
use crate::openai::chat::{ChatLogprobs, TokenLogprob};
use crate::openai::response::ResponseHead;
use crate::parts::{Part, WireFormat, usage_of};
use crate::shared::SharedStr;
use crate::stream::{EventSink, send};
use crate::tools::ToolCall;

/// Response of the model.
#[derive(Debug, Clone, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ResponsesResponse {
    /// ID of the response.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub id: SharedStr,
    /// Always `response`.
    pub object: &'static str,
    /// Time of creation, in seconds since 1970.
    pub created_at: u64,
    /// `in_progress`, `completed`, `incomplete` or `failed`.
    pub status: &'static str,
    /// Always false.
    pub background: bool,
    /// Error of a failed response.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Object>))]
    pub error: Option<Value>,
    /// Why the response is incomplete: `max_output_tokens` or `content_filter`.
    pub incomplete_details: Option<IncompleteDetails>,
    /// System prompt of the request.
    pub instructions: Option<String>,
    /// As in the request.
    pub max_output_tokens: Option<u64>,
    /// Model name.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub model: SharedStr,
    /// Items: `reasoning`, `message` and `function_call`.
    pub output: Vec<OutputItem>,
    /// As in the request.
    pub parallel_tool_calls: bool,
    /// As in the request.
    pub previous_response_id: Option<String>,
    /// As in the request.
    pub prompt_cache_key: Option<String>,
    /// As in the request.
    pub reasoning: ReasoningConfig,
    /// Whether the response is stored.
    pub store: bool,
    /// As in the request.
    pub temperature: Option<f32>,
    /// As in the request.
    #[cfg_attr(feature = "openapi", schema(value_type = Object))]
    pub text: Value,
    /// As in the request.
    pub tool_choice: Value,
    /// As in the request.
    #[cfg_attr(feature = "openapi", schema(value_type = Vec<Object>))]
    pub tools: Vec<Value>,
    /// As in the request.
    pub top_p: Option<f32>,
    /// Always `disabled`.
    pub truncation: &'static str,
    /// Token counts of a complete response.
    pub usage: Option<ResponsesUsage>,
    /// As in the request.
    pub user: Option<String>,
    /// As in the request.
    #[cfg_attr(feature = "openapi", schema(value_type = Object))]
    pub metadata: Map<String, Value>,
    /// Random seed that was used.
    pub seed: u64,
}

/// Why a response is incomplete.
#[derive(Debug, Clone, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct IncompleteDetails {
    /// `max_output_tokens` or `content_filter`.
    pub reason: &'static str,
}

/// Item of a response.
#[derive(Debug, Clone, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum OutputItem {
    /// Reasoning.
    Reasoning {
        /// ID of the item.
        id: String,
        /// `in_progress` or `completed`.
        status: &'static str,
        /// Always empty: reasoning is not summarised.
        summary: Vec<String>,
        /// The reasoning.
        content: Vec<OutputContent>,
    },
    /// Message.
    Message {
        /// ID of the item.
        id: String,
        /// `in_progress`, `completed` or `incomplete`.
        status: &'static str,
        /// Always `assistant`.
        role: &'static str,
        /// The text.
        content: Vec<OutputContent>,
    },
    /// Tool call.
    FunctionCall {
        /// ID of the item.
        id: String,
        /// ID of the call, for `function_call_output`.
        call_id: String,
        /// Function to call.
        name: String,
        /// Namespace of the function, if the request has it in one.
        #[serde(skip_serializing_if = "Option::is_none")]
        namespace: Option<String>,
        /// Arguments as JSON text.
        arguments: String,
        /// `in_progress`, `completed`, or `incomplete` if the answer was cut within the call.
        status: &'static str,
    },
}

/// Content of an item.
#[derive(Debug, Clone, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum OutputContent {
    /// Text.
    OutputText {
        /// The text.
        text: String,
        /// Always empty.
        annotations: Vec<String>,
        /// Log-probabilities of all tokens of the answer, in the last message, if requested.
        logprobs: Vec<TokenLogprob>,
    },
    /// Reasoning.
    ReasoningText {
        /// The reasoning.
        text: String,
    },
}

/// Token counts of a response.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ResponsesUsage {
    /// Tokens of the prompt.
    pub input_tokens: usize,
    /// Breakdown of `input_tokens`.
    pub input_tokens_details: InputDetails,
    /// Generated tokens.
    pub output_tokens: usize,
    /// Breakdown of `output_tokens`.
    pub output_tokens_details: OutputDetails,
    /// Both.
    pub total_tokens: usize,
}

/// Breakdown of the prompt tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct InputDetails {
    /// Prompt tokens found in the prefix cache.
    pub cached_tokens: usize,
}

/// Breakdown of the generated tokens.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct OutputDetails {
    /// Tokens of the model's reasoning.
    pub reasoning_tokens: usize,
}

/// Writes a response.
pub struct ResponsesFormat {
    response: ResponsesResponse,
    n_prompt: usize,
    sequence_number: u64,
    /// Whether the last item may continue.
    is_open: bool,
    /// The model, for log-probabilities, if they are requested.
    logprobs: Option<Arc<Model>>,
    namespaces: Namespaces,
}

impl ResponsesFormat {
    /// A response without items to the request `request`.
    pub fn new(head: ResponseHead, request: &ResponsesRequest, n_prompt: usize) -> ResponsesFormat {
        let format = request.text.as_ref().and_then(|text| text.format.clone());
        let response = ResponsesResponse {
            id: head.id,
            object: "response",
            created_at: head.created,
            status: "in_progress",
            background: false,
            error: None,
            incomplete_details: None,
            instructions: request.instructions.clone(),
            max_output_tokens: request.max_output_tokens,
            model: head.model,
            output: Vec::new(),
            parallel_tool_calls: request.parallel_tool_calls != Some(false),
            previous_response_id: request.previous_response_id.clone(),
            prompt_cache_key: request.prompt_cache_key.clone(),
            reasoning: request.reasoning.clone().unwrap_or_default(),
            store: false,
            temperature: request.temperature,
            text: json!({ "format": format.unwrap_or_else(|| json!({ "type": "text" })) }),
            tool_choice: request.tool_choice.clone().unwrap_or_else(|| "auto".into()),
            tools: request.tools.clone().unwrap_or_default(),
            top_p: request.top_p,
            truncation: "disabled",
            usage: None,
            user: request.user.clone(),
            metadata: request.metadata.clone().unwrap_or_default(),
            seed: head.seed,
        };
        let namespaces = Namespaces::of(&response.tools);
        ResponsesFormat { response, n_prompt, sequence_number: 0, is_open: false, logprobs: None, namespaces }
    }

    /// The same, with log-probabilities of `model`.
    pub fn with_logprobs(self, model: Option<Arc<Model>>) -> ResponsesFormat {
        ResponsesFormat { logprobs: model, ..self }
    }

    /// The same, of a response that is stored if `store`.
    pub fn stored(mut self, store: bool) -> ResponsesFormat {
        self.response.store = store;
        self
    }

    /// The response so far.
    pub fn response(&self) -> &ResponsesResponse {
        &self.response
    }

    /// The response.
    pub fn into_response(self) -> ResponsesResponse {
        self.response
    }

    /// Writes the response to a probe: complete and empty.
    pub fn finish_probe(&mut self, sink: &mut dyn EventSink) {
        self.start(sink);
        self.response.status = "completed";
        self.response.usage = Some(ResponsesUsage::default());
        self.whole("response.completed", sink);
    }

    fn event(&mut self, name: &str, mut data: Value, sink: &mut dyn EventSink) {
        if !sink.is_read() {
            return;
        }
        data["type"] = name.into();
        data["sequence_number"] = self.sequence_number.into();
        self.sequence_number += 1;
        send(sink, Some(name), &data);
    }

    fn whole(&mut self, name: &str, sink: &mut dyn EventSink) {
        if sink.is_read() {
            let response = serde_json::to_value(&self.response).unwrap_or_default();
            self.event(name, json!({ "response": response }), sink);
        }
    }

    fn index(&self) -> usize {
        self.response.output.len().saturating_sub(1)
    }

    /// ID of the next item: distinct within the response, and between responses.
    fn next_id(&self, prefix: &str) -> String {
        let own = self.response.id.0.rsplit('_').next().unwrap_or_default();
        format!("{prefix}_{own}{:04x}", self.response.output.len())
    }

    fn open(&mut self, item: OutputItem, sink: &mut dyn EventSink) {
        self.close("completed", sink);
        let json = json!({ "output_index": self.response.output.len(), "item": item });
        self.response.output.push(item);
        self.is_open = true;
        self.event("response.output_item.added", json, sink);
    }

    /// Opens the content of the last item.
    fn open_content(&mut self, part: OutputContent, sink: &mut dyn EventSink) {
        let (item_id, index) = (self.item_id(), self.index());
        let json = json!({ "item_id": item_id, "output_index": index, "content_index": 0, "part": part });
        if let Some(OutputItem::Message { content, .. } | OutputItem::Reasoning { content, .. }) =
            self.response.output.last_mut()
        {
            content.push(part);
        }
        self.event("response.content_part.added", json, sink);
    }

    fn item_id(&self) -> String {
        match self.response.output.last() {
            Some(
                OutputItem::Message { id, .. } | OutputItem::Reasoning { id, .. } | OutputItem::FunctionCall { id, .. },
            ) => id.clone(),
            None => String::new(),
        }
    }

    /// Closes the last item with a status.
    fn close(&mut self, end: &'static str, sink: &mut dyn EventSink) {
        if !std::mem::take(&mut self.is_open) {
            return;
        }
        let (item_id, index) = (self.item_id(), self.index());
        let part = match self.response.output.last_mut() {
            Some(OutputItem::Message { status, content, .. } | OutputItem::Reasoning { status, content, .. }) => {
                *status = end;
                content.last().cloned()
            }
            Some(OutputItem::FunctionCall { status, .. }) => {
                *status = end;
                None
            }
            None => None,
        };
        let place = || json!({ "item_id": item_id, "output_index": index, "content_index": 0 });
        if let Some(part) = part {
            let mut done = place();
            let name = match &part {
                OutputContent::OutputText { text, logprobs, .. } => {
                    done["text"] = text.as_str().into();
                    done["logprobs"] = json!(logprobs);
                    "response.output_text.done"
                }
                OutputContent::ReasoningText { text } => {
                    done["text"] = text.as_str().into();
                    "response.reasoning_text.done"
                }
            };
            self.event(name, done, sink);
            let mut done = place();
            done["part"] = json!(part);
            self.event("response.content_part.done", done, sink);
        }
        let item = json!({ "output_index": index, "item": self.response.output.last() });
        self.event("response.output_item.done", item, sink);
    }

    /// Adds text to the last item.
    fn add(&mut self, new: &str, sink: &mut dyn EventSink) {
        let (item_id, index) = (self.item_id(), self.index());
        let Some(OutputItem::Message { content, .. } | OutputItem::Reasoning { content, .. }) =
            self.response.output.last_mut()
        else {
            return;
        };
        let mut delta = json!({ "item_id": item_id, "output_index": index, "content_index": 0, "delta": new });
        let name = match content.last_mut() {
            Some(OutputContent::OutputText { text, .. }) => {
                text.push_str(new);
                delta["logprobs"] = json!([]);
                "response.output_text.delta"
            }
            Some(OutputContent::ReasoningText { text }) => {
                text.push_str(new);
                "response.reasoning_text.delta"
            }
            None => return,
        };
        self.event(name, delta, sink);
    }

    fn call(&mut self, call: ToolCall, is_complete: bool, sink: &mut dyn EventSink) {
        let (id, status) = (self.next_id("fc"), "in_progress");
        let (call_id, all) = (call.id, call.function.arguments);
        let (namespace, name) = self.namespaces.resolve(call.function.name);
        let arguments = String::new();
        let item =
            OutputItem::FunctionCall { id: id.clone(), call_id, name: name.clone(), namespace, arguments, status };
        self.open(item, sink);
        let index = self.index();
        let place = |field: &str| json!({ "item_id": id, "output_index": index, field: all });
        self.event("response.function_call_arguments.delta", place("delta"), sink);
        if is_complete {
            let mut done = place("arguments");
            done["name"] = name.into();
            self.event("response.function_call_arguments.done", done, sink);
        }
        if let Some(OutputItem::FunctionCall { arguments, .. }) = self.response.output.last_mut() {
            *arguments = all;
        }
        self.close(if is_complete { "completed" } else { "incomplete" }, sink);
    }
}

impl WireFormat for ResponsesFormat {
    fn start(&mut self, sink: &mut dyn EventSink) {
        self.whole("response.created", sink);
        self.whole("response.in_progress", sink);
    }

    fn part(&mut self, part: Part, sink: &mut dyn EventSink) {
        let last = if self.is_open { self.response.output.last() } else { None };
        let (status, content) = ("in_progress", Vec::new());
        match part {
            Part::Call { call, is_complete } => self.call(call, is_complete, sink),
            Part::Text(text) => {
                if !matches!(last, Some(OutputItem::Message { .. })) {
                    let (id, role) = (self.next_id("msg"), "assistant");
                    self.open(OutputItem::Message { id, status, role, content }, sink);
                    let part = OutputContent::OutputText {
                        text: String::new(),
                        annotations: Vec::new(),
                        logprobs: Vec::new(),
                    };
                    self.open_content(part, sink);
                }
                self.add(&text, sink);
            }
            Part::Reasoning(text) => {
                if !matches!(last, Some(OutputItem::Reasoning { .. })) {
                    let (id, summary) = (self.next_id("rs"), Vec::new());
                    self.open(OutputItem::Reasoning { id, status, summary, content }, sink);
                    self.open_content(OutputContent::ReasoningText { text: String::new() }, sink);
                }
                self.add(&text, sink);
            }
        }
    }

    fn finish(&mut self, answer: &Answer, sink: &mut dyn EventSink) {
        let reason = match answer.finish {
            Some(FinishReason::StopToken(_) | FinishReason::StopString(_) | FinishReason::Complete) => None,
            Some(FinishReason::ContentFilter) => Some("content_filter"),
            _ => Some("max_output_tokens"),
        };
        if let Some(model) = &self.logprobs
            && let Some(OutputItem::Message { content, .. }) = self.response.output.last_mut()
            && let Some(OutputContent::OutputText { logprobs, .. }) = content.last_mut()
        {
            *logprobs = ChatLogprobs::new(&model.tokenizer, &answer.tokens).content;
        }
        let end = if reason.is_some() { "incomplete" } else { "completed" };
        self.close(end, sink);
        let usage = usage_of(self.n_prompt, answer);
        let reasoning_tokens = usage.completion_tokens_details.map_or(0, |details| details.reasoning_tokens);
        let response = &mut self.response;
        response.status = end;
        response.incomplete_details = reason.map(|reason| IncompleteDetails { reason });
        response.usage = Some(ResponsesUsage {
            input_tokens: usage.prompt_tokens,
            input_tokens_details: InputDetails { cached_tokens: usage.prompt_tokens_details.cached_tokens },
            output_tokens: usage.completion_tokens,
            output_tokens_details: OutputDetails { reasoning_tokens },
            total_tokens: usage.total_tokens,
        });
        self.whole(if reason.is_some() { "response.incomplete" } else { "response.completed" }, sink);
    }

    fn fail(&mut self, error: &ErrorBody, sink: &mut dyn EventSink) {
        let error = &error.error;
        let code = error.code.unwrap_or(error.kind);
        self.response.status = "failed";
        self.response.error = Some(json!({ "code": code, "message": error.message }));
        self.whole("response.failed", sink);
    }
}

#[cfg(test)]
mod tests;

//! `POST /v1/messages`: responses and streams.

use serde::Serialize;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};
use starling::engine::FinishReason;
use starling::receipt::Hex;

use super::error::AnthropicErrorBody;
use crate::answer::Answer;
use crate::error::ErrorBody;
use crate::openai::response::ResponseHead;
use crate::parts::{Part, WireFormat, stop_string, usage_of};
use crate::shared::SharedStr;
use crate::stream::{EventSink, send};
use crate::tools::ToolCall;

/// Message of the model.
#[derive(Debug, Clone, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct MessageResponse {
    /// ID of the message.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub id: SharedStr,
    /// Always `message`.
    #[serde(rename = "type")]
    pub kind: &'static str,
    /// Always `assistant`.
    pub role: &'static str,
    /// Model name.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub model: SharedStr,
    /// Content blocks.
    pub content: Vec<ContentBlock>,
    /// `end_turn`, `max_tokens`, `stop_sequence`, `tool_use` or `refusal`.
    pub stop_reason: Option<&'static str>,
    /// Stop string that ended the message.
    pub stop_sequence: Option<String>,
    /// Token counts.
    pub usage: MessageUsage,
}

/// Content block of a message.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ContentBlock {
    /// Text.
    Text {
        /// The text.
        text: String,
    },
    /// Reasoning.
    Thinking {
        /// The reasoning.
        thinking: String,
        /// SHA-256 of the reasoning: clients send back only thinking that is signed.
        signature: String,
    },
    /// Tool call.
    ToolUse {
        /// ID of the call.
        id: String,
        /// Function to call.
        name: String,
        /// Arguments.
        #[cfg_attr(feature = "openapi", schema(value_type = Object))]
        input: Value,
    },
}

/// Token counts of a message.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct MessageUsage {
    /// Prompt tokens that were computed.
    pub input_tokens: usize,
    /// Always 0: writing to the prefix cache is not counted.
    pub cache_creation_input_tokens: usize,
    /// Prompt tokens found in the prefix cache.
    pub cache_read_input_tokens: usize,
    /// Generated tokens.
    pub output_tokens: usize,
}

/// Writes a message.
#[derive(Debug)]
pub struct MessageFormat {
    message: MessageResponse,
    n_prompt: usize,
    /// Stop strings of the request.
    stops: Vec<String>,
    /// Whether the last block may continue.
    is_open: bool,
}

impl MessageFormat {
    /// A message without content, to a prompt of `n_prompt` tokens.
    pub fn new(head: ResponseHead, n_prompt: usize, stops: Vec<String>) -> MessageFormat {
        let message = MessageResponse {
            id: head.id,
            kind: "message",
            role: "assistant",
            model: head.model,
            content: Vec::new(),
            stop_reason: None,
            stop_sequence: None,
            usage: MessageUsage { input_tokens: n_prompt, ..MessageUsage::default() },
        };
        MessageFormat { message, n_prompt, stops, is_open: false }
    }

    /// The message.
    pub fn into_response(self) -> MessageResponse {
        self.message
    }

    fn index(&self) -> usize {
        self.message.content.len().saturating_sub(1)
    }

    fn open(&mut self, block: ContentBlock, sink: &mut dyn EventSink) {
        self.close(sink);
        let (index, content_block) = (self.message.content.len(), &block);
        let event = "content_block_start";
        send(sink, Some(event), &json!({ "type": event, "index": index, "content_block": content_block }));
        self.message.content.push(block);
        self.is_open = true;
    }

    fn delta(&self, delta: &Value, sink: &mut dyn EventSink) {
        let event = "content_block_delta";
        send(sink, Some(event), &json!({ "type": event, "index": self.index(), "delta": delta }));
    }

    fn close(&mut self, sink: &mut dyn EventSink) {
        if !std::mem::take(&mut self.is_open) {
            return;
        }
        if let Some(ContentBlock::Thinking { thinking, signature }) = self.message.content.last_mut() {
            let digest: [u8; 32] = Sha256::digest(thinking.as_bytes()).into();
            *signature = Hex(digest).to_string();
            let delta = json!({ "type": "signature_delta", "signature": signature });
            self.delta(&delta, sink);
        }
        let event = "content_block_stop";
        send(sink, Some(event), &json!({ "type": event, "index": self.index() }));
    }

    /// Writes a call. The input of one that was cut is no JSON: a stream has it as it is, a whole message as a text in an
    /// object.
    fn call(&mut self, call: ToolCall, is_complete: bool, sink: &mut dyn EventSink) {
        let id = call.id.replacen("call_", "toolu_", 1);
        let input = match serde_json::from_str(&call.function.arguments) {
            Ok(Value::Object(input)) => Value::Object(input),
            _ => json!({ "arguments": call.function.arguments }),
        };
        let name = call.function.name;
        self.open(ContentBlock::ToolUse { id, name, input: json!({}) }, sink);
        if sink.is_read() {
            let partial = if is_complete { input.to_string() } else { call.function.arguments };
            self.delta(&json!({ "type": "input_json_delta", "partial_json": partial }), sink);
        }
        if let Some(ContentBlock::ToolUse { input: known, .. }) = self.message.content.last_mut() {
            *known = input;
        }
        self.close(sink);
    }
}

impl WireFormat for MessageFormat {
    fn start(&mut self, sink: &mut dyn EventSink) {
        send(sink, Some("message_start"), &json!({ "type": "message_start", "message": self.message }));
        self.keep_alive(sink);
    }

    fn part(&mut self, part: Part, sink: &mut dyn EventSink) {
        let last = if self.is_open { self.message.content.last() } else { None };
        match part {
            Part::Call { call, is_complete } => self.call(call, is_complete, sink),
            Part::Text(text) => {
                if !matches!(last, Some(ContentBlock::Text { .. })) {
                    self.open(ContentBlock::Text { text: String::new() }, sink);
                }
                self.delta(&json!({ "type": "text_delta", "text": text }), sink);
                if let Some(ContentBlock::Text { text: all }) = self.message.content.last_mut() {
                    all.push_str(&text);
                }
            }
            Part::Reasoning(text) => {
                if !matches!(last, Some(ContentBlock::Thinking { .. })) {
                    self.open(ContentBlock::Thinking { thinking: String::new(), signature: String::new() }, sink);
                }
                self.delta(&json!({ "type": "thinking_delta", "thinking": text }), sink);
                if let Some(ContentBlock::Thinking { thinking, .. }) = self.message.content.last_mut() {
                    thinking.push_str(&text);
                }
            }
        }
    }

    fn finish(&mut self, answer: &Answer, sink: &mut dyn EventSink) {
        self.close(sink);
        let has_calls = self.message.content.iter().any(|block| matches!(block, ContentBlock::ToolUse { .. }));
        let usage = usage_of(self.n_prompt, answer);
        let cached = usage.prompt_tokens_details.cached_tokens;
        let message = &mut self.message;
        message.stop_reason = Some(stop_reason(answer.finish, has_calls));
        message.stop_sequence = stop_string(answer, &self.stops).map(str::to_string);
        message.usage = MessageUsage {
            input_tokens: self.n_prompt.saturating_sub(cached),
            cache_creation_input_tokens: 0,
            cache_read_input_tokens: cached,
            output_tokens: usage.completion_tokens,
        };
        let delta = json!({ "stop_reason": message.stop_reason, "stop_sequence": message.stop_sequence });
        let event = json!({ "type": "message_delta", "delta": delta, "usage": message.usage });
        send(sink, Some("message_delta"), &event);
        send(sink, Some("message_stop"), &json!({ "type": "message_stop" }));
    }

    fn fail(&mut self, error: &ErrorBody, sink: &mut dyn EventSink) {
        send(sink, Some("error"), &AnthropicErrorBody::from(error.clone()));
    }

    fn keep_alive(&mut self, sink: &mut dyn EventSink) -> bool {
        send(sink, Some("ping"), &json!({ "type": "ping" }));
        true
    }
}

/// Anthropic's `stop_reason`.
fn stop_reason(reason: Option<FinishReason>, has_calls: bool) -> &'static str {
    match reason {
        Some(FinishReason::StopToken(_) | FinishReason::Complete) if has_calls => "tool_use",
        Some(FinishReason::StopToken(_) | FinishReason::Complete) => "end_turn",
        Some(FinishReason::StopString(_)) => "stop_sequence",
        Some(FinishReason::ContentFilter) => "refusal",
        _ => "max_tokens",
    }
}

#[cfg(test)]
mod tests;

//! `POST /api/chat` and `/api/generate`: responses and streams.

use serde::Serialize;
use serde_json::{Value, json};
use starling::engine::FinishReason;

use super::error::OllamaError;
use super::request::LoadOrUnload;
use crate::answer::Answer;
use crate::clock::{Clock, rfc3339};
use crate::error::ErrorBody;
use crate::openai::response::ResponseHead;
use crate::parts::{Part, WireFormat};
use crate::shared::SharedStr;
use crate::stream::{EventSink, send};
use crate::tools::ToolCall;

/// Answer of `/api/chat` or `/api/generate`, or a new part of one.
#[derive(Debug, Clone, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct OllamaResponse {
    /// Model name.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub model: SharedStr,
    /// Time of this response or part: RFC 3339.
    pub created_at: String,
    /// Message, on `/api/chat`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<OllamaMessage>,
    /// Text, on `/api/generate`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub response: Option<String>,
    /// Reasoning, on `/api/generate`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub thinking: Option<String>,
    /// Whether the answer is complete.
    pub done: bool,
    /// Figures of a complete answer.
    #[serde(flatten)]
    pub figures: Option<OllamaFigures>,
}

/// Message of the model.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct OllamaMessage {
    /// Always `assistant`.
    pub role: &'static str,
    /// Text.
    pub content: String,
    /// Reasoning.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub thinking: Option<String>,
    /// Tool calls.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "openapi", schema(value_type = Vec<Object>))]
    pub tool_calls: Vec<Value>,
}

/// Figures of a complete answer. Durations are in nanoseconds.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct OllamaFigures {
    /// `stop`, `length`, `load` or `unload`.
    pub done_reason: &'static str,
    /// Time from the arrival of the request.
    pub total_duration: u64,
    /// Time until the request left the queue, with the time to load the model.
    pub load_duration: u64,
    /// Tokens of the prompt.
    pub prompt_eval_count: usize,
    /// Time to process the prompt.
    pub prompt_eval_duration: u64,
    /// Generated tokens.
    pub eval_count: usize,
    /// Time to generate them.
    pub eval_duration: u64,
}

/// Endpoint of a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OllamaEndpoint {
    /// `/api/chat`
    Chat,
    /// `/api/generate`
    Generate,
}

/// Writes an answer.
#[derive(Debug)]
pub struct OllamaFormat<C> {
    endpoint: OllamaEndpoint,
    model: SharedStr,
    /// Its zero is the arrival of the request.
    clock: C,
    n_prompt: usize,
    started: u64,
    prefilled: u64,
    message: OllamaMessage,
    figures: OllamaFigures,
}

impl<C: Clock> OllamaFormat<C> {
    /// An answer without text. The zero of `clock` is the arrival of the request.
    pub fn new(endpoint: OllamaEndpoint, head: &ResponseHead, n_prompt: usize, clock: C) -> OllamaFormat<C> {
        OllamaFormat {
            endpoint,
            model: head.model.clone(),
            clock,
            n_prompt,
            started: 0,
            prefilled: 0,
            message: OllamaMessage { role: "assistant", ..OllamaMessage::default() },
            figures: OllamaFigures::default(),
        }
    }

    /// The whole answer.
    pub fn into_response(mut self) -> OllamaResponse {
        let (message, figures) = (std::mem::take(&mut self.message), std::mem::take(&mut self.figures));
        self.response(message, Some(figures))
    }

    fn response(&self, message: OllamaMessage, figures: Option<OllamaFigures>) -> OllamaResponse {
        let is_chat = self.endpoint == OllamaEndpoint::Chat;
        let (created_at, done) = (rfc3339(self.clock.unix_seconds()), figures.is_some());
        let (text, thinking) =
            if is_chat { (None, None) } else { (Some(message.content.clone()), message.thinking.clone()) };
        OllamaResponse {
            model: self.model.clone(),
            created_at,
            message: is_chat.then_some(message),
            response: text,
            thinking,
            done,
            figures,
        }
    }
}

/// The response to a request that only loads or unloads a model; its zero of `clock` is the arrival.
pub fn loaded(endpoint: OllamaEndpoint, model: &str, what: LoadOrUnload, clock: &impl Clock) -> OllamaResponse {
    let message = OllamaMessage { role: "assistant", ..OllamaMessage::default() };
    let is_chat = endpoint == OllamaEndpoint::Chat;
    let total_duration = clock.monotonic_ns();
    OllamaResponse {
        model: model.into(),
        created_at: rfc3339(clock.unix_seconds()),
        message: is_chat.then_some(message),
        response: (!is_chat).then(String::new),
        thinking: None,
        done: true,
        figures: Some(OllamaFigures { done_reason: what.name(), total_duration, ..OllamaFigures::default() }),
    }
}

fn call(call: ToolCall) -> Value {
    let arguments = match serde_json::from_str(&call.function.arguments) {
        Ok(Value::Object(arguments)) => Value::Object(arguments),
        _ => json!({ "arguments": call.function.arguments }),
    };
    json!({ "id": call.id, "function": { "index": call.index, "name": call.function.name, "arguments": arguments } })
}

impl<C: Clock> WireFormat for OllamaFormat<C> {
    fn start(&mut self, _: &mut dyn EventSink) {
        self.started = self.clock.monotonic_ns();
    }

    fn prefilled(&mut self, _: usize) {
        self.prefilled = self.clock.monotonic_ns();
    }

    fn part(&mut self, part: Part, sink: &mut dyn EventSink) {
        let mut new = OllamaMessage { role: "assistant", ..OllamaMessage::default() };
        let all = &mut self.message;
        match part {
            Part::Text(text) => {
                all.content.push_str(&text);
                new.content = text;
            }
            Part::Reasoning(text) => {
                all.thinking.get_or_insert_default().push_str(&text);
                new.thinking = Some(text);
            }
            Part::Call { call: tool_call, .. } => {
                let tool_call = call(tool_call);
                all.tool_calls.push(tool_call.clone());
                new.tool_calls.push(tool_call);
            }
        }
        if sink.is_read() {
            send(sink, None, &self.response(new, None));
        }
    }

    fn finish(&mut self, answer: &Answer, sink: &mut dyn EventSink) {
        let now = self.clock.monotonic_ns();
        self.figures = OllamaFigures {
            done_reason: match answer.finish {
                Some(FinishReason::StopToken(_) | FinishReason::StopString(_) | FinishReason::Complete) => "stop",
                _ => "length",
            },
            total_duration: now,
            load_duration: self.started,
            prompt_eval_count: self.n_prompt,
            prompt_eval_duration: self.prefilled.saturating_sub(self.started),
            eval_count: answer.n_tokens,
            eval_duration: now.saturating_sub(self.prefilled),
        };
        if sink.is_read() {
            let last = OllamaMessage { role: "assistant", ..OllamaMessage::default() };
            send(sink, None, &self.response(last, Some(self.figures.clone())));
        }
    }

    fn fail(&mut self, error: &ErrorBody, sink: &mut dyn EventSink) {
        send(sink, None, &OllamaError::from(error.clone()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parts::AnswerWriter;
    use crate::parts::testing::{hermes, plain, run, updates};

    struct Ticks(std::cell::Cell<u64>);

    impl Clock for Ticks {
        fn unix_seconds(&self) -> u64 {
            951_827_696
        }

        fn monotonic_ns(&self) -> u64 {
            self.0.set(self.0.get() + 10);
            self.0.get()
        }
    }

    fn format(endpoint: OllamaEndpoint) -> OllamaFormat<Ticks> {
        let text = |text: &str| SharedStr::from(text);
        let (id, model, system_fingerprint) = (text("x"), text("tiny"), text("fp"));
        let head = ResponseHead { id, created: 7, model, system_fingerprint, seed: 3, session_id: None };
        OllamaFormat::new(endpoint, &head, 6, Ticks(std::cell::Cell::new(0)))
    }

    #[test]
    fn lines_add_up_to_the_response() {
        let texts = ["Hm.", "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1}}</tool_call>"];
        let writer = AnswerWriter::new(hermes(), format(OllamaEndpoint::Chat));
        let (events, whole) = run(writer, &updates(&texts, FinishReason::StopToken(5)));
        let response = serde_json::to_value(whole.into_response()).expect("JSON");
        let (mut content, mut calls) = (String::new(), Vec::new());
        for (name, line) in &events.0 {
            assert_eq!(
                (name, &line["model"], &line["created_at"]),
                (&None, &json!("tiny"), &json!("2000-02-29T12:34:56Z"))
            );
            content += line["message"]["content"].as_str().expect("a text");
            calls.extend(line["message"]["tool_calls"].as_array().cloned().unwrap_or_default());
        }
        assert_eq!(response["message"]["content"], content);
        assert_eq!(response["message"]["tool_calls"], Value::from(calls));
        assert_eq!(response["message"]["tool_calls"][0]["function"]["arguments"], json!({ "a": 1 }));
        let last = &events.0.last().expect("a line").1;
        for (name, value) in [
            ("done", json!(true)),
            ("done_reason", json!("stop")),
            ("total_duration", json!(30)),
            ("load_duration", json!(10)),
            ("prompt_eval_count", json!(6)),
            ("prompt_eval_duration", json!(10)),
            ("eval_count", json!(2)),
            ("eval_duration", json!(10)),
        ] {
            assert_eq!((&last[name], &response[name]), (&value, &value), "{name}");
        }
    }

    #[test]
    fn generate_has_a_text() {
        let writer = AnswerWriter::new(plain(), format(OllamaEndpoint::Generate));
        let (events, whole) = run(writer, &updates(&["Hi", " you"], FinishReason::Length));
        let response = serde_json::to_value(whole.into_response()).expect("JSON");
        assert_eq!((&response["response"], &response["done_reason"]), (&json!("Hi you"), &json!("length")));
        assert!(response.get("message").is_none());
        let texts: String = events.0.iter().map(|(_, line)| line["response"].as_str().expect("a text")).collect();
        assert_eq!(texts, "Hi you");
        let mut lines = crate::parts::testing::Events::default();
        let error = crate::error::ApiError::param("x", "wrong").body(None);
        format(OllamaEndpoint::Chat).fail(&error, &mut lines);
        assert_eq!(lines.0[0].1, json!({ "error": "wrong" }));
    }
}

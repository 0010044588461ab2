//! `POST /v1/chat/completions`.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use starling::chat::{Json, is_reserved_variable};
use starling::engine::FinishReason;
use starling::model::Model;
use starling::receipt::Receipt;
use starling::tokenizer::Tokenizer;

use super::options::{Logprobs, Options};
use super::response::{CompletionResponse, ResponseHead};
use crate::answer::{Answer, SampledToken, Usage, token_text};
use crate::error::ApiError;
use crate::output::{ModelSyntax, Output, OutputParser, OutputPlan, Piece, SyntaxNames};
use crate::parse::{ParseBody, parse};
use crate::stream::{EventSink, StreamWriter, send};
use crate::structure::OutputConstraint;
use crate::tools::{FunctionDelta, ToolCall, ToolCallDelta, ToolChoice, is_truncated};
use crate::update::Update;
use crate::whole::size_limit;

/// Request for a chat completion.
#[derive(Debug, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ChatCompletionRequest {
    /// Generation options.
    #[serde(flatten)]
    pub options: Options,
    /// Output constraint.
    #[serde(flatten)]
    pub constraint: OutputConstraint,
    /// Messages, and options of chat completions.
    #[serde(flatten)]
    pub chat: ChatFields,
}

/// Messages, and options of chat completions.
#[derive(Debug, Default, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ChatFields {
    /// Messages with `role` and `content`.
    #[cfg_attr(feature = "openapi", schema(value_type = Vec<Object>, min_items = 1))]
    pub messages: Vec<Json>,
    /// Return log-probabilities of the generated tokens.
    pub logprobs: Option<bool>,
    /// Number of most probable tokens to return for each token, 0 to 20; requires `logprobs`.
    #[cfg_attr(feature = "openapi", schema(minimum = 0, maximum = 20))]
    pub top_logprobs: Option<u32>,
    /// Continue the last message, which must be the assistant's, instead of starting a new one. Default: false.
    pub continue_final_message: Option<bool>,
    /// Append the generation prompt of the chat template. Default: true, unless the last message is continued.
    pub add_generation_prompt: Option<bool>,
    /// More variables for the chat template, by name. Those that the server sets are refused, such as `messages`, `tools` and
    /// `add_generation_prompt`.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Object>))]
    pub chat_template_kwargs: Option<Json>,
    /// Functions that the model may call. With an output constraint, an answer is either tool calls or constrained text.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Vec<Object>>))]
    pub tools: Option<Value>,
    /// `auto`, the default: the model decides, and arguments follow the schema of functions with `strict`; `none`;
    /// `required`: at least one call; `{"type": "function", "function": {"name": ...}}`: a call of that function.
    pub tool_choice: Option<ToolChoice>,
    /// Allow several tool calls in one answer. Default: true. Enforced where calls are forced or strict.
    pub parallel_tool_calls: Option<bool>,
    /// Effort of the model's reasoning, for the chat template: `none`, `minimal`, `low`, `medium` or `high`, as the model
    /// knows them. `none` sets the template's variable `enable_thinking` to false.
    pub reasoning_effort: Option<String>,
    /// Maximum number of tokens of reasoning; then its end is forced. -1, the default: no limit.
    #[serde(alias = "reasoning_budget", default, deserialize_with = "size_limit")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<i64>, minimum = -1))]
    pub thinking_budget_tokens: Option<usize>,
    /// Syntax of reasoning in answers: `auto`, the default, by the chat template; `none`: it is content; or a name.
    pub reasoning_format: Option<String>,
    /// Syntax of tool calls in answers: `auto`, the default, by the chat template; `none`: they are content; or a name.
    pub tool_call_format: Option<String>,
    /// Expected content of the answer, `{"type": "content", "content": ...}`: a draft that makes an answer like it
    /// faster and changes no byte.
    pub prediction: Option<Prediction>,
    /// Keep the completion, to be retrieved by its ID. Default: false.
    pub store: Option<bool>,
    /// Metadata of a completion that is kept: at most 16 strings by name.
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Object>))]
    pub metadata: Option<Value>,
}

/// Expected content of an answer.
#[derive(Debug, Clone, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Prediction {
    /// Always `content`.
    pub r#type: PredictionType,
    /// Text, or parts of it.
    pub content: PredictionContent,
}

/// Type of a [`Prediction`].
#[derive(Debug, Clone, Copy, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum PredictionType {
    /// Content.
    Content,
}

/// Text of a [`Prediction`].
#[derive(Debug, Clone, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(untagged)]
pub enum PredictionContent {
    /// All of it.
    Text(String),
    /// In parts of type `text`.
    Parts(Vec<PredictionPart>),
}

/// Part of a [`Prediction`].
#[derive(Debug, Clone, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct PredictionPart {
    /// Always `text`.
    pub r#type: PartType,
    /// The text.
    pub text: String,
}

/// Type of a [`PredictionPart`].
#[derive(Debug, Clone, Copy, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum PartType {
    /// Text.
    Text,
}

impl Prediction {
    /// All of the text.
    pub fn text(&self) -> String {
        match &self.content {
            PredictionContent::Text(text) => text.clone(),
            PredictionContent::Parts(parts) => parts.iter().map(|part| part.text.as_str()).collect(),
        }
    }
}

impl ParseBody for ChatCompletionRequest {
    fn parse_body(json: &[u8]) -> Result<Self, ApiError> {
        Ok(ChatCompletionRequest { options: parse(json)?, constraint: parse(json)?, chat: parse(json)? })
    }
}

impl ChatFields {
    /// The requested log-probabilities.
    ///
    /// # Errors
    /// `top_logprobs` out of range or without `logprobs`.
    pub fn logprobs(&self) -> Result<Logprobs, ApiError> {
        Logprobs::of_answer(self.logprobs, self.top_logprobs)
    }

    /// Variables for the chat template.
    ///
    /// # Errors
    /// `chat_template_kwargs` that is not an object, or has a variable that the server sets.
    pub fn template_variables(&self) -> Result<Vec<(String, Json)>, ApiError> {
        let mut variables = match &self.chat_template_kwargs {
            None | Some(Json::Null) => Vec::new(),
            Some(Json::Object(variables)) => variables.clone(),
            Some(_) => return Err(ApiError::param("chat_template_kwargs", "chat_template_kwargs is not an object")),
        };
        if let Some((name, _)) = variables.iter().find(|(name, _)| is_reserved_variable(name)) {
            let param = format!("chat_template_kwargs.{name}");
            let message =
                format!("{param} is set by the server from other fields of the request, expected other names");
            return Err(ApiError::param(&param, message));
        }
        let mut add = |name: &str, value: Json| {
            if !variables.iter().any(|(other, _)| other == name) {
                variables.push((name.into(), value));
            }
        };
        match self.reasoning_effort.as_deref() {
            Some("none") => add("enable_thinking", Json::Bool(false)),
            Some(effort) => add("reasoning_effort", Json::Str(effort.into())),
            None => {}
        }
        Ok(variables)
    }

    /// The parser of answers of a model with these syntaxes; `defaults` are the names for requests that give none.
    ///
    /// # Errors
    /// An unknown name of a syntax.
    pub fn output(&self, forms: ModelSyntax, defaults: SyntaxNames<'_>) -> Result<OutputPlan, ApiError> {
        // llama-server's name for reasoning in a field of its own
        let reasoning = self.reasoning_format.as_deref().map(|name| if name == "deepseek" { "auto" } else { name });
        let calls = self.tool_call_format.as_deref().or(defaults.calls);
        let names = SyntaxNames { calls, reasoning: reasoning.or(defaults.reasoning) };
        names.check()?;
        Ok(OutputPlan::new(forms, names))
    }
}

/// Choice of a chat completion.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ChatChoice {
    /// Index of the choice.
    pub index: usize,
    /// Message of the model.
    pub message: Message,
    /// Log-probabilities, if requested.
    pub logprobs: Option<ChatLogprobs>,
    /// `stop`, `length` or `tool_calls`.
    pub finish_reason: &'static str,
    /// Receipt, if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Object>))]
    pub receipt: Option<Box<Receipt>>,
}

/// Message of the model.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Message {
    /// Always `assistant`.
    pub role: &'static str,
    /// Text; null if there are only tool calls.
    pub content: Option<String>,
    /// Reasoning of the model before its text, if there is any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// Tool calls, if the request has tools.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// Always null: the server has no content filter.
    pub refusal: Option<String>,
}

/// Log-probabilities of a choice.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ChatLogprobs {
    /// Tokens and their log-probabilities.
    pub content: Vec<TokenLogprob>,
}

/// Token, its log-probability and its alternatives.
#[derive(Debug, Clone, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TokenLogprob {
    /// Text of the token; if its bytes are not UTF-8, each byte as `\x` and two hexadecimal digits.
    pub token: String,
    /// Log-probability (natural logarithm).
    pub logprob: f32,
    /// Bytes of the token.
    pub bytes: Vec<u8>,
    /// Most probable tokens at this position.
    pub top_logprobs: Vec<Alternative>,
}

/// Alternative token.
#[derive(Debug, Clone, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Alternative {
    /// Text of the token; if its bytes are not UTF-8, each byte as `\x` and two hexadecimal digits.
    pub token: String,
    /// Log-probability (natural logarithm).
    pub logprob: f32,
    /// Bytes of the token.
    pub bytes: Vec<u8>,
}

/// New part of a choice.
#[derive(Debug, Default, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ChatDelta {
    /// Index of the choice.
    pub index: usize,
    /// New part of the message.
    pub delta: Delta,
    /// Log-probabilities of the new tokens, if requested.
    pub logprobs: Option<ChatLogprobs>,
    /// `stop`, `length` or `tool_calls`, in the last chunk of the choice.
    pub finish_reason: Option<&'static str>,
    /// Receipt, if requested, in the last chunk of the choice.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[cfg_attr(feature = "openapi", schema(value_type = Option<Object>))]
    pub receipt: Option<Box<Receipt>>,
}

/// New part of a message.
#[derive(Debug, Default, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Delta {
    /// `assistant`, in the first chunk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<&'static str>,
    /// New text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
    /// New text of the model's reasoning.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
    /// New tool calls, and new arguments of calls.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCallDelta>,
}

impl Delta {
    fn add(&mut self, piece: Piece) {
        match piece {
            Piece::Content(text) => self.content.get_or_insert_default().push_str(&text),
            Piece::Reasoning(text) => self.reasoning_content.get_or_insert_default().push_str(&text),
            Piece::Call { call: ToolCall { index, id, kind, function }, .. } => {
                let function = FunctionDelta { name: Some(function.name), arguments: function.arguments };
                self.tool_calls.push(ToolCallDelta { index, id: Some(id), kind: Some(kind), function });
            }
        }
    }
}

/// How a chat completion is written.
#[derive(Clone)]
pub struct ChatPlan {
    /// The model, for the text of tokens.
    pub model: Arc<Model>,
    /// Tokens of the prompt.
    pub n_prompt: usize,
    /// Number of choices.
    pub n: usize,
    /// Whether log-probabilities are written.
    pub logprobs: bool,
    /// Whether a stream ends with token counts.
    pub stream_usage: bool,
    /// How reasoning and tool calls are found in the answers.
    pub output: OutputPlan,
}

impl ChatPlan {
    /// Token counts of `answers`.
    fn usage(&self, answers: &[Answer]) -> Usage {
        let mut usage = Usage::new(self.n_prompt, self.n, answers);
        let n_reasoning = answers.iter().enumerate().map(|(i, answer)| self.output.n_reasoning(i, answer)).sum();
        usage.add_reasoning(n_reasoning);
        usage
    }

    /// The response with the complete `answers`.
    pub fn response(&self, head: ResponseHead, answers: Vec<Answer>) -> CompletionResponse<ChatChoice> {
        let mut response = CompletionResponse::new(head, "chat.completion");
        response.usage = Some(Some(self.usage(&answers)));
        let choice = |(index, answer): (usize, Answer)| {
            let reason = answer.finish_reason();
            let (message, n_calls) = build_message(&answer, self.output.parser(index));
            ChatChoice {
                index,
                logprobs: self.logprobs.then(|| ChatLogprobs::new(&self.model.tokenizer, &answer.tokens)),
                finish_reason: finish_reason(reason, n_calls),
                message,
                receipt: answer.receipt,
            }
        };
        response.choices = answers.into_iter().enumerate().map(choice).collect();
        response
    }
}

/// The message of a complete answer, and the number of its complete tool calls.
fn build_message(answer: &Answer, mut parser: OutputParser) -> (Message, usize) {
    let mut output = Output::default();
    output.extend(parser.push(&answer.text));
    output.extend(parser.finish(is_truncated(answer.finish)));
    let Output { content, reasoning, calls: tool_calls, n_complete } = output;
    let content = (tool_calls.is_empty() || !content.is_empty()).then_some(content);
    let reasoning_content = Some(reasoning).filter(|text| !text.is_empty());
    (Message { role: "assistant", content, reasoning_content, tool_calls, refusal: None }, n_complete)
}

/// OpenAI's `finish_reason` of an answer with `n_calls` complete tool calls.
fn finish_reason(reason: &'static str, n_calls: usize) -> &'static str {
    if n_calls > 0 && reason == "stop" { "tool_calls" } else { reason }
}

impl ChatLogprobs {
    pub(crate) fn new(tokenizer: &Tokenizer, tokens: &[SampledToken]) -> ChatLogprobs {
        let bytes = |token| tokenizer.piece(token).unwrap_or_default().to_vec();
        let text = |token| token_text(tokenizer, token).map_or_else(|bytes| bytes, str::to_string);
        let alternative =
            |&(token, logprob): &(u32, f32)| Alternative { token: text(token), logprob, bytes: bytes(token) };
        let content = tokens.iter().map(|sampled| TokenLogprob {
            token: text(sampled.token),
            logprob: sampled.logprob,
            bytes: bytes(sampled.token),
            top_logprobs: sampled.top.iter().map(alternative).collect(),
        });
        ChatLogprobs { content: content.collect() }
    }
}

/// Writes a chat completion as chunks.
pub struct ChatWriter {
    plan: ChatPlan,
    response: CompletionResponse<ChatDelta>,
    answers: Vec<Answer>,
    /// Text and log-probabilities of the last token of each choice, held until it is known not to be the end token.
    pending: Vec<Option<(String, SampledToken)>>,
    parsers: Vec<OutputParser>,
    /// Complete tool calls of each choice.
    n_calls: Vec<usize>,
}

impl ChatWriter {
    /// A writer of a stream without chunks yet.
    pub fn new(plan: ChatPlan, head: ResponseHead) -> ChatWriter {
        let n = plan.n;
        ChatWriter {
            response: CompletionResponse::new(head, "chat.completion.chunk"),
            answers: (0..n).map(|_| Answer::default()).collect(),
            pending: (0..n).map(|_| None).collect(),
            parsers: (0..n).map(|index| plan.output.parser(index)).collect(),
            n_calls: vec![0; n],
            plan,
        }
    }

    /// The answers so far, one for each choice.
    pub fn answers(&self) -> &[Answer] {
        &self.answers
    }

    fn chunk(&mut self, choices: Vec<ChatDelta>, usage: Option<Usage>, sink: &mut dyn EventSink) {
        self.response.choices = choices;
        self.response.usage = self.plan.stream_usage.then_some(usage);
        send(sink, None, &self.response);
    }

    /// Writes what new text contains, with the log-probabilities of its tokens if they are requested.
    fn text(&mut self, index: usize, text: &str, tokens: &[SampledToken], sink: &mut dyn EventSink) {
        let pieces = self.parsers[index].push(text);
        self.delta(index, pieces, tokens, sink);
    }

    fn delta(&mut self, index: usize, pieces: Vec<Piece>, tokens: &[SampledToken], sink: &mut dyn EventSink) {
        let is_complete = |piece: &&Piece| matches!(piece, Piece::Call { is_complete: true, .. });
        self.n_calls[index] += pieces.iter().filter(is_complete).count();
        let mut delta = Delta::default();
        pieces.into_iter().for_each(|piece| delta.add(piece));
        let is_empty = delta.content.is_none() && delta.reasoning_content.is_none() && delta.tool_calls.is_empty();
        if is_empty && tokens.is_empty() {
            return;
        }
        if is_empty {
            delta.content = Some(String::new());
        }
        let logprobs = self.plan.logprobs.then(|| ChatLogprobs::new(&self.plan.model.tokenizer, tokens));
        self.chunk(vec![ChatDelta { index, delta, logprobs, ..ChatDelta::default() }], None, sink);
    }

    /// Writes the held token.
    fn flush(&mut self, index: usize, sink: &mut dyn EventSink) {
        if let Some((text, token)) = self.pending[index].take() {
            self.text(index, &text, &[token], sink);
        }
    }

    fn finish(&mut self, index: usize, sink: &mut dyn EventSink) {
        let truncated = is_truncated(self.answers[index].finish);
        let pieces = self.parsers[index].finish(truncated);
        self.delta(index, pieces, &[], sink);
        let finish_reason = Some(finish_reason(self.answers[index].finish_reason(), self.n_calls[index]));
        let receipt = self.answers[index].receipt.take();
        self.chunk(vec![ChatDelta { index, finish_reason, receipt, ..ChatDelta::default() }], None, sink);
    }
}

impl StreamWriter for ChatWriter {
    fn update(&mut self, index: usize, update: Update, sink: &mut dyn EventSink) -> bool {
        match &update {
            Update::Started => {
                let delta = Delta { role: Some("assistant"), content: Some(String::new()), ..Delta::default() };
                self.chunk(vec![ChatDelta { index, delta, ..ChatDelta::default() }], None, sink);
            }
            Update::Token { token, text, logprob, top } => {
                self.flush(index, sink);
                // the end token has no text, so that only log-probabilities need to be held
                if self.plan.logprobs {
                    let n_bytes = text.len();
                    let token = SampledToken { token: *token, logprob: *logprob, top: top.clone(), n_bytes };
                    self.pending[index] = Some((text.clone(), token));
                } else if !text.is_empty() {
                    self.text(index, text, &[], sink);
                }
            }
            Update::Done { text, reason, .. } => {
                if matches!(reason, FinishReason::StopToken(_)) {
                    self.pending[index] = None;
                }
                self.flush(index, sink);
                if !text.is_empty() {
                    self.text(index, text, &[], sink);
                }
            }
            _ => {}
        }
        let is_done = matches!(update, Update::Done { .. });
        self.answers[index].add(update);
        if !is_done {
            return false;
        }
        self.finish(index, sink);
        if self.answers.iter().any(|answer| answer.finish.is_none()) {
            return false;
        }
        if self.plan.stream_usage {
            let usage = self.plan.usage(&self.answers);
            self.chunk(Vec::new(), Some(usage), sink);
        }
        sink.done();
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shared::SharedStr;
    use crate::tools::CallIds;
    use starling::pool::Inline;

    /// Collects events as JSON, as a page does.
    #[derive(Default)]
    struct Events {
        chunks: Vec<Value>,
        is_done: bool,
    }

    impl EventSink for Events {
        fn event(&mut self, name: Option<&str>, json: &[u8]) {
            assert_eq!(name, None);
            self.chunks.push(serde_json::from_slice(json).expect("JSON"));
        }

        fn done(&mut self) {
            self.is_done = true;
        }
    }

    fn head() -> ResponseHead {
        let text = |text: &str| SharedStr::from(text);
        let (id, model, system_fingerprint) = (text("chatcmpl-1"), text("tiny"), text("fp"));
        ResponseHead { id, created: 7, model, system_fingerprint, seed: 3, session_id: None }
    }

    fn model() -> Arc<Model> {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/starling-tiny/starling-tiny-q8_0.gguf");
        Arc::new(Model::load(&std::fs::read(path).expect("a model file"), &Inline).expect("a model"))
    }

    /// The updates of an answer of these texts, each of one token, that ends with an end token.
    fn updates(texts: &[&str]) -> Vec<Update> {
        let token = |text: &str| Update::Token { token: 5, text: text.into(), logprob: -0.5, top: vec![(5, -0.5)] };
        let mut updates = vec![Update::Started, Update::Prefilled { n_cached: 2, prompt: Vec::new() }];
        updates.extend(texts.iter().map(|text| token(text)));
        updates.push(token(""));
        let (reason, n_tokens) = (FinishReason::StopToken(5), texts.len() + 1);
        updates.push(Update::Done { text: String::new(), reason, n_tokens, receipt: None });
        updates
    }

    /// The chunks of a stream add up to the response: content, tool calls, log-probabilities, finish reason and usage.
    fn check(model: &Arc<Model>, texts: &[&str], logprobs: bool, output: OutputPlan) -> Value {
        let (n_prompt, n, stream_usage) = (4, 1, true);
        let model = Arc::clone(model);
        let plan = ChatPlan { model, n_prompt, n, logprobs, stream_usage, output };
        let mut answer = Answer::default();
        updates(texts).into_iter().for_each(|update| answer.add(update));
        let response = serde_json::to_value(plan.response(head(), vec![answer])).expect("JSON");
        let mut writer = ChatWriter::new(plan, head());
        let mut events = Events::default();
        let n_updates = updates(texts).len();
        for (i, update) in updates(texts).into_iter().enumerate() {
            assert_eq!(writer.update(0, update, &mut events), i + 1 == n_updates);
        }
        assert!(events.is_done);
        let (mut content, mut reasoning, mut calls, mut tokens) =
            (String::new(), String::new(), Vec::new(), Vec::new());
        for chunk in &events.chunks {
            assert_eq!((&chunk["id"], &chunk["object"]), (&response["id"], &"chat.completion.chunk".into()));
            let choice = &chunk["choices"][0];
            content += choice["delta"]["content"].as_str().unwrap_or_default();
            reasoning += choice["delta"]["reasoning_content"].as_str().unwrap_or_default();
            choice["delta"]["tool_calls"].as_array().into_iter().flatten().for_each(|call| add_call(&mut calls, call));
            tokens.extend(choice["logprobs"]["content"].as_array().cloned().unwrap_or_default());
        }
        let choice = &response["choices"][0];
        assert_eq!(content, choice["message"]["content"].as_str().unwrap_or_default());
        assert_eq!(reasoning, choice["message"]["reasoning_content"].as_str().unwrap_or_default());
        assert_eq!(calls, choice["message"]["tool_calls"].as_array().cloned().unwrap_or_default());
        assert_eq!(tokens, choice["logprobs"]["content"].as_array().cloned().unwrap_or_default());
        assert_eq!(tokens.len(), if logprobs { texts.len() } else { 0 });
        let [.., last, usage] = &events.chunks[..] else { panic!("{:?}", events.chunks) };
        assert_eq!(last["choices"][0]["finish_reason"], choice["finish_reason"]);
        assert_eq!(usage["usage"], response["usage"]);
        response
    }

    /// Adds a delta of a tool call, as clients do.
    fn add_call(calls: &mut Vec<Value>, delta: &Value) {
        let index = delta["index"].as_u64().expect("an index") as usize;
        if index == calls.len() {
            return calls.push(delta.clone());
        }
        assert_eq!(delta.as_object().expect("an object").len(), 2, "{delta}");
        let arguments = |call: &Value| call["function"]["arguments"].as_str().expect("a text").to_string();
        calls[index]["function"]["arguments"] = (arguments(&calls[index]) + &arguments(delta)).into();
    }

    #[test]
    fn chunks_add_up_to_the_response() {
        let model = model();
        let text = || OutputPlan::new(ModelSyntax::default(), SyntaxNames { calls: None, reasoning: Some("think") });
        let tools = || text().tools(Arc::default(), CallIds::new(1));
        let call = ["Hm. ", "<tool", "_call>{\"name\": \"f\", ", "\"arguments\": {\"a\": 1}}", "</tool_call>"];
        for logprobs in [false, true] {
            let hi = check(&model, &["Hi", " there"], logprobs, text());
            assert_eq!(hi["choices"][0]["message"]["content"], "Hi there");
            assert_eq!(hi["choices"][0]["finish_reason"], "stop");
            assert_eq!(hi["usage"]["prompt_tokens_details"]["cached_tokens"], 2);
            let called = check(&model, &call, logprobs, tools());
            let message = &called["choices"][0]["message"];
            assert_eq!(message["content"], "Hm.");
            assert_eq!(
                message["tool_calls"][0]["function"],
                serde_json::json!({ "name": "f", "arguments": "{\"a\":1}" })
            );
            assert_eq!(called["choices"][0]["finish_reason"], "tool_calls");
            // without tools, the tags are text
            assert_eq!(check(&model, &call, logprobs, text())["choices"][0]["message"]["content"], call.concat());
            let thought = check(&model, &["<think>", "1 + 1 ", "is 2", "</think>", "\n\n2"], logprobs, text());
            let message = &thought["choices"][0]["message"];
            assert_eq!((&message["reasoning_content"], &message["content"]), (&"1 + 1 is 2".into(), &"2".into()));
            assert_eq!(thought["usage"]["completion_tokens_details"]["reasoning_tokens"], 4);
        }
    }

    #[test]
    fn an_error_names_its_field() {
        let body = |json: &str| ChatCompletionRequest::parse_body(json.as_bytes()).map_err(|e| (e.status, e.param));
        assert!(
            body(r#"{"messages": [], "temperature": 1, "tool_choice": "auto", "response_format": {"type": "text"}}"#)
                .is_ok()
        );
        for (json, param) in [
            (r#"{"messages": [], "temperature": "hot"}"#, Some("temperature")),
            (r#"{"messages": [], "response_format": {"type": 1}}"#, Some("response_format.type")),
            (r#"{"messages": 1}"#, Some("messages")),
            ("{", None),
        ] {
            assert_eq!(body(json).err(), Some((400, param.map(Into::into))), "{json}");
        }
    }
}

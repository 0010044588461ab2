//! `POST /completion` and `/infill`: responses and streams.

use std::sync::Arc;

use serde::Serialize;
use serde_json::{Map, Value, json};
use starling::engine::FinishReason;
use starling::model::Model;

use crate::answer::{Answer, SampledToken, token_text_lossy};
use crate::clock::Clock;
use crate::openai::response::ResponseHead;
use crate::parts::stop_string;
use crate::shared::SharedStr;
use crate::stream::{EventSink, StreamWriter, send};
use crate::update::Update;

/// Answer of llama-server, or a new part of one.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LlamaCompletion {
    /// Always 0.
    pub index: usize,
    /// Text.
    pub content: String,
    /// Tokens, if requested.
    pub tokens: Vec<u32>,
    /// Slot of the request; -1 if it names none.
    pub id_slot: i64,
    /// Whether the answer is complete.
    pub stop: bool,
    /// Tokens generated so far.
    pub tokens_predicted: usize,
    /// Tokens of the prompt.
    pub tokens_evaluated: usize,
    /// Log-probabilities, if requested.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub completion_probabilities: Option<Vec<TokenProbability>>,
    /// Fields of a complete answer.
    #[serde(flatten)]
    pub end: Option<LlamaEnd>,
}

/// Fields of a complete answer.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LlamaEnd {
    /// Model name.
    #[cfg_attr(feature = "openapi", schema(value_type = String))]
    pub model: SharedStr,
    /// Text of the prompt.
    pub prompt: String,
    /// Whether the answer has a newline.
    pub has_new_line: bool,
    /// Always false: no prompt is cut.
    pub truncated: bool,
    /// `eos`, `word`, `limit` or `none`.
    pub stop_type: &'static str,
    /// Stop string that ended the answer, or empty.
    pub stopping_word: String,
    /// Prompt tokens found in the prefix cache.
    pub tokens_cached: usize,
    /// Options of the request.
    #[cfg_attr(feature = "openapi", schema(value_type = Object))]
    pub generation_settings: Value,
    /// Times.
    pub timings: Timings,
}

/// Times of an answer.
#[derive(Debug, Clone, Default, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct Timings {
    /// Prompt tokens found in the prefix cache.
    pub cache_n: usize,
    /// Prompt tokens that were computed.
    pub prompt_n: usize,
    /// Time to process the prompt, in milliseconds.
    pub prompt_ms: f64,
    /// Milliseconds per prompt token.
    pub prompt_per_token_ms: f64,
    /// Prompt tokens per second.
    pub prompt_per_second: f64,
    /// Generated tokens.
    pub predicted_n: usize,
    /// Time to generate them, in milliseconds.
    pub predicted_ms: f64,
    /// Milliseconds per generated token.
    pub predicted_per_token_ms: f64,
    /// Generated tokens per second.
    pub predicted_per_second: f64,
}

/// A token with its log-probability.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct TokenProbability {
    /// Token ID.
    pub id: u32,
    /// Text of the token, with replacement characters where its bytes are not UTF-8.
    pub token: String,
    /// Bytes of the token.
    pub bytes: Vec<u8>,
    /// Log-probability (natural logarithm).
    pub logprob: f32,
    /// Most probable tokens at this position; none in alternatives.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[cfg_attr(feature = "openapi", schema(value_type = Vec<Object>))]
    pub top_logprobs: Vec<TokenProbability>,
}

/// What a response says of its request.
pub struct LlamaPlan {
    /// The model, for texts of tokens.
    pub model: Arc<Model>,
    /// Tokens of the prompt.
    pub tokens: Vec<u32>,
    /// Stop strings of the request.
    pub stops: Vec<String>,
    /// Slot of the request.
    pub id_slot: i64,
    /// Options of the request.
    pub settings: Value,
    /// Whether tokens are returned.
    pub return_tokens: bool,
    /// Whether log-probabilities are returned.
    pub logprobs: bool,
    /// Fields of the response to return.
    pub response_fields: Option<Vec<String>>,
    /// White space that lines after the first must begin with, in characters.
    pub n_indent: usize,
    /// Whether only the prompt is processed: the answer is dropped.
    pub is_prompt_only: bool,
}

/// Writes an answer.
pub struct LlamaWriter<C> {
    plan: LlamaPlan,
    model_name: SharedStr,
    clock: C,
    started: u64,
    prefilled: u64,
    answer: Answer,
    /// Text and log-probabilities of the last token, held until it is known not to be the end token.
    pending: Option<(String, SampledToken)>,
    last: Option<LlamaEnd>,
    /// Where the last line of the answer begins; 0 for its first line.
    line_start: usize,
}

/// Where a text ends whose lines after the first must begin with `n` characters of white space; `None` if all do so far.
/// `line_start` is the beginning of its last line that was looked at. A line of white space alone may go on.
fn end_of_indented(text: &str, n: usize, line_start: &mut usize) -> Option<usize> {
    let bytes = text.as_bytes();
    loop {
        if *line_start > 0 {
            let indent = bytes[*line_start..].iter().take_while(|byte| matches!(byte, b' ' | b'\t')).count();
            let at = *line_start + indent;
            if indent < n && at < bytes.len() {
                return Some(at);
            }
        }
        match bytes[*line_start..].iter().position(|byte| *byte == b'\n') {
            Some(i) => *line_start += i + 1,
            None => return None,
        }
    }
}

fn milliseconds(from: u64, to: u64) -> f64 {
    to.saturating_sub(from) as f64 / 1e6
}

impl<C: Clock> LlamaWriter<C> {
    /// A writer of an answer without text.
    pub fn new(plan: LlamaPlan, head: &ResponseHead, clock: C) -> LlamaWriter<C> {
        LlamaWriter {
            plan,
            model_name: head.model.clone(),
            clock,
            started: 0,
            prefilled: 0,
            answer: Answer::default(),
            pending: None,
            last: None,
            line_start: 0,
        }
    }

    /// The update as the answer has it: without text if only the prompt is processed, and the last one at a line that is
    /// not indented.
    fn limited(&mut self, update: Update) -> Update {
        let length = |text, n_tokens| Update::Done { text, reason: FinishReason::Length, n_tokens, receipt: None };
        if self.plan.is_prompt_only {
            return match update {
                Update::Token { .. } | Update::Done { .. } => length(String::new(), 0),
                other => other,
            };
        }
        let (Update::Token { text, .. } | Update::Done { text, .. }) = &update else { return update };
        if self.plan.n_indent == 0 {
            return update;
        }
        let all = &mut self.answer.text;
        let n = all.len();
        all.push_str(text);
        let end = end_of_indented(all, self.plan.n_indent, &mut self.line_start);
        // what was sent before cannot be taken back: white space
        let rest = end.map(|end| all.get(n..end).unwrap_or_default().to_string());
        all.truncate(n);
        match rest {
            Some(rest) => length(rest, self.answer.tokens.len() + 1),
            None => update,
        }
    }

    /// The whole response.
    pub fn into_response(mut self) -> Value {
        let (text, tokens) = (std::mem::take(&mut self.answer.text), std::mem::take(&mut self.answer.tokens));
        let end = self.last.take();
        self.fields(self.part(text, &tokens, end))
    }

    fn probability(&self, token: u32, logprob: f32, top: &[(u32, f32)]) -> TokenProbability {
        let tokenizer = &self.plan.model.tokenizer;
        TokenProbability {
            id: token,
            token: token_text_lossy(tokenizer, token),
            bytes: tokenizer.piece(token).unwrap_or_default().to_vec(),
            logprob,
            top_logprobs: top.iter().map(|(token, logprob)| self.probability(*token, *logprob, &[])).collect(),
        }
    }

    fn part(&self, content: String, tokens: &[SampledToken], end: Option<LlamaEnd>) -> LlamaCompletion {
        let probability = |sampled: &SampledToken| self.probability(sampled.token, sampled.logprob, &sampled.top);
        LlamaCompletion {
            index: 0,
            content,
            tokens: if self.plan.return_tokens { tokens.iter().map(|t| t.token).collect() } else { Vec::new() },
            id_slot: self.plan.id_slot,
            stop: end.is_some(),
            tokens_predicted: if end.is_some() { self.answer.n_tokens } else { self.answer.tokens.len() },
            tokens_evaluated: self.plan.tokens.len(),
            completion_probabilities: self.plan.logprobs.then(|| tokens.iter().map(probability).collect()),
            end,
        }
    }

    /// The response with the fields that were asked for, each under its path.
    fn fields(&self, part: LlamaCompletion) -> Value {
        let all = serde_json::to_value(part).unwrap_or_default();
        let Some(paths) = &self.plan.response_fields else { return all };
        let mut chosen = Map::new();
        for path in paths {
            let found = path.split('/').try_fold(&all, |value, name| value.get(name));
            if let Some(value) = found {
                chosen.insert(path.clone(), value.clone());
            }
        }
        Value::Object(chosen)
    }

    fn write(&mut self, text: String, tokens: &[SampledToken], sink: &mut dyn EventSink) {
        // the parts of a stream have all fields, as llama-server's
        if sink.is_read() && (!text.is_empty() || !tokens.is_empty()) {
            send(sink, None, &self.part(text, tokens, None));
        }
    }

    fn flush(&mut self, sink: &mut dyn EventSink) {
        if let Some((text, token)) = self.pending.take() {
            self.write(text, &[token], sink);
        }
    }

    fn end(&self) -> LlamaEnd {
        let (answer, now) = (&self.answer, self.clock.monotonic_ns());
        let stopping_word = stop_string(answer, &self.plan.stops).unwrap_or_default().to_string();
        let prompt_n = self.plan.tokens.len().saturating_sub(answer.n_cached);
        let (prompt_ms, predicted_ms) = (milliseconds(self.started, self.prefilled), milliseconds(self.prefilled, now));
        let per = |total: f64, n: usize| if n == 0 { 0.0 } else { total / n as f64 };
        let rate = |n: usize, total: f64| if total == 0.0 { 0.0 } else { n as f64 * 1000.0 / total };
        let bytes = self
            .plan
            .model
            .tokenizer
            .decode(&self.plan.tokens, starling::tokenizer::DecodeOptions { skip_special: false });
        LlamaEnd {
            model: self.model_name.clone(),
            prompt: String::from_utf8_lossy(&bytes).into_owned(),
            has_new_line: answer.text.contains('\n'),
            truncated: false,
            stop_type: match answer.finish {
                Some(FinishReason::StopToken(_) | FinishReason::Complete) => "eos",
                Some(FinishReason::StopString(_)) => "word",
                Some(FinishReason::Length) => "limit",
                _ => "none",
            },
            stopping_word,
            tokens_cached: answer.n_cached,
            generation_settings: self.plan.settings.clone(),
            timings: Timings {
                cache_n: answer.n_cached,
                prompt_n,
                prompt_ms,
                prompt_per_token_ms: per(prompt_ms, prompt_n),
                prompt_per_second: rate(prompt_n, prompt_ms),
                predicted_n: answer.n_tokens,
                predicted_ms,
                predicted_per_token_ms: per(predicted_ms, answer.n_tokens),
                predicted_per_second: rate(answer.n_tokens, predicted_ms),
            },
        }
    }
}

impl<C: Clock> StreamWriter for LlamaWriter<C> {
    fn update(&mut self, _: usize, update: Update, sink: &mut dyn EventSink) -> bool {
        let update = self.limited(update);
        match &update {
            Update::Started => self.started = self.clock.monotonic_ns(),
            Update::Prefilled { .. } => self.prefilled = self.clock.monotonic_ns(),
            Update::Token { token, text, logprob, top } => {
                self.flush(sink);
                // the end token has no text, so that only what is said of tokens needs to be held
                if self.plan.logprobs || self.plan.return_tokens {
                    let token =
                        SampledToken { token: *token, n_bytes: text.len(), logprob: *logprob, top: top.clone() };
                    self.pending = Some((text.clone(), token));
                } else {
                    self.write(text.clone(), &[], sink);
                }
            }
            Update::Done { text, reason, .. } => {
                if matches!(reason, FinishReason::StopToken(_)) {
                    self.pending = None;
                }
                self.flush(sink);
                self.write(text.clone(), &[], sink);
            }
            _ => {}
        }
        let is_done = matches!(update, Update::Done { .. });
        self.answer.add(update);
        if is_done {
            let end = self.end();
            if sink.is_read() {
                let part = self.part(String::new(), &[], Some(end));
                let fields = self.fields(part);
                send(sink, None, &fields);
            } else {
                self.last = Some(end);
            }
        }
        is_done
    }

    fn fail(&mut self, error: &crate::error::ErrorBody, sink: &mut dyn EventSink) {
        send(sink, None, error);
    }
}

/// The options of a request as `generation_settings` has them.
pub fn generation_settings(
    sampling: &starling::sampler::SamplingOptions,
    max_tokens: usize,
    stops: &[String],
) -> Value {
    json!({
        "n_predict": max_tokens,
        "seed": sampling.seed,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "typical_p": sampling.typical_p,
        "repeat_penalty": sampling.repeat_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stop": stops,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_ends_at_a_line_that_is_not_indented() {
        for (text, n, expected) in [
            ("a\n  b\n    c", 2, None),
            ("a\n  b\n c\n  d", 2, Some("a\n  b\n ")),
            ("a\nb", 1, Some("a\n")),
            ("a\n\n  b", 2, Some("a\n")),
            ("a\n \t", 2, None),
            ("a\n ", 2, None),
            ("ab", 2, None),
        ] {
            // cut anywhere, the end is the same
            for cut in 0..=text.len() {
                let mut start = 0;
                let first = end_of_indented(&text[..cut], n, &mut start);
                let end = first.or_else(|| end_of_indented(text, n, &mut start));
                assert_eq!(end.map(|end| &text[..end]), expected, "{text:?} {cut}");
            }
        }
    }
}

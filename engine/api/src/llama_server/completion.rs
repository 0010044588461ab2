//! `POST /completion` and `/infill`: responses and streams.

use std::sync::Arc;

use serde::Serialize;
use serde_json::{Map, Value, json};
use starling::engine::FinishReason;
use starling::model::Model;
use starling::sampler::SamplingOptions;
use starling::tokenizer::DecodeOptions;

use crate::answer::{Answer, SampledToken, token_text_lossy};
use crate::clock::Clock;
use crate::openai::options::Options;
use crate::openai::response::ResponseHead;
use crate::parts::stop_string;
use crate::shared::SharedStr;
use crate::stream::{EventSink, StreamWriter, send};
use crate::update::Update;

/// Answer of llama-server, or a new part of one.
#[derive(Debug, Serialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct LlamaCompletion {
    /// Index of the prompt.
    pub index: usize,
    /// Text.
    pub content: String,
    /// Tokens; of a whole answer only if requested.
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
    /// Whether the answer ended because the context is full. No prompt is cut.
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
    /// Milliseconds per token after the first, which needs no step of its own.
    pub predicted_per_token_ms: f64,
    /// Tokens after the first per second.
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
    /// Tokens of the prompts.
    pub prompts: Vec<Vec<u32>>,
    /// Context size in tokens.
    pub n_ctx: usize,
    /// Stop strings of the request.
    pub stops: Vec<String>,
    /// Tokens that end an answer.
    pub end_tokens: Vec<u32>,
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

/// Writes the answers to the prompts of a request.
pub struct LlamaWriter<C> {
    plan: LlamaPlan,
    model_name: SharedStr,
    clock: C,
    answers: Vec<LlamaAnswer>,
}

/// The answer to a prompt.
#[derive(Default)]
struct LlamaAnswer {
    started: u64,
    prefilled: u64,
    answer: Answer,
    end: Option<LlamaEnd>,
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

impl LlamaAnswer {
    /// The update as the answer has it: without text if only the prompt is processed, and the last one at a line that is
    /// not indented.
    fn limited(&mut self, plan: &LlamaPlan, update: Update) -> Update {
        let length = |text, n_tokens| Update::Done { text, reason: FinishReason::Length, n_tokens, receipt: None };
        if plan.is_prompt_only {
            return match update {
                Update::Token { .. } | Update::Done { .. } => length(String::new(), 0),
                other => other,
            };
        }
        let (Update::Token { text, .. } | Update::Done { text, .. }) = &update else { return update };
        if plan.n_indent == 0 {
            return update;
        }
        let all = &mut self.answer.text;
        let n = all.len();
        all.push_str(text);
        let end = end_of_indented(all, plan.n_indent, &mut self.line_start);
        // what was sent before cannot be taken back: white space
        let rest = end.map(|end| all.get(n..end).unwrap_or_default().to_string());
        all.truncate(n);
        match (rest, &update) {
            (None, _) => update,
            (Some(rest), Update::Done { reason, n_tokens, .. }) => {
                // as the update would do: the end token is none of the answer
                if matches!(reason, FinishReason::StopToken(_)) {
                    self.answer.tokens.pop();
                }
                length(rest, *n_tokens)
            }
            (Some(rest), _) => length(rest, self.answer.tokens.len() + 1),
        }
    }
}

fn milliseconds(from: u64, to: u64) -> f64 {
    to.saturating_sub(from) as f64 / 1e6
}

impl<C: Clock> LlamaWriter<C> {
    /// A writer of answers without text.
    pub fn new(plan: LlamaPlan, head: &ResponseHead, clock: C) -> LlamaWriter<C> {
        let answers = plan.prompts.iter().map(|_| LlamaAnswer::default()).collect();
        LlamaWriter { plan, model_name: head.model.clone(), clock, answers }
    }

    /// The whole response: an object, or a list of them if there are several prompts.
    pub fn into_response(mut self) -> Value {
        let n = self.answers.len();
        let whole = |index: usize| {
            let LlamaAnswer { answer, end, .. } = &mut self.answers[index];
            let (text, tokens, end) =
                (std::mem::take(&mut answer.text), std::mem::take(&mut answer.tokens), end.take());
            self.fields(self.part(index, text, &tokens, end))
        };
        let mut all: Vec<Value> = (0..n).map(whole).collect();
        if all.len() == 1 { all.remove(0) } else { Value::Array(all) }
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

    fn part(&self, index: usize, content: String, tokens: &[SampledToken], end: Option<LlamaEnd>) -> LlamaCompletion {
        let answer = &self.answers[index].answer;
        let probability = |sampled: &SampledToken| self.probability(sampled.token, sampled.logprob, &sampled.top);
        LlamaCompletion {
            index,
            content,
            tokens: if self.plan.return_tokens { tokens.iter().map(|t| t.token).collect() } else { Vec::new() },
            id_slot: self.plan.id_slot,
            stop: end.is_some(),
            tokens_predicted: if end.is_some() { answer.n_tokens } else { answer.tokens.len() },
            tokens_evaluated: self.plan.prompts[index].len(),
            completion_probabilities: self.plan.logprobs.then(|| tokens.iter().map(probability).collect()),
            end,
        }
    }

    /// The response with the fields that were asked for, each under its path; all of them for an empty list.
    fn fields(&self, part: LlamaCompletion) -> Value {
        let all = serde_json::to_value(part).unwrap_or_default();
        let Some(paths) = self.plan.response_fields.as_ref().filter(|paths| !paths.is_empty()) else { return all };
        let mut chosen = Map::new();
        for path in paths {
            let found = path.split('/').try_fold(&all, |value, name| value.get(name));
            if let Some(value) = found {
                chosen.insert(path.clone(), value.clone());
            }
        }
        Value::Object(chosen)
    }

    fn write(&self, index: usize, text: String, tokens: &[SampledToken], sink: &mut dyn EventSink) {
        // the parts of a stream have all fields, as llama-server's
        if sink.is_read() && (!text.is_empty() || !tokens.is_empty()) {
            send(sink, None, &self.part(index, text, tokens, None));
        }
    }

    fn end(&self, index: usize) -> LlamaEnd {
        let (LlamaAnswer { started, prefilled, answer, .. }, tokens) =
            (&self.answers[index], &self.plan.prompts[index]);
        let stopping_word = stop_string(answer, &self.plan.stops).unwrap_or_default().to_string();
        let prompt_n = tokens.len().saturating_sub(answer.n_cached);
        let prompt_ms = milliseconds(*started, *prefilled);
        let predicted_ms = milliseconds(*prefilled, self.clock.monotonic_ns());
        // the step of the prompt yields the first token
        let n_steps = answer.n_tokens.saturating_sub(1);
        let per = |total: f64, n: usize| if n == 0 { 0.0 } else { total / n as f64 };
        let rate = |n: usize, total: f64| if total == 0.0 { 0.0 } else { n as f64 * 1000.0 / total };
        let options = DecodeOptions { skip_special: false };
        let bytes = self.plan.model.tokenizer.decode(tokens, options);
        LlamaEnd {
            model: self.model_name.clone(),
            prompt: String::from_utf8_lossy(&bytes).into_owned(),
            has_new_line: answer.text.contains('\n'),
            truncated: answer.finish == Some(FinishReason::Length) && tokens.len() + answer.n_tokens > self.plan.n_ctx,
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
                predicted_per_token_ms: per(predicted_ms, n_steps),
                predicted_per_second: rate(n_steps, predicted_ms),
            },
        }
    }
}

impl<C: Clock> StreamWriter for LlamaWriter<C> {
    fn update(&mut self, index: usize, update: Update, sink: &mut dyn EventSink) -> bool {
        let now = self.clock.monotonic_ns();
        let Some(one) = self.answers.get_mut(index).filter(|one| one.answer.finish.is_none()) else { return false };
        let update = one.limited(&self.plan, update);
        let LlamaAnswer { started, prefilled, answer, .. } = one;
        let (part, is_done) = match &update {
            Update::Token { token, text, logprob, top } if !self.plan.end_tokens.contains(token) => {
                let token = SampledToken { token: *token, n_bytes: text.len(), logprob: *logprob, top: top.clone() };
                (Some((text.clone(), vec![token])), false)
            }
            Update::Done { text, .. } => (Some((text.clone(), Vec::new())), true),
            Update::Started => {
                *started = now;
                (None, false)
            }
            Update::Prefilled { .. } => {
                *prefilled = now;
                (None, false)
            }
            _ => (None, false),
        };
        answer.add(update);
        if let Some((text, tokens)) = part {
            self.write(index, text, &tokens, sink);
        }
        if !is_done {
            return false;
        }
        let end = Some(self.end(index));
        if sink.is_read() {
            let part = self.part(index, String::new(), &[], end);
            send(sink, None, &self.fields(part));
        } else {
            self.answers[index].end = end;
        }
        self.answers.iter().all(|one| one.answer.finish.is_some())
    }

    fn fail(&mut self, error: &crate::error::ErrorBody, sink: &mut dyn EventSink) {
        send(sink, None, error);
    }
}

/// The options of a request as `generation_settings` has them; `end_tokens` are those of the model. Options of samplers that
/// this server does not have are off.
pub fn generation_settings(sampling: &SamplingOptions, request: &Options, n_predict: i64, end_tokens: &[u32]) -> Value {
    let ignore_eos = request.ignore_eos == Some(true);
    // null: no bias is so low
    let bans = end_tokens.iter().filter(|_| ignore_eos).map(|token| json!({ "token": token, "bias": null }));
    let biases = sampling.logit_bias.iter().map(|(token, bias)| json!({ "token": token, "bias": bias }));
    json!({
        "n_predict": n_predict,
        "max_tokens": n_predict,
        "seed": sampling.seed,
        "temperature": sampling.temperature,
        "dynatemp_range": 0.0,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "top_n_sigma": -1.0,
        "xtc_probability": 0.0,
        "typical_p": sampling.typical_p,
        "repeat_penalty": sampling.repeat_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "dry_multiplier": sampling.dry.as_ref().map_or(0.0, |dry| dry.multiplier),
        "mirostat": 0,
        "adaptive_target": -1.0,
        "adaptive_decay": 0.9,
        "stop": request.stops(),
        "ignore_eos": ignore_eos,
        "stream": request.is_stream(),
        "logit_bias": biases.chain(bans).collect::<Vec<_>>(),
        "n_probs": sampling.top_logprobs,
        "lora": [],
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

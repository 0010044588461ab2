//! Replies of a session as JSON, for the faces `plain` and `bindgen`.

use serde::Serialize;
use starling::engine::{Event, FinishReason};
use starling::kernels::{Cpu, NUMERICS_VERSION};
use starling::receipt::Hex;

#[cfg(feature = "openai")]
use crate::completion::CompletionEvent;
use crate::session::Session;

/// Serialises a reply.
pub(crate) fn json(reply: &impl Serialize) -> String {
    // replies have string keys and no other error is possible
    serde_json::to_string(reply).unwrap_or_default()
}

impl Session {
    /// The model and how it runs.
    pub(crate) fn info(&self) -> Info {
        let (c, options) = (&self.model.config, self.engine.options());
        Info {
            name: self.model.name.clone(),
            architecture: c.arch.name,
            n_vocab: c.n_vocab,
            n_layer: c.n_layer(),
            n_embd: c.n_embd,
            n_ctx_train: c.n_ctx_train,
            n_ctx: options.n_ctx,
            isa: self.cpu.isa().name(),
            threads: self.pool.threads(),
            available: Cpu::available().iter().map(|c| c.isa().name()).collect(),
            weight_bytes: self.model.weight_bytes(),
            numerics: NUMERICS_VERSION,
            model_sha256: options.model_sha256.map(|d| Hex(d).to_string()),
            causal: c.causal,
            chat_template: self.model.chat_template.clone(),
        }
    }

    /// Bytes of the weights and the KV cache.
    pub(crate) fn memory(&self) -> Memory {
        let kv = self.engine.kv_stats();
        #[cfg(feature = "bindgen")]
        let (kv_stored, kv_refused) = self.pages.stored();
        Memory {
            weights: self.model.weight_bytes(),
            kv_reserved: kv.reserved_bytes,
            kv_committed: kv.committed_bytes,
            kv_in_use: kv.in_use_bytes,
            kv_cached: kv.cached_bytes,
            #[cfg(feature = "bindgen")]
            kv_stored,
            #[cfg(feature = "bindgen")]
            kv_refused,
        }
    }

    /// Runs one batch.
    pub(crate) fn step(&mut self) -> Step {
        let mut events = Vec::new();
        let tokens = self.run(&mut |e| events.push(e));
        Step { tokens, events: events.into_iter().filter_map(|e| self.reply(e)).collect() }
    }

    /// An event as JSON: with the output of its completion, if it is of one.
    fn reply(&mut self, event: Event) -> Option<EventJson> {
        #[cfg(feature = "openai")]
        let event = match self.completions.take(event) {
            Ok(event) => return event.map(EventJson::Completion),
            Err(event) => event,
        };
        EventJson::of(event)
    }

    /// Tokenises a text.
    pub(crate) fn tokenize(&self, text: &str, add_special: bool, parse_special: bool) -> Tokens {
        let (ids, ranges) = self.encode(text, add_special, parse_special);
        Tokens { ids, offsets: ranges.iter().map(|r| [r.start, r.end]).collect() }
    }
}

#[derive(Serialize)]
pub(crate) struct Info {
    pub(crate) name: Option<String>,
    pub(crate) architecture: &'static str,
    pub(crate) n_vocab: usize,
    pub(crate) n_layer: usize,
    pub(crate) n_embd: usize,
    pub(crate) n_ctx_train: usize,
    pub(crate) n_ctx: usize,
    pub(crate) isa: &'static str,
    pub(crate) threads: usize,
    pub(crate) available: Vec<&'static str>,
    pub(crate) weight_bytes: usize,
    pub(crate) numerics: u32,
    pub(crate) model_sha256: Option<String>,
    pub(crate) causal: bool,
    pub(crate) chat_template: Option<String>,
}

/// Bytes of the weights and the KV cache.
#[derive(Serialize)]
pub(crate) struct Memory {
    pub(crate) weights: usize,
    pub(crate) kv_reserved: usize,
    pub(crate) kv_committed: usize,
    pub(crate) kv_in_use: usize,
    pub(crate) kv_cached: usize,
    /// Bytes on disk.
    #[cfg(feature = "bindgen")]
    pub(crate) kv_stored: u64,
    /// Pages on disk that were damaged or of another model.
    #[cfg(feature = "bindgen")]
    pub(crate) kv_refused: usize,
}

/// The tokens of a text, with start and end of each in bytes.
#[derive(Serialize)]
pub(crate) struct Tokens {
    pub(crate) ids: Vec<u32>,
    pub(crate) offsets: Vec<[usize; 2]>,
}

/// The number of tokens in a batch, and the events of the step.
#[derive(Serialize)]
pub(crate) struct Step {
    pub(crate) tokens: usize,
    pub(crate) events: Vec<EventJson>,
}

/// Log-probabilities are f64, the only number type of JavaScript.
#[derive(Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(crate) enum EventJson {
    #[cfg(feature = "openai")]
    Completion(CompletionEvent),
    Prefilled {
        id: u64,
        n_prompt: usize,
        n_cached: usize,
    },
    Token {
        id: u64,
        token: u32,
        text: String,
        logprob: f64,
        top: Vec<(u32, f64)>,
    },
    /// Draft tokens of a step, and how many of them are in the answer.
    Drafted {
        id: u64,
        n_drafted: usize,
        n_accepted: usize,
    },
    Done {
        id: u64,
        text: String,
        reason: &'static str,
        n_tokens: usize,
        /// The error of the constraint, if it ended the answer.
        #[serde(skip_serializing_if = "Option::is_none")]
        error: Option<String>,
        /// The end token, if one ended the answer.
        #[serde(skip_serializing_if = "Option::is_none")]
        stop_token: Option<u32>,
        /// JSON as a string: a 64-bit seed does not fit a JavaScript number.
        #[serde(skip_serializing_if = "Option::is_none")]
        receipt: Option<String>,
    },
}

impl EventJson {
    /// `None` for events that these faces do not report.
    pub(crate) fn of(event: Event) -> Option<EventJson> {
        Some(match event {
            Event::Computed { .. } | Event::Preempted { .. } | Event::Prompt { .. } => return None,
            Event::Drafted { id, n_drafted, n_accepted } => EventJson::Drafted { id: id.0, n_drafted, n_accepted },
            Event::Prefilled { id, n_prompt, n_cached } => EventJson::Prefilled { id: id.0, n_prompt, n_cached },
            Event::Token { id, token, text, logprob, top } => {
                let top = top.into_iter().map(|(token, logprob)| (token, logprob.into())).collect();
                EventJson::Token { id: id.0, token, text, logprob: logprob.into(), top }
            }
            Event::Done { id, text, reason, n_tokens, receipt } => {
                let stop_token = if let FinishReason::StopToken(token) = reason { Some(token) } else { None };
                let error = if let FinishReason::Constraint(e) = reason { Some(e.to_string()) } else { None };
                let receipt = receipt.map(|receipt| json(&receipt));
                EventJson::Done { id: id.0, text, reason: reason.name(), n_tokens, error, stop_token, receipt }
            }
        })
    }
}

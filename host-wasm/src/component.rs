//! The face for component hosts; `wit/starling.wit` documents it.

use std::cell::{Ref, RefCell, RefMut};
use std::collections::VecDeque;

use starling::engine::{Event, FinishReason};
use starling::model::StreamLoader;
use starling::sampler::{Dry, LogprobKind, SamplingOptions};

use crate::session::{self, Conversation, Options, RequestJson, Session, Verdict};

// generated, and a component's exports are raw functions
#[allow(missing_docs, unreachable_pub, unsafe_code, clippy::undocumented_unsafe_blocks)]
mod bindings {
    wit_bindgen::generate!({ path: "wit", world: "starling" });
    export!(Component with_types_in self);
    use super::Component;
}

use bindings::exports::starling::engine::models as wit;

struct Component;

impl wit::Guest for Component {
    type Loader = Loader;
    type Model = Model;
}

struct Loader(RefCell<StreamLoader>);

struct Model {
    session: RefCell<Session>,
    events: RefCell<VecDeque<wit::Event>>,
}

fn error(e: impl Into<session::Error>) -> wit::Error {
    let e = e.into();
    let kind = match e.kind() {
        "model" => wit::ErrorKind::Model,
        "template" => wit::ErrorKind::Template,
        "capacity" => wit::ErrorKind::Capacity,
        "memory" => wit::ErrorKind::Memory,
        "checksum" => wit::ErrorKind::Checksum,
        _ => wit::ErrorKind::Request,
    };
    wit::Error { kind, message: e.to_string() }
}

impl wit::GuestLoader for Loader {
    fn new(lengths: Vec<u64>, digest: bool) -> Loader {
        Loader(RefCell::new(StreamLoader::new(&lengths, digest)))
    }

    fn feed(&self, file: u32, bytes: Vec<u8>) -> Result<bool, wit::Error> {
        self.0.borrow_mut().feed(file as usize, &bytes).map_err(error)
    }

    fn open(loader: wit::Loader, options: wit::Options) -> Result<wit::Model, wit::Error> {
        let Loader(loader) = loader.into_inner();
        let session = Session::open(loader.into_inner(), None, options.into()).map_err(error)?;
        Ok(wit::Model::new(Model { session: RefCell::new(session), events: RefCell::default() }))
    }
}

impl From<wit::Options> for Options {
    fn from(o: wit::Options) -> Options {
        let default = Options::default();
        let size = |n: u32| n as usize;
        Options {
            n_ctx: o.n_ctx.map(size),
            max_seqs: o.max_seqs.map_or(default.max_seqs, size),
            batch_tokens: o.batch_tokens.map_or(default.batch_tokens, size),
            working_memory: o.working_memory.map(size),
            kv_type: match o.kv_type {
                None => default.kv_type,
                Some(wit::KvType::F32) => "f32".into(),
                Some(wit::KvType::F16) => "f16".into(),
                Some(wit::KvType::K8) => "k8".into(),
                Some(wit::KvType::Q8) => "q8".into(),
            },
            isa: o.isa,
            threads: default.threads,
            draft_max: default.draft_max,
        }
    }
}

impl From<wit::Sampling> for SamplingOptions {
    fn from(s: wit::Sampling) -> SamplingOptions {
        let default = SamplingOptions::default();
        SamplingOptions {
            logit_bias: s.logit_bias,
            repeat_penalty: s.repeat_penalty.unwrap_or(default.repeat_penalty),
            repeat_last_n: s.repeat_last_n.unwrap_or(default.repeat_last_n),
            frequency_penalty: s.frequency_penalty.unwrap_or(default.frequency_penalty),
            presence_penalty: s.presence_penalty.unwrap_or(default.presence_penalty),
            penalty_scope: default.penalty_scope,
            dry: s.dry.map(|d| Dry {
                multiplier: d.multiplier,
                base: d.base,
                allowed_length: d.allowed_length,
                last_n: d.last_n,
                breakers: d.breakers,
            }),
            top_k: s.top_k.unwrap_or(default.top_k),
            typical_p: s.typical_p.unwrap_or(default.typical_p),
            top_p: s.top_p.unwrap_or(default.top_p),
            min_p: s.min_p.unwrap_or(default.min_p),
            temperature: s.temperature.unwrap_or(default.temperature),
            seed: s.seed.unwrap_or(default.seed),
            logprobs: match s.logprobs {
                wit::LogprobKind::None => LogprobKind::None,
                wit::LogprobKind::Raw => LogprobKind::Raw,
                wit::LogprobKind::Final => LogprobKind::Final,
            },
            top_logprobs: s.top_logprobs,
        }
    }
}

fn request(r: wit::Request) -> Result<RequestJson, session::Error> {
    let mut sampling = r.sampling;
    let dry_breakers = sampling.dry.as_mut().and_then(|dry| dry.breaker_texts.take());
    let (prompt, ids, chat) = match r.prompt {
        wit::Prompt::Text(text) => (Some(text), None, None),
        wit::Prompt::Ids(ids) => (None, Some(ids), None),
        wit::Prompt::Chat(chat) => (None, None, Some(serde_json::from_str(&chat)?)),
    };
    Ok(RequestJson {
        prompt,
        ids,
        chat,
        parse_special: r.parse_special,
        add_special: r.add_special,
        max_tokens: r.max_tokens.map(|n| n as usize),
        stop: r.stop,
        stop_tokens: r.stop_tokens,
        ignore_eos: r.ignore_eos,
        sequence: r.sequence,
        receipt: r.receipt,
        sampling: sampling.into(),
        dry_breakers,
    })
}

/// `None` for events that the component does not report.
fn event(event: Event) -> Option<wit::Event> {
    Some(match event {
        Event::Computed { .. } | Event::Preempted { .. } | Event::Prompt { .. } | Event::Drafted { .. } => {
            return None;
        }
        Event::Prefilled { id, n_prompt, n_cached } => {
            wit::Event::Prefilled(wit::Prefilled { request: id.0, tokens: n_prompt as u32, cached: n_cached as u32 })
        }
        Event::Token { id, token, text, logprob, top } => {
            let top = top.into_iter().map(|(id, logprob)| wit::Candidate { id, logprob }).collect();
            wit::Event::Token(wit::Token { request: id.0, picked: wit::Candidate { id: token, logprob }, text, top })
        }
        Event::Done { id, text, reason, n_tokens, receipt } => wit::Event::Done(wit::Done {
            request: id.0,
            text,
            tokens: n_tokens as u32,
            stop_token: if let FinishReason::StopToken(token) = reason { Some(token) } else { None },
            reason: match reason {
                FinishReason::StopToken(_) | FinishReason::StopString(_) => wit::Reason::Stop,
                // components have no constraints
                FinishReason::Complete | FinishReason::Constraint(_) => wit::Reason::Stop,
                FinishReason::Length | FinishReason::Deadline | FinishReason::ContentFilter => wit::Reason::Length,
                FinishReason::NotFinite => wit::Reason::NotFinite,
                FinishReason::NoMemory => wit::Reason::NoMemory,
            },
            receipt: receipt.and_then(|r| serde_json::to_string(&r).ok()),
        }),
    })
}

// a component is not reentrant: no borrow overlaps another
impl Model {
    fn session(&self) -> Ref<'_, Session> {
        self.session.borrow()
    }

    fn session_mut(&self) -> RefMut<'_, Session> {
        self.session.borrow_mut()
    }
}

impl wit::GuestModel for Model {
    fn info(&self) -> wit::Info {
        let session = self.session();
        let (model, c) = (&session.model, &session.model.config);
        wit::Info {
            name: model.name.clone(),
            architecture: c.arch.name.into(),
            n_vocab: c.n_vocab as u32,
            n_layer: c.n_layer() as u32,
            n_embd: c.n_embd as u32,
            n_ctx_train: c.n_ctx_train as u32,
            n_ctx: session.engine.options().n_ctx as u32,
            isa: session.cpu.isa().name().into(),
            weight_bytes: model.weight_bytes() as u64,
            causal: c.causal,
            chat_template: model.chat_template.clone(),
        }
    }

    fn memory(&self) -> wit::Memory {
        let kv = self.session().engine.kv_stats();
        wit::Memory {
            weights: self.session().model.weight_bytes() as u64,
            kv_reserved: kv.reserved_bytes as u64,
            kv_committed: kv.committed_bytes as u64,
            kv_in_use: kv.in_use_bytes as u64,
            kv_cached: kv.cached_bytes as u64,
        }
    }

    fn submit(&self, r: wit::Request) -> Result<u64, wit::Error> {
        let r = request(r).map_err(error)?;
        self.session_mut().start(r, None).map_err(error)
    }

    fn step(&self) -> u32 {
        let mut events = self.events.borrow_mut();
        self.session_mut().run(&mut |e| events.extend(event(e))) as u32
    }

    fn next_event(&self) -> Option<wit::Event> {
        self.events.borrow_mut().pop_front()
    }

    fn cancel(&self, request: u64) -> bool {
        self.session_mut().cancel(request)
    }

    fn tokenize(&self, text: String, add_special: bool, parse_special: bool) -> Vec<wit::Piece> {
        let (ids, ranges) = self.session().encode(&text, add_special, parse_special);
        let piece = |(id, range): (u32, std::ops::Range<usize>)| wit::Piece {
            id,
            start: range.start as u32,
            end: range.end as u32,
        };
        ids.into_iter().zip(ranges).map(piece).collect()
    }

    fn detokenize(&self, ids: Vec<u32>) -> Result<Vec<u8>, wit::Error> {
        self.session().detokenize(&ids).map_err(error)
    }

    fn render(&self, chat: String) -> Result<wit::Rendered, wit::Error> {
        let Conversation { text, ids } = self.session().render(&chat).map_err(error)?;
        Ok(wit::Rendered { text, ids })
    }

    fn embed(&self, ids: Vec<u32>) -> Result<Vec<f32>, wit::Error> {
        self.session_mut().embed(&ids).map_err(error)
    }

    fn logits_sha256(&self, ids: Vec<u32>) -> Result<String, wit::Error> {
        self.session().logits_sha256(&ids).map_err(error)
    }

    fn verify(&self, receipt: String) -> Result<wit::Verdict, wit::Error> {
        Ok(match self.session().verify(&receipt).map_err(error)? {
            Verdict::Right { .. } => wit::Verdict::Verified,
            Verdict::Wrong { step, reason, .. } => {
                wit::Verdict::Differs(wit::Difference { step: step.map(|step| step as u32), reason })
            }
        })
    }

    fn save(&self, ids: Vec<u32>) -> Result<Vec<u8>, wit::Error> {
        self.session().save(&ids).map_err(error)
    }

    fn restore(&self, bytes: Vec<u8>) -> Result<u32, wit::Error> {
        self.session_mut().restore(&bytes).map(|n| n as u32).map_err(error)
    }
}

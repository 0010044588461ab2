//! The face for component hosts: `wit/starling.wit` says what everything is.
#![cfg(target_family = "wasm")]

use std::cell::RefCell;

use starling::engine::{Event, FinishReason};
use starling_wasm::loader::Loader;
use starling_wasm::session::{self, Session};

// generated: the exports of a component are raw functions
#[allow(unsafe_code)]
mod bindings {
    wit_bindgen::generate!({ path: "wit", world: "starling" });
    export!(super::Component);
}

use bindings::exports::starling::engine::models as wit;

struct Component;

impl wit::Guest for Component {
    type Loader = OneLoader;
    type Model = Model;
}

struct OneLoader(RefCell<Loader>);

struct Model(RefCell<Session>);

fn error(e: impl Into<session::Error>) -> wit::Error {
    let e = e.into();
    wit::Error { kind: e.kind().into(), message: e.to_string() }
}

impl wit::GuestLoader for OneLoader {
    fn new(lengths: Vec<u64>, digest: bool) -> OneLoader {
        OneLoader(RefCell::new(Loader::new(&lengths, digest)))
    }

    fn feed(&self, file: u32, bytes: Vec<u8>) -> Result<bool, wit::Error> {
        self.0.borrow_mut().feed(file as usize, &bytes).map_err(error)
    }

    fn open(loader: wit::Loader, options: String) -> Result<wit::Model, wit::Error> {
        let loader = loader.into_inner::<OneLoader>().0.into_inner();
        let session = Session::new(loader, &options).map_err(error)?;
        Ok(wit::Model::new(Model(RefCell::new(session))))
    }
}

fn event(event: Event) -> wit::Event {
    match event {
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
                FinishReason::Length => wit::Reason::Length,
                FinishReason::NotFinite => wit::Reason::NotFinite,
                FinishReason::NoMemory => wit::Reason::NoMemory,
            },
            receipt: receipt.and_then(|r| serde_json::to_string(&r).ok()),
        }),
    }
}

impl wit::GuestModel for Model {
    fn info(&self) -> String {
        self.0.borrow().info().to_string()
    }

    fn submit(&self, request: String) -> Result<u64, wit::Error> {
        self.0.borrow_mut().submit(&request).map_err(error)
    }

    fn step(&self) -> (u32, Vec<wit::Event>) {
        let mut events = Vec::new();
        let tokens = self.0.borrow_mut().run(&mut |e| events.push(event(e)));
        (tokens as u32, events)
    }

    fn cancel(&self, request: u64) -> bool {
        self.0.borrow_mut().cancel(request)
    }

    fn tokenize(&self, text: String, add_special: bool, parse_special: bool) -> Vec<u32> {
        let tokens = self.0.borrow().tokenize(&text, add_special, parse_special);
        tokens["ids"].as_array().into_iter().flatten().filter_map(|id| id.as_u64()).map(|id| id as u32).collect()
    }

    fn detokenize(&self, ids: Vec<u32>) -> Result<Vec<u8>, wit::Error> {
        self.0.borrow().detokenize(&ids).map_err(error)
    }

    fn render(&self, chat: String) -> Result<String, wit::Error> {
        let rendered = self.0.borrow().render(&chat).map_err(error)?;
        Ok(rendered["text"].as_str().unwrap_or_default().into())
    }

    fn embed(&self, ids: Vec<u32>) -> Result<Vec<f32>, wit::Error> {
        self.0.borrow_mut().embed(&ids).map_err(error)
    }

    fn logits_sha256(&self, ids: Vec<u32>) -> Result<String, wit::Error> {
        self.0.borrow().logits_sha256(&ids).map_err(error)
    }

    fn verify(&self, receipt: String) -> Result<String, wit::Error> {
        self.0.borrow().verify(&receipt).map(|v| v.to_string()).map_err(error)
    }

    fn save(&self, ids: Vec<u32>) -> Result<Vec<u8>, wit::Error> {
        self.0.borrow().save(&ids).map_err(error)
    }

    fn restore(&self, bytes: Vec<u8>) -> Result<u32, wit::Error> {
        self.0.borrow_mut().restore(&bytes).map(|n| n as u32).map_err(error)
    }
}

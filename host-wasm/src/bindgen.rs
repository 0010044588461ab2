//! The JavaScript face: two classes that throw `Error`s with a `code`; structured values are JSON texts.

use std::sync::Arc;

use starling::kernels::Cpu;
use starling::kernels::isa_benchmark::run;
use starling::model::StreamLoader;
use starling::sampler::Constraint;
use wasm_bindgen::prelude::*;

use crate::constraint::Elsewhere;
use crate::reply::json;
use crate::session::Session;
#[cfg(feature = "threads")]
use crate::threads;
use crate::{crash, session};

#[wasm_bindgen]
extern "C" {
    /// The `Error` of JavaScript.
    pub type Error;
    #[wasm_bindgen(constructor)]
    fn new(message: &str) -> Error;
    #[wasm_bindgen(method, setter)]
    fn set_code(this: &Error, code: &str);
}

fn js(e: impl Into<session::Error>) -> Error {
    let e = e.into();
    let error = Error::new(&e.to_string());
    error.set_code(e.kind());
    error
}

/// What the panic said that stopped the module; empty if there was none. After one, nothing else may be called.
#[wasm_bindgen(js_name = panicMessage)]
pub fn panic_message() -> String {
    crash::message()
}

/// Panics, for programs that test how they go on after it.
#[wasm_bindgen(js_name = crash)]
pub fn panic_on_request() {
    crash::watch();
    crash::crash();
}

/// Computes with an instruction set for a while (see `kernels::isa_benchmark`), for callers with a clock; says whether this module
/// has it, and others to choose from.
#[wasm_bindgen(js_name = race)]
pub fn race_isa(isa: &str, rounds: u32) -> bool {
    cfg!(target_feature = "relaxed-simd") && Cpu::named(isa).map(|cpu| run(cpu, rounds)).is_ok()
}

/// What a worker does that was given this module and its memory: helps the model's thread, and does not return.
#[cfg(feature = "threads")]
#[wasm_bindgen(js_name = threadFollow)]
pub fn thread_follow() {
    crash::watch();
    threads::follow();
}

/// To be called by a worker whose [`thread_follow`] ended with an error: the model's thread may wait for it.
#[cfg(feature = "threads")]
#[wasm_bindgen(js_name = threadLost)]
pub fn thread_lost() {
    threads::lose();
}

/// Panics on a thread that helps, for programs that test how they go on after it.
#[cfg(feature = "threads")]
#[wasm_bindgen(js_name = crashThread)]
pub fn panic_on_a_thread() {
    threads::crash();
}

/// Takes the files of a model piece by piece.
#[wasm_bindgen]
pub struct Loader(StreamLoader);

#[wasm_bindgen]
impl Loader {
    /// For files of these lengths in bytes; `digest` asks for their SHA-256, which receipts need.
    #[wasm_bindgen(constructor)]
    pub fn new(lens: &[f64], digest: bool) -> Loader {
        crash::watch();
        let lens: Vec<u64> = lens.iter().map(|&len| len as u64).collect();
        Loader(StreamLoader::new(&lens, digest))
    }

    /// Takes the next bytes of a file; says whether its directory is known. Bytes after it are best held back until
    /// the directories of all files are known; then the files follow one after the other.
    ///
    /// # Errors
    /// What is wrong with the file.
    pub fn feed(&mut self, file: usize, bytes: &[u8]) -> Result<bool, Error> {
        self.0.feed(file, bytes).map_err(js)
    }

    /// SHA-256 of the bytes of a file taken so far, in hexadecimal, if asked for.
    pub fn sha256(&self, file: usize) -> Option<String> {
        self.0.sha256(file).map(|d| starling::receipt::Hex(d).to_string())
    }

    /// Opens a session once all bytes were fed. `options` is JSON, empty for defaults.
    ///
    /// # Errors
    /// What is wrong with the files or the options.
    pub fn open(self, options: &str) -> Result<Model, Error> {
        Session::new(self.0, options).map(Model).map_err(js)
    }
}

/// A model at work.
#[wasm_bindgen]
pub struct Model(Session);

#[wasm_bindgen]
impl Model {
    /// Name and sizes, as JSON.
    pub fn info(&self) -> String {
        json(&self.0.info())
    }

    /// Takes a request in JSON, and the number of the constraint that its answer follows, which becomes the request's;
    /// returns its id.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn submit(&mut self, request: &str, constraint: Option<u32>) -> Result<f64, Error> {
        let constraint = constraint.map(|number| Arc::new(Elsewhere(number)) as Arc<dyn Constraint>);
        let request = serde_json::from_str(request).map_err(js)?;
        self.0.start(request, constraint).map(|id| id as f64).map_err(js)
    }

    /// The tokens, as the grammar module takes them.
    pub fn words(&self) -> Vec<u8> {
        self.0.model.tokenizer.grammar_vocabulary(self.0.model.config.n_vocab)
    }

    /// Runs one batch; returns `{"tokens", "events"}` as JSON.
    pub fn step(&mut self) -> String {
        json(&self.0.step())
    }

    /// Forgets a request; says whether it was there.
    pub fn cancel(&mut self, id: f64) -> bool {
        self.0.cancel(id as u64)
    }

    /// Keys and values of the cached part of a prompt.
    ///
    /// # Errors
    /// If the loader made no digest of the model.
    pub fn save(&self, ids: &[u32]) -> Result<Vec<u8>, Error> {
        self.0.save(ids).map_err(js)
    }

    /// Takes saved keys and values; returns for how many tokens.
    ///
    /// # Errors
    /// What is wrong with them, or that there is no room.
    pub fn restore(&mut self, bytes: &[u8]) -> Result<usize, Error> {
        self.0.restore(bytes).map_err(js)
    }

    /// Ids of a text.
    pub fn tokenize(&self, text: &str, add_special: bool, parse_special: bool) -> String {
        json(&self.0.tokenize(text, add_special, parse_special))
    }

    /// Text of ids.
    ///
    /// # Errors
    /// If an id is not the model's.
    pub fn detokenize(&self, ids: &[u32]) -> Result<String, Error> {
        self.0.detokenize(ids).map(|b| String::from_utf8_lossy(&b).into_owned()).map_err(js)
    }

    /// The bytes a token stands for.
    pub fn piece(&self, id: u32) -> Vec<u8> {
        self.0.piece(id).into()
    }

    /// Bytes of the weights, and of keys and values, as JSON.
    pub fn memory(&self) -> String {
        json(&self.0.memory())
    }

    /// Text and ids of a conversation in JSON, as JSON.
    ///
    /// # Errors
    /// What is wrong with it, or with the template.
    pub fn render(&self, chat: &str) -> Result<String, Error> {
        self.0.render(chat).map(|conversation| json(&conversation)).map_err(js)
    }

    /// Replays the answer of a receipt in JSON; returns `{"verified", ...}` as JSON.
    ///
    /// # Errors
    /// If this is no receipt, or the loader made no digest of the model.
    pub fn verify(&self, receipt: &str) -> Result<String, Error> {
        self.0.verify(receipt).map(|verdict| json(&verdict)).map_err(js)
    }

    /// The vector of a text, of length 1, as the model's file pools it.
    ///
    /// # Errors
    /// If an id is not the model's, or there are too many.
    pub fn embed(&mut self, ids: &[u32]) -> Result<Vec<f32>, Error> {
        self.0.embed(ids).map_err(js)
    }

    /// SHA-256 of the logits after each of the ids.
    ///
    /// # Errors
    /// If an id is not the model's, or there are too many.
    #[wasm_bindgen(js_name = logitsSha256)]
    pub fn logits_sha256(&self, ids: &[u32]) -> Result<String, Error> {
        self.0.logits_sha256(ids).map_err(js)
    }
}

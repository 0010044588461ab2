//! The JavaScript face: the class `Model`, functions and errors; `loader.rs` has the class `Loader`. They throw `Error`s with a `code`; structured values are JSON.

use std::error::Error as _;
use std::sync::Arc;

use starling::sampler::Constraint;
use wasm_bindgen::prelude::*;

use crate::constraint::{ConstraintObject, JsConstraint};
use crate::reply::json;
use crate::runtime::now_ms;
use crate::session::Session;
#[cfg(feature = "threads")]
use crate::threads;
use crate::{crash, race, session};

#[wasm_bindgen]
extern "C" {
    /// An `Error` with the properties that the package reads: `code`, the kind of failure; `file`, the index of the
    /// model's file that is wrong, where that is known; `cause`, the error underneath.
    #[wasm_bindgen(extends = js_sys::Error)]
    pub type Error;
    #[wasm_bindgen(method, setter)]
    fn set_code(this: &Error, code: &str);
    #[wasm_bindgen(method, setter)]
    fn set_file(this: &Error, file: usize);
}

pub(crate) fn js(e: impl Into<session::Error>) -> Error {
    let e = e.into();
    let (file, message) = e.in_file().map_or_else(|| (None, e.to_string()), |(file, message)| (Some(file), message));
    let error = js_sys::Error::new(&message);
    if let Some(cause) = e.source() {
        error.set_cause(&js_sys::Error::new(&cause.to_string()));
    }
    let error: Error = error.unchecked_into();
    error.set_code(e.kind());
    if let Some(file) = file {
        error.set_file(file);
    }
    error
}

/// The message of the panic that stopped the module; empty if there was none. After a panic nothing else may be called.
#[wasm_bindgen(js_name = panicMessage)]
pub fn panic_message() -> String {
    crash::message()
}

/// Panics: hosts use it to test their recovery.
#[wasm_bindgen(js_name = crash)]
pub fn panic_on_request() {
    crash::install_hook();
    crash::panic_on_request();
}

/// Prepares [`faster_isa`] while the weights arrive; returns whether this module has two instruction sets to choose from.
#[wasm_bindgen(js_name = warmUpIsas)]
pub fn warm_up_isas() -> bool {
    race::warm_up()
}

/// The instruction set of the two that is faster on this CPU, by measuring.
#[wasm_bindgen(js_name = fasterIsa)]
pub fn faster_isa() -> String {
    race::faster().into()
}

/// Its export marks modules with 64-bit addresses, whose bindings are others.
#[cfg(target_arch = "wasm64")]
#[wasm_bindgen(js_name = memory64)]
pub fn memory64() {}

/// Runs parallel regions of the model's thread in a worker with this module and its memory; does not return.
#[cfg(feature = "threads")]
#[wasm_bindgen(js_name = threadFollow)]
pub fn thread_follow() {
    crash::install_hook();
    threads::follow();
}

/// Reports that [`thread_follow`] ended with an error: the model's thread may be waiting for this thread.
#[cfg(feature = "threads")]
#[wasm_bindgen(js_name = threadLost)]
pub fn thread_lost() {
    threads::report_lost_worker();
}

/// Panics on a helper thread: hosts use it to test their recovery.
#[cfg(feature = "threads")]
#[wasm_bindgen(js_name = crashThread)]
pub fn panic_on_a_thread() {
    threads::panic_on_a_thread();
}

fn shared(object: ConstraintObject) -> Arc<dyn Constraint> {
    Arc::new(JsConstraint::new(object))
}

/// A loaded model and its requests.
#[wasm_bindgen]
pub struct Model(pub(crate) Session);

#[wasm_bindgen]
impl Model {
    /// The model and how it runs, as JSON.
    pub fn info(&self) -> String {
        json(&self.0.info())
    }

    /// Takes a request in JSON, and the constraint that its answer follows, which the request frees; returns its id.
    ///
    /// # Errors
    /// If the request is invalid or there is no capacity.
    pub fn submit(&mut self, request: &str, constraint: Option<ConstraintObject>) -> Result<f64, Error> {
        let constraint = constraint.map(shared);
        let request = serde_json::from_str(request).map_err(js)?;
        self.0.start(request, constraint).map(|id| id as f64).map_err(js)
    }

    /// Takes the body of a chat completion, or of a request of another API; `page` is what the page adds, in JSON. Returns `{"completion", "n", ...}` as
    /// JSON; [`Model::submit_choice`] starts its choices.
    ///
    /// # Errors
    /// Those of the server for the same body.
    #[cfg(feature = "openai")]
    #[wasm_bindgen(js_name = openCompletion)]
    pub fn open_completion(&mut self, body: &str, page: &str) -> Result<String, Error> {
        let page = serde_json::from_str(page).map_err(js)?;
        self.0.open_completion(body, page).map(|plan| json(&plan)).map_err(js)
    }

    /// Starts a choice of a completion, whose constraint the request frees; returns the id of its request.
    ///
    /// # Errors
    /// If the request is invalid or there is no capacity.
    #[cfg(feature = "openai")]
    #[wasm_bindgen(js_name = submitChoice)]
    pub fn submit_choice(
        &mut self,
        completion: u32,
        index: usize,
        constraint: Option<ConstraintObject>,
    ) -> Result<f64, Error> {
        self.0.submit_choice(completion, index, constraint.map(shared)).map(|id| id as f64).map_err(js)
    }

    /// Drops a completion; its requests are cancelled by [`Model::cancel`].
    #[cfg(feature = "openai")]
    #[wasm_bindgen(js_name = closeCompletion)]
    pub fn close_completion(&mut self, completion: u32) {
        self.0.completions.close(completion);
    }

    /// The vocabulary, in the format of the grammar module.
    pub fn words(&self) -> Vec<u8> {
        self.0.model.tokenizer.grammar_vocabulary(self.0.model.config.n_vocab)
    }

    /// Runs one batch; returns `{"tokens", "events"}` as JSON. Its duration, by the clock of the runtime, tells the engine how
    /// many draft tokens pay, and with the option `max_step_ms` how large the next batch may be.
    pub fn step(&mut self) -> String {
        let begin = now_ms();
        let step = self.0.step();
        self.0.record_step(step.tokens, now_ms() - begin);
        json(&step)
    }

    /// Keeps KV pages in the origin private file system: [`Model::submit`] and [`Model::submit_choice`] import those of their
    /// prompts, [`Model::save_pages`] stores new ones. At most `max_bytes` bytes with those of other models, the least recently
    /// used of which are removed. To be called before the first request; returns whether there is such storage.
    ///
    /// # Errors
    /// If the loader computed no digest.
    #[wasm_bindgen(js_name = openPages)]
    pub async fn open_pages(&mut self, max_bytes: f64) -> Result<bool, Error> {
        self.0.open_pages(max_bytes).await.map_err(js)
    }

    /// Stores new KV pages for a small share of the last step's time, or for 20 ms while no request runs; returns whether there
    /// may be more.
    #[wasm_bindgen(js_name = savePages)]
    pub fn save_pages(&mut self) -> bool {
        self.0.save_pages()
    }

    /// Removes all stored KV pages of this model.
    #[wasm_bindgen(js_name = clearPages)]
    pub fn clear_pages(&mut self) {
        self.0.clear_pages();
    }

    /// Cancels a request; returns whether it was running.
    pub fn cancel(&mut self, id: f64) -> bool {
        self.0.cancel(id as u64)
    }

    /// Exports the KV cache of the cached prefix of a prompt.
    ///
    /// # Errors
    /// If the loader computed no digest.
    pub fn save(&self, ids: &[u32]) -> Result<Vec<u8>, Error> {
        self.0.save(ids).map_err(js)
    }

    /// Imports a KV cache from [`Model::save`]; returns its number of tokens.
    ///
    /// # Errors
    /// If it is damaged or of another model, or there is no capacity.
    pub fn restore(&mut self, bytes: &[u8]) -> Result<usize, Error> {
        self.0.restore(bytes).map_err(js)
    }

    /// Token ids and byte offsets of a text, as JSON.
    pub fn tokenize(&self, text: &str, add_special: bool, parse_special: bool) -> String {
        json(&self.0.tokenize(text, add_special, parse_special))
    }

    /// The text of token ids.
    ///
    /// # Errors
    /// If an id is not in the vocabulary.
    pub fn detokenize(&self, ids: &[u32]) -> Result<String, Error> {
        self.0.detokenize(ids).map(|b| String::from_utf8_lossy(&b).into_owned()).map_err(js)
    }

    /// The bytes of a token.
    pub fn piece(&self, id: u32) -> Vec<u8> {
        self.0.piece(id).into()
    }

    /// Bytes of the weights and the KV cache, in memory and on disk, as JSON.
    pub fn memory(&self) -> String {
        json(&self.0.memory())
    }

    /// Renders a conversation in JSON with the chat template; returns text and token ids as JSON.
    ///
    /// # Errors
    /// If the conversation or the template is invalid.
    pub fn render(&self, chat: &str) -> Result<String, Error> {
        self.0.render(chat).map(|conversation| json(&conversation)).map_err(js)
    }

    /// Verifies a receipt in JSON by recomputing its answer; returns `{"verified", ...}` as JSON.
    ///
    /// # Errors
    /// If it is not a receipt, or the loader computed no digest.
    pub fn verify(&self, receipt: &str) -> Result<String, Error> {
        self.0.verify(receipt).map(|verdict| json(&verdict)).map_err(js)
    }

    /// The embedding of a text, normalised to length 1, with the pooling of the model file.
    ///
    /// # Errors
    /// If an id is not in the vocabulary, or there are more than the context length.
    pub fn embed(&mut self, ids: &[u32]) -> Result<Vec<f32>, Error> {
        self.0.embed(ids).map_err(js)
    }

    /// SHA-256 of the logits after each token.
    ///
    /// # Errors
    /// If an id is not in the vocabulary, or there are more than the context length.
    #[wasm_bindgen(js_name = logitsSha256)]
    pub fn logits_sha256(&self, ids: &[u32]) -> Result<String, Error> {
        self.0.logits_sha256(ids).map_err(js)
    }
}

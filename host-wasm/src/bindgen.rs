//! The JavaScript face: the classes `Loader` and `Model`. They throw `Error`s with a `code`; structured values are JSON.

use std::error::Error as _;
use std::sync::Arc;

use starling::kernels::Cpu;
use starling::kernels::isa_benchmark::run;
use starling::kv::PageKey;
use starling::model::StreamLoader;
use starling::sampler::Constraint;
use wasm_bindgen::prelude::*;

use crate::constraint::{ConstraintObject, JsConstraint};
use crate::reply::json;
use crate::session::Session;
#[cfg(feature = "threads")]
use crate::threads;
use crate::{crash, session};

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

fn js(e: impl Into<session::Error>) -> Error {
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

/// Computes with an instruction set for a while (see `kernels::isa_benchmark`), for callers with a clock; says whether this module
/// has it, and others to choose from.
#[wasm_bindgen(js_name = race)]
pub fn race_isa(isa: &str, rounds: u32) -> bool {
    cfg!(target_feature = "relaxed-simd") && Cpu::named(isa).map(|cpu| run(cpu, rounds)).is_ok()
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

/// Takes the files of a model in chunks.
#[wasm_bindgen]
pub struct Loader(StreamLoader);

#[wasm_bindgen]
impl Loader {
    /// A loader of files with these lengths in bytes; `digest` computes their SHA-256, which receipts need.
    #[wasm_bindgen(constructor)]
    pub fn new(lens: &[f64], digest: bool) -> Loader {
        crash::install_hook();
        let lens: Vec<u64> = lens.iter().map(|&len| len as u64).collect();
        Loader(StreamLoader::new(&lens, digest))
    }

    /// Loads the layer for multi-token prediction too, which drafts. To be called before the first `feed`; a file without one is
    /// an error.
    #[wasm_bindgen(js_name = loadMtpHead)]
    pub fn load_mtp_head(&mut self) {
        self.0.load_mtp_head();
    }

    /// Takes the next bytes of a file; returns whether its directory is complete. The caller should feed the weights only once
    /// all directories are complete, file after file.
    ///
    /// # Errors
    /// If the file is malformed or unsupported.
    pub fn feed(&mut self, file: usize, bytes: &[u8]) -> Result<bool, Error> {
        self.0.feed(file, bytes).map_err(js)
    }

    /// SHA-256 of the bytes of a file so far, in hexadecimal, if requested.
    pub fn sha256(&self, file: usize) -> Option<String> {
        self.0.sha256(file).map(|d| starling::receipt::Hex(d).to_string())
    }

    /// Opens a session once all bytes were fed. `options` is JSON, empty for defaults; `draft` has a model of the same
    /// vocabulary that drafts.
    ///
    /// # Errors
    /// If a file or an option is wrong.
    pub fn open(self, options: &str, draft: Option<Loader>) -> Result<Model, Error> {
        Session::with_draft(self.0, draft.map(|loader| loader.0), options).map(Model).map_err(js)
    }
}

fn key_bytes(keys: &[PageKey]) -> Vec<u8> {
    keys.iter().flat_map(|key| key.0).collect()
}

fn shared(object: ConstraintObject) -> Arc<dyn Constraint> {
    Arc::new(JsConstraint::new(object))
}

/// A loaded model and its requests.
#[wasm_bindgen]
pub struct Model(Session);

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

    /// Runs one batch; returns `{"tokens", "events"}` as JSON. `time` is the duration of the last batch in any unit, from which
    /// the engine learns how many draft tokens pay; NaN if it is not known.
    pub fn step(&mut self, time: f32) -> String {
        self.0.engine.record_step_time(time);
        json(&self.0.step())
    }

    /// Sets the maximal tokens of a batch, up to those at [`Loader::open`]. Changes no result.
    #[wasm_bindgen(js_name = setBatchTokens)]
    pub fn set_batch_tokens(&mut self, n: usize) {
        self.0.engine.set_batch_limits(n, (n / 2).max(1));
    }

    /// Notes new KV pages from now on, for [`Model::take_new_page`]; returns `{"namespace", "page_bytes", "snapshot_records"}` as
    /// JSON: a digest that the pages of this model and KV type have in common, the size of a page, and for a model with
    /// recurrent layers the number of records, as large as a page, of a snapshot of their state.
    ///
    /// # Errors
    /// If the loader computed no digest.
    #[wasm_bindgen(js_name = trackPages)]
    pub fn track_pages(&mut self) -> Result<String, Error> {
        self.0.track_pages().map(|format| json(&format)).map_err(js)
    }

    /// The oldest new KV page or record of a snapshot, each once: its key of 32 bytes, and the bytes for [`Model::restore`].
    #[wasm_bindgen(js_name = takeNewPage)]
    pub fn take_new_page(&mut self) -> Option<Vec<u8>> {
        self.0.take_new_page()
    }

    /// Keys of the KV pages of a request's prompt that are not in the prefix cache, 32 bytes each.
    ///
    /// # Errors
    /// If the prompt is invalid.
    #[wasm_bindgen(js_name = missingPages)]
    pub fn missing_pages(&self, request: &str) -> Result<Vec<u8>, Error> {
        let request = serde_json::from_str(request).map_err(js)?;
        self.0.missing_pages_of(request).map(|keys| key_bytes(&keys)).map_err(js)
    }

    /// As [`Model::missing_pages`], of an open completion; none if it is closed.
    #[cfg(feature = "openai")]
    #[wasm_bindgen(js_name = missingPagesOfCompletion)]
    pub fn missing_pages_of_completion(&self, completion: u32) -> Vec<u8> {
        let prompt = self.0.completions.prompt(completion).unwrap_or_default();
        key_bytes(&self.0.missing_pages(prompt))
    }

    /// Keys of the records of the snapshot after the page of a key of 32 bytes, 32 bytes each: with recurrent layers a prompt
    /// continues only from a snapshot. None if the key has another length.
    #[wasm_bindgen(js_name = snapshotKeys)]
    pub fn snapshot_keys(&self, page: &[u8]) -> Vec<u8> {
        let key = page.try_into().map(|key| self.0.snapshot_keys(PageKey(key)));
        key.map(|keys| key_bytes(&keys)).unwrap_or_default()
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

    /// Bytes of the weights and the KV cache, as JSON.
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

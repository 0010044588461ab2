//! The JavaScript face: two classes that throw `Error`s; structured values are JSON texts.

use starling::model::StreamLoader;
use wasm_bindgen::prelude::*;

use crate::session::{Error, Session};

fn js(e: impl Into<Error>) -> JsError {
    let e = e.into();
    JsError::new(&format!("{}: {e}", e.kind()))
}

/// Takes a model file piece by piece.
#[wasm_bindgen]
pub struct Loader(StreamLoader);

#[wasm_bindgen]
impl Loader {
    /// For a file of that many bytes; `digest` asks for its SHA-256, which receipts need.
    #[wasm_bindgen(constructor)]
    pub fn new(file_len: f64, digest: Option<bool>) -> Loader {
        let new = if digest.unwrap_or(false) { StreamLoader::with_digest } else { StreamLoader::new };
        Loader(new(file_len as u64))
    }

    /// Takes the next bytes.
    ///
    /// # Errors
    /// What is wrong with the file.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<(), JsError> {
        self.0.feed(bytes).map_err(js)
    }

    /// Opens a session once all bytes were fed. `options` is JSON, empty for defaults.
    ///
    /// # Errors
    /// What is wrong with the file or the options.
    pub fn open(self, options: &str) -> Result<Model, JsError> {
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
        self.0.info().to_string()
    }

    /// Takes a request in JSON; returns its id.
    ///
    /// # Errors
    /// What is wrong with it.
    pub fn submit(&mut self, request: &str) -> Result<f64, JsError> {
        self.0.submit(request).map(|id| id as f64).map_err(js)
    }

    /// Runs one batch; returns `{"tokens", "events"}` as JSON.
    pub fn step(&mut self) -> String {
        self.0.step().to_string()
    }

    /// Forgets a request; says whether it was there.
    pub fn cancel(&mut self, id: f64) -> bool {
        self.0.cancel(id as u64)
    }

    /// Ids of a text.
    pub fn tokenize(&self, text: &str, add_special: bool, parse_special: bool) -> String {
        self.0.tokenize(text, add_special, parse_special).to_string()
    }

    /// Text of ids.
    ///
    /// # Errors
    /// If an id is not the model's.
    pub fn detokenize(&self, ids: &[u32]) -> Result<String, JsError> {
        self.0.detokenize(ids).map(|b| String::from_utf8_lossy(&b).into_owned()).map_err(js)
    }

    /// Replays the answer of a receipt in JSON; returns `{"verified", ...}` as JSON.
    ///
    /// # Errors
    /// If this is no receipt, or the loader made no digest of the model.
    pub fn verify(&self, receipt: &str) -> Result<String, JsError> {
        self.0.verify(receipt).map(|v| v.to_string()).map_err(js)
    }

    /// The vector of a text, of length 1, as the model's file pools it.
    ///
    /// # Errors
    /// If an id is not the model's, or there are too many.
    pub fn embed(&mut self, ids: &[u32]) -> Result<Vec<f32>, JsError> {
        self.0.embed(ids).map_err(js)
    }

    /// SHA-256 of the logits after each of the ids.
    ///
    /// # Errors
    /// If an id is not the model's, or there are too many.
    #[wasm_bindgen(js_name = logitsSha256)]
    pub fn logits_sha256(&self, ids: &[u32]) -> Result<String, JsError> {
        self.0.logits_sha256(ids).map_err(js)
    }
}

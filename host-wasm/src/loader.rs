//! The class `Loader` of the JavaScript face: takes the files of a model, from streams or in chunks.

use js_sys::{Promise, Uint8Array};
use starling::model::StreamLoader;
use starling::receipt::Hex;
use wasm_bindgen::prelude::*;
use wasm_bindgen_futures::JsFuture;
use web_sys::{AbortSignal, ReadableStream};

use crate::bindgen::{Error, Model, js};
use crate::crash;
use crate::session::Session;
use crate::stream::{CHUNK_BYTES, Chunks};

#[wasm_bindgen(typescript_custom_section)]
const TYPES: &str = r#"
/** Sees the chunks of a stream, each valid until `write` has returned or its promise has resolved. */
export interface ByteSink {
  write(bytes: Uint8Array<ArrayBuffer>): void | Promise<void>;
}
"#;

#[wasm_bindgen]
extern "C" {
    /// An object with the methods of the interface `ByteSink`.
    #[wasm_bindgen(typescript_type = "ByteSink")]
    pub type ByteSink;
    #[wasm_bindgen(method, catch)]
    fn write(this: &ByteSink, bytes: &Uint8Array) -> Result<JsValue, JsValue>;
}

/// Takes the files of a model: from streams, or in chunks.
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

    /// Loads the layer for multi-token prediction too, which drafts. To be called before the first byte; a file without one is
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

    /// Takes the next bytes of a file from a stream, to the end of the stream or, with `directory_only`, until the file's
    /// directory is complete; returns whether that was the reason to stop. `is_own` says that the stream is the runtime's own,
    /// as of a file or a response: its chunks share one buffer. `sink` sees each chunk before it is taken. The stream is
    /// cancelled when the promise settles.
    ///
    /// # Errors
    /// As [`Loader::feed`]; the error of the stream or of `sink` as it is; the reason of `signal`. What was taken until then
    /// stays: another stream continues with the byte after the last that `sink` has seen.
    #[wasm_bindgen(js_name = feedStream)]
    pub async fn feed_stream(
        &mut self,
        file: usize,
        stream: ReadableStream,
        directory_only: bool,
        is_own: bool,
        sink: ByteSink,
        signal: Option<AbortSignal>,
    ) -> Result<bool, JsValue> {
        let mut chunks = Chunks::new(&stream, is_own, signal)?;
        let mut buffer = Vec::new();
        while let Some(chunk) = chunks.next().await? {
            if let Ok(written) = sink.write(&chunk)?.dyn_into::<Promise>() {
                JsFuture::from(written).await?;
            }
            if self.feed_array(file, &chunk, &mut buffer)? && directory_only {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// SHA-256 of the bytes of a file so far, in hexadecimal, if requested.
    pub fn sha256(&self, file: usize) -> Option<String> {
        self.0.sha256(file).map(|d| Hex(d).to_string())
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

impl Loader {
    /// As [`Loader::feed`], of an array of JavaScript, by way of a buffer of at most [`CHUNK_BYTES`].
    fn feed_array(&mut self, file: usize, chunk: &Uint8Array, buffer: &mut Vec<u8>) -> Result<bool, Error> {
        let mut is_known = false;
        for from in (0..chunk.length()).step_by(CHUNK_BYTES as usize) {
            let piece = chunk.subarray(from, chunk.length().min(from.saturating_add(CHUNK_BYTES)));
            buffer.resize(piece.length() as usize, 0);
            piece.copy_to(buffer);
            is_known = self.feed(file, buffer)?;
        }
        Ok(is_known)
    }
}

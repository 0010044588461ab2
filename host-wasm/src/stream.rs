//! Reading a web stream as a Rust future: chunk by chunk, in one buffer where the stream allows it, until it ends or is aborted.

use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::task::Poll;

use js_sys::{ArrayBuffer, Function, Promise, TypeError, Uint8Array};
use wasm_bindgen::prelude::*;
use wasm_bindgen_futures::{JsFuture, spawn_local};
use web_sys::{
    AbortSignal, ReadableStream, ReadableStreamByobReader, ReadableStreamDefaultReader, ReadableStreamReadResult,
};

/// Bytes of a chunk.
pub(crate) const CHUNK_BYTES: u32 = 1 << 20;

/// The chunks of a stream.
pub(crate) struct Chunks {
    reader: Reader,
    aborted: Option<Aborted>,
}

enum Reader {
    /// Reads to one buffer: browsers collect chunks late, and much of a model would be in memory twice.
    Bytes {
        reader: ReadableStreamByobReader,
        buffer: ArrayBuffer,
    },
    Any(ReadableStreamDefaultReader),
}

impl Chunks {
    /// Locks a stream and reads it from here on. `is_own` says that it is the runtime's own: one that a script made with the
    /// type `bytes` may leave a read to a buffer unanswered at its end.
    ///
    /// # Errors
    /// If it is locked, or the signal is aborted.
    pub(crate) fn new(stream: &ReadableStream, is_own: bool, signal: Option<AbortSignal>) -> Result<Chunks, JsValue> {
        let reader = match is_own.then(|| ReadableStreamByobReader::new(stream)) {
            Some(Ok(reader)) => Reader::Bytes { reader, buffer: ArrayBuffer::new(CHUNK_BYTES) },
            // not every runtime has readers to a buffer, for every stream
            Some(Err(_)) | None => Reader::Any(ReadableStreamDefaultReader::new(stream)?),
        };
        let mut chunks = Chunks { reader, aborted: None };
        chunks.aborted = signal.map(Aborted::new).transpose()?;
        Ok(chunks)
    }

    /// The next chunk, which is valid until the next call; `None` at the end.
    ///
    /// # Errors
    /// The error of the stream, or the reason of the abort.
    pub(crate) async fn next(&mut self) -> Result<Option<Uint8Array>, JsValue> {
        let read = match &self.reader {
            Reader::Bytes { reader, buffer } => reader.read_with_array_buffer_view(&Uint8Array::new(buffer)),
            Reader::Any(reader) => reader.read(),
        };
        let read = JsFuture::from(read);
        let result: ReadableStreamReadResult = match &mut self.aborted {
            Some(aborted) => aborted.unless(read).await?,
            None => read.await?,
        }
        .unchecked_into();
        if result.get_done().unwrap_or_default() {
            return Ok(None);
        }
        let chunk = bytes_of(result.get_value())?;
        if let Reader::Bytes { buffer, .. } = &mut self.reader {
            *buffer = chunk.buffer().unchecked_into();
        }
        Ok(Some(chunk))
    }
}

impl Drop for Chunks {
    /// Ends the download if bytes are left. Not awaited: a source may never settle.
    fn drop(&mut self) {
        let cancelled = match &self.reader {
            Reader::Bytes { reader, .. } => reader.cancel(),
            Reader::Any(reader) => reader.cancel(),
        };
        spawn_local(async move {
            let _ = JsFuture::from(cancelled).await;
        });
    }
}

/// A chunk of a stream as bytes. Its view may be of another realm, and of another type than `Uint8Array`.
fn bytes_of(chunk: JsValue) -> Result<Uint8Array, JsValue> {
    if !ArrayBuffer::is_view(&chunk) {
        let kind = chunk.js_typeof().as_string().unwrap_or_default();
        return Err(TypeError::new(&format!("a chunk of the stream is of type {kind}, expected a Uint8Array")).into());
    }
    let view: Uint8Array = chunk.unchecked_into();
    Ok(Uint8Array::new_with_byte_offset_and_length(&view.buffer(), view.byte_offset(), view.byte_length()))
}

/// The abort of a signal as a future.
struct Aborted {
    signal: AbortSignal,
    /// Ends the future.
    resolve: Function,
    future: JsFuture,
}

impl Aborted {
    /// # Errors
    /// The reason, if the signal is aborted.
    fn new(signal: AbortSignal) -> Result<Aborted, JsValue> {
        if signal.aborted() {
            return Err(signal.reason());
        }
        let mut listener = None;
        let promise = Promise::new(&mut |resolve, _| listener = Some(resolve));
        let resolve: Function = listener.ok_or(JsValue::UNDEFINED)?.unchecked_into();
        signal.add_event_listener_with_callback("abort", &resolve)?;
        Ok(Aborted { signal, resolve, future: JsFuture::from(promise) })
    }

    /// The result of a future, or the reason of an abort that comes first.
    async fn unless<T>(&mut self, future: impl Future<Output = Result<T, JsValue>>) -> Result<T, JsValue> {
        let mut future = pin!(future);
        poll_fn(|cx| {
            if Pin::new(&mut self.future).poll(cx).is_ready() {
                return Poll::Ready(Err(self.signal.reason()));
            }
            future.as_mut().poll(cx)
        })
        .await
    }
}

impl Drop for Aborted {
    fn drop(&mut self) {
        let _ = self.signal.remove_event_listener_with_callback("abort", &self.resolve);
        // frees what the future left in the module for its promise
        let _ = self.resolve.call0(&JsValue::UNDEFINED);
    }
}

//! C-like exports for runtimes without JavaScript. The module owns all buffers: `starling_alloc` allocates one, the runtime
//! fills it, and the call that it is passed to frees it. A reply is `pointer << 32 | length` of UTF-8 JSON, `{"ok": ...}` or
//! `{"error": {"kind", "message"}}`, which the runtime reads and frees with `starling_free`.
//!
//! ```text
//! starling_alloc(len) -> pointer                     starling_free(pointer)
//! starling_loader(file_len, digest) -> loader        starling_feed(loader, bytes) -> reply
//! starling_split_loader(lens, digest) -> reply: loader
//!                                      starling_feed_part(loader, part, bytes) -> reply: whether its directory is known
//! starling_open(loader, options) -> reply: session   starling_close(session or loader)
//! starling_submit(session, request) -> reply: id     starling_cancel(session, id) -> 1 if it was running
//! starling_step(session) -> reply: tokens, events    starling_info(session) -> reply
//! starling_tokenize(session, text) -> reply          starling_detokenize(session, ids) -> reply
//! starling_logits(session, ids) -> reply: SHA-256     starling_verify(session, receipt) -> reply: verified
//! starling_embed(session, ids) -> reply: vector      starling_render(session, chat) -> reply: text, ids
//! starling_save(session, ids) -> reply: buffer       starling_restore(session, bytes) -> reply: tokens
//! starling_memory(session) -> reply: bytes           starling_crash() panics, to test recovery
//! starling_panic() -> reply: the message of a panic; after one, nothing else may be called
//! ```
//!
//! `host-wasm/README.md` documents the JSON. Feed each part of a split model until its directory is complete, then the rest of each in order. A module built without the
//! feature `chat` replies to `starling_render` and to requests with `chat` with an error; `plain-ISA-chat.wasm` has it. The module
//! imports nothing.
// exported names need `no_mangle`, which the lint counts as unsafe, and `pub`, which nothing in Rust reaches
#![allow(unsafe_code, unreachable_pub)]

use std::cell::RefCell;
use std::collections::BTreeMap;

use crate::crash;
use crate::reply::json;
use crate::session::{Error, Session};
use serde::Serialize;
use starling::model::StreamLoader;

#[derive(Default)]
struct State {
    /// By address.
    buffers: BTreeMap<u32, Vec<u8>>,
    loaders: BTreeMap<u32, StreamLoader>,
    sessions: BTreeMap<u32, Session>,
    next: u32,
}

thread_local! {
    static STATE: RefCell<State> = RefCell::new(State { next: 1, ..State::default() });
}

impl State {
    fn keep(&mut self, mut buffer: Vec<u8>) -> u32 {
        // so that every buffer has an address of its own
        if buffer.capacity() == 0 {
            buffer.reserve_exact(1);
        }
        let at = buffer.as_ptr().addr() as u32;
        self.buffers.insert(at, buffer);
        at
    }

    fn id(&mut self) -> u32 {
        self.next += 1;
        self.next - 1
    }

    fn take(&mut self, pointer: u32) -> Result<Vec<u8>, Error> {
        self.buffers.remove(&pointer).ok_or_else(|| Error::Option(format!("{pointer} is not a buffer of this module")))
    }

    fn take_text(&mut self, pointer: u32) -> Result<String, Error> {
        String::from_utf8(self.take(pointer)?).map_err(|e| Error::Option(format!("invalid UTF-8: {e}")))
    }

    fn loader(&mut self, loader: u32) -> Result<&mut StreamLoader, Error> {
        self.loaders.get_mut(&loader).ok_or_else(|| Error::Option(format!("{loader} is not an open loader")))
    }

    fn session(&mut self, session: u32) -> Result<&mut Session, Error> {
        self.sessions.get_mut(&session).ok_or_else(|| Error::Option(format!("{session} is not an open session")))
    }

    fn reply<T: Serialize>(&mut self, result: Result<T, Error>) -> u64 {
        let text = json(&match result {
            Ok(value) => Reply::Ok(value),
            Err(e) => Reply::Error { kind: e.kind(), message: message(&e) },
        });
        let len = text.len() as u64;
        u64::from(self.keep(text.into_bytes())) << 32 | len
    }
}

#[derive(Serialize)]
#[serde(rename_all = "lowercase")]
enum Reply<T> {
    Ok(T),
    Error { kind: &'static str, message: String },
}

/// What failed; where memory ran out, with what the host has given: the module does not know the host's limit before it is
/// reached.
fn message(error: &Error) -> String {
    match (error, memory_bytes()) {
        (Error::WorkingMemory(_), _) | (_, None) => error.to_string(),
        (_, Some(bytes)) if error.kind() == "memory" => {
            format!("{error}; the module has {bytes} bytes, and the host gave it no more")
        }
        _ => error.to_string(),
    }
}

/// Bytes of the module's memory.
#[cfg(target_arch = "wasm32")]
fn memory_bytes() -> Option<u64> {
    Some(core::arch::wasm32::memory_size(0) as u64 * (64 << 10))
}

#[cfg(not(target_arch = "wasm32"))]
fn memory_bytes() -> Option<u64> {
    None
}

/// A buffer that the runtime reads and frees.
#[derive(Serialize)]
struct Buffer {
    pointer: u32,
    len: usize,
}

fn call<T: Serialize>(f: impl FnOnce(&mut State) -> Result<T, Error>) -> u64 {
    STATE.with_borrow_mut(|s| {
        let result = f(s);
        s.reply(result)
    })
}

/// Allocates a buffer of `len` bytes, to be filled and passed to a call; returns 0 if there is no memory.
#[unsafe(no_mangle)]
pub extern "C" fn starling_alloc(len: u32) -> u32 {
    let mut buffer: Vec<u8> = Vec::new();
    // at least one byte, as in `keep`
    if buffer.try_reserve_exact((len as usize).max(1)).is_err() {
        return 0;
    }
    buffer.resize(len as usize, 0);
    STATE.with_borrow_mut(|s| s.keep(buffer))
}

/// Frees a reply or an unused buffer.
#[unsafe(no_mangle)]
pub extern "C" fn starling_free(pointer: u32) {
    STATE.with_borrow_mut(|s| s.buffers.remove(&pointer));
}

/// A loader of a file of `file_len` bytes; `digest` other than 0 computes its SHA-256, which receipts need.
#[unsafe(no_mangle)]
pub extern "C" fn starling_loader(file_len: u64, digest: u32) -> u32 {
    crash::install_hook();
    STATE.with_borrow_mut(|s| {
        let id = s.id();
        s.loaders.insert(id, StreamLoader::new(&[file_len], digest != 0));
        id
    })
}

/// Feeds a loader the next bytes of its file; replies with the bytes fed so far.
#[unsafe(no_mangle)]
pub extern "C" fn starling_feed(loader: u32, bytes: u32) -> u64 {
    call(|s| {
        let bytes = s.take(bytes)?;
        let loader = s.loader(loader)?;
        loader.feed(0, &bytes)?;
        Ok(loader.fed(0))
    })
}

/// A loader of a split model; the lengths of its parts in bytes are a JSON array; `digest` as in [`starling_loader`].
#[unsafe(no_mangle)]
pub extern "C" fn starling_split_loader(lens: u32, digest: u32) -> u64 {
    crash::install_hook();
    call(|s| {
        let lens: Vec<u64> = serde_json::from_str(&s.take_text(lens)?)?;
        let id = s.id();
        s.loaders.insert(id, StreamLoader::new(&lens, digest != 0));
        Ok(id)
    })
}

/// Feeds a loader the next bytes of a part, from 0; replies whether the part's directory is complete.
#[unsafe(no_mangle)]
pub extern "C" fn starling_feed_part(loader: u32, part: u32, bytes: u32) -> u64 {
    call(|s| {
        let bytes = s.take(bytes)?;
        Ok(s.loader(loader)?.feed(part as usize, &bytes)?)
    })
}

/// Opens a session of a loader whose file is complete.
#[unsafe(no_mangle)]
pub extern "C" fn starling_open(loader: u32, options: u32) -> u64 {
    call(|s| {
        let options = s.take_text(options)?;
        let loader =
            s.loaders.remove(&loader).ok_or_else(|| Error::Option(format!("{loader} is not an open loader")))?;
        let session = Session::new(loader, &options)?;
        let id = s.id();
        s.sessions.insert(id, session);
        Ok(id)
    })
}

/// Frees a session, or a loader that was not opened.
#[unsafe(no_mangle)]
pub extern "C" fn starling_close(id: u32) {
    STATE.with_borrow_mut(|s| {
        s.sessions.remove(&id);
        s.loaders.remove(&id);
    });
}

/// The model and how it runs.
#[unsafe(no_mangle)]
pub extern "C" fn starling_info(session: u32) -> u64 {
    call(|s| Ok(s.session(session)?.info()))
}

/// Submits a request; replies with its id.
#[unsafe(no_mangle)]
pub extern "C" fn starling_submit(session: u32, request: u32) -> u64 {
    call(|s| {
        let request = s.take_text(request)?;
        s.session(session)?.submit(&request)
    })
}

/// Runs one batch.
#[unsafe(no_mangle)]
pub extern "C" fn starling_step(session: u32) -> u64 {
    call(|s| Ok(s.session(session)?.step()))
}

/// Cancels a request; returns 1 if it was running.
#[unsafe(no_mangle)]
pub extern "C" fn starling_cancel(session: u32, id: u64) -> u32 {
    STATE.with_borrow_mut(|s| s.session(session).is_ok_and(|s| s.cancel(id)).into())
}

/// Token ids and byte offsets of a text, with the BOS and EOS tokens that the model requires.
#[unsafe(no_mangle)]
pub extern "C" fn starling_tokenize(session: u32, text: u32) -> u64 {
    call(|s| {
        let text = s.take_text(text)?;
        Ok(s.session(session)?.tokenize(&text, true, false))
    })
}

/// The text of token ids, a JSON array.
#[unsafe(no_mangle)]
pub extern "C" fn starling_detokenize(session: u32, ids: u32) -> u64 {
    call(|s| {
        let ids: Vec<u32> = serde_json::from_str(&s.take_text(ids)?)?;
        let bytes = s.session(session)?.detokenize(&ids)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    })
}

/// Verifies a receipt by recomputing its answer.
#[unsafe(no_mangle)]
pub extern "C" fn starling_verify(session: u32, receipt: u32) -> u64 {
    call(|s| {
        let receipt = s.take_text(receipt)?;
        s.session(session)?.verify(&receipt)
    })
}

/// SHA-256 of the logits after each token of a JSON array.
#[unsafe(no_mangle)]
pub extern "C" fn starling_logits(session: u32, ids: u32) -> u64 {
    call(|s| {
        let ids: Vec<u32> = serde_json::from_str(&s.take_text(ids)?)?;
        s.session(session)?.logits_sha256(&ids)
    })
}

/// The embedding of the tokens of a JSON array.
#[unsafe(no_mangle)]
pub extern "C" fn starling_embed(session: u32, ids: u32) -> u64 {
    call(|s| {
        let ids: Vec<u32> = serde_json::from_str(&s.take_text(ids)?)?;
        let vector = s.session(session)?.embed(&ids)?;
        Ok(vector.into_iter().map(f64::from).collect::<Vec<_>>())
    })
}

/// Renders a conversation; replies with text and token ids.
#[unsafe(no_mangle)]
pub extern "C" fn starling_render(session: u32, chat: u32) -> u64 {
    call(|s| {
        let chat = s.take_text(chat)?;
        s.session(session)?.render(&chat)
    })
}

/// Exports the KV cache of the cached prefix of a prompt, a JSON array of token ids; replies with a buffer,
/// `{"pointer", "len"}`.
#[unsafe(no_mangle)]
pub extern "C" fn starling_save(session: u32, ids: u32) -> u64 {
    call(|s| {
        let ids: Vec<u32> = serde_json::from_str(&s.take_text(ids)?)?;
        let bytes = s.session(session)?.save(&ids)?;
        let len = bytes.len();
        Ok(Buffer { pointer: s.keep(bytes), len })
    })
}

/// Imports a KV cache; replies with its number of tokens.
#[unsafe(no_mangle)]
pub extern "C" fn starling_restore(session: u32, bytes: u32) -> u64 {
    call(|s| {
        let bytes = s.take(bytes)?;
        s.session(session)?.restore(&bytes)
    })
}

/// Bytes of the weights and the KV cache.
#[unsafe(no_mangle)]
pub extern "C" fn starling_memory(session: u32) -> u64 {
    call(|s| Ok(s.session(session)?.memory()))
}

/// The message of the panic that stopped the module; empty if there was none. The reply need not be freed.
#[unsafe(no_mangle)]
pub extern "C" fn starling_panic() -> u64 {
    // touches no other state: the panic may have left it inconsistent
    let text = json(&Reply::Ok(crash::message())).into_bytes().leak();
    u64::from(text.as_ptr().addr() as u32) << 32 | text.len() as u64
}

/// Panics.
#[unsafe(no_mangle)]
pub extern "C" fn starling_crash() {
    crash::panic_on_request();
}

//! Starling runs language models from GGUF files on CPUs, with the same output bytes on every target.
//!
//! The crate takes bytes and returns events. It does no IO, reads no clock, starts no thread and draws no entropy: the
//! host passes the model file as bytes, threads as a [`pool::Pool`], the instruction set as a [`kernels::Cpu`] and the
//! seed as an option. The model file, the request and the KV type determine every bit of the output; instruction set,
//! number of threads, batching and cache state do not change it.
//!
//! [`model::Model::load`] loads a model, [`engine::Engine::submit`] takes a request, [`engine::Engine::step`] runs one
//! batch and calls a closure for each event:
//!
//! ```
//! use std::sync::Arc;
//!
//! use starling::engine::{Engine, EngineOptions, Event, Request};
//! use starling::kernels::{Cpu, attention::KvType};
//! use starling::model::Model;
//! use starling::pool::Inline;
//! use starling::sampler::SamplingOptions;
//! use starling::tokenizer::EncodeOptions;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let file = std::fs::read("../fixtures/starling-tiny/starling-tiny-q8_0.gguf")?;
//! let model = Arc::new(Model::load(&file, &Inline)?);
//!
//! let options = EngineOptions {
//!     kv_type: KvType::F16,
//!     n_ctx: 256,
//!     max_seqs: 1,
//!     batch_tokens: 64,
//!     prefill_chunk: 64,
//!     draft_rows: 0,
//!     kv_bytes: EngineOptions::kv_bytes_of(&model, KvType::F16, 256),
//!     snapshots: Default::default(),
//!     model_sha256: None,
//! };
//! let mut engine = Engine::new(Arc::clone(&model), &Inline, options)?;
//!
//! let tokens = model.tokenizer.encode("Once upon a time", EncodeOptions { add_special: true, parse_special: false });
//! engine.submit(Request {
//!     max_tokens: Some(8),
//!     sampling: SamplingOptions { temperature: 0.0, ..SamplingOptions::default() },
//!     ..Request::new(tokens)
//! })?;
//!
//! let mut output = String::new();
//! while !engine.is_idle() {
//!     engine.step(Cpu::detect(), &Inline, &mut |event| match event {
//!         Event::Token { text, .. } | Event::Done { text, .. } => output.push_str(&text),
//!         _ => {}
//!     });
//! }
//! assert!(!output.is_empty());
//! # Ok(())
//! # }
//! ```
//!
//! The example `generate` is a complete program with threads. Modules by task: [`model`] and [`gguf`] load files,
//! [`tokenizer`] and the feature `chat` turn texts and conversations into tokens, [`engine`] generates, [`diffusion`]
//! too, [`embed`] embeds, [`sampler`] chooses tokens, [`draft`] guesses them ahead, [`kv`] caches prefixes, [`receipt`] proves outputs. Errors are in [`error`].
#![no_std]
#![deny(unsafe_code)]
#![warn(clippy::std_instead_of_core, clippy::alloc_instead_of_core)]

extern crate alloc;
#[cfg(any(feature = "std", test))]
extern crate std;

#[cfg(feature = "chat")]
pub mod chat;
pub mod diffusion;
pub mod draft;
pub mod embed;
pub mod engine;
pub mod error;
pub mod gguf;
#[cfg(feature = "grammar-sources")]
pub mod grammar_source;
pub mod kv;
pub mod model;
pub mod receipt;
pub mod sampler;
#[cfg(feature = "structure")]
pub mod structure;
pub mod text;
pub mod tokenizer;

pub use starling_compute::{kernels, math, pool, quant};

//! Starling's engine: GGUF in, tokens out, the same bytes on every target.
#![no_std]
#![deny(unsafe_code)]
#![warn(clippy::std_instead_of_core, clippy::alloc_instead_of_core)]

extern crate alloc;
#[cfg(any(feature = "std", test))]
extern crate std;

#[cfg(feature = "chat")]
pub mod chat;
pub mod embed;
pub mod engine;
pub mod error;
pub mod gguf;
pub mod kv;
pub mod model;
pub mod receipt;
pub mod sampler;
#[cfg(feature = "structure")]
pub mod structure;
pub mod text;
pub mod tokenizer;

pub use starling_compute::{kernels, math, pool, quant};

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
pub mod kernels;
pub mod kv;
pub mod math;

pub mod model;
pub mod pool;
pub mod quant;
pub mod receipt;
pub mod sampler;
mod sort;
pub mod text;
pub mod tokenizer;

//! All numeric code of the engine, and its only SIMD code.
//!
//! An operation is an `Op`: its `scalar` body defines the result, its `simd` body computes the same arithmetic on the
//! lane types of an instruction set (`simd::Simd`). `Cpu::run` chooses the instruction set. SIMD runs across outputs,
//! never across a reduction, so both bodies give the same bits; `tests` below and in each file check this on every
//! [`Cpu::available`].
// a WebAssembly module without SIMD does not use the lane types
#![cfg_attr(all(target_family = "wasm", not(target_feature = "simd128")), allow(dead_code, unused_imports))]
// register tiles are indexed by row vector and column; `from_bits` is the name in the standard library
#![allow(clippy::needless_range_loop, clippy::wrong_self_convention)]

mod aligned;
mod cpu;
mod formats;
mod isa;
mod simd;
mod sync;

pub mod attention;
pub mod crew;
pub mod elementwise;
pub mod exp;
pub mod isa_benchmark;
pub mod matmul;
mod narrow;
pub mod norm;
pub mod recurrent;
pub mod rope;
pub mod softmax;
pub mod special;
#[cfg(feature = "std")]
pub mod standby;
pub mod tasks;

pub(crate) use aligned::SharedOut;
pub use aligned::{AlignedBuf, WeightArena};
pub use cpu::{Cpu, Isa, UnknownIsa};
pub use formats::{act, panel};
use formats::{bit_packing, decoded, i16_fields, panel_layout, tiles};
pub use matmul::f32_tile;

/// Version of the numerics: changes whenever a logit, state, probability or draw changes on any input. Receipts contain
/// it.
pub const NUMERICS_VERSION: u32 = 3;

#[cfg(test)]
pub(crate) mod tests;

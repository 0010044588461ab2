//! Every number the engine computes, and the only SIMD.
//!
//! An operation is an `Op`: its `scalar` body is the definition, its `simd` body the same arithmetic over the lane
//! types of an instruction set (`simd::Simd`). `Cpu::run` picks one. SIMD runs across outputs, never across a
//! reduction, so both give the same bits; `tests` below and in each file prove it on every [`Cpu::available`].
#![allow(unsafe_code)]
// a WebAssembly module without SIMD has no use for the lanes
#![cfg_attr(all(target_arch = "wasm32", not(target_feature = "simd128")), allow(dead_code, unused_imports))]
// register tiles are indexed by row vector and column; `from_bits` is the name in the standard library
#![allow(clippy::needless_range_loop, clippy::wrong_self_convention)]

mod aligned;
mod bit_packing;
mod cpu;
mod decoded;
#[cfg(any(target_arch = "x86_64", all(target_arch = "aarch64", target_endian = "little")))]
mod features;
mod i16_fields;
mod pack;
mod panel_layout;
mod simd;

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(all(target_arch = "aarch64", target_endian = "little"))]
mod neon;
#[cfg(all(target_arch = "wasm32", target_feature = "simd128"))]
mod wasm;
#[cfg(all(target_arch = "wasm32", target_feature = "relaxed-simd"))]
mod wasm_probe;

pub mod act;
pub mod attention;
pub mod crew;
pub mod elementwise;
pub mod exp;
pub mod f32_tile;
pub mod isa_benchmark;
pub mod matmul;
mod matmul_tasks;
mod narrow;
pub mod norm;
pub mod panel;
pub mod rope;
pub mod softmax;
pub mod special;
#[cfg(feature = "std")]
pub mod standby;
pub mod tasks;
mod tiles;

pub(crate) use aligned::SharedOut;
pub use aligned::{AlignedBuf, WeightArena};
pub use cpu::{Cpu, Isa, UnknownIsa};

/// Changes whenever a canonical number does: a logit, a state, a probability or a draw, on any input. Receipts name it.
pub const NUMERICS_VERSION: u32 = 2;

#[cfg(test)]
pub(crate) mod tests;

//! Kernels, weight formats and elementary functions of Starling: every number of a forward pass is computed in this
//! crate.
//!
//! The crate `starling` re-exports these modules. They are a crate of their own so that builds for browsers can compile
//! them for speed and the rest for size.
#![no_std]
// the intrinsics of memory64 modules are those of wasm32, and not stable yet (tests/build-wasm.sh)
#![cfg_attr(target_arch = "wasm64", feature(simd_wasm64))]
#![deny(unsafe_code)]
#![warn(clippy::std_instead_of_core, clippy::alloc_instead_of_core)]

extern crate alloc;
#[cfg(any(feature = "std", test))]
extern crate std;

pub mod kernels;
pub mod math;
pub mod pool;
pub mod quant;

//! What Starling computes with: every number of a forward pass is made here. The engine shows these modules as its own;
//! they are a crate so that they alone can be compiled for speed where the rest is compiled for size.
#![no_std]
#![deny(unsafe_code)]
#![warn(clippy::std_instead_of_core, clippy::alloc_instead_of_core)]

extern crate alloc;
#[cfg(any(feature = "std", test))]
extern crate std;

pub mod kernels;
pub mod math;
pub mod pool;
pub mod quant;

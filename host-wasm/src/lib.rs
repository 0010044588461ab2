//! Starling for WebAssembly. [`session`] is what both faces show: `plain`, exports that any runtime can call, and
//! `bindgen`, a package for JavaScript. Requests and replies are JSON.

#[cfg(feature = "bindgen")]
pub mod bindgen;
#[cfg(any(feature = "bindgen", feature = "plain"))]
mod crash;
pub mod loader;
#[cfg(feature = "plain")]
mod plain;
pub mod session;
mod threads;

//! Starling for WebAssembly. [`session`] is what both faces show: `plain`, exports that any runtime can call, and
//! `bindgen`, a package for JavaScript. Requests and replies are JSON.

#[cfg(feature = "bindgen")]
mod bindgen;
#[cfg(feature = "plain")]
mod plain;
pub mod session;

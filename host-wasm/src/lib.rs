//! Starling for WebAssembly. [`session`] is what all faces show: `plain`, exports that any runtime can call, and
//! `bindgen`, a package for JavaScript, in JSON; and `component`, a WebAssembly component, in types.

#[cfg(feature = "bindgen")]
pub mod bindgen;
#[cfg(all(feature = "component", target_family = "wasm"))]
mod component;
#[cfg(feature = "bindgen")]
mod constraint;
#[cfg(any(feature = "bindgen", feature = "plain"))]
mod crash;
#[cfg(feature = "plain")]
mod plain;
#[cfg(any(feature = "bindgen", feature = "plain"))]
mod reply;
pub mod session;
mod threads;

//! Starling for WebAssembly. [`session`] has the operations; three faces export them: `bindgen` for JavaScript and `plain` for
//! runtimes without JavaScript, both with JSON, and `component`, a WebAssembly component with types.

#[cfg(feature = "bindgen")]
pub mod bindgen;
#[cfg(feature = "openai")]
mod completion;
#[cfg(all(feature = "component", target_family = "wasm"))]
mod component;
#[cfg(feature = "bindgen")]
mod constraint;
#[cfg(any(feature = "bindgen", feature = "plain"))]
mod crash;
#[cfg(feature = "bindgen")]
mod pages;
#[cfg(feature = "plain")]
mod plain;
#[cfg(any(feature = "bindgen", feature = "plain"))]
mod reply;
pub mod session;
mod threads;

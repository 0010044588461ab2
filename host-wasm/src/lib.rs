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
mod loader;
#[cfg(feature = "bindgen")]
mod opfs;
#[cfg(feature = "bindgen")]
mod pacer;
#[cfg(feature = "bindgen")]
mod page_store;
#[cfg(feature = "bindgen")]
mod pages;
#[cfg(feature = "plain")]
mod plain;
#[cfg(feature = "bindgen")]
mod race;
#[cfg(any(feature = "bindgen", feature = "plain"))]
mod reply;
#[cfg(feature = "bindgen")]
mod runtime;
pub mod session;
#[cfg(feature = "bindgen")]
mod stream;
mod threads;

//! What the command and the server of Starling need of the machine: model files and where they come from, threads, memory,
//! loading.

#![deny(unsafe_code)]
// not published: items are documented where there is something to say, and `pub` means the crate where a module is private
#![allow(missing_docs, unreachable_pub)]

pub mod bytes;
pub mod clock;
pub mod error;
pub mod load;
pub mod machine;
pub mod model_file;
pub mod pool;
pub mod progress;
pub mod registry;
pub mod session_file;
pub mod structure;
pub mod template;
pub mod text_file;
pub mod tls_provider;

//! Tokenizers against other implementations and against definitions.

mod file;
mod metadata;
mod pretokenizers;
mod properties;
mod reference;
mod trained;

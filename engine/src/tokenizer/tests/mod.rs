//! Tokenizers against other implementations and against definitions.

mod pretokenizers;
mod reference;

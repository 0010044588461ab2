//! Tokenizers against other implementations and against definitions.

mod reference;

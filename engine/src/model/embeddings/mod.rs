//! Embeddings beside those of the tokens.

pub(crate) mod ngrams;

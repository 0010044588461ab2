//! Element types of tensors: [`Dtype`] knows all of ggml's by name and size, one file per type that we compute with.

mod dtype;

pub use self::dtype::Dtype;

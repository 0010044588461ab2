//! The parts of requests and answers that all APIs share, by their public functions: ranges and the names of what is
//! wrong, forms of output constraints, prompts of infill models, tokens and texts, vectors, and token counts.

mod answer;
mod constraint;
mod embeddings;
mod infill;
mod options;
mod tokenize;
mod vocabulary;

use starling_api::error::ApiError;

/// Checks the field that an error names, and a part of its message.
#[track_caller]
fn check_error(error: &ApiError, status: u16, param: Option<&str>, part: &str) {
    assert_eq!((error.status, error.param.as_deref()), (status, param), "{error:?}");
    assert!(error.message.contains(part), "{error:?}, expected {part:?}");
}

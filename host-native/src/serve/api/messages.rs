//! Renders messages on blocking threads.

use std::sync::Arc;
use std::time::Instant;

use starling::chat::{Json, Now, Rendered};
use starling_api::messages::{ChatEnd, chat_request, check_messages};

use super::super::models::instance::ModelInstance;
use super::super::offload::offload;
use super::super::state::unix_now;
use super::super::trace::Trace;
use super::error::ApiError;

/// The tokens of a chat.
///
/// # Errors
/// A wrong message, or an error of the template.
pub async fn tokenize_chat(
    instance: &Arc<ModelInstance>,
    messages: Vec<Json>,
    tools: Option<Json>,
    variables: Vec<(String, Json)>,
    end: ChatEnd,
) -> Result<Vec<u32>, ApiError> {
    let inner = Arc::clone(instance);
    // a template is a program: never on a thread that serves connections
    offload_tokenize(usize::MAX, move || {
        let rendered = render(&inner, check_messages(messages)?, tools, variables, end)?;
        Ok(rendered.encode(&inner.model.tokenizer))
    })
    .await
}

/// Renders checked messages by the chat template.
///
/// # Errors
/// An error of the template.
pub fn render(
    instance: &ModelInstance,
    messages: Vec<Json>,
    tools: Option<Json>,
    variables: Vec<(String, Json)>,
    end: ChatEnd,
) -> Result<Rendered, ApiError> {
    let now = Now::from_unix(unix_now().cast_signed());
    Ok(instance.template.render(&chat_request(messages, tools, variables, end, now), &instance.model.tokenizer)?)
}

/// Tokenises a text of `size` bytes by `work`: a long one on a blocking thread.
///
/// # Errors
/// The error of `work`.
pub async fn offload_tokenize<T: Send + 'static>(
    size: usize,
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let start = Instant::now();
    let result = offload(size, work).await.and_then(|result| result);
    Trace::current().stage("tokenize", start, Instant::now(), &[]);
    result
}

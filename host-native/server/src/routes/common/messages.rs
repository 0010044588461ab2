//! Renders messages on blocking threads: the path of chats, counts and previews.

use std::sync::Arc;
use std::time::Instant;

use starling::chat::{ChatError, Json, Now, Rendered};
use starling_api::messages::{ChatEnd, chat_end, chat_request, check_messages};
use starling_api::openai::chat::ChatFields;
use starling_api::tools::{fill_tools, parse_tool_choice};
use starling_host::clock::unix_now;

use crate::guard::policy::{apply_to_messages, apply_to_rendered};
use crate::http::error::ApiError;
use crate::models::instance::ModelInstance;
use crate::observe::trace::Trace;
use crate::schedule::offload::offload;
use crate::server::Caller;

/// What the chat template renders.
pub struct ChatPrompt {
    /// Messages, which have passed the policy one by one.
    pub messages: Vec<Json>,
    pub tools: Option<Json>,
    pub variables: Vec<(String, Json)>,
    pub end: ChatEnd,
}

impl ChatPrompt {
    /// A prompt of messages only, for a new message.
    pub fn of_messages(messages: Vec<Json>) -> ChatPrompt {
        ChatPrompt { messages, tools: None, variables: Vec::new(), end: ChatEnd::GenerationPrompt }
    }
}

/// Renders the chat of a request that is not answered: for counts and previews.
///
/// # Errors
/// Those of the same request for an answer.
pub async fn preview_chat(
    caller: &Caller,
    instance: &Arc<ModelInstance>,
    chat: ChatFields,
) -> Result<Rendered, ApiError> {
    let variables = chat.template_variables()?;
    let (inner, tools, choice) = (Arc::clone(instance), chat.tools, chat.tool_choice);
    let parallel = chat.parallel_tool_calls != Some(false);
    let check = move || parse_tool_choice(inner.template.source(), tools, choice, parallel);
    let tools = offload(usize::MAX, check).await??.tools;
    let end = chat_end(chat.continue_final_message, chat.add_generation_prompt)?;
    let mut messages = chat.messages;
    apply_to_messages(&caller.prompt_check(instance), &mut messages).await?;
    render_chat(caller, instance, ChatPrompt { messages, tools, variables, end }).await
}

/// The tokens of a chat.
///
/// # Errors
/// A wrong message, an error of the template, or a prompt that the policy blocks.
pub async fn tokenize_chat(
    caller: &Caller,
    instance: &Arc<ModelInstance>,
    prompt: ChatPrompt,
) -> Result<Vec<u32>, ApiError> {
    if caller.policy.is_none() {
        let inner = Arc::clone(instance);
        let encode = move || Ok(render(&inner, prompt)?.encode(&inner.model.tokenizer));
        // a template is a program: never on a thread that serves connections
        return offload_tokenize(usize::MAX, encode).await;
    }
    let rendered = render_chat(caller, instance, prompt).await?;
    let inner = Arc::clone(instance);
    offload_tokenize(rendered.text.len(), move || Ok(rendered.encode(&inner.model.tokenizer))).await
}

/// Renders a chat, and applies the policy to all of it.
async fn render_chat(caller: &Caller, instance: &Arc<ModelInstance>, prompt: ChatPrompt) -> Result<Rendered, ApiError> {
    let (inner, policy) = (Arc::clone(instance), caller.policy.clone());
    let work = move || {
        let mut prompt = prompt;
        prompt.messages = check_messages(prompt.messages)?;
        if let Some(policy) = policy {
            policy.filter_chat(&mut prompt.messages, prompt.tools.as_mut(), &mut prompt.variables)?;
        }
        render_checked(&inner, prompt)
    };
    let mut rendered = offload_tokenize(usize::MAX, work).await?;
    if caller.policy.is_some() {
        let text: Arc<str> = std::mem::take(&mut rendered.text).into();
        apply_to_rendered(&caller.prompt_check(instance), &text, own_texts(instance)).await?;
        rendered.text = text.to_string();
    }
    Ok(rendered)
}

/// Texts that the server writes around those of the client.
fn own_texts(instance: &ModelInstance) -> Vec<String> {
    let tokenizer = &instance.model.tokenizer;
    let ends = [tokenizer.bos(), tokenizer.eos()].into_iter().flatten();
    let ends = ends.filter_map(|token| tokenizer.token_text(token));
    let ends = ends.map(|text| String::from_utf8_lossy(text).into_owned());
    ends.chain([instance.template.source().to_string()]).collect()
}

fn render(instance: &ModelInstance, mut prompt: ChatPrompt) -> Result<Rendered, ApiError> {
    prompt.messages = check_messages(prompt.messages)?;
    render_checked(instance, prompt)
}

/// Renders checked messages by the chat template. Where it fails on tools that lack a description or parameters, these are
/// filled.
fn render_checked(instance: &ModelInstance, prompt: ChatPrompt) -> Result<Rendered, ApiError> {
    let ChatPrompt { messages, tools, variables, end } = prompt;
    if let Some(e) = instance.template.error() {
        let message = format!("the model has no chats, since its template has an error; see --chat-template: {e}");
        return Err(ApiError::unsupported("messages", message).code("chat_template"));
    }
    let now = Now::from_unix(unix_now().cast_signed());
    let mut request = chat_request(messages, tools, variables, end, now);
    let tokenizer = &instance.model.tokenizer;
    let rendered = match instance.template.render(&request, tokenizer) {
        Err(ChatError::Template { .. }) if request.tools.as_mut().is_some_and(fill_tools) => {
            instance.template.render(&request, tokenizer)
        }
        rendered => rendered,
    };
    Ok(rendered?)
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

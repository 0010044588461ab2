//! Messages of a conversation: checked, then rendered by the model's template.

use std::sync::Arc;
use std::time::Instant;

use starling::chat::{ChatRequest, Json, Now};

use super::super::offload::offload;
use super::super::state::{App, unix_now};
use super::super::trace::Trace;
use super::error::ApiError;
use starling_api::tools::normalise_tool_calls;

/// Roles that templates know.
const ROLES: [&str; 6] = ["system", "developer", "user", "assistant", "tool", "function"];

/// Checks the form of messages; parts of text become one text.
///
/// # Errors
/// The first message that is wrong.
pub fn checked(messages: Vec<Json>) -> Result<Vec<Json>, ApiError> {
    if messages.is_empty() {
        return Err(ApiError::param("messages", "messages is empty, expected at least one message"));
    }
    messages.into_iter().enumerate().map(|(i, message)| one(i, message)).collect()
}

fn one(i: usize, message: Json) -> Result<Json, ApiError> {
    let at = |field: &str, what: String| {
        ApiError::param(&format!("messages[{i}]{field}"), format!("messages[{i}]{field} {what}"))
    };
    let Json::Object(mut fields) = message else { return Err(at("", "is not an object".into())) };
    let role = match fields.iter().find(|(name, _)| name == "role") {
        Some((_, Json::Str(role))) if ROLES.contains(&role.as_str()) => role.clone(),
        Some((_, Json::Str(role))) => {
            return Err(at(".role", format!("is {role:?}, expected one of {}", ROLES.join(", "))));
        }
        Some(_) => return Err(at(".role", "is not a string".into())),
        None => return Err(at(".role", "is missing".into())),
    };
    let content = fields.iter_mut().find(|(name, _)| name == "content");
    match content {
        Some((_, Json::Str(_))) => {}
        Some((_, value @ Json::Array(_))) => *value = Json::Str(joined(i, value)?),
        Some((_, value @ Json::Null)) if role == "assistant" => *value = Json::Str(String::new()),
        None if role == "assistant" => fields.push(("content".into(), Json::Str(String::new()))),
        Some((_, Json::Null)) | None => return Err(at(".content", "is missing".into())),
        Some(_) => return Err(at(".content", "is neither a string nor a list of parts".into())),
    }
    normalise_tool_calls(&mut fields, &format!("messages[{i}]"))?;
    Ok(Json::Object(fields))
}

/// The text of parts.
fn joined(i: usize, parts: &Json) -> Result<String, ApiError> {
    let Json::Array(parts) = parts else { return Ok(String::new()) };
    let texts = parts.iter().enumerate().map(|(j, part)| part_text(&format!("messages[{i}].content[{j}]"), part));
    Ok(texts.collect::<Result<Vec<&str>, _>>()?.join("\n"))
}

/// The text of a part, which stands at `at`.
fn part_text<'a>(at: &str, part: &'a Json) -> Result<&'a str, ApiError> {
    let Json::Object(fields) = part else { return Err(ApiError::param(at, format!("{at} is not an object"))) };
    let field = |name: &str| match fields.iter().find(|(n, _)| n == name) {
        Some((_, Json::Str(text))) => Some(text.as_str()),
        _ => None,
    };
    match (field("type"), field("text")) {
        (Some("text"), Some(text)) => Ok(text),
        (Some("text"), None) => Err(ApiError::param(at, format!("{at}.text is not a string"))),
        (kind, _) => {
            let kind = kind.unwrap_or("nothing");
            Err(ApiError::unsupported(at, format!("{at}.type is {kind}; this model reads only `text`")))
        }
    }
}

/// How the text of a conversation ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Opening {
    /// With the beginning of an answer.
    Answer,
    /// Where its last message ends, which the answer continues.
    Continued,
    /// With the end of its last message.
    Nothing,
}

/// How a conversation ends by the options `continue_final_message` and `add_generation_prompt`. Without them a new message
/// begins, as with OpenAI and vLLM, also after an assistant's message.
///
/// # Errors
/// If both are true.
pub fn opening(continued: Option<bool>, begun: Option<bool>) -> Result<Opening, ApiError> {
    match (continued, begun) {
        (Some(true), Some(true)) => {
            let message = "continue_final_message and add_generation_prompt are both true, expected one of them";
            Err(ApiError::param("continue_final_message", message))
        }
        (Some(true), _) => Ok(Opening::Continued),
        (_, Some(false)) => Ok(Opening::Nothing),
        _ => Ok(Opening::Answer),
    }
}

/// The tokens of a conversation.
///
/// # Errors
/// If a message is wrong, or the template fails or refuses.
pub async fn render(
    app: &Arc<App>,
    messages: Vec<Json>,
    tools: Option<Json>,
    variables: Vec<(String, Json)>,
    opening: Opening,
) -> Result<Vec<u32>, ApiError> {
    let inner = Arc::clone(app);
    // a template is a program: never on a thread that serves connections
    beside(usize::MAX, move || {
        let rendered = text(&inner, checked(messages)?, tools, variables, opening)?;
        Ok(rendered.encode(&inner.model.tokenizer))
    })
    .await
}

/// The text of a conversation.
///
/// # Errors
/// If the template fails or refuses.
pub fn text(
    app: &App,
    messages: Vec<Json>,
    tools: Option<Json>,
    variables: Vec<(String, Json)>,
    opening: Opening,
) -> Result<starling::chat::Rendered, ApiError> {
    let now = Some(Now::from_unix(unix_now().cast_signed()));
    let (add_generation_prompt, continue_final_message) = (opening == Opening::Answer, opening == Opening::Continued);
    let request = ChatRequest { messages, tools, add_generation_prompt, continue_final_message, now, variables };
    Ok(app.template.render(&request, &app.model.tokenizer)?)
}

/// Does work on a text of `size` bytes: here if it is short, else where it holds up nobody.
///
/// # Errors
/// What the work says.
pub async fn beside<T: Send + 'static>(
    size: usize,
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let start = Instant::now();
    let result = offload(size, work).await.and_then(|result| result);
    Trace::current().stage("tokenize", start, Instant::now(), &[]);
    result
}

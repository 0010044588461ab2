//! Messages of a chat: checks, and the request for the chat template.

use starling::chat::{ChatRequest, Json, Now};

use crate::error::{ApiError, quoted};
use crate::fields::unread_in_result;
use crate::tools::normalise_tool_calls;

/// Roles of messages.
const ROLES: [&str; 6] = ["system", "developer", "user", "assistant", "tool", "function"];

/// Fields of a message that a session keeps and gives to the template: those that chat APIs define.
const MESSAGE_FIELDS: [&str; 10] = [
    "role",
    "content",
    "name",
    "tool_calls",
    "tool_call_id",
    "function_call",
    "reasoning_content",
    "reasoning",
    "thinking",
    "thought",
];

/// Checks messages. Content in parts becomes one text, and arguments of tool calls become objects.
///
/// # Errors
/// The first field that is wrong, by its path.
pub fn check_messages(messages: Vec<Json>) -> Result<Vec<Json>, ApiError> {
    if messages.is_empty() {
        return Err(ApiError::param("messages", "messages is empty, expected at least one message"));
    }
    messages.into_iter().enumerate().map(|(i, message)| check_message(i, message)).collect()
}

fn check_message(i: usize, message: Json) -> Result<Json, ApiError> {
    let at = |field: &str, what: String| {
        ApiError::param(&format!("messages[{i}]{field}"), format!("messages[{i}]{field} {what}"))
    };
    let Json::Object(mut fields) = message else { return Err(at("", "is not an object".into())) };
    let role = match fields.iter().find(|(name, _)| name == "role") {
        Some((_, Json::Str(role))) if ROLES.contains(&role.as_str()) => role.clone(),
        Some((_, Json::Str(role))) => {
            return Err(at(".role", format!("is {:?}, expected one of {}", quoted(role), ROLES.join(", "))));
        }
        Some(_) => return Err(at(".role", "is not a string".into())),
        None => return Err(at(".role", "is missing".into())),
    };
    let content = fields.iter_mut().find(|(name, _)| name == "content");
    match content {
        Some((_, Json::Str(_))) => {}
        Some((_, value @ Json::Array(_))) => {
            *value = Json::Str(join_parts(i, value, matches!(&*role, "tool" | "function"))?);
        }
        Some((_, value @ Json::Null)) if role == "assistant" => *value = Json::Str(String::new()),
        None if role == "assistant" => fields.push(("content".into(), Json::Str(String::new()))),
        Some((_, Json::Null)) | None => return Err(at(".content", "is missing".into())),
        Some(_) => return Err(at(".content", "is neither a string nor a list of parts".into())),
    }
    // the names of the reasoning in other APIs; the name that a template has is added when it renders
    let is_text = |name: &str| fields.iter().any(|(other, value)| other == name && matches!(value, Json::Str(_)));
    if role == "assistant"
        && !is_text("reasoning_content")
        && let Some(name) = ["reasoning", "thinking", "thought"].into_iter().find(|name| is_text(name))
        && let Some((_, text)) = fields.iter().find(|(other, _)| other == name).cloned()
    {
        fields.retain(|(other, _)| other != "reasoning_content");
        fields.push(("reasoning_content".into(), text));
    }
    normalise_tool_calls(&mut fields, &format!("messages[{i}]"))?;
    Ok(Json::Object(fields))
}

/// The messages of a session before a turn and those of the turn, checked, without fields that no chat API defines: a
/// session would keep them for all turns.
pub fn continue_conversation(before: &[Json], messages: Vec<Json>) -> Vec<Json> {
    let mut all = before.to_vec();
    all.extend(messages.into_iter().map(|message| match message {
        Json::Object(mut fields) => {
            fields.retain(|(name, _)| MESSAGE_FIELDS.contains(&name.as_str()));
            Json::Object(fields)
        }
        other => other,
    }));
    all
}

/// Joins the texts of content parts by newlines. In a result of a tool, a text stands for parts that are not text.
fn join_parts(i: usize, parts: &Json, is_result: bool) -> Result<String, ApiError> {
    let Json::Array(parts) = parts else { return Ok(String::new()) };
    let text = |(j, part)| part_text(&format!("messages[{i}].content[{j}]"), part, is_result);
    let texts = parts.iter().enumerate().map(text);
    Ok(texts.collect::<Result<Vec<&str>, _>>()?.join("\n"))
}

/// The text of a content part; `at` is its path.
fn part_text<'a>(at: &str, part: &'a Json, is_result: bool) -> Result<&'a str, ApiError> {
    let Json::Object(fields) = part else { return Err(ApiError::param(at, format!("{at} is not an object"))) };
    let field = |name: &str| match fields.iter().find(|(n, _)| n == name) {
        Some((_, Json::Str(text))) => Some(text.as_str()),
        _ => None,
    };
    match (field("type"), field("text")) {
        (Some("text"), Some(text)) => Ok(text),
        (Some("text"), None) => Err(ApiError::param(at, format!("{at}.text is not a string"))),
        (Some(kind), _) if is_result => Ok(unread_in_result(kind)),
        (kind, _) => {
            let kind = kind.unwrap_or("nothing");
            Err(ApiError::unsupported(at, format!("{at}.type is {}; this model reads only `text`", quoted(kind))))
        }
    }
}

/// How a rendered chat ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChatEnd {
    /// With the generation prompt: the answer is a new message.
    GenerationPrompt,
    /// Inside the last message, which the answer continues.
    FinalMessage,
    /// After the last message.
    EndOfMessage,
}

/// How a chat ends by `continue_final_message` and `add_generation_prompt`. Without them a new message begins, as with
/// OpenAI and vLLM, also after an assistant's message.
///
/// # Errors
/// If both are true.
pub fn chat_end(
    continue_final_message: Option<bool>,
    add_generation_prompt: Option<bool>,
) -> Result<ChatEnd, ApiError> {
    match (continue_final_message, add_generation_prompt) {
        (Some(true), Some(true)) => {
            let message = "continue_final_message and add_generation_prompt are both true, expected one of them";
            Err(ApiError::param("continue_final_message", message))
        }
        (Some(true), _) => Ok(ChatEnd::FinalMessage),
        (_, Some(false)) => Ok(ChatEnd::EndOfMessage),
        _ => Ok(ChatEnd::GenerationPrompt),
    }
}

/// The request for the chat template; `messages` are checked, `now` is the time that templates may print.
pub fn chat_request(
    messages: Vec<Json>,
    tools: Option<Json>,
    variables: Vec<(String, Json)>,
    end: ChatEnd,
    now: Now,
) -> ChatRequest {
    ChatRequest {
        messages,
        tools,
        add_generation_prompt: end == ChatEnd::GenerationPrompt,
        continue_final_message: end == ChatEnd::FinalMessage,
        now: Some(now),
        variables,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_in_a_result_becomes_a_text() {
        let message = |role: &str, content: &str| {
            let json = format!(r#"{{"role": "{role}", "tool_call_id": "c", "content": {content}}}"#);
            check_messages(vec![serde_json::from_str(&json).expect("JSON")]).map(|all| all[0].clone())
        };
        let parts = r#"[{"type": "text", "text": "a page"}, {"type": "image_url", "image_url": {"url": "data:"}}]"#;
        for role in ["tool", "function"] {
            let Ok(Json::Object(fields)) = message(role, parts) else { panic!("a message") };
            let content = fields.iter().find(|(name, _)| name == "content").map(|(_, content)| content.clone());
            assert_eq!(content, Some(Json::Str(format!("a page\n{}", unread_in_result("image")))));
        }
        // a question about an image has no answer without it
        let param = |role: &str, content: &str| message(role, content).map_err(|e| e.param);
        assert_eq!(param("user", parts), Err(Some("messages[0].content[1]".into())));
        assert_eq!(param("tool", r#"[{"type": "text"}]"#), Err(Some("messages[0].content[0]".into())));
    }

    #[test]
    fn a_session_keeps_the_fields_of_chat_apis() {
        let fields = |names: &[&str]| {
            Json::Object(names.iter().map(|name| ((*name).to_string(), Json::Str("user".into()))).collect())
        };
        let known = fields(&["role", "content", "tool_calls", "reasoning_content"]);
        let before = [Json::message("system", "Be brief.")];
        let new = vec![fields(&["role", "x", "content", "tool_calls", "reasoning_content", "padding"]), Json::Null];
        assert_eq!(continue_conversation(&before, new), [before[0].clone(), known, Json::Null]);
        // messages before were stripped in their own turn
        let kept = [fields(&["x"])];
        assert_eq!(continue_conversation(&kept, Vec::new()), kept);
        assert!(continue_conversation(&[], Vec::new()).is_empty());
    }
}

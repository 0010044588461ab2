//! Prepares messages for a chat template: replaces roles that it does not know, gives earlier reasoning the name that it
//! reads, and marks the end of a message to be continued.

use alloc::borrow::{Cow, ToOwned};
use alloc::string::String;
use alloc::vec::Vec;

use super::{ChatError, ChatRequest, Json, Rendered};

/// Appended to a message to be continued. Its trailing space shows whether the template trims content.
const MARK: &str = "starling-continues-here ";

/// Whether a template handles the role `developer`. Others would drop such messages, or write a role that the model was not
/// trained on.
pub(super) fn has_developer_role(source: &str) -> bool {
    ["'developer'", "\"developer\""].iter().any(|name| source.contains(name))
}

/// Names of the reasoning in an assistant's message: those of APIs and templates.
const REASONING: [&str; 5] = ["reasoning_content", "reasoning", "thinking", "thought", "thoughts"];

/// The names of reasoning that occur in a template.
pub(super) fn reasoning_names(source: &str) -> Vec<&'static str> {
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    let is_word =
        |(at, name): (usize, &str)| !source[..at].ends_with(is_part) && !source[at + name.len()..].starts_with(is_part);
    REASONING.into_iter().filter(|name| source.match_indices(name).any(is_word)).collect()
}

/// The reasoning of an assistant's message.
fn reasoning_of(message: &Json) -> Option<&str> {
    if text_of(message, "role") != Some("assistant") {
        return None;
    }
    REASONING.into_iter().find_map(|name| text_of(message, name)).filter(|text| !text.is_empty())
}

/// Gives the reasoning of a message all of `names` that it lacks.
fn name_reasoning(message: &mut Json, names: &[&'static str]) {
    let Some(text) = reasoning_of(message).map(ToOwned::to_owned) else { return };
    let missing: Vec<&str> = names.iter().copied().filter(|name| text_of(message, name).is_none()).collect();
    let Json::Object(fields) = message else { return };
    for name in missing {
        fields.retain(|(known, _)| known != name);
        fields.push((name.to_owned(), Json::Str(text.clone())));
    }
}

/// Messages whose text stands in their reasoning, where they have both and calls: gpt-oss takes only one of them beside a
/// call. `None` if there is no such message.
pub(super) fn merge_reasoning(messages: &[Json]) -> Option<Vec<Json>> {
    let mut messages = messages.to_vec();
    let mut is_changed = false;
    for message in &mut messages {
        let has_calls = matches!(field(message, "tool_calls"), Some(Json::Array(calls)) if !calls.is_empty());
        let Some(text) = text_of(message, "content").filter(|text| has_calls && !text.trim().is_empty()) else {
            continue;
        };
        let Some(merged) = reasoning_of(message).map(|reasoning| [reasoning, text].join("\n\n")) else { continue };
        for name in REASONING {
            if let Some(Json::Str(text)) = field(message, name) {
                text.clone_from(&merged);
            }
        }
        if let Some(Json::Str(content)) = field(message, "content") {
            content.clear();
            is_changed = true;
        }
    }
    is_changed.then_some(messages)
}

/// Messages with [`MARK`] in a message to be continued, with the role `system` for `developer` unless the template handles
/// that, and with reasoning under all `names` that the template reads.
///
/// # Errors
/// If the last message cannot be continued.
pub(super) fn prepare<'r>(
    request: &'r ChatRequest,
    has_developer: bool,
    names: &[&'static str],
) -> Result<Cow<'r, [Json]>, ChatError> {
    let is_developer = |message: &Json| text_of(message, "role") == Some("developer");
    let is_renamed = !names.is_empty() && request.messages.iter().any(|message| reasoning_of(message).is_some());
    let is_changed =
        request.continue_final_message || is_renamed || (!has_developer && request.messages.iter().any(is_developer));
    if !is_changed {
        return Ok(Cow::Borrowed(&request.messages));
    }
    let mut messages = request.messages.clone();
    if !has_developer {
        let developers = messages.iter_mut().filter(|message| is_developer(message));
        developers.filter_map(|message| field(message, "role")).for_each(|role| *role = Json::Str("system".to_owned()));
    }
    messages.iter_mut().for_each(|message| name_reasoning(message, names));
    if request.continue_final_message {
        let last = messages.last_mut().ok_or(ChatError::Continue("there is none"))?;
        if text_of(last, "role") != Some("assistant") {
            return Err(ChatError::Continue("its role is not assistant"));
        }
        let Some(Json::Str(content)) = field(last, "content") else {
            return Err(ChatError::Continue("its content is not a text"));
        };
        content.push_str(MARK);
    }
    Ok(Cow::Owned(messages))
}

/// Truncates a rendered conversation at [`MARK`].
///
/// # Errors
/// If the template did not write the mark, or a text of the request has it, too.
pub(super) fn truncate_at_mark(mut rendered: Rendered) -> Result<Rendered, ChatError> {
    let at = rendered.text.rfind(MARK.trim_end()).ok_or(ChatError::Continue("the template does not write it"))?;
    if rendered.text.find(MARK.trim_end()) != Some(at) {
        return Err(ChatError::Continue("another text has the words `starling-continues-here`"));
    }
    let is_trimmed = !rendered.text[at..].starts_with(MARK);
    rendered.text.truncate(at);
    if is_trimmed {
        rendered.text.truncate(rendered.text.trim_end().len());
    }
    let end = rendered.text.len();
    rendered.literals.retain(|literal| *literal < end);
    Ok(rendered)
}

fn field<'a>(message: &'a mut Json, name: &str) -> Option<&'a mut Json> {
    let Json::Object(fields) = message else { return None };
    let fields: &mut Vec<(String, Json)> = fields;
    fields.iter_mut().find(|(other, _)| other == name).map(|(_, value)| value)
}

fn text_of<'a>(message: &'a Json, name: &str) -> Option<&'a str> {
    let Json::Object(fields) = message else { return None };
    match fields.iter().find(|(other, _)| other == name) {
        Some((_, Json::Str(text))) => Some(text),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_reasoning_are_words_of_the_template() {
        assert_eq!(reasoning_names("{{ message.thinking }} {{ enable_thinking }}"), ["thinking"]);
        assert_eq!(reasoning_names("{{ message['thought'] }}{{ thoughtful }}"), ["thought"]);
        assert_eq!(reasoning_names("{{ m.reasoning_content }}"), ["reasoning_content"]);
        assert!(reasoning_names("{{ enable_thinking }}").is_empty());
    }
}

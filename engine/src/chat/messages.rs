//! Prepares messages for a chat template: replaces roles that it does not know, and marks the end of a message to be
//! continued.

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

/// Messages with [`MARK`] in a message to be continued, and with the role `system` for `developer` unless the template
/// handles that.
///
/// # Errors
/// If the last message cannot be continued.
pub(super) fn prepare(request: &ChatRequest, has_developer: bool) -> Result<Cow<'_, [Json]>, ChatError> {
    let is_developer = |message: &Json| text_of(message, "role") == Some("developer");
    let is_changed = request.continue_final_message || (!has_developer && request.messages.iter().any(is_developer));
    if !is_changed {
        return Ok(Cow::Borrowed(&request.messages));
    }
    let mut messages = request.messages.clone();
    if !has_developer {
        let developers = messages.iter_mut().filter(|message| is_developer(message));
        developers.filter_map(|message| field(message, "role")).for_each(|role| *role = Json::Str("system".to_owned()));
    }
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

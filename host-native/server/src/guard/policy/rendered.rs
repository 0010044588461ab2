//! The policy on a chat as the model reads it: after content parts are joined and arguments of calls are parsed, with the
//! tools, the template's variables and all names, and then on the rendered prompt.
//!
//! Texts are replaced where a rule says so. Names of functions and parameters, keys and constants cannot be replaced, since
//! calls are made by them: a rule that would replace them refuses the prompt.

use std::ops::Range;
use std::sync::Arc;

use starling::chat::Json;
use starling::tokenizer::DecodeOptions;
use starling_api::error::ApiError;

use super::host::{PromptCheck, Subject, TextPolicy};
use super::{Decision, Stage, Verdict};
use crate::models::instance::ModelInstance;
use crate::schedule::offload::offload;

/// Fields of a message that hold IDs and enumerated values.
const IDS: [&str; 6] = ["role", "type", "id", "tool_call_id", "call_id", "status"];
/// Keys of messages and calls that no client chooses.
const MESSAGE_KEYS: [&str; 8] =
    ["role", "type", "id", "tool_call_id", "content", "tool_calls", "function", "arguments"];
/// Keywords of tools and schemas whose texts only describe.
const DESCRIPTIONS: [&str; 5] = ["description", "title", "default", "examples", "$comment"];
/// Keys and values of tools and schemas that no client chooses.
const TOOL_WORDS: [&str; 24] = [
    "type",
    "function",
    "name",
    "parameters",
    "strict",
    "description",
    "title",
    "default",
    "examples",
    "properties",
    "required",
    "items",
    "enum",
    "const",
    "anyOf",
    "allOf",
    "oneOf",
    "object",
    "array",
    "string",
    "number",
    "integer",
    "boolean",
    "null",
];

/// A part of a text that cannot be replaced.
const FIXED: &str =
    "has text that would be replaced in a name or a key, or only where its parts are joined; send it as one text";

impl TextPolicy {
    /// Applies the rules to a chat whose messages are checked: content is one text, and arguments are objects.
    ///
    /// # Errors
    /// If a text is blocked, or one that cannot be replaced would be.
    pub fn filter_chat(
        &self,
        messages: &mut [Json],
        tools: Option<&mut Json>,
        variables: &mut [(String, Json)],
    ) -> Result<(), ApiError> {
        messages.iter_mut().try_for_each(|message| self.filter_message(message))?;
        if let Some(tools) = tools {
            self.filter_tools(tools, false)?;
        }
        variables.iter_mut().try_for_each(|(name, value)| {
            self.require(name)?;
            self.filter_all(value)
        })
    }

    fn filter_message(&self, value: &mut Json) -> Result<(), ApiError> {
        match value {
            Json::Str(text) => self.replace(text),
            Json::Array(items) => items.iter_mut().try_for_each(|item| self.filter_message(item)),
            Json::Object(fields) => fields.iter_mut().try_for_each(|(name, value)| {
                if !MESSAGE_KEYS.contains(&name.as_str()) {
                    self.require(name)?;
                }
                match (name.as_str(), value) {
                    ("name", Json::Str(text)) => self.require(text),
                    ("arguments", value) => self.filter_all(value),
                    (name, Json::Str(_)) if IDS.contains(&name) => Ok(()),
                    (_, value) => self.filter_message(value),
                }
            }),
            _ => Ok(()),
        }
    }

    /// Replaces all texts; keys are required as they are.
    fn filter_all(&self, value: &mut Json) -> Result<(), ApiError> {
        match value {
            Json::Str(text) => self.replace(text),
            Json::Array(items) => items.iter_mut().try_for_each(|item| self.filter_all(item)),
            Json::Object(fields) => fields.iter_mut().try_for_each(|(name, value)| {
                self.require(name)?;
                self.filter_all(value)
            }),
            _ => Ok(()),
        }
    }

    fn filter_tools(&self, value: &mut Json, is_description: bool) -> Result<(), ApiError> {
        let is_word = |text: &str| TOOL_WORDS.contains(&text);
        match value {
            Json::Str(text) if is_description => self.replace(text),
            Json::Str(text) if is_word(text) => Ok(()),
            Json::Str(text) => self.require(text),
            Json::Array(items) => items.iter_mut().try_for_each(|item| self.filter_tools(item, is_description)),
            Json::Object(fields) => fields.iter_mut().try_for_each(|(name, value)| {
                if !is_word(name) {
                    self.require(name)?;
                }
                // a parameter may have the name of a keyword
                let is_text = matches!(value, Json::Str(_) | Json::Array(_)) || name == "default";
                self.filter_tools(value, is_description || is_text && DESCRIPTIONS.contains(&name.as_str()))
            }),
            _ => Ok(()),
        }
    }

    fn replace(&self, text: &mut String) -> Result<(), ApiError> {
        *text = self.filter_text(std::mem::take(text))?;
        Ok(())
    }

    fn require(&self, text: &str) -> Result<(), ApiError> {
        match self.filter(Stage::Prompt).check(text) {
            Verdict::Unchanged => Ok(()),
            Verdict::Redacted { .. } => Err(self.refused(&format!("it {FIXED}"))),
            Verdict::Blocked { rule } => Err(self.refused(&format!("rule `{rule}`"))),
        }
    }

    /// Checks a rendered prompt, whose single texts have passed, by the rules: no word may come together only there. Words of
    /// `own`, the server's texts around those of the client, are allowed. Personal data is counted per text, not here.
    ///
    /// # Errors
    /// If a rule matches.
    pub fn check_joined(&self, prompt: &str, own: &[&str]) -> Result<(), ApiError> {
        for found in self.filter(Stage::Prompt).rule_matches(prompt) {
            let text = &prompt[found.range];
            if own.iter().any(|own| own.contains(text)) || found.replacement.contains(text) {
                continue;
            }
            return Err(self.refused(&format!("rule `{}`, where texts are joined", found.rule)));
        }
        Ok(())
    }

    /// Checks a text that continues another: no word may come together of both.
    ///
    /// # Errors
    /// If a rule matches across the seam.
    pub fn check_seam(&self, before: &str, new: &str) -> Result<(), ApiError> {
        let joined = [before, new].concat();
        let crosses = |range: &Range<usize>| range.start < before.len() && range.end > before.len();
        let found = self.filter(Stage::Prompt).rule_matches(&joined).into_iter().find(|found| crosses(&found.range));
        found.map_or(Ok(()), |found| Err(self.refused(&format!("rule `{}`, where texts are joined", found.rule))))
    }

    /// Asks the policy service about a rendered prompt.
    async fn ask_about_prompt(&self, subject: &Subject, prompt: &str) -> Result<(), ApiError> {
        match self.ask(Stage::Prompt, subject, prompt).await {
            Decision::Allow => Ok(()),
            Decision::Redact { text, .. } if text == prompt => Ok(()),
            Decision::Redact { .. } => Err(self.refused(&format!("it {FIXED}"))),
            Decision::Block { reason } => Err(self.refused(reason.as_deref().unwrap_or("the policy service"))),
        }
    }
}

/// Applies the policy to a rendered prompt; `own` are the server's texts in it.
///
/// # Errors
/// If it is blocked.
pub async fn apply_to_rendered(check: &PromptCheck, prompt: &Arc<str>, own: Vec<String>) -> Result<(), ApiError> {
    let Some((policy, subject)) = check else { return Ok(()) };
    let (inner, text) = (Arc::clone(policy), Arc::clone(prompt));
    let work = move || inner.check_joined(&text, &own.iter().map(String::as_str).collect::<Vec<_>>());
    offload(prompt.len(), work).await??;
    if policy.has_hook(Stage::Prompt) {
        policy.ask_about_prompt(subject, prompt).await?;
    }
    Ok(())
}

/// Applies the policy to the tokens of a prompt of several texts, each of which has passed.
///
/// # Errors
/// If it is blocked.
pub async fn apply_to_joined(check: &PromptCheck, instance: &ModelInstance, tokens: &[u32]) -> Result<(), ApiError> {
    if check.is_none() {
        return Ok(());
    }
    let tokenizer = &instance.model.tokenizer;
    let text = tokenizer.decode(tokens, DecodeOptions { skip_special: false });
    let controls = tokens.iter().filter(|token| tokenizer.is_control(**token));
    let mut own: Vec<String> = controls.filter_map(|token| tokenizer.token_text(*token)).map(lossy).collect();
    own.sort_unstable();
    own.dedup();
    apply_to_rendered(check, &lossy(&text).into(), own).await
}

fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Tokens of a session that a match across the seam may begin in: as many as a match has bytes, at least one each.
const SEAM: usize = 1024;

/// Applies the policy where a text, which has passed, continues the tokens of a session.
///
/// # Errors
/// If it is blocked.
pub async fn apply_to_seam(
    check: &PromptCheck,
    instance: &ModelInstance,
    before: &[u32],
    new: &str,
) -> Result<(), ApiError> {
    let Some((policy, _)) = check.clone().filter(|_| !before.is_empty()) else { return Ok(()) };
    let before = instance.text(&before[before.len().saturating_sub(SEAM)..]);
    let new = new.to_string();
    offload(before.len() + new.len(), move || policy.check_seam(&before, &new)).await?
}

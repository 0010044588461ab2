//! Escapes text of the request so that it cannot begin a control token.

use alloc::collections::BTreeSet;
use alloc::string::String;
use alloc::vec::Vec;

use minijinja::Value;

use super::{Json, Rendered};
use crate::tokenizer::Tokenizer;

/// The control tokens of a vocabulary, and the placeholders for their first characters.
pub(super) struct Shield {
    /// Texts of the control tokens in lower case, since a template may change case; ascending.
    names: Vec<Vec<u8>>,
    /// First characters, ascending, with their placeholders.
    placeholders: Vec<(char, char)>,
}

impl Shield {
    /// For the control tokens of `tokenizer`. Placeholders are private-use characters that do not occur in `values`.
    pub(super) fn new<'v>(tokenizer: &Tokenizer, values: impl Iterator<Item = &'v Json>) -> Shield {
        let mut names: Vec<Vec<u8>> = tokenizer.control_texts().map(|text| text.to_ascii_lowercase().into()).collect();
        names.sort_unstable();
        names.dedup();
        let firsts = tokenizer.control_texts().filter_map(|text| text.chars().next());
        let mut firsts: Vec<char> = firsts.flat_map(|c| [c, c.to_ascii_lowercase(), c.to_ascii_uppercase()]).collect();
        firsts.sort_unstable();
        firsts.dedup();
        let mut used = BTreeSet::new();
        values.for_each(|value| collect_private_characters(value, &mut used));
        let free = ('\u{f0000}'..='\u{10fffd}').filter(|c| !used.contains(c));
        Shield { names, placeholders: firsts.into_iter().zip(free).collect() }
    }

    /// Converts a value of the request for the template, with strings escaped.
    pub(super) fn value(&self, json: &Json) -> Value {
        match json {
            Json::Null => Value::from(()),
            Json::Bool(value) => Value::from(*value),
            Json::Int(value) => Value::from(*value),
            Json::UInt(value) => Value::from(*value),
            Json::Float(value) => Value::from(*value),
            Json::Str(text) => Value::from(self.escape(text)),
            Json::Array(items) => Value::from(items.iter().map(|item| self.value(item)).collect::<Vec<_>>()),
            Json::Object(items) => {
                Value::from_pairs(items.iter().map(|(name, item)| (self.escape(name), self.value(item))))
            }
        }
    }

    fn escape(&self, text: &str) -> String {
        let placeholder = |(at, c): (usize, char)| {
            let found = self.placeholders.binary_search_by_key(&c, |pair| pair.0).ok();
            found
                .filter(|_| self.is_or_begins_control_token(&text.as_bytes()[at..]))
                .map_or(c, |i| self.placeholders[i].1)
        };
        text.char_indices().map(placeholder).collect()
    }

    /// Whether `text` begins with a control token, or is a prefix of one.
    fn is_or_begins_control_token(&self, text: &[u8]) -> bool {
        let mut range = &self.names[..];
        for (len, byte) in text.iter().map(u8::to_ascii_lowercase).enumerate() {
            let from = range.partition_point(|name| name.get(len).is_none_or(|&b| b < byte));
            let to = range.partition_point(|name| name.get(len).is_none_or(|&b| b <= byte));
            range = &range[from..to];
            match range.first() {
                None => return false,
                Some(name) if name.len() == len + 1 => return true,
                Some(_) => {}
            }
        }
        true
    }

    /// Restores the original characters and records their offsets.
    pub(super) fn restore(&self, text: &str) -> Rendered {
        let mut rendered = Rendered { text: String::with_capacity(text.len()), literals: Vec::new() };
        for c in text.chars() {
            match self.placeholders.iter().find(|pair| pair.1 == c).filter(|_| c >= '\u{f0000}') {
                Some(&(original, _)) => {
                    rendered.literals.push(rendered.text.len());
                    rendered.text.push(original);
                }
                None => rendered.text.push(c),
            }
        }
        rendered
    }
}

fn collect_private_characters(value: &Json, used: &mut BTreeSet<char>) {
    let mut note = |text: &str| used.extend(text.chars().filter(|&c| c >= '\u{f0000}'));
    match value {
        Json::Str(text) => note(text),
        Json::Array(items) => items.iter().for_each(|item| collect_private_characters(item, used)),
        Json::Object(items) => {
            items.iter().for_each(|(name, _)| note(name));
            items.iter().for_each(|(_, item)| collect_private_characters(item, used));
        }
        _ => {}
    }
}

//! Text from the caller that cannot begin a control token.

use alloc::collections::BTreeSet;
use alloc::string::String;
use alloc::vec::Vec;

use minijinja::Value;

use super::{Json, Rendered};
use crate::tokenizer::Tokenizer;

/// The control tokens of a vocabulary, and the private characters that stand for their first characters.
pub(super) struct Shield {
    /// Texts of the control tokens, in lower case: a template may change the case of a text. Ascending.
    names: Vec<Vec<u8>>,
    /// First characters, ascending, and their stand-ins.
    stand_ins: Vec<(char, char)>,
}

impl Shield {
    /// For the control tokens of `tokenizer`. The stand-ins are private characters that none of `values` contains.
    pub(super) fn new<'v>(tokenizer: &Tokenizer, values: impl Iterator<Item = &'v Json>) -> Shield {
        let mut names: Vec<Vec<u8>> = tokenizer.control_texts().map(|text| text.to_ascii_lowercase().into()).collect();
        names.sort_unstable();
        names.dedup();
        let firsts = tokenizer.control_texts().filter_map(|text| text.chars().next());
        let mut firsts: Vec<char> = firsts.flat_map(|c| [c, c.to_ascii_lowercase(), c.to_ascii_uppercase()]).collect();
        firsts.sort_unstable();
        firsts.dedup();
        let mut used = BTreeSet::new();
        values.for_each(|value| private_characters(value, &mut used));
        let free = ('\u{f0000}'..='\u{10fffd}').filter(|c| !used.contains(c));
        Shield { names, stand_ins: firsts.into_iter().zip(free).collect() }
    }

    /// A value as the template sees it.
    pub(super) fn value(&self, json: &Json) -> Value {
        match json {
            Json::Null => Value::from(()),
            Json::Bool(value) => Value::from(*value),
            Json::Int(value) => Value::from(*value),
            Json::UInt(value) => Value::from(*value),
            Json::Float(value) => Value::from(*value),
            Json::Str(text) => Value::from(self.cover(text)),
            Json::Array(items) => Value::from(items.iter().map(|item| self.value(item)).collect::<Vec<_>>()),
            Json::Object(items) => {
                Value::from_pairs(items.iter().map(|(name, item)| (self.cover(name), self.value(item))))
            }
        }
    }

    fn cover(&self, text: &str) -> String {
        let stand_in = |(at, c): (usize, char)| {
            let found = self.stand_ins.binary_search_by_key(&c, |pair| pair.0).ok();
            found.filter(|_| self.begins_name(&text.as_bytes()[at..])).map_or(c, |i| self.stand_ins[i].1)
        };
        text.char_indices().map(stand_in).collect()
    }

    /// Whether `text` begins with a control token, or is the beginning of one.
    fn begins_name(&self, text: &[u8]) -> bool {
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

    /// The text with the original characters, and where they are.
    pub(super) fn restore(&self, text: &str) -> Rendered {
        let mut rendered = Rendered { text: String::with_capacity(text.len()), literals: Vec::new() };
        for c in text.chars() {
            match self.stand_ins.iter().find(|pair| pair.1 == c).filter(|_| c >= '\u{f0000}') {
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

fn private_characters(value: &Json, used: &mut BTreeSet<char>) {
    let mut note = |text: &str| used.extend(text.chars().filter(|&c| c >= '\u{f0000}'));
    match value {
        Json::Str(text) => note(text),
        Json::Array(items) => items.iter().for_each(|item| private_characters(item, used)),
        Json::Object(items) => {
            items.iter().for_each(|(name, _)| note(name));
            items.iter().for_each(|(_, item)| private_characters(item, used));
        }
        _ => {}
    }
}

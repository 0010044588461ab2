//! Calls with parameters between tags.
//!
//! A value may contain the text of its own tags. Its closing tag counts only where another parameter or the end of the call
//! follows, and tags within the value that open and close are skipped together. Where that finds no end in the whole text,
//! the tags within values are not counted ("flat"), and a parameter may lack its closing tag.

use super::super::syntaxes::{Body, Tags};
use super::super::values::{json_string, text_value};
use super::{OutputParser, find, floor};

/// Longest tag before a value in bytes, its key included.
const MAX_HEAD: usize = 1024;
/// Most white space between two tags in bytes.
const MAX_SPACE: usize = 256;

/// The tag before a value.
#[derive(Debug)]
pub(super) struct Head {
    pub(super) key: String,
    /// What stands beside the key.
    attributes: String,
    /// Where the value begins.
    pub(super) value_at: usize,
}

/// Whether something stands in a text; unknown if the text may go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Found {
    Yes,
    No,
    Unknown,
}

impl OutputParser {
    pub(super) fn tag_args(&mut self, end: bool) -> bool {
        let Body::Tags(tags) = self.body() else { return self.fail(0) };
        let around = self.syntax().map_or(&[][..], |syntax| syntax.around);
        let marks: Vec<&str> = [tags.key, tags.end].into_iter().chain(around.iter().copied()).collect();
        match find(self.rest(), &marks, end) {
            (0, Some(0)) => {}
            (0, Some(1)) => return self.end_args(tags.end.len()),
            // a call without its closing tag
            (0, Some(_)) => return self.end_args(0),
            (0, None) => return false,
            _ => return self.fail(0),
        }
        match head(self.rest(), tags) {
            Ok(head) => self.value(tags, &head, end),
            Err(Found::Unknown) => false,
            Err(_) => self.fail(tags.key.len()),
        }
    }

    /// Reads a value to its end.
    fn value(&mut self, tags: &Tags, head: &Head, end: bool) -> bool {
        let opener = if tags.value.is_empty() || self.is_flat { tags.key } else { tags.value };
        let events = [tags.value_end, opener, tags.end];
        let n_events = if self.recovers() { 3 } else { 2 - usize::from(self.is_flat) };
        let from = floor(self.rest(), self.scan.at.max(head.value_at));
        self.scan.at = from;
        loop {
            let from = self.scan.at;
            let (n, found) = find(&self.rest()[from..], &events[..n_events], end);
            let at = from + n;
            let Some(found) = found else {
                self.scan.at = at;
                return false;
            };
            let next = at + events[found].len();
            let value_end = match found {
                0 if self.scan.depth > 0 => {
                    self.scan.depth -= 1;
                    None
                }
                0 => match self.ends_value(&self.rest()[next..], tags, end) {
                    Found::Yes => Some(next),
                    Found::No => None,
                    Found::Unknown => {
                        self.scan.at = at;
                        return false;
                    }
                },
                1 if self.is_flat => self.begins_parameter(&self.rest()[at..], tags).then_some(at),
                1 => {
                    self.scan.depth += 1;
                    None
                }
                _ => (self.ends_call(&self.rest()[next..], end) == Found::Yes).then_some(at),
            };
            if let Some(n) = value_end {
                return self.add_value(tags, head, at, n);
            }
            self.scan.at = next;
        }
    }

    /// Whether a parameter may lack its closing tag.
    fn recovers(&self) -> bool {
        self.is_flat && !self.plan.is_enforced
    }

    /// Adds the parameter whose value ends at `at`, with the `n` bytes of its tags.
    fn add_value(&mut self, tags: &Tags, head: &Head, at: usize, n: usize) -> bool {
        let value = verbatim(&self.rest()[head.value_at..at], tags);
        let name = self.call.name.as_deref().unwrap_or_default();
        let schema = self.plan.parameter_schema(name, &head.key);
        // DeepSeek says beside the key whether the value is a string
        let is_text = head.attributes.contains("string=\"true");
        let value = if is_text { json_string(value) } else { text_value(value, schema) };
        self.add(n, Some((json_string(&head.key), value)))
    }

    /// The text of a value that is cut at the end of `rest`, and whether it is a string; `None` before the value.
    pub(super) fn cut_value(&self, rest: &str) -> Option<(String, String, bool)> {
        let Body::Tags(tags) = self.body() else { return None };
        if !rest.starts_with(tags.key) {
            return None;
        }
        let head = head(rest, tags).ok()?;
        let value = verbatim(&rest[head.value_at..], tags);
        // the beginning of the closing tag
        let value = without_start_of(value, tags.value_end);
        let value = if tags.has_layout { value.strip_suffix('\n').unwrap_or(value) } else { value };
        let schema = self.call.name.as_deref().and_then(|name| self.plan.parameter_schema(name, &head.key));
        let is_string = schema.is_some_and(|schema| schema.accepts_text() && !schema.is_free());
        let is_text = is_string || head.attributes.contains("string=\"true");
        Some((head.key, value.to_string(), is_text))
    }

    /// Whether a value ends before `text`: another parameter follows, or the end of the call.
    fn ends_value(&self, text: &str, tags: &Tags, end: bool) -> Found {
        let Some(rest) = after_space(text) else { return Found::No };
        if rest.is_empty() {
            return if end { Found::Yes } else { Found::Unknown };
        }
        match starts_with_any(rest, &[tags.end], end) {
            Found::Yes if self.call.is_in_block && !self.is_flat => {
                return self.ends_call(&rest[tags.end.len()..], end);
            }
            Found::No => {}
            other => return other,
        }
        let closers = self.syntax().into_iter().flat_map(|syntax| syntax.around).filter(|mark| mark.starts_with("</"));
        let marks: Vec<&str> = closers.copied().chain([tags.key]).collect();
        starts_with_any(rest, &marks, end)
    }

    /// Whether a block of calls ends or goes on at `text`, which follows the closing tag of a call.
    fn ends_call(&self, text: &str, end: bool) -> Found {
        let Some(rest) = after_space(text) else { return Found::No };
        if rest.is_empty() {
            return if end { Found::Yes } else { Found::Unknown };
        }
        let marks: Vec<&str> =
            self.syntax().into_iter().flat_map(|syntax| syntax.open.iter().chain(syntax.around)).copied().collect();
        starts_with_any(rest, &marks, end)
    }

    /// Whether `text` begins with the tag of a parameter of the function that the call does not have yet.
    fn begins_parameter(&self, text: &str, tags: &Tags) -> bool {
        let Ok(head) = head(text, tags) else { return false };
        let name = self.call.name.as_deref().unwrap_or_default();
        let is_new = !self.call.args.contains(&format!("{}:", json_string(&head.key)));
        is_new && self.plan.parameter_schema(name, &head.key).is_some()
    }
}

/// The tag before a value at the start of `text`.
fn head(text: &str, tags: &Tags) -> Result<Head, Found> {
    let unknown = if text.len() >= MAX_HEAD { Found::No } else { Found::Unknown };
    let text = &text[..floor(text, MAX_HEAD)];
    let after = text.strip_prefix(tags.key).ok_or(Found::No)?;
    let n = after.find(tags.key_end).ok_or(unknown)?;
    // DeepSeek writes attributes behind the key
    let (key, attributes) = after[..n].split_once('"').unwrap_or((&after[..n], ""));
    let key = key.trim();
    if key.is_empty() {
        return Err(Found::No);
    }
    let rest = &after[n + tags.key_end.len()..];
    let value = if tags.value.is_empty() { rest } else { rest.trim_start() };
    let value = match starts_with_any(value, &[tags.value], false) {
        Found::Yes => &value[tags.value.len()..],
        Found::No if !value.is_empty() => return Err(Found::No),
        _ => return Err(unknown),
    };
    Ok(Head { key: key.into(), attributes: attributes.into(), value_at: text.len() - value.len() })
}

/// The text of a value without the line breaks that a syntax writes around it.
fn verbatim<'a>(value: &'a str, tags: &Tags) -> &'a str {
    if !tags.has_layout {
        return value;
    }
    let value = value.strip_prefix('\n').unwrap_or(value);
    value.strip_suffix('\n').unwrap_or(value)
}

/// A text without the beginning of `tag` at its end.
fn without_start_of<'a>(text: &'a str, tag: &str) -> &'a str {
    let starts = (1..tag.len()).rev().filter(|n| tag.is_char_boundary(*n));
    starts.into_iter().find_map(|n| text.strip_suffix(&tag[..n])).unwrap_or(text)
}

/// A text without the white space before it; `None` if there is too much.
fn after_space(text: &str) -> Option<&str> {
    let rest = text.trim_start();
    (text.len() - rest.len() <= MAX_SPACE).then_some(rest)
}

/// Whether a text begins with one of `marks`.
fn starts_with_any(text: &str, marks: &[&str], end: bool) -> Found {
    if marks.iter().any(|mark| text.starts_with(mark)) {
        return Found::Yes;
    }
    let is_partial = |mark: &&str| mark.starts_with(text);
    if !end && marks.iter().any(is_partial) { Found::Unknown } else { Found::No }
}

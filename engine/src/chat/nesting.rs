//! How deeply a template may nest, before it is read: the library that reads it goes down its own stack for each operator of an
//! expression and each branch of a condition, without an end.

use super::ChatError;

/// Words and signs of one tag, texts not counted: thousands take a thread's stack, templates have some dozens.
const MAX_TAG: usize = 1000;
/// Tags that begin with `elif` in a template: each is a condition inside of the one before.
const MAX_BRANCHES: usize = 250;

/// Refuses what nests too deeply.
pub(super) fn check(source: &str) -> Result<(), ChatError> {
    let (mut rest, mut branches) = (source, 0);
    while let Some(at) = rest.find("{{").into_iter().chain(rest.find("{%")).chain(rest.find("{#")).min() {
        let (kind, tag) = rest[at..].split_at(2);
        if kind == "{#" {
            rest = tag.split_once("#}").map_or("", |(_, after)| after);
            continue;
        }
        branches += usize::from(tag.trim_start_matches(['-', '+']).trim_start().starts_with("elif"));
        if branches > MAX_BRANCHES {
            return Err(ChatError::Limit { what: "branches", limit: MAX_BRANCHES as u64 });
        }
        rest = after_tag(tag, if kind == "{{" { "}}" } else { "%}" })?;
    }
    Ok(())
}

/// What follows a tag, of which `tag` is all but the beginning.
fn after_tag<'s>(tag: &'s str, end: &str) -> Result<&'s str, ChatError> {
    let (mut words, mut in_word, mut brackets) = (0, false, 0i64);
    let mut chars = tag.char_indices();
    while let Some((at, c)) = chars.next() {
        if brackets <= 0 && tag[at..].starts_with(end) {
            return Ok(&tag[at + end.len()..]);
        }
        let is_word = c.is_alphanumeric() || c == '_';
        words += usize::from(!(c.is_whitespace() || is_word && in_word));
        in_word = is_word;
        if words > MAX_TAG {
            return Err(ChatError::Limit { what: "words in a tag", limit: MAX_TAG as u64 });
        }
        match c {
            '(' | '[' | '{' => brackets += 1,
            ')' | ']' | '}' => brackets -= 1,
            _ => {}
        }
        if c == '"' || c == '\'' {
            while let Some((_, inside)) = chars.next()
                && inside != c
            {
                if inside == '\\' {
                    chars.next();
                }
            }
        }
    }
    Ok("")
}

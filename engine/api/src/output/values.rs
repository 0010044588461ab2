//! Values of arguments: to JSON, from JSON as models write it, from Python's literals, and from text by a tool's schema.

use serde::de::IgnoredAny;
use serde_json::Value;
use starling::grammar_source::ValueSchema;

/// Deepest nesting of a literal that is converted.
const MAX_DEPTH: usize = 64;

/// A text as a JSON string.
pub(super) fn json_string(text: &str) -> String {
    Value::from(text).to_string()
}

fn is_json(text: &str) -> bool {
    serde_json::from_str::<IgnoredAny>(text).is_ok()
}

/// JSON without white space between its tokens, and with line breaks within strings escaped, which models often forget.
/// Numbers keep their digits. `None` if the text is not JSON.
pub(super) fn compact_json(text: &str) -> Option<String> {
    let (out, spaced) = compact(text);
    // with its white space: without it, numbers and words would join
    is_json(&spaced).then_some(out)
}

/// A part of JSON without white space between its tokens, and with it.
pub(super) fn compact(text: &str) -> (String, String) {
    let (mut out, mut spaced) = (String::with_capacity(text.len()), String::with_capacity(text.len()));
    let (mut in_string, mut is_escaped) = (false, false);
    for c in text.chars() {
        if in_string && c < ' ' {
            let escaped = json_string(c.encode_utf8(&mut [0; 4]));
            [&mut out, &mut spaced].into_iter().for_each(|text| text.push_str(&escaped[1..escaped.len() - 1]));
            is_escaped = false;
            continue;
        }
        if c == '"' && !is_escaped {
            in_string = !in_string;
        }
        is_escaped = in_string && c == '\\' && !is_escaped;
        spaced.push(c);
        if in_string || !matches!(c, ' ' | '\t' | '\n' | '\r') {
            out.push(c);
        }
    }
    (out, spaced)
}

/// A parameter `"key": value` of a JSON object: key and value as JSON.
pub(super) fn json_parameter(text: &str) -> Option<(String, String)> {
    let text = text.trim();
    let mut is_escaped = false;
    let end = text.char_indices().skip(1).find(|&(_, c)| {
        let is_end = c == '"' && !is_escaped;
        is_escaped = c == '\\' && !is_escaped;
        is_end
    })?;
    let (key, value) = text.split_at(end.0 + 1);
    let value = value.trim_start().strip_prefix(':')?;
    // a key that is a string
    serde_json::from_str::<String>(key).ok()?;
    Some((key.into(), compact_json(value)?))
}

/// Parameters of a JSON object: keys and values as JSON.
pub(super) fn object_parameters(value: &Value) -> Option<Vec<(String, String)>> {
    let object = value.as_object()?;
    Some(object.iter().map(|(key, value)| (json_string(key), value.to_string())).collect())
}

/// The JSON of a text that stands for a value of `schema`: the text itself where strings are allowed, else a literal.
pub(super) fn text_value(text: &str, schema: Option<ValueSchema<'_>>) -> String {
    let literal = || compact_json(text).or_else(|| literal(text, ""));
    let string = || json_string(text);
    let Some(schema) = schema.filter(|schema| !schema.is_free()) else { return literal().unwrap_or_else(string) };
    if text.trim() == "null" && schema.accepts(&Value::Null) {
        return "null".into();
    }
    if schema.accepts(&Value::from(text)) {
        return string();
    }
    let is_of_texts =
        || schema.choices().is_some_and(|all| !all.is_empty() && all.iter().all(|value| value.is_string()));
    match literal() {
        Some(json) if serde_json::from_str(&json).is_ok_and(|value| schema.accepts(&value)) => json,
        Some(json) if !is_of_texts() => json,
        _ => string(),
    }
}

/// Whether a string ends at a closing quote without escapes, by the text after it: `None` if more text must come.
pub(super) fn quote_ends(after: &[u8]) -> Option<bool> {
    after.trim_ascii_start().first().map(|byte| b",]}):".contains(byte))
}

/// The place of the quote that ends a string without escapes.
fn closing_quote(text: &str, quote: &str) -> Option<usize> {
    let ends = |at: &usize| quote_ends(&text.as_bytes()[at + quote.len()..]) != Some(false);
    text.match_indices(quote).map(|(at, _)| at).find(ends)
}

/// The JSON of a literal of Python or JSON, with strings between `quote` too if that is not empty.
pub(super) fn literal(text: &str, quote: &str) -> Option<String> {
    let mut reader = Reader { rest: text, quote, out: String::new() };
    reader.value(0)?;
    (reader.rest.trim().is_empty() && is_json(&reader.out)).then_some(reader.out)
}

/// A parameter `key=value` or `key: value`, with `separator` between them: key and value as JSON.
pub(super) fn literal_parameter(text: &str, separator: char, quote: &str) -> Option<(String, String)> {
    let (key, value) = text.split_once(separator)?;
    let key = key.trim();
    let key =
        if quote.is_empty() { key } else { key.strip_prefix(quote).map_or(key, |key| key.trim_end_matches(quote)) };
    let key = key.trim_matches(['"', '\'']);
    let is_name = !key.is_empty() && key.chars().all(|c| c.is_alphanumeric() || "_-.$".contains(c));
    Some((json_string(key), literal(value, quote)?)).filter(|_| is_name)
}

struct Reader<'a> {
    rest: &'a str,
    quote: &'a str,
    out: String,
}

impl Reader<'_> {
    fn take(&mut self, text: &str) -> bool {
        match self.rest.strip_prefix(text) {
            Some(rest) if !text.is_empty() => {
                self.rest = rest;
                true
            }
            _ => false,
        }
    }

    fn space(&mut self) {
        self.rest = self.rest.trim_start();
    }

    fn value(&mut self, depth: usize) -> Option<()> {
        self.space();
        if depth > MAX_DEPTH {
            return None;
        }
        match self.rest.chars().next()? {
            '[' => self.items("[", "]", depth),
            '(' => self.items("(", ")", depth),
            '{' => self.items("{", "}", depth),
            _ if self.string()? => Some(()),
            _ => self.word(),
        }
    }

    /// Items of a list, or pairs of an object.
    fn items(&mut self, open: &str, close: &str, depth: usize) -> Option<()> {
        self.take(open);
        let is_object = open == "{";
        self.out.push(if is_object { '{' } else { '[' });
        let mut is_first = true;
        loop {
            self.space();
            if self.take(close) {
                self.out.push(if is_object { '}' } else { ']' });
                return Some(());
            }
            if !is_first {
                self.take(",").then_some(())?;
                self.space();
                if self.rest.starts_with(close) {
                    continue;
                }
                self.out.push(',');
            }
            is_first = false;
            if is_object {
                self.key()?;
                self.space();
                self.take(":").then_some(())?;
                self.out.push(':');
            }
            self.value(depth + 1)?;
        }
    }

    fn key(&mut self) -> Option<()> {
        if self.string()? {
            return Some(());
        }
        let n = self.rest.find([':', ',', '}', '\n']).unwrap_or(self.rest.len());
        let (key, rest) = self.rest.split_at(n);
        self.out.push_str(&json_string(key.trim()));
        self.rest = rest;
        Some(())
    }

    /// Reads a string if there is one; `None` if it does not end.
    fn string(&mut self) -> Option<bool> {
        if !self.quote.is_empty() && self.take(self.quote) {
            let at = closing_quote(self.rest, self.quote)?;
            self.out.push_str(&json_string(&self.rest[..at]));
            self.rest = &self.rest[at + self.quote.len()..];
            return Some(true);
        }
        let quotes = ["\"\"\"", "'''", "\"", "'"];
        let Some(quote) = quotes.into_iter().find(|quote| self.rest.starts_with(quote)) else { return Some(false) };
        self.take(quote);
        // a list of UTF-16 units, so that escaped surrogates join
        let mut units = Vec::new();
        while !self.take(quote) {
            let mut chars = self.rest.chars();
            match chars.next()? {
                '\\' => match chars.next()? {
                    'n' => push(&mut units, '\n'),
                    't' => push(&mut units, '\t'),
                    'r' => push(&mut units, '\r'),
                    'b' => push(&mut units, '\u{8}'),
                    'f' => push(&mut units, '\u{c}'),
                    '\n' => {}
                    c @ ('\\' | '\'' | '"' | '/') => push(&mut units, c),
                    'x' => units.push(hex(&mut chars, 2)? as u16),
                    'u' => units.push(hex(&mut chars, 4)? as u16),
                    'U' => push(&mut units, char::from_u32(hex(&mut chars, 8)?)?),
                    // Python keeps the backslash of an unknown escape
                    c => {
                        push(&mut units, '\\');
                        push(&mut units, c);
                    }
                },
                c => push(&mut units, c),
            }
            self.rest = chars.as_str();
        }
        self.out.push_str(&json_string(&String::from_utf16_lossy(&units)));
        Some(true)
    }

    /// A number, or a constant of Python or JSON.
    fn word(&mut self) -> Option<()> {
        let n = self.rest.find([',', ']', ')', '}', ':']).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(n);
        self.out.push_str(match word.trim() {
            "True" | "true" => "true",
            "False" | "false" => "false",
            "None" | "null" => "null",
            number if number.starts_with(|c: char| c.is_ascii_digit() || c == '-') && is_json(number) => number,
            _ => return None,
        });
        self.rest = rest;
        Some(())
    }
}

fn hex(chars: &mut std::str::Chars<'_>, n: usize) -> Option<u32> {
    (0..n).try_fold(0u32, |value, _| Some(value << 4 | chars.next()?.to_digit(16)?))
}

fn push(units: &mut Vec<u16>, c: char) {
    units.extend_from_slice(c.encode_utf16(&mut [0; 2]));
}

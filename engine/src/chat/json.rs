//! JSON values of a request that keep the order of object keys, and the filter `tojson`.

#[cfg(feature = "serde")]
use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt::Write;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value};

/// A JSON value. Objects keep the order of their keys, which templates print.
#[derive(Debug, Clone, PartialEq)]
pub enum Json {
    /// `null`
    Null,
    /// `true` or `false`
    Bool(bool),
    /// An integer.
    Int(i64),
    /// An integer above `i64::MAX`.
    UInt(u64),
    /// Another number.
    Float(f64),
    /// A string.
    Str(String),
    /// An array.
    Array(Vec<Json>),
    /// An object: keys and values.
    Object(Vec<(String, Json)>),
}

impl Json {
    /// A chat message.
    pub fn message(role: &str, content: &str) -> Json {
        let string = |text: &str| Json::Str(text.to_string());
        Json::Object([("role", role), ("content", content)].map(|(k, v)| (k.to_string(), string(v))).into())
    }
}

#[cfg(feature = "serde")]
impl<'de> serde::Deserialize<'de> for Json {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Json, D::Error> {
        struct Visitor;
        impl<'de> serde::de::Visitor<'de> for Visitor {
            type Value = Json;
            fn expecting(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                f.write_str("a JSON value")
            }
            fn visit_unit<E>(self) -> Result<Json, E> {
                Ok(Json::Null)
            }
            fn visit_bool<E>(self, value: bool) -> Result<Json, E> {
                Ok(Json::Bool(value))
            }
            fn visit_i64<E>(self, value: i64) -> Result<Json, E> {
                Ok(Json::Int(value))
            }
            fn visit_u64<E>(self, value: u64) -> Result<Json, E> {
                Ok(i64::try_from(value).map_or(Json::UInt(value), Json::Int))
            }
            fn visit_f64<E>(self, value: f64) -> Result<Json, E> {
                Ok(Json::Float(value))
            }
            fn visit_str<E>(self, value: &str) -> Result<Json, E> {
                Ok(Json::Str(value.to_string()))
            }
            fn visit_seq<A: serde::de::SeqAccess<'de>>(self, mut seq: A) -> Result<Json, A::Error> {
                let mut items = Vec::new();
                while let Some(item) = seq.next_element()? {
                    items.push(item);
                }
                Ok(Json::Array(items))
            }
            fn visit_map<A: serde::de::MapAccess<'de>>(self, mut map: A) -> Result<Json, A::Error> {
                let mut items = Vec::new();
                while let Some(item) = map.next_entry()? {
                    items.push(item);
                }
                Ok(Json::Object(last_of_each(items)))
            }
        }
        deserializer.deserialize_any(Visitor)
    }
}

/// The fields of an object, each once: of several with one name the last counts, as in Python's and most other parsers. A
/// reader that took the first would check another value than a template prints.
#[cfg(feature = "serde")]
fn last_of_each(items: Vec<(String, Json)>) -> Vec<(String, Json)> {
    let mut is_last = alloc::vec![false; items.len()];
    let names: BTreeMap<&str, usize> = items.iter().enumerate().map(|(i, (name, _))| (name.as_str(), i)).collect();
    names.into_values().for_each(|i| is_last[i] = true);
    items.into_iter().zip(is_last).filter_map(|(item, is_last)| is_last.then_some(item)).collect()
}

/// Deepest nesting that `tojson` writes.
const MAX_DEPTH: usize = 128;

/// The filter `tojson` of transformers: Python's `json.dumps` with `ensure_ascii=False`.
pub(super) fn to_json(value: &Value, indent: Option<Value>, options: Kwargs) -> Result<String, Error> {
    let indent = match indent {
        Some(indent) => Some(indent),
        None => options.get::<Option<Value>>("indent")?,
    };
    let indent = indent.and_then(|indent| usize::try_from(indent).ok()).map(|n| n.min(16));
    let separators = options.get::<Option<Vec<String>>>("separators")?;
    let (comma, colon) = match separators.as_deref() {
        Some([comma, colon]) => (comma.as_str(), colon.as_str()),
        _ => (if indent.is_some() { "," } else { ", " }, ": "),
    };
    let sort_keys = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    let ensure_ascii = options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    options.assert_all_used()?;
    let mut writer = Writer { out: String::new(), indent, comma, colon, sort_keys, ensure_ascii };
    writer.value(value, 0)?;
    Ok(writer.out)
}

/// Formats a float as Python's `repr` does.
fn float(value: f64) -> String {
    if !value.is_finite() {
        let name = if value.is_nan() { "NaN" } else { "Infinity" };
        return String::from(if value < 0.0 { "-" } else { "" }) + name;
    }
    let digits = format!("{value:e}");
    let (mantissa, exponent) = digits.split_once('e').unwrap_or((&digits, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    match exponent {
        -4..16 => format!("{value:?}"),
        _ => format!("{mantissa}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs()),
    }
}

struct Writer<'a> {
    out: String,
    indent: Option<usize>,
    comma: &'a str,
    colon: &'a str,
    sort_keys: bool,
    ensure_ascii: bool,
}

impl Writer<'_> {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return Err(Error::new(ErrorKind::InvalidOperation, "tojson: the value is nested too deeply"));
        }
        match value.kind() {
            ValueKind::Undefined => {
                return Err(Error::new(ErrorKind::UndefinedError, "tojson: the value is undefined"));
            }
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number if value.is_integer() => self.out.push_str(&value.to_string()),
            ValueKind::Number => self.out.push_str(&float(f64::try_from(value.clone())?)),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.list(('[', ']'), items.len(), depth, |writer, i| writer.value(&items[i], depth + 1))?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                // other keys have no total order, on which `sort` may panic; Python refuses them
                let is_scalar = |key: &Value| {
                    matches!(key.kind(), ValueKind::None | ValueKind::Bool | ValueKind::Number | ValueKind::String)
                };
                if self.sort_keys && keys.iter().all(is_scalar) {
                    keys.sort();
                }
                self.list(('{', '}'), keys.len(), depth, |writer, i| {
                    writer.string(&keys[i].to_string());
                    writer.out.push_str(writer.colon);
                    writer.value(&value.get_item(&keys[i])?, depth + 1)
                })?;
            }
            _ => self.string(&value.to_string()),
        }
        Ok(())
    }

    fn list(
        &mut self,
        (open, close): (char, char),
        n: usize,
        depth: usize,
        mut item: impl FnMut(&mut Self, usize) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.out.push(open);
        for i in 0..n {
            if i > 0 {
                self.out.push_str(self.comma);
            }
            self.line(depth + 1);
            item(self, i)?;
        }
        if n > 0 {
            self.line(depth);
        }
        self.out.push(close);
        Ok(())
    }

    /// Begins an indented line if `indent` is set.
    fn line(&mut self, depth: usize) {
        if let Some(indent) = self.indent {
            self.out.push('\n');
            self.out.extend(core::iter::repeat_n(' ', indent * depth));
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                c if c < ' ' || (self.ensure_ascii && !c.is_ascii()) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        // writing to a string does not fail
                        let _ = write!(self.out, "\\u{unit:04x}");
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

#[cfg(all(test, feature = "serde"))]
mod tests {
    use super::*;

    #[test]
    fn the_last_field_of_a_name_counts() {
        let json = |text: &str| serde_json::from_str::<Json>(text).expect("JSON");
        let doubled = r#"{"role":"user","a":1,"role":"system","a":{"b":1,"b":2}}"#;
        assert_eq!(json(doubled), json(r#"{"role":"system","a":{"b":2}}"#));
    }

    #[test]
    fn integers_stay_exact() {
        for text in ["0", "-9223372036854775808", "9223372036854775807", "9223372036854775808", "18446744073709551615"]
        {
            let value = match serde_json::from_str::<Json>(text).expect("JSON") {
                Json::Int(n) => Value::from(n),
                Json::UInt(n) => Value::from(n),
                other => panic!("{text}: {other:?}"),
            };
            let written = to_json(&value, None, Kwargs::from_iter(Vec::<(&str, Value)>::new()));
            assert_eq!(written.expect("JSON"), text);
        }
    }
}

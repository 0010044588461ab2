//! JSON schemas made ready for `llguidance`: references with escapes are resolved, numbers that a 64-bit float cannot
//! hold are refused, and key patterns that no further key can match are merged into the keys they match.

use alloc::borrow::ToOwned;
use alloc::collections::BTreeSet;
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;

use llguidance::derivre::{Regex, RegexAst, RegexBuilder};
use llguidance::regex_to_lark;
use serde_json::{Map, Number, Value, json};

use super::{StructureError, wrong};

/// Bytes of JSON that aliases and merged patterns may add to a schema: a small schema could otherwise name one large
/// part many times.
const MAX_COPIED: usize = 256 << 10;
/// Different patterns of keys in a schema: `llguidance` compares each with each, again wherever two objects are both to
/// hold.
const MAX_PATTERNS: usize = 32;
/// States of an expression of keys, as `llguidance` bounds its own checks of them.
const KEY_FUEL: u64 = 10_000;
/// Whole numbers up to this are exact as 64-bit floats.
const MAX_EXACT: i128 = 1 << 53;

/// Keywords whose value is a schema or a list of schemas.
const SCHEMAS: [&str; 17] = [
    "additionalItems",
    "additionalProperties",
    "allOf",
    "anyOf",
    "contains",
    "contentSchema",
    "else",
    "if",
    "items",
    "not",
    "oneOf",
    "prefixItems",
    "propertyNames",
    "then",
    "unevaluatedItems",
    "unevaluatedProperties",
    "extends",
];
/// Keywords whose value has a schema for each name.
const NAMED_SCHEMAS: [&str; 5] = ["$defs", "definitions", "dependentSchemas", "patternProperties", "properties"];

/// The schema as `llguidance` reads it right, and whether a key may not be written with `\\u` escapes: `llguidance`
/// compares keys with listed names and patterns as they are written.
///
/// # Errors
/// What it cannot say exactly, with the JSON pointer of the place.
pub(super) fn prepared(schema: &Value) -> Result<(Value, bool), StructureError> {
    let mut schema = schema.clone();
    let mut work = Work::default();
    let original = schema.clone();
    work.visit(&mut schema, String::new(), &original)?;
    // a reference may lead to a place where no keyword expects a schema
    while let Some(target) = work.targets.pop() {
        if !work.visited.contains(&target)
            && let Some(value) = schema.pointer_mut(&target)
        {
            work.visit(value, target, &original)?;
        }
    }
    work.add_aliases(&mut schema)?;
    Ok((schema, work.compares_keys))
}

#[derive(Default)]
struct Work {
    /// The patterns of keys.
    patterns: BTreeSet<String>,
    /// Whether an object has keys that are listed, or that patterns match, beside others.
    compares_keys: bool,
    /// Bytes that have been copied.
    copied: usize,
    /// JSON pointers of the parts that references reach by an alias, whose name is their index.
    aliases: Vec<String>,
    /// JSON pointers of the schemas that have been prepared.
    visited: BTreeSet<String>,
    /// JSON pointers that references lead to.
    targets: Vec<String>,
}

impl Work {
    /// Prepares the schema at the pointer `at`, and those in it. `original` is the whole, in which references are
    /// looked up.
    fn visit(&mut self, schema: &mut Value, at: String, original: &Value) -> Result<(), StructureError> {
        if !self.visited.insert(at.clone()) {
            return Ok(());
        }
        let Value::Object(schema) = schema else { return Ok(()) };
        check_numbers(schema, &at)?;
        if let Some(Value::String(reference)) = schema.get_mut("$ref") {
            self.resolve(reference, &at, original)?;
        }
        for (keyword, value) in schema.iter_mut() {
            let at = || format!("{at}/{}", escaped(keyword));
            if NAMED_SCHEMAS.contains(&keyword.as_str()) {
                let Value::Object(named) = value else { continue };
                for (name, schema) in named {
                    self.visit(schema, format!("{}/{}", at(), escaped(name)), original)?;
                }
            } else if SCHEMAS.contains(&keyword.as_str()) {
                match value {
                    Value::Array(list) => {
                        for (i, schema) in list.iter_mut().enumerate() {
                            self.visit(schema, format!("{}/{i}", at()), original)?;
                        }
                    }
                    schema => self.visit(schema, at(), original)?,
                }
            }
        }
        self.merge_patterns(schema)?;
        let is_closed = schema.get("additionalProperties") == Some(&Value::Bool(false));
        self.compares_keys |= !is_closed && !listed(schema).is_empty();
        check_min_properties(schema, &at)
    }

    /// Replaces a reference with escapes by one that is followed as it is written.
    fn resolve(&mut self, reference: &mut String, at: &str, original: &Value) -> Result<(), StructureError> {
        let Some(fragment) = reference.strip_prefix('#') else { return Ok(()) };
        // names with such characters that are not escaped are taken as they are
        let raw = fragment.strip_prefix('/').unwrap_or_default();
        let found = raw.split('/').try_fold(original, child).is_some();
        if !fragment.contains(['%', '~']) || found {
            self.targets.push(raw.split('/').map(|part| format!("/{}", escaped(part))).collect());
            return Ok(());
        }
        let unknown = || wrong(&format!("{at}/$ref: {reference:?} names no part of the schema"));
        let pointer = percent_decoded(fragment).ok_or_else(unknown)?;
        if !pointer.is_empty() && original.pointer(&pointer).is_none() {
            return Err(unknown());
        }
        self.targets.push(pointer.clone());
        let parts: Vec<String> = pointer.split('/').skip(1).map(unescaped).collect();
        if parts.iter().any(|part| part.is_empty() || part.contains('/')) {
            let known = self.aliases.iter().position(|other| *other == pointer);
            let i = known.unwrap_or(self.aliases.len());
            if known.is_none() {
                self.aliases.push(pointer);
            }
            *reference = format!("#/$defs/{}", alias(i));
        } else {
            *reference = "#".to_owned() + &parts.iter().map(|part| format!("/{part}")).collect::<String>();
        }
        Ok(())
    }

    /// Adds copies of the parts that references can only reach by an alias. Their own references lead to the whole.
    fn add_aliases(&mut self, schema: &mut Value) -> Result<(), StructureError> {
        for (i, pointer) in self.aliases.clone().iter().enumerate() {
            let part = schema.pointer(pointer).cloned().unwrap_or_default();
            self.count(&part)?;
            let defs = schema.as_object_mut().map(|schema| schema.entry("$defs").or_insert_with(|| json!({})));
            let Some(Value::Object(defs)) = defs else { return Err(wrong("/$defs: expected an object")) };
            defs.insert(alias(i), part);
        }
        Ok(())
    }

    fn count(&mut self, copied: &Value) -> Result<(), StructureError> {
        self.copied += copied.to_string().len();
        if self.copied <= MAX_COPIED {
            return Ok(());
        }
        Err(wrong(&format!("its references with escapes and its patterns need more than {MAX_COPIED} bytes of copies")))
    }

    /// Merges patterns that match only keys that are listed anyway into the schemas of those keys: `llguidance` would
    /// let an answer begin a key that has no end. The same where patterns leave nothing for `additionalProperties`.
    fn merge_patterns(&mut self, schema: &mut Map<String, Value>) -> Result<(), StructureError> {
        let Some(Value::Object(patterns)) = schema.get("patternProperties") else { return Ok(()) };
        let patterns = patterns.clone();
        self.patterns.extend(patterns.keys().cloned());
        if self.patterns.len() > MAX_PATTERNS {
            return Err(wrong(&format!("has more than {MAX_PATTERNS} different patterns in patternProperties")));
        }
        let names: Vec<String> = listed(schema);
        let mut kept = Map::new();
        for (pattern, value) in &patterns {
            let Some(mut keys) = Keys::new(&[pattern.as_str()], &[]) else { return Ok(()) };
            let matched: Vec<&String> = names.iter().filter(|name| keys.contains(name)).collect();
            let taken: Vec<&str> = matched.iter().map(|name| name.as_str()).collect();
            if !Keys::new(&[pattern.as_str()], &taken).is_some_and(|mut rest| rest.is_empty()) {
                kept.insert(pattern.clone(), value.clone());
                continue;
            }
            for name in matched {
                self.count(value)?;
                let properties = schema.entry("properties").or_insert_with(|| json!({}));
                let Value::Object(properties) = properties else { return Ok(()) };
                let both = match properties.get(name) {
                    Some(own) => json!({ "allOf": [own, value] }),
                    None => value.clone(),
                };
                properties.insert(name.clone(), both);
            }
        }
        let all: Vec<&str> = kept.keys().map(String::as_str).collect();
        let taken: Vec<&str> = names.iter().map(String::as_str).collect();
        if !all.is_empty() && Keys::others(&all, &taken).is_some_and(|mut rest| rest.is_empty()) {
            schema.insert("additionalProperties".into(), Value::Bool(false));
        }
        self.compares_keys |= !kept.is_empty();
        schema.insert("patternProperties".into(), Value::Object(kept));
        Ok(())
    }
}

/// Keys that an object lists: those with a schema, and those that are only required.
fn listed(schema: &Map<String, Value>) -> Vec<String> {
    let properties = schema.get("properties").and_then(Value::as_object).into_iter().flat_map(Map::keys).cloned();
    let mut names: Vec<String> = properties.collect();
    let required = schema.get("required").and_then(Value::as_array).into_iter().flatten();
    for name in required.filter_map(Value::as_str) {
        if !names.iter().any(|other| other == name) {
            names.push(name.into());
        }
    }
    names
}

/// Checks that a key that occurs twice cannot make up for one that `minProperties` wants: at most one key may be left
/// to the answer's choice.
fn check_min_properties(schema: &Map<String, Value>, at: &str) -> Result<(), StructureError> {
    let is_object = match schema.get("type") {
        Some(Value::Array(types)) => types.iter().any(|kind| kind == "object"),
        kind => kind.is_none_or(|kind| kind == "object"),
    };
    let is_closed = schema.get("additionalProperties") == Some(&Value::Bool(false));
    let has_patterns = schema.get("patternProperties").and_then(Value::as_object).is_some_and(|map| !map.is_empty());
    let Some(min) = schema.get("minProperties").and_then(Value::as_f64) else { return Ok(()) };
    let required: BTreeSet<&str> =
        schema.get("required").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str).collect();
    let most = required.len() + 1;
    if !is_object || (is_closed && !has_patterns) || min <= most as f64 {
        return Ok(());
    }
    let message = format!(
        "{at}/minProperties: found {min}, expected at most {most}, one more than the required properties: answers could \
         repeat a key to reach it"
    );
    Err(wrong(&message))
}

/// A set of keys.
struct Keys(Regex);

impl Keys {
    /// The keys that one of `patterns` matches, without `taken`; nothing if that takes too much to find out.
    fn new(patterns: &[&str], taken: &[&str]) -> Option<Keys> {
        let matched = patterns.iter().map(|pattern| RegexAst::SearchRegex(regex_to_lark(pattern, "dw"))).collect();
        Keys::without(RegexAst::Or(matched), literals(taken))
    }

    /// The keys that none of `patterns` matches, without `taken`.
    fn others(patterns: &[&str], taken: &[&str]) -> Option<Keys> {
        let mut out = literals(taken);
        out.extend(patterns.iter().map(|pattern| RegexAst::SearchRegex(regex_to_lark(pattern, "dw"))));
        Keys::without(RegexAst::Regex("(?s:.*)".into()), out)
    }

    fn without(keys: RegexAst, out: Vec<RegexAst>) -> Option<Keys> {
        let mut builder = RegexBuilder::new();
        let mut both = Vec::from([keys]);
        both.extend(out.into_iter().map(|out| RegexAst::Not(out.into())));
        let expression = builder.mk(&RegexAst::And(both)).ok()?;
        builder.to_regex_limited(expression, KEY_FUEL).ok().map(Keys)
    }

    fn contains(&mut self, key: &str) -> bool {
        self.0.is_match(key)
    }

    fn is_empty(&mut self) -> bool {
        self.0.always_empty()
    }
}

fn literals(texts: &[&str]) -> Vec<RegexAst> {
    texts.iter().map(|text| RegexAst::Literal((*text).into())).collect()
}

fn alias(i: usize) -> String {
    format!("starling alias {i}")
}

/// A part of a value by a name as it is written in a reference.
fn child<'a>(value: &'a Value, name: &str) -> Option<&'a Value> {
    match value {
        Value::Array(items) => items.get(name.parse::<usize>().ok()?),
        value => value.get(name),
    }
}

/// A name in a JSON pointer (RFC 6901).
fn escaped(name: &str) -> String {
    name.replace('~', "~0").replace('/', "~1")
}

fn unescaped(part: &str) -> String {
    part.replace("~1", "/").replace("~0", "~")
}

/// The text of a URI's fragment (RFC 3986, section 2.1); nothing if that is none.
fn percent_decoded(fragment: &str) -> Option<String> {
    let mut bytes = Vec::with_capacity(fragment.len());
    let mut rest = fragment.as_bytes();
    while let [first, after @ ..] = rest {
        rest = after;
        if *first != b'%' {
            bytes.push(*first);
            continue;
        }
        let [high, low, after @ ..] = after else { return None };
        let digit = |byte: u8| char::from(byte).to_digit(16);
        bytes.push((digit(*high)? * 16 + digit(*low)?) as u8);
        rest = after;
    }
    String::from_utf8(bytes).ok()
}

/// Checks that the numbers of a schema are exact where `llguidance` holds them, in 64-bit floats.
fn check_numbers(schema: &Map<String, Value>, at: &str) -> Result<(), StructureError> {
    let is_integer = schema.get("type").is_some_and(|kind| kind == "integer");
    let is_true = |name: &str| schema.get(name) == Some(&Value::Bool(true));
    for (keyword, value) in schema {
        let at = || format!("{at}/{keyword}");
        match (keyword.as_str(), value) {
            ("const" | "enum", value) => check_data(value, &at())?,
            // the first draft with numbers here is the sixth: before, they said that the bounds themselves are out
            ("minimum", Value::Number(n)) => check(n, is_integer, is_true("exclusiveMinimum"), at)?,
            ("maximum", Value::Number(n)) => check(n, is_integer, is_true("exclusiveMaximum"), at)?,
            ("exclusiveMinimum" | "exclusiveMaximum", Value::Number(n)) => check(n, is_integer, true, at)?,
            ("multipleOf", Value::Number(n)) => check(n, true, false, at)?,
            _ => {}
        }
    }
    Ok(())
}

/// The same for values that an answer has to have.
fn check_data(value: &Value, at: &str) -> Result<(), StructureError> {
    match value {
        Value::Number(n) => check(n, true, false, || at.into()),
        Value::Array(items) => {
            items.iter().enumerate().try_for_each(|(i, item)| check_data(item, &format!("{at}/{i}")))
        }
        Value::Object(items) => {
            items.iter().try_for_each(|(name, item)| check_data(item, &format!("{at}/{}", escaped(name))))
        }
        _ => Ok(()),
    }
}

/// `is_whole`: the answer's number is a whole one. `is_out`: the bound itself is out, and one beside it is taken.
fn check(n: &Number, is_whole: bool, is_out: bool, at: impl Fn() -> String) -> Result<(), StructureError> {
    let is_exact = match (n.as_i64(), n.as_f64()) {
        // one more than the largest is cut to it; the other end has no negative
        (Some(i64::MIN), _) => false,
        (Some(i), _) if is_out => i128::from(i).abs() < MAX_EXACT,
        (Some(i), Some(x)) if is_whole => x as i64 == i,
        (Some(i), _) => i128::from(i).abs() <= MAX_EXACT,
        // of longer numbers the JSON parser has kept only a float
        (None, Some(x)) => x.abs() <= MAX_EXACT as f64,
        (None, None) => false,
    };
    if is_exact {
        return Ok(());
    }
    let expected = "expected a number from -9007199254740991 to 9007199254740991, which is exact as a 64-bit float";
    Err(wrong(&format!("{}: found {n}, {expected}", at())))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(schema: &Value) -> String {
        match prepared(schema) {
            Err(StructureError::Wrong(message)) => message,
            other => panic!("{schema}: {other:?}"),
        }
    }

    #[test]
    fn references_with_escapes_are_resolved() {
        let target = json!({ "type": "integer" });
        for (key, reference, expected) in [
            ("a/b", "#/$defs/a~1b", None),
            ("a~b", "#/$defs/a~0b", Some("#/$defs/a~b")),
            ("a b", "#/$defs/a%20b", Some("#/$defs/a b")),
            ("List[int]", "#/$defs/List%5Bint%5D", Some("#/$defs/List[int]")),
            ("é", "#/%24defs/%C3%A9", Some("#/$defs/é")),
            ("~1", "#/$defs/~01", Some("#/$defs/~1")),
            ("x%y", "#/$defs/x%25y", Some("#/$defs/x%y")),
            ("a/b/c", "#/$defs/a%7E1b~1c", None),
            // names that are not escaped although they should be
            ("a~1b", "#/$defs/a~1b", Some("#/$defs/a~1b")),
            ("100%", "#/$defs/100%", Some("#/$defs/100%")),
            ("plain", "#/$defs/plain", Some("#/$defs/plain")),
        ] {
            let schema = json!({ "properties": { "p": { "$ref": reference } }, "$defs": { key: target } });
            let made = prepared(&schema).expect("a schema").0;
            let found = made["properties"]["p"]["$ref"].as_str().expect("a reference");
            match expected {
                Some(expected) => assert_eq!(found, expected),
                None => assert_eq!(found.strip_prefix("#/$defs/").map(|name| &made["$defs"][name]), Some(&target)),
            }
        }
        // data is no schema, and a reference to a place that no keyword knows makes a schema of it
        let data = json!({ "enum": [{ "$ref": "#/x~1y" }], "default": { "$ref": "#/x~1y" } });
        assert_eq!(prepared(&data), Ok((data.clone(), false)));
        let far = json!({ "$ref": "#/far", "far": { "items": { "const": 9007199254740993_i64 } } });
        assert!(message(&far).contains("/far/items/const"), "{}", message(&far));
        for reference in ["#/$defs/a~1c", "#/$defs/%", "#/$defs/%zz", "#/$defs/%FF"] {
            let wrong = json!({ "$ref": reference, "$defs": {} });
            assert!(message(&wrong).contains("names no part of the schema"), "{}", message(&wrong));
        }
        let big = json!({ "enum": ["x".repeat(60_000)] });
        let defs: Map<String, Value> = (0..6).map(|i| (format!("a/{i}"), big.clone())).collect();
        let all: Vec<Value> = (0..6).map(|i| json!({ "$ref": format!("#/$defs/a~1{i}") })).collect();
        assert!(message(&json!({ "anyOf": all, "$defs": defs })).contains("bytes of copies"));
    }

    #[test]
    fn numbers_that_a_float_changes_are_refused_by_place() {
        for schema in [
            r#"{"const": 175928847299117063}"#,
            r#"{"enum": [1, 9007199254740993]}"#,
            r#"{"const": {"a": [-9007199254740993]}}"#,
            r#"{"const": 18446744073709551615}"#,
            r#"{"const": 123456789012345678901234567890}"#,
            r#"{"type": "integer", "minimum": 9007199254740993}"#,
            r#"{"type": "integer", "maximum": 175928847299117063}"#,
            r#"{"type": "integer", "minimum": -9223372036854775808}"#,
            r#"{"type": "integer", "exclusiveMinimum": 9007199254740992}"#,
            r#"{"type": "integer", "exclusiveMaximum": 1152921504606846976}"#,
            r#"{"type": "integer", "maximum": 1152921504606846976, "exclusiveMaximum": true}"#,
            r#"{"type": "number", "maximum": 9223372036854775807}"#,
            r#"{"multipleOf": 9007199254740993}"#,
        ] {
            let number: Value = serde_json::from_str(schema).expect("JSON");
            let found = message(&json!({ "properties": { "a/b": number } }));
            assert!(found.starts_with("/properties/a~1b/") && found.contains("64-bit float"), "{schema}: {found}");
        }
        for schema in [
            r#"{"const": 9007199254740992}"#,
            r#"{"const": 1152921504606846976}"#,
            r#"{"enum": [0.1, -1.5e-7, 1e15]}"#,
            r#"{"type": "integer", "minimum": -9007199254740991, "maximum": 9223372036854775807}"#,
            r#"{"default": 175928847299117063, "examples": [175928847299117063]}"#,
        ] {
            let schema: Value = serde_json::from_str(schema).expect("JSON");
            assert_eq!(prepared(&schema), Ok((schema.clone(), false)));
        }
    }

    #[test]
    fn min_properties_that_a_repeated_key_meets_are_refused() {
        for (schema, is_taken) in [
            (json!({ "type": "object", "minProperties": 1 }), true),
            (json!({ "type": "object", "minProperties": 2 }), false),
            (json!({ "minProperties": 2, "required": ["a"] }), true),
            (json!({ "minProperties": 3, "required": ["a", "a"] }), false),
            (
                json!({ "type": ["null", "object"], "patternProperties": { "^x": true }, "additionalProperties": false,
                     "minProperties": 2 }),
                false,
            ),
            (
                json!({ "properties": { "a": true, "b": true }, "required": ["a", "b"], "additionalProperties": false,
                     "minProperties": 2 }),
                true,
            ),
            (json!({ "type": "array", "minProperties": 2 }), true),
        ] {
            let whole = json!({ "items": schema });
            match is_taken {
                true => assert!(prepared(&whole).is_ok(), "{schema}"),
                false => assert!(message(&whole).starts_with("/items/minProperties: found "), "{}", message(&whole)),
            }
        }
    }

    #[test]
    fn patterns_that_match_only_listed_keys_are_merged() {
        let schema = json!({
            "properties": { "a": { "type": "boolean" }, "z": true }, "required": ["b"],
            "patternProperties": { "^(a|b)$": { "enum": [true] }, "^x": { "type": "null" } }, "additionalProperties": false,
        });
        let expected = json!({
            "properties": { "a": { "allOf": [{ "type": "boolean" }, { "enum": [true] }] }, "z": true, "b": { "enum": [true] } },
            "required": ["b"], "patternProperties": { "^x": { "type": "null" } }, "additionalProperties": false,
        });
        assert_eq!(prepared(&schema), Ok((expected, true)));
        let many: Map<String, Value> = (0..=MAX_PATTERNS).map(|i| (format!("^{i}$"), json!({}))).collect();
        assert!(message(&json!({ "patternProperties": many })).contains("different patterns"));
        let all = json!({ "patternProperties": { "": { "type": "null" } } });
        assert_eq!(prepared(&all).expect("a schema").0["additionalProperties"], false);
    }
}

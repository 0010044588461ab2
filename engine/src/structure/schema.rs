//! Prepares JSON schemas for `llguidance`: removes keywords that restrict nothing, resolves references with escapes, refuses
//! numbers that are inexact as 64-bit floats, large multiples and `minProperties` that repeated keys could reach, and merges
//! key patterns that only match listed keys into the schemas of those keys.

use alloc::borrow::ToOwned;
use alloc::collections::BTreeSet;
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;

use llguidance::derivre::{Regex, RegexAst, RegexBuilder};
use llguidance::regex_to_lark;
use serde_json::{Map, Number, Value, json};

use super::{StructureError, annotations, intersections, invalid};

/// Bytes of JSON that aliases and merged patterns may add to a schema: a small schema could otherwise refer to one large
/// part many times.
const MAX_COPIED: usize = 256 << 10;
/// Different key patterns in a schema: `llguidance` compares all pairs, for each intersection of two objects again.
const MAX_PATTERNS: usize = 32;
/// Automaton states for a set of keys; `llguidance` has the same bound for its own checks.
const KEY_FUEL: u64 = 10_000;
/// Integers up to this are exact as 64-bit floats.
const MAX_EXACT: i128 = 1 << 53;

/// Keywords whose value is a schema or a list of schemas.
pub(super) const SCHEMAS: [&str; 17] = [
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
/// Keywords whose value is an object of schemas.
pub(super) const NAMED_SCHEMAS: [&str; 5] =
    ["$defs", "definitions", "dependentSchemas", "patternProperties", "properties"];

/// The prepared schema, and whether keys must be written without `\\u` escapes, because `llguidance` compares them with
/// listed keys and patterns before it decodes escapes.
///
/// # Errors
/// What `llguidance` cannot enforce exactly, with its JSON pointer.
pub(super) fn prepare(schema: &Value) -> Result<(Value, bool), StructureError> {
    let mut schema = schema.clone();
    let mut preparation = Preparation::default();
    let original = schema.clone();
    preparation.schema(&mut schema, String::new(), &original)?;
    intersections::check(&original)?;
    // a reference may lead to a value that is not under a schema keyword
    while let Some(target) = preparation.targets.pop() {
        if !preparation.visited.contains(&target)
            && let Some(value) = schema.pointer_mut(&target)
        {
            preparation.schema(value, target, &original)?;
        }
    }
    preparation.add_aliases(&mut schema)?;
    Ok((schema, preparation.compares_keys))
}

#[derive(Default)]
struct Preparation {
    /// Different key patterns.
    patterns: BTreeSet<String>,
    /// Whether an object has listed keys or key patterns, and allows other keys.
    compares_keys: bool,
    /// Bytes of JSON added so far.
    copied: usize,
    /// JSON pointers of the parts with an alias; see [`alias`].
    aliases: Vec<String>,
    /// JSON pointers of the prepared schemas.
    visited: BTreeSet<String>,
    /// JSON pointers of the targets of references.
    targets: Vec<String>,
}

impl Preparation {
    /// Prepares the schema at the pointer `at` and its subschemas. References are looked up in `original`, the whole
    /// schema.
    fn schema(&mut self, schema: &mut Value, at: String, original: &Value) -> Result<(), StructureError> {
        if !self.visited.insert(at.clone()) {
            return Ok(());
        }
        let Value::Object(schema) = schema else { return Ok(()) };
        annotations::relax(schema);
        check_numbers(schema, &at)?;
        if let Some(Value::String(reference)) = schema.get_mut("$ref") {
            self.resolve(reference, &at, original)?;
        }
        for (keyword, value) in schema.iter_mut() {
            let at = || format!("{at}/{}", escape_pointer(keyword));
            if NAMED_SCHEMAS.contains(&keyword.as_str()) {
                let Value::Object(named) = value else { continue };
                for (name, schema) in named {
                    self.schema(schema, format!("{}/{}", at(), escape_pointer(name)), original)?;
                }
            } else if SCHEMAS.contains(&keyword.as_str()) {
                match value {
                    Value::Array(list) => {
                        for (i, schema) in list.iter_mut().enumerate() {
                            self.schema(schema, format!("{}/{i}", at()), original)?;
                        }
                    }
                    schema => self.schema(schema, at(), original)?,
                }
            }
        }
        self.merge_patterns(schema)?;
        let is_closed = schema.get("additionalProperties") == Some(&Value::Bool(false));
        self.compares_keys |= !is_closed && !listed_keys(schema).is_empty();
        check_min_properties(schema, &at)
    }

    /// Replaces a reference with escapes by one without, which `llguidance` resolves.
    fn resolve(&mut self, reference: &mut String, at: &str, original: &Value) -> Result<(), StructureError> {
        let Some(fragment) = reference.strip_prefix('#') else { return Ok(()) };
        // names that contain such characters unescaped resolve as written
        let raw = fragment.strip_prefix('/').unwrap_or_default();
        let found = raw.split('/').try_fold(original, child).is_some();
        if !fragment.contains(['%', '~']) || found {
            self.targets.push(raw.split('/').map(|part| format!("/{}", escape_pointer(part))).collect());
            return Ok(());
        }
        let unknown = || invalid(&format!("{at}/$ref: {reference:?} names no part of the schema"));
        let pointer = percent_decoded(fragment).ok_or_else(unknown)?;
        if !pointer.is_empty() && original.pointer(&pointer).is_none() {
            return Err(unknown());
        }
        self.targets.push(pointer.clone());
        let parts: Vec<String> = pointer.split('/').skip(1).map(unescape_pointer).collect();
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

    /// Adds copies of the parts with an alias to `$defs`.
    fn add_aliases(&mut self, schema: &mut Value) -> Result<(), StructureError> {
        for (i, pointer) in self.aliases.clone().iter().enumerate() {
            let part = schema.pointer(pointer).cloned().unwrap_or_default();
            self.count_copied(&part)?;
            let defs = schema.as_object_mut().map(|schema| schema.entry("$defs").or_insert_with(|| json!({})));
            let Some(Value::Object(defs)) = defs else { return Err(invalid("/$defs: expected an object")) };
            defs.insert(alias(i), part);
        }
        Ok(())
    }

    fn count_copied(&mut self, copied: &Value) -> Result<(), StructureError> {
        self.copied += copied.to_string().len();
        if self.copied <= MAX_COPIED {
            return Ok(());
        }
        Err(invalid(&format!(
            "references with escapes and patternProperties need more than {MAX_COPIED} bytes of copies"
        )))
    }

    /// Merges patterns that only match listed keys into the schemas of those keys: `llguidance` would let an answer begin
    /// another key, which nothing can complete. Likewise disallows additional keys where the patterns match all others.
    fn merge_patterns(&mut self, schema: &mut Map<String, Value>) -> Result<(), StructureError> {
        let Some(Value::Object(patterns)) = schema.get("patternProperties") else { return Ok(()) };
        let patterns = patterns.clone();
        self.patterns.extend(patterns.keys().cloned());
        if self.patterns.len() > MAX_PATTERNS {
            return Err(invalid(&format!("has more than {MAX_PATTERNS} different patterns in patternProperties")));
        }
        let names: Vec<String> = listed_keys(schema);
        let mut kept = Map::new();
        for (pattern, value) in &patterns {
            let Some(mut keys) = KeySet::new(&[pattern.as_str()], &[]) else { return Ok(()) };
            let matched: Vec<&String> = names.iter().filter(|name| keys.contains(name)).collect();
            let without: Vec<&str> = matched.iter().map(|name| name.as_str()).collect();
            if !KeySet::new(&[pattern.as_str()], &without).is_some_and(|mut rest| rest.is_empty()) {
                kept.insert(pattern.clone(), value.clone());
                continue;
            }
            for name in matched {
                self.count_copied(value)?;
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
        let without: Vec<&str> = names.iter().map(String::as_str).collect();
        if !all.is_empty() && KeySet::others(&all, &without).is_some_and(|mut rest| rest.is_empty()) {
            schema.insert("additionalProperties".into(), Value::Bool(false));
        }
        self.compares_keys |= !kept.is_empty();
        schema.insert("patternProperties".into(), Value::Object(kept));
        Ok(())
    }
}

/// The keys in `properties` and `required`.
fn listed_keys(schema: &Map<String, Value>) -> Vec<String> {
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

/// Checks that an answer cannot reach `minProperties` by repeating a key: at most one key beside the required ones may be
/// needed.
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
    Err(invalid(&message))
}

/// A set of keys, as an automaton.
struct KeySet(Regex);

impl KeySet {
    /// The keys that one of `patterns` matches, except those in `without`. `None` if the automaton exceeds [`KEY_FUEL`].
    fn new(patterns: &[&str], without: &[&str]) -> Option<KeySet> {
        let matched = patterns.iter().map(|pattern| RegexAst::SearchRegex(regex_to_lark(pattern, "dw"))).collect();
        KeySet::difference(RegexAst::Or(matched), literals(without))
    }

    /// The keys that none of `patterns` matches, except those in `without`.
    fn others(patterns: &[&str], without: &[&str]) -> Option<KeySet> {
        let mut excluded = literals(without);
        excluded.extend(patterns.iter().map(|pattern| RegexAst::SearchRegex(regex_to_lark(pattern, "dw"))));
        KeySet::difference(RegexAst::Regex("(?s:.*)".into()), excluded)
    }

    fn difference(keys: RegexAst, excluded: Vec<RegexAst>) -> Option<KeySet> {
        let mut builder = RegexBuilder::new();
        let mut terms = Vec::from([keys]);
        terms.extend(excluded.into_iter().map(|term| RegexAst::Not(term.into())));
        let expression = builder.mk(&RegexAst::And(terms)).ok()?;
        builder.to_regex_limited(expression, KEY_FUEL).ok().map(KeySet)
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

/// Name in `$defs` of the alias with this index.
fn alias(i: usize) -> String {
    format!("starling alias {i}")
}

/// The child of an array or object by its name in a reference.
fn child<'a>(value: &'a Value, name: &str) -> Option<&'a Value> {
    match value {
        Value::Array(items) => items.get(name.parse::<usize>().ok()?),
        value => value.get(name),
    }
}

/// Escapes a name for a JSON pointer (RFC 6901).
pub(super) fn escape_pointer(name: &str) -> String {
    name.replace('~', "~0").replace('/', "~1")
}

fn unescape_pointer(part: &str) -> String {
    part.replace("~1", "/").replace("~0", "~")
}

/// Decodes the fragment of a URI (RFC 3986, section 2.1). `None` if it is malformed.
pub(super) fn percent_decoded(fragment: &str) -> Option<String> {
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

/// Checks that the numbers of a schema are exact as 64-bit floats, in which `llguidance` stores them.
fn check_numbers(schema: &Map<String, Value>, at: &str) -> Result<(), StructureError> {
    let is_integer = schema.get("type").is_some_and(|kind| kind == "integer");
    let is_true = |name: &str| schema.get(name) == Some(&Value::Bool(true));
    for (keyword, value) in schema {
        let at = || format!("{at}/{keyword}");
        match (keyword.as_str(), value) {
            ("const" | "enum", value) => check_constant(value, &at())?,
            // numbers since draft 6; before, booleans that exclude `minimum` and `maximum`
            ("minimum", Value::Number(n)) => check_number(n, is_integer, is_true("exclusiveMinimum"), at)?,
            ("maximum", Value::Number(n)) => check_number(n, is_integer, is_true("exclusiveMaximum"), at)?,
            ("exclusiveMinimum" | "exclusiveMaximum", Value::Number(n)) => check_number(n, is_integer, true, at)?,
            ("multipleOf", Value::Number(n)) => check_number(n, true, false, at)?,
            _ => {}
        }
    }
    Ok(())
}

/// Checks the numbers of a constant.
fn check_constant(value: &Value, at: &str) -> Result<(), StructureError> {
    match value {
        Value::Number(n) => check_number(n, true, false, || at.into()),
        Value::Array(items) => {
            items.iter().enumerate().try_for_each(|(i, item)| check_constant(item, &format!("{at}/{i}")))
        }
        Value::Object(items) => {
            items.iter().try_for_each(|(name, item)| check_constant(item, &format!("{at}/{}", escape_pointer(name))))
        }
        _ => Ok(()),
    }
}

/// `is_integer`: the answer's number is an integer. `is_exclusive`: `llguidance` uses the next integer as the bound.
fn check_number(
    n: &Number,
    is_integer: bool,
    is_exclusive: bool,
    at: impl Fn() -> String,
) -> Result<(), StructureError> {
    let is_exact = match (n.as_i64(), n.as_f64()) {
        // has no positive counterpart
        (Some(i64::MIN), _) => false,
        (Some(i), _) if is_exclusive => i128::from(i).abs() < MAX_EXACT,
        (Some(i), Some(x)) if is_integer => x as i64 == i,
        (Some(i), _) => i128::from(i).abs() <= MAX_EXACT,
        // the JSON parser keeps longer numbers as floats only
        (None, Some(x)) => x.abs() <= MAX_EXACT as f64,
        (None, None) => false,
    };
    if is_exact {
        return Ok(());
    }
    let expected = "expected a number from -9007199254740991 to 9007199254740991, which is exact as a 64-bit float";
    Err(invalid(&format!("{}: found {n}, {expected}", at())))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(schema: &Value) -> String {
        match prepare(schema) {
            Err(StructureError::Invalid(message)) => message,
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
            // names that should be escaped
            ("a~1b", "#/$defs/a~1b", Some("#/$defs/a~1b")),
            ("100%", "#/$defs/100%", Some("#/$defs/100%")),
            ("plain", "#/$defs/plain", Some("#/$defs/plain")),
        ] {
            let schema = json!({ "properties": { "p": { "$ref": reference } }, "$defs": { key: target } });
            let prepared = prepare(&schema).expect("a schema").0;
            let found = prepared["properties"]["p"]["$ref"].as_str().expect("a reference");
            match expected {
                Some(expected) => assert_eq!(found, expected),
                None => assert_eq!(found.strip_prefix("#/$defs/").map(|name| &prepared["$defs"][name]), Some(&target)),
            }
        }
        // constants are not schemas; the target of a reference is a schema wherever it is
        let data = json!({ "enum": [{ "$ref": "#/x~1y" }], "default": { "$ref": "#/x~1y" } });
        assert_eq!(prepare(&data), Ok((data.clone(), false)));
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
    fn inexact_numbers_are_refused_with_their_pointer() {
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
            assert_eq!(prepare(&schema), Ok((schema.clone(), false)));
        }
    }

    #[test]
    fn min_properties_that_a_repeated_key_meets_are_refused() {
        for (schema, is_accepted) in [
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
            match is_accepted {
                true => assert!(prepare(&whole).is_ok(), "{schema}"),
                false => assert!(message(&whole).starts_with("/items/minProperties: found "), "{}", message(&whole)),
            }
        }
    }

    #[test]
    fn patterns_that_only_match_listed_keys_are_merged() {
        let schema = json!({
            "properties": { "a": { "type": "boolean" }, "z": true }, "required": ["b"],
            "patternProperties": { "^(a|b)$": { "enum": [true] }, "^x": { "type": "null" } }, "additionalProperties": false,
        });
        let expected = json!({
            "properties": { "a": { "allOf": [{ "type": "boolean" }, { "enum": [true] }] }, "z": true, "b": { "enum": [true] } },
            "required": ["b"], "patternProperties": { "^x": { "type": "null" } }, "additionalProperties": false,
        });
        assert_eq!(prepare(&schema), Ok((expected, true)));
        let many: Map<String, Value> = (0..=MAX_PATTERNS).map(|i| (format!("^{i}$"), json!({}))).collect();
        assert!(message(&json!({ "patternProperties": many })).contains("different patterns"));
        let all = json!({ "patternProperties": { "": { "type": "null" } } });
        assert_eq!(prepare(&all).expect("a schema").0["additionalProperties"], false);
    }
}

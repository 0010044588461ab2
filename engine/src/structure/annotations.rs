//! Keywords of schemas that restrict nothing: those that allow everything are removed, and those that cannot be enforced are
//! annotations, whose names are told to the client.

use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;

use serde_json::{Map, Value};

use super::schema::{NAMED_SCHEMAS, SCHEMAS};

/// Formats of strings that `llguidance` enforces.
const FORMATS: [&str; 11] =
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"];
/// Keywords about an encoded text, which describe it.
const CONTENT: [&str; 3] = ["contentEncoding", "contentMediaType", "contentSchema"];
/// Keywords that describe, of which a schema without others allows everything.
const DESCRIPTIONS: [&str; 11] = [
    "$anchor",
    "$comment",
    "$id",
    "$schema",
    "default",
    "deprecated",
    "description",
    "examples",
    "readOnly",
    "title",
    "writeOnly",
];
/// Names that are told, at most.
const MAX_NAMES: usize = 16;

/// Removes the keywords of a schema that allow everything, and those that cannot be enforced and are annotations.
pub(super) fn relax(schema: &mut Map<String, Value>) {
    let is_strings = |value: &Value| is_open(value) || is_open_but(value, &|key, of| key == "type" && *of == "string");
    let is_empty_map = |value: &Value, is_open: &dyn Fn(&Value) -> bool| {
        value.as_object().is_some_and(|map| map.values().all(is_open))
    };
    let is_empty_list = |value: &Value| value.as_array().is_some_and(Vec::is_empty);
    let has = |schema: &Map<String, Value>, key: &str| schema.contains_key(key);
    let is_unused = |schema: &Map<String, Value>, key: &str, value: &Value| match key {
        "uniqueItems" | "not" => *value == false,
        "propertyNames" => is_strings(value),
        "unevaluatedItems" | "unevaluatedProperties" => is_open(value),
        "contains" => schema.get("minContains").and_then(Value::as_f64) == Some(0.0) && !has(schema, "maxContains"),
        "maxContains" => !has(schema, "contains"),
        "minContains" => !has(schema, "contains") || *value == 0 && !has(schema, "maxContains"),
        "if" => ["then", "else"].iter().all(|key| schema.get(*key).is_none_or(is_open)),
        "then" | "else" => !has(schema, "if") || is_open(value),
        "dependentRequired" => is_empty_map(value, &is_empty_list),
        "dependentSchemas" => is_empty_map(value, &is_open),
        "dependencies" => is_empty_map(value, &|value| is_open(value) || is_empty_list(value)),
        // without a dynamic reference, which is refused, these are plain anchors
        "$dynamicAnchor" | "$recursiveAnchor" => true,
        "format" => unenforced_format(schema).is_some(),
        key => CONTENT.contains(&key),
    };
    let unused: Vec<String> =
        schema.iter().filter(|(key, value)| is_unused(schema, key, value)).map(|(key, _)| key.clone()).collect();
    for key in unused {
        // the order of properties is that of the schema
        schema.shift_remove(&key);
    }
}

/// Whether a schema allows everything.
fn is_open(schema: &Value) -> bool {
    *schema == true || is_open_but(schema, &|_, _| false)
}

/// Whether the keywords of a schema describe, or are `allowed`.
fn is_open_but(schema: &Value, allowed: &dyn Fn(&str, &Value) -> bool) -> bool {
    let is_fine = |(key, value): (&String, &Value)| DESCRIPTIONS.contains(&key.as_str()) || allowed(key, value);
    schema.as_object().is_some_and(|schema| schema.iter().all(is_fine))
}

/// The format of a schema, if it is not enforced.
fn unenforced_format(schema: &Map<String, Value>) -> Option<&str> {
    let format = schema.get("format")?.as_str()?;
    let may_be_string = match schema.get("type") {
        Some(Value::String(kind)) => kind == "string",
        Some(Value::Array(kinds)) => kinds.iter().any(|kind| kind == "string"),
        _ => true,
    };
    (!may_be_string || !FORMATS.contains(&format)).then_some(format)
}

/// The annotations in a schema and its parts, by keyword and value, without repetition.
pub(super) fn unenforced(schema: &Value) -> Vec<String> {
    let mut found = Vec::new();
    collect(schema, &mut found);
    found
}

fn collect(schema: &Value, found: &mut Vec<String>) {
    let Value::Object(schema) = schema else { return };
    let mut add = |name: String| {
        if found.len() < MAX_NAMES && !found.contains(&name) {
            found.push(name);
        }
    };
    if let Some(format) = unenforced_format(schema) {
        add(format!("format={format}"));
    }
    schema.keys().filter(|key| CONTENT.contains(&key.as_str())).for_each(|key| add(key.to_string()));
    for (keyword, value) in schema {
        match value {
            Value::Object(named) if NAMED_SCHEMAS.contains(&keyword.as_str()) => {
                named.values().for_each(|schema| collect(schema, found));
            }
            Value::Array(list) if SCHEMAS.contains(&keyword.as_str()) => {
                list.iter().for_each(|schema| collect(schema, found));
            }
            schema if SCHEMAS.contains(&keyword.as_str()) => collect(schema, found),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::GrammarSource;
    use super::super::tests::match_text;
    use super::*;

    #[test]
    fn keywords_that_restrict_nothing_are_removed() {
        for (schema, text, wrong) in [
            (json!({ "type": "object", "propertyNames": { "type": "string" } }), "{\"a\": 1}", "[]"),
            (json!({ "type": "object", "propertyNames": { "description": "x" } }), "{}", "1"),
            (json!({ "type": "array", "uniqueItems": false }), "[1, 1]", "{}"),
            (json!({ "type": "array", "contains": { "type": "null" }, "minContains": 0 }), "[1]", "{}"),
            (json!({ "type": "array", "minContains": 2 }), "[1]", "{}"),
            (json!({ "type": "object", "unevaluatedProperties": {}, "dependentRequired": {} }), "{}", "1"),
            (json!({ "type": "integer", "not": false, "if": { "const": 1 } }), "1", "true"),
            (json!({ "type": "integer", "if": { "const": 1 }, "then": true, "else": {} }), "1", "true"),
            (json!({ "type": "integer", "then": { "const": 1 }, "$dynamicAnchor": "a" }), "2", "true"),
            (json!({ "type": "object", "dependencies": { "a": [] } }), "{\"a\": 1}", "1"),
            (json!({ "type": "string", "format": "phone" }), "\"x\"", "1"),
            (json!({ "type": "integer", "format": "int32" }), "1", "\"x\""),
            (json!({ "format": "int32" }), "1", "x"),
        ] {
            let source = GrammarSource::Schema(schema.clone());
            assert_eq!(match_text(&source, text), Some(true), "{schema}");
            assert_eq!(match_text(&source, wrong), None, "{schema}");
        }
        // those that restrict are kept, and refused by name
        for (schema, keyword) in [
            (json!({ "type": "object", "propertyNames": { "pattern": "^a" } }), "propertyNames"),
            (json!({ "type": "array", "uniqueItems": true }), "uniqueItems"),
            (json!({ "type": "array", "contains": {} }), "contains"),
            (json!({ "type": "array", "contains": {}, "minContains": 0, "maxContains": 1 }), "contains"),
            (json!({ "not": {} }), "not"),
            (json!({ "if": {}, "then": false }), "if"),
            (json!({ "$dynamicRef": "#a", "$dynamicAnchor": "a" }), "$dynamicRef"),
        ] {
            let structures = super::super::Structures::new(super::super::Limits::DEFAULT);
            let words = || super::super::tests::bytes_vocabulary();
            let error = structures.constraint(&words, &GrammarSource::Schema(schema.clone())).expect_err("a keyword");
            assert!(error.to_string().contains(keyword), "{schema}: {error}");
        }
    }

    #[test]
    fn annotations_are_named() {
        let schema = json!({
            "properties": { "a": { "type": "string", "format": "phone" }, "b": { "type": "integer", "format": "int64" },
                "c": { "format": "date" }, "format": { "const": { "format": "x" } } },
            "items": [{ "format": "phone" }, { "contentEncoding": "base64" }],
        });
        assert_eq!(unenforced(&schema), ["format=phone", "format=int64", "contentEncoding"]);
        for format in FORMATS {
            assert!(unenforced(&json!({ "type": "string", "format": format })).is_empty());
            let source = GrammarSource::Schema(json!({ "type": "string", "format": format }));
            assert!(match_text(&source, "\"").is_some(), "{format}");
        }
    }
}

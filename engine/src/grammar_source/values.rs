//! Which values a schema allows, as far as the text of a value needs it: by `type`, `enum`, `const`, `$ref`, `allOf`, `anyOf`
//! and `oneOf`, at any depth. Other keywords restrict nothing here.

use alloc::vec::Vec;
use core::cell::Cell;

use serde_json::Value;

/// Deepest chain of references and alternatives that is followed.
const MAX_DEPTH: usize = 32;
/// Most schemas that one question looks at: alternatives of alternatives multiply.
const MAX_SCHEMAS: usize = 1024;

/// A schema within the schema that its references are relative to.
#[derive(Debug, Clone, Copy)]
pub struct ValueSchema<'a> {
    root: &'a Value,
    schema: &'a Value,
}

impl<'a> ValueSchema<'a> {
    /// A whole schema.
    pub fn new(root: &'a Value) -> ValueSchema<'a> {
        ValueSchema { root, schema: root }
    }

    /// The schema of a property of an object.
    pub fn property(self, name: &str) -> Option<ValueSchema<'a>> {
        let visits = Cell::new(0);
        let schema = self.find_property(self.schema, name, 0, &visits)?;
        Some(ValueSchema { schema, ..self })
    }

    /// Whether a value is allowed.
    pub fn accepts(self, value: &Value) -> bool {
        self.is_accepted(self.schema, value, 0, &Cell::new(0))
    }

    /// Whether values of all types are allowed: the schema says nothing about the type.
    pub fn is_free(self) -> bool {
        let empty = [
            Value::Null,
            true.into(),
            0.into(),
            "".into(),
            Value::Array(Vec::new()),
            Value::Object(Default::default()),
        ];
        empty.iter().all(|value| self.accepts(value))
    }

    /// Whether any text is allowed.
    pub fn accepts_text(self) -> bool {
        // of an enumeration, no text is this one
        self.accepts(&Value::from("\u{0}"))
    }

    /// Whether any text is allowed, and nothing else.
    pub fn is_text(self) -> bool {
        let others = [Value::Null, true.into(), 0.into(), Value::Array(Vec::new()), Value::Object(Default::default())];
        self.accepts_text() && !others.iter().any(|value| self.accepts(value))
    }

    /// The values of an enumeration; `None` if the schema is none.
    pub fn choices(self) -> Option<Vec<&'a Value>> {
        let mut choices = self.list_choices(self.schema, 0, &Cell::new(0))?;
        choices.retain(|value| self.accepts(value));
        Some(choices)
    }

    /// The schema that a reference within the document names.
    fn resolve(self, reference: &str) -> Option<&'a Value> {
        self.root.pointer(reference.strip_prefix('#')?)
    }

    /// The schemas that `key` has in a list.
    fn list(schema: &'a Value, key: &str) -> Option<&'a Vec<Value>> {
        schema[key].as_array()
    }

    fn is_accepted(self, schema: &Value, value: &Value, depth: usize, visits: &Cell<usize>) -> bool {
        if is_spent(depth, visits) {
            return true;
        }
        let Some(object) = schema.as_object() else { return *schema != Value::Bool(false) };
        let accepts = |schema: &Value| self.is_accepted(schema, value, depth + 1, visits);
        let is_null = value.is_null() && object.get("nullable") == Some(&Value::Bool(true));
        is_null
            || object.iter().all(|(key, rule)| match (key.as_str(), rule) {
                ("type", Value::String(name)) => is_of_type(value, name),
                ("type", Value::Array(names)) => {
                    names.iter().filter_map(Value::as_str).any(|name| is_of_type(value, name))
                }
                ("enum", Value::Array(all)) => all.contains(value),
                ("const", only) => only == value,
                ("$ref", Value::String(name)) => self.resolve(name).is_none_or(accepts),
                ("allOf", Value::Array(all)) => all.iter().all(accepts),
                ("anyOf" | "oneOf", Value::Array(all)) => all.iter().any(accepts),
                _ => true,
            })
    }

    fn list_choices(self, schema: &'a Value, depth: usize, visits: &Cell<usize>) -> Option<Vec<&'a Value>> {
        if is_spent(depth, visits) {
            return None;
        }
        let of = |schema: &'a Value| self.list_choices(schema, depth + 1, visits);
        if let Some(all) = Self::list(schema, "enum") {
            return Some(all.iter().collect());
        }
        if let Some(only) = schema.get("const") {
            return Some(Vec::from([only]));
        }
        if let Some(choices) = schema["$ref"].as_str().and_then(|name| self.resolve(name)).and_then(of) {
            return Some(choices);
        }
        if let Some(choices) = Self::list(schema, "allOf").and_then(|all| all.iter().find_map(of)) {
            return Some(choices);
        }
        let either = Self::list(schema, "anyOf").or_else(|| Self::list(schema, "oneOf"));
        either.and_then(|all| all.iter().map(of).collect::<Option<Vec<_>>>()).map(|all| all.concat())
    }

    fn find_property(self, schema: &'a Value, name: &str, depth: usize, visits: &Cell<usize>) -> Option<&'a Value> {
        if is_spent(depth, visits) {
            return None;
        }
        let find = |schema: &'a Value| self.find_property(schema, name, depth + 1, visits);
        if let Some(found) = schema["properties"].get(name) {
            return Some(found);
        }
        let referred = schema["$ref"].as_str().and_then(|name| self.resolve(name)).and_then(find);
        let lists = ["allOf", "anyOf", "oneOf"].into_iter().filter_map(|key| Self::list(schema, key));
        referred
            .or_else(|| lists.flatten().find_map(find))
            .or_else(|| schema.get("additionalProperties").filter(|schema| schema.is_object()))
    }
}

/// Counts a schema; returns whether the bounds are reached.
fn is_spent(depth: usize, visits: &Cell<usize>) -> bool {
    visits.set(visits.get() + 1);
    depth > MAX_DEPTH || visits.get() > MAX_SCHEMAS
}

fn is_of_type(value: &Value, name: &str) -> bool {
    match name {
        "string" => value.is_string(),
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "object" => value.is_object(),
        "array" => value.is_array(),
        "number" => value.is_number(),
        "integer" => value.is_i64() || value.is_u64() || value.as_f64().is_some_and(|number| number % 1.0 == 0.0),
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use alloc::format;
    use alloc::string::ToString;

    use super::*;
    use serde_json::json;

    #[test]
    fn references_and_alternatives_are_followed() {
        let root = json!({
            "properties": {
                "level": { "$ref": "#/$defs/level" }, "both": { "allOf": [{ "$ref": "#/$defs/level" }, { "title": "x" }] },
                "deep": { "anyOf": [{ "oneOf": [{ "type": "null" }, { "const": "7" }] }, { "type": "integer" }] },
                "any": { "description": "x" }, "text": { "anyOf": [{ "type": "string" }, { "type": "null" }] },
                "loop": { "$ref": "#/properties/loop" },
            },
            "allOf": [{ "properties": { "more": { "const": 1 } } }],
            "additionalProperties": { "type": "boolean" },
            "$defs": { "level": { "type": "string", "enum": ["10", "20"] } },
        });
        let root = ValueSchema::new(&root);
        let of = |name: &str| root.property(name).expect("a property");
        for name in ["level", "both"] {
            assert!(of(name).accepts(&json!("10")) && !of(name).accepts(&json!(10)) && !of(name).accepts_text());
            assert_eq!(of(name).choices(), Some(Vec::from([&json!("10"), &json!("20")])), "{name}");
        }
        assert!(of("deep").accepts(&json!("7")) && of("deep").accepts(&json!(8)) && !of("deep").accepts(&json!("8")));
        assert!(of("any").is_free() && of("loop").is_free() && !of("text").is_free() && of("text").accepts_text());
        assert_eq!((of("more").choices(), of("deep").choices()), (Some(Vec::from([&json!(1)])), None));
        assert!(of("other").accepts(&json!(true)) && !of("other").accepts(&json!("true")));
    }

    #[test]
    fn work_is_bounded() {
        // each level doubles the number of schemas; beyond the bound, anything is allowed
        let mut levels = serde_json::Map::new();
        for i in 0..MAX_DEPTH - 2 {
            let next = json!({ "$ref": format!("#/$defs/{}", i + 1) });
            levels.insert(i.to_string(), json!({ "anyOf": [next, next] }));
        }
        levels.insert((MAX_DEPTH - 2).to_string(), json!({ "type": "string" }));
        let schema = json!({ "$ref": "#/$defs/0", "$defs": levels });
        let root = ValueSchema::new(&schema);
        assert!(root.accepts(&json!(1)) && root.choices().is_none() && root.property("a").is_none());
    }
}

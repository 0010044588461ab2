//! Property test with random schemas and random models: an answer ends in JSON that is valid against the schema, or the
//! schema is refused before the first token.

use alloc::boxed::Box;
use alloc::format;
use alloc::string::String;
use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;

use proptest::prelude::*;
use proptest::test_runner::TestRng;
use serde_json::{Value, json};

use super::tests::bytes_vocabulary;
use super::*;

/// Key patterns that [`matches`] implements.
const PATTERNS: [&str; 6] = ["^a$", "^(a|b)$", "^x", "c", "^[ab]$", ""];

fn matches(pattern: &str, key: &str) -> bool {
    match pattern {
        "^a$" => key == "a",
        "^(a|b)$" | "^[ab]$" => key == "a" || key == "b",
        "^$" => key.is_empty(),
        "^x" => key.starts_with('x'),
        "^[^x]" => !key.is_empty() && !key.starts_with('x'),
        "c" => key.contains('c'),
        "" => true,
        _ => panic!("{pattern}"),
    }
}

/// Whether `value` is valid against `schema`, for the keywords of [`schemas`]. References are resolved in `root`.
fn is_valid(value: &Value, schema: &Value, root: &Value) -> bool {
    let Value::Object(keywords) = schema else { return schema == &Value::Bool(true) };
    let n = |v: &Value| v.as_f64().expect("a number");
    let all =
        |list: &Value, f: &dyn Fn(&Value) -> bool| list.as_array().expect("a list").iter().filter(|s| f(s)).count();
    keywords.iter().all(|(keyword, of)| match (keyword.as_str(), value) {
        ("type", _) => match of.as_str().expect("a type") {
            "object" => value.is_object(),
            "array" => value.is_array(),
            "string" => value.is_string(),
            "integer" => value.as_f64().is_some_and(|x| x.fract() == 0.0),
            "number" => value.is_number(),
            "boolean" => value.is_boolean(),
            _ => value.is_null(),
        },
        ("$ref", _) => is_valid(
            value,
            root.pointer(&of.as_str().expect("a reference")[1..].replace("%20", " ")).expect("a target"),
            root,
        ),
        ("const", _) => value == of,
        ("enum", _) => of.as_array().expect("a list").contains(value),
        ("anyOf", _) => all(of, &|s| is_valid(value, s, root)) > 0,
        ("allOf", _) => all(of, &|s| !is_valid(value, s, root)) == 0,
        ("minimum", Value::Number(_)) => n(value) >= n(of),
        ("maximum", Value::Number(_)) => n(value) <= n(of),
        // the parser keeps longer numbers as floats only
        ("multipleOf", Value::Number(_)) => n(value).abs() > 9e15 || n(value) % n(of) == 0.0,
        ("minLength", Value::String(text)) => text.chars().count() as f64 >= n(of),
        ("maxLength", Value::String(text)) => text.chars().count() as f64 <= n(of),
        ("minItems", Value::Array(items)) => items.len() as f64 >= n(of),
        ("maxItems", Value::Array(items)) => items.len() as f64 <= n(of),
        ("items", Value::Array(items)) => items.iter().all(|item| is_valid(item, of, root)),
        ("required", Value::Object(o)) => all(of, &|name| !o.contains_key(name.as_str().expect("a name"))) == 0,
        ("minProperties", Value::Object(o)) => o.len() as f64 >= n(of),
        ("properties", Value::Object(o)) => {
            of.as_object().expect("schemas").iter().all(|(k, s)| o.get(k).is_none_or(|v| is_valid(v, s, root)))
        }
        ("patternProperties", Value::Object(o)) => {
            let of = of.as_object().expect("schemas");
            of.iter().all(|(p, s)| o.iter().all(|(k, v)| !matches(p, k) || is_valid(v, s, root)))
        }
        ("additionalProperties", Value::Object(o)) => o.iter().all(|(k, v)| {
            let is_listed = keywords.get("properties").is_some_and(|p| p.get(k).is_some());
            let patterns = keywords.get("patternProperties").and_then(Value::as_object);
            is_listed || patterns.is_some_and(|p| p.keys().any(|p| matches(p, k))) || is_valid(v, of, root)
        }),
        _ => true,
    })
}

/// Schemas of supported keywords, with references to the `$defs` of [`with_definitions`].
fn schemas() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(json!({ "type": "null" })),
        Just(json!({ "type": "boolean" })),
        Just(json!(true)),
        Just(json!(false)),
        (-20i32..20, 0i32..9).prop_map(|(low, n)| json!({ "type": "integer", "minimum": low, "maximum": low + n })),
        (-20i32..20, 1i32..7).prop_map(|(low, n)| json!({ "type": "integer", "minimum": low, "multipleOf": n })),
        (-20i32..20).prop_map(|high| json!({ "type": "number", "maximum": f64::from(high) / 4.0 })),
        (0usize..3, 0usize..3).prop_map(|(low, n)| json!({ "type": "string", "minLength": low, "maxLength": low + n })),
        Just(json!({ "enum": ["a", 1, null, { "b": [true] }] })),
        Just(json!({ "const": "é\"\\" })),
        prop::sample::select(vec!["#/$defs/a~1b", "#/$defs/c%20d", "#/$defs/~0", "#/$defs/loop"])
            .prop_map(|reference| json!({ "$ref": reference })),
    ];
    leaf.prop_recursive(3, 24, 4, |inner| {
        let names = || prop::sample::subsequence(vec!["a", "b", "xc", "c"], 0..4);
        let object = (
            prop::collection::vec((prop::sample::select(vec!["a", "b", "xc", "c"]), inner.clone()), 0..3),
            prop::collection::vec((prop::sample::select(PATTERNS.to_vec()), inner.clone()), 0..2),
            names(),
            prop::option::of(prop_oneof![Just(json!(false)), Just(json!(true)), inner.clone()]),
            prop::option::weighted(0.2, 0usize..4),
        );
        let object = object.prop_map(|(properties, patterns, required, more, min)| {
            let map = |pairs: Vec<(&str, Value)>| pairs.into_iter().map(|(k, v)| (k.into(), v)).collect();
            let mut schema = json!({ "type": "object", "required": required });
            schema["properties"] = Value::Object(map(properties));
            schema["patternProperties"] = Value::Object(map(patterns));
            if let Some(more) = more {
                schema["additionalProperties"] = more;
            }
            if let Some(min) = min {
                schema["minProperties"] = min.into();
            }
            schema
        });
        prop_oneof![
            4 => object,
            1 => (inner.clone(), 0usize..3, 0usize..3).prop_map(
                |(items, low, n)| json!({ "type": "array", "items": items, "minItems": low, "maxItems": low + n })),
            1 => prop::collection::vec(inner.clone(), 1..3).prop_map(|all| json!({ "anyOf": all })),
            1 => prop::collection::vec(inner, 1..3).prop_map(|all| json!({ "allOf": all })),
        ]
    })
}

/// Adds the targets of references: a number, a text, an object that may contain itself, and one that must.
fn with_definitions(schema: Value) -> Value {
    let itself =
        json!({ "type": "object", "properties": { "next": { "$ref": "#/$defs/~0" } }, "additionalProperties": false });
    let endless = json!({ "type": "object", "properties": { "on": { "$ref": "#/$defs/loop" } }, "required": ["on"] });
    let defs =
        json!({ "a/b": { "type": "integer", "minimum": 3 }, "c d": { "enum": ["x"] }, "~": itself, "loop": endless });
    json!({ "allOf": [schema], "$defs": defs })
}

/// Random tokens of an answer.
const RANDOM_STEPS: usize = 40;
/// Tokens within which an answer must end.
const MAX_STEPS: usize = 2000;

/// The answer of a model that first draws uniformly from the allowed tokens, then prefers tokens that end the text.
fn random_answer(constraint: &dyn Constraint, rng: &mut TestRng) -> Result<Vec<u8>, String> {
    let (mut constraint, mut text): (Box<dyn Constraint>, Vec<u8>) = (constraint.fork(), Vec::new());
    for step in 0..MAX_STEPS {
        let mut mask = [0u32; 9];
        let may_end =
            constraint.allow(&mut mask).map_err(|e| format!("{e} after {}", String::from_utf8_lossy(&text)))?;
        let allowed: Vec<u8> = (0..=255u8).filter(|t| mask[*t as usize / 32] >> (t % 32) & 1 == 1).collect();
        if may_end && (allowed.is_empty() || step > RANDOM_STEPS || rng.random_bool(0.3)) {
            return Ok(text);
        }
        if allowed.is_empty() {
            return Err(format!("a dead end after {}", String::from_utf8_lossy(&text)));
        }
        let token = if step < RANDOM_STEPS {
            allowed[rng.random_range(0..allowed.len())]
        } else {
            let soonest = if is_in_string(&text) { "\"caxb" } else { "}],ntf\"" };
            let found = soonest.bytes().find(|byte| allowed.contains(byte));
            let digits: Vec<u8> = allowed.iter().copied().filter(u8::is_ascii_digit).collect();
            let others = if digits.is_empty() { &allowed } else { &digits };
            found.unwrap_or_else(|| others[rng.random_range(0..others.len())])
        };
        text.push(token);
        if constraint.accept(token.into()).map_err(|e| format!("{e} at {}", String::from_utf8_lossy(&text)))? {
            return Ok(text);
        }
    }
    Err(format!("no end after {}", String::from_utf8_lossy(&text)))
}

fn is_in_string(text: &[u8]) -> bool {
    let (mut inside, mut is_escape) = (false, false);
    for byte in text {
        match byte {
            _ if is_escape => is_escape = false,
            b'\\' if inside => is_escape = true,
            b'"' => inside = !inside,
            _ => {}
        }
    }
    inside
}

/// Checks some answers under a schema. Returns whether the schema was accepted.
fn check(schema: &Value, rng: &mut TestRng) -> Result<bool, String> {
    let structures = Structures::new(Limits::DEFAULT);
    let constraint: Result<Arc<dyn Constraint>, _> =
        structures.constraint(&bytes_vocabulary, &GrammarSource::Schema(schema.clone()));
    let Ok(constraint) = constraint else { return Ok(false) };
    for _ in 0..3 {
        let text = random_answer(&*constraint, rng)?;
        let value: serde_json::Result<Value> = serde_json::from_slice(&text);
        // an unbounded number may exceed the range of floats, which is still JSON
        if value.as_ref().is_err_and(|e| e.to_string().contains("number out of range")) {
            continue;
        }
        let value = value.map_err(|e| format!("{e}: {}", String::from_utf8_lossy(&text)))?;
        if !is_valid(&value, schema, schema) {
            return Err(format!("not valid against the schema: {value}"));
        }
    }
    Ok(true)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, max_shrink_iters: 200, ..ProptestConfig::default() })]

    #[test]
    fn answers_end_and_are_valid_against_the_schema(schema in schemas().prop_map(with_definitions), mut rng in any::<u64>().prop_perturb(|_, rng| rng)) {
        if let Err(e) = check(&schema, &mut rng) {
            prop_assert!(false, "{e}\n{schema}");
        }
    }
}

#[test]
fn schemas_with_dead_ends_are_rewritten_or_refused() {
    let a_true = json!({ "a": { "enum": [true] } });
    let mut rng = TestRng::deterministic_rng(proptest::test_runner::RngAlgorithm::ChaCha);
    for (schema, is_accepted) in [
        (
            json!({ "type": "object", "properties": a_true, "patternProperties": { "^a$": {} }, "additionalProperties": false }),
            true,
        ),
        (
            json!({ "type": "object", "required": ["a"], "patternProperties": { "^a$": { "type": "null" } }, "additionalProperties": false }),
            true,
        ),
        (json!({ "type": "object", "patternProperties": { "": false } }), true),
        (
            json!({ "type": "object", "properties": a_true, "patternProperties": { "^x": false, "^[^x]": { "type": "null" }, "^$": false } }),
            true,
        ),
        // an intersection of two objects
        (
            json!({ "allOf": [{ "type": "object", "properties": a_true },
            { "type": "object", "patternProperties": { "^a$": {} }, "additionalProperties": false }] }),
            false,
        ),
        (with_definitions(json!({ "$ref": "#/$defs/loop" })), false),
        (with_definitions(json!({ "type": "object", "properties": { "a": { "$ref": "#/$defs/loop" } } })), false),
        (with_definitions(json!({ "type": "array", "items": { "$ref": "#/$defs/loop" } })), false),
        (with_definitions(json!({ "$ref": "#/$defs/~0" })), true),
        (json!({ "$ref": "#" }), false),
    ] {
        assert_eq!(check(&schema, &mut rng), Ok(is_accepted), "{schema}");
    }
}

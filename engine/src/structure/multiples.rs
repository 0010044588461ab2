//! Bounds `multipleOf`. `llguidance` builds an automaton with a state for each remainder, intersected with the range of the
//! number, and combines the multiples of intersected schemas by their least common multiple, in 32 bits.

use alloc::collections::BTreeSet;
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;

use serde_json::{Deserializer, Map, Value};

use super::schema::{NAMED_SCHEMAS, SCHEMAS, escape_pointer};
use super::{StructureError, invalid};

/// Remainders of a multiple: its digits as an integer, for each place after the decimal point.
const MAX_REMAINDERS: u64 = 10_000;
/// Keywords whose value is intersected with the keywords beside it.
const APPLICATORS: [&str; 6] = ["allOf", "anyOf", "oneOf", "$ref", "const", "enum"];
/// Keywords that are no part of an intersection.
const ASIDE: [&str; 10] =
    ["$comment", "$defs", "$id", "$schema", "default", "definitions", "description", "examples", "title", "x-guidance"];

/// `coef / 10^exp`, as `llguidance` stores it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Decimal {
    coef: u64,
    exp: u32,
}

impl Decimal {
    /// `None` if it has too many digits.
    fn new(value: f64) -> Option<Decimal> {
        let (mut value, mut exp) = (value.abs(), 0);
        while value.fract() != 0.0 {
            value *= 10.0;
            exp += 1;
        }
        (value <= MAX_REMAINDERS as f64).then_some(Decimal { coef: value as u64, exp })
    }

    /// Number of remainders, with a place after the decimal point for each digit there.
    fn remainders(self) -> u64 {
        self.coef.saturating_mul(u64::from(self.exp) + 1)
    }

    /// The least common multiple; `None` if it has too many digits.
    fn lcm(self, other: Decimal) -> Option<Decimal> {
        let exp = self.exp.max(other.exp);
        let scaled = |of: Decimal| 10u64.checked_pow(exp - of.exp)?.checked_mul(of.coef);
        let (a, b) = (scaled(self)?, scaled(other)?);
        let coef = if a == 0 || b == 0 { 0 } else { (a / gcd(a, b)).checked_mul(b)? };
        let mut sum = Decimal { coef, exp };
        // zeros at the end are no digits
        while sum.exp > 0 && sum.coef.is_multiple_of(10) {
            sum = Decimal { coef: sum.coef / 10, exp: sum.exp - 1 };
        }
        (sum.remainders() <= MAX_REMAINDERS).then_some(sum)
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Checks each `multipleOf` of a schema, and those of intersected schemas together.
///
/// # Errors
/// The first that is too large, with its JSON pointer.
pub(super) fn check(schema: &Value) -> Result<(), StructureError> {
    let mut all = BTreeSet::new();
    each(schema, &mut String::new(), &mut |schema, at| {
        let Some(value) = schema.get("multipleOf").and_then(Value::as_f64) else { return Ok(()) };
        let multiple = Decimal::new(value).filter(|multiple| multiple.remainders() <= MAX_REMAINDERS);
        all.insert(multiple.ok_or_else(|| {
            let found = &schema["multipleOf"];
            let most = "times one more than its decimal places";
            invalid(&format!("{at}/multipleOf: found {found}, expected at most {MAX_REMAINDERS} as an integer {most}"))
        })?);
        Ok(())
    })?;
    // what all of them together do not exceed, no intersection does
    if is_small(&all) {
        return Ok(());
    }
    each(schema, &mut String::new(), &mut |part, at| {
        let n_others = part.keys().filter(|key| !ASIDE.contains(&key.as_str())).count();
        let is_intersection =
            part.contains_key("allOf") || n_others > 1 && part.keys().any(|key| APPLICATORS.contains(&key.as_str()));
        if !is_intersection {
            return Ok(());
        }
        let mut within = BTreeSet::new();
        gather(part, schema, &mut BTreeSet::new(), &mut within);
        if is_small(&within) {
            return Ok(());
        }
        let what = "the least common multiple of its values of multipleOf";
        Err(invalid(&format!("{}: {what} is too large, expected at most {MAX_REMAINDERS}", root(at))))
    })
}

/// Checks the schemas in a Lark grammar, `%json {…}`.
///
/// # Errors
/// As [`check`].
pub(super) fn check_lark(text: &str) -> Result<(), StructureError> {
    for (at, _) in text.match_indices("%json") {
        let mut values = Deserializer::from_str(&text[at + "%json".len()..]).into_iter::<Value>();
        if let Some(Ok(schema)) = values.next() {
            check(&schema)?;
        }
    }
    Ok(())
}

fn root(at: &str) -> &str {
    if at.is_empty() { "the schema" } else { at }
}

/// Whether the least common multiple of `all` is small enough.
fn is_small(all: &BTreeSet<Decimal>) -> bool {
    let mut all = all.iter().copied();
    let Some(first) = all.next() else { return true };
    all.try_fold(first, Decimal::lcm).is_some()
}

/// Calls `f` with each object of a schema that may be a schema, and its JSON pointer. Any object may be: a reference can lead
/// to it.
fn each(
    value: &Value,
    at: &mut String,
    f: &mut dyn FnMut(&Map<String, Value>, &str) -> Result<(), StructureError>,
) -> Result<(), StructureError> {
    let len = at.len();
    let mut child = |at: &mut String, name: &str, value: &Value| {
        at.push('/');
        at.push_str(&escape_pointer(name));
        let done = each(value, at, f);
        at.truncate(len);
        done
    };
    match value {
        Value::Array(items) => items.iter().enumerate().try_for_each(|(i, item)| child(at, &i.to_string(), item)),
        Value::Object(fields) => {
            for (name, value) in fields {
                let is_data = ["const", "enum", "default", "examples"].contains(&name.as_str());
                if !is_data {
                    child(at, name, value)?;
                }
            }
            f(fields, at)
        }
        _ => Ok(()),
    }
}

/// Adds the multiples in a schema and its parts. References are looked up in `whole`, each once.
fn gather(part: &Map<String, Value>, whole: &Value, seen: &mut BTreeSet<String>, found: &mut BTreeSet<Decimal>) {
    let mut open: Vec<&Map<String, Value>> = Vec::from([part]);
    while let Some(schema) = open.pop() {
        found.extend(schema.get("multipleOf").and_then(Value::as_f64).and_then(Decimal::new));
        if let Some(Value::String(reference)) = schema.get("$ref")
            && seen.insert(reference.clone())
        {
            let pointer = reference.strip_prefix('#').and_then(super::schema::percent_decoded);
            open.extend(pointer.and_then(|pointer| whole.pointer(&pointer)).and_then(Value::as_object));
        }
        for (keyword, value) in schema {
            let is_named = NAMED_SCHEMAS.contains(&keyword.as_str());
            match value {
                Value::Object(named) if is_named => open.extend(named.values().filter_map(Value::as_object)),
                Value::Object(schema) if SCHEMAS.contains(&keyword.as_str()) => open.push(schema),
                Value::Array(list) if SCHEMAS.contains(&keyword.as_str()) => {
                    open.extend(list.iter().filter_map(Value::as_object));
                }
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn large_multiples_are_refused_by_name() {
        let four =
            json!([{ "multipleOf": 9973 }, { "multipleOf": 9967 }, { "multipleOf": 9949 }, { "multipleOf": 9941 }]);
        for (schema, message) in [
            (json!({ "type": "integer", "multipleOf": 499_979 }), "/multipleOf: found 499979, expected at most 10000"),
            (
                json!({ "properties": { "a/b": { "multipleOf": 12345.5 } } }),
                "/properties/a~1b/multipleOf: found 12345.5",
            ),
            (json!({ "multipleOf": 1e-300 }), "/multipleOf: found 1e-300"),
            (json!({ "type": "integer", "allOf": four }), "the schema: the least common multiple"),
            (
                json!({ "items": { "multipleOf": 9973, "$ref": "#/$defs/a" }, "$defs": { "a": { "multipleOf": 9967 } } }),
                "/items: the least",
            ),
            (
                json!({ "items": { "multipleOf": 9973, "$ref": "#/far/x%20y" }, "far": { "x y": { "multipleOf": 9967 } } }),
                "/items: the least",
            ),
            (json!({ "multipleOf": 101, "anyOf": [{ "multipleOf": 103 }, true] }), "the schema: the least"),
        ] {
            let error = check(&schema).expect_err("a large multiple").to_string();
            assert!(error.contains(message), "{schema}: {error}");
        }
        for schema in [
            json!({ "properties": { "a": { "multipleOf": 9973 }, "b": { "multipleOf": 9967 } } }),
            json!({ "multipleOf": 0.01, "allOf": [{ "multipleOf": 0.5 }, { "multipleOf": 25 }] }),
            json!({ "multipleOf": 0, "allOf": [{ "multipleOf": 7 }] }),
            json!({ "properties": { "a": { "anyOf": [{ "multipleOf": 9973 }, { "multipleOf": 9967 }], "title": "x" } } }),
            json!({ "const": { "multipleOf": 499_979 } }),
        ] {
            assert_eq!(check(&schema), Ok(()), "{schema}");
        }
        assert!(check_lark("start: %json { \"multipleOf\": 499979 }").is_err());
        assert!(check_lark("start: %json { \"multipleOf\": 7 } \"%json\" ").is_ok());
        assert_eq!(Decimal { coef: 1, exp: 2 }.lcm(Decimal { coef: 5, exp: 1 }), Some(Decimal { coef: 5, exp: 1 }));
    }
}

//! Bounds `multipleOf` and intersections. `llguidance` builds an automaton with a state for each remainder, and combines the
//! multiples of intersected schemas by their least common multiple, in 32 bits. One step of its automaton for an intersection of
//! n regular expressions takes time and memory exponential in n, which its own limits do not bound.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;

use serde_json::{Deserializer, Map, Value};

use super::schema::{SCHEMAS, escape_pointer};
use super::{StructureError, invalid};

/// Remainders of a multiple: its digits as an integer, for each place after the decimal point.
const MAX_REMAINDERS: u64 = 10_000;
/// Regular expressions that may hold for one text: with 12 a step takes 0.6 s and 80 MB.
const MAX_REGEXES: usize = 8;
/// Parts of schemas that are looked at to find what is intersected.
const MAX_VISITS: usize = 50_000;
/// Names in a place; deeper ones count as one place.
const MAX_PLACE: usize = 6;
/// Keywords whose schemas are of any part of a value.
const BELOW: [&str; 7] = [
    "additionalItems",
    "additionalProperties",
    "contains",
    "items",
    "propertyNames",
    "unevaluatedItems",
    "unevaluatedProperties",
];
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
    /// The value of `multipleOf`; `None` if it is too large, or no number.
    fn of(value: &Value) -> Option<Decimal> {
        Decimal::new(value.as_f64()?).filter(|multiple| multiple.remainders() <= MAX_REMAINDERS)
    }

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

/// Checks each `multipleOf` of a schema, and what intersected schemas demand of one value.
///
/// # Errors
/// The first part that is too large, with its JSON pointer.
pub(super) fn check(schema: &Value) -> Result<(), StructureError> {
    let mut all = Demands::default();
    each(schema, &mut String::new(), &mut |schema, at| {
        if let Some(found) = schema.get("multipleOf").filter(|value| Decimal::of(value).is_none() && value.is_number())
        {
            let most = "times one more than its decimal places";
            let expected = format!("expected at most {MAX_REMAINDERS} as an integer {most}");
            return Err(invalid(&format!("{at}/multipleOf: found {found}, {expected}")));
        }
        all.add(schema);
        Ok(())
    })?;
    // what all of them together do not exceed, no intersection does
    if all.excess().is_none() {
        return Ok(());
    }
    let mut visits = MAX_VISITS;
    each(schema, &mut String::new(), &mut |part, at| {
        let n_others = part.keys().filter(|key| !ASIDE.contains(&key.as_str())).count();
        let is_intersection =
            part.contains_key("allOf") || n_others > 1 && part.keys().any(|key| APPLICATORS.contains(&key.as_str()));
        if !is_intersection {
            return Ok(());
        }
        let at = if at.is_empty() { "the schema" } else { at };
        let by_place = gather(part, schema, &mut visits)
            .ok_or_else(|| invalid(&format!("{at}: more than {MAX_VISITS} parts are intersected")))?;
        let (anywhere, places): (Vec<_>, Vec<_>) = by_place.into_iter().partition(|(place, _)| place.contains('*'));
        let anywhere = anywhere.into_iter().fold(Demands::default(), |sum, (_, one)| sum.plus(&one));
        // with an empty place, for what holds anywhere
        let places = places.iter().map(|(_, demands)| anywhere.clone().plus(demands)).chain([anywhere.clone()]);
        match places.into_iter().find_map(|demands| demands.excess()) {
            Some(what) => Err(invalid(&format!("{at}: {what}"))),
            None => Ok(()),
        }
    })
}

/// Checks the schemas in a Lark grammar, `%json {…}`.
///
/// # Errors
/// As [`check`].
pub(super) fn check_lark(text: &str) -> Result<(), StructureError> {
    let n = intersections_of_lark(text);
    if n > MAX_REGEXES {
        return Err(invalid(&format!("found {n} intersections (`&`), expected at most {MAX_REGEXES}")));
    }
    for (at, _) in text.match_indices("%json") {
        let mut values = Deserializer::from_str(&text[at + "%json".len()..]).into_iter::<Value>();
        if let Some(Ok(schema)) = values.next() {
            check(&schema)?;
        }
    }
    Ok(())
}

/// The operators `&` of a Lark grammar, outside of texts, expressions and comments.
fn intersections_of_lark(text: &str) -> usize {
    let (mut n, mut end, mut chars) = (0, None, text.chars().peekable());
    while let Some(c) = chars.next() {
        match (end, c) {
            (Some(_), '\\') => _ = chars.next(),
            // no text or expression goes on after its line
            (Some(_), '\n') => end = None,
            (Some(wanted), c) if c == wanted => end = None,
            (Some(_), _) => {}
            (None, '"' | '/') => {
                end = Some(if c == '/' && chars.next_if_eq(&'/').is_some() { '\n' } else { c });
            }
            (None, '#') => end = Some('\n'),
            (None, '&') => n += 1,
            (None, _) => {}
        }
    }
    n
}

/// What schemas demand of one value.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct Demands {
    multiples: BTreeSet<Decimal>,
    /// Patterns and formats.
    regexes: BTreeSet<String>,
}

impl Demands {
    fn add(&mut self, schema: &Map<String, Value>) {
        self.multiples.extend(schema.get("multipleOf").and_then(Decimal::of));
        for keyword in ["pattern", "format"] {
            self.regexes.extend(schema.get(keyword).and_then(Value::as_str).map(|text| format!("{keyword} {text}")));
        }
    }

    fn plus(mut self, other: &Demands) -> Demands {
        self.multiples.extend(&other.multiples);
        self.regexes.extend(other.regexes.iter().cloned());
        self
    }

    /// Why it is too much for one value.
    fn excess(&self) -> Option<String> {
        let mut multiples = self.multiples.iter().copied();
        if let Some(first) = multiples.next()
            && multiples.try_fold(first, Decimal::lcm).is_none()
        {
            let what = "the least common multiple of its values of multipleOf";
            return Some(format!("{what} is too large, expected at most {MAX_REMAINDERS}"));
        }
        let n = self.regexes.len();
        (n > MAX_REGEXES).then(|| format!("{n} patterns and formats hold for one text, expected at most {MAX_REGEXES}"))
    }
}

type EachSchema<'a> = dyn FnMut(&Map<String, Value>, &str) -> Result<(), StructureError> + 'a;

/// Calls `f` with each object of a schema that may be a schema, and its JSON pointer. Any object may be: a reference can lead
/// to it.
fn each(value: &Value, at: &mut String, f: &mut EachSchema<'_>) -> Result<(), StructureError> {
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

/// What a schema and its parts demand, by the place of the value in the instance: keys and indices, `*` for any. References are
/// looked up in `whole`, each once for a place. `None` if there are more than `visits` parts.
fn gather(part: &Map<String, Value>, whole: &Value, visits: &mut usize) -> Option<BTreeMap<String, Demands>> {
    let mut found: BTreeMap<String, Demands> = BTreeMap::new();
    let mut seen = BTreeSet::new();
    let mut open: Vec<(&Map<String, Value>, String, usize)> = Vec::from([(part, String::new(), 0)]);
    while let Some((schema, place, depth)) = open.pop() {
        *visits = visits.checked_sub(1)?;
        found.entry(place.clone()).or_default().add(schema);
        let below = |name: &str| {
            let name = escape_pointer(name);
            if depth < MAX_PLACE { (format!("{place}/{name}"), depth + 1) } else { (place.clone(), depth) }
        };
        if let Some(Value::String(reference)) = schema.get("$ref")
            && seen.insert((reference.clone(), place.clone()))
        {
            let pointer = reference.strip_prefix('#').and_then(super::schema::percent_decoded);
            let target = pointer.and_then(|pointer| whole.pointer(&pointer)).and_then(Value::as_object);
            open.extend(target.map(|target| (target, place.clone(), depth)));
        }
        for (keyword, value) in schema {
            let mut push = |value, (place, depth): (String, usize)| {
                open.extend(Value::as_object(value).map(|schema| (schema, place, depth)));
            };
            let is_below = BELOW.contains(&keyword.as_str());
            let here = || if is_below { below("*") } else { (place.clone(), depth) };
            match (keyword.as_str(), value) {
                ("properties", Value::Object(named)) => named.iter().for_each(|(name, value)| push(value, below(name))),
                ("patternProperties", Value::Object(named)) => named.values().for_each(|value| push(value, below("*"))),
                ("prefixItems", Value::Array(list)) => {
                    list.iter().enumerate().for_each(|(i, value)| push(value, below(&i.to_string())));
                }
                (keyword, Value::Array(list)) if is_below || SCHEMAS.contains(&keyword) => {
                    list.iter().for_each(|value| push(value, here()));
                }
                (keyword, value) if is_below || SCHEMAS.contains(&keyword) => push(value, here()),
                _ => {}
            }
        }
    }
    Some(found)
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
            let error = check(&schema).expect_err("too large").to_string();
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

    #[test]
    fn many_patterns_for_one_text_are_refused() {
        let patterns = |n: usize| (0..n).map(|i| json!({ "pattern": format!("a{{{i}}}") })).collect::<Vec<_>>();
        let named = |n: usize| -> Value {
            let pattern = |i| (format!("p{i}"), json!({ "pattern": format!("a{{{i}}}") }));
            Value::Object((0..n).map(pattern).collect())
        };
        let of_a = |n: usize| patterns(n).into_iter().map(|p| json!({ "properties": { "a": p } })).collect::<Vec<_>>();
        for (schema, is_fine) in [
            (json!({ "allOf": patterns(8) }), true),
            (json!({ "allOf": patterns(9) }), false),
            (json!({ "anyOf": patterns(30) }), true),
            // of different texts
            (
                json!({ "allOf": [{ "properties": named(30) }, { "$ref": "#/$defs/x" }], "$defs": { "x": { "properties": named(30) } } }),
                true,
            ),
            (json!({ "allOf": of_a(9) }), false),
            (
                json!({ "allOf": of_a(8).into_iter().chain([json!({ "additionalProperties": { "format": "date" } })]).collect::<Vec<_>>() }),
                false,
            ),
            (
                json!({ "allOf": [{ "$ref": "#/$defs/p" }, { "items": { "$ref": "#/$defs/p" } }], "$defs": { "p": { "allOf": patterns(9) } } }),
                false,
            ),
        ] {
            assert_eq!(check(&schema).is_ok(), is_fine, "{schema}");
        }
        let lark = |n: usize| format!("start: A\nA: \"&&\" // & \n | /&\\/&/ {}", "& /a/".repeat(n));
        assert!(check_lark(&lark(8)).is_ok() && check_lark(&lark(9)).is_err());
    }
}

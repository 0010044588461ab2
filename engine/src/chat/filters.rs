//! Filters that follow jinja2 where the template engine's own do not: conversions never fail on texts and collections, what is
//! empty or false has no elements, and `replace` takes a count.

use alloc::string::{String, ToString};
use alloc::vec::Vec;

use minijinja::value::{Kwargs, Rest, ValueKind, ValueOrKwargs};
use minijinja::{Error, ErrorKind, State, Value};

/// jinja2's `int(value, default=0, base=10)`: the default for what is no number.
pub(super) fn int(value: &Value, args: Rest<Value>, options: Kwargs) -> Result<Value, Error> {
    let default = argument(&args, 0, &options, "default")?.unwrap_or_else(|| Value::from(0));
    let base = argument(&args, 1, &options, "base")?.map(u32::try_from).transpose()?.unwrap_or(10);
    options.assert_all_used()?;
    if value.is_integer() {
        return Ok(value.clone());
    }
    if let Some(text) = value.as_str()
        && let Some(number) = parse_int(text, base)
    {
        return Ok(Value::from(number));
    }
    match to_float(value)? {
        // beyond this, floats have no digits after the point, and Python's integers no bound
        Some(number) if number.is_finite() && number.abs() < 1e38 => Ok(Value::from(number as i128)),
        _ => Ok(default),
    }
}

/// jinja2's `float(value, default=0.0)`.
pub(super) fn float(value: &Value, args: Rest<Value>, options: Kwargs) -> Result<Value, Error> {
    let default = argument(&args, 0, &options, "default")?.unwrap_or_else(|| Value::from(0.0));
    options.assert_all_used()?;
    Ok(to_float(value)?.map_or(default, Value::from))
}

fn argument(args: &[Value], i: usize, options: &Kwargs, name: &str) -> Result<Option<Value>, Error> {
    match args.get(i) {
        Some(value) => Ok(Some(value.clone())),
        None => options.get(name),
    }
}

/// Python's `float(value)`; `None` for what is no number.
fn to_float(value: &Value) -> Result<Option<f64>, Error> {
    Ok(match value.kind() {
        ValueKind::Undefined => return Err(Error::new(ErrorKind::UndefinedError, "expected a number")),
        ValueKind::Bool => Some(f64::from(u8::from(value.is_true()))),
        ValueKind::Number => Some(f64::try_from(value.clone())?),
        ValueKind::String => value.as_str().and_then(|text| text.trim().parse().ok()),
        _ => None,
    })
}

/// Python's `int(text, base)`: digits with a sign and a prefix of the base.
fn parse_int(text: &str, base: u32) -> Option<i128> {
    let text = text.trim();
    let (sign, digits) = match text.strip_prefix(['-', '+']) {
        Some(digits) => (if text.starts_with('-') { -1 } else { 1 }, digits),
        None => (1, text),
    };
    let prefix = match base {
        2 => "0b",
        8 => "0o",
        16 => "0x",
        _ => "",
    };
    let is_prefixed = digits.get(..prefix.len()).is_some_and(|start| start.eq_ignore_ascii_case(prefix));
    let digits = if is_prefixed { &digits[prefix.len()..] } else { digits };
    let is_number = (2..=36).contains(&base) && digits.chars().all(|c| c.is_digit(base));
    is_number.then(|| i128::from_str_radix(digits, base).ok()).flatten().map(|number| sign * number)
}

/// jinja2's `replace(s, old, new, count=None)` of the value's text.
pub(super) fn replace(value: &Value, args: Rest<Value>, options: Kwargs) -> Result<String, Error> {
    let text = |i: usize, name: &str| match argument(&args, i, &options, name)? {
        Some(text) => Ok(text.to_string()),
        None => Err(Error::new(ErrorKind::MissingArgument, "replace: expected an old and a new text")),
    };
    let (old, new) = (text(0, "old")?, text(1, "new")?);
    let count =
        argument(&args, 2, &options, "count")?.filter(|count| !count.is_none()).map(i64::try_from).transpose()?;
    options.assert_all_used()?;
    let value = value.to_string();
    Ok(match count.and_then(|count| usize::try_from(count).ok()) {
        Some(count) => value.replacen(&old, &new, count),
        None => value.replace(&old, &new),
    })
}

/// markupsafe's `escape`.
pub(super) fn escape(value: &Value) -> String {
    let mut out = String::new();
    for c in value.to_string().chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '\'' => out.push_str("&#39;"),
            '"' => out.push_str("&#34;"),
            c => out.push(c),
        }
    }
    out
}

/// A filter of numbers, which takes truth values as 0 and 1.
pub(super) fn of_numbers(filter: Value) -> Value {
    Value::from_function(move |state: &mut State<'_, '_>, args: Rest<ValueOrKwargs>| {
        let mut args = args.into_values();
        if let Some(value) = args.first_mut().filter(|value| value.kind() == ValueKind::Bool) {
            *value = Value::from(i64::from(value.is_true()));
        }
        filter.call(state, &args)
    })
}

/// A filter of which jinja2's result for an undefined value is `undefined`: such a value has a length of 0 and no elements.
pub(super) fn of_defined(filter: Value, undefined: fn() -> Value) -> Value {
    Value::from_function(move |state: &mut State<'_, '_>, args: Rest<ValueOrKwargs>| {
        let args = args.into_values();
        match args.first() {
            Some(value) if value.is_undefined() => Ok(undefined()),
            _ => filter.call(state, &args),
        }
    })
}

/// A filter of lists that takes the keys of a mapping, in their order.
pub(super) fn of_keys(filter: Value) -> Value {
    Value::from_function(move |state: &mut State<'_, '_>, args: Rest<ValueOrKwargs>| {
        let mut args = args.into_values();
        if let Some(value) = args.first_mut().filter(|value| value.kind() == ValueKind::Map) {
            *value = Value::from(value.try_iter()?.collect::<Vec<_>>());
        }
        filter.call(state, &args)
    })
}

/// A filter that walks a list, which jinja2 does not look at if it is false: then the result is an empty list.
pub(super) fn of_truthy(filter: Value) -> Value {
    Value::from_function(move |state: &mut State<'_, '_>, args: Rest<ValueOrKwargs>| {
        let args = args.into_values();
        match args.first() {
            Some(value) if !value.is_true() => Ok(Value::from(Vec::<Value>::new())),
            _ => filter.call(state, &args),
        }
    })
}

/// Python's `str(value).islower()`, or `isupper`.
pub(super) fn is_lower(value: &Value) -> bool {
    let text = value.to_string();
    text.chars().any(char::is_lowercase) && !text.chars().any(char::is_uppercase)
}

pub(super) fn is_upper(value: &Value) -> bool {
    let text = value.to_string();
    text.chars().any(char::is_uppercase) && !text.chars().any(char::is_lowercase)
}

//! Python methods of strings and collections that `minijinja_contrib` lacks.

use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;

use minijinja::value::{Kwargs, Tuple, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};
use minijinja_contrib::pycompat::unknown_method_callback;

/// Calls a method of a string, list or mapping.
pub(super) fn call(state: &mut State<'_, '_>, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    match value.as_str().and_then(|text| of_string(text, name, args).transpose()) {
        Some(result) => result,
        None => match of_collection(value, name, args).transpose() {
            Some(result) => result,
            None => unknown_method_callback(state, value, name, args),
        },
    }
}

/// Calls a method of a list or mapping; `None` if it is not one of this module.
fn of_collection(value: &Value, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    match (name, value.kind()) {
        // values are immutable
        ("copy", ValueKind::Seq | ValueKind::Map) => {
            let () = from_args(args)?;
            Ok(Some(value.clone()))
        }
        ("index", ValueKind::Seq) => {
            let (wanted,): (&Value,) = from_args(args)?;
            let at = value.try_iter()?.position(|item| item == *wanted);
            at.map(|at| Some(Value::from(at)))
                .ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "index: not found"))
        }
        _ => Ok(None),
    }
}

/// Calls a string method; `None` if it is not one of this module.
fn of_string(text: &str, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    Ok(Some(match name {
        "title" => {
            let () = from_args(args)?;
            Value::from(title(text))
        }
        "rsplit" => rsplit(text, args)?,
        "partition" | "rpartition" => {
            let (separator,): (&str,) = from_args(args)?;
            let is_last = name == "rpartition";
            if separator.is_empty() {
                return Err(Error::new(ErrorKind::InvalidOperation, "empty separator"));
            }
            let found = if is_last { text.rsplit_once(separator) } else { text.split_once(separator) };
            let parts = match found {
                Some((before, after)) => [before, separator, after],
                None if is_last => ["", "", text],
                None => [text, "", ""],
            };
            Value::from(Tuple::from(parts.map(Value::from)))
        }
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            Value::from(text.strip_prefix(prefix).unwrap_or(text))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            Value::from(text.strip_suffix(suffix).unwrap_or(text))
        }
        "isdigit" | "isdecimal" => {
            let () = from_args(args)?;
            Value::from(!text.is_empty() && text.bytes().all(|b| b.is_ascii_digit()))
        }
        "isnumeric" => {
            let () = from_args(args)?;
            Value::from(!text.is_empty() && text.chars().all(char::is_numeric))
        }
        "index" => {
            let (part,): (&str,) = from_args(args)?;
            let at = text.find(part).map(|at| text[..at].chars().count());
            Value::from(at.ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "index: substring not found"))?)
        }
        "swapcase" => {
            let () = from_args(args)?;
            Value::from(text.chars().flat_map(swapped).collect::<String>())
        }
        "zfill" => {
            let (width,): (usize,) = from_args(args)?;
            let sign = text.len() - text.trim_start_matches(['-', '+']).len();
            let (sign, digits) = text.split_at(sign.min(1));
            let zeros = "0".repeat(width.saturating_sub(text.chars().count()));
            Value::from([sign, &zeros, digits].concat())
        }
        "center" | "ljust" | "rjust" => {
            let (width, fill): (usize, Option<&str>) = from_args(args)?;
            let missing = width.saturating_sub(text.chars().count());
            // Python's rounding of the left half
            let left = match name {
                "ljust" => 0,
                "rjust" => missing,
                _ => missing / 2 + (missing & width & 1),
            };
            let fill = |n: usize| fill.unwrap_or(" ").repeat(n);
            Value::from([&*fill(left), text, &*fill(missing - left)].concat())
        }
        "casefold" => {
            let () = from_args(args)?;
            Value::from(text.to_lowercase())
        }
        _ => return Ok(None),
    }))
}

/// A letter in the other case.
fn swapped(c: char) -> Vec<char> {
    if c.is_uppercase() { c.to_lowercase().collect() } else { c.to_uppercase().collect() }
}

/// Python's `str.title`: capitalises the first letter of each run of letters.
fn title(text: &str) -> String {
    let (mut out, mut inside) = (String::with_capacity(text.len()), false);
    for c in text.chars() {
        if inside {
            out.extend(c.to_lowercase())
        } else {
            out.extend(c.to_uppercase())
        }
        inside = c.is_alphabetic();
    }
    out
}

/// Python's `str.rsplit(sep=None, maxsplit=-1)`.
fn rsplit(text: &str, args: &[Value]) -> Result<Value, Error> {
    let (separator, most, options): (Option<&str>, Option<i64>, Kwargs) = from_args(args)?;
    let separator = if separator.is_some() { separator } else { options.get::<Option<&str>>("sep")? };
    let most = if most.is_some() { most } else { options.get::<Option<i64>>("maxsplit")? };
    options.assert_all_used()?;
    let most = most.and_then(|n| usize::try_from(n).ok()).unwrap_or(usize::MAX);
    let mut parts: Vec<&str> = match separator {
        Some("") => return Err(Error::new(ErrorKind::InvalidOperation, "empty separator")),
        Some(separator) => text.rsplitn(most.saturating_add(1), separator).collect(),
        None => {
            let (mut parts, mut rest) = (vec![], text.trim_end());
            while !rest.is_empty() {
                match rest.rfind(char::is_whitespace).filter(|_| parts.len() < most) {
                    Some(at) => {
                        let start = at + rest[at..].chars().next().map_or(0, char::len_utf8);
                        parts.push(&rest[start..]);
                        rest = rest[..at].trim_end();
                    }
                    None => {
                        parts.push(rest);
                        break;
                    }
                }
            }
            parts
        }
    };
    parts.reverse();
    Ok(Value::from(parts.into_iter().map(Value::from).collect::<Vec<_>>()))
}

//! Filters, tests and functions of templates: those of jinja2, without the template engine's extensions. Each has the
//! cost charged for it; `None` if it costs no more than an instruction.

use alloc::format;
use alloc::string::{String, ToString};
use alloc::sync::Arc;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicBool, Ordering};

use minijinja::value::{DynObject, Kwargs, Object, ObjectRepr, Rest, ValueKind, ValueOrKwargs, from_args};
use minijinja::{Environment, Error, ErrorKind, State, Value, filters, functions, tests};

use super::meter::{Budget, Cost};
use super::{filters as own, json};

/// A filter or test: name, constructor and cost.
type Builtin = (&'static str, fn() -> Value, Option<Cost>);

#[rustfmt::skip]
const FILTERS: &[Builtin] = &[
    ("abs", || own::of_numbers(Value::from_function(filters::abs)), None),
    ("attr", || Value::from_function(filters::attr), None),
    ("batch", || Value::from_function(filters::batch), Some(Cost::Fill)),
    ("capitalize", || Value::from_function(filters::capitalize), Some(Cost::Shallow)),
    ("count", length, None),
    ("d", || Value::from_function(filters::default), None),
    ("default", || Value::from_function(filters::default), None),
    ("dictsort", || Value::from_function(filters::dictsort), Some(Cost::Deep)),
    ("e", || Value::from_function(own::escape), Some(Cost::Deep)),
    ("escape", || Value::from_function(own::escape), Some(Cost::Deep)),
    ("first", || own::of_defined(Value::from_function(filters::first), undefined), None),
    ("float", || Value::from_function(own::float), Some(Cost::Shallow)),
    ("format", || Value::from_function(filters::format), Some(Cost::Format)),
    ("groupby", || Value::from_function(filters::groupby), Some(Cost::Deep)),
    ("indent", || Value::from_function(filters::indent), Some(Cost::Indent)),
    ("int", || Value::from_function(own::int), Some(Cost::Shallow)),
    ("items", || own::of_defined(Value::from_function(filters::items), empty_list), Some(Cost::Shallow)),
    ("join", || Value::from_function(filters::join), Some(Cost::Join)),
    ("last", || own::of_keys(own::of_defined(Value::from_function(filters::last), undefined)), Some(Cost::Shallow)),
    ("length", length, None),
    ("list", || Value::from_function(filters::list), Some(Cost::Elements)),
    ("lower", || Value::from_function(filters::lower), Some(Cost::Shallow)),
    ("map", || own::of_truthy(Value::from_function(filters::map)), Some(Cost::Elements)),
    ("max", || Value::from_function(filters::max), Some(Cost::Deep)),
    ("min", || Value::from_function(filters::min), Some(Cost::Deep)),
    ("pprint", || Value::from_function(filters::pprint), Some(Cost::Deep)),
    ("reject", || own::of_truthy(Value::from_function(filters::reject)), Some(Cost::Elements)),
    ("rejectattr", || own::of_truthy(Value::from_function(filters::rejectattr)), Some(Cost::Elements)),
    ("replace", || Value::from_function(own::replace), Some(Cost::ReplaceText)),
    ("reverse", || own::of_keys(Value::from_function(filters::reverse)), Some(Cost::Elements)),
    ("round", || own::of_numbers(Value::from_function(filters::round)), None),
    ("safe", || Value::from_function(filters::safe), Some(Cost::Deep)),
    ("select", || own::of_truthy(Value::from_function(filters::select)), Some(Cost::Elements)),
    ("selectattr", || own::of_truthy(Value::from_function(filters::selectattr)), Some(Cost::Elements)),
    ("slice", || Value::from_function(filters::slice), Some(Cost::Fill)),
    ("sort", || Value::from_function(filters::sort), Some(Cost::Deep)),
    ("string", || Value::from_function(filters::string), Some(Cost::Deep)),
    ("sum", || Value::from_function(filters::sum), Some(Cost::Square)),
    ("title", || Value::from_function(filters::title), Some(Cost::Shallow)),
    ("tojson", || Value::from_function(json::to_json), Some(Cost::Deep)),
    ("truncate", || Value::from_function(truncate), Some(Cost::Elements)),
    ("trim", || Value::from_function(filters::trim), Some(Cost::Shallow)),
    ("unique", || Value::from_function(filters::unique), Some(Cost::Deep)),
    ("upper", || Value::from_function(filters::upper), Some(Cost::Shallow)),
];

#[rustfmt::skip]
const TESTS: &[Builtin] = &[
    ("!=", || Value::from_function(tests::is_ne), Some(Cost::Deep)),
    ("<", || Value::from_function(tests::is_lt), Some(Cost::Deep)),
    ("<=", || Value::from_function(tests::is_le), Some(Cost::Deep)),
    ("==", || Value::from_function(tests::is_eq), Some(Cost::Deep)),
    (">", || Value::from_function(tests::is_gt), Some(Cost::Deep)),
    (">=", || Value::from_function(tests::is_ge), Some(Cost::Deep)),
    ("boolean", || Value::from_function(tests::is_boolean), None),
    ("callable", || Value::from_function(is_callable), None),
    ("defined", || Value::from_function(tests::is_defined), None),
    ("divisibleby", || Value::from_function(tests::is_divisibleby), None),
    ("eq", || Value::from_function(tests::is_eq), Some(Cost::Deep)),
    ("equalto", || Value::from_function(tests::is_eq), Some(Cost::Deep)),
    ("escaped", || Value::from_function(tests::is_safe), None),
    ("even", || Value::from_function(tests::is_even), None),
    ("false", || Value::from_function(tests::is_false), None),
    ("filter", || Value::from_function(tests::is_filter), None),
    ("float", || Value::from_function(tests::is_float), None),
    ("ge", || Value::from_function(tests::is_ge), Some(Cost::Deep)),
    ("greaterthan", || Value::from_function(tests::is_gt), Some(Cost::Deep)),
    ("gt", || Value::from_function(tests::is_gt), Some(Cost::Deep)),
    ("in", || Value::from_function(tests::is_in), Some(Cost::Deep)),
    ("integer", || Value::from_function(tests::is_integer), None),
    ("iterable", || Value::from_function(is_iterable), None),
    ("le", || Value::from_function(tests::is_le), Some(Cost::Deep)),
    ("lessthan", || Value::from_function(tests::is_lt), Some(Cost::Deep)),
    ("lower", || Value::from_function(own::is_lower), Some(Cost::Deep)),
    ("lt", || Value::from_function(tests::is_lt), Some(Cost::Deep)),
    ("mapping", || Value::from_function(tests::is_mapping), None),
    ("ne", || Value::from_function(tests::is_ne), Some(Cost::Deep)),
    ("none", || Value::from_function(tests::is_none), None),
    ("number", || Value::from_function(tests::is_number), None),
    ("odd", || Value::from_function(tests::is_odd), None),
    ("sameas", || Value::from_function(tests::is_sameas), Some(Cost::Deep)),
    ("sequence", || Value::from_function(is_sequence), None),
    ("string", || Value::from_function(tests::is_string), None),
    ("test", || Value::from_function(tests::is_test), None),
    ("true", || Value::from_function(tests::is_true), None),
    ("undefined", || Value::from_function(tests::is_undefined), None),
    ("upper", || Value::from_function(own::is_upper), Some(Cost::Deep)),
];

fn length() -> Value {
    own::of_defined(Value::from_function(filters::length), || Value::from(0))
}

fn undefined() -> Value {
    Value::UNDEFINED
}

fn empty_list() -> Value {
    Value::from(Vec::<Value>::new())
}

/// Adds the filters, tests and functions to `env`, charged to `budget`.
pub(super) fn install(env: &mut Environment<'_>, budget: &Budget) {
    for &(name, filter, cost) in FILTERS {
        let (budget, filter) = (budget.clone(), filter());
        env.add_filter(name, move |state: &mut State<'_, '_>, args: Rest<ValueOrKwargs>| {
            let args = args.into_values();
            let Some(cost) = cost else { return filter.call(state, &args) };
            budget.charge_operation(cost, &args)?;
            budget.charge_result(filter.call(state, &args)?)
        });
    }
    for &(name, test, cost) in TESTS {
        let (budget, test) = (budget.clone(), test());
        env.add_test(name, move |state: &mut State<'_, '_>, args: Rest<ValueOrKwargs>| -> Result<bool, Error> {
            let args = args.into_values();
            cost.map_or(Ok(()), |cost| budget.charge_operation(cost, &args))?;
            Ok(test.call(state, &args)?.is_true())
        });
    }
    for (name, function) in [
        ("dict", Value::from_function(functions::dict)),
        ("joiner", Value::from_function(joiner)),
        ("namespace", Value::from_function(functions::namespace)),
    ] {
        let budget = budget.clone();
        env.add_function(name, move |state: &mut State<'_, '_>, args: Rest<ValueOrKwargs>| {
            budget.charge_result(function.call(state, &args.into_values())?)
        });
    }
    // the template engine bounds its length
    env.add_function("range", functions::range);
}

/// Whether Python's `iter` accepts the value.
fn is_iterable(value: &Value) -> bool {
    match value.kind() {
        ValueKind::String | ValueKind::Undefined => true,
        ValueKind::None => false,
        _ => value.try_iter().is_ok(),
    }
}

/// Whether Python's `len` and indexing accept the value: strings and mappings too.
fn is_sequence(value: &Value) -> bool {
    let kinds = [ValueKind::Undefined, ValueKind::String, ValueKind::Bytes, ValueKind::Seq, ValueKind::Map];
    kinds.contains(&value.kind())
}

/// Whether the value can be called: functions, macros, joiners, and jinja2's undefined value, which has `__call__`.
fn is_callable(value: &Value) -> bool {
    let is_object = |plain: &DynObject| value.kind() == ValueKind::Plain || plain.type_name().ends_with("::Macro");
    value.is_undefined() || value.as_object().is_some_and(is_object)
}

/// jinja2's `truncate(s, length=255, killwords=False, end='...', leeway=5)`.
fn truncate(text: &str, args: Rest<Value>, options: Kwargs) -> Result<String, Error> {
    let argument = |i: usize, name: &str| match args.get(i) {
        Some(value) => Ok(Some(value.clone())),
        None => options.get::<Option<Value>>(name),
    };
    let number = |i: usize, name: &str, default: usize| -> Result<usize, Error> {
        match argument(i, name)? {
            Some(value) if !value.is_none() => usize::try_from(value),
            _ => Ok(default),
        }
    };
    let length = number(0, "length", 255)?;
    let kill_words = argument(1, "killwords")?.is_some_and(|value| value.is_true());
    let end = argument(2, "end")?.map_or_else(|| "...".to_string(), |end| end.to_string());
    let leeway = number(3, "leeway", 5)?;
    options.assert_all_used()?;
    if text.chars().count() <= length.saturating_add(leeway) {
        return Ok(text.to_string());
    }
    let Some(kept) = length.checked_sub(end.chars().count()) else {
        let message = format!("truncate: the length {length} is less than that of {end:?}");
        return Err(Error::new(ErrorKind::InvalidOperation, message));
    };
    let kept: String = text.chars().take(kept).collect();
    let whole_words = kept.rsplit_once(' ').map_or(&*kept, |(before, _)| before);
    Ok([if kill_words { &kept } else { whole_words }, &*end].concat())
}

/// jinja2's joiner: returns an empty string at the first call, then the separator.
#[derive(Debug)]
struct Joiner {
    separator: String,
    used: AtomicBool,
}

impl Object for Joiner {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn call(self: &Arc<Self>, _: &mut State<'_, '_>, args: &[Value]) -> Result<Value, Error> {
        let () = from_args(args)?;
        let is_later = self.used.swap(true, Ordering::Relaxed);
        Ok(Value::from(if is_later { &*self.separator } else { "" }))
    }
}

/// jinja2's `joiner(sep=', ')`. Keeps the separator as a string: a value could contain other joiners, nested without
/// bound.
fn joiner(separator: Option<&str>) -> Value {
    let separator = separator.unwrap_or(", ").to_string();
    Value::from_object(Joiner { separator, used: AtomicBool::new(false) })
}

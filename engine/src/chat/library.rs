//! What templates may call that costs no more than its instruction; the rest is paid for, in `meter`. Both begin with
//! nothing: the library's own tables would stand in a module beside these, with what nobody may call.

use minijinja::value::{Rest, ValueOrKwargs};
use minijinja::{Environment, Error, State, Value, filters, functions, tests};

/// Calls a function of the library as it is.
fn calls(function: Value) -> impl Fn(&mut State<'_, '_>, Rest<ValueOrKwargs>) -> Result<Value, Error> + Send + Sync {
    move |state, args| function.call(state, &args.into_values())
}

/// Adds filters, tests and functions.
pub(super) fn install(env: &mut Environment<'_>) {
    let filters = [
        ("abs", Value::from_function(filters::abs)),
        ("attr", Value::from_function(filters::attr)),
        ("bool", Value::from_function(filters::bool)),
        ("count", Value::from_function(filters::length)),
        ("d", Value::from_function(filters::default)),
        ("default", Value::from_function(filters::default)),
        ("first", Value::from_function(filters::first)),
        ("float", Value::from_function(filters::float)),
        ("int", Value::from_function(filters::int)),
        ("last", Value::from_function(filters::last)),
        ("length", Value::from_function(filters::length)),
        ("round", Value::from_function(filters::round)),
    ];
    for (name, filter) in filters {
        env.add_filter(name, calls(filter));
    }
    let tests = [
        ("!=", Value::from_function(tests::is_ne)),
        ("<", Value::from_function(tests::is_lt)),
        ("<=", Value::from_function(tests::is_le)),
        ("==", Value::from_function(tests::is_eq)),
        (">", Value::from_function(tests::is_gt)),
        (">=", Value::from_function(tests::is_ge)),
        ("boolean", Value::from_function(tests::is_boolean)),
        ("defined", Value::from_function(tests::is_defined)),
        ("divisibleby", Value::from_function(tests::is_divisibleby)),
        ("endingwith", Value::from_function(tests::is_endingwith)),
        ("eq", Value::from_function(tests::is_eq)),
        ("equalto", Value::from_function(tests::is_eq)),
        ("escaped", Value::from_function(tests::is_safe)),
        ("even", Value::from_function(tests::is_even)),
        ("false", Value::from_function(tests::is_false)),
        ("filter", Value::from_function(tests::is_filter)),
        ("float", Value::from_function(tests::is_float)),
        ("ge", Value::from_function(tests::is_ge)),
        ("greaterthan", Value::from_function(tests::is_gt)),
        ("gt", Value::from_function(tests::is_gt)),
        ("in", Value::from_function(tests::is_in)),
        ("int", Value::from_function(tests::is_integer)),
        ("integer", Value::from_function(tests::is_integer)),
        ("iterable", Value::from_function(tests::is_iterable)),
        ("le", Value::from_function(tests::is_le)),
        ("lessthan", Value::from_function(tests::is_lt)),
        ("lower", Value::from_function(tests::is_lower)),
        ("lt", Value::from_function(tests::is_lt)),
        ("mapping", Value::from_function(tests::is_mapping)),
        ("ne", Value::from_function(tests::is_ne)),
        ("none", Value::from_function(tests::is_none)),
        ("number", Value::from_function(tests::is_number)),
        ("odd", Value::from_function(tests::is_odd)),
        ("safe", Value::from_function(tests::is_safe)),
        ("sameas", Value::from_function(tests::is_sameas)),
        ("sequence", Value::from_function(tests::is_sequence)),
        ("startingwith", Value::from_function(tests::is_startingwith)),
        ("string", Value::from_function(tests::is_string)),
        ("test", Value::from_function(tests::is_test)),
        ("true", Value::from_function(tests::is_true)),
        ("undefined", Value::from_function(tests::is_undefined)),
        ("upper", Value::from_function(tests::is_upper)),
    ];
    for (name, test) in tests {
        env.add_test(name, calls(test));
    }
    env.add_function("range", calls(Value::from_function(functions::range)));
}

//! Work budget of templates. The template engine counts instructions; this module bounds the cost of each: the bytes of
//! all strings and lists that an operation reads or creates are charged to one budget beforehand. So time and memory of
//! a template are proportional to its budget, whatever it doubles or nests.
//!
//! The engine's fuel cannot do this: it counts instructions, and forty times `x = x ~ x` are few of them and a terabyte. Nor can a
//! limit on the output: such values need not be printed.
//!
//! Operators have no hook, so the compiled template is rewritten: before each operator that can grow or traverse a
//! value, a filter charges its operands and returns them.
//!
//! ```text
//! Add          ─►  ApplyFilter("~add", 2)  UnpackList(2)  Add
//! SetAttr      ─►  ApplyFilter("~set", 2)  UnpackList(2)  SetAttr
//! BuildList    ─►  BuildList  ApplyFilter("~result", 1)
//! Slice        ─►  ApplyFilter("~slice", 4)
//! Rem          ─►  ApplyFilter("~rem", 2)
//! EmitRaw(s)   ─►  LoadConst(s)  Emit                        charged by the formatter
//! ```
//!
//! Values are dropped recursively, so their nesting is limited; and no value may contain itself, or it would leak.

use alloc::string::{String, ToString};
use alloc::sync::Arc;
use alloc::vec;
use alloc::vec::Vec;
use core::sync::atomic::{AtomicU64, Ordering};

use minijinja::machinery::{Instruction, Instructions};
use minijinja::value::{Rest, Tuple, ValueKind, ValueOrKwargs};
use minijinja::{Environment, Error, ErrorKind, State, Value, filters};

/// The remaining budget in bytes; shared by clones.
#[derive(Debug, Clone)]
pub(super) struct Budget(Arc<AtomicU64>);

/// Maximal nesting depth of a value.
const MAX_DEPTH: usize = 128;
/// Cost of a number, a list element or a map entry in bytes.
const ELEMENT: u64 = 32;
/// Marks an exhausted budget.
const EXHAUSTED: u64 = u64::MAX;

impl Budget {
    pub(super) fn new(bytes: u64) -> Budget {
        Budget(Arc::new(AtomicU64::new(bytes)))
    }

    pub(super) fn is_exhausted(&self) -> bool {
        self.0.load(Ordering::Relaxed) == EXHAUSTED
    }

    fn charge(&self, cost: u64) -> Result<(), Error> {
        let left = self.0.load(Ordering::Relaxed);
        match left.checked_sub(cost) {
            Some(rest) if left != EXHAUSTED => self.0.store(rest, Ordering::Relaxed),
            _ => {
                self.0.store(EXHAUSTED, Ordering::Relaxed);
                return failed("the work budget (work_bytes) is exhausted");
            }
        }
        Ok(())
    }

    /// Charges a value without its elements.
    fn charge_shallow(&self, value: &Value) -> Result<(), Error> {
        self.charge(match value.as_str() {
            Some(text) => text.len() as u64,
            None => ELEMENT + ELEMENT * value.len().unwrap_or(0) as u64,
        })
    }

    /// Charges a value with all its elements, as when it is printed or compared.
    fn charge_deep(&self, value: &Value, depth: usize) -> Result<(), Error> {
        self.walk(value, depth, &|value| match value.kind() {
            ValueKind::String | ValueKind::Bytes => Ok(value.len().unwrap_or(0) as u64),
            _ => Ok(0),
        })
    }

    /// Charges a value and its elements recursively; `more` gives the cost in addition to [`ELEMENT`].
    fn walk(&self, value: &Value, depth: usize, more: &dyn Fn(&Value) -> Result<u64, Error>) -> Result<(), Error> {
        if depth > MAX_DEPTH {
            return failed("a value is nested more than 128 levels deep");
        }
        self.charge(ELEMENT + more(value)?)?;
        match value.kind() {
            ValueKind::Seq | ValueKind::Iterable => {
                value.try_iter()?.try_for_each(|item| self.walk(&item, depth + 1, more))
            }
            ValueKind::Map => value.try_iter()?.try_for_each(|key| {
                self.walk(&key, depth + 1, more)?;
                self.walk(&value.get_item(&key)?, depth + 1, more)
            }),
            _ => Ok(()),
        }
    }

    /// Charges the result of an operation and checks its nesting. Lazy lists are collected, since they could hide
    /// unbounded nesting.
    pub(super) fn charge_result(&self, value: Value) -> Result<Value, Error> {
        self.charge_shallow(&value)?;
        let is_lazy = matches!(value.kind(), ValueKind::Seq | ValueKind::Iterable)
            && !value.is_tuple()
            && value.downcast_object_ref::<Vec<Value>>().is_none();
        let value = if is_lazy { Value::from(value.try_iter()?.collect::<Vec<_>>()) } else { value };
        self.walk(&value, 1, &|_| Ok(0))?;
        Ok(value)
    }

    /// Charges an operation on `args`, of which the first is the value that a filter or method applies to.
    pub(super) fn charge_operation(&self, cost: Cost, args: &[Value]) -> Result<(), Error> {
        args.iter().try_for_each(|arg| self.charge_shallow(arg))?;
        let text = |i: usize| args.get(i).and_then(Value::as_str).unwrap_or_default();
        let len = |i: usize| args.get(i).and_then(|value| value.len()).unwrap_or(0) as u64;
        let times = |a: u64, b: u64| self.charge(a.saturating_mul(b));
        match cost {
            Cost::Shallow => Ok(()),
            Cost::Deep => args.iter().try_for_each(|arg| self.charge_deep(arg, 0)),
            Cost::Elements => times(len(0), ELEMENT),
            Cost::Fill => {
                let counts = args.iter().skip(1).filter_map(Value::as_usize);
                counts.map(|n| n as u64).try_for_each(|n| times(n, ELEMENT))
            }
            Cost::Repeat => {
                let count = |i: usize| args.get(i).and_then(Value::as_usize).unwrap_or(0) as u64;
                let bytes = |i: usize| if text(i).is_empty() { ELEMENT * len(i) } else { len(i) };
                times(bytes(0), count(1))?;
                times(bytes(1), count(0))
            }
            Cost::Replace => times(text(0).len() as u64 / text(1).len().max(1) as u64 + 1, text(2).len() as u64),
            Cost::ReplaceText => {
                args.iter().try_for_each(|arg| self.charge_deep(arg, 0))?;
                let lengths: Vec<usize> = args.iter().take(3).map(|arg| arg.to_string().len()).collect();
                let len = |i: usize| lengths.get(i).copied().unwrap_or(0) as u64;
                times(len(0) / len(1).max(1) + 1, len(2))
            }
            Cost::Join => {
                args.iter().try_for_each(|arg| self.charge_deep(arg, 0))?;
                // the list is the first argument of the filter, and the second of the method
                times(len(0), text(1).len() as u64)?;
                times(len(1), text(0).len() as u64)
            }
            Cost::Indent => {
                let lines = text(0).matches('\n').count() as u64 + 1;
                numbers(args).try_for_each(|n| times(lines, n))
            }
            Cost::Format => {
                args.iter().try_for_each(|arg| self.charge_deep(arg, 0))?;
                numbers(args).try_for_each(|n| self.charge(n))?;
                // widths and precisions of the format string
                text(0)
                    .split(|c: char| !c.is_ascii_digit())
                    .filter(|digits| !digits.is_empty())
                    .try_for_each(|digits| self.charge(digits.parse().unwrap_or(u64::MAX)))
            }
            Cost::Square => {
                args.iter().try_for_each(|arg| self.charge_deep(arg, 0))?;
                times(len(0), len(0))
            }
        }
    }
}

/// Integers among positional and keyword arguments.
fn numbers(args: &[Value]) -> impl Iterator<Item = u64> + '_ {
    let named = args.iter().filter(|arg| arg.is_kwargs()).flat_map(|kwargs| {
        let keys = kwargs.try_iter().into_iter().flatten();
        keys.filter_map(|key| kwargs.get_item(&key).ok()).collect::<Vec<_>>()
    });
    args.iter().cloned().chain(named).filter_map(|arg| arg.as_i64()).map(i64::unsigned_abs)
}

/// Cost of an operation in addition to its operands.
#[derive(Debug, Clone, Copy)]
pub(super) enum Cost {
    /// None: it creates no more than it reads.
    Shallow,
    /// It prints or compares values with all their elements.
    Deep,
    /// It may create a list of the characters of a string.
    Elements,
    /// It pads lists to a length given as argument.
    Fill,
    /// It repeats one operand as often as the other says.
    Repeat,
    /// It replaces each occurrence of the second string in the first by the third.
    Replace,
    /// The same in the text of any value.
    ReplaceText,
    /// It concatenates strings with a separator.
    Join,
    /// It inserts spaces before each line.
    Indent,
    /// It formats strings to widths given in the format string.
    Format,
    /// It concatenates the elements one by one: quadratic.
    Square,
}

fn method_cost(name: &str) -> Cost {
    match name {
        "replace" => Cost::Replace,
        "join" => Cost::Join,
        "count" | "index" => Cost::Deep,
        "format" => Cost::Format,
        "split" | "splitlines" | "rsplit" => Cost::Elements,
        "center" | "ljust" | "rjust" | "zfill" | "expandtabs" => Cost::Indent,
        _ => Cost::Shallow,
    }
}

/// Calls a method, charging its operands and its result.
pub(super) fn method(
    budget: &Budget,
    value: &Value,
    name: &str,
    args: &[Value],
    call: impl FnOnce() -> Result<Value, Error>,
) -> Result<Value, Error> {
    budget.charge_operation(method_cost(name), &[core::slice::from_ref(value), args].concat())?;
    budget.charge_result(call()?)
}

/// Adds the filters that [`instrument`] inserts, and a formatter that charges what is printed.
pub(super) fn install(env: &mut Environment<'_>, budget: &Budget) {
    let meter = budget.clone();
    env.add_filter("~result", move |value: Value| meter.charge_result(value));
    let meter = budget.clone();
    env.add_filter("~set", move |value: Value, namespace: Value| {
        meter.walk(&value, 1, &|value| match value.as_object().map(|object| object.type_name()) {
            Some(name) if name.ends_with("::Namespace") => failed("a namespace cannot contain a namespace"),
            _ => Ok(0),
        })?;
        Ok(Value::from(vec![namespace, value]))
    });
    for (name, cost) in [("~add", Cost::Shallow), ("~deep", Cost::Deep), ("~repeat", Cost::Repeat)] {
        let budget = budget.clone();
        // UnpackList pushes the last element first
        env.add_filter(name, move |args: Rest<Value>| -> Result<Value, Error> {
            budget.charge_operation(cost, &args)?;
            Ok(Value::from(args.iter().rev().cloned().collect::<Vec<_>>()))
        });
    }
    let meter = budget.clone();
    env.add_filter("~slice", move |value: Value, start: Value, stop: Value, step: Value| {
        meter.charge_operation(Cost::Elements, core::slice::from_ref(&value))?;
        slice(&value, [start, stop, step])
    });
    let meter = budget.clone();
    env.add_filter("~rem", move |state: &mut State<'_, '_>, left: Value, right: Value| {
        if left.as_str().is_none() {
            return remainder(&left, &right);
        }
        // as in Python: a tuple has one argument per conversion, any other value is the only argument
        let args = if right.is_tuple() { right.try_iter()?.collect() } else { vec![right] };
        meter.charge_operation(Cost::Format, &[core::slice::from_ref(&left), &args].concat())?;
        let args = args.into_iter().map(ValueOrKwargs::from).collect();
        meter.charge_result(filters::format(state, &left, Rest(args))?)
    });
    let meter = budget.clone();
    env.set_formatter(move |out, state, value| {
        meter.charge_deep(value, 0)?;
        minijinja::escape_formatter(out, state, value)
    });
}

fn failed<T>(what: &'static str) -> Result<T, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, what))
}

/// `left % right` of numbers as in Python: the result has the sign of the divisor.
fn remainder(left: &Value, right: &Value) -> Result<Value, Error> {
    if !(left.is_number() && right.is_number()) {
        return failed("%: expected two numbers, or a format string and its arguments");
    }
    if left.is_integer() && right.is_integer() {
        let (left, right) = (i128::try_from(left.clone())?, i128::try_from(right.clone())?);
        let Some(rest) = left.checked_rem(right) else { return failed("% by zero") };
        return Ok(Value::from(if rest != 0 && (rest < 0) != (right < 0) { rest + right } else { rest }));
    }
    let (left, right) = (f64::try_from(left.clone())?, f64::try_from(right.clone())?);
    if right == 0.0 {
        return failed("% by zero");
    }
    let rest = left % right;
    Ok(Value::from(if rest != 0.0 && (rest < 0.0) != (right < 0.0) { rest + right } else { rest }))
}

/// `value[start:stop:step]`, as in Python.
fn slice(value: &Value, bounds: [Value; 3]) -> Result<Value, Error> {
    let mut numbers = [None; 3];
    for (number, bound) in numbers.iter_mut().zip(bounds) {
        *number = if bound.is_none() { None } else { Some(i64::try_from(bound)?) };
    }
    let [start, stop, step] = numbers;
    let step = step.unwrap_or(1);
    if step == 0 {
        return failed("cannot slice by a step of 0");
    }
    let indices = |len: usize| {
        let len = len as i64;
        // with a negative step, the position before the first element is -1
        let (low, high) = if step > 0 { (0, len) } else { (-1, len - 1) };
        let place = |bound: Option<i64>, default: i64| match bound {
            None => default,
            Some(at) if at < 0 => at.saturating_add(len).clamp(low, high),
            Some(at) => at.clamp(low, high),
        };
        let (first, last) = if step > 0 { (low, high) } else { (high, low) };
        let (mut at, stop) = (place(start, first), place(stop, last));
        core::iter::from_fn(move || {
            let inside = if step > 0 { at < stop } else { at > stop };
            let next = at.saturating_add(step);
            inside.then(|| core::mem::replace(&mut at, next) as usize)
        })
    };
    match (value.as_str(), value.kind()) {
        (Some(text), _) => {
            let chars: Vec<char> = text.chars().collect();
            Ok(Value::from(indices(chars.len()).filter_map(|i| chars.get(i)).collect::<String>()))
        }
        (_, ValueKind::Undefined) => Ok(Value::from(Vec::<Value>::new())),
        (_, ValueKind::Seq | ValueKind::Iterable) => {
            let items: Vec<Value> = value.try_iter()?.collect();
            let part: Vec<Value> = indices(items.len()).filter_map(|i| items.get(i).cloned()).collect();
            Ok(if value.is_tuple() { Value::from(Tuple::from(part)) } else { Value::from(part) })
        }
        // as in jinja2, for what cannot be sliced
        _ => Ok(Value::UNDEFINED),
    }
}

/// Filter slot that is not cached.
const UNCACHED: u8 = !0;

/// The same program with the operators instrumented.
pub(super) fn instrument<'s>(program: &Instructions<'s>) -> Instructions<'s> {
    let metered = |filter: &'static str, op: &Instruction<'s>| {
        vec![Instruction::ApplyFilter(filter, Some(2), UNCACHED), Instruction::UnpackList(2), op.clone()]
    };
    let rewritten = |op: &Instruction<'s>| match op {
        Instruction::EmitRaw(text) => vec![Instruction::LoadConst(Value::from(*text)), Instruction::Emit],
        Instruction::SetAttr(_) => metered("~set", op),
        Instruction::BuildList(_) | Instruction::BuildTuple(_) | Instruction::BuildMap(_) => {
            vec![op.clone(), Instruction::ApplyFilter("~result", Some(1), UNCACHED)]
        }
        Instruction::Rem => vec![Instruction::ApplyFilter("~rem", Some(2), UNCACHED)],
        Instruction::Slice => vec![Instruction::ApplyFilter("~slice", Some(4), UNCACHED)],
        Instruction::Add => metered("~add", op),
        Instruction::Mul => metered("~repeat", op),
        Instruction::StringConcat
        | Instruction::Eq
        | Instruction::Ne
        | Instruction::Gt
        | Instruction::Gte
        | Instruction::Lt
        | Instruction::Lte
        | Instruction::In
        | Instruction::CompareAndPreserve(_) => metered("~deep", op),
        _ => vec![op.clone()],
    };
    let ops = || (0..).map_while(|at| program.get(at).map(|op| (at, op)));
    let mut starts = vec![0];
    starts.extend(ops().scan(0, |at, (_, op)| {
        *at += rewritten(op).len() as u32;
        Some(*at)
    }));
    let target = |at: &mut u32| *at = starts.get(*at as usize).copied().unwrap_or(*at);
    let mut out = Instructions::new(program.name(), program.source());
    for (at, op) in ops() {
        for mut op in rewritten(op) {
            match &mut op {
                Instruction::Iterate(to)
                | Instruction::Jump(to)
                | Instruction::JumpIfFalse(to)
                | Instruction::JumpIfFalseOrPop(to)
                | Instruction::JumpIfTrueOrPop(to)
                | Instruction::BuildMacro(_, to, _) => target(to),
                _ => {}
            }
            match program.get_line(at) {
                Some(line) => out.add_with_line(op, line as u16),
                None => out.add(op),
            };
        }
    }
    out
}

//! The parser of GBNF, with the syntax of llama.cpp's `llama-grammar.cpp`.

use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;
use core::mem;
use core::ops::Range;

use super::chars::CharSet;

/// Maximum nesting of groups and repetitions.
const MAX_DEPTH: usize = 64;
/// Maximum count of a repetition, llama.cpp's.
const MAX_COUNT: u32 = 2000;

/// Index of an expression in [`Grammar::exprs`].
pub(super) type Id = usize;

/// What a rule matches.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Expr {
    /// One character.
    Char(CharSet),
    /// The rule with this index.
    Rule(usize),
    /// All of these, in order; nothing if there are none.
    Sequence(Vec<Id>),
    /// One of these.
    Choice(Vec<Id>),
    /// This, at least and at most so many times.
    Repeat(Id, u32, Option<u32>),
}

/// A parsed grammar.
#[derive(Debug, Default)]
pub(super) struct Grammar {
    /// All expressions; parts before the expressions that contain them.
    pub(super) exprs: Vec<Expr>,
    /// The expression of each rule.
    pub(super) rules: Vec<Id>,
    /// The expressions of each rule, all its parts included.
    pub(super) rule_exprs: Vec<Range<Id>>,
    /// Index of the rule `root`.
    pub(super) root: usize,
}

/// Parses a grammar.
///
/// # Errors
/// The line, and what is wrong there.
pub(super) fn parse(text: &str) -> Result<Grammar, String> {
    let mut parser = Parser { rest: text, line: 1, exprs: Vec::new(), rules: Vec::new(), names: BTreeMap::new() };
    parser.grammar().map_err(|message| match parser.line {
        0 => message,
        line => format!("line {line}: {message}"),
    })
}

struct Parser<'a> {
    rest: &'a str,
    /// Line of `rest`; 0 for errors that concern the whole.
    line: usize,
    exprs: Vec<Expr>,
    /// Expressions of each rule that is defined or named, and the line where it was named first.
    rules: Vec<(Option<Range<Id>>, usize)>,
    names: BTreeMap<&'a str, usize>,
}

impl<'a> Parser<'a> {
    fn grammar(&mut self) -> Result<Grammar, String> {
        self.space(true);
        while !self.rest.is_empty() {
            self.rule()?;
        }
        let missing = self.names.iter().find(|(_, rule)| self.rules[**rule].0.is_none());
        if let Some((name, rule)) = missing {
            self.line = self.rules[*rule].1;
            return Err(format!("the rule `{name}` is not defined"));
        }
        self.line = 0;
        let root = self.names.get("root").ok_or("there is no rule `root`")?;
        let rule_exprs: Vec<_> = self.rules.iter().filter_map(|(exprs, _)| exprs.clone()).collect();
        let rules = rule_exprs.iter().map(|exprs| exprs.end - 1).collect();
        Ok(Grammar { exprs: mem::take(&mut self.exprs), rules, rule_exprs, root: *root })
    }

    /// `name ::= choice`, to the end of the line. A later definition of a name replaces the one before.
    fn rule(&mut self) -> Result<(), String> {
        let rule = self.name().ok_or_else(|| format!("found {}, expected the name of a rule", self.found()))?;
        self.space(false);
        if !self.take("::=") {
            return Err(format!("found {}, expected `::=`", self.found()));
        }
        self.space(true);
        let first = self.exprs.len();
        let last = self.choice(0)?;
        self.rules[rule].0 = Some(first..last + 1);
        if !self.rest.is_empty() && !self.rest.starts_with(['\n', '\r']) {
            return Err(format!("found {}, expected the end of the line", self.found()));
        }
        self.space(true);
        Ok(())
    }

    fn choice(&mut self, depth: usize) -> Result<Id, String> {
        if depth > MAX_DEPTH {
            return Err(format!("more than {MAX_DEPTH} nested groups"));
        }
        let mut parts = vec![self.sequence(depth)?];
        while self.take("|") {
            self.space(true);
            parts.push(self.sequence(depth)?);
        }
        Ok(if let [part] = parts[..] { part } else { self.add(Expr::Choice(parts)) })
    }

    fn sequence(&mut self, depth: usize) -> Result<Id, String> {
        let is_nested = depth > 0;
        let mut parts = Vec::new();
        // repetitions of the last part
        let mut n_repeats = 0;
        loop {
            if let Some((least, most)) = self.repetition(is_nested)? {
                let Some(part) = parts.pop() else {
                    return Err("found a repetition, expected what is repeated before it".into());
                };
                n_repeats += 1;
                if n_repeats + depth > MAX_DEPTH {
                    return Err(format!("more than {MAX_DEPTH} nested repetitions"));
                }
                parts.push(self.add(Expr::Repeat(part, least, most)));
                self.space(is_nested);
                continue;
            }
            let Some(part) = self.item(depth)? else { break };
            n_repeats = 0;
            parts.push(part);
            self.space(is_nested);
        }
        Ok(if let [part] = parts[..] { part } else { self.add(Expr::Sequence(parts)) })
    }

    /// A text, a set of characters, a rule or a group; `None` if none follows.
    fn item(&mut self, depth: usize) -> Result<Option<Id>, String> {
        let expr = if self.take("\"") {
            let mut parts = Vec::new();
            while !self.take("\"") {
                let c = self.char()?;
                parts.push(self.add(Expr::Char(CharSet::one(c))));
            }
            Expr::Sequence(parts)
        } else if self.take("[") {
            Expr::Char(self.set()?)
        } else if self.take(".") {
            Expr::Char(CharSet::any())
        } else if self.take("(") {
            self.space(true);
            let group = self.choice(depth + 1)?;
            if !self.take(")") {
                return Err(format!("found {}, expected `)`", self.found()));
            }
            return Ok(Some(group));
        } else if self.rest.starts_with('<') || self.rest.starts_with("!<") {
            return Err("tokens (`<...>`) are not supported, expected texts, sets of characters and rules".into());
        } else {
            let Some(rule) = self.name() else { return Ok(None) };
            Expr::Rule(rule)
        };
        Ok(Some(self.add(expr)))
    }

    /// The characters of a set after `[`.
    fn set(&mut self) -> Result<CharSet, String> {
        let is_negated = self.take("^");
        let mut ranges = Vec::new();
        while !self.take("]") {
            let low = self.char()?;
            let high = if self.rest.starts_with('-') && !self.rest.starts_with("-]") {
                self.take("-");
                self.char()?
            } else {
                low
            };
            if high < low {
                return Err(format!("the range from {low:?} to {high:?} is empty"));
            }
            ranges.push((low.into(), high.into()));
        }
        if ranges.is_empty() {
            return Err("found an empty set of characters, expected at least one".into());
        }
        let set = CharSet::of(ranges);
        Ok(if is_negated { set.complement() } else { set })
    }

    /// A character or an escape, in a text or set.
    fn char(&mut self) -> Result<char, String> {
        let mut chars = self.rest.chars();
        let unterminated = "the text or set of characters does not end";
        match chars.next().ok_or(unterminated)? {
            '\\' => {}
            c => {
                self.line += usize::from(c == '\n');
                self.rest = chars.as_str();
                return Ok(c);
            }
        }
        let escaped = chars.next().ok_or(unterminated)?;
        let rest = chars.as_str();
        let digits = match escaped {
            'x' => 2,
            'u' => 4,
            'U' => 8,
            _ => 0,
        };
        let c = match escaped {
            't' => '\t',
            'r' => '\r',
            'n' => '\n',
            '\\' | '"' | '[' | ']' => escaped,
            'x' | 'u' | 'U' => rest
                .get(..digits)
                .filter(|digits| digits.bytes().all(|b| b.is_ascii_hexdigit()))
                .and_then(|digits| char::from_u32(u32::from_str_radix(digits, 16).ok()?))
                .ok_or_else(|| format!("found `\\{escaped}`, expected {digits} hex digits of a character after it"))?,
            _ => return Err(format!("unknown escape `\\{escaped}`")),
        };
        self.rest = &rest[digits..];
        Ok(c)
    }

    /// `*`, `+`, `?`, `{n}`, `{n,}` or `{n,m}`.
    fn repetition(&mut self, is_nested: bool) -> Result<Option<(u32, Option<u32>)>, String> {
        for (mark, least, most) in [("*", 0, None), ("+", 1, None), ("?", 0, Some(1))] {
            if self.take(mark) {
                return Ok(Some((least, most)));
            }
        }
        if !self.take("{") {
            return Ok(None);
        }
        self.space(is_nested);
        let least = self.count()?.ok_or_else(|| format!("found {}, expected a number", self.found()))?;
        self.space(is_nested);
        let mut most = Some(least);
        if self.take(",") {
            self.space(is_nested);
            most = self.count()?;
            self.space(is_nested);
        }
        if !self.take("}") {
            return Err(format!("found {}, expected `}}`", self.found()));
        }
        if let Some(most) = most.filter(|most| *most < least) {
            return Err(format!("found {{{least},{most}}}, expected a maximum of at least {least}"));
        }
        Ok(Some((least, most)))
    }

    fn count(&mut self) -> Result<Option<u32>, String> {
        let n = self.rest.bytes().take_while(u8::is_ascii_digit).count();
        let (digits, rest) = self.rest.split_at(n);
        if digits.is_empty() {
            return Ok(None);
        }
        let count = digits.parse().ok().filter(|count| *count <= MAX_COUNT);
        self.rest = rest;
        count.map(Some).ok_or_else(|| format!("found {digits} repetitions, expected at most {MAX_COUNT}"))
    }

    /// The rule with the name that follows.
    fn name(&mut self) -> Option<usize> {
        let n = self.rest.bytes().take_while(|b| b.is_ascii_alphanumeric() || *b == b'-').count();
        let (name, rest) = self.rest.split_at(n);
        if name.is_empty() {
            return None;
        }
        self.rest = rest;
        let new = self.rules.len();
        let rule = *self.names.entry(name).or_insert(new);
        if rule == new {
            self.rules.push((None, self.line));
        }
        Some(rule)
    }

    /// Skips spaces, comments, and line ends if `with_lines`.
    fn space(&mut self, with_lines: bool) {
        loop {
            let c = self.rest.chars().next();
            match c {
                Some('#') => self.rest = &self.rest[self.rest.find(['\n', '\r']).unwrap_or(self.rest.len())..],
                Some(' ' | '\t') => self.rest = &self.rest[1..],
                Some('\n' | '\r') if with_lines => {
                    self.line += usize::from(c == Some('\n'));
                    self.rest = &self.rest[1..];
                }
                _ => return,
            }
        }
    }

    fn take(&mut self, text: &str) -> bool {
        let rest = self.rest.strip_prefix(text);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    fn add(&mut self, expr: Expr) -> Id {
        self.exprs.push(expr);
        self.exprs.len() - 1
    }

    /// The next character, for messages.
    fn found(&self) -> String {
        match self.rest.chars().next() {
            None => "the end".into(),
            Some('\n' | '\r') => "the end of the line".into(),
            Some(c) => format!("`{c}`"),
        }
    }
}

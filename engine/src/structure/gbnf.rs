//! Grammars in llama.cpp's GBNF as Lark's syntax.
//! Source: <https://github.com/ggml-org/llama.cpp/blob/master/grammars/README.md>.
//!
//! Each terminal of the result is one character, because `llguidance` takes the longest match of a terminal and GBNF has no
//! terminals: so both grammars have the same texts.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt::Write;

use super::{StructureError, invalid};

/// Groups within groups, at most.
const MAX_DEPTH: usize = 64;
/// Repetitions of a symbol, at most, as in llama.cpp.
const MAX_REPEAT: u32 = 2000;

/// Translates a grammar. `max_bytes` bounds the result.
///
/// # Errors
/// What is wrong or cannot be translated.
pub(super) fn to_lark(text: &str, max_bytes: usize) -> Result<String, StructureError> {
    let mut parser = Parser { rest: text, n_groups: 0, names: BTreeMap::new(), out: String::new(), max_bytes };
    parser.grammar()?;
    Ok(parser.out)
}

struct Parser<'a> {
    rest: &'a str,
    n_groups: usize,
    /// Index of each rule that was named.
    names: BTreeMap<&'a str, usize>,
    out: String,
    max_bytes: usize,
}

fn wrong(what: &str, at: &str) -> StructureError {
    let line: String = at.lines().next().unwrap_or_default().chars().take(40).collect();
    invalid(&format!("{what} at `{line}`"))
}

impl<'a> Parser<'a> {
    fn grammar(&mut self) -> Result<(), StructureError> {
        let mut defined = BTreeSet::new();
        self.space(true);
        while !self.rest.is_empty() {
            let at = self.rest;
            let name = self.name().ok_or_else(|| wrong("expected a rule `name ::= ...`", at))?;
            self.space(false);
            self.expect("::=")?;
            self.space(true);
            if !defined.insert(name) {
                return Err(invalid(&format!("has two rules of the name `{name}`")));
            }
            let own = self.rule_name(name);
            let body = self.alternatives(0)?;
            self.rule(&own, &body)?;
            if !self.rest.is_empty() && !self.rest.starts_with(['\n', '\r']) {
                return Err(wrong("expected the end of a rule", self.rest));
            }
            self.space(true);
        }
        if let Some((name, _)) = self.names.iter().find(|(name, _)| !defined.contains(*name)) {
            return Err(invalid(&format!("has no rule of the name `{name}`")));
        }
        if !defined.contains("root") {
            return Err(invalid("has no rule of the name `root`"));
        }
        Ok(())
    }

    fn rule(&mut self, name: &str, body: &str) -> Result<(), StructureError> {
        let found = self.out.len() + name.len() + body.len() + 3;
        if found > self.max_bytes {
            return Err(StructureError::TooLong { found, most: self.max_bytes });
        }
        let _ = writeln!(self.out, "{name}: {body}");
        Ok(())
    }

    /// Name of a rule in Lark: lower-case letters and digits.
    fn rule_name(&mut self, name: &'a str) -> String {
        if name == "root" {
            return "start".into();
        }
        let next = self.names.len();
        format!("rule_{}", self.names.entry(name).or_insert(next))
    }

    /// Skips white space and comments, newlines too if `newlines`.
    fn space(&mut self, newlines: bool) {
        loop {
            let rest =
                self.rest.trim_start_matches(|c| matches!(c, ' ' | '\t') || newlines && matches!(c, '\n' | '\r'));
            let end = if rest.starts_with('#') { rest.find(['\n', '\r']).unwrap_or(rest.len()) } else { 0 };
            self.rest = &rest[end..];
            if end == 0 {
                return;
            }
        }
    }

    fn name(&mut self) -> Option<&'a str> {
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        let end = self.rest.find(|c| !is_name(c)).unwrap_or(self.rest.len());
        let (name, rest) = self.rest.split_at(end);
        self.rest = rest;
        (!name.is_empty()).then_some(name)
    }

    fn expect(&mut self, text: &str) -> Result<(), StructureError> {
        match self.rest.strip_prefix(text) {
            Some(rest) => {
                self.rest = rest;
                Ok(())
            }
            None => Err(wrong(&format!("expected `{text}`"), self.rest)),
        }
    }

    fn alternatives(&mut self, depth: usize) -> Result<String, StructureError> {
        let mut all = self.sequence(depth)?;
        while let Some(rest) = self.rest.strip_prefix('|') {
            self.rest = rest;
            self.space(true);
            all += " | ";
            all += &self.sequence(depth)?;
        }
        Ok(all)
    }

    fn sequence(&mut self, depth: usize) -> Result<String, StructureError> {
        let mut symbols: Vec<String> = Vec::new();
        let mut n_bytes = 0;
        loop {
            let at = self.rest;
            let mut symbol = match self.rest.chars().next() {
                Some('"') => self.literal()?,
                Some('[') => self.class()?,
                Some('.') => {
                    self.rest = &self.rest[1..];
                    r"/[\x{0}-\x{10FFFF}]/".into()
                }
                Some('(') => self.group(depth)?,
                Some('<' | '!') => return Err(wrong("refers to tokens, which is not supported,", at)),
                _ => match self.name() {
                    Some(name) => self.rule_name(name),
                    None => break,
                },
            };
            self.space(depth > 0);
            if let Some(operator) = self.operator()? {
                if symbol.contains(' ') {
                    symbol = format!("({symbol})");
                }
                symbol = if operator == "{0,0}" { r#""""#.into() } else { symbol + &operator };
                self.space(depth > 0);
                if self.rest.starts_with(['*', '+', '?', '{']) {
                    return Err(wrong("has two operators on a symbol", at));
                }
            }
            n_bytes += symbol.len();
            if n_bytes > self.max_bytes {
                return Err(StructureError::TooLong { found: n_bytes, most: self.max_bytes });
            }
            symbols.push(symbol);
        }
        // an empty alternative is the empty text
        Ok(if symbols.is_empty() { r#""""#.into() } else { symbols.join(" ") })
    }

    /// A group, as a rule of its own.
    fn group(&mut self, depth: usize) -> Result<String, StructureError> {
        if depth >= MAX_DEPTH {
            return Err(invalid(&format!("has groups nested deeper than {MAX_DEPTH}")));
        }
        self.expect("(")?;
        self.space(true);
        let body = self.alternatives(depth + 1)?;
        self.expect(")")?;
        let name = format!("group_{}", self.n_groups);
        self.n_groups += 1;
        self.rule(&name, &body)?;
        Ok(name)
    }

    /// An operator that repeats the symbol before it.
    fn operator(&mut self) -> Result<Option<String>, StructureError> {
        let at = self.rest;
        let first = match self.rest.chars().next() {
            Some(c @ ('*' | '+' | '?')) => {
                self.rest = &self.rest[1..];
                return Ok(Some(c.to_string()));
            }
            Some('{') => self.rest[1..].split_once('}'),
            _ => return Ok(None),
        };
        let (range, rest) = first.ok_or_else(|| wrong("expected `}`", at))?;
        self.rest = rest;
        let number = |text: &str| match text.trim().parse::<u32>() {
            Ok(n) if n <= MAX_REPEAT => Ok(n),
            _ => Err(wrong(&format!("expected a number of repetitions from 0 to {MAX_REPEAT}"), at)),
        };
        let operator = match range.split_once(',') {
            None => {
                let n = number(range)?;
                format!("{{{n},{n}}}")
            }
            Some((from, to)) if to.trim().is_empty() => match number(from)? {
                0 => "*".into(),
                1 => "+".into(),
                n => format!("{{{n},}}"),
            },
            Some((from, to)) => {
                let (from, to) = (number(from)?, number(to)?);
                if from > to {
                    return Err(wrong("expected a range of repetitions from low to high", at));
                }
                format!("{{{from},{to}}}")
            }
        };
        Ok(Some(operator))
    }

    /// A literal as its characters.
    fn literal(&mut self) -> Result<String, StructureError> {
        let at = self.rest;
        self.rest = &self.rest[1..];
        let mut all = String::new();
        loop {
            if let Some(rest) = self.rest.strip_prefix('"') {
                self.rest = rest;
                break;
            }
            let c = self.character(at)?;
            if !all.is_empty() {
                all.push(' ');
            }
            let is_plain = c.is_ascii_graphic() && c != '"' && c != '\\' || c == ' ';
            let _ = if is_plain { write!(all, "\"{c}\"") } else { write!(all, "/\\x{{{:X}}}/", u32::from(c)) };
        }
        Ok(if all.is_empty() { r#""""#.into() } else { all })
    }

    /// A class of characters as a regular expression.
    fn class(&mut self) -> Result<String, StructureError> {
        let at = self.rest;
        self.rest = &self.rest[1..];
        let mut all = String::from("/[");
        if let Some(rest) = self.rest.strip_prefix('^') {
            self.rest = rest;
            all.push('^');
        }
        let mut is_empty = true;
        loop {
            if let Some(rest) = self.rest.strip_prefix(']') {
                self.rest = rest;
                break;
            }
            is_empty = false;
            let low = self.character(at)?;
            let _ = write!(all, "\\x{{{:X}}}", u32::from(low));
            // a hyphen before the end is itself
            if let Some(rest) = self.rest.strip_prefix('-').filter(|rest| !rest.starts_with(']')) {
                self.rest = rest;
                let high = self.character(at)?;
                if high < low {
                    return Err(wrong("has a range of characters from high to low", at));
                }
                let _ = write!(all, "-\\x{{{:X}}}", u32::from(high));
            }
        }
        if is_empty {
            return Err(wrong("has an empty class of characters", at));
        }
        Ok(all + "]/")
    }

    /// A character of a literal or class; `at` is its beginning, for errors.
    fn character(&mut self, at: &str) -> Result<char, StructureError> {
        let mut chars = self.rest.chars();
        let unclosed = || wrong("has a literal or class without an end", at);
        let first = chars.next().ok_or_else(unclosed)?;
        if first != '\\' {
            self.rest = chars.as_str();
            return Ok(first);
        }
        let escape = chars.next().ok_or_else(unclosed)?;
        self.rest = chars.as_str();
        let n_digits = match escape {
            'n' => return Ok('\n'),
            'r' => return Ok('\r'),
            't' => return Ok('\t'),
            '\\' | '"' | '[' | ']' => return Ok(escape),
            'x' => 2,
            'u' => 4,
            'U' => 8,
            _ => return Err(wrong(&format!("has the unknown escape `\\{escape}`"), at)),
        };
        let digits = self.rest.get(..n_digits).filter(|digits| digits.bytes().all(|b| b.is_ascii_hexdigit()));
        let code = digits.and_then(|digits| u32::from_str_radix(digits, 16).ok()).and_then(char::from_u32);
        let code = code.ok_or_else(|| wrong(&format!("expected {n_digits} hexadecimal digits of a character"), at))?;
        self.rest = &self.rest[n_digits..];
        Ok(code)
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::match_text;
    use super::super::{Form, gbnf};
    use super::*;

    const ARITHMETIC: &str = r#"
        root ::= (sum "=" ws number "\n")+
        sum ::= product ([-+] ws product)*   # left to right
        product ::= atom ([*/] ws atom)*
        atom ::= number | name | "(" ws sum ")" ws
        name ::= [a-z] [a-z0-9_]* ws
        number ::= [0-9]+ ws
        ws ::= [ \t\n]*
    "#;
    const LIST: &str =
        "root ::= item+\n# an item a line\nitem ::= \"- \" [^\\r\\n\\x0b\\x0c\\x85\\u2028\\u2029]+ \"\\n\"";
    const JSON: &str = r#"
        root ::= object
        value ::= object | array | string | number | ("true" | "false" | "null") ws
        object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
        array ::= "[" ws ( value ("," ws value)* )? "]" ws
        string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
        number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
        ws ::= | " " | "\n" [ \t]{0,20}
    "#;
    const MOVES: &str = r#"
        root ::= "1. " move " " move "\n" ([1-9] [0-9]? ". " move " " move "\n")+
        move ::= (pawn | piece | "O-O" "-O"?) [+#]?
        piece ::= [NBKQR] [a-h]? [1-8]? "x"? [a-h] [1-8]
        pawn ::= ([a-h] "x")? [a-h] [1-8] ("=" [NBKQR])?
    "#;

    #[test]
    fn grammars_have_the_same_texts() {
        for (grammar, text, expected) in [
            (ARITHMETIC, "(x + 2)*y1 = 3\n", Some(true)),
            (ARITHMETIC, "x = 3\n", Some(true)),
            (ARITHMETIC, "x +", Some(false)),
            (ARITHMETIC, "x = y", None),
            (LIST, "- a\n- é ü\n", Some(true)),
            (LIST, "- a\n-", Some(false)),
            (LIST, "* a", None),
            (LIST, "- \u{2028}", None),
            (JSON, "{\"a\": [1, -2.5e+1, \"é\\n\\u00e9\"], \"b\": {}}", Some(true)),
            (JSON, "{\"a\":", Some(false)),
            (JSON, "{\"a\": 01}", None),
            (JSON, "{\"a\": tru}", None),
            (MOVES, "1. e4 e5\n2. Nf3 Nc6\n", Some(true)),
            (MOVES, "1. e4 O-O-O+\n2. exd5=Q", Some(false)),
            (MOVES, "1. e9", None),
            // literals that begin alike, and a class with a literal in it
            ("root ::= \"a\" \"bc\" | \"ab\" \"d\"", "abc", Some(true)),
            ("root ::= \"a\" \"bc\" | \"ab\" \"d\"", "abd", Some(true)),
            ("root ::= [a-z]* \"end\"", "xendend", Some(true)),
            ("root ::= [a-z]* \"end\"", "xen", Some(false)),
            ("root ::= a-B a_B\na-B ::= \"x\"\na_B ::= \"y\"", "xy", Some(true)),
            ("root ::= \"ab\"{2} . \"\\\"\\\\/\"?", "ababé\"\\/", Some(true)),
            ("root ::= \"ab\"{2,3} \"c\"", "ababababc", None),
            ("root ::= \"ab\"{2,} \"c\"", "ababababc", Some(true)),
            ("root ::= (\"a\" |\n \"b\"\n)+ \"-\"", "abba-", Some(true)),
            ("root ::= [a\\]-]+ \".\"", "a-].", Some(true)),
            ("root ::= root \"a\" | \"b\"", "baa", Some(true)),
        ] {
            assert_eq!(match_text(&Form::Lark(grammar.into(), Vec::new()), text), expected, "{grammar}\n{text}");
        }
    }

    #[test]
    fn errors_name_what_is_wrong() {
        let nested = format!("root ::= {}\"a\"{}", "(".repeat(65), ")".repeat(65));
        for (grammar, message) in [
            ("root ::= absent", "no rule of the name `absent`"),
            ("other ::= \"a\"", "no rule of the name `root`"),
            ("root ::= \"a\"\nroot ::= \"b\"", "two rules of the name `root`"),
            ("root ::= <think> \"a\"", "tokens"),
            ("root ::= \"a", "without an end"),
            ("root ::= [a", "without an end"),
            ("root ::= []", "empty class"),
            ("root ::= [z-a]", "from high to low"),
            ("root ::= \"\\q\"", "unknown escape"),
            ("root ::= \"\\uD800\"", "4 hexadecimal digits"),
            ("root ::= \"a\"{3,2}", "from low to high"),
            ("root ::= \"a\"{9999}", "from 0 to 2000"),
            ("root ::= \"a\"**", "two operators"),
            ("root ::= (\"a\"", "expected `)`"),
            ("root ::= \"a\" )", "end of a rule"),
            ("root = \"a\"", "expected `::=`"),
            (nested.as_str(), "deeper than 64"),
        ] {
            let error = gbnf::to_lark(grammar, 1 << 16).expect_err("an error").to_string();
            assert!(error.contains(message), "{grammar}: {error}");
        }
        let long = format!("root ::= \"{}\"", "a".repeat(1 << 15));
        assert!(matches!(to_lark(&long, 1 << 16), Err(StructureError::TooLong { .. })));
    }
}

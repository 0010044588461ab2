//! Writes a grammar in Lark.

use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::fmt::Write;

use super::chars::CharSet;
use super::lexemes::{Lexeme, Lexemes, Node};
use super::parse::{Expr, Grammar, Id};

/// Maximum bytes of the translation.
const MAX_BYTES: usize = 1 << 20;
/// Maximum bytes that are written for it: equal lexemes are written, and then found to be known.
const MAX_WRITTEN: usize = 8 << 20;

/// The grammar in Lark: `start`, the rules `r0`, `r1` ... and the lexemes `T0`, `T1` ...
///
/// # Errors
/// If the text is too long.
pub(super) fn lark(grammar: &Grammar, lexemes: &Lexemes) -> Result<String, String> {
    let mut text = format!("start: r{}\n", grammar.root);
    // the name of each lexeme; equal ones have one name
    let (mut names, mut known, mut written) = (Vec::new(), BTreeMap::new(), 0);
    for lexeme in &lexemes.lexemes {
        let mut regex = Regex { grammar, is_nullable: &lexemes.is_nullable, text: String::new() };
        regex.lexeme(lexeme)?;
        written += regex.text.len();
        let new = known.len();
        let name = *known.entry(regex.text.clone()).or_insert(new);
        if name == new {
            let _ = writeln!(text, "T{name}: /{}/", regex.text);
        }
        names.push(name);
        if text.len() > MAX_BYTES || written > MAX_WRITTEN {
            return Err(too_long());
        }
    }
    for (rule, node) in &lexemes.rules {
        let _ = write!(text, "r{rule}: ");
        print_node(node, &names, &mut text);
        text.push('\n');
    }
    Ok(text)
}

fn too_long() -> String {
    format!("the grammar has more than {MAX_BYTES} bytes with its rules written out")
}

/// Writes a node; `names` are the numbers in the names of lexemes.
fn print_node(node: &Node, names: &[usize], text: &mut String) {
    let list = |parts: &[Node], separator: &str, text: &mut String| {
        text.push('(');
        for (i, part) in parts.iter().enumerate() {
            text.push_str(if i == 0 { "" } else { separator });
            print_node(part, names, text);
        }
        text.push(')');
    };
    match node {
        Node::Empty => text.push_str("\"\""),
        Node::Lexeme(i) => _ = write!(text, "T{}", names[*i]),
        Node::Rule(rule) => _ = write!(text, "r{rule}"),
        Node::Sequence(parts) => list(parts, " ", text),
        Node::Choice(parts) => list(parts, " | ", text),
        Node::Repeat(part, least, most) => {
            text.push('(');
            print_node(part, names, text);
            text.push(')');
            print_count(*least, *most, text);
        }
    }
}

fn print_count(least: u32, most: Option<u32>, text: &mut String) {
    let _ = match (least, most) {
        (0, None) => write!(text, "*"),
        (1, None) => write!(text, "+"),
        (0, Some(1)) => write!(text, "?"),
        (least, Some(most)) if least == most => write!(text, "{{{least}}}"),
        (least, None) => write!(text, "{{{least},}}"),
        (least, Some(most)) => write!(text, "{{{least},{most}}}"),
    };
}

struct Regex<'a> {
    grammar: &'a Grammar,
    is_nullable: &'a [bool],
    text: String,
}

impl Regex<'_> {
    fn lexeme(&mut self, lexeme: &Lexeme) -> Result<(), String> {
        match lexeme.is_choice {
            true => self.choice(&lexeme.parts, true),
            false => self.sequence(&lexeme.parts, true),
        }
    }

    /// An expression; only its non-empty texts if `is_some`.
    fn expr(&mut self, id: Id, is_some: bool) -> Result<(), String> {
        if self.text.len() > MAX_BYTES {
            return Err(too_long());
        }
        let is_some = is_some && self.is_nullable[id];
        let grammar = self.grammar;
        match &grammar.exprs[id] {
            Expr::Char(set) => self.char(set),
            Expr::Rule(rule) => self.expr(grammar.rules[*rule], is_some)?,
            Expr::Sequence(parts) => self.sequence(parts, is_some)?,
            Expr::Choice(parts) => self.choice(parts, is_some)?,
            Expr::Repeat(part, least, most) => {
                // a non-empty text has a non-empty part, and the other parts may be empty
                let (first, most) =
                    if is_some { (true, most.map(|most| most.saturating_sub(1))) } else { (false, *most) };
                if first {
                    self.expr(*part, true)?;
                }
                let least = if first { 0 } else { *least };
                if most != Some(0) {
                    self.text.push_str("(?:");
                    self.expr(*part, false)?;
                    self.text.push(')');
                    print_count(least, most, &mut self.text);
                }
            }
        }
        Ok(())
    }

    fn sequence(&mut self, parts: &[Id], is_some: bool) -> Result<(), String> {
        if !is_some {
            return parts.iter().try_for_each(|part| self.expr(*part, false));
        }
        // by the first part that is not empty
        self.text.push_str("(?:");
        let mut is_first = true;
        for (i, part) in parts.iter().enumerate() {
            if self.may_be_some(*part) {
                self.text.push_str(if is_first { "" } else { "|" });
                is_first = false;
                self.expr(*part, true)?;
                self.sequence(&parts[i + 1..], false)?;
            }
            if !self.is_nullable[*part] {
                break;
            }
        }
        self.text.push(')');
        Ok(())
    }

    fn choice(&mut self, parts: &[Id], is_some: bool) -> Result<(), String> {
        self.text.push_str("(?:");
        let mut is_first = true;
        for part in parts {
            if is_some && !self.may_be_some(*part) {
                continue;
            }
            self.text.push_str(if is_first { "" } else { "|" });
            is_first = false;
            self.expr(*part, is_some)?;
        }
        self.text.push(')');
        Ok(())
    }

    /// Whether an expression matches a non-empty text.
    fn may_be_some(&self, id: Id) -> bool {
        match &self.grammar.exprs[id] {
            Expr::Char(_) => true,
            Expr::Rule(rule) => self.may_be_some(self.grammar.rules[*rule]),
            Expr::Sequence(parts) | Expr::Choice(parts) => parts.iter().any(|part| self.may_be_some(*part)),
            Expr::Repeat(part, _, most) => *most != Some(0) && self.may_be_some(*part),
        }
    }

    fn char(&mut self, set: &CharSet) {
        let end = |c: u32, text: &mut String| match char::from_u32(c) {
            Some(c) if c.is_ascii_alphanumeric() => text.push(c),
            _ => _ = write!(text, "\\x{{{c:x}}}"),
        };
        if let [(low, high)] = set.ranges()
            && low == high
        {
            return end(*low, &mut self.text);
        }
        self.text.push('[');
        for (low, high) in set.ranges() {
            end(*low, &mut self.text);
            if low < high {
                self.text.push('-');
                end(*high, &mut self.text);
            }
        }
        self.text.push(']');
    }
}

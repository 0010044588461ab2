//! Regular expressions in a grammar: expressions that refer to no recursive rule.

use alloc::vec;
use alloc::vec::Vec;

use super::parse::{Expr, Grammar, Id};

/// Maximum number of character sets in a lexeme, with the rules that it refers to written out.
const MAX_CHARS: usize = 2000;
/// Maximum nesting of a lexeme.
const MAX_HEIGHT: usize = 100;

/// Size of a regular expression with its rules written out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Size {
    /// Character sets.
    pub(super) chars: usize,
    height: usize,
}

impl Size {
    const NONE: Size = Size { chars: 0, height: 0 };

    /// The size of an expression with these parts; `None` if it is too large for a lexeme.
    pub(super) fn with(self, part: Size) -> Option<Size> {
        let (chars, height) = (self.chars + part.chars, self.height.max(part.height + 1));
        (chars <= MAX_CHARS && height <= MAX_HEIGHT).then_some(Size { chars, height })
    }
}

/// Rules that refer to no recursive rule, each after those that it refers to.
pub(super) fn regular_rules(grammar: &Grammar) -> Vec<usize> {
    let n = grammar.rules.len();
    let (mut n_missing, mut users) = (vec![0; n], vec![Vec::new(); n]);
    for (rule, ids) in grammar.rule_exprs.iter().cloned().enumerate() {
        for id in ids {
            if let Expr::Rule(used) = grammar.exprs[id] {
                n_missing[rule] += 1;
                users[used].push(rule);
            }
        }
    }
    let mut order: Vec<usize> = (0..n).filter(|rule| n_missing[*rule] == 0).collect();
    let mut next = 0;
    while let Some(rule) = order.get(next).copied() {
        next += 1;
        for user in &users[rule] {
            n_missing[*user] -= 1;
            if n_missing[*user] == 0 {
                order.push(*user);
            }
        }
    }
    order
}

/// Sizes of the expressions that may be lexemes: those of `rules`, and parts of other rules that refer to `rules` only.
/// `is_split` are expressions that may not.
pub(super) fn sizes(grammar: &Grammar, rules: &[usize], is_split: &[bool]) -> Vec<Option<Size>> {
    let mut sizes = vec![None; grammar.exprs.len()];
    let rule_exprs = &grammar.rule_exprs;
    let is_regular = {
        let mut regular = vec![false; rule_exprs.len()];
        rules.iter().for_each(|rule| regular[*rule] = true);
        regular
    };
    let others = (0..rule_exprs.len()).filter(|rule| !is_regular[*rule]);
    for rule in rules.iter().copied().chain(others) {
        for id in rule_exprs[rule].clone() {
            sizes[id] = if is_split[id] { None } else { size(grammar, &sizes, id) };
        }
    }
    sizes
}

fn size(grammar: &Grammar, sizes: &[Option<Size>], id: Id) -> Option<Size> {
    match &grammar.exprs[id] {
        Expr::Char(_) => Some(Size { chars: 1, height: 0 }),
        Expr::Rule(rule) => Size::NONE.with(sizes[grammar.rules[*rule]]?),
        Expr::Repeat(part, ..) => Size::NONE.with(sizes[*part]?),
        Expr::Sequence(parts) | Expr::Choice(parts) => {
            parts.iter().try_fold(Size::NONE, |sum, part| sum.with(sizes[*part]?))
        }
    }
}

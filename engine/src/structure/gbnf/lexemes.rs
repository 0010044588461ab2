//! Cuts the rules of a grammar into lexemes.

use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;

use super::Work;
use super::chars::Unions;
use super::first_follow::{by_first_byte, follow_sets};
use super::nfa::Nfa;
use super::parse::{Expr, Grammar, Id};
use super::regular::{Size, regular_rules, sizes};

/// Work of a translation: some 100 ms.
const MAX_WORK: usize = 10_000_000;
/// Number of times that lexemes are split before all become single characters.
const MAX_SPLITS: usize = 30;

/// A rule in lexemes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Node {
    /// The empty text.
    Empty,
    /// The lexeme with this index.
    Lexeme(usize),
    /// The rule with this index.
    Rule(usize),
    Sequence(Vec<Node>),
    Choice(Vec<Node>),
    Repeat(Box<Node>, u32, Option<u32>),
}

/// A lexeme: the non-empty texts of some expressions.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Lexeme {
    /// Whether it is one of the expressions, not all in order.
    pub(super) is_choice: bool,
    pub(super) parts: Vec<Id>,
    /// The expression that has these parts, or the only one.
    whole: Id,
}

/// The rules of a grammar in lexemes.
pub(super) struct Lexemes {
    pub(super) lexemes: Vec<Lexeme>,
    /// The rules that `root` needs, by their index.
    pub(super) rules: BTreeMap<usize, Node>,
    /// Whether each expression of the grammar matches the empty text.
    pub(super) is_nullable: Vec<bool>,
}

impl Lexemes {
    /// # Errors
    /// If the grammar is too complex.
    pub(super) fn new(grammar: &Grammar) -> Result<Lexemes, String> {
        Lexemes::with_unions(grammar, &mut Unions::default())
    }

    /// `unions` keeps the sets of characters of the analysis.
    pub(super) fn with_unions(grammar: &Grammar, unions: &mut Unions) -> Result<Lexemes, String> {
        let mut work = Work(MAX_WORK);
        let is_nullable = nullable(grammar, &mut work)?;
        let regular = regular_rules(grammar);
        let mut is_split = vec![false; grammar.exprs.len()];
        for n in 0.. {
            let sizes = sizes(grammar, &regular, &is_split);
            let cut = Cut { grammar, is_nullable: &is_nullable, sizes: &sizes, is_split: &is_split };
            let (lexemes, rules) = cut.rules(&mut work)?;
            let ambiguous = ambiguous(grammar, &is_nullable, &lexemes, &rules, unions, &mut work)?;
            if ambiguous.is_empty() {
                return Ok(Lexemes { lexemes, rules, is_nullable });
            }
            if n == MAX_SPLITS {
                is_split.fill(true);
            }
            ambiguous.into_iter().for_each(|i| split(grammar, &lexemes[i], &mut is_split));
        }
        unreachable!("single characters are not ambiguous")
    }
}

/// Keeps a lexeme from being made again.
fn split(grammar: &Grammar, lexeme: &Lexeme, is_split: &mut [bool]) {
    let mut id = lexeme.whole;
    while let Expr::Rule(rule) = grammar.exprs[id] {
        is_split[id] = true;
        id = grammar.rules[rule];
    }
    is_split[id] = true;
}

/// Whether each expression matches the empty text.
fn nullable(grammar: &Grammar, work: &mut Work) -> Result<Vec<bool>, String> {
    let mut is_nullable = vec![false; grammar.exprs.len()];
    loop {
        let mut changed = false;
        work.spend(grammar.exprs.len())?;
        // rules often come before those that they name
        for (id, expr) in grammar.exprs.iter().enumerate().rev() {
            let now = match expr {
                Expr::Char(_) => false,
                Expr::Rule(rule) => is_nullable[grammar.rules[*rule]],
                Expr::Sequence(parts) => parts.iter().all(|part| is_nullable[*part]),
                Expr::Choice(parts) => parts.iter().any(|part| is_nullable[*part]),
                Expr::Repeat(part, least, _) => *least == 0 || is_nullable[*part],
            };
            changed |= now != is_nullable[id];
            is_nullable[id] = now;
        }
        if !changed {
            return Ok(is_nullable);
        }
    }
}

/// Lexemes that continue a lexeme with a character that could also follow it.
fn ambiguous(
    grammar: &Grammar,
    is_nullable: &[bool],
    lexemes: &[Lexeme],
    rules: &BTreeMap<usize, Node>,
    unions: &mut Unions,
    work: &mut Work,
) -> Result<Vec<usize>, String> {
    if let [_] = lexemes {
        // one lexeme that is the whole text may be as long as it likes
        if rules.values().all(|node| matches!(node, Node::Lexeme(_))) {
            return Ok(Vec::new());
        }
    }
    let nfa = Nfa::new(grammar, lexemes, is_nullable, unions, work)?;
    let follow = follow_sets(rules, &nfa.first, unions, work)?;
    let follow = follow.iter().map(|set| by_first_byte(set, unions)).collect::<Result<Vec<_>, _>>()?;
    let mut found = Vec::new();
    for longer in 0..lexemes.len() {
        for (shorter, follow) in follow.iter().enumerate() {
            work.spend(1)?;
            if nfa.continues(longer, shorter, follow, work)? {
                found.push(longer);
                break;
            }
        }
    }
    Ok(found)
}

struct Cut<'a> {
    grammar: &'a Grammar,
    is_nullable: &'a [bool],
    sizes: &'a [Option<Size>],
    is_split: &'a [bool],
}

type Found = BTreeMap<Lexeme, usize>;

impl Cut<'_> {
    fn rules(&self, work: &mut Work) -> Result<(Vec<Lexeme>, BTreeMap<usize, Node>), String> {
        let mut found = Found::new();
        let mut rules = BTreeMap::new();
        let mut open = vec![self.grammar.root];
        while let Some(rule) = open.pop() {
            if rules.contains_key(&rule) {
                continue;
            }
            work.spend(self.grammar.rule_exprs[rule].len())?;
            let node = self.node(self.grammar.rules[rule], &mut found);
            each_rule(&node, &mut |used| open.push(used));
            rules.insert(rule, node);
        }
        let mut lexemes: Vec<_> = found.into_iter().collect();
        lexemes.sort_unstable_by_key(|(_, index)| *index);
        Ok((lexemes.into_iter().map(|(lexeme, _)| lexeme).collect(), rules))
    }

    fn node(&self, id: Id, found: &mut Found) -> Node {
        if self.sizes[id].is_some() {
            return self.lexeme(found, false, &[id], id);
        }
        match &self.grammar.exprs[id] {
            Expr::Rule(rule) => Node::Rule(*rule),
            Expr::Repeat(_, _, Some(0)) => Node::Empty,
            Expr::Repeat(part, least, most) => Node::Repeat(Box::new(self.node(*part, found)), *least, *most),
            Expr::Sequence(parts) => Node::Sequence(self.grouped(found, false, parts, id)),
            Expr::Choice(parts) => {
                let is_regular = |part: &&Id| self.sizes[**part].is_some() && !self.is_split[id];
                let (regular, others): (Vec<Id>, Vec<Id>) = parts.iter().partition(is_regular);
                let mut nodes = self.grouped(found, true, &regular, id);
                nodes.extend(others.into_iter().map(|part| self.node(part, found)));
                Node::Choice(nodes)
            }
            // a split character: characters are never larger than a lexeme
            Expr::Char(_) => self.lexeme(found, false, &[id], id),
        }
    }

    /// Nodes of the parts of an expression; neighbours that may be one lexeme are one.
    fn grouped(&self, found: &mut Found, is_choice: bool, parts: &[Id], whole: Id) -> Vec<Node> {
        let mut nodes = Vec::new();
        let (mut group, mut size) = (Vec::new(), None);
        for part in parts {
            let with = match (self.sizes[*part], size) {
                _ if self.is_split[whole] => None,
                (Some(part), None) => Some(part),
                (Some(part), Some(size)) => Size::with(size, part),
                (None, _) => None,
            };
            if with.is_none() && !group.is_empty() {
                nodes.push(self.lexeme(found, is_choice, &group, whole));
                group.clear();
            }
            if self.sizes[*part].is_some() && !self.is_split[whole] {
                group.push(*part);
                size = with.or(self.sizes[*part]);
            } else {
                nodes.push(self.node(*part, found));
                size = None;
            }
        }
        if !group.is_empty() {
            nodes.push(self.lexeme(found, is_choice, &group, whole));
        }
        nodes
    }

    fn lexeme(&self, found: &mut Found, is_choice: bool, parts: &[Id], whole: Id) -> Node {
        let chars = parts.iter().filter_map(|part| self.sizes[*part]).map(|size| size.chars).sum::<usize>();
        let is_char = matches!(self.grammar.exprs[parts[0]], Expr::Char(_));
        if chars == 0 && !is_char {
            return Node::Empty;
        }
        let (whole, is_choice) = if let [part] = parts { (*part, false) } else { (whole, is_choice) };
        let new = found.len();
        let index = *found.entry(Lexeme { is_choice, parts: parts.into(), whole }).or_insert(new);
        let mut nullable = parts.iter().map(|part| self.is_nullable[*part]);
        let is_nullable = if is_choice { nullable.any(|n| n) } else { nullable.all(|n| n) };
        let node = Node::Lexeme(index);
        if is_nullable { Node::Repeat(Box::new(node), 0, Some(1)) } else { node }
    }
}

fn each_rule(node: &Node, f: &mut dyn FnMut(usize)) {
    match node {
        Node::Empty | Node::Lexeme(_) => {}
        Node::Rule(rule) => f(*rule),
        Node::Sequence(parts) | Node::Choice(parts) => parts.iter().for_each(|part| each_rule(part, f)),
        Node::Repeat(part, ..) => each_rule(part, f),
    }
}

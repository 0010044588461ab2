//! Which characters follow a lexeme, and which continue it.

use alloc::collections::{BTreeMap, BTreeSet};
use alloc::format;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;

use super::Work;
use super::chars::{CharSet, Unions};
use super::lexemes::{Lexeme, Node};
use super::parse::{Expr, Grammar, Id};

/// Work of an operation on sets, in visits of expressions.
const SET_WORK: usize = 8;
/// States of the automata of a grammar, 32 bytes each.
const MAX_STATES: usize = 250_000;

/// Characters that can follow each lexeme. `first` are the first characters of each.
pub(super) fn follow_sets(
    rules: &BTreeMap<usize, Node>,
    first: &[CharSet],
    unions: &mut Unions,
    work: &mut Work,
) -> Result<Vec<CharSet>, String> {
    let mut sets = Sets { lexemes: first, first: BTreeMap::new(), follow: BTreeMap::new(), unions, work };
    loop {
        let mut changed = false;
        for (rule, node) in rules.iter().rev() {
            let now = sets.first(node)?;
            changed |= sets.first.insert(*rule, now.clone()) != Some(now);
        }
        if !changed {
            break;
        }
    }
    let mut follow = vec![CharSet::default(); first.len()];
    loop {
        let mut changed = false;
        for (rule, node) in rules {
            let after = sets.follow.get(rule).cloned().unwrap_or_default();
            changed |= sets.spread(node, after, &mut follow)?;
        }
        if !changed {
            return Ok(follow);
        }
    }
}

/// First characters, and whether the empty text matches.
type First = (CharSet, bool);

struct Sets<'a> {
    lexemes: &'a [CharSet],
    first: BTreeMap<usize, First>,
    follow: BTreeMap<usize, CharSet>,
    unions: &'a mut Unions,
    work: &'a mut Work,
}

impl Sets<'_> {
    fn first(&mut self, node: &Node) -> Result<First, String> {
        self.work.spend(SET_WORK)?;
        Ok(match node {
            Node::Empty => (CharSet::default(), true),
            Node::Lexeme(i) => (self.lexemes[*i].clone(), false),
            Node::Rule(rule) => self.first.get(rule).cloned().unwrap_or_default(),
            Node::Repeat(part, least, _) => {
                let (set, is_nullable) = self.first(part)?;
                (set, is_nullable || *least == 0)
            }
            Node::Sequence(parts) => {
                let mut sum = CharSet::default();
                for part in parts {
                    let (set, is_nullable) = self.first(part)?;
                    self.unions.add(&mut sum, &set, self.work)?;
                    if !is_nullable {
                        return Ok((sum, false));
                    }
                }
                (sum, true)
            }
            Node::Choice(parts) => {
                let (mut sum, mut is_nullable) = (CharSet::default(), false);
                for part in parts {
                    let (set, may_be_empty) = self.first(part)?;
                    self.unions.add(&mut sum, &set, self.work)?;
                    is_nullable |= may_be_empty;
                }
                (sum, is_nullable)
            }
        })
    }

    /// Adds `after` to what follows the last lexemes and rules of a node, and so on to the first. Returns whether a set
    /// of a rule has changed.
    fn spread(&mut self, node: &Node, mut after: CharSet, follow: &mut [CharSet]) -> Result<bool, String> {
        self.work.spend(SET_WORK)?;
        let mut changed = false;
        match node {
            Node::Empty => {}
            Node::Lexeme(i) => {
                self.unions.add(&mut follow[*i], &after, self.work)?;
            }
            Node::Rule(rule) => {
                changed = self.unions.add(self.follow.entry(*rule).or_default(), &after, self.work)?;
            }
            Node::Choice(parts) => {
                for part in parts {
                    changed |= self.spread(part, after.clone(), follow)?;
                }
            }
            Node::Sequence(parts) => {
                for part in parts.iter().rev() {
                    changed |= self.spread(part, after.clone(), follow)?;
                    let (set, is_nullable) = self.first(part)?;
                    if !is_nullable {
                        after = CharSet::default();
                    }
                    self.unions.add(&mut after, &set, self.work)?;
                }
            }
            Node::Repeat(part, _, most) => {
                if *most != Some(1) {
                    let first = self.first(part)?.0;
                    self.unions.add(&mut after, &first, self.work)?;
                }
                changed = self.spread(part, after, follow)?;
            }
        }
        Ok(changed)
    }
}

/// A state: reads a character, goes on without reading to other states, or ends.
enum State {
    Char(CharSet, usize),
    Go(Vec<usize>),
    End,
}

/// Automata of lexemes. They match at least the lexemes: counts of repetitions above 1 are not kept.
pub(super) struct Automata {
    states: Vec<State>,
    /// States that read or end, at the start of each lexeme.
    starts: Vec<BTreeSet<usize>>,
    /// First characters of each lexeme.
    pub(super) first: Vec<CharSet>,
}

impl Automata {
    /// # Errors
    /// If the lexemes are too complex.
    pub(super) fn new(
        grammar: &Grammar,
        lexemes: &[Lexeme],
        is_nullable: &[bool],
        unions: &mut Unions,
        work: &mut Work,
    ) -> Result<Automata, String> {
        let mut automata = Automata { states: vec![State::End], starts: Vec::new(), first: Vec::new() };
        for lexeme in lexemes {
            let mut builder = Builder { grammar, is_nullable, automata: &mut automata, work };
            let start = match lexeme.is_choice {
                true => {
                    let starts = lexeme.parts.iter().map(|part| builder.add(*part, 0));
                    let starts = starts.collect::<Result<_, String>>()?;
                    builder.state(State::Go(starts))?
                }
                false => lexeme.parts.iter().rev().try_fold(0, |next, part| builder.add(*part, next))?,
            };
            let mut reached = BTreeSet::new();
            automata.reach(start, &mut reached, work)?;
            // the empty text is no text of a lexeme
            reached.remove(&0);
            let mut first = CharSet::default();
            for state in &reached {
                if let State::Char(set, _) = &automata.states[*state] {
                    unions.add(&mut first, set, work)?;
                }
            }
            automata.starts.push(reached);
            automata.first.push(first);
        }
        Ok(automata)
    }

    /// Adds to `reached` the states that read or end and are reached from `state` without reading.
    fn reach(&self, state: usize, reached: &mut BTreeSet<usize>, work: &mut Work) -> Result<(), String> {
        let (mut open, mut seen) = (vec![state], BTreeSet::new());
        while let Some(state) = open.pop() {
            work.spend(SET_WORK)?;
            match &self.states[state] {
                State::Go(next) => {
                    if seen.insert(state) {
                        open.extend(next);
                    }
                }
                _ => {
                    reached.insert(state);
                }
            }
        }
        Ok(())
    }

    /// Whether a text of the lexeme `shorter`, with one of the characters `follow` after it, begins a text of `longer`.
    /// `follow` is from [`by_first_byte`]: characters whose UTF-8 begins with the same byte count as equal.
    pub(super) fn continues(
        &self,
        longer: usize,
        shorter: usize,
        follow: &CharSet,
        work: &mut Work,
    ) -> Result<bool, String> {
        if !self.first[longer].intersects(&self.first[shorter], work)? {
            return Ok(false);
        }
        let (mut open, mut seen) = (Vec::new(), BTreeSet::new());
        let (mut all_a, mut all_b) = (self.starts[longer].clone(), self.starts[shorter].clone());
        loop {
            work.spend(SET_WORK * all_a.len() * all_b.len())?;
            for (a, b) in all_a.iter().flat_map(|a| all_b.iter().map(move |b| (*a, *b))) {
                let State::Char(set_a, next_a) = &self.states[a] else { continue };
                match &self.states[b] {
                    State::End if set_a.intersects(follow, work)? => return Ok(true),
                    State::Char(set_b, next_b)
                        if !seen.contains(&(*next_a, *next_b)) && set_a.intersects(set_b, work)? =>
                    {
                        seen.insert((*next_a, *next_b));
                        open.push((*next_a, *next_b));
                    }
                    _ => {}
                }
            }
            let Some((a, b)) = open.pop() else { return Ok(false) };
            all_a.clear();
            all_b.clear();
            self.reach(a, &mut all_a, work)?;
            self.reach(b, &mut all_b, work)?;
        }
    }
}

struct Builder<'a> {
    grammar: &'a Grammar,
    is_nullable: &'a [bool],
    automata: &'a mut Automata,
    work: &'a mut Work,
}

impl Builder<'_> {
    fn state(&mut self, state: State) -> Result<usize, String> {
        if self.automata.states.len() >= MAX_STATES {
            return Err(format!("the grammar is too complex: more than {MAX_STATES} states"));
        }
        self.automata.states.push(state);
        Ok(self.automata.states.len() - 1)
    }

    /// States of an expression before the state `next`.
    fn add(&mut self, id: Id, next: usize) -> Result<usize, String> {
        self.work.spend(1)?;
        Ok(match &self.grammar.exprs[id] {
            Expr::Char(set) => self.state(State::Char(set.clone(), next))?,
            Expr::Rule(rule) => self.add(self.grammar.rules[*rule], next)?,
            Expr::Sequence(parts) => parts.iter().rev().try_fold(next, |next, part| self.add(*part, next))?,
            Expr::Choice(parts) => {
                let starts = parts.iter().map(|part| self.add(*part, next)).collect::<Result<_, _>>()?;
                self.state(State::Go(starts))?
            }
            Expr::Repeat(_, _, Some(0)) => next,
            Expr::Repeat(part, _, most) => {
                let before = self.state(State::Go(Vec::new()))?;
                let again = if *most == Some(1) { next } else { before };
                let start = self.add(*part, again)?;
                // after the part, `before` repeats it or goes on
                self.automata.states[before] = State::Go([start, next].into());
                match self.is_nullable[id] {
                    true => before,
                    false => start,
                }
            }
        })
    }
}

/// All characters whose UTF-8 begins with the first byte of one in the set.
pub(super) fn by_first_byte(set: &CharSet, unions: &mut Unions) -> Result<CharSet, String> {
    let size = |c: u32| match c {
        0..0x80 => 1,
        0x80..0x800 => 1 << 6,
        0x800..0x1_0000 => 1 << 12,
        _ => 1 << 18,
    };
    let whole = |(low, high): &(u32, u32)| (low & !(size(*low) - 1), high | (size(*high) - 1));
    unions.keep(CharSet::of(set.ranges().iter().map(whole).collect()))
}

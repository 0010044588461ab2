//! The lexemes of a grammar as one NFA (Thompson 1968), and which lexemes continue others.

use alloc::collections::BTreeSet;
use alloc::format;
use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;

use super::Work;
use super::chars::{CharSet, Unions};
use super::first_follow::SET_WORK;
use super::lexemes::Lexeme;
use super::parse::{Expr, Grammar, Id};

/// States of the NFA of a grammar, 32 bytes each.
const MAX_STATES: usize = 250_000;

/// A state of the NFA.
enum State {
    /// A transition on these characters.
    Char(CharSet, usize),
    /// Epsilon transitions.
    Epsilon(Vec<usize>),
    /// Accepts.
    Accept,
}

/// The NFA of all lexemes. It accepts at least their texts: counts of repetitions above 1 are not kept.
pub(super) struct Nfa {
    states: Vec<State>,
    /// Epsilon closure of the start state of each lexeme.
    starts: Vec<BTreeSet<usize>>,
    /// FIRST set of each lexeme.
    pub(super) first: Vec<CharSet>,
}

impl Nfa {
    /// # Errors
    /// If the lexemes are too complex.
    pub(super) fn new(
        grammar: &Grammar,
        lexemes: &[Lexeme],
        is_nullable: &[bool],
        unions: &mut Unions,
        work: &mut Work,
    ) -> Result<Nfa, String> {
        let mut nfa = Nfa { states: vec![State::Accept], starts: Vec::new(), first: Vec::new() };
        for lexeme in lexemes {
            let mut builder = Builder { grammar, is_nullable, nfa: &mut nfa, work };
            let start = match lexeme.is_choice {
                true => {
                    let starts = lexeme.parts.iter().map(|part| builder.add(*part, 0));
                    let starts = starts.collect::<Result<_, String>>()?;
                    builder.state(State::Epsilon(starts))?
                }
                false => lexeme.parts.iter().rev().try_fold(0, |next, part| builder.add(*part, next))?,
            };
            let mut closure = BTreeSet::new();
            nfa.epsilon_closure(start, &mut closure, work)?;
            // a lexeme does not match the empty text
            closure.remove(&0);
            let mut first = CharSet::default();
            for state in &closure {
                if let State::Char(set, _) = &nfa.states[*state] {
                    unions.add(&mut first, set, work)?;
                }
            }
            nfa.starts.push(closure);
            nfa.first.push(first);
        }
        Ok(nfa)
    }

    /// Adds the epsilon closure of `state` to `closure`: its states with transitions on characters, and accepting ones.
    fn epsilon_closure(&self, state: usize, closure: &mut BTreeSet<usize>, work: &mut Work) -> Result<(), String> {
        let (mut open, mut seen) = (vec![state], BTreeSet::new());
        while let Some(state) = open.pop() {
            work.spend(SET_WORK)?;
            match &self.states[state] {
                State::Epsilon(next) => {
                    if seen.insert(state) {
                        open.extend(next);
                    }
                }
                _ => {
                    closure.insert(state);
                }
            }
        }
        Ok(())
    }

    /// Whether a text of the lexeme `shorter`, with one of the characters `follow` after it, begins a text of `longer`.
    /// `follow` is from [`by_first_byte`](super::first_follow::by_first_byte): characters whose UTF-8 begins with the same byte count as equal.
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
                    State::Accept if set_a.intersects(follow, work)? => return Ok(true),
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
            self.epsilon_closure(a, &mut all_a, work)?;
            self.epsilon_closure(b, &mut all_b, work)?;
        }
    }
}

struct Builder<'a> {
    grammar: &'a Grammar,
    is_nullable: &'a [bool],
    nfa: &'a mut Nfa,
    work: &'a mut Work,
}

impl Builder<'_> {
    fn state(&mut self, state: State) -> Result<usize, String> {
        if self.nfa.states.len() >= MAX_STATES {
            return Err(format!("the grammar is too complex: more than {MAX_STATES} states"));
        }
        self.nfa.states.push(state);
        Ok(self.nfa.states.len() - 1)
    }

    /// Adds the states of an expression; returns its start state. The expression ends in the state `next`.
    fn add(&mut self, id: Id, next: usize) -> Result<usize, String> {
        self.work.spend(1)?;
        Ok(match &self.grammar.exprs[id] {
            Expr::Char(set) => self.state(State::Char(set.clone(), next))?,
            Expr::Rule(rule) => self.add(self.grammar.rules[*rule], next)?,
            Expr::Sequence(parts) => parts.iter().rev().try_fold(next, |next, part| self.add(*part, next))?,
            Expr::Choice(parts) => {
                let starts = parts.iter().map(|part| self.add(*part, next)).collect::<Result<_, _>>()?;
                self.state(State::Epsilon(starts))?
            }
            Expr::Repeat(_, _, Some(0)) => next,
            Expr::Repeat(part, _, most) => {
                let before = self.state(State::Epsilon(Vec::new()))?;
                let again = if *most == Some(1) { next } else { before };
                let start = self.add(*part, again)?;
                // after the part, `before` repeats it or leaves the loop
                self.nfa.states[before] = State::Epsilon([start, next].into());
                match self.is_nullable[id] {
                    true => before,
                    false => start,
                }
            }
        })
    }
}

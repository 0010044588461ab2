//! A DFA of one list of patterns, anchored at the start of a match, with facts about each state that let a streaming
//! search decide without look-ahead: whether a match ends here whatever follows, and whether a longer one can follow.
//!
//! It is built from a dense DFA of `regex-automata` with all matches kept (no preference of alternatives): the longest
//! match counts, so greedy and lazy repetitions are the same.

use std::collections::HashMap;

use regex_automata::dfa::{Automaton as _, StartKind, dense};
use regex_automata::nfa::thompson::{self, NFA, WhichCaptures};
use regex_automata::util::primitives::StateID;
use regex_automata::util::start;
use regex_automata::{Anchored, MatchKind};
use regex_syntax::ParserBuilder;
use regex_syntax::hir::{Capture, Hir, HirKind, Look, Repetition};

/// Longest match in bytes. A pattern without a bound (`a+`), or with a larger one, matches at most this much: of the
/// matches that begin at a position, the longest within this limit counts.
pub const MAX_MATCH: usize = 1024;
/// Longest pattern in bytes.
pub const MAX_PATTERN: usize = 4096;
/// Limit of the NFA of one pattern in bytes.
const MAX_NFA: usize = 1 << 20;
/// Limit of the DFA of one list of patterns in bytes. The memory of its construction is limited to four times as much.
const MAX_DFA: usize = 4 << 20;
/// Limit of nested groups and repetitions in a pattern: [`with_ascii_words`] is recursive.
const MAX_NESTING: u32 = 50;

/// Why a pattern was refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum PatternError {
    #[error("length {found} bytes, expected at most {MAX_PATTERN}")]
    TooLong { found: usize },
    #[error("{0}")]
    Syntax(Box<regex_syntax::Error>),
    #[error("matches the empty string, expected a match of at least 1 byte")]
    Empty,
    #[error("automaton exceeds {limit} bytes; use smaller repetition counts or ASCII classes")]
    TooLarge { limit: usize },
    #[error("cannot be compiled: {0}")]
    Build(String),
}

type Dfa = dense::DFA<Vec<u32>>;

/// The dead state: no match can follow.
pub(super) const DEAD: u32 = 0;

/// What is known in a state after a byte at offset `t`.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Facts {
    /// A match ended before the byte, at `t`. It was known only now because of a look-ahead (`$`, `\b`).
    pub(super) ended_before: bool,
    /// A match ends after the byte, at `t + 1`, whatever follows.
    pub(super) ends_here: bool,
    /// A match that ends at `t + 1` or later depends on what follows.
    pub(super) pending: bool,
}

#[derive(Debug)]
pub(super) struct Automaton {
    /// Equivalence class of each byte; the end of the text is the last class.
    classes: [u8; 256],
    n_classes: usize,
    /// (`n_states`, `n_classes`)
    next: Vec<u32>,
    /// (`n_states`)
    facts: Vec<Facts>,
    /// Start state by the preceding byte; the last one is for the start of the text.
    starts: Vec<u32>,
    /// Whether a match may begin with this byte.
    begins: [bool; 256],
    /// Longest match in bytes, at most [`MAX_MATCH`].
    max_match: usize,
}

/// Parses one pattern and checks its limits.
pub(super) fn parse(pattern: &str) -> Result<Hir, PatternError> {
    if pattern.len() > MAX_PATTERN {
        return Err(PatternError::TooLong { found: pattern.len() });
    }
    let parsed = ParserBuilder::new().nest_limit(MAX_NESTING).build().parse(pattern);
    let hir = with_ascii_words(parsed.map_err(|error| PatternError::Syntax(Box::new(error)))?);
    if hir.properties().minimum_len() == Some(0) {
        return Err(PatternError::Empty);
    }
    build_nfa(std::slice::from_ref(&hir), Some(MAX_NFA))?;
    Ok(hir)
}

/// Replaces Unicode word boundaries by ASCII ones: a DFA cannot look at a whole neighbouring character.
fn with_ascii_words(hir: Hir) -> Hir {
    match hir.into_kind() {
        HirKind::Empty => Hir::empty(),
        HirKind::Literal(literal) => Hir::literal(literal.0),
        HirKind::Class(class) => Hir::class(class),
        HirKind::Look(look) => Hir::look(match look {
            Look::WordUnicode => Look::WordAscii,
            Look::WordUnicodeNegate => Look::WordAsciiNegate,
            Look::WordStartUnicode => Look::WordStartAscii,
            Look::WordEndUnicode => Look::WordEndAscii,
            Look::WordStartHalfUnicode => Look::WordStartHalfAscii,
            Look::WordEndHalfUnicode => Look::WordEndHalfAscii,
            other => other,
        }),
        HirKind::Repetition(Repetition { min, max, greedy, sub }) => {
            Hir::repetition(Repetition { min, max, greedy, sub: Box::new(with_ascii_words(*sub)) })
        }
        HirKind::Capture(Capture { index, name, sub }) => {
            Hir::capture(Capture { index, name, sub: Box::new(with_ascii_words(*sub)) })
        }
        HirKind::Concat(parts) => Hir::concat(parts.into_iter().map(with_ascii_words).collect()),
        HirKind::Alternation(parts) => Hir::alternation(parts.into_iter().map(with_ascii_words).collect()),
    }
}

fn build_nfa(patterns: &[Hir], limit: Option<usize>) -> Result<NFA, PatternError> {
    let config = thompson::Config::new().which_captures(WhichCaptures::None).nfa_size_limit(limit);
    thompson::Compiler::new().configure(config).build_many_from_hir(patterns).map_err(|error| {
        match error.size_limit() {
            Some(limit) => PatternError::TooLarge { limit },
            None => PatternError::Build(error.to_string()),
        }
    })
}

impl Automaton {
    /// Compiles patterns that [`parse`] has checked.
    pub(super) fn new(patterns: &[Hir]) -> Result<Automaton, PatternError> {
        let config = dense::Config::new()
            .accelerate(false)
            .match_kind(MatchKind::All)
            .start_kind(StartKind::Anchored)
            .dfa_size_limit(Some(MAX_DFA))
            .determinize_size_limit(Some(4 * MAX_DFA));
        let dfa =
            dense::Builder::new().configure(config).build_from_nfa(&build_nfa(patterns, None)?).map_err(|error| {
                if error.is_size_limit_exceeded() {
                    PatternError::TooLarge { limit: MAX_DFA }
                } else {
                    PatternError::Build(error.to_string())
                }
            })?;
        let max_match = patterns.iter().map(|hir| hir.properties().maximum_len().unwrap_or(MAX_MATCH)).max();
        Automaton::from_dfa(&dfa, max_match.unwrap_or(0).min(MAX_MATCH))
    }

    fn from_dfa(dfa: &Dfa, max_match: usize) -> Result<Automaton, PatternError> {
        let mut classes = [0; 256];
        let mut representatives = Vec::new();
        for byte in 0..=u8::MAX {
            let class = dfa.byte_classes().get(byte);
            classes[usize::from(byte)] = class;
            if usize::from(class) == representatives.len() {
                representatives.push(byte);
            }
        }
        let mut states = States::default();
        let mut starts = Vec::with_capacity(257);
        for before in (0..=u8::MAX).map(Some).chain([None]) {
            let config = start::Config::new().anchored(Anchored::Yes).look_behind(before);
            let start = dfa.start_state(&config).map_err(|error| PatternError::Build(error.to_string()))?;
            starts.push(states.index(dfa, start));
        }
        let n_classes = representatives.len() + 1;
        let mut next = vec![DEAD; n_classes];
        let mut done = 1;
        while let Some(&state) = states.ids.get(done) {
            next.extend(representatives.iter().map(|byte| states.index(dfa, dfa.next_state(state, *byte))));
            next.push(states.index(dfa, dfa.next_eoi_state(state)));
            done += 1;
        }
        let ended: Vec<bool> = states.ids.iter().enumerate().map(|(i, id)| i > 0 && dfa.is_match_state(*id)).collect();
        let facts = facts(&next, n_classes, &ended);
        let mut automaton = Automaton { classes, n_classes, next, facts, starts, begins: [false; 256], max_match };
        for byte in 0..=u8::MAX {
            automaton.begins[usize::from(byte)] = automaton.starts.iter().any(|start| {
                let facts = automaton.facts(automaton.step(*start, byte));
                facts.pending || facts.ends_here
            });
        }
        Ok(automaton)
    }

    pub(super) fn n_states(&self) -> usize {
        self.facts.len()
    }

    pub(super) fn max_match(&self) -> usize {
        self.max_match
    }

    /// State at the start of a match, after the byte `before`; `None` at the start of the text.
    pub(super) fn start(&self, before: Option<u8>) -> u32 {
        self.starts[before.map_or(256, usize::from)]
    }

    pub(super) fn begins(&self, byte: u8) -> bool {
        self.begins[usize::from(byte)]
    }

    pub(super) fn step(&self, state: u32, byte: u8) -> u32 {
        self.next[state as usize * self.n_classes + usize::from(self.classes[usize::from(byte)])]
    }

    /// Whether a match ends at the end of the text.
    pub(super) fn ends_text(&self, state: u32) -> bool {
        self.facts(self.next[(state as usize + 1) * self.n_classes - 1]).ended_before
    }

    pub(super) fn facts(&self, state: u32) -> Facts {
        self.facts[state as usize]
    }
}

/// Numbers of the reachable states of a DFA; 0 is the dead state.
struct States {
    ids: Vec<StateID>,
    index: HashMap<StateID, u32>,
}

impl Default for States {
    fn default() -> States {
        States { ids: vec![StateID::ZERO], index: HashMap::new() }
    }
}

impl States {
    fn index(&mut self, dfa: &Dfa, id: StateID) -> u32 {
        if dfa.is_dead_state(id) {
            return DEAD;
        }
        *self.index.entry(id).or_insert_with(|| {
            self.ids.push(id);
            // a DFA of `MAX_DFA` bytes has fewer than 2^32 states
            u32::try_from(self.ids.len() - 1).unwrap_or(DEAD)
        })
    }
}

/// `next`: (`n_states`, `n_classes`), `ended`: (`n_states`), whether a match ended before the last byte.
fn facts(next: &[u32], n_classes: usize, ended: &[bool]) -> Vec<Facts> {
    // whether a match can end after this state; states are numbered breadth-first, so few rounds suffice
    let mut reaches = vec![false; ended.len()];
    loop {
        let mut changed = false;
        for (state, row) in next.chunks_exact(n_classes).enumerate().rev() {
            if !reaches[state] && row.iter().any(|to| ended[*to as usize] || reaches[*to as usize]) {
                (reaches[state], changed) = (true, true);
            }
        }
        if !changed {
            break;
        }
    }
    let of_state = |(row, ended_before): (&[u32], &bool)| {
        let ends_here = row.iter().all(|to| ended[*to as usize]);
        let depends = !ends_here && row.iter().any(|to| ended[*to as usize]);
        let longer = row.iter().any(|to| reaches[*to as usize]);
        Facts { ended_before: *ended_before, ends_here, pending: depends || longer }
    };
    next.chunks_exact(n_classes).zip(ended).map(of_state).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn automaton(pattern: &str) -> Automaton {
        Automaton::new(&[parse(pattern).unwrap()]).unwrap()
    }

    /// Facts after each byte of `text`, matched from its start, as `<` (ended before), `!` (ends here), `.` (pending).
    fn trace(pattern: &str, text: &str) -> Vec<String> {
        let automaton = automaton(pattern);
        let mut state = automaton.start(None);
        let step = |byte| {
            state = automaton.step(state, byte);
            let Facts { ended_before, ends_here, pending } = automaton.facts(state);
            [(ended_before, '<'), (ends_here, '!'), (pending, '.')]
                .iter()
                .filter(|(is, _)| *is)
                .map(|(_, c)| *c)
                .collect()
        };
        text.bytes().map(step).collect()
    }

    #[test]
    fn facts_tell_when_a_match_is_decided() {
        for (pattern, text, expected) in [
            ("ab", "abc", vec![".", "!", "<"]),
            ("a+", "aab", vec!["!.", "<!.", "<"]),
            (r"a\b", "ab", vec![".", ""]),
            (r"a\b", "a ", vec![".", "<"]),
            ("a$", "a", vec!["."]),
            ("ab{2,3}", "abbb", vec![".", ".", "!.", "<!"]),
            // no match can follow: the look-arounds contradict each other
            (r"a\b\Bc", "ac", vec!["", ""]),
            ("é", "é", vec![".", "!"]),
        ] {
            assert_eq!(trace(pattern, text), expected, "{pattern} in {text}");
        }
    }

    #[test]
    fn patterns_have_limits() {
        assert_eq!(parse("a*"), Err(PatternError::Empty));
        assert_eq!(parse(&"a".repeat(4097)), Err(PatternError::TooLong { found: 4097 }));
        assert_eq!(parse(r"\pL{1000}"), Err(PatternError::TooLarge { limit: MAX_NFA }));
        assert!(matches!(parse("(a"), Err(PatternError::Syntax(_))));
        assert!(matches!(parse(r"(?-u:\xff)"), Err(PatternError::Syntax(_))));
        assert!(matches!(parse(&format!("{}a{}", "(".repeat(60), ")".repeat(60))), Err(PatternError::Syntax(_))));
        // 2^16 states
        let exponential = parse("(?-u:[ab]*a[ab]{16})c").unwrap();
        assert_eq!(Automaton::new(&[exponential]).unwrap_err(), PatternError::TooLarge { limit: MAX_DFA });
    }

    #[test]
    fn the_longest_match_is_known_from_the_pattern() {
        for (pattern, expected) in [("abc", 3), ("a{2,5}", 5), ("é", 2), ("a+", MAX_MATCH), ("a{2000}", MAX_MATCH)] {
            assert_eq!(automaton(pattern).max_match(), expected, "{pattern}");
        }
    }
}

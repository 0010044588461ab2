//! The filters against their definition.

use std::cell::Cell;
use std::collections::{BTreeSet, HashMap};

use proptest::prelude::*;
use proptest::sample::subsequence;
use regex_syntax::hir::{Class, Hir, HirKind, Look};

use super::*;
use crate::guard::policy::automaton::MAX_MATCH;
use crate::guard::policy::rules::{PersonalData, Rule};
use crate::guard::policy::{Policy, PolicyFile, Stage};

const PATTERNS: &[&str] = &[
    "ab",
    "abc",
    "a+",
    "a+b",
    "b(?:a|é)*c",
    "ab|abcab",
    "[ab]{2,4}",
    "é+",
    ".b",
    "c.*?c",
    "a$",
    "^a+",
    r"(?-u:\b)a+(?-u:\b)",
    r"c(?-u:\b)",
    r"[^a]c",
    r"(?m)^b[a-c]*$",
    r"(?-u:\b)[0-9]+",
    r"x@",
    r"[0-9.]+ ",
    r"(?-u:\B)b.{3}",
    "(?i)AB?",
    "ab|(?:c|ab)[ab]*é",
    "(?:aab|ab)(?:cc)?",
];
const FRAGMENTS: &[&str] =
    &["a", "a", "b", "b", "c", "é", " ", "\n", "abc", "aaaa", "1.2.3.4", "1", "x@y.zz", "-", "€"];

fn rule(index: usize) -> impl Strategy<Value = Rule> {
    let deny = subsequence(PATTERNS, 1..3);
    let allow = prop_oneof![Just(vec![]).boxed(), subsequence(PATTERNS, 1..3).boxed()];
    (deny, allow, action()).prop_map(move |(deny, allow, action)| Rule {
        name: format!("rule {index}"),
        on: Stage::all(),
        deny: deny.into_iter().map(Into::into).collect(),
        allow: allow.into_iter().map(Into::into).collect(),
        action,
        replacement: format!("<{index}>"),
    })
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![4 => Just(Action::Redact), 1 => Just(Action::Block)]
}

fn policy_file() -> impl Strategy<Value = PolicyFile> {
    let personal = (subsequence(&Kind::ALL[..], 1..=5), 0usize..3, action()).prop_map(|(kinds, max, action)| {
        PersonalData { kinds, max, on: Stage::all(), action, replacement: "<p>".into() }
    });
    ((rule(0), rule(1), rule(2)), 0usize..=3, prop::option::of(personal)).prop_map(|(rules, n, personal_data)| {
        let rules = [rules.0, rules.1, rules.2].into_iter().take(n).collect();
        PolicyFile { rules, personal_data, hook: None }
    })
}

fn text() -> impl Strategy<Value = String> {
    prop::collection::vec(prop::sample::select(FRAGMENTS), 0..14).prop_map(|fragments| fragments.concat())
}

/// The definition: patterns are matched by a search over sets of positions, from every start.
#[derive(Default)]
struct Reference {
    parsed: HashMap<String, Hir>,
}

/// Ends of the matches of `hir` that begin at one of `starts`. Sets `needs_more` if they depend on text that follows.
fn ends(hir: &Hir, text: &str, starts: &BTreeSet<usize>, needs_more: &Cell<bool>) -> BTreeSet<usize> {
    let reads_beyond = match hir.kind() {
        HirKind::Literal(literal) => {
            let bytes = text.as_bytes();
            starts.iter().any(|start| bytes.len() - start < literal.0.len() && literal.0.starts_with(&bytes[*start..]))
        }
        HirKind::Class(_) => starts.contains(&text.len()),
        HirKind::Look(look) => *look != Look::Start && *look != Look::StartLF && starts.contains(&text.len()),
        _ => false,
    };
    needs_more.set(needs_more.get() || reads_beyond);
    match hir.kind() {
        HirKind::Empty => starts.clone(),
        HirKind::Literal(literal) => {
            let matches = |start: &&usize| text.as_bytes()[**start..].starts_with(&literal.0);
            starts.iter().filter(matches).map(|start| start + literal.0.len()).collect()
        }
        HirKind::Class(class) => starts.iter().filter_map(|start| class_end(class, text, *start)).collect(),
        HirKind::Look(look) => starts.iter().copied().filter(|at| look_matches(*look, text.as_bytes(), *at)).collect(),
        HirKind::Capture(capture) => ends(&capture.sub, text, starts, needs_more),
        HirKind::Concat(parts) => {
            parts.iter().fold(starts.clone(), |starts, part| ends(part, text, &starts, needs_more))
        }
        HirKind::Alternation(parts) => parts.iter().flat_map(|part| ends(part, text, starts, needs_more)).collect(),
        HirKind::Repetition(repetition) => {
            let (mut last, mut found) = (starts.clone(), BTreeSet::new());
            for n in 0..=repetition.max.unwrap_or(u32::MAX) {
                let n_found = found.len();
                if n >= repetition.min {
                    found.extend(&last);
                }
                if n > repetition.min && found.len() == n_found || Some(n) == repetition.max {
                    break;
                }
                last = ends(&repetition.sub, text, &last, needs_more);
            }
            found
        }
    }
}

fn class_end(class: &Class, text: &str, start: usize) -> Option<usize> {
    let next = text.get(start..)?.chars().next()?;
    let is_in = match class {
        Class::Unicode(class) => class.iter().any(|range| (range.start()..=range.end()).contains(&next)),
        Class::Bytes(class) => {
            class.iter().any(|range| (range.start()..=range.end()).contains(&u8::try_from(next).unwrap_or(0)))
        }
    };
    is_in.then_some(start + next.len_utf8())
}

fn look_matches(look: Look, text: &[u8], at: usize) -> bool {
    let is_word = |i: Option<usize>| {
        i.and_then(|i| text.get(i)).is_some_and(|byte| byte.is_ascii_alphanumeric() || *byte == b'_')
    };
    let is_boundary = is_word(at.checked_sub(1)) != is_word(Some(at));
    match look {
        Look::Start => at == 0,
        Look::End => at == text.len(),
        Look::StartLF => at == 0 || text[at - 1] == b'\n',
        Look::EndLF => at == text.len() || text[at] == b'\n',
        Look::WordAscii | Look::WordUnicode => is_boundary,
        Look::WordAsciiNegate | Look::WordUnicodeNegate => !is_boundary,
        _ => unimplemented!("{look:?}"),
    }
}

impl Reference {
    /// Ends of matches that begin at `start`, in descending order.
    fn ends(&mut self, pattern: &str, text: &str, start: usize, max_match: usize) -> Vec<usize> {
        let parse = || regex_syntax::parse(pattern).unwrap();
        let hir = self.parsed.entry(pattern.into()).or_insert_with(parse);
        ends(hir, text, &[start].into(), &Cell::new(false))
            .into_iter()
            .rev()
            .filter(|end| end - start <= max_match)
            .collect()
    }

    fn longest(&mut self, patterns: &[String], text: &str, start: usize, max_match: usize) -> Option<usize> {
        patterns.iter().flat_map(|pattern| self.ends(pattern, text, start, max_match)).max()
    }

    fn longest_personal(&mut self, kind: Kind, text: &str, start: usize, max_match: usize) -> Option<usize> {
        let is_valid = |end: &usize| kind.validator().is_none_or(|is_valid| is_valid(&text[start..*end]));
        self.ends(kind.pattern(), text, start, max_match).into_iter().find(is_valid)
    }

    fn rule_match(&mut self, rule: &Rule, text: &str, start: usize, max_match: usize) -> Option<usize> {
        let end = self.longest(&rule.deny, text, start, max_match)?;
        let mut allows =
            |from: usize| text.is_char_boundary(from) && self.longest(&rule.allow, text, from, max_match) >= Some(end);
        (!(0..=start).any(&mut allows)).then_some(end)
    }

    /// Output and the rule that blocked.
    fn filter(&mut self, file: &PolicyFile, text: &str, max_match: usize) -> (String, Option<String>) {
        let (mut output, mut at) = (String::new(), 0);
        let (mut n_personal, mut personal_end) = (0, 0);
        while let Some(next) = text[at..].chars().next() {
            // end, name, action, replacement
            let mut candidates = Vec::new();
            for rule in &file.rules {
                if let Some(end) = self.rule_match(rule, text, at, max_match) {
                    candidates.push((end, rule.name.as_str(), rule.action, rule.replacement.as_str()));
                }
            }
            if let Some(personal) = file.personal_data.as_ref().filter(|_| at >= personal_end) {
                let ends = personal.kinds.iter().filter_map(|kind| self.longest_personal(*kind, text, at, max_match));
                match ends.max() {
                    Some(end) if n_personal < personal.max => (n_personal, personal_end) = (n_personal + 1, end),
                    Some(end) => candidates.push((end, "personal-data", personal.action, &personal.replacement)),
                    None => {}
                }
            }
            let longest = candidates.iter().map(|(end, ..)| *end).max();
            match candidates.into_iter().find(|(end, ..)| Some(*end) == longest) {
                Some((_, name, Action::Block, _)) => return (output, Some(name.into())),
                Some((end, _, Action::Redact, replacement)) => {
                    output.push_str(replacement);
                    at = end;
                }
                None => {
                    output.push(next);
                    at += next.len_utf8();
                }
            }
        }
        (output, None)
    }
}

fn filter(file: &PolicyFile, max_match: usize) -> Filter {
    let mut filter = Policy::new(file).unwrap().filter(Stage::Answer).clone();
    filter.max_match = max_match;
    filter
}

/// Concatenates pieces and checks that their ranges are contiguous and that text is unchanged.
fn output(pieces: &[Piece], input: &str) -> (String, Option<String>) {
    let (mut output, mut at) = (String::new(), 0);
    for (i, piece) in pieces.iter().enumerate() {
        match piece {
            Piece::Text { text, range } => {
                assert_eq!((text.as_str(), range.start), (&input[range.clone()], at));
                output.push_str(text);
                at = range.end;
            }
            Piece::Redacted { replacement, range, .. } => {
                assert_eq!(range.start, at);
                output.push_str(replacement);
                at = range.end;
            }
            Piece::Blocked { rule, at: start } => {
                assert_eq!((*start, i), (at, pieces.len() - 1));
                return (output, Some(rule.to_string()));
            }
        }
    }
    assert_eq!(at, input.len());
    (output, None)
}

/// Filters a text cut at `cuts` (reduced to character boundaries). Returns the pieces and the most text held back.
fn stream(filter: &Filter, text: &str, cuts: &[usize]) -> (Vec<Piece>, usize) {
    let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut % (text.len() + 1)).collect();
    cuts.retain(|cut| text.is_char_boundary(*cut));
    cuts.push(text.len());
    cuts.sort_unstable();
    let mut stream = StreamFilter::new(filter.clone());
    let (mut pieces, mut from, mut most_held) = (Vec::new(), 0, 0);
    for cut in cuts {
        pieces.extend(stream.push(&text[from..cut]));
        from = cut;
        most_held = most_held.max(stream.held().len());
    }
    pieces.extend(stream.finish());
    assert_eq!(stream.held(), "");
    (pieces, most_held)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Whole text and any division of it against the definition, with a small limit of matches.
    #[test]
    fn output_is_as_defined(
        file in policy_file(),
        text in text(),
        cuts in prop::collection::vec(any::<usize>(), 0..40),
        max_match in prop_oneof![1usize..12, Just(MAX_MATCH)],
    ) {
        let filter = filter(&file, max_match);
        let mut reference = Reference::default();
        let expected = reference.filter(&file, &text, max_match);
        let (whole, _) = stream(&filter, &text, &[]);
        prop_assert_eq!(&output(&whole, &text), &expected);
        let (pieces, most_held) = stream(&filter, &text, &cuts);
        prop_assert_eq!(&output(&pieces, &text), &expected);
        prop_assert!(most_held <= filter.max_match(), "{} held", most_held);
        match filter.check(&text) {
            Verdict::Unchanged => prop_assert_eq!((text, None), expected),
            Verdict::Redacted { text, .. } => prop_assert_eq!((text, None), expected),
            Verdict::Blocked { rule } => prop_assert_eq!(Some(rule.to_string()), expected.1),
        }
    }

    /// Exactly the text is held back in which a match may still be in progress, for one pattern.
    #[test]
    fn no_more_than_needed_is_held_back(pattern in prop::sample::select(PATTERNS), text in text()) {
        let hir = regex_syntax::parse(pattern).unwrap();
        let mut stream = StreamFilter::new(of_rules(vec![redact(&[pattern], &[])]));
        let mut at = 0;
        for (i, c) in text.char_indices() {
            stream.push(c.encode_utf8(&mut [0; 4]));
            let text = &text[..i + c.len_utf8()];
            while let Some(next) = text[at..].chars().next() {
                let needs_more = Cell::new(false);
                let ends = ends(&hir, text, &[at].into(), &needs_more);
                if needs_more.get() {
                    break;
                }
                at = ends.last().copied().unwrap_or(at + next.len_utf8());
            }
            prop_assert_eq!(stream.held(), &text[at..], "after {:?}", text);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(30))]

    /// Long texts in any division, with the limit of production.
    #[test]
    fn long_texts_do_not_depend_on_their_pieces(
        file in policy_file(),
        parts in prop::collection::vec((prop::sample::select(FRAGMENTS), 1usize..1200), 1..8),
        cuts in prop::collection::vec(any::<usize>(), 0..200),
    ) {
        let text: String = parts.iter().map(|(fragment, n)| fragment.repeat(*n)).collect();
        let filter = filter(&file, MAX_MATCH);
        let (whole, _) = stream(&filter, &text, &[]);
        let (pieces, most_held) = stream(&filter, &text, &cuts);
        prop_assert_eq!(output(&pieces, &text), output(&whole, &text));
        prop_assert!(most_held <= MAX_MATCH + 4, "{} held", most_held);
    }
}

fn redact(deny: &[&str], allow: &[&str]) -> Rule {
    Rule {
        name: deny.concat(),
        on: Stage::all(),
        deny: deny.iter().map(|pattern| (*pattern).into()).collect(),
        allow: allow.iter().map(|pattern| (*pattern).into()).collect(),
        action: Action::Redact,
        replacement: "#".into(),
    }
}

fn of_rules(rules: Vec<Rule>) -> Filter {
    filter(&PolicyFile { rules, ..PolicyFile::default() }, MAX_MATCH)
}

/// Text is released with the first byte that excludes a match, and redacted with the last byte of a match.
#[test]
fn text_is_released_as_soon_as_possible() {
    let filter = of_rules(vec![redact(&["sk-[a-z]{3}", "abc+"], &[]), redact(&["bad"], &["\"[^\"]*\"", "so bad"])]);
    // characters of the input, output after each one
    for (text, expected) in [
        ("task-abx", "t|t|ta|ta|ta|ta|ta|ta#"),
        ("s sk x", "|s |s |s |s sk |s sk x"),
        ("abcc.", "||||#."),
        ("bad so bad bax", "||#|# |# |# so|# so |# so |# so |# so bad|# so bad |# so bad |# so bad |# so bad bax"),
    ] {
        let mut stream = StreamFilter::new(filter.clone());
        let mut output = String::new();
        let mut outputs = Vec::new();
        for c in text.chars() {
            for piece in stream.push(c.encode_utf8(&mut [0; 4])) {
                match piece {
                    Piece::Text { text, .. } => output.push_str(&text),
                    Piece::Redacted { replacement, .. } => output.push_str(&replacement),
                    Piece::Blocked { .. } => unreachable!(),
                }
            }
            outputs.push(output.clone());
        }
        assert_eq!(outputs.join("|"), expected, "{text}");
    }
}

#[test]
fn a_match_is_at_most_1024_bytes_long() {
    let filter = of_rules(vec![redact(&["a+", "€+!"], &[])]);
    let check = |text: &str| match filter.check(text) {
        Verdict::Redacted { text, .. } => text,
        verdict => format!("{verdict:?}"),
    };
    assert_eq!(check(&"a".repeat(MAX_MATCH)), "#");
    assert_eq!(check(&"a".repeat(2 * MAX_MATCH + 1)), "###");
    assert_eq!(check(&format!("{}!", "€".repeat(341))), "#");
    assert_eq!(check(&format!("{}!", "€".repeat(343))), "€€#");
}

/// Positions that reach the same state keep their earlier matches, and have the match of the byte that united them.
#[test]
fn united_positions_keep_their_matches() {
    for (rules, text, expected) in [
        (vec![redact(&["ab|(?:x|ab)[ab]*y"], &[])], "xabab", "x##"),
        (vec![redact(&["xa"], &[]), redact(&["(?:aab|ab)(?:cc)?"], &[])], "xaab", "##"),
    ] {
        let (pieces, _) = stream(&of_rules(rules), text, &[]);
        assert_eq!(output(&pieces, text), (expected.into(), None));
    }
}

#[test]
fn an_inner_exception_does_not_end_an_outer_one() {
    let filter = of_rules(vec![redact(&["c"], &["<[^>]*>", "b"])]);
    assert_eq!(filter.check("<cbc>"), Verdict::Unchanged);
}

#[test]
fn rules_precede_personal_data_of_the_same_length() {
    let on = Stage::all();
    let personal =
        PersonalData { kinds: vec![Kind::Email], max: 0, on, action: Action::Block, replacement: "p".into() };
    let file = PolicyFile { rules: vec![redact(&["x@y.zz"], &[])], personal_data: Some(personal), hook: None };
    let rules = vec!["x@y.zz".into()];
    assert_eq!(filter(&file, MAX_MATCH).check("x@y.zz"), Verdict::Redacted { text: "#".into(), rules });
}

#[test]
fn nothing_follows_a_block() {
    let block = Rule { action: Action::Block, ..redact(&["bad+"], &[]) };
    let mut stream = StreamFilter::new(of_rules(vec![block]));
    assert_eq!(stream.push("so b"), [Piece::Text { text: "so ".into(), range: 0..3 }]);
    assert_eq!(stream.push("add"), []);
    assert_eq!(stream.push(" and"), [Piece::Blocked { rule: "bad+".into(), at: 3 }]);
    assert_eq!((stream.push("more"), stream.finish(), stream.held()), (vec![], vec![], ""));
}

/// The first `max` matches pass, of all kinds together.
#[test]
fn personal_data_is_counted() {
    let text = "a@b.co, 10.0.0.1, c@d.co, 10.0.0.2";
    let kinds = vec![Kind::Email, Kind::Ipv4];
    for (max, expected) in [(0, "#, #, #, #"), (1, "a@b.co, #, #, #"), (3, "a@b.co, 10.0.0.1, c@d.co, #")] {
        let (on, kinds) = (Stage::all(), kinds.clone());
        let personal = PersonalData { kinds, max, on, action: Action::Redact, replacement: "#".into() };
        let file = PolicyFile { personal_data: Some(personal), ..PolicyFile::default() };
        let rules = vec!["personal-data".into()];
        assert_eq!(filter(&file, MAX_MATCH).check(text), Verdict::Redacted { text: expected.into(), rules });
    }
}

use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::String;
use alloc::vec::Vec;
use core::cell::RefCell;

use proptest::prelude::*;

use super::super::tests::match_text;
use super::chars::Unions;
use super::lark;
use super::lexemes::Lexemes;
use super::parse::{Expr, Grammar, Id, parse};
use crate::grammar_source::GrammarSource;

/// The ends of a rule's texts, by the rule and where they begin.
type Known = BTreeMap<(usize, Vec<usize>), Vec<usize>>;

/// The ends of all texts of an expression that begin at `from`, as llama.cpp defines it: character by character.
struct Plain<'a> {
    grammar: &'a Grammar,
    text: &'a [char],
    /// Ends of rules that were computed before.
    known: RefCell<Known>,
}

impl Plain<'_> {
    fn matches(grammar: &Grammar, text: &str) -> bool {
        let text: Vec<char> = text.chars().collect();
        let ends = Plain { grammar, text: &text, known: RefCell::default() }.ends(grammar.rules[grammar.root], &[0]);
        ends.contains(&text.len())
    }

    fn ends(&self, id: Id, from: &[usize]) -> Vec<usize> {
        let mut ends = match &self.grammar.exprs[id] {
            Expr::Char(set) => {
                let is_in = |c: char| set.ranges().iter().any(|(low, high)| (*low..=*high).contains(&u32::from(c)));
                from.iter().filter(|at| self.text.get(**at).is_some_and(|c| is_in(*c))).map(|at| at + 1).collect()
            }
            // where nothing matched; rules that refer to themselves do so after a character
            Expr::Rule(_) if from.is_empty() => Vec::new(),
            Expr::Rule(rule) => {
                let key = (*rule, from.to_vec());
                let known = self.known.borrow().get(&key).cloned();
                known.unwrap_or_else(|| {
                    let ends = self.ends(self.grammar.rules[*rule], from);
                    self.known.borrow_mut().insert(key, ends.clone());
                    ends
                })
            }
            Expr::Sequence(parts) => parts.iter().fold(from.to_vec(), |from, part| self.ends(*part, &from)),
            Expr::Choice(parts) => parts.iter().flat_map(|part| self.ends(*part, from)).collect(),
            Expr::Repeat(part, least, most) => {
                let (mut all, mut last) = (Vec::new(), from.to_vec());
                for n in 0..=most.unwrap_or(least + self.text.len() as u32 + 1) {
                    if n >= *least {
                        all.extend(&last);
                    }
                    last = self.ends(*part, &last);
                }
                all
            }
        };
        ends.sort_unstable();
        ends.dedup();
        ends
    }
}

fn source(grammar: &str) -> GrammarSource {
    GrammarSource::Lark(grammar.into(), Vec::new())
}

/// Whether a text is one of the grammar, after translation.
fn is_text(grammar: &str, text: &str) -> bool {
    match_text(&source(grammar), text) == Some(true)
}

const ARITHMETIC: &str = r#"
# sums and products
root  ::= (sum "=" blank number "\n")+
sum   ::= factor (blank [-+*/] blank factor)*
factor ::= number | name | "(" blank sum blank ")"
name  ::= [a-z] [a-z0-9_]* blank
number ::= [0-9]+ blank   # digits
blank ::= [ \t]*
"#;

const JSON: &str = r#"
root   ::= value
value  ::= object | array | string | number | ("true" | "false" | "null") blank
object ::= "{" blank (member ("," blank member)*)? "}" blank
member ::= string ":" blank value
array  ::= "[" blank (value ("," blank value)*)? "]" blank
string ::= "\"" ([^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt/] | "u" [0-9a-fA-F]{4}))* "\"" blank
number ::= "-"? ("0" | [1-9] [0-9]{0,15}) ("." [0-9]+)? ([eE] [-+]? [0-9]{1,3})? blank
blank  ::= | " " | "\n" [ \t]{0,20}
"#;

#[test]
fn grammars_match_their_texts() {
    let cases: [(&str, &[&str], &[&str]); 8] = [
        (
            ARITHMETIC,
            &["1=1\n", "a*(b_2 + 12) - 3 = 7\nx=1\n", "((x))=0\n"],
            &["", "1=1", "1+=2\n", "(1=1\n", "1 = x\n", "A=1\n"],
        ),
        (
            JSON,
            &["{}", "[1, -2.5e+10 , \"\\u00e9\\n\"]", "{\"a\": {\n  \"é☃𐍈\": null\n}}", "\"\"", "0 "],
            &["{", "[01]", "[1,]", "\"\\x\"", "\"\t\"", "{\"a\" 1}", "-", "1e", "  0"],
        ),
        ("root ::= (\"a\" | \"ab\") \"bc\"", &["abc", "abbc"], &["ab", "abb", "bc"]),
        ("root ::= x\nx ::= \"a\" x \"b\" | [a-c]*", &["", "aabb", "acb", "abcabc"], &["d", "aabbd"]),
        ("root ::= \"ab\"{2,3} .? [^a-z\\]]{1,}", &["ababA", "abababa0", "ababab]AB"], &["abA", "ababa", "abab]"]),
        ("root ::= (\n  \"a\" |\n  \"b\"\n)\n\n# end", &["a", "b"], &["", "ab"]),
        ("root ::= \"\\x41\\u00e9\\U0001F600\\t\\\\\\[\"", &["Aé😀\t\\["], &["Aé"]),
        ("root ::= item+\nitem ::= \"- \" [^\\r\\n]+ \"\\n\"", &["- a\n- bé\n"], &["- a", "-a\n", "- \n"]),
    ];
    for (grammar, texts, others) in cases {
        let parsed = parse(grammar).expect("a grammar");
        for (texts, expected) in [(texts, true), (others, false)] {
            for text in texts {
                assert_eq!(is_text(grammar, text), expected, "{grammar} {text:?}");
                assert_eq!(Plain::matches(&parsed, text), expected, "{grammar} {text:?}");
            }
        }
    }
}

#[test]
fn what_is_wrong_is_told_with_its_line() {
    for (grammar, message) in [
        ("root ::= a", "line 1: the rule `a` is not defined"),
        ("a ::= \"x\"", "there is no rule `root`"),
        ("", "there is no rule `root`"),
        ("root ::= \"x", "line 1: the text or set of characters does not end"),
        ("root ::= \"a\"\nb = \"x\"", "line 2: found `=`, expected `::=`"),
        ("root ::= \"a\" ]", "line 1: found `]`, expected the end of the line"),
        ("root ::= (\"a\"", "line 1: found the end, expected `)`"),
        ("root ::= [z-a]", "line 1: the range from 'z' to 'a' is empty"),
        ("root ::= []", "line 1: found an empty set of characters, expected at least one"),
        ("root ::= * \"a\"", "line 1: found a repetition, expected what is repeated before it"),
        ("root ::= \"a\"{3,2}", "line 1: found {3,2}, expected a maximum of at least 3"),
        ("root ::= \"a\"{5000}", "line 1: found 5000 repetitions, expected at most 2000"),
        ("root ::= \"\\q\"", "line 1: unknown escape `\\q`"),
        ("root ::= \"\\xg0\"", "line 1: found `\\x`, expected 2 hex digits of a character after it"),
        (
            "root ::= <think> \"a\"",
            "line 1: tokens (`<...>`) are not supported, expected texts, sets of characters and rules",
        ),
        ("_ ::= \"a\"", "line 1: found `_`, expected the name of a rule"),
    ] {
        assert_eq!(lark(grammar).expect_err(grammar), message);
    }
    let nested = format!("root ::= {}\"a\"{}", "(".repeat(5000), ")".repeat(5000));
    assert_eq!(lark(&nested).expect_err("nested"), "line 1: more than 64 nested groups");
}

/// Grammars whose translation would be larger than they are, or that take long to analyse, end with an error or a result.
#[test]
fn hostile_grammars_end() {
    let doubling: String = (0..60).map(|i| format!("r{i} ::= r{} r{}\n", i + 1, i + 1)).collect();
    let chain: String = (0..4000).map(|i| format!("r{i} ::= r{}\n", i + 1)).collect();
    let grammars = [
        format!("root ::= r0\n{doubling}r60 ::= \"a\""),
        format!("root ::= r0\n{chain}r4000 ::= \"a\" | r0"),
        format!("root ::= ({})* root?", "[a-y]? ".repeat(5000)),
        format!("root ::= \"x\" root | {}", "(\"a\" | \"ab\" | [^a]+ ) ".repeat(1500)),
        "root ::= root | root root".into(),
        "root ::= root".into(),
        "root ::= (((\"a\"*)*)*)* root?".into(),
    ];
    for grammar in grammars {
        if let Ok(text) = lark(&grammar) {
            assert!(text.len() < 3 << 20, "{}", text.len());
        }
    }
}

/// A class of `n` ranges, used in 10 doubling rules and 60 alternatives.
fn class_in_doubling_rules(n: u32) -> String {
    let class: String = (0..n).filter_map(|i| char::from_u32(0x4e00 + 2 * i)).collect();
    let doubling: String = (0..10).map(|i| format!("r{i} ::= r{} r{}\n", i + 1, i + 1)).collect();
    let alternatives: Vec<String> = (0..60).map(|i| format!("r{} \"{i}\"", i % 11)).collect();
    format!("root ::= {}\n{doubling}r10 ::= [{class}]\n", alternatives.join(" | "))
}

#[test]
fn equal_sets_of_characters_are_kept_once() {
    let grammar = parse(&class_in_doubling_rules(9000)).expect("a grammar");
    let mut unions = Unions::default();
    let result = Lexemes::with_unions(&grammar, &mut unions).map(|lexemes| lexemes.lexemes.len());
    // the class itself, and its union with the digits
    assert!(unions.n_ranges() < 100_000, "{result:?}: {} ranges", unions.n_ranges());
    let small = parse(&class_in_doubling_rules(9)).expect("a grammar");
    assert!(Lexemes::new(&small).is_ok());
    // sets that all differ have a bound
    let many: String = (0..900).map(|i| format!("a{i} ::= b{i} a{}? \"z\"\n", i + 1)).collect();
    let odd = |from: u32| (from..from + 40).filter_map(|i| char::from_u32(0x4e00 + 2 * i)).collect::<String>();
    let sets: String = (0..900).map(|i| format!("b{i} ::= [{}] root?\n", odd(40 * (i % 150)))).collect();
    let grammar = parse(&format!("root ::= a0\n{many}a900 ::= \"y\"\n{sets}")).expect("a grammar");
    let mut unions = Unions::default();
    let _ = Lexemes::with_unions(&grammar, &mut unions);
    assert!(unions.n_ranges() <= super::chars::MAX_UNION_RANGES + 20_000, "{} ranges", unions.n_ranges());
}

fn rule_text(rule: usize) -> impl Strategy<Value = String> {
    let chars = prop_oneof![
        Just("\"a\""),
        Just("\"b\""),
        Just("\"ab\""),
        Just("[ab]"),
        Just("[^a]"),
        Just("."),
        Just("\"é\""),
        Just("[è-ê]"),
        Just("\"\"")
    ];
    let count = prop_oneof![Just(""), Just(""), Just(""), Just("*"), Just("+"), Just("?"), Just("{2}"), Just("{0,2}")];
    // later rules, or any after a character
    let later = (rule + 1..4).map(|rule| format!("r{rule}")).collect::<Vec<_>>();
    let any = (0..4).map(|rule| format!("\"b\" r{rule}")).collect::<Vec<_>>();
    let item = prop_oneof![
        6 => chars.prop_map(String::from),
        2 => prop::sample::select([later, any].concat()),
    ];
    let item = (item, count).prop_map(|(item, count)| format!("({item}){count}"));
    let item = item.prop_recursive(2, 6, 3, |inner| {
        let group = prop::collection::vec(inner, 1..3).prop_map(|items| format!("({})", items.join(" | ")));
        (group, prop_oneof![Just(""), Just("*"), Just("?")]).prop_map(|(group, count)| format!("{group}{count}"))
    });
    prop::collection::vec(prop::collection::vec(item, 1..4), 1..3)
        .prop_map(|choices| choices.iter().map(|items| items.join(" ")).collect::<Vec<_>>().join(" | "))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]
    #[test]
    fn a_translation_matches_the_same_texts(
        rules in (rule_text(0), rule_text(1), rule_text(2), rule_text(3)),
        texts in prop::collection::vec("[abéè]{0,7}", 12),
    ) {
        let (a, b, c, d) = rules;
        let grammar = format!("root ::= r0\nr0 ::= {a}\nr1 ::= {b}\nr2 ::= {c}\nr3 ::= {d}");
        let parsed = parse(&grammar).expect("a grammar");
        for text in &texts {
            prop_assert_eq!(is_text(&grammar, text), Plain::matches(&parsed, text), "{}\n{:?}\n{}", grammar, text, lark(&grammar).unwrap());
        }
    }
}

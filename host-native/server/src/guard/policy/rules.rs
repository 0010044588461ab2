//! Rules of the policy file: data types, limits, and their compilation into filters.
//!
//! ```toml
//! [[rules]]
//! name = "secrets"
//! on = ["prompt", "answer"]
//! deny = ["sk-[A-Za-z0-9]{20,}"]
//! allow = ["sk-example[A-Za-z0-9]+"]
//! action = "redact"
//! replacement = "[key]"
//!
//! [personal-data]
//! kinds = ["email", "iban"]
//! max = 2
//! action = "block"
//!
//! [hook]
//! url = "https://policy.example/check"
//! deadline = "2s"
//! on-failure = "closed"
//! ```
//!
//! Patterns are regular expressions in the syntax of the `regex` crate, with these differences: of the matches that
//! begin at a position the longest counts, greedy or lazy; a match has at most [`MAX_MATCH`](super::automaton::MAX_MATCH) bytes
//! (1024), so that `a+` finds a long run in parts; `\b` and `\B` take ASCII letters, digits and `_` as word characters.

use std::collections::HashSet;
use std::sync::Arc;

use regex_syntax::hir::Hir;
use serde::Deserialize;

use super::Stage;
use super::automaton::{self, Automaton, PatternError};
use super::hook::{Hook, HookError, HookSettings};
use super::personal::Kind;
use super::stream::{Detector, Filter};

/// Name under which matches of `[personal-data]` are reported.
pub const PERSONAL_DATA: &str = "personal-data";
/// Limit of the patterns of a file.
pub const MAX_PATTERNS: usize = 256;
/// Limit of a replacement in bytes.
pub const MAX_REPLACEMENT: usize = 1024;

#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct PolicyFile {
    #[serde(default)]
    pub rules: Vec<Rule>,
    pub personal_data: Option<PersonalData>,
    pub hook: Option<HookSettings>,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Rule {
    pub name: String,
    #[serde(default = "Stage::all")]
    pub on: Vec<Stage>,
    pub deny: Vec<String>,
    /// Exceptions: a match of `deny` that lies inside a match of one of these does not count.
    #[serde(default)]
    pub allow: Vec<String>,
    pub action: Action,
    #[serde(default = "default_replacement")]
    pub replacement: String,
}

#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct PersonalData {
    pub kinds: Vec<Kind>,
    /// Matches per text, of all kinds together, that pass unchanged.
    #[serde(default)]
    pub max: usize,
    #[serde(default = "Stage::all")]
    pub on: Vec<Stage>,
    pub action: Action,
    #[serde(default = "default_replacement")]
    pub replacement: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Action {
    /// Refuse the prompt, or end the answer before the match.
    Block,
    /// Replace the match.
    Redact,
}

fn default_replacement() -> String {
    "[removed]".into()
}

/// Why a policy file was refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum PolicyError {
    #[error("rule {rule:?}: {list} pattern {pattern:?}: {source}")]
    Pattern { rule: String, list: &'static str, pattern: String, source: PatternError },
    #[error("rule {rule:?}: {list} patterns together: {source}")]
    Patterns { rule: String, list: &'static str, source: PatternError },
    #[error("{found} patterns, expected at most {MAX_PATTERNS}")]
    TooManyPatterns { found: usize },
    #[error("rules[{index}]: empty name")]
    NoName { index: usize },
    #[error("rules[{index}]: name {name:?} is taken; names must be unique and not {PERSONAL_DATA:?}")]
    TakenName { index: usize, name: String },
    #[error("{place}: empty list {list:?}, expected at least one entry")]
    EmptyList { place: String, list: &'static str },
    #[error("{place}: replacement has {found} bytes, expected at most {MAX_REPLACEMENT}")]
    LongReplacement { place: String, found: usize },
    #[error("hook: {0}")]
    Hook(#[from] HookError),
}

/// A compiled policy file.
#[derive(Debug, Clone)]
pub struct Policy {
    prompt: Filter,
    answer: Filter,
    hook: Option<Hook>,
}

impl Policy {
    /// Checks and compiles a policy file.
    ///
    /// # Errors
    /// The first entry that is invalid or exceeds a limit.
    pub fn new(file: &PolicyFile) -> Result<Policy, PolicyError> {
        check_limits(file)?;
        let mut detectors = Vec::new();
        for rule in &file.rules {
            detectors.push((rule.on.as_slice(), Arc::new(compile_rule(rule)?)));
        }
        if let Some(personal) = &file.personal_data {
            let kinds: HashSet<Kind> = personal.kinds.iter().copied().collect();
            for kind in Kind::ALL.into_iter().filter(|kind| kinds.contains(kind)) {
                detectors.push((personal.on.as_slice(), Arc::new(compile_kind(kind, personal)?)));
            }
        }
        let max_personal = file.personal_data.as_ref().map_or(0, |personal| personal.max);
        let filter = |stage| {
            let on_stage = detectors.iter().filter(|(on, _)| on.contains(&stage));
            Filter::new(on_stage.map(|(_, detector)| Arc::clone(detector)).collect(), max_personal)
        };
        let hook = file.hook.as_ref().map(Hook::new).transpose()?;
        Ok(Policy { prompt: filter(Stage::Prompt), answer: filter(Stage::Answer), hook })
    }

    #[must_use]
    pub fn filter(&self, stage: Stage) -> &Filter {
        match stage {
            Stage::Prompt => &self.prompt,
            Stage::Answer => &self.answer,
        }
    }

    /// The external hook, if one is set for this stage.
    #[must_use]
    pub fn hook(&self, stage: Stage) -> Option<&Hook> {
        self.hook.as_ref().filter(|hook| hook.is_on(stage))
    }
}

fn check_limits(file: &PolicyFile) -> Result<(), PolicyError> {
    let found = file.rules.iter().map(|rule| rule.deny.len() + rule.allow.len()).sum();
    if found > MAX_PATTERNS {
        return Err(PolicyError::TooManyPatterns { found });
    }
    let mut names = HashSet::from([PERSONAL_DATA]);
    for (index, rule) in file.rules.iter().enumerate() {
        if rule.name.is_empty() {
            return Err(PolicyError::NoName { index });
        }
        if !names.insert(&rule.name) {
            return Err(PolicyError::TakenName { index, name: rule.name.clone() });
        }
        let place = || format!("rule {:?}", rule.name);
        check_list(place, "deny", rule.deny.is_empty())?;
        check_list(place, "on", rule.on.is_empty())?;
        check_replacement(place, &rule.replacement)?;
    }
    if let Some(personal) = &file.personal_data {
        let place = || PERSONAL_DATA.into();
        check_list(place, "kinds", personal.kinds.is_empty())?;
        check_list(place, "on", personal.on.is_empty())?;
        check_replacement(place, &personal.replacement)?;
    }
    if let Some(hook) = &file.hook {
        check_list(|| "hook".into(), "on", hook.on.is_empty())?;
    }
    Ok(())
}

fn check_list(place: impl Fn() -> String, list: &'static str, is_empty: bool) -> Result<(), PolicyError> {
    if is_empty { Err(PolicyError::EmptyList { place: place(), list }) } else { Ok(()) }
}

fn check_replacement(place: impl Fn() -> String, replacement: &str) -> Result<(), PolicyError> {
    if replacement.len() > MAX_REPLACEMENT {
        return Err(PolicyError::LongReplacement { place: place(), found: replacement.len() });
    }
    Ok(())
}

fn compile_rule(rule: &Rule) -> Result<Detector, PolicyError> {
    let deny = compile_list(&rule.name, "deny", &rule.deny)?;
    let allow = (!rule.allow.is_empty()).then(|| compile_list(&rule.name, "allow", &rule.allow)).transpose()?;
    Ok(Detector {
        name: rule.name.as_str().into(),
        deny,
        allow,
        personal: None,
        action: rule.action,
        replacement: rule.replacement.as_str().into(),
    })
}

fn compile_kind(kind: Kind, settings: &PersonalData) -> Result<Detector, PolicyError> {
    Ok(Detector {
        name: PERSONAL_DATA.into(),
        deny: compile_list(PERSONAL_DATA, kind.name(), &[kind.pattern()])?,
        allow: None,
        personal: Some(kind),
        action: settings.action,
        replacement: settings.replacement.as_str().into(),
    })
}

fn compile_list<S: AsRef<str>>(rule: &str, list: &'static str, patterns: &[S]) -> Result<Automaton, PolicyError> {
    let parse = |pattern: &S| {
        automaton::parse(pattern.as_ref()).map_err(|source| {
            let pattern = pattern.as_ref().into();
            PolicyError::Pattern { rule: rule.into(), list, pattern, source }
        })
    };
    let hirs = patterns.iter().map(parse).collect::<Result<Vec<Hir>, _>>()?;
    Automaton::new(&hirs).map_err(|source| PolicyError::Patterns { rule: rule.into(), list, source })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::hook::OnFailure;
    use super::*;

    fn policy(file: &str) -> Result<Policy, PolicyError> {
        Policy::new(&toml::from_str(file).unwrap())
    }

    #[test]
    fn a_file_is_read() {
        let file: PolicyFile = toml::from_str(
            r#"
            [[rules]]
            name = "secrets"
            on = ["answer"]
            deny = ["sk-[A-Za-z0-9]{20,}"]
            allow = ["sk-example[A-Za-z0-9]+"]
            action = "block"

            [personal-data]
            kinds = ["email", "phone", "credit-card", "iban", "ipv4"]
            action = "redact"
            replacement = ""

            [hook]
            url = "https://policy.example/check"
            deadline = "1s 500ms"
            on-failure = "closed"
            on = ["prompt"]
            "#,
        )
        .unwrap();
        let rule = Rule {
            name: "secrets".into(),
            on: vec![Stage::Answer],
            deny: vec!["sk-[A-Za-z0-9]{20,}".into()],
            allow: vec!["sk-example[A-Za-z0-9]+".into()],
            action: Action::Block,
            replacement: "[removed]".into(),
        };
        assert_eq!(file.rules, [rule]);
        let kinds = Kind::ALL.to_vec();
        let (on, replacement) = (Stage::all(), String::new());
        assert_eq!(file.personal_data, Some(PersonalData { kinds, max: 0, on, action: Action::Redact, replacement }));
        let hook = file.hook.as_ref().unwrap();
        assert_eq!((hook.deadline, hook.on_failure), (Duration::from_millis(1500), OnFailure::Closed));
        let policy = Policy::new(&file).unwrap();
        assert_eq!(policy.filter(Stage::Prompt).max_match(), super::super::automaton::MAX_MATCH);
        assert!(policy.hook(Stage::Prompt).is_some() && policy.hook(Stage::Answer).is_none());
    }

    #[test]
    fn rules_are_for_their_stage() {
        let policy = policy("[[rules]]\nname = 'a'\non = ['answer']\ndeny = ['x{5}']\naction = 'block'").unwrap();
        assert!(policy.filter(Stage::Prompt).is_empty() && !policy.filter(Stage::Answer).is_empty());
        assert_eq!(policy.filter(Stage::Answer).max_match(), 5);
    }

    #[test]
    fn unknown_fields_and_values_are_refused() {
        for file in [
            "rule = []",
            "[[rules]]\nname = 'a'\ndeny = ['x']\naction = 'block'\ndenny = []",
            "[[rules]]\nname = 'a'\ndeny = ['x']\naction = 'warn'",
            "[[rules]]\nname = 'a'\ndeny = ['x']",
            "[personal-data]\nkinds = ['name']\naction = 'block'",
            "[personal-data]\nkinds = ['email']\naction = 'block'\nmax = -1",
            "[hook]\nurl = 'http://a'\ndeadline = '2'\non-failure = 'open'",
            "[hook]\nurl = 'http://a'\ndeadline = '2s'",
        ] {
            assert!(toml::from_str::<PolicyFile>(file).is_err(), "{file}");
        }
    }

    #[test]
    fn errors_name_their_place() {
        let rule = |fields: &str| format!("[[rules]]\nname = 'a'\naction = 'block'\n{fields}\n");
        let cases = [
            (rule("deny = ['x', 'y*']"), r#"rule "a": deny pattern "y*": matches the empty string"#),
            (rule("deny = ['x']\nallow = ['(']"), "rule \"a\": allow pattern \"(\": regex parse error:"),
            (rule("deny = ['x']\nallow = ['(']"), "unclosed group"),
            (rule("deny = ['x{9}{99}{999}']"), r#"rule "a": deny pattern "x{9}{99}{999}": automaton exceeds"#),
            (rule("deny = ['[ab]*a[ab]{17}']"), r#"rule "a": deny patterns together: automaton exceeds"#),
            (rule("deny = []"), r#"rule "a": empty list "deny""#),
            (rule("deny = ['x']\non = []"), r#"rule "a": empty list "on""#),
            (rule("deny = ['x']").repeat(2), r#"rules[1]: name "a" is taken"#),
            (rule("deny = ['x']").replace("'a'", "''"), "rules[0]: empty name"),
            (rule("deny = ['x']").replace("'a'", "'personal-data'"), "rules[0]: name \"personal-data\" is taken"),
            (rule(&format!("deny = [{}]", "'x',".repeat(257))), "257 patterns, expected at most 256"),
            (rule(&format!("deny = ['x']\nreplacement = '{}'", "x".repeat(1025))), "replacement has 1025 bytes"),
            ("[personal-data]\nkinds = []\naction = 'block'".into(), r#"personal-data: empty list "kinds""#),
            ("[hook]\nurl = 'x'\ndeadline = '2s'\non-failure = 'open'".into(), "hook: url \"x\""),
            ("[hook]\nurl = 'http://x'\ndeadline = '2s'\non-failure = 'open'\non = []".into(), "hook: empty list"),
        ];
        for (file, expected) in cases {
            let error = policy(&file).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}\nexpected: {expected}");
        }
    }
}

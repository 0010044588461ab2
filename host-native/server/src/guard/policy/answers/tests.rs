use proptest::prelude::*;

use super::*;
use crate::guard::policy::{Filter, Policy, PolicyFile, Verdict};

fn filter(rules: &str) -> Filter {
    let file: PolicyFile = toml::from_str(rules).unwrap();
    Policy::new(&file).unwrap().filter(Stage::Answer).clone()
}

fn token(id: u32, text: &str) -> Update {
    Update::Token { token: id, text: text.into(), logprob: 0.0, top: Vec::new() }
}

fn done(text: &str, reason: FinishReason) -> Update {
    Update::Done { text: text.into(), reason, n_tokens: 0, receipt: None }
}

/// Text, token IDs and reason of an answer that comes as these updates.
fn answer(filter: &Filter, updates: impl IntoIterator<Item = Update>) -> (String, Vec<u32>, &'static str) {
    let mut answer = AnswerFilter::new(StreamFilter::new(filter.clone()));
    let (mut all, mut ids, mut end) = (String::new(), Vec::new(), None);
    for update in updates.into_iter().flat_map(|update| answer.push(update)) {
        assert!(end.is_none(), "an update after the end");
        match update {
            Update::Token { token, text, .. } => {
                ids.push(token);
                all.push_str(&text);
            }
            Update::Done { text, reason, .. } => {
                all.push_str(&text);
                if matches!(reason, FinishReason::StopToken(_)) {
                    ids.pop();
                }
                end = Some(reason.name());
            }
            _ => {}
        }
    }
    (all, ids, end.unwrap())
}

const REDACT: &str =
    "[[rules]]\nname = \"r\"\ndeny = [\"sk-[0-9]{2,4}\", \"ab+c\"]\naction = \"redact\"\nreplacement = \"[x]\"";
const BLOCK: &str = "[[rules]]\nname = \"b\"\ndeny = [\"sk-[0-9]{2,4}\", \"ab+c\"]\naction = \"block\"";

#[test]
fn tokens_of_a_match_are_dropped() {
    let updates =
        || [token(1, "key "), token(2, "s"), token(3, "k-1"), token(4, "23, and"), token(5, " more"), token(9, "")];
    let end = || done("", FinishReason::StopToken(9));
    let redacted = answer(&filter(REDACT), updates().into_iter().chain([end()]));
    assert_eq!(redacted, ("key [x], and more".into(), vec![1, 5], "stop"));
    let blocked = answer(&filter(BLOCK), updates().into_iter().chain([end()]));
    assert_eq!(blocked, ("key ".into(), vec![1], "content_filter"));
}

#[test]
fn text_leaves_as_soon_as_it_is_decided() {
    let mut answer = AnswerFilter::new(StreamFilter::new(filter(REDACT)));
    assert_eq!(answer.push(token(1, "one two")).len(), 1);
    assert_eq!(answer.push(token(2, " sk")).len(), 0);
    assert_eq!(answer.push(token(3, "y")).len(), 2);
    assert_eq!(answer.push(token(4, "")).len(), 1);
}

#[test]
fn the_text_of_the_end_is_filtered() {
    let updates = [token(1, "a"), token(2, ""), done("bbc sk-12", FinishReason::Length)];
    assert_eq!(answer(&filter(REDACT), updates), ("[x] [x]".into(), vec![], "length"));
    let updates = [token(1, "x"), token(9, ""), done(" sk-12", FinishReason::StopToken(9))];
    assert_eq!(answer(&filter(REDACT), updates), ("x [x]".into(), vec![1], "stop"));
}

proptest! {
    /// However a text is divided into tokens, the answer's text is that of the whole text at once.
    #[test]
    fn the_division_into_tokens_changes_nothing(
        parts in prop::collection::vec("[abcsk0-9 -]{0,4}", 0..12), last in "[abcsk0-9 -]{0,4}", ends_by_token: bool,
    ) {
        for rules in [REDACT, BLOCK] {
            let filter = filter(rules);
            let mut updates: Vec<Update> = parts.iter().zip(1..).map(|(text, id)| token(id, text)).collect();
            let reason = if ends_by_token { FinishReason::StopToken(99) } else { FinishReason::Length };
            if ends_by_token {
                updates.push(token(99, ""));
            }
            updates.push(done(&last, reason));
            let (text, ids, reason) = answer(&filter, updates);
            let whole = parts.concat() + &last;
            match filter.check(&whole) {
                Verdict::Unchanged => {
                    prop_assert_eq!(&text, &whole);
                    prop_assert_eq!(ids, (1..=parts.len() as u32).collect::<Vec<_>>());
                }
                Verdict::Redacted { text: expected, .. } => {
                    prop_assert_eq!(&text, &expected);
                    prop_assert!(!ids.contains(&99));
                }
                Verdict::Blocked { .. } => {
                    prop_assert!(whole.starts_with(&text) && reason == "content_filter", "{text:?} of {whole:?}");
                    prop_assert!(matches!(filter.check(&text), Verdict::Unchanged));
                }
            }
        }
    }
}

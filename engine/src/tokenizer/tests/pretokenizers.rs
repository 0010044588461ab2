//! Pre-tokenizers against Hugging Face tokenizers (`tests/scripts/make_pretokenizer_cases.py`).

use alloc::string::{String, ToString};
use alloc::vec;
use alloc::vec::Vec;

use proptest::prelude::*;
use serde_json::Value;

use super::super::pretokenizers;
use super::super::words::Splitter;

const CASES: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../fixtures/tokenizer/pretokenizer.json"));

fn words(name: &str, text: &str) -> Vec<String> {
    let mut words = vec![];
    let splitter = Splitter::new(pretokenizers::find(name).unwrap().steps);
    splitter.split(text, |start, end| words.push(text[start..end].to_string()));
    words
}

#[test]
fn equal_to_regular_expressions() {
    let cases: Value = serde_json::from_str(CASES).unwrap();
    let mut wrong = 0;
    for (name, cuts) in cases["word_lengths"].as_object().unwrap() {
        for (text, lengths) in cases["texts"].as_array().unwrap().iter().zip(cuts.as_array().unwrap()) {
            let text = text.as_str().unwrap();
            let mut chars = text.chars();
            let expected: Vec<String> = lengths
                .as_array()
                .unwrap()
                .iter()
                .map(|n| chars.by_ref().take(n.as_u64().unwrap() as usize).collect())
                .collect();
            let found = words(name, text);
            if found != expected {
                std::eprintln!("{name}: {text:?}\n   {found:?}\n   {expected:?}");
                wrong += 1;
            }
        }
    }
    assert_eq!(wrong, 0);
}

proptest! {
    /// Words are not empty, follow each other and cover the text.
    #[test]
    fn words_cover_any_text(text in "(?s).{0,60}") {
        for name in pretokenizers::names() {
            let words = words(name, &text);
            prop_assert!(words.iter().all(|word| !word.is_empty()), "{}", name);
            prop_assert_eq!(words.concat(), text.as_str(), "{}", name);
        }
    }
}

/// Long runs of one character take linear time.
#[test]
fn long_runs() {
    let n = 50_000;
    let cases: Value = serde_json::from_str(CASES).unwrap();
    let names: Vec<&String> = cases["word_lengths"].as_object().unwrap().keys().collect();
    for unit in ["a", "A", " ", "\n", " \n", "1", "!", "\u{301}", "漢", "é", "'", "a ", "\u{3000}", "²", "/"] {
        for tail in ["", "a", "5", "\u{200b}", "!"] {
            let text = unit.repeat(n) + tail;
            for name in &names {
                let mut end = 0;
                let splitter = Splitter::new(pretokenizers::find(name).unwrap().steps);
                splitter.split(&text, |_, e| end = e);
                assert_eq!(end, text.len(), "{name} {unit:?}");
            }
        }
    }
}

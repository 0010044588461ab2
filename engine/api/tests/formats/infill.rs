//! Prompts of fill-in-the-middle models.

use starling_api::infill::Infill;

use crate::check_error;
use crate::vocabulary::{BOS, FIRST_CONTROL, bytes, tokenizer};

const PREFIX: u32 = FIRST_CONTROL;
const SUFFIX: u32 = FIRST_CONTROL + 1;
const MIDDLE: u32 = FIRST_CONTROL + 2;

fn infill(files: &[(&str, &str)]) -> Infill {
    let files = files.iter().map(|(name, text)| (name.to_string(), text.to_string())).collect();
    Infill { prefix: "fn f(".into(), suffix: ") {}<fim_middle>".into(), files }
}

/// What follows the other files.
fn end() -> Vec<u32> {
    [&[PREFIX][..], &bytes("fn f("), &[SUFFIX], &bytes(") {}<fim_middle>"), &[MIDDLE]].concat()
}

#[test]
fn prefix_and_suffix_in_each_family() {
    let families = [
        ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"],
        ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"],
        ["<fim-prefix>", "<fim-suffix>", "<fim-middle>"],
        ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"],
        ["▁<PRE>", "▁<SUF>", "▁<MID>"],
    ];
    for family in families {
        let tokenizer = tokenizer(&family);
        assert!(Infill::is_supported(&tokenizer), "{family:?}");
        // the token in the suffix of the request stays text
        let found = infill(&[]).encode(&tokenizer, "suffix");
        assert_eq!(found, Ok([&[BOS][..], &end()].concat()), "{family:?}");
    }
}

#[test]
fn other_files_are_named_where_the_model_has_tokens_for_it() {
    let plain = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"];
    let files = [("a.rs", "x"), ("b.rs", "y z")];
    let found = infill(&files).encode(&tokenizer(&plain), "suffix");
    let snippets = "\n\n--- snippet ---\n\nx\n\n--- snippet ---\n\ny z";
    assert_eq!(found, Ok([&[BOS][..], &bytes(snippets), &end()].concat()));

    let with_files = [&plain[..], &["<repo_name>", "<file_sep>"]].concat();
    let (repository, file) = (MIDDLE + 1, MIDDLE + 2);
    let found = infill(&files).encode(&tokenizer(&with_files), "suffix");
    let expected = [
        &[BOS, repository][..],
        &bytes("myproject\n"),
        &[file],
        &bytes("a.rs\nx"),
        &[file],
        &bytes("b.rs\ny z"),
        &[file],
        &bytes("filename\n"),
        &end(),
    ];
    assert_eq!(found, Ok(expected.concat()));
}

#[test]
fn a_model_without_all_tokens_is_refused() {
    for controls in [&["<fim_prefix>", "<fim_suffix>"][..], &[]] {
        let tokenizer = tokenizer(controls);
        assert!(!Infill::is_supported(&tokenizer));
        let error = infill(&[]).encode(&tokenizer, "input_suffix").expect_err("no tokens");
        check_error(&error, 400, Some("input_suffix"), "no fill-in-the-middle tokens");
        assert_eq!(error.code, Some("unsupported_parameter"));
    }
}

#[test]
fn bytes_of_all_texts() {
    assert_eq!(infill(&[("a", "xyz"), ("", "é")]).bytes(), "fn f(".len() + ") {}<fim_middle>".len() + 6);
}

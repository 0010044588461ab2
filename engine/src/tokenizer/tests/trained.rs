//! WordPiece and Unigram as their originals cut: `tests/scripts/make_tokenizer_cases.py`.

use alloc::string::String;
use alloc::vec::Vec;

use proptest::prelude::*;
use serde_json::Value;

use super::super::*;
use super::file::File;
use crate::gguf::Gguf;

const WORDPIECE: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../fixtures/tokenizer/wordpiece.json"));
const UNIGRAM: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../fixtures/tokenizer/unigram.json"));
const UNIGRAM_FILE: &[u8] = include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/../fixtures/tokenizer/unigram.gguf"));
const ALL: EncodeOptions = EncodeOptions { add_special: true, parse_special: false };

fn strings(value: &Value) -> Vec<&str> {
    value.as_array().unwrap().iter().map(|text| text.as_str().unwrap()).collect()
}

/// The tokenizer of a case of the JSON file, and the file it was made from.
fn wordpiece(case: &Value) -> (Tokenizer, File) {
    let tokens = strings(&case["tokens"]);
    let types: Vec<i32> = (0..tokens.len()).map(|id| if id < 5 { 3 } else { 1 }).collect();
    let mut file = File::new("bert").strings("tokenizer.ggml.tokens", &tokens);
    for (key, id) in [("bos", 2), ("seperator", 3), ("unknown", 1)] {
        file = file.u32(&alloc::format!("tokenizer.ggml.{key}_token_id"), id);
    }
    let file = file
        .i32s("tokenizer.ggml.token_type", &types)
        .bool("tokenizer.ggml.normalizer.lowercase", case["lowercase"].as_bool().unwrap())
        .bool("tokenizer.ggml.normalizer.strip_accents", case["strip_accents"].as_bool().unwrap());
    (file.load().unwrap(), file)
}

fn unigram(case: &Value) -> Tokenizer {
    let ints = |key: &str| case[key].as_array().unwrap().iter().map(|v| v.as_i64().unwrap() as i32).collect::<Vec<_>>();
    let scores: Vec<f32> = case["scores"].as_array().unwrap().iter().map(|v| v.as_f64().unwrap() as f32).collect();
    File::new("t5")
        .strings("tokenizer.ggml.tokens", &strings(&case["tokens"]))
        .i32s("tokenizer.ggml.token_type", &ints("types"))
        .f32s("tokenizer.ggml.scores", &scores)
        .u32("tokenizer.ggml.unknown_token_id", 0)
        .bool("tokenizer.ggml.add_eos_token", false)
        .bool("tokenizer.ggml.add_space_prefix", case["prefix"].as_bool().unwrap())
        .bool("tokenizer.ggml.remove_extra_whitespaces", case["tidy"].as_bool().unwrap())
        .load()
        .unwrap()
}

fn unigram_of_file() -> Tokenizer {
    Tokenizer::from_gguf(&Gguf::parse(UNIGRAM_FILE).unwrap()).unwrap()
}

/// All tokenizers of the fixtures, with the ids that are expected for each text.
fn cases() -> Vec<(Tokenizer, Value)> {
    let (words, unigrams): (Value, Value) =
        (serde_json::from_str(WORDPIECE).unwrap(), serde_json::from_str(UNIGRAM).unwrap());
    assert_eq!(words["texts"], unigrams["texts"]);
    let words = words["cases"].as_array().unwrap().iter().map(|case| (wordpiece(case).0, case["ids"].clone()));
    let mut cases: Vec<(Tokenizer, Value)> = words.collect();
    cases.push((unigram_of_file(), unigrams["file"]["ids"].clone()));
    cases.extend(unigrams["cases"].as_array().unwrap().iter().map(|case| (unigram(case), case["ids"].clone())));
    cases
}

fn check_offsets(tokenizer: &Tokenizer, text: &str) {
    let (ids, ranges) = tokenizer.encode_with_offsets(text, ALL);
    assert_eq!(ids, tokenizer.encode(text, ALL));
    assert_eq!(ids.len(), ranges.len());
    assert!(ranges.iter().all(|r| r.start <= r.end && r.end <= text.len()), "{text:?} {ranges:?}");
    assert!(ranges.windows(2).all(|r| r[0].end == r[1].start), "{text:?} {ranges:?}");
}

#[test]
fn equal_to_the_originals() {
    let texts: Value = serde_json::from_str(WORDPIECE).unwrap();
    let (texts, mut wrong) = (strings(&texts["texts"]), 0);
    for (n, (tokenizer, expected)) in cases().into_iter().enumerate() {
        for (text, ids) in texts.iter().zip(expected.as_array().unwrap()) {
            let ids: Vec<u32> = ids.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
            let found = tokenizer.encode(text, ALL);
            if found != ids {
                let names = |ids: &[u32]| {
                    let name = |&id| String::from_utf8_lossy(tokenizer.token_text(id).unwrap()).into_owned();
                    ids.iter().map(name).collect::<Vec<_>>()
                };
                std::eprintln!("case {n}: {text:?}\n   {:?}\n   {:?}", names(&found), names(&ids));
                wrong += 1;
            }
            check_offsets(&tokenizer, text);
        }
    }
    assert_eq!(wrong, 0);
}

#[test]
fn decoding() {
    let cases: Value = serde_json::from_str(WORDPIECE).unwrap();
    let (tokenizer, _) = wordpiece(&cases["cases"][0]);
    let decode = |tokenizer: &Tokenizer, text: &str| {
        let bytes = tokenizer.decode(&tokenizer.encode(text, ALL), DecodeOptions { skip_special: true });
        String::from_utf8(bytes).unwrap()
    };
    assert_eq!(decode(&tokenizer, "The Engine, and\tthe naïve tests."), "the engine , and the naive tests .");
    assert_eq!(
        decode(&unigram_of_file(), "  The engine,\u{3000} and ｔｈｅ ① tests 漢. "),
        "The engine, and the 1 tests 漢."
    );
}

#[test]
fn keys_say_what_is_added() {
    let cases: Value = serde_json::from_str(WORDPIECE).unwrap();
    let (_, file) = wordpiece(&cases["cases"][0]);
    let file = file.bool("tokenizer.ggml.add_bos_token", false);
    assert_eq!(file.load().unwrap().encode("", ALL), [3]);
    assert_eq!(file.bool("tokenizer.ggml.add_eos_token", false).load().unwrap().encode("", ALL), [0u32; 0]);
}

proptest! {
    #[test]
    fn offsets_cover_any_text(text in "(?s).{0,40}|[a-z ▁áé,.漢]{0,60}") {
        for (tokenizer, _) in cases() {
            check_offsets(&tokenizer, &text);
        }
    }

    /// A map of any bytes, long enough to be walked.
    #[test]
    fn any_charsmap(size in 0u32..100, bytes in prop::collection::vec(any::<u8>(), 0..120), text in "(?s).{0,20}") {
        if let Ok(Some(map)) = charsmap::CharsMap::new("key", &[&size.to_le_bytes()[..], &bytes].concat()) {
            for (at, _) in text.char_indices() {
                let found = map.longest(&text.as_bytes()[at..]);
                prop_assert!(found.is_none_or(|(_, len)| (1..=text.len() - at).contains(&len)));
            }
        }
    }
}

/// Texts of one thing, as long as a request may be.
#[test]
fn long_texts() {
    for (tokenizer, _) in cases() {
        for unit in ["a", " ", "e ", "e\u{301}", "\u{301}", "漢", "▁", "ﷺ", "!", "\0", "각"] {
            let text = unit.repeat(300_000 / unit.len());
            tokenizer.encode(&text, ALL);
        }
    }
}

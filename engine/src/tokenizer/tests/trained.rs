//! WordPiece, Unigram and character BPE against the original implementations (`tests/scripts/make_tokenizer_cases.py`).

use alloc::string::String;
use alloc::vec::Vec;

use proptest::prelude::*;
use serde_json::Value;

use super::super::*;
use super::file::File;
use crate::gguf::Gguf;

const WORDPIECE: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../fixtures/tokenizer/wordpiece.json"));
const UNIGRAM: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../fixtures/tokenizer/unigram.json"));
const CHARACTERS: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../fixtures/tokenizer/characters.json"));
const UNIGRAM_FILE: &[u8] = include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/../fixtures/tokenizer/unigram.gguf"));
const RWKV: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../fixtures/tokenizer/rwkv.json"));
const TEXTS: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../fixtures/tokenizer/pretokenizer.json"));
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

fn ints(values: &Value) -> Vec<i32> {
    values.as_array().unwrap().iter().map(|v| v.as_i64().unwrap() as i32).collect()
}

fn characters(case: &Value) -> Tokenizer {
    File::new("gpt2")
        .str("tokenizer.ggml.pre", case["pre"].as_str().unwrap())
        .strings("tokenizer.ggml.tokens", &strings(&case["tokens"]))
        .i32s("tokenizer.ggml.token_type", &ints(&case["types"]))
        .strings("tokenizer.ggml.merges", &strings(&case["merges"]))
        .u32("tokenizer.ggml.unknown_token_id", 0)
        .load()
        .unwrap()
}

fn unigram(case: &Value) -> Tokenizer {
    let scores: Vec<f32> = case["scores"].as_array().unwrap().iter().map(|v| v.as_f64().unwrap() as f32).collect();
    File::new("t5")
        .strings("tokenizer.ggml.tokens", &strings(&case["tokens"]))
        .i32s("tokenizer.ggml.token_type", &ints(&case["types"]))
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

/// All tokenizers of the fixtures, with the expected ids of each text.
fn cases() -> Vec<(Tokenizer, Value)> {
    let [words, unigrams, merged] =
        [WORDPIECE, UNIGRAM, CHARACTERS].map(|json| serde_json::from_str::<Value>(json).unwrap());
    assert_eq!((&words["texts"], &words["texts"]), (&unigrams["texts"], &merged["texts"]));
    let words = words["cases"].as_array().unwrap().iter().map(|case| (wordpiece(case).0, case["ids"].clone()));
    let mut cases: Vec<(Tokenizer, Value)> = words.collect();
    cases.push((unigram_of_file(), unigrams["file"]["ids"].clone()));
    cases.extend(unigrams["cases"].as_array().unwrap().iter().map(|case| (unigram(case), case["ids"].clone())));
    cases.extend(merged["cases"].as_array().unwrap().iter().map(|case| (characters(case), case["ids"].clone())));
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
fn characters_round_trip() {
    let cases: Value = serde_json::from_str(CHARACTERS).unwrap();
    let tokenizer = characters(&cases["cases"][0]);
    for text in strings(&cases["texts"]) {
        let decoded = tokenizer.decode(&tokenizer.encode(text, ALL), DecodeOptions::default());
        assert_eq!(String::from_utf8(decoded).unwrap(), text.replace('▁', " "));
    }
    // a run of line feeds is a token where there is one, whatever the merges
    let file = File::new("gemma4").strings::<&str>("tokenizer.ggml.merges", &[]);
    let tokenizer = file.strings("tokenizer.ggml.tokens", &["a", "\n", "\n\n"]).load().unwrap();
    assert_eq!(tokenizer.encode("a\n\na\na\n\n\n", ALL), [0, 2, 0, 1, 0, 1, 1, 1]);
}

#[test]
fn keys_say_what_is_added() {
    let cases: Value = serde_json::from_str(WORDPIECE).unwrap();
    let (_, file) = wordpiece(&cases["cases"][0]);
    let file = file.bool("tokenizer.ggml.add_bos_token", false);
    assert_eq!(file.load().unwrap().encode("", ALL), [3]);
    assert_eq!(file.bool("tokenizer.ggml.add_eos_token", false).load().unwrap().encode("", ALL), [0u32; 0]);
}

/// Joins query and document as llama.cpp's server does.
#[test]
fn pairs_of_texts() {
    let cases: Value = serde_json::from_str(WORDPIECE).unwrap();
    let (_, bert) = wordpiece(&cases["cases"][0]);
    let more = [("<s>", 3), ("</s>", 3)];
    let roberta = super::file::byte_level("roberta-bpe", &[], &more).u32("tokenizer.ggml.bos_token_id", 256);
    let roberta = roberta.u32("tokenizer.ggml.eos_token_id", 257).u32("tokenizer.ggml.seperator_token_id", 257);
    let roberta = roberta.bool("tokenizer.ggml.add_bos_token", true).bool("tokenizer.ggml.add_eos_token", true);
    let gpt2 = roberta.clone().str("tokenizer.ggml.pre", "gpt-2");
    let (eos, sep) = ("tokenizer.ggml.add_eos_token", "tokenizer.ggml.add_sep_token");
    let files: [(&File, &[u32]); 7] = [
        (&bert, &[3]),
        (&bert.clone().bool(eos, true).bool(sep, false), &[3]),
        (&bert.clone().bool(eos, false).bool(sep, false), &[]),
        (&roberta, &[257, 257]),
        (&roberta.clone().bool(sep, false), &[257]),
        (&gpt2, &[257]),
        (&gpt2.clone().bool(eos, false).bool(sep, true), &[257]),
    ];
    for (n, (file, between)) in files.into_iter().enumerate() {
        let tokenizer = file.load().unwrap();
        let plain = EncodeOptions::default();
        let alone = [tokenizer.encode("the", plain), tokenizer.encode("test", plain)];
        let ends = |text: &str| (tokenizer.encode(text, ALL), tokenizer.encode(text, plain).len());
        let (whole, len) = ends("the");
        let first = usize::from(tokenizer.adds_bos());
        let expected = [&whole[..first], &alone[0], between, &alone[1], &whole[first + len..]].concat();
        assert_eq!(tokenizer.encode_pair("the", "test", ALL), expected, "{n}");
        assert_eq!(tokenizer.encode_pair("the", "test", plain), alone.concat(), "{n}");
    }
    let absent = super::file::byte_level("gpt-2", &[], &[]).bool(sep, true);
    assert!(matches!(absent.load(), Err(crate::error::LoadError::Metadata { key, .. }) if key == sep));
}

proptest! {
    #[test]
    fn offsets_cover_any_text(text in "(?s).{0,40}|[a-z ▁áé,.漢]{0,60}") {
        for (tokenizer, _) in cases() {
            check_offsets(&tokenizer, &text);
        }
    }

    /// An arbitrary character map, long enough to be traversed.
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

/// Texts that repeat one string, as long as a request may be.
#[test]
fn long_texts() {
    for (tokenizer, _) in cases() {
        for unit in ["a", " ", "e ", "e\u{301}", "\u{301}", "漢", "▁", "ﷺ", "!", "\0", "각"] {
            let text = unit.repeat(300_000 / unit.len());
            tokenizer.encode(&text, ALL);
        }
    }
}

/// The tokens of RWKV that the texts contain; all others are unused.
#[test]
fn rwkv_splits_into_the_longest_tokens() {
    let (case, texts): (Value, Value) = (serde_json::from_str(RWKV).unwrap(), serde_json::from_str(TEXTS).unwrap());
    let mut tokens: Vec<String> = (0..65536).map(|id| alloc::format!("[PAD{id}]")).collect();
    let mut types = alloc::vec![5; tokens.len()];
    (tokens[0], types[0]) = ("<s>".into(), 3);
    for token in case["tokens"].as_array().unwrap() {
        let id = token[0].as_u64().unwrap() as usize;
        (tokens[id], types[id]) = (token[1].as_str().unwrap().into(), 1);
    }
    let file = File::new("rwkv").strings("tokenizer.ggml.tokens", &tokens).i32s("tokenizer.ggml.token_type", &types);
    let tokenizer = file.load().unwrap();
    let (texts, ids) = (strings(&texts["texts"]), case["ids"].as_array().unwrap());
    assert_eq!(texts.len(), ids.len());
    for (text, want) in texts.into_iter().zip(ids) {
        let got = tokenizer.encode(text, ALL);
        assert_eq!(got.iter().map(|id| *id as i32).collect::<Vec<_>>(), ints(want), "{text:?}");
        assert_eq!(tokenizer.decode(&got, DecodeOptions::default()), text.as_bytes());
        let (_, ranges) = tokenizer.encode_with_offsets(text, ALL);
        assert_eq!(ranges.iter().map(|range| range.len()).sum::<usize>(), text.len());
    }
    // text never becomes the control token
    assert!(!tokenizer.encode("<s>", ALL).contains(&0));
    assert_eq!(tokenizer.encode("<s>", EncodeOptions { parse_special: true, ..ALL }), [0]);
}

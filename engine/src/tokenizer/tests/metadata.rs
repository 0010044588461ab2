//! Special tokens and invalid files.

use alloc::string::{String, ToString};
use alloc::vec::Vec;

use super::super::*;
use super::file::{File, byte_level, sentence_piece};
use crate::error::LoadError;

const PLAIN: EncodeOptions = EncodeOptions { add_special: false, parse_special: false };
const PARSE: EncodeOptions = EncodeOptions { add_special: false, parse_special: true };

fn texts(tokenizer: &Tokenizer, ids: &[u32]) -> Vec<String> {
    ids.iter().map(|&id| String::from_utf8_lossy(tokenizer.token_text(id).unwrap()).into_owned()).collect()
}

#[test]
fn special_tokens_in_text() {
    let more = [("<|a|>", 3), ("<|a|><|b|>", 3), ("<tool>", 4), ("<unk>", 2)];
    let tokenizer = byte_level("gpt-2", &[], &more).load().unwrap();
    let check = |text: &str, options: EncodeOptions, expected: &[&str]| {
        let ids = tokenizer.encode(text, options);
        assert_eq!(texts(&tokenizer, &ids), expected, "{text}");
        assert_eq!(tokenizer.decode(&ids, DecodeOptions::default()), text.as_bytes());
    };
    check("x<|a|>y", PARSE, &["x", "<|a|>", "y"]);
    check("x<|a|>y", PLAIN, &["x", "<", "|", "a", "|", ">", "y"]);
    check("<|a|><|b|><|a|>", PARSE, &["<|a|><|b|>", "<|a|>"]);
    check("<tool>", PLAIN, &["<tool>"]);
    check("<tool", PARSE, &["<", "t", "o", "o", "l"]);
    check("<unk><|a|", PARSE, &["<unk>", "<", "|", "a", "|"]);
    let ids = tokenizer.encode("x<|a|><tool>", PARSE);
    assert_eq!(tokenizer.decode(&ids, DecodeOptions { skip_special: true }), b"x<tool>");
}

#[test]
fn phi3_tokens_take_white_space() {
    let file = byte_level("gpt-2", &[], &[("<|user|>", 3), ("<s>", 3)]);
    let check = |name: &str, expected: &[&str]| {
        let tokenizer = file.clone().str("general.name", name).load().unwrap();
        let (ids, ranges) = tokenizer.encode_with_offsets("<|user|> \nx<s> <|user|>\n", PARSE);
        assert_eq!(texts(&tokenizer, &ids), expected, "{name}");
        assert_eq!(ranges.last().unwrap().end, 24);
    };
    check("Phi-3 Mini", &["<|user|>", "x", "<s>", "Ġ", "<|user|>"]);
    check("Other", &["<|user|>", "Ġ", "Ċ", "x", "<s>", "Ġ", "<|user|>", "Ċ"]);
}

#[test]
fn masks_take_white_space_before_them() {
    let file = byte_level("gpt-2", &[], &[("<mask>", 3), ("[MASK]", 3)]);
    let check = |file: &File, expected: &[&str]| {
        let tokenizer = file.load().unwrap();
        let text = " \n<mask> a \t[MASK]\u{a0}<mask>";
        let (ids, ranges) = tokenizer.encode_with_offsets(text, PARSE);
        assert_eq!(texts(&tokenizer, &ids), expected);
        assert_eq!((ranges[0].start, ranges.last().unwrap().end), (0, text.len()));
        assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start));
    };
    let nbsp = ["Â", "ł"];
    for (key, value) in [("tokenizer.ggml.pre", "jina-v2-de"), ("general.architecture", "jina-bert-v3")] {
        let expected = [&["<mask>", "Ġ", "a", "Ġ", "ĉ", "[MASK]"][..], &nbsp, &["<mask>"]].concat();
        check(&file.clone().str(key, value), &expected);
    }
    let expected = [&["Ġ", "Ċ", "<mask>", "Ġ", "a", "[MASK]"][..], &nbsp, &["<mask>"]].concat();
    check(&file.clone().str("general.name", "Modern-BERT base"), &expected);
    let expected = [&["Ġ", "Ċ", "<mask>", "Ġ", "a", "Ġ", "ĉ", "[MASK]"][..], &nbsp, &["<mask>"]].concat();
    check(&file, &expected);
}

#[test]
fn text_never_becomes_control() {
    // a merge, or a word, that is a control token
    let merges = [("x".to_string(), "y".to_string())];
    for pre in ["gpt-2", "llama-bpe"] {
        let file = byte_level(pre, &merges, &[]);
        let n = file.load().unwrap().n_vocab();
        let mut types = alloc::vec![1; n];
        types[n - 1] = 3;
        let tokenizer = file.i32s("tokenizer.ggml.token_type", &types).load().unwrap();
        assert_eq!(tokenizer.encode("xy", PLAIN).len(), 2);
        assert_eq!(tokenizer.encode("xy", PARSE).len(), 1);
    }
    let tokenizer = sentence_piece(&[("s".into(), 0.0), ("<s".into(), 0.0), ("<".into(), 0.0)]).load().unwrap();
    assert!(!tokenizer.encode("<s>", PLAIN).contains(&1));
}

/// The token of a byte may be marked as a control token, in either spelling.
#[test]
fn bytes_never_become_control() {
    let file = byte_level("gpt-2", &[], &[]);
    let mut types = alloc::vec![1; 256];
    types[usize::from(b'x')] = 3;
    let tokenizer = file.i32s("tokenizer.ggml.token_type", &types).load().unwrap();
    assert_eq!(texts(&tokenizer, &tokenizer.encode("axb", PLAIN)), ["a", "b"]);
    assert_eq!(texts(&tokenizer, &tokenizer.encode("axb", PARSE)), ["a", "x", "b"]);
    let file = sentence_piece(&[]);
    let mut types: Vec<i32> = [2, 3, 3].into_iter().chain([6; 256]).collect();
    types[3 + usize::from(b'\n')] = 3;
    let tokenizer = file.i32s("tokenizer.ggml.token_type", &types).load().unwrap();
    assert!(!tokenizer.encode("a\n", PLAIN).contains(&(3 + u32::from(b'\n'))));
}

/// At each position there is one longest token, whichever way it is searched.
#[test]
fn many_nested_special_tokens() {
    let names: Vec<String> = (1..=200).map(|n| "a".repeat(n) + "b").collect();
    let more: Vec<(&str, i32)> = names.iter().map(|name| (name.as_str(), 4)).chain([("aa", 3)]).collect();
    let tokenizer = byte_level("gpt-2", &[], &more).load().unwrap();
    let ids = tokenizer.encode(&("a".repeat(300_000) + "b"), PLAIN);
    assert_eq!(ids.len(), 300_000 - 200 + 1);
    let ids = tokenizer.encode(&("a".repeat(1000) + "b"), PARSE);
    assert_eq!(texts(&tokenizer, &ids[398..]), ["aa", "aa", &names[199]]);
    let aab = "aab<s>";
    assert_eq!(texts(&tokenizer, &tokenizer.encode_with_literals(aab, PARSE, &[0])), ["aab", "<", "s", ">"]);
    assert_eq!(texts(&tokenizer, &tokenizer.encode_with_literals("aaaac", PARSE, &[0, 2])), ["a", "aa", "a", "c"]);
}

#[test]
fn qwen_texts_are_in_form_c() {
    let merges = [("Ã".to_string(), "©".to_string())];
    for (pre, normalises) in [("qwen2", true), ("qwen35", true), ("gpt-2", false)] {
        let tokenizer = byte_level(pre, &merges, &[("<e\u{301}>", 3)]).load().unwrap();
        let (composed, decomposed) = ("caf\u{e9} x", "cafe\u{301} x");
        assert_eq!(tokenizer.encode(composed, PLAIN) == tokenizer.encode(decomposed, PLAIN), normalises, "{pre}");
        let (ids, ranges) = tokenizer.encode_with_offsets(decomposed, PLAIN);
        assert_eq!(ids, tokenizer.encode(decomposed, PLAIN));
        assert_eq!(ranges.last().unwrap().end, decomposed.len());
        assert!(ranges.windows(2).all(|pair| pair[0].end == pair[1].start));
        // control tokens are found in the text as it is
        assert_eq!(texts(&tokenizer, &tokenizer.encode("<e\u{301}>", PARSE)), ["<e\u{301}>"]);
    }
}

#[test]
fn added_tokens_and_ends() {
    let more = [("<s>", 3), ("<|im_end|>", 1), ("<|eom_id|>", 3), ("<x>", 3)];
    let file = byte_level("qwen2", &[], &more).u32("tokenizer.ggml.bos_token_id", 256);
    let file = file.u32("tokenizer.ggml.eos_token_id", 259);
    let tokenizer = file.load().unwrap();
    let all = EncodeOptions { add_special: true, parse_special: true };
    assert!(tokenizer.encode("", all).is_empty());
    assert_eq!((tokenizer.bos(), tokenizer.eos(), tokenizer.eot()), (Some(256), Some(259), Some(257)));
    let ends: Vec<u32> = (0..261).filter(|&id| tokenizer.is_end_of_generation(id)).collect();
    assert_eq!(ends, [257, 258, 259]);
    assert!(tokenizer.is_control(257) && !tokenizer.is_control(0) && !tokenizer.is_control(9999));

    let tokenizer = file.clone().bool("tokenizer.ggml.add_bos_token", true).bool("tokenizer.ggml.add_eos_token", true);
    let (ids, ranges) = tokenizer.load().unwrap().encode_with_offsets("a", all);
    assert_eq!((ids.as_slice(), ranges.as_slice()), (&[256, u32::from(b'a'), 259][..], &[0..0, 0..1, 1..1][..]));
    assert_eq!(file.str("tokenizer.ggml.pre", "llama-bpe").load().unwrap().encode("", all), [256]);
}

#[test]
fn harmony_messages_go_on() {
    let more = [("<|end|>", 3), ("<|return|>", 3), ("<|call|>", 3)];
    let tokenizer = byte_level("gpt-4o", &[], &more).load().unwrap();
    assert_eq!([256, 257, 258].map(|id| tokenizer.is_end_of_generation(id)), [false, true, true]);
}

#[test]
fn wrong_files() {
    let good = byte_level("gpt-2", &[("a".into(), "b".into())], &[]);
    let n = good.load().unwrap().n_vocab();
    let spm = sentence_piece(&[]);
    let metadata: [(File, &str); 8] = [
        (good.clone().without("tokenizer.ggml.model"), "tokenizer.ggml.model"),
        (good.clone().without("tokenizer.ggml.tokens"), "tokenizer.ggml.tokens"),
        (good.clone().strings::<&str>("tokenizer.ggml.tokens", &[]), "tokenizer.ggml.tokens"),
        (good.clone().without("tokenizer.ggml.merges"), "tokenizer.ggml.merges"),
        (good.clone().i32s("tokenizer.ggml.token_type", &[1]), "tokenizer.ggml.token_type"),
        (good.clone().bool("tokenizer.ggml.add_bos_token", true), "tokenizer.ggml.add_bos_token"),
        (spm.clone().without("tokenizer.ggml.scores"), "tokenizer.ggml.scores"),
        (spm.clone().f32s("tokenizer.ggml.scores", &[f32::NAN; 259]), "tokenizer.ggml.scores"),
    ];
    for (file, wrong) in metadata {
        assert!(matches!(file.load(), Err(LoadError::Metadata { key, .. }) if key == wrong), "{wrong}");
    }
    // wrong element types
    let types = good.clone().f32s("tokenizer.ggml.token_type", &alloc::vec![1.0; n]);
    assert!(matches!(types.load(), Err(LoadError::Metadata { found, .. }) if found.contains("F32")));
    let scores = spm.clone().i32s("tokenizer.ggml.scores", &[1; 259]);
    assert!(matches!(scores.load(), Err(LoadError::Metadata { found, .. }) if found.contains("I32")));
    // special tokens longer than the automaton's limit
    let long: Vec<String> = (0..5000).map(|i| alloc::format!("<{i:0>250}>")).collect();
    let long: Vec<(&str, i32)> = long.iter().map(|name| (name.as_str(), 4)).collect();
    let error = byte_level("gpt-2", &[], &long).load().unwrap_err().to_string();
    assert!(error.contains("1260000 bytes"), "{error}");
    for file in [good.clone().str("tokenizer.ggml.pre", "?"), good.clone().str("tokenizer.ggml.model", "?")] {
        assert!(matches!(file.load(), Err(LoadError::Unsupported { .. })));
    }
    // unusual but accepted: ids out of range, merges of unknown pieces, empty, equal and binary tokens
    let odd = good.u32("tokenizer.ggml.eos_token_id", 1 << 31);
    let odd =
        odd.strings("tokenizer.ggml.merges", &["", " ", "a", "a  b", " a b", "a q", "zz a", "a b", "\u{0} b", "a b"]);
    assert_eq!(odd.load().unwrap().eos(), None);
    assert_eq!(odd.load().unwrap().encode("ab", PLAIN), [n as u32 - 1]);
    let tokens: [&[u8]; 7] = [b"", b"a", b"", b"a", b"\xff\xfe", b"\0", b"b"];
    let kinds = ["gpt2", "llama", "bert", "t5", "gemma4", "whitespace"];
    for types in [1, 2, 3, 4, 5, 6, 7, -1] {
        for kind in kinds {
            let file = odd.clone().str("tokenizer.ggml.model", kind);
            let top = if kind == "t5" { f32::MAX } else { f32::INFINITY };
            let file = file.clone().strings("tokenizer.ggml.tokens", &tokens);
            let file = file.i32s("tokenizer.ggml.token_type", &[types; 7]);
            let file = file.f32s("tokenizer.ggml.scores", &[-0.0, 0.0, top, 1.0, -1.0, f32::MIN, 2.0]);
            let tokenizer = file.load().unwrap();
            for options in [PLAIN, PARSE, EncodeOptions { add_special: true, parse_special: true }] {
                let (ids, _) = tokenizer.encode_with_offsets("ab\0 漢", options);
                assert_eq!(ids, tokenizer.encode("ab\0 漢", options));
                tokenizer.decode(&ids, DecodeOptions::default());
            }
        }
    }
}

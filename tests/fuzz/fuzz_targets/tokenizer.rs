//! A vocabulary of any kind and a text of arbitrary bytes: loading refuses or accepts, encoding never panics, and offsets
//! cover the text.
//!
//! From `tests/`: `cargo +nightly fuzz run tokenizer -- -max_len=4096`.
#![no_main]

use libfuzzer_sys::fuzz_target;
use starling::gguf::{Gguf, GgufWriter, Value};
use starling::tokenizer::{DecodeOptions, EncodeOptions, Tokenizer};

/// Splits off a list of pieces: a count, then a length byte before each.
fn pieces<'a>(data: &mut &'a [u8]) -> Vec<&'a [u8]> {
    let mut list = Vec::new();
    let Some((&n, mut rest)) = data.split_first() else { return list };
    for _ in 0..n {
        let Some((&len, tail)) = rest.split_first() else { break };
        let (piece, tail) = tail.split_at(tail.len().min(len as usize % 9));
        list.push(piece);
        rest = tail;
    }
    *data = rest;
    list
}

fuzz_target!(|data: &[u8]| {
    let mut data = data;
    let Some((&kind, rest)) = data.split_first() else { return };
    data = rest;
    let tokens = pieces(&mut data);
    let merges = pieces(&mut data);
    let mut w = GgufWriter::new();
    let model = ["gpt2", "llama", "bert", "t5", "gemma4", "whitespace", "gpt2", "t5"][kind as usize & 7];
    let pre = ["gpt-2", "llama-bpe", "jina-v2-de", "default", "gemma4", "sarvam-moe", "exaone-moe", "tiny_aya"];
    let pre = pre[kind as usize >> 3 & 7];
    let switch = kind >> 6 & 1 == 1;
    let types: Vec<i32> = tokens.iter().map(|t| t.first().map_or(1, |b| i32::from(*b % 7))).collect();
    let scores: Vec<f32> = tokens.iter().map(|t| t.len() as f32).collect();
    let written = w.str("tokenizer.ggml.model", model).is_ok()
        && w.str("tokenizer.ggml.pre", pre).is_ok()
        && w.str_array("tokenizer.ggml.tokens", &tokens).is_ok()
        && w.str_array("tokenizer.ggml.merges", &merges).is_ok()
        && w.i32_array("tokenizer.ggml.token_type", &types).is_ok()
        && w.f32_array("tokenizer.ggml.scores", &scores).is_ok()
        && ["add_space_prefix", "remove_extra_whitespaces", "normalizer.lowercase", "normalizer.strip_accents"]
            .iter()
            .all(|key| w.metadata(&format!("tokenizer.ggml.{key}"), &Value::Bool(switch)).is_ok());
    if !written {
        return;
    }
    let file = w.header();
    let Ok(gguf) = Gguf::parse(&file) else { return };
    let Ok(tokenizer) = Tokenizer::from_gguf(&gguf) else { return };
    let text = String::from_utf8_lossy(data);
    for parse_special in [false, true] {
        let (ids, ranges) = tokenizer.encode_with_offsets(&text, EncodeOptions { add_special: false, parse_special });
        assert_eq!(ids, tokenizer.encode(&text, EncodeOptions { add_special: false, parse_special }));
        assert!(ranges.windows(2).all(|r| r[0].end <= r[1].end && r[0].start <= r[1].start));
        assert!(ranges.last().is_none_or(|r| r.end == text.len()));
        tokenizer.decode(&ids, DecodeOptions { skip_special: parse_special });
    }
});

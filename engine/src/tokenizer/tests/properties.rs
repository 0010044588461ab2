//! Properties of all vocabularies and texts.

use alloc::string::{String, ToString};
use alloc::vec;
use alloc::vec::Vec;

use proptest::prelude::*;
use unicode_normalization::UnicodeNormalization;

use super::super::*;
use super::file::{byte_level, sentence_piece};

const PLAIN: EncodeOptions = EncodeOptions { add_special: false, parse_special: false };

/// Merges of letters and of earlier merges, any rank.
fn merges() -> impl Strategy<Value = Vec<(String, String)>> {
    prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>()), 0..40).prop_flat_map(|picks| {
        let mut pieces: Vec<String> = ["a", "b", "c", "Ġ"].map(String::from).to_vec();
        let mut merges = vec![];
        for (left, right) in picks {
            let (left, right) = (left.get(&pieces).clone(), right.get(&pieces).clone());
            pieces.push(left.clone() + &right);
            merges.push((left, right));
        }
        Just(merges).prop_shuffle()
    })
}

/// Lowest rank first, leftmost first, looking at all pairs every time.
fn naive_bpe(tokenizer: &Tokenizer, merges: &[(String, String)], word: &str) -> Vec<u32> {
    let mut parts: Vec<String> = word.bytes().map(|byte| vocab::byte_char(byte).to_string()).collect();
    loop {
        let rank = |i: usize| merges.iter().position(|(l, r)| *l == parts[i] && *r == parts[i + 1]);
        let best = (0..parts.len().saturating_sub(1)).filter_map(|i| Some((rank(i)?, i))).min();
        let Some((_, i)) = best else { break };
        let right = parts.remove(i + 1);
        parts[i].push_str(&right);
    }
    parts.iter().map(|part| tokenizer.token_id(part.as_bytes()).unwrap()).collect()
}

/// Best score first, leftmost first.
fn naive_spm(tokenizer: &Tokenizer, scores: &[(String, f32)], text: &str) -> Vec<u32> {
    let mut parts: Vec<String> = text.chars().map(String::from).collect();
    loop {
        let mut best: Option<(f32, usize)> = None;
        for i in 0..parts.len().saturating_sub(1) {
            let joined = parts[i].clone() + &parts[i + 1];
            if let Some((_, score)) = scores.iter().find(|(piece, _)| *piece == joined)
                && best.is_none_or(|(other, _)| *score > other)
            {
                best = Some((*score, i));
            }
        }
        let Some((_, i)) = best else { break };
        let right = parts.remove(i + 1);
        parts[i].push_str(&right);
    }
    let ids = |part: &String| match tokenizer.token_id(part.as_bytes()) {
        Some(id) => vec![id],
        None => part.bytes().map(|byte| 3 + u32::from(byte)).collect(),
    };
    parts.iter().flat_map(ids).collect()
}

fn check_offsets(tokenizer: &Tokenizer, text: &str, ids: &[u32]) {
    let (again, ranges) = tokenizer.encode_with_offsets(text, PLAIN);
    assert_eq!(again, ids);
    assert_eq!(ranges.len(), ids.len());
    let mut end = 0;
    for range in &ranges {
        assert_eq!(range.start, end);
        end = range.end;
    }
    assert_eq!(end, text.len());
}

proptest! {
    #[test]
    fn bpe_is_lowest_rank_first(merges in merges(), text in "[abc]{0,20}|[ab]{60,130}|( [abc]{1,6}){0,12}") {
        let tokenizer = byte_level("gpt-2", &merges, &[]).load().unwrap();
        let words: Vec<&str> = text.split_inclusive(|_| false).flat_map(|t| t.split(' ')).collect();
        let mut expected = vec![];
        for (i, word) in words.iter().enumerate() {
            let word = if i == 0 { word.to_string() } else { String::from(" ") + word };
            expected.extend(naive_bpe(&tokenizer, &merges, &word));
        }
        let ids = tokenizer.encode(&text, PLAIN);
        prop_assert_eq!(&ids, &expected);
        check_offsets(&tokenizer, &text, &ids);
    }

    #[test]
    fn bpe_round_trips(merges in merges(), text in any::<String>(), pre in any::<prop::sample::Index>()) {
        let in_bytes = |name: &&str| pretokenizers::find(name).unwrap().spelling == vocab::Spelling::Bytes;
        let pre = *pre.get(&pretokenizers::names().filter(in_bytes).collect::<Vec<_>>());
        let tokenizer = byte_level(pre, &merges, &[("<|x|>", 3), ("  ", 4)]).load().unwrap();
        let ids = tokenizer.encode(&text, PLAIN);
        let decoded = tokenizer.decode(&ids, DecodeOptions::default());
        let is_normalised = pretokenizers::find(pre).unwrap().nfc;
        let expected: String = if is_normalised { text.nfc().collect() } else { text.clone() };
        prop_assert_eq!(String::from_utf8(decoded).unwrap(), expected);
        check_offsets(&tokenizer, &text, &ids);
    }

    #[test]
    fn spm_is_best_score_first(
        pieces in prop::collection::vec(("▁?[abé]{1,4}|▁{1,3}|a▁b|[abé▁]{2,3}", -3i8..3), 0..30),
        text in "[abé ▁x漢]{0,30}|[ab]{60,120}",
        prefix in any::<bool>(),
    ) {
        let mut pieces: Vec<(String, f32)> = pieces.into_iter().map(|(p, s)| (p, f32::from(s))).collect();
        pieces.sort_by(|a, b| a.0.cmp(&b.0));
        pieces.dedup_by(|a, b| a.0 == b.0);
        let file = sentence_piece(&pieces).bool("tokenizer.ggml.add_space_prefix", prefix);
        let tokenizer = file.load().unwrap();
        let spelled = text.replace(' ', "▁");
        let spelled = if prefix && !text.is_empty() { String::from("▁") + &spelled } else { spelled };
        // characters outside the vocabulary, spaces included, become their bytes
        let spaces_as_bytes = |ids: Vec<u32>| {
            let meta = "▁".bytes().map(|byte| 3 + u32::from(byte)).collect::<Vec<_>>();
            let mut out: Vec<u32> = vec![];
            for id in ids {
                out.push(id);
                if out.ends_with(&meta) {
                    out.truncate(out.len() - meta.len());
                    out.push(3 + 0x20);
                }
            }
            out
        };
        let ids = tokenizer.encode(&text, PLAIN);
        prop_assert_eq!(&ids, &spaces_as_bytes(naive_spm(&tokenizer, &pieces, &spelled)));
        check_offsets(&tokenizer, &text, &ids);
        let decoded = String::from_utf8(tokenizer.decode(&ids, DecodeOptions::default())).unwrap();
        prop_assert_eq!(decoded, text.replace('▁', " "));
    }
}

/// Texts that repeat one string, as long as a request may be.
#[test]
fn long_texts() {
    let merges: Vec<(String, String)> = [("a", "a"), ("aa", "a"), ("aa", "aa"), ("Ġ", "Ġ"), ("ĠĠ", "ĠĠ"), ("a", "b")]
        .map(|(l, r)| (l.to_string(), r.to_string()))
        .to_vec();
    let pieces = ["a", "aa", "aaaa", "▁", "▁▁", "a▁", "ab"].map(|p| (p.to_string(), p.len() as f32)).to_vec();
    let tokenizers = [
        byte_level("gpt-2", &merges, &[("<|<|<|<|", 4), (&"a".repeat(200), 4)]).load().unwrap(),
        byte_level("llama-bpe", &merges, &[("<|end|>", 3)]).load().unwrap(),
        sentence_piece(&pieces).load().unwrap(),
        sentence_piece(&pieces[..5]).load().unwrap(),
    ];
    for tokenizer in &tokenizers {
        for unit in ["a", " ", "ab", "<|", "漢", "\n", "a ", "▁", "😀"] {
            let text = unit.repeat(300_000 / unit.len());
            let ids = tokenizer.encode(&text, EncodeOptions { add_special: true, parse_special: true });
            let decoded = tokenizer.decode(&ids, DecodeOptions { skip_special: true });
            assert_eq!(String::from_utf8(decoded).unwrap().replace('▁', " "), text.replace('▁', " "));
        }
    }
}

//! The prompts of all reference models.

use alloc::string::String;
use alloc::vec::Vec;
use std::path::Path;

use serde_json::Value;

use super::super::*;

#[test]
fn prompts_of_all_references() {
    let dir = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../fixtures/reference"));
    let mut n_prompts = 0;
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|e| e == "json") {
            n_prompts += check(&path);
        }
    }
    assert!(n_prompts > 50, "{n_prompts}");
}

fn check(path: &Path) -> usize {
    let case: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let (Some(prompts), Some(files)) = (case["prompts"].as_array(), case["files"].as_array()) else { return 0 };
    for file in files {
        let file = path.with_file_name(file["file"].as_str().unwrap());
        let Ok(bytes) = std::fs::read(&file) else { continue };
        let tokenizer = Tokenizer::from_gguf(&Gguf::parse(&bytes).unwrap()).unwrap();
        let keeps_text = !matches!(tokenizer.algorithm, Algorithm::WordPiece(_));
        for prompt in prompts {
            let text = prompt["text"].as_str().unwrap();
            let expected: Vec<u32> =
                prompt["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
            let options = EncodeOptions { add_special: true, parse_special: true };
            let ids = tokenizer.encode(text, options);
            assert_eq!(ids, expected, "{path:?} {text:?}");
            let (again, ranges) = tokenizer.encode_with_offsets(text, options);
            assert_eq!(again, ids);
            assert_eq!(ranges.iter().map(|r| r.len()).sum::<usize>(), text.len());
            let decoded = tokenizer.decode(&ids, DecodeOptions { skip_special: true });
            if !keeps_text {
                continue;
            }
            assert_eq!(String::from_utf8(decoded).unwrap(), text);
        }
    }
    prompts.len()
}

/// Tokens that contain a text, and sequences that only with their last token do.
#[test]
fn sequences_with_a_text_end_where_it_ends() {
    let file = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../fixtures/starling-tiny/starling-tiny-q8_0.gguf"));
    let bytes = std::fs::read(file).unwrap();
    let tokenizer = Tokenizer::from_gguf(&Gguf::parse(&bytes).unwrap()).unwrap();
    let piece = |id: u32| tokenizer.piece(id).unwrap_or_default();
    let holds = |ids: &[u32], text: &str| {
        let all: Vec<u8> = ids.iter().flat_map(|id| piece(*id)).copied().collect();
        all.windows(text.len()).any(|part| part == text.as_bytes())
    };
    for text in ["\n", ":", "\"", "*", " the", "said. The", "day,\n", "\u{e9}"] {
        let all = tokenizer.sequences_with(text);
        assert!(!all.is_empty(), "{text:?}");
        for ids in &all {
            assert!(holds(ids, text), "{text:?} {ids:?}");
            assert!(!holds(&ids[..ids.len() - 1], text), "{text:?} {ids:?}");
        }
        for id in 0..tokenizer.n_vocab() as u32 {
            assert_eq!(holds(&[id], text), all.contains(&[id].into()), "{text:?} {id}");
        }
    }
    assert!(tokenizer.sequences_with("said. The").iter().any(|ids| ids.len() > 2));
    assert!(tokenizer.sequences_with("").is_empty());
}

//! Small vocabularies as GGUF files.

use alloc::string::{String, ToString};
use alloc::vec::Vec;

use super::super::*;
use crate::error::LoadError;
use crate::gguf::Gguf;

/// Metadata of a file, as encoded values under their keys.
#[derive(Default, Clone)]
pub(super) struct File(Vec<(String, Vec<u8>)>);

impl File {
    pub(super) fn new(model: &str) -> File {
        File::default().str("general.architecture", "llama").str("tokenizer.ggml.model", model)
    }

    fn with(mut self, key: &str, kind: u32, value: &[u8]) -> File {
        self.0.retain(|(k, _)| k != key);
        self.0.push((key.to_string(), [&kind.to_le_bytes(), value].concat()));
        self
    }

    pub(super) fn str(self, key: &str, value: &str) -> File {
        self.with(key, 8, &string(value.as_bytes()))
    }

    pub(super) fn u32(self, key: &str, value: u32) -> File {
        self.with(key, 4, &value.to_le_bytes())
    }

    pub(super) fn bool(self, key: &str, value: bool) -> File {
        self.with(key, 7, &[u8::from(value)])
    }

    pub(super) fn strings<S: AsRef<[u8]>>(self, key: &str, values: &[S]) -> File {
        let body = values.iter().map(|value| string(value.as_ref())).collect::<Vec<_>>().concat();
        self.with(key, 9, &[&8u32.to_le_bytes()[..], &(values.len() as u64).to_le_bytes(), &body].concat())
    }

    pub(super) fn i32s(self, key: &str, values: &[i32]) -> File {
        let body: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.with(key, 9, &[&5u32.to_le_bytes()[..], &(values.len() as u64).to_le_bytes(), &body].concat())
    }

    pub(super) fn f32s(self, key: &str, values: &[f32]) -> File {
        let body: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.with(key, 9, &[&6u32.to_le_bytes()[..], &(values.len() as u64).to_le_bytes(), &body].concat())
    }

    pub(super) fn without(mut self, key: &str) -> File {
        self.0.retain(|(k, _)| k != key);
        self
    }

    pub(super) fn load(&self) -> Result<Tokenizer, LoadError> {
        let mut bytes = [&b"GGUF"[..], &3u32.to_le_bytes(), &0u64.to_le_bytes()].concat();
        bytes.extend_from_slice(&(self.0.len() as u64).to_le_bytes());
        for (key, value) in &self.0 {
            bytes.extend_from_slice(&string(key.as_bytes()));
            bytes.extend_from_slice(value);
        }
        Tokenizer::from_gguf(&Gguf::parse(&bytes).unwrap())
    }
}

fn string(bytes: &[u8]) -> Vec<u8> {
    [&(bytes.len() as u64).to_le_bytes()[..], bytes].concat()
}

/// A byte-level vocabulary: all bytes, then what the merges make, then `more` with their types.
pub(super) fn byte_level(pre: &str, merges: &[(String, String)], more: &[(&str, i32)]) -> File {
    let mut tokens: Vec<String> = (0..=255).map(|byte| vocab::byte_char(byte).to_string()).collect();
    for (left, right) in merges {
        let joined = left.clone() + right;
        if !tokens.contains(&joined) {
            tokens.push(joined);
        }
    }
    let mut types = alloc::vec![1; tokens.len()];
    for &(text, kind) in more {
        tokens.push(text.to_string());
        types.push(kind);
    }
    let merges: Vec<String> = merges.iter().map(|(left, right)| left.clone() + " " + right).collect();
    File::new("gpt2")
        .str("tokenizer.ggml.pre", pre)
        .strings("tokenizer.ggml.tokens", &tokens)
        .i32s("tokenizer.ggml.token_type", &types)
        .strings("tokenizer.ggml.merges", &merges)
}

/// A SentencePiece vocabulary: `<unk> <s> </s>`, all bytes, then `pieces` with their scores.
pub(super) fn sentence_piece(pieces: &[(String, f32)]) -> File {
    let mut tokens: Vec<String> = ["<unk>", "<s>", "</s>"].map(String::from).to_vec();
    tokens.extend((0..=255).map(|byte: u8| alloc::format!("<0x{byte:02X}>")));
    let mut types: Vec<i32> = [2, 3, 3].into_iter().chain([6; 256]).collect();
    let mut scores = alloc::vec![0.0; tokens.len()];
    for (piece, score) in pieces {
        if !tokens.contains(piece) {
            tokens.push(piece.clone());
            types.push(1);
            scores.push(*score);
        }
    }
    File::new("llama")
        .strings("tokenizer.ggml.tokens", &tokens)
        .i32s("tokenizer.ggml.token_type", &types)
        .f32s("tokenizer.ggml.scores", &scores)
}

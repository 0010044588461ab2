//! A byte-level BPE vocabulary of any size: that of the bundled model, extended by joining its words and endings. The
//! same words make a vocabulary of word pieces.

use core::error::Error;
use std::collections::BTreeSet;

use starling::gguf::{Gguf, GgufWriter, Value};

static BUNDLED: &[u8] = include_bytes!("../../../fixtures/starling-tiny/starling-tiny-q4_0.gguf");

/// Token types of GGUF.
const NORMAL: i32 = 1;
const CONTROL: i32 = 3;

/// `<|endoftext|>`, `<|im_start|>`, `<|im_end|>` and padding come first, then the 256 bytes, then a token per merge.
const N_CONTROL: usize = 4;

struct Vocab {
    tokens: Vec<String>,
    merges: Vec<String>,
}

/// Adds the metadata of a tokenizer of `n_vocab` tokens.
pub(crate) fn write(w: &mut GgufWriter, n_vocab: usize) -> Result<(), Box<dyn Error>> {
    let vocab = vocabulary(n_vocab)?;
    let types: Vec<i32> = (0..n_vocab).map(|i| if i < N_CONTROL { CONTROL } else { NORMAL }).collect();
    w.str("tokenizer.ggml.model", "gpt2")?;
    w.str("tokenizer.ggml.pre", "gpt-2")?;
    w.str_array("tokenizer.ggml.tokens", &vocab.tokens)?;
    w.i32_array("tokenizer.ggml.token_type", &types)?;
    w.str_array("tokenizer.ggml.merges", &vocab.merges)?;
    w.metadata("tokenizer.ggml.bos_token_id", &Value::U32(0))?;
    w.metadata("tokenizer.ggml.eos_token_id", &Value::U32(0))?;
    w.metadata("tokenizer.ggml.eot_token_id", &Value::U32(2))?;
    w.metadata("tokenizer.ggml.padding_token_id", &Value::U32(3))?;
    w.metadata("tokenizer.ggml.add_bos_token", &Value::Bool(false))?;
    Ok(())
}

/// Adds the metadata of a WordPiece tokenizer of `n_vocab` tokens: special ones, the characters of ASCII, and the words
/// and endings of the vocabulary above. As llama.cpp writes them, words start with `▁` and endings are bare.
pub(crate) fn write_word_pieces(w: &mut GgufWriter, n_vocab: usize) -> Result<(), Box<dyn Error>> {
    let tokens = word_pieces(n_vocab)?;
    let types: Vec<i32> = (0..n_vocab).map(|i| if i < WORD_PIECE_CONTROLS.len() { CONTROL } else { NORMAL }).collect();
    w.str("tokenizer.ggml.model", "bert")?;
    w.str("tokenizer.ggml.pre", "jina-v2-en")?;
    w.str_array("tokenizer.ggml.tokens", &tokens)?;
    w.i32_array("tokenizer.ggml.token_type", &types)?;
    for (key, name) in [
        ("padding", "[PAD]"),
        ("unknown", "[UNK]"),
        ("bos", "[CLS]"),
        ("eos", "[SEP]"),
        ("seperator", "[SEP]"),
        ("mask", "[MASK]"),
    ] {
        let id = WORD_PIECE_CONTROLS.iter().position(|c| *c == name).map_or(0, |i| i as u32);
        w.metadata(&format!("tokenizer.ggml.{key}_token_id"), &Value::U32(id))?;
    }
    w.metadata("tokenizer.ggml.add_bos_token", &Value::Bool(true))?;
    w.metadata("tokenizer.ggml.add_eos_token", &Value::Bool(true))?;
    Ok(())
}

const WORD_PIECE_CONTROLS: [&str; 5] = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"];

fn word_pieces(n_vocab: usize) -> Result<Vec<String>, Box<dyn Error>> {
    const SPACE: char = '\u{2581}';
    let mut tokens: Vec<String> = WORD_PIECE_CONTROLS.map(String::from).into();
    let characters = (b'!'..=b'~').filter(|b| !b.is_ascii_uppercase()).map(char::from);
    tokens.extend(characters.flat_map(|c| [format!("{SPACE}{c}"), c.to_string()]));
    let mut known: BTreeSet<String> = tokens.iter().cloned().collect();
    let pieces = vocabulary(2 * n_vocab)?.tokens.into_iter().filter_map(|t| match t.strip_prefix('Ġ') {
        Some(word) if is_letters(word) => Some(format!("{SPACE}{word}")),
        None if is_letters(&t) => Some(t),
        _ => None,
    });
    tokens.extend(pieces.filter(|p| known.insert(p.clone())).take(n_vocab.saturating_sub(tokens.len())));
    match tokens.len() {
        n if n == n_vocab => Ok(tokens),
        n => Err(format!("{n} word pieces, not {n_vocab}").into()),
    }
}

fn vocabulary(n_vocab: usize) -> Result<Vocab, Box<dyn Error>> {
    let bundled = Gguf::parse(BUNDLED)?;
    let strings = |key| -> Result<Vec<String>, Box<dyn Error>> {
        let array = bundled.str_array(key)?.ok_or("the bundled model has no tokenizer")?;
        Ok(array.map(|s| String::from_utf8(s.to_vec())).collect::<Result<_, _>>()?)
    };
    let tokens = strings("tokenizer.ggml.tokens")?;
    let merges = strings("tokenizer.ggml.merges")?;
    if n_vocab < tokens.len() {
        return Err(format!("{n_vocab} tokens are fewer than the {} of the bundled model", tokens.len()).into());
    }
    Ok(extend(Vocab { tokens, merges }, n_vocab))
}

/// Joins every word (a space and letters) with every ending (small letters), frequent ones first, until there are
/// `n_vocab` tokens.
fn extend(mut vocab: Vocab, n_vocab: usize) -> Vocab {
    const SPACE: char = 'Ġ'; // a space in the byte alphabet of GPT-2
    let is_word = |t: &&String| t.strip_prefix(SPACE).is_some_and(|t| !t.is_empty() && is_letters(t));
    let words: Vec<String> = vocab.tokens.iter().filter(is_word).cloned().collect();
    let endings: Vec<String> = vocab.tokens.iter().filter(|t| t.len() > 1 && is_letters(t)).cloned().collect();
    let mut known: BTreeSet<String> = vocab.tokens.iter().cloned().collect();
    for diagonal in 0..words.len() + endings.len() {
        for (i, word) in words.iter().enumerate().take(diagonal + 1) {
            let Some(ending) = endings.get(diagonal - i) else { continue };
            if vocab.tokens.len() == n_vocab {
                return vocab;
            }
            let joined = format!("{word}{ending}");
            if known.insert(joined.clone()) {
                vocab.tokens.push(joined);
                vocab.merges.push(format!("{word} {ending}"));
            }
        }
    }
    vocab
}

fn is_letters(text: &str) -> bool {
    text.bytes().all(|b| b.is_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn word_pieces_are_distinct() {
        let tokens = word_pieces(30_522).unwrap();
        assert_eq!(tokens.len(), 30_522);
        assert_eq!(tokens.iter().collect::<BTreeSet<_>>().len(), tokens.len());
    }

    #[test]
    fn merges_join_tokens_to_tokens() {
        for n in [4096, 32_000, 49_152] {
            let vocab = vocabulary(n).unwrap();
            assert_eq!(vocab.tokens.len(), n);
            let tokens: BTreeSet<&str> = vocab.tokens.iter().map(String::as_str).collect();
            assert_eq!(tokens.len(), n);
            for merge in &vocab.merges {
                let (a, b) = merge.split_once(' ').unwrap();
                assert!(tokens.contains(a) && tokens.contains(b) && tokens.contains(format!("{a}{b}").as_str()));
            }
        }
    }
}

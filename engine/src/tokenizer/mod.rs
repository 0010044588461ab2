//! Tokenizers: text to token ids and back, with the vocabulary of a GGUF file.
//!
//! ```text
//! text ─ special tokens cut out (special) ─┬─ words (split, pretokenizers) ─ merges (bpe, spm: merge) ─┬─► ids
//!                                          ├─ words without accents ─ longest pieces (wordpiece) ──────┤
//!                                          ├─ normal form (charsmap) ─ best pieces (unigram) ───────────┤
//!                                          └─ longest pieces (greedy) ──────────────────────────────────┘
//! ids ─ pieces (vocab) ─ whole characters (stream) ─► text
//! ```
//!
//! Ids equal those of Hugging Face tokenizers and llama.cpp. Encoding n bytes takes O(n log n) time for any text and
//! vocabulary. Texts must be shorter than 4 GiB.

mod accents;
mod bpe;
mod cache;
mod charsmap;
mod class;
mod control;
mod grammar;
mod greedy;
mod load;
mod matcher;
mod merge;
mod nfc;
mod overlap;
mod pretokenizers;
mod special;
mod spm;
mod stream;
mod table;
#[cfg(test)]
mod tests;
mod unicode;
mod unigram;
mod vocab;
mod wordpiece;
mod words;

use alloc::vec::Vec;
use core::ops::Range;

use self::bpe::Bpe;
use self::cache::WordCache;
pub use self::grammar::CONTROL_MARK;
use self::greedy::Greedy;
use self::merge::MergeScratch;
use self::special::{Fragment, Specials};
use self::spm::Spm;
pub use self::stream::StreamDecoder;
use self::table::TextTable;
use self::unigram::Unigram;
use self::vocab::{Kind, Vocab};
use self::wordpiece::WordPiece;
use crate::error::LoadError;
use crate::gguf::Gguf;

/// A vocabulary and the algorithm that splits text into its tokens. Owns its data.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    vocab: Vocab,
    /// Maps token texts to ids.
    texts: TextTable,
    specials: Specials,
    algorithm: Algorithm,
    bos: Option<u32>,
    eos: Option<u32>,
    eot: Option<u32>,
    /// End-of-generation tokens, ascending.
    ends: Vec<u32>,
    /// Token that `add_special` puts before a text.
    begin: Option<u32>,
    /// Token that `add_special` puts after a text.
    end: Option<u32>,
    /// Tokens that `add_special` puts between two texts.
    between: [Option<u32>; 2],
}

#[derive(Debug, Clone)]
enum Algorithm {
    ByteLevel(Bpe),
    SentencePiece(Spm),
    WordPiece(WordPiece),
    Unigram(Unigram),
    Greedy(Greedy),
}

/// Options of [`Tokenizer::encode`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EncodeOptions {
    /// Add the BOS and EOS tokens (or CLS and SEP) that the file asks for.
    pub add_special: bool,
    /// Parse the texts of control tokens as those tokens. Without it no text becomes a control token, which text from
    /// users requires. User-defined tokens are parsed either way.
    pub parse_special: bool,
}

/// Options of [`Tokenizer::decode`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DecodeOptions {
    /// Skip control and unknown tokens.
    pub skip_special: bool,
}

/// Token ids, and optionally the offset where each ends in the text.
struct Output {
    ids: Vec<u32>,
    ends: Option<Vec<usize>>,
}

/// Ordinary text between special tokens.
#[derive(Clone, Copy)]
struct TextSpan<'t> {
    text: &'t str,
    /// Offset in the whole text.
    offset: usize,
    /// Whether it starts the text or follows a special token.
    after_special: bool,
}

/// Buffers of one call of `encode`.
struct EncodeScratch {
    cache: WordCache,
    merge: MergeScratch,
}

impl Output {
    #[inline]
    fn push(&mut self, id: u32, end: usize) {
        self.ids.push(id);
        if let Some(ends) = &mut self.ends {
            ends.push(end);
        }
    }

    /// Drops all but the first `n` tokens.
    fn truncate(&mut self, n: usize) {
        self.ids.truncate(n);
        if let Some(ends) = &mut self.ends {
            ends.truncate(n);
        }
    }
}

impl Tokenizer {
    /// Builds the tokenizer from the metadata of a file.
    ///
    /// # Errors
    /// [`LoadError`] if metadata is missing or malformed, or the tokenizer or pre-tokenizer is unknown.
    pub fn from_gguf(gguf: &Gguf<'_>) -> Result<Tokenizer, LoadError> {
        load::load(gguf)
    }

    /// Encodes a text.
    pub fn encode(&self, text: &str, options: EncodeOptions) -> Vec<u32> {
        self.encode_with_literals(text, options, &[])
    }

    /// Encodes a text, without control tokens that begin at one of the byte offsets `literals` (ascending).
    pub fn encode_with_literals(&self, text: &str, options: EncodeOptions, literals: &[usize]) -> Vec<u32> {
        let mut out = Output { ids: Vec::with_capacity(text.len() / 4 + 2), ends: None };
        self.encode_to(text, options, literals, &mut out);
        out.ids
    }

    /// Encodes a text and returns the byte range of each token. The ranges are contiguous and cover the text; those of
    /// added special tokens are empty. A character of several tokens is split between bytes.
    pub fn encode_with_offsets(&self, text: &str, options: EncodeOptions) -> (Vec<u32>, Vec<Range<usize>>) {
        let mut out = Output { ids: Vec::new(), ends: Some(Vec::new()) };
        self.encode_to(text, options, &[], &mut out);
        let mut start = 0;
        let range = |end| core::mem::replace(&mut start, end)..end;
        (out.ids, out.ends.unwrap_or_default().into_iter().map(range).collect())
    }

    /// Encodes two texts as one sequence, e.g. question and passage. With `add_special`, the separator tokens that the
    /// file asks for are added too.
    pub fn encode_pair(&self, first: &str, second: &str, options: EncodeOptions) -> Vec<u32> {
        let mut out = Output { ids: Vec::new(), ends: None };
        let added =
            |ids: &[Option<u32>]| ids.iter().flatten().copied().filter(|_| options.add_special).collect::<Vec<_>>();
        out.ids.extend(added(&[self.begin]));
        self.encode_text(first, options, &[], &mut out);
        out.ids.extend(added(&self.between));
        self.encode_text(second, options, &[], &mut out);
        out.ids.extend(added(&[self.end]));
        out.ids
    }

    fn encode_to(&self, text: &str, options: EncodeOptions, literals: &[usize], out: &mut Output) {
        if let (true, Some(id)) = (options.add_special, self.begin) {
            out.push(id, 0);
        }
        self.encode_text(text, options, literals, out);
        // bytes without a token belong to the next token, at the end of the text to the last one
        if let Some(last) = out.ends.as_mut().and_then(|ends| ends.last_mut()) {
            *last = text.len();
        }
        if let (true, Some(id)) = (options.add_special, self.end) {
            out.push(id, text.len());
        }
    }

    /// Appends the tokens of a text, without added special tokens.
    fn encode_text(&self, text: &str, options: EncodeOptions, literals: &[usize], out: &mut Output) {
        let mut scratch = EncodeScratch { cache: WordCache::for_text(text.len()), merge: MergeScratch::default() };
        let mut after_special = true;
        self.specials.split(
            text.as_bytes(),
            |at| options.parse_special && literals.binary_search(&at).is_err(),
            |fragment, start, end| match fragment {
                Fragment::Token(id) => {
                    out.push(id, end);
                    after_special = true;
                }
                Fragment::Text => {
                    let span = TextSpan { text: &text[start..end], offset: start, after_special };
                    match &self.algorithm {
                        Algorithm::ByteLevel(bpe) => bpe.encode(&self.vocab, span, &mut scratch, out),
                        Algorithm::SentencePiece(spm) => spm.encode(&self.vocab, span, &mut scratch, out),
                        Algorithm::WordPiece(wordpiece) => wordpiece.encode(&self.vocab, span, out),
                        Algorithm::Unigram(unigram) => unigram.encode(&self.vocab, span, out),
                        Algorithm::Greedy(greedy) => greedy.encode(&self.vocab, span, out),
                    }
                    after_special = false;
                }
            },
        );
    }

    /// Decodes tokens to bytes, which need not be UTF-8. The space that encoding adds in front is removed; other
    /// normalisation, e.g. lower-casing, is not undone. Ids outside the vocabulary are skipped.
    pub fn decode(&self, ids: &[u32], options: DecodeOptions) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.decode_part(ids, options, &mut true, &mut bytes);
        bytes
    }

    /// Decodes the next tokens of a text and appends their bytes. `is_first` is true at the start of the text; it becomes
    /// false with the first token of text. The bytes of all parts together are those of [`Tokenizer::decode`].
    pub fn decode_part(&self, ids: &[u32], options: DecodeOptions, is_first: &mut bool, bytes: &mut Vec<u8>) {
        let strips_space = match &self.algorithm {
            Algorithm::ByteLevel(_) | Algorithm::Greedy(_) => false,
            Algorithm::SentencePiece(spm) => spm.add_space_prefix,
            Algorithm::WordPiece(_) => true,
            Algorithm::Unigram(unigram) => unigram.normaliser.add_space_prefix,
        };
        for &id in ids {
            let special = matches!(self.vocab.kind(id), Some(Kind::Control | Kind::Unknown));
            if special && options.skip_special {
                continue;
            }
            let mut piece = self.piece(id).unwrap_or_default();
            if strips_space && *is_first && !special {
                piece = piece.strip_prefix(b" ").unwrap_or(piece);
                *is_first = false;
            }
            bytes.extend_from_slice(piece);
        }
    }

    /// The bytes that a token decodes to; for control tokens, their text. `None` if the id is outside the vocabulary.
    pub fn piece(&self, id: u32) -> Option<&[u8]> {
        self.vocab.piece(id)
    }

    /// The token's text as the file spells it.
    pub fn token_text(&self, id: u32) -> Option<&[u8]> {
        self.vocab.text(id)
    }

    /// The first token with this text in the file.
    pub fn token_id(&self, text: &[u8]) -> Option<u32> {
        self.texts.get(text, |id| self.vocab.text(id).unwrap_or_default())
    }

    /// Size of the vocabulary.
    pub fn n_vocab(&self) -> usize {
        self.vocab.len()
    }

    /// The beginning-of-sequence token.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The end-of-sequence token.
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// The end-of-turn token.
    pub fn eot(&self) -> Option<u32> {
        self.eot
    }

    /// Whether `add_special` adds [`Tokenizer::bos`].
    pub fn adds_bos(&self) -> bool {
        self.begin.is_some()
    }

    /// Whether `add_special` adds [`Tokenizer::eos`].
    pub fn adds_eos(&self) -> bool {
        self.end.is_some()
    }

    /// Whether the token ends generation: EOS, end of turn, end of message, or a token with such a name.
    pub fn is_end_of_generation(&self, id: u32) -> bool {
        self.ends.binary_search(&id).is_ok()
    }

    /// The tokens that end generation, ascending.
    pub fn end_tokens(&self) -> &[u32] {
        &self.ends
    }

    /// Texts of the control tokens, which text becomes only with `parse_special`.
    pub fn control_texts(&self) -> impl Iterator<Item = &str> {
        let ids = self.vocab.ids().filter(|&id| matches!(self.vocab.kind(id), Some(Kind::Control | Kind::Unknown)));
        ids.filter_map(|id| core::str::from_utf8(self.vocab.text(id)?).ok()).filter(|text| !text.is_empty())
    }

    /// Whether this is a control token.
    pub fn is_control(&self, id: u32) -> bool {
        self.vocab.kind(id) == Some(Kind::Control)
    }
}

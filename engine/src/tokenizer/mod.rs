//! Text to token ids and back, with the vocabulary of a GGUF file.
//!
//! ```text
//! text ─ special tokens cut out (special) ─┬─ words (split, pretokenizers) ─ merges (bpe, spm: merge) ─┬─► ids
//!                                          ├─ words without accents ─ longest pieces (wordpiece) ──────┤
//!                                          └─ normal form (charsmap) ─ best pieces (unigram) ───────────┘
//! ids ─ pieces (vocab) ─ whole characters (stream) ─► text
//! ```
//!
//! Ids are those of Hugging Face tokenizers and llama.cpp. Encoding takes time proportional to n log n at worst for a
//! text of n bytes, whatever text and vocabulary are. Texts are shorter than 4 GiB.

mod accents;
mod bpe;
mod cache;
mod charsmap;
mod class;
mod control;
mod load;
mod matcher;
mod merge;
mod nfc;
mod overlap;
mod pretokenizers;
mod special;
mod split;
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
use self::merge::MergeScratch;
use self::special::{Fragment, Specials};
use self::spm::Spm;
pub use self::stream::StreamDecoder;
use self::table::TextTable;
use self::unigram::Unigram;
use self::vocab::{Kind, Vocab};
use self::wordpiece::WordPiece;
pub use self::words::CONTROL_MARK;
use crate::error::LoadError;
use crate::gguf::Gguf;

/// A vocabulary and the way to cut text into its tokens. Owns its data.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    vocab: Vocab,
    /// Texts of the tokens to ids.
    texts: TextTable,
    specials: Specials,
    algorithm: Algorithm,
    bos: Option<u32>,
    eos: Option<u32>,
    eot: Option<u32>,
    /// Tokens that end a generation, ascending.
    ends: Vec<u32>,
    /// What `add_special` puts before a text.
    begin: Option<u32>,
    /// What `add_special` puts after a text.
    end: Option<u32>,
    /// What it puts between two texts.
    between: [Option<u32>; 2],
}

#[derive(Debug, Clone)]
enum Algorithm {
    ByteLevel(Bpe),
    SentencePiece(Spm),
    WordPiece(WordPiece),
    Unigram(Unigram),
}

/// What [`Tokenizer::encode`] does besides ordinary text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct EncodeOptions {
    /// Add the tokens that the file says begin and end a text.
    pub add_special: bool,
    /// Take the names of control tokens in the text for those tokens. Without it no text becomes a control token,
    /// which is what text from users needs. User-defined tokens are found either way.
    pub parse_special: bool,
}

/// What [`Tokenizer::decode`] leaves out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DecodeOptions {
    /// Leave control and unknown tokens out.
    pub skip_special: bool,
}

/// Tokens, and if wanted where each ends in the text.
struct Output {
    ids: Vec<u32>,
    ends: Option<Vec<usize>>,
}

/// Ordinary text between special tokens.
#[derive(Clone, Copy)]
struct Part<'t> {
    text: &'t str,
    /// Where it begins in the whole text.
    offset: usize,
    /// It begins the whole text or follows a special token.
    after_special: bool,
}

/// Buffers of one encoding.
struct Work {
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

    /// Takes back all but the first `n` tokens.
    fn truncate(&mut self, n: usize) {
        self.ids.truncate(n);
        if let Some(ends) = &mut self.ends {
            ends.truncate(n);
        }
    }
}

impl Tokenizer {
    /// The tokenizer of a file.
    ///
    /// # Errors
    /// [`LoadError`] if metadata is missing or malformed, or the kind of tokenizer is not known.
    pub fn from_gguf(gguf: &Gguf<'_>) -> Result<Tokenizer, LoadError> {
        load::load(gguf)
    }

    /// The tokens of a text.
    pub fn encode(&self, text: &str, options: EncodeOptions) -> Vec<u32> {
        self.encode_with_literals(text, options, &[])
    }

    /// The tokens of a text, no control token of which begins at one of the bytes `literals`, which ascend.
    pub fn encode_with_literals(&self, text: &str, options: EncodeOptions, literals: &[usize]) -> Vec<u32> {
        let mut out = Output { ids: Vec::with_capacity(text.len() / 4 + 2), ends: None };
        self.encode_to(text, options, literals, &mut out);
        out.ids
    }

    /// The tokens of a text and the bytes of the text that each stands for. The ranges follow each other and cover the
    /// text; those of added tokens are empty. A character of several tokens is cut between bytes.
    pub fn encode_with_offsets(&self, text: &str, options: EncodeOptions) -> (Vec<u32>, Vec<Range<usize>>) {
        let mut out = Output { ids: Vec::new(), ends: Some(Vec::new()) };
        self.encode_to(text, options, &[], &mut out);
        let mut start = 0;
        let range = |end| core::mem::replace(&mut start, end)..end;
        (out.ids, out.ends.unwrap_or_default().into_iter().map(range).collect())
    }

    /// The tokens of two texts as one sequence, such as a question and a passage: with `add_special`, also those that
    /// the file says separate texts.
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
        // bytes without a token at the end belong to the last token, elsewhere to the next
        if let Some(last) = out.ends.as_mut().and_then(|ends| ends.last_mut()) {
            *last = text.len();
        }
        if let (true, Some(id)) = (options.add_special, self.end) {
            out.push(id, text.len());
        }
    }

    /// Appends the tokens of a text, without any that belong around it.
    fn encode_text(&self, text: &str, options: EncodeOptions, literals: &[usize], out: &mut Output) {
        let mut work = Work { cache: WordCache::for_text(text.len()), merge: MergeScratch::default() };
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
                    let part = Part { text: &text[start..end], offset: start, after_special };
                    match &self.algorithm {
                        Algorithm::ByteLevel(bpe) => bpe.encode(&self.vocab, part, &mut work, out),
                        Algorithm::SentencePiece(spm) => spm.encode(&self.vocab, part, &mut work, out),
                        Algorithm::WordPiece(wordpiece) => wordpiece.encode(&self.vocab, part, out),
                        Algorithm::Unigram(unigram) => unigram.encode(&self.vocab, part, out),
                    }
                    after_special = false;
                }
            },
        );
    }

    /// The bytes of a sequence of tokens, which need not be UTF-8. The space that encoding puts before a text is taken
    /// away again; what it changed otherwise, as capitals in uncased vocabularies, stays changed; ids outside the vocabulary are skipped.
    pub fn decode(&self, ids: &[u32], options: DecodeOptions) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut at_start = match &self.algorithm {
            Algorithm::ByteLevel(_) => false,
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
            if at_start && !special {
                piece = piece.strip_prefix(b" ").unwrap_or(piece);
                at_start = false;
            }
            bytes.extend_from_slice(piece);
        }
        bytes
    }

    /// The bytes a token stands for; for control tokens, their name. `None` if there is no such token.
    pub fn piece(&self, id: u32) -> Option<&[u8]> {
        self.vocab.piece(id)
    }

    /// The token as the file spells it.
    pub fn token_text(&self, id: u32) -> Option<&[u8]> {
        self.vocab.text(id)
    }

    /// The token that the file spells so; of several, the first.
    pub fn token_id(&self, text: &[u8]) -> Option<u32> {
        self.texts.get(text, |id| self.vocab.text(id).unwrap_or_default())
    }

    /// Number of tokens.
    pub fn n_vocab(&self) -> usize {
        self.vocab.len()
    }

    /// The token that begins a text.
    pub fn bos(&self) -> Option<u32> {
        self.bos
    }

    /// The token that ends a text.
    pub fn eos(&self) -> Option<u32> {
        self.eos
    }

    /// The token that ends a turn of a conversation.
    pub fn eot(&self) -> Option<u32> {
        self.eot
    }

    /// Whether `add_special` puts [`Tokenizer::bos`] before a text.
    pub fn adds_bos(&self) -> bool {
        self.begin.is_some()
    }

    /// Whether `add_special` puts [`Tokenizer::eos`] after a text.
    pub fn adds_eos(&self) -> bool {
        self.end.is_some()
    }

    /// Whether a generation is over with this token: EOS, end of turn or of message, and tokens with a name that says so.
    pub fn is_end_of_generation(&self, id: u32) -> bool {
        self.ends.binary_search(&id).is_ok()
    }

    /// The tokens with which a generation is over, ascending.
    pub fn end_tokens(&self) -> &[u32] {
        &self.ends
    }

    /// The names of the control tokens, which text becomes only with `parse_special`.
    pub fn control_texts(&self) -> impl Iterator<Item = &str> {
        let ids = self.vocab.ids().filter(|&id| matches!(self.vocab.kind(id), Some(Kind::Control | Kind::Unknown)));
        ids.filter_map(|id| core::str::from_utf8(self.vocab.text(id)?).ok()).filter(|text| !text.is_empty())
    }

    /// Whether this is a control token, which text does not contain.
    pub fn is_control(&self, id: u32) -> bool {
        self.vocab.kind(id) == Some(Kind::Control)
    }
}

//! SentencePiece BPE: characters are merged by score, or by the merges of the file. Characters without a token become
//! byte tokens.

use alloc::format;
use alloc::vec::Vec;

use super::bpe::MergeTable;
use super::cache::WordCache;
use super::class::{CharClass, WHITE_BIT};
use super::merge::{MergeScratch, Merges, NO_TOKEN, Symbol, merge_all};
use super::pretokenizers::Pretokenizer;
use super::table::{Seed, TextTable};
use super::vocab::{Kind, META_SPACE, Spelling, Vocab};
use super::words::Splitter;
use super::{EncodeScratch, Output, TextSpan};

/// Order in which pieces are merged.
#[derive(Debug, Clone)]
pub(super) enum MergeOrder {
    /// By score, the highest first; for each id the number of higher scores.
    Scores(Vec<u32>),
    /// By the rank of the merge.
    Merges(MergeTable),
}

/// Pieces and options of a vocabulary.
#[derive(Debug, Clone)]
pub(super) struct Spm {
    pieces: Pieces,
    splitter: Splitter,
    spelling: Spelling,
    bytes: Vec<Option<u32>>,
    /// Token of characters that have neither a token nor byte tokens; without it they are dropped.
    unknown: Option<u32>,
    /// Whether a space is added at the start of the text and after special tokens.
    pub(super) add_space_prefix: bool,
    /// Whether no piece has a space after another character, so that words can be merged separately.
    space_bounds: bool,
}

/// The pieces that text can become.
#[derive(Debug, Clone)]
struct Pieces {
    table: TextTable,
    order: MergeOrder,
    max_len: usize,
}

/// Looks up pieces by their bytes.
struct PieceLookup<'a>(&'a Pieces, &'a Vocab);

/// Options of a vocabulary, as in [`Spm`].
pub(super) struct SpmOptions {
    pub(super) order: MergeOrder,
    pub(super) unknown: Option<u32>,
    pub(super) add_space_prefix: bool,
}

impl Spm {
    pub(super) fn new(
        vocab: &Vocab,
        texts: &TextTable,
        pretokenizer: &Pretokenizer,
        options: SpmOptions,
        seed: Seed,
    ) -> Spm {
        let SpmOptions { order, unknown, add_space_prefix } = options;
        let piece = |id: u32| vocab.piece(id).unwrap_or_default();
        let in_text = |id: u32| {
            let kind = vocab.kind(id);
            let spelled = vocab.text(id).is_some_and(|text| !text.is_empty() && !text.contains(&b' '));
            spelled && !matches!(kind, None | Some(Kind::Control | Kind::Unknown | Kind::Byte))
        };
        let ids = || vocab.ids().filter(|&id| in_text(id));
        let inner_space = |id: u32| piece(id).windows(2).any(|pair| pair[0] != b' ' && pair[1] == b' ');
        Spm {
            bytes: vocab.byte_ids(texts, |byte| format!("<0x{byte:02X}>").into_bytes()),
            splitter: Splitter::new(pretokenizer.steps),
            spelling: pretokenizer.spelling,
            unknown,
            add_space_prefix,
            space_bounds: !ids().any(inner_space),
            pieces: Pieces {
                max_len: ids().map(|id| piece(id).len()).max().unwrap_or(0),
                table: TextTable::new(seed, vocab.len(), in_text, piece),
                order,
            },
        }
    }

    /// Appends the tokens of a span of text.
    pub(super) fn encode(&self, vocab: &Vocab, span: TextSpan<'_>, scratch: &mut EncodeScratch, out: &mut Output) {
        self.splitter.split(span.text, |start, end| {
            let after_special = span.after_special && start == 0;
            let span = TextSpan { text: &span.text[start..end], offset: span.offset + start, after_special };
            // with plain spelling, white space only separates words
            if self.spelling != Spelling::Plain || CharClass::any(WHITE_BIT).len_at(span.text.as_bytes(), 0) == 0 {
                self.encode_section(vocab, span, scratch, out);
            }
        });
    }

    /// Appends the tokens of a section that the pre-tokenizer produced: a text, a line or a word.
    fn encode_section(&self, vocab: &Vocab, span: TextSpan<'_>, scratch: &mut EncodeScratch, out: &mut Output) {
        let text = SpmText::new(span.text, span.after_special && self.add_space_prefix, self.spelling);
        let bytes = &text.bytes[..];
        let mut start = 0;
        while start < bytes.len() {
            let end = if self.space_bounds { word_end(bytes, start) } else { bytes.len() };
            let key = if out.ends.is_some() { None } else { WordCache::key(bytes, start, end) };
            if !key.is_some_and(|key| scratch.cache.append(key, &mut out.ids)) {
                let first = out.ids.len();
                let text_offset = |end: usize| span.offset + text.origin(start + end);
                self.encode_word(vocab, &bytes[start..end], text_offset, &mut scratch.merge, out);
                if let Some(key) = key {
                    scratch.cache.keep(key, &out.ids[first..]);
                }
            }
            start = end;
        }
    }

    /// Appends the tokens of `word`; `text_offset(end)` maps an offset in the word to the whole text.
    fn encode_word(
        &self,
        vocab: &Vocab,
        word: &[u8],
        text_offset: impl Fn(usize) -> usize,
        scratch: &mut MergeScratch,
        out: &mut Output,
    ) {
        let pieces = PieceLookup(&self.pieces, vocab);
        let end_of = |symbols: &[Symbol], i: usize| symbols.get(i + 1).map_or(word.len(), |next| next.start as usize);
        let is_start = |&(_, &byte): &(u32, &u8)| byte & 0xc0 != 0x80;
        // a run of line feeds that is a token is used regardless of the merges, as in llama.cpp
        if matches!(self.pieces.order, MergeOrder::Merges(_))
            && word.iter().all(|&byte| byte == b'\n')
            && let Some(id) = pieces.find(word)
        {
            return out.push(id, text_offset(word.len()));
        }
        scratch.symbols.clear();
        scratch.symbols.extend((0..).zip(word).filter(is_start).map(|(start, _)| Symbol { start, id: NO_TOKEN }));
        for i in 0..scratch.symbols.len() {
            let range = scratch.symbols[i].start as usize..end_of(&scratch.symbols, i);
            scratch.symbols[i].id = pieces.find(&word[range]).unwrap_or(NO_TOKEN);
        }
        merge_all(&pieces, word, scratch);
        for (i, symbol) in scratch.symbols.iter().enumerate() {
            let range = symbol.start as usize..end_of(&scratch.symbols, i);
            if symbol.id != NO_TOKEN {
                out.push(symbol.id, text_offset(range.end));
                continue;
            }
            let bytes = &word[range.clone()];
            if bytes.iter().all(|&byte| self.bytes[usize::from(byte)].is_some()) {
                for (end, &byte) in (range.start + 1..).zip(bytes) {
                    if let Some(id) = self.bytes[usize::from(byte)] {
                        out.push(id, text_offset(end));
                    }
                }
            } else if let Some(id) = self.unknown {
                out.push(id, text_offset(range.end));
            }
        }
    }
}

impl PieceLookup<'_> {
    fn find(&self, piece: &[u8]) -> Option<u32> {
        if piece.len() > self.0.max_len {
            return None;
        }
        self.0.table.get(piece, |id| self.1.piece(id).unwrap_or_default())
    }
}

impl Merges for PieceLookup<'_> {
    fn merge(&self, word: &[u8], left: Symbol, right: Symbol, end: u32) -> Option<(u32, u32)> {
        match &self.0.order {
            MergeOrder::Scores(ranks) => {
                let id = self.find(&word[left.start as usize..end as usize])?;
                Some((ranks[id as usize], id))
            }
            MergeOrder::Merges(merges) => merges.merge(left.id, right.id),
        }
    }
}

impl MergeOrder {
    /// The order by `scores[id]`, none of which is NaN.
    pub(super) fn scores(scores: &[f32]) -> MergeOrder {
        let mut distinct: Vec<f32> = scores.to_vec();
        distinct.sort_unstable_by(|a, b| b.total_cmp(a));
        distinct.dedup();
        MergeOrder::Scores(scores.iter().map(|score| distinct.partition_point(|other| other > score) as u32).collect())
    }
}

/// The end of the word at `start`: spaces, then characters other than spaces.
fn word_end(text: &[u8], start: usize) -> usize {
    let mut end = start;
    while text.get(end) == Some(&b' ') {
        end += 1;
    }
    while text.get(end).is_some_and(|&byte| byte != b' ') {
        end += 1;
    }
    end
}

/// Text in the spelling of the pieces: U+2581 becomes a space, and a space may be added in front.
struct SpmText {
    bytes: Vec<u8>,
    prefix: usize,
    /// Offsets in `bytes` where a space replaces the three bytes of U+2581.
    shortened: Vec<usize>,
}

impl SpmText {
    fn new(text: &str, with_prefix: bool, spelling: Spelling) -> SpmText {
        let mut bytes = Vec::with_capacity(text.len() + 1);
        let mut shortened = Vec::new();
        if with_prefix {
            bytes.push(b' ');
        }
        if spelling == Spelling::Plain {
            bytes.extend_from_slice(text.as_bytes());
            return SpmText { bytes, prefix: usize::from(with_prefix), shortened };
        }
        let mut parts = text.split('\u{2581}');
        bytes.extend_from_slice(parts.next().unwrap_or_default().as_bytes());
        for part in parts {
            shortened.push(bytes.len());
            bytes.push(b' ');
            bytes.extend_from_slice(part.as_bytes());
        }
        SpmText { bytes, prefix: usize::from(with_prefix), shortened }
    }

    /// Maps an offset in `bytes` to the original text.
    fn origin(&self, end: usize) -> usize {
        let n_shortened = self.shortened.partition_point(|&at| at < end);
        (end + (META_SPACE.len() - 1) * n_shortened).saturating_sub(self.prefix)
    }
}

//! Byte-pair encoding of characters, as in SentencePiece: they are merged to the token of the best score, or by the
//! merges of the file; characters that have no token become bytes.

use alloc::format;
use alloc::vec::Vec;

use super::bpe::MergeTable;
use super::cache::WordCache;
use super::class::{Class, WHITE_BIT};
use super::merge::{MergeScratch, Merges, NO_TOKEN, Symbol, merge_all};
use super::pretokenizers::Pretokenizer;
use super::split::Splitter;
use super::table::{Seed, TextTable};
use super::vocab::{Kind, META_SPACE, Spelling, Vocab};
use super::{Output, Part, Work};

/// What merges first.
#[derive(Debug, Clone)]
pub(super) enum Order {
    /// The best score; for each id, the number of higher scores.
    Scores(Vec<u32>),
    /// The lowest rank.
    Merges(MergeTable),
}

/// Pieces and options of a vocabulary.
#[derive(Debug, Clone)]
pub(super) struct Spm {
    pieces: Pieces,
    splitter: Splitter,
    spelling: Spelling,
    bytes: Vec<Option<u32>>,
    /// Stands for characters that have neither a token nor bytes; without it they are dropped.
    unknown: Option<u32>,
    /// Text after a special token or at the beginning gets a space in front.
    pub(super) add_space_prefix: bool,
    /// No token has a space after another character, so that spaces bound what can be merged.
    space_bounds: bool,
}

/// What text can be made of.
#[derive(Debug, Clone)]
struct Pieces {
    table: TextTable,
    order: Order,
    max_len: usize,
}

/// The pieces with the vocabulary that has their bytes.
struct Scored<'a>(&'a Pieces, &'a Vocab);

impl Spm {
    pub(super) fn new(
        vocab: &Vocab,
        texts: &TextTable,
        order: Order,
        pretokenizer: &Pretokenizer,
        unknown: Option<u32>,
        add_space_prefix: bool,
        seed: Seed,
    ) -> Spm {
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
            splitter: Splitter::new(pretokenizer.passes),
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

    /// Appends the tokens of a part of a text.
    pub(super) fn encode(&self, vocab: &Vocab, part: Part<'_>, work: &mut Work, out: &mut Output) {
        self.splitter.split(part.text, |start, end| {
            let after_special = part.after_special && start == 0;
            let part = Part { text: &part.text[start..end], offset: part.offset + start, after_special };
            // where spaces are not part of words, they are the gaps between them
            if self.spelling != Spelling::Plain || Class::any(WHITE_BIT).len_at(part.text.as_bytes(), 0) == 0 {
                self.encode_section(vocab, part, work, out);
            }
        });
    }

    /// Appends the tokens of what the pre-tokenizer cuts out: a whole text, a line, a word.
    fn encode_section(&self, vocab: &Vocab, part: Part<'_>, work: &mut Work, out: &mut Output) {
        let text = Normalised::new(part.text, part.after_special && self.add_space_prefix, self.spelling);
        let bytes = &text.bytes[..];
        let mut start = 0;
        while start < bytes.len() {
            let end = if self.space_bounds { word_end(bytes, start) } else { bytes.len() };
            let key = if out.ends.is_some() { None } else { WordCache::key(bytes, start, end) };
            if !key.is_some_and(|key| work.cache.append(key, &mut out.ids)) {
                let first = out.ids.len();
                let place = |end: usize| part.offset + text.origin(start + end);
                self.encode_word(vocab, &bytes[start..end], place, &mut work.merge, out);
                if let Some(key) = key {
                    work.cache.keep(key, &out.ids[first..]);
                }
            }
            start = end;
        }
    }

    /// Appends the tokens of `word`; `place(end)` is where its byte `end` lies in the whole text.
    fn encode_word(
        &self,
        vocab: &Vocab,
        word: &[u8],
        place: impl Fn(usize) -> usize,
        scratch: &mut MergeScratch,
        out: &mut Output,
    ) {
        let pieces = Scored(&self.pieces, vocab);
        let end_of = |symbols: &[Symbol], i: usize| symbols.get(i + 1).map_or(word.len(), |next| next.start as usize);
        let is_start = |&(_, &byte): &(u32, &u8)| byte & 0xc0 != 0x80;
        // a run of line feeds is one token where the file has one, whatever its merges say, as in llama.cpp
        if matches!(self.pieces.order, Order::Merges(_))
            && word.iter().all(|&byte| byte == b'\n')
            && let Some(id) = pieces.find(word)
        {
            return out.push(id, place(word.len()));
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
                out.push(symbol.id, place(range.end));
                continue;
            }
            let bytes = &word[range.clone()];
            if bytes.iter().all(|&byte| self.bytes[usize::from(byte)].is_some()) {
                for (end, &byte) in (range.start + 1..).zip(bytes) {
                    if let Some(id) = self.bytes[usize::from(byte)] {
                        out.push(id, place(end));
                    }
                }
            } else if let Some(id) = self.unknown {
                out.push(id, place(range.end));
            }
        }
    }
}

impl Scored<'_> {
    fn find(&self, piece: &[u8]) -> Option<u32> {
        if piece.len() > self.0.max_len {
            return None;
        }
        self.0.table.get(piece, |id| self.1.piece(id).unwrap_or_default())
    }
}

impl Merges for Scored<'_> {
    fn merge(&self, word: &[u8], left: Symbol, right: Symbol, end: u32) -> Option<(u32, u32)> {
        match &self.0.order {
            Order::Scores(ranks) => {
                let id = self.find(&word[left.start as usize..end as usize])?;
                Some((ranks[id as usize], id))
            }
            Order::Merges(merges) => merges.merge(left.id, right.id),
        }
    }
}

impl Order {
    /// `scores[id]` for each token; none is NaN.
    pub(super) fn scores(scores: &[f32]) -> Order {
        let mut distinct: Vec<f32> = scores.to_vec();
        distinct.sort_unstable_by(|a, b| b.total_cmp(a));
        distinct.dedup();
        Order::Scores(scores.iter().map(|score| distinct.partition_point(|other| other > score) as u32).collect())
    }
}

/// The end of the word that begins at `start`: spaces, then anything but spaces.
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

/// Text as the pieces spell it: U+2581 is a space too, and there may be one more in front.
struct Normalised {
    bytes: Vec<u8>,
    prefix: usize,
    /// Where `bytes` has a space for the three bytes of U+2581.
    shortened: Vec<usize>,
}

impl Normalised {
    fn new(text: &str, with_prefix: bool, spelling: Spelling) -> Normalised {
        let mut bytes = Vec::with_capacity(text.len() + 1);
        let mut shortened = Vec::new();
        if with_prefix {
            bytes.push(b' ');
        }
        if spelling == Spelling::Plain {
            bytes.extend_from_slice(text.as_bytes());
            return Normalised { bytes, prefix: usize::from(with_prefix), shortened };
        }
        let mut parts = text.split('\u{2581}');
        bytes.extend_from_slice(parts.next().unwrap_or_default().as_bytes());
        for part in parts {
            shortened.push(bytes.len());
            bytes.push(b' ');
            bytes.extend_from_slice(part.as_bytes());
        }
        Normalised { bytes, prefix: usize::from(with_prefix), shortened }
    }

    /// The position in the original text of position `end`.
    fn origin(&self, end: usize) -> usize {
        let n_shortened = self.shortened.partition_point(|&at| at < end);
        (end + (META_SPACE.len() - 1) * n_shortened).saturating_sub(self.prefix)
    }
}

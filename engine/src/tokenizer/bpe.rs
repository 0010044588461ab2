//! Byte-level BPE, as in GPT-2: the pre-tokenizer splits text into words, whose bytes are merged by rank.

use alloc::format;
use alloc::vec::Vec;

use super::cache::WordCache;
use super::merge::{MergeScratch, Merges, NO_TOKEN, Symbol, merge_all};
use super::nfc::NfcText;
use super::pretokenizers::Pretokenizer;
use super::table::{PairTable, Seed, TextTable};
use super::vocab::{Kind, Vocab, byte_char};
use super::words::Splitter;
use super::{EncodeScratch, Output, TextSpan};

/// `tokenizer.ggml.merges`: pairs of tokens, and the token each merges to.
#[derive(Debug, Clone)]
pub(super) struct MergeTable {
    ranks: PairTable,
    /// The merged token of each rank.
    merged: Vec<u32>,
}

/// Merges, pre-tokenizer and options of a vocabulary.
#[derive(Debug, Clone)]
pub(super) struct Bpe {
    splitter: Splitter,
    /// Whether text is normalised to NFC first.
    nfc: bool,
    merges: MergeTable,
    /// The token of each byte.
    bytes: Vec<Option<u32>>,
    /// Words that are tokens regardless of the merges.
    words: Option<TextTable>,
    /// Token of bytes that have none; without it they are dropped.
    unknown: Option<u32>,
}

impl MergeTable {
    /// `merges` are texts `left right` by ascending rank. Skips merges with a piece outside the vocabulary, and merges
    /// to a control token, which text must not become.
    pub(super) fn new<'m>(
        vocab: &Vocab,
        texts: &TextTable,
        merges: impl Iterator<Item = &'m [u8]>,
        seed: Seed,
    ) -> MergeTable {
        let find = |text: &[u8]| texts.get(text, |id| vocab.text(id).unwrap_or_default());
        // reserve for all strings of the file: growing would fragment the heap
        let n = merges.size_hint().0;
        let (mut pairs, mut merged, mut joined) = (Vec::with_capacity(n), Vec::with_capacity(n), Vec::new());
        for merge in merges {
            let Some(space) = merge.iter().skip(1).position(|&b| b == b' ') else { continue };
            let (left, right) = (&merge[..space + 1], &merge[space + 2..]);
            joined.clear();
            joined.extend_from_slice(left);
            joined.extend_from_slice(right);
            if let (Some(a), Some(b), Some(id)) = (find(left), find(right), find(&joined))
                && vocab.kind(id) != Some(Kind::Control)
            {
                pairs.push((a, b));
                merged.push(id);
            }
        }
        MergeTable { ranks: PairTable::new(seed, &pairs), merged }
    }

    /// Rank of the merge of two tokens, and the merged token.
    #[inline(always)]
    pub(super) fn merge(&self, left: u32, right: u32) -> Option<(u32, u32)> {
        let rank = self.ranks.get(left, right)?;
        Some((rank, self.merged[rank as usize]))
    }
}

impl Bpe {
    pub(super) fn new(
        vocab: &Vocab,
        texts: &TextTable,
        merges: MergeTable,
        pretokenizer: &Pretokenizer,
        unknown: Option<u32>,
        seed: Seed,
    ) -> Bpe {
        let words = pretokenizer.ignore_merges.then(|| {
            let is_normal = |id| vocab.kind(id) == Some(Kind::Normal);
            TextTable::new(seed, vocab.len(), is_normal, |id| vocab.piece(id).unwrap_or_default())
        });
        Bpe {
            splitter: Splitter::new(pretokenizer.steps),
            nfc: pretokenizer.nfc,
            merges,
            bytes: vocab.byte_ids(texts, |byte| format!("{}", byte_char(byte)).into_bytes()),
            words,
            unknown,
        }
    }

    /// Appends the tokens of a span of text.
    pub(super) fn encode(&self, vocab: &Vocab, span: TextSpan<'_>, scratch: &mut EncodeScratch, out: &mut Output) {
        let EncodeScratch { cache, merge } = scratch;
        let normalised = if self.nfc { NfcText::new(span.text) } else { None };
        let text = normalised.as_ref().map_or(span.text, |normalised| &normalised.text);
        let text_offset = |at| span.offset + normalised.as_ref().map_or(at, |normalised| normalised.original(at));
        let bytes = text.as_bytes();
        self.splitter.split(text, |start, end| {
            let key = if out.ends.is_some() { None } else { WordCache::key(bytes, start, end) };
            if key.is_some_and(|key| cache.append(key, &mut out.ids)) {
                return;
            }
            let first = out.ids.len();
            self.encode_word(vocab, &bytes[start..end], merge);
            let ends = merge.symbols.iter().skip(1).map(|next| next.start as usize).chain([end - start]);
            for (symbol, symbol_end) in merge.symbols.iter().zip(ends) {
                let id = if symbol.id == NO_TOKEN { self.unknown } else { Some(symbol.id) };
                if let Some(id) = id {
                    out.push(id, text_offset(start + symbol_end));
                }
            }
            if let Some(key) = key {
                cache.keep(key, &out.ids[first..]);
            }
        });
    }

    /// Encodes `word` into `scratch.symbols`.
    fn encode_word(&self, vocab: &Vocab, word: &[u8], scratch: &mut MergeScratch) {
        scratch.symbols.clear();
        if let Some(words) = &self.words
            && let Some(id) = words.get(word, |id| vocab.piece(id).unwrap_or_default())
        {
            scratch.symbols.push(Symbol { start: 0, id });
            return;
        }
        let symbol =
            |(start, &byte): (u32, &u8)| Symbol { start, id: self.bytes[usize::from(byte)].unwrap_or(NO_TOKEN) };
        scratch.symbols.extend((0..).zip(word).map(symbol));
        merge_all(self, word, scratch);
    }
}

impl Merges for Bpe {
    #[inline(always)]
    fn merge(&self, _word: &[u8], left: Symbol, right: Symbol, _end: u32) -> Option<(u32, u32)> {
        self.merges.merge(left.id, right.id)
    }
}

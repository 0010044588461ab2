//! Finds the tokens that are prefixes of a text.

use alloc::vec;
use alloc::vec::Vec;

use super::vocab::{Kind, Vocab};

/// Maximal length of tokens that are searched: bounds the time that a file can cause.
pub(super) const MAX_LEN: usize = 256;

/// The bytes of a token that a matcher compares: its text in the file, or what it decodes to.
type TokenBytes = fn(&Vocab, u32) -> Option<&[u8]>;

/// Tokens of a vocabulary, sorted by their bytes.
#[derive(Debug, Clone)]
pub(super) struct Matcher {
    bytes: TokenBytes,
    /// Ids in order of their texts; of equal texts, only the first id.
    ids: Vec<u32>,
    /// Tokens that start with byte b: `ids[starts[b]..starts[b + 1]]`.
    starts: Vec<u32>,
}

/// The tokens of the kinds for which `wanted` returns true and that text can spell, in order of their texts; of equal texts,
/// the first.
pub(super) fn findable(vocab: &Vocab, wanted: impl Fn(Kind) -> bool) -> Vec<u32> {
    let text = |id: u32| vocab.text(id).unwrap_or_default();
    // tokens must consist of whole characters, so that splits are at character boundaries
    let wanted = |id: &u32| {
        let fits = vocab.kind(*id).is_some_and(&wanted) && (1..=MAX_LEN).contains(&text(*id).len());
        fits && core::str::from_utf8(text(*id)).is_ok()
    };
    let mut ids: Vec<u32> = vocab.ids().filter(wanted).collect();
    ids.sort_by(|&a, &b| (text(a), a).cmp(&(text(b), b)));
    ids.dedup_by_key(|id| text(*id));
    ids
}

impl Matcher {
    /// The tokens of the kinds for which `wanted` returns true; of equal texts, the first.
    pub(super) fn new(vocab: &Vocab, wanted: impl Fn(Kind) -> bool) -> Matcher {
        Matcher::of(vocab, findable(vocab, wanted), Vocab::text)
    }

    /// The same by the bytes that tokens decode to, which need not be whole characters.
    pub(super) fn of_bytes(vocab: &Vocab, wanted: impl Fn(Kind) -> bool) -> Matcher {
        let piece = |id: u32| vocab.piece(id).unwrap_or_default();
        let fits = |id: &u32| vocab.kind(*id).is_some_and(&wanted) && (1..=MAX_LEN).contains(&piece(*id).len());
        let mut ids: Vec<u32> = vocab.ids().filter(fits).collect();
        ids.sort_by(|&a, &b| (piece(a), a).cmp(&(piece(b), b)));
        ids.dedup_by_key(|id| piece(*id));
        Matcher::of(vocab, ids, Vocab::piece)
    }

    fn of(vocab: &Vocab, ids: Vec<u32>, bytes: TokenBytes) -> Matcher {
        let text = |id: u32| bytes(vocab, id).unwrap_or_default();
        let mut starts = vec![0; 257];
        for (byte, start) in starts.iter_mut().enumerate() {
            *start = ids.partition_point(|&id| usize::from(text(id)[0]) < byte) as u32;
        }
        Matcher { bytes, ids, starts }
    }

    /// Calls `found(id, len)` for each token that is a prefix of `text`, the shortest first.
    #[inline]
    pub(super) fn each(&self, vocab: &Vocab, text: &[u8], mut found: impl FnMut(u32, usize)) {
        let Some(&first) = text.first() else { return };
        let bounds = |byte: usize| self.starts.get(byte).map_or(0, |&start| start as usize);
        let mut range = self.ids.get(bounds(usize::from(first))..bounds(usize::from(first) + 1)).unwrap_or_default();
        // invariant: the tokens of `range` agree with the text in their first `len` bytes
        for len in 1.. {
            let token = |id: u32| (self.bytes)(vocab, id).unwrap_or_default();
            let [shortest, longer @ ..] = range else { return };
            if token(*shortest).len() == len {
                found(*shortest, len);
                range = longer;
            }
            let (Some(&next), [low, .., high]) = (text.get(len), range) else {
                let ([only], rest) = (range, &text[len..]) else { return };
                if rest.starts_with(&token(*only)[len..]) {
                    found(*only, token(*only).len());
                }
                return;
            };
            if token(*low)[len] != next || token(*high)[len] != next {
                let from = range.partition_point(|&id| token(id)[len] < next);
                let to = range.partition_point(|&id| token(id)[len] <= next);
                range = &range[from..to];
            }
        }
    }

    /// The longest token that is a prefix of `text`, and its length.
    #[inline]
    pub(super) fn longest(&self, vocab: &Vocab, text: &[u8]) -> Option<(u32, usize)> {
        let mut longest = None;
        self.each(vocab, text, |id, len| longest = Some((id, len)));
        longest
    }
}

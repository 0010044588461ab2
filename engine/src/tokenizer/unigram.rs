//! Unigram, as in T5 and XLM-R: the segmentation into pieces with the largest sum of scores (Viterbi).
//!
//! Sums are f64, left to right; of equal sums, the segmentation with the shorter last piece wins.

use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;

use super::charsmap::CharsMap;
use super::matcher::{MAX_LEN, Matcher};
use super::merge::NO_TOKEN;
use super::vocab::{Kind, META_SPACE, Vocab, hex_byte};
use super::{Output, TextSpan};

/// Score of a character without a piece, below the lowest score; as in SentencePiece.
const UNKNOWN_PENALTY: f32 = 10.0;

/// Normalisation of text before segmentation.
#[derive(Debug, Clone)]
pub(super) struct Normaliser {
    pub(super) charsmap: Option<CharsMap>,
    /// Whether a space is added at the start.
    pub(super) add_space_prefix: bool,
    /// Whether spaces at the ends are dropped and runs of spaces collapsed.
    pub(super) remove_extra_spaces: bool,
}

/// Pieces, scores and options of a vocabulary.
#[derive(Debug, Clone)]
pub(super) struct Unigram {
    pieces: Matcher,
    /// Score of each id; finite.
    scores: Vec<f32>,
    unknown_score: f64,
    /// Token of characters that have no piece; without it they are dropped.
    unknown: Option<u32>,
    /// Byte tokens, if the vocabulary has all 256.
    bytes: Option<Vec<u32>>,
    pub(super) normaliser: Normaliser,
}

/// A piece of a segmentation: length in bytes and token; [`NO_TOKEN`] for a character without a piece.
#[derive(Clone, Copy)]
struct Piece {
    len: u16,
    id: u32,
}

/// Length of the ring of scores: at least the longest piece, so that entries in use do not collide.
const RING: usize = 2 * MAX_LEN;

/// Normalised text.
struct NormalisedText {
    text: String,
    /// For each byte, the end in the original text of what it stands for; empty unless requested.
    ends: Vec<usize>,
    with_ends: bool,
}

impl Unigram {
    /// `scores[id]` must be finite for each token.
    pub(super) fn new(vocab: &Vocab, scores: Vec<f32>, unknown: Option<u32>, normaliser: Normaliser) -> Unigram {
        let of_kind = |kind: Kind| vocab.ids().filter(move |&id| vocab.kind(id) == Some(kind));
        let worst = of_kind(Kind::Normal).filter_map(|id| scores.get(id as usize)).copied().reduce(f32::min);
        let mut bytes = vec![None; 256];
        for id in of_kind(Kind::Byte) {
            if let Some(byte) = vocab.text(id).and_then(hex_byte) {
                bytes[usize::from(byte)].get_or_insert(id);
            }
        }
        let in_text = |kind| matches!(kind, Kind::Normal | Kind::UserDefined | Kind::Unused);
        Unigram {
            pieces: Matcher::new(vocab, in_text),
            unknown_score: f64::from(worst.unwrap_or(0.0) - UNKNOWN_PENALTY),
            unknown,
            bytes: bytes.into_iter().collect(),
            normaliser,
            scores,
        }
    }

    /// Appends the tokens of a span of text.
    pub(super) fn encode(&self, vocab: &Vocab, span: TextSpan<'_>, out: &mut Output) {
        let with_prefix = span.after_special && self.normaliser.add_space_prefix;
        let normalised = self.normaliser.normalise(span.text, with_prefix, out.ends.is_some());
        let end_of = |end: usize| span.offset + normalised.ends.get(end.wrapping_sub(1)).copied().unwrap_or(0);
        let mut previous_unknown = false;
        let pieces = self.best_cut(vocab, &normalised.text);
        let mut start = 0;
        while start < normalised.text.len() {
            let Piece { len, id } = pieces[start];
            let (end, id) = (start + usize::from(len), Some(id).filter(|&id| id != NO_TOKEN));
            match (id, &self.bytes) {
                (Some(id), _) => out.push(id, end_of(end)),
                (None, Some(bytes)) => {
                    for &byte in &normalised.text.as_bytes()[start..end] {
                        out.push(bytes[usize::from(byte)], end_of(end));
                    }
                }
                // a run of characters without a piece becomes one unknown token
                (None, None) if previous_unknown => {
                    if let Some(last) = out.ends.as_mut().and_then(|ends| ends.last_mut()) {
                        *last = end_of(end);
                    }
                }
                (None, None) => {
                    if let Some(unknown) = self.unknown {
                        out.push(unknown, end_of(end));
                    }
                }
            }
            previous_unknown = id.is_none() && self.unknown.is_some();
            start = end;
        }
    }

    /// The best segmentation of `text`: the entry at the start of each piece is that piece. Other entries are
    /// meaningless.
    fn best_cut(&self, vocab: &Vocab, text: &str) -> Vec<Piece> {
        // for each end offset, the best score and the last piece of the segmentation that ends there
        let mut scores = [f64::NEG_INFINITY; RING];
        let mut best = vec![Piece { len: 0, id: NO_TOKEN }; text.len() + 1];
        scores[0] = 0.0;
        for (start, c) in text.char_indices() {
            // this slot of the ring is now that of offset `start + RING`
            let before = core::mem::replace(&mut scores[start % RING], f64::NEG_INFINITY);
            let mut end_with = |id: u32, len: usize, score: f64| {
                let champion = &mut scores[(start + len) % RING];
                if before + score > *champion {
                    *champion = before + score;
                    best[start + len] = Piece { len: len as u16, id };
                }
            };
            let mut whole_character = false;
            self.pieces.each(vocab, &text.as_bytes()[start..], |id, len| {
                let user_defined = vocab.kind(id) == Some(Kind::UserDefined);
                let score = if user_defined { 0.0 } else { self.scores.get(id as usize).copied().unwrap_or(0.0) };
                whole_character |= len == c.len_utf8();
                end_with(id, len, f64::from(score));
            });
            if !whole_character {
                end_with(NO_TOKEN, c.len_utf8(), self.unknown_score);
            }
        }
        // walk back from the end, and store each piece at its start
        let (mut end, mut piece) = (text.len(), best[text.len()]);
        while end > 0 {
            end -= usize::from(piece.len);
            piece = core::mem::replace(&mut best[end], piece);
        }
        best
    }
}

impl Normaliser {
    fn normalise(&self, text: &str, with_prefix: bool, with_ends: bool) -> NormalisedText {
        let mut out = NormalisedText { text: String::with_capacity(text.len() + 16), ends: Vec::new(), with_ends };
        if with_prefix {
            out.push(META_SPACE_STR, 0);
        }
        let mut after_space = self.remove_extra_spaces;
        let mut at = 0;
        while let Some(c) = text[at..].chars().next() {
            let mapped = self.charsmap.as_ref().and_then(|map| map.longest(&text.as_bytes()[at..]));
            // a rule of an untrusted file may end inside a character
            let mapped = mapped.filter(|&(_, len)| text.is_char_boundary(at + len));
            let (mut new, len) = mapped.unwrap_or((&text[at..at + c.len_utf8()], c.len_utf8()));
            at += len;
            if after_space {
                new = new.trim_start_matches(' ');
            }
            for (i, span) in new.split(' ').enumerate() {
                if i > 0 {
                    out.push(META_SPACE_STR, at);
                }
                out.push(span, at);
            }
            if !new.is_empty() {
                after_space = self.remove_extra_spaces && new.ends_with(' ');
            }
        }
        if self.remove_extra_spaces {
            let len = out.text.trim_end_matches(META_SPACE_STR).len();
            out.text.truncate(len);
            out.ends.truncate(len);
        }
        out
    }
}

const META_SPACE_STR: &str = match core::str::from_utf8(META_SPACE) {
    Ok(text) => text,
    Err(_) => "",
};

impl NormalisedText {
    fn push(&mut self, text: &str, end: usize) {
        self.text.push_str(text);
        if self.with_ends {
            self.ends.resize(self.text.len(), end);
        }
    }
}

//! Finding special tokens in text: at each position, left to right, the longest that fits.

use alloc::vec;
use alloc::vec::Vec;

use super::vocab::{Kind, Vocab};

/// Tokens whose text is longer are never found in text, so that a file cannot make this quadratic.
const MAX_LEN: usize = 256;

/// The tokens to look for.
#[derive(Debug, Clone)]
pub(super) struct Specials {
    /// Sorted by text, and for equal texts by id: those that are always found.
    always: Matcher,
    /// The same with control tokens.
    all: Matcher,
    /// Tokens that take the white space after them, ascending.
    absorbing: Vec<u32>,
}

#[derive(Debug, Clone)]
struct Matcher {
    /// Ids in order of their texts, each text once.
    ids: Vec<u32>,
    /// Ids that begin with byte b: `ids[starts[b]..starts[b + 1]]`.
    starts: Vec<u32>,
}

/// A part of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fragment {
    /// Ordinary text.
    Text,
    /// A special token.
    Token(u32),
}

impl Specials {
    /// `absorbing` tokens take the white space after them.
    pub(super) fn new(vocab: &Vocab, mut absorbing: Vec<u32>) -> Specials {
        absorbing.sort_unstable();
        let matcher = |kinds: &[Kind]| Matcher::new(vocab, kinds);
        Specials {
            always: matcher(&[Kind::UserDefined]),
            all: matcher(&[Kind::UserDefined, Kind::Control, Kind::Unknown]),
            absorbing,
        }
    }

    /// Calls `fragment(what, start, end)` for the parts of `text` in order; together they cover it.
    pub(super) fn split(
        &self,
        vocab: &Vocab,
        text: &[u8],
        parse_special: bool,
        mut fragment: impl FnMut(Fragment, usize, usize),
    ) {
        let matcher = if parse_special { &self.all } else { &self.always };
        let (mut at, mut plain) = (0, 0);
        while !matcher.ids.is_empty() && at < text.len() {
            let Some((id, len)) = matcher.longest(vocab, &text[at..]) else {
                at += 1;
                continue;
            };
            if plain < at {
                fragment(Fragment::Text, plain, at);
            }
            let mut end = at + len;
            if self.absorbing.binary_search(&id).is_ok() {
                end += text[end..].iter().take_while(|byte| matches!(byte, b' ' | b'\t'..=b'\r')).count();
            }
            fragment(Fragment::Token(id), at, end);
            (at, plain) = (end, end);
        }
        if plain < text.len() {
            fragment(Fragment::Text, plain, text.len());
        }
    }
}

impl Matcher {
    fn new(vocab: &Vocab, kinds: &[Kind]) -> Matcher {
        let text = |id: u32| vocab.text(id).unwrap_or_default();
        // only whole characters: a cut between tokens must be one between characters
        let wanted = |id: &u32| {
            let len = text(*id).len();
            let kind_fits = vocab.kind(*id).is_some_and(|kind| kinds.contains(&kind));
            kind_fits && (1..=MAX_LEN).contains(&len) && core::str::from_utf8(text(*id)).is_ok()
        };
        let mut ids: Vec<u32> = vocab.ids().filter(wanted).collect();
        ids.sort_by_key(|&id| (text(id), id));
        ids.dedup_by_key(|id| text(*id));
        let mut starts = vec![0; 257];
        for (byte, start) in starts.iter_mut().enumerate() {
            *start = ids.partition_point(|&id| usize::from(text(id)[0]) < byte) as u32;
        }
        Matcher { ids, starts }
    }

    /// The longest token that `text` begins with, and its length.
    #[inline]
    fn longest(&self, vocab: &Vocab, text: &[u8]) -> Option<(u32, usize)> {
        let first = usize::from(text[0]);
        let (start, end) = (self.starts[first] as usize, self.starts[first + 1] as usize);
        if start == end {
            return None;
        }
        let mut range = &self.ids[start..end];
        let mut best = None;
        // the tokens of `range` agree with the text in their first `len` bytes
        for len in 1.. {
            let token = |id: u32| vocab.text(id).unwrap_or_default();
            let (&shortest, _) = range.split_first()?;
            if token(shortest).len() == len {
                best = Some((shortest, len));
                range = &range[1..];
            }
            let Some(&next) = text.get(len) else { break };
            let from = range.partition_point(|&id| token(id)[len] < next);
            let to = range.partition_point(|&id| token(id)[len] <= next);
            range = &range[from..to];
            if range.is_empty() {
                break;
            }
        }
        best
    }
}

//! Finding special tokens in text: at each position, left to right, the longest that fits.

use alloc::vec::Vec;

use super::control::Side;
use super::matcher::Matcher;
use super::vocab::{Kind, Vocab};

/// The tokens to look for.
#[derive(Debug, Clone)]
pub(super) struct Specials {
    /// Sorted by text, and for equal texts by id: those that are always found.
    always: Matcher,
    /// The same with control tokens.
    all: Matcher,
    /// Tokens that take the white space on a side of them, ascending.
    absorbing: Vec<(u32, Side)>,
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
    /// `absorbing` tokens take the white space on that side of them.
    pub(super) fn new(vocab: &Vocab, mut absorbing: Vec<(u32, Side)>) -> Specials {
        absorbing.sort_by_key(|a| a.0);
        let matcher = |kinds: &[Kind]| Matcher::new(vocab, |kind| kinds.contains(&kind));
        Specials {
            always: matcher(&[Kind::UserDefined]),
            all: matcher(&[Kind::UserDefined, Kind::Control, Kind::Unknown]),
            absorbing,
        }
    }

    /// Calls `fragment(what, start, end)` for the parts of `text` in order; together they cover it. Control tokens begin
    /// only where `parse_special` says so.
    pub(super) fn split(
        &self,
        vocab: &Vocab,
        text: &[u8],
        parse_special: impl Fn(usize) -> bool,
        mut fragment: impl FnMut(Fragment, usize, usize),
    ) {
        let (mut at, mut plain) = (0, 0);
        while !self.all.is_empty() && at < text.len() {
            let matcher = if parse_special(at) { &self.all } else { &self.always };
            let Some((id, len)) = matcher.longest(vocab, &text[at..]) else {
                at += 1;
                continue;
            };
            let blank = |byte: &&u8| matches!(byte, b' ' | b'\t'..=b'\r');
            let side = self.absorbing.binary_search_by_key(&id, |&(id, _)| id).ok().map(|i| self.absorbing[i].1);
            let (mut start, mut end) = (at, at + len);
            match side {
                Some(Side::Left) => start -= text[plain..at].iter().rev().take_while(blank).count(),
                Some(Side::Right) => end += text[end..].iter().take_while(blank).count(),
                None => {}
            }
            if plain < start {
                fragment(Fragment::Text, plain, start);
            }
            fragment(Fragment::Token(id), start, end);
            (at, plain) = (end, end);
        }
        if plain < text.len() {
            fragment(Fragment::Text, plain, text.len());
        }
    }
}

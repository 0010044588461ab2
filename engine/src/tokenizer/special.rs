//! Finds special tokens in text: at each position, left to right, the longest match. One Aho-Corasick automaton reads
//! each byte at most `matcher::MAX_LEN` times.

use alloc::format;
use alloc::vec::Vec;

use aho_corasick::{AhoCorasick, AhoCorasickKind, Anchored, Input, MatchKind};

use super::control::Side;
use super::matcher::findable;
use super::vocab::{Kind, Vocab};
use crate::error::LoadError;

/// Maximal total bytes of special token texts: vocabularies have some ten thousand. The automaton takes up to 40 bytes
/// of memory for each.
const MAX_BYTES: usize = 1 << 20;

/// The special tokens of a vocabulary.
#[derive(Debug, Clone)]
pub(super) struct Specials {
    /// User-defined tokens, which are always parsed.
    always: Finder,
    /// User-defined and control tokens.
    all: Finder,
    /// Tokens that absorb white space on one side, ascending by id.
    absorbing: Vec<(u32, Side)>,
}

/// A fragment of a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fragment {
    /// Ordinary text.
    Text,
    /// A special token.
    Token(u32),
}

impl Specials {
    /// `absorbing` tokens absorb the white space on the given side.
    ///
    /// # Errors
    /// [`LoadError`] if the special tokens have too many bytes.
    pub(super) fn new(vocab: &Vocab, mut absorbing: Vec<(u32, Side)>) -> Result<Specials, LoadError> {
        absorbing.sort_by_key(|a| a.0);
        let finder = |kinds: &[Kind]| Finder::new(vocab, |kind| kinds.contains(&kind));
        Ok(Specials {
            always: finder(&[Kind::UserDefined])?,
            all: finder(&[Kind::UserDefined, Kind::Control, Kind::Unknown])?,
            absorbing,
        })
    }

    /// Calls `fragment(what, start, end)` for the fragments of `text` in order; together they cover it. Control tokens
    /// are parsed only where `parse_special(start)` returns true.
    pub(super) fn split(
        &self,
        text: &[u8],
        parse_special: impl Fn(usize) -> bool,
        mut fragment: impl FnMut(Fragment, usize, usize),
    ) {
        // the last match of each automaton, reused until it lies behind `at`
        let (mut next_always, mut next_all) = (None, None);
        let (mut at, mut plain) = (0, 0);
        while at < text.len() {
            // both matches start at or after `at`
            let always = self.always.next(text, at, &mut next_always);
            let all = self.all.next(text, at, &mut next_all);
            let found = match (always, all) {
                (_, None) => break,
                (_, Some(all)) if parse_special(all.start) => all,
                (Some(always), Some(all)) if always.start == all.start => always,
                (_, Some(all)) => {
                    at = all.start + 1;
                    continue;
                }
            };
            let Found { id, start: first, end: last } = found;
            let blank = |byte: &&u8| matches!(byte, b' ' | b'\t'..=b'\r');
            let side = self.absorbing.binary_search_by_key(&id, |&(id, _)| id).ok().map(|i| self.absorbing[i].1);
            let (mut start, mut end) = (first, last);
            match side {
                Some(Side::Left) => start -= text[plain..first].iter().rev().take_while(blank).count(),
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

/// An automaton for some of the tokens.
#[derive(Debug, Clone)]
struct Finder {
    /// `None` if there are no tokens to find.
    automaton: Option<AhoCorasick>,
    /// Token of each pattern.
    ids: Vec<u32>,
}

/// A token found in a text.
#[derive(Debug, Clone, Copy)]
struct Found {
    id: u32,
    start: usize,
    end: usize,
}

impl Finder {
    /// The tokens of the kinds for which `wanted` returns true; of equal texts, the first.
    fn new(vocab: &Vocab, wanted: impl Fn(Kind) -> bool) -> Result<Finder, LoadError> {
        let ids = findable(vocab, wanted);
        let text = |id: u32| vocab.text(id).unwrap_or_default();
        if ids.is_empty() {
            return Ok(Finder { automaton: None, ids });
        }
        let too_large = |found| LoadError::Metadata {
            key: "tokenizer.ggml.token_type".into(),
            found,
            expected: format!("at most {MAX_BYTES} bytes of user-defined and control tokens"),
        };
        let n_bytes: usize = ids.iter().map(|&id| text(id).len()).sum();
        if n_bytes > MAX_BYTES {
            return Err(too_large(format!("{n_bytes} bytes of them")));
        }
        let automaton = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .kind(Some(AhoCorasickKind::ContiguousNFA))
            .build(ids.iter().map(|&id| text(id)));
        let automaton = automaton.map_err(|e| too_large(format!("{e}")))?;
        Ok(Finder { automaton: Some(automaton), ids })
    }

    /// The first token at or after `at`. `last` caches the previous match; `at` must not decrease between calls.
    fn next(&self, text: &[u8], at: usize, last: &mut Option<Option<Found>>) -> Option<Found> {
        if last.is_none_or(|found| found.is_some_and(|found| found.start < at)) {
            let input = Input::new(text).span(at..text.len()).anchored(Anchored::No);
            let found = self.automaton.as_ref().and_then(|automaton| automaton.find(input));
            let found = found.map(|m| Found { id: self.ids[m.pattern().as_usize()], start: m.start(), end: m.end() });
            *last = Some(found);
        }
        (*last)?
    }
}

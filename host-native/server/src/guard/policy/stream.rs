//! Filters of whole texts and of streams.
//!
//! Matches are selected from left to right: of the matches that count and do not overlap an earlier redaction, the one
//! that begins first; of those, the longest; of those, the one of the first rule, personal data last. A match of a rule
//! counts if no match of its `allow` patterns contains it. The first `max` matches of personal data do not count.
//! The division of a stream into pieces does not change its output.

use std::ops::Range;
use std::sync::Arc;

use super::automaton::Automaton;
use super::personal::Kind;
use super::rules::Action;
use super::tracker::{Search, Tracker, Window};

/// Input is searched in steps of this many bytes, which limits the memory of a filter on long texts.
const STEP: usize = 1024;

/// One rule, or one kind of personal data.
#[derive(Debug)]
pub(super) struct Detector {
    pub(super) name: Arc<str>,
    pub(super) deny: Automaton,
    pub(super) allow: Option<Automaton>,
    pub(super) personal: Option<Kind>,
    pub(super) action: Action,
    pub(super) replacement: Arc<str>,
}

/// Compiled rules of one stage. Clones share them.
#[derive(Debug, Clone)]
pub struct Filter {
    detectors: Arc<[Arc<Detector>]>,
    max_personal: usize,
    max_match: usize,
}

/// Output of a filter. Byte ranges refer to its whole input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Piece {
    /// Unchanged text of the input.
    Text { text: String, range: Range<usize> },
    /// A match that is to be replaced.
    Redacted { rule: Arc<str>, replacement: Arc<str>, range: Range<usize> },
    /// A match that ends the output; it begins at the byte `at`.
    Blocked { rule: Arc<str>, at: usize },
}

/// A match of a rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RuleMatch {
    pub rule: Arc<str>,
    /// What the rule would write in its place.
    pub replacement: Arc<str>,
    pub range: Range<usize>,
}

/// Result for a whole text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    Unchanged,
    /// The text to use instead, and the rules that matched, without duplicates.
    Redacted {
        text: String,
        rules: Vec<Arc<str>>,
    },
    Blocked {
        rule: Arc<str>,
    },
}

impl Filter {
    pub(super) fn new(detectors: Arc<[Arc<Detector>]>, max_personal: usize) -> Filter {
        Filter { detectors, max_personal, max_match: super::automaton::MAX_MATCH }
    }

    /// Whether no rule applies, so that text need not pass through the filter.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.detectors.is_empty()
    }

    /// Longest match of its patterns, `allow` included, in bytes, at most [`MAX_MATCH`](super::automaton::MAX_MATCH): a stream
    /// never holds back more.
    #[must_use]
    pub fn max_match(&self) -> usize {
        let automata = self.detectors.iter().flat_map(|detector| [Some(&detector.deny), detector.allow.as_ref()]);
        automata.flatten().map(|automaton| automaton.max_match().min(self.max_match)).max().unwrap_or(0)
    }

    /// All matches of rules in a text, without personal data.
    #[must_use]
    pub fn rule_matches(&self, text: &str) -> Vec<RuleMatch> {
        let rules = self.detectors.iter().filter(|detector| detector.personal.is_none()).cloned();
        let mut stream = StreamFilter::new(Filter { detectors: rules.collect(), ..self.clone() });
        stream.ends_at_block = false;
        let mut pieces = stream.push(text);
        pieces.extend(stream.finish());
        let matched = pieces.into_iter().filter_map(|piece| match piece {
            Piece::Redacted { rule, replacement, range } => Some(RuleMatch { rule, replacement, range }),
            _ => None,
        });
        matched.collect()
    }

    /// Filters a whole text.
    #[must_use]
    pub fn check(&self, text: &str) -> Verdict {
        let mut stream = StreamFilter::new(self.clone());
        let mut pieces = stream.push(text);
        pieces.extend(stream.finish());
        let (mut output, mut rules): (String, Vec<Arc<str>>) = (String::new(), Vec::new());
        for piece in pieces {
            match piece {
                Piece::Text { text, .. } => output.push_str(&text),
                Piece::Redacted { rule, replacement, .. } => {
                    output.push_str(&replacement);
                    if !rules.contains(&rule) {
                        rules.push(rule);
                    }
                }
                Piece::Blocked { rule, .. } => return Verdict::Blocked { rule },
            }
        }
        if rules.is_empty() { Verdict::Unchanged } else { Verdict::Redacted { text: output, rules } }
    }
}

/// Filter of a text that comes in pieces.
#[derive(Debug)]
pub struct StreamFilter {
    filter: Filter,
    /// One per detector.
    searches: Vec<Searches>,
    /// Text that is not released.
    held: String,
    /// Byte offset of `held` in the input.
    released: usize,
    /// Last byte of the input.
    last: Option<u8>,
    /// Matches of personal data that passed.
    n_personal: usize,
    /// End of the last one.
    personal_end: usize,
    is_blocked: bool,
    /// Whether a match that blocks ends the output; otherwise it is reported like one that is replaced.
    ends_at_block: bool,
}

#[derive(Debug)]
struct Searches {
    deny: Tracker,
    allow: Option<Tracker>,
    /// Largest end of the `allow` matches removed from `allow`.
    allowed_to: usize,
}

/// What the searches tell about a match of a rule.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Cover {
    Allowed,
    Counts,
    /// An `allow` match that contains it may still be in progress.
    Pending,
}

/// A match that counts.
struct Match {
    detector: Arc<Detector>,
    end: usize,
}

impl StreamFilter {
    #[must_use]
    pub fn new(filter: Filter) -> StreamFilter {
        let searches = |detector: &Arc<Detector>| Searches {
            deny: Tracker::new(&detector.deny, filter.max_match, detector.personal.and_then(Kind::validator)),
            allow: detector.allow.as_ref().map(|allow| Tracker::new(allow, filter.max_match, None)),
            allowed_to: 0,
        };
        let searches = filter.detectors.iter().map(searches).collect();
        StreamFilter {
            filter,
            searches,
            held: String::new(),
            released: 0,
            last: None,
            n_personal: 0,
            personal_end: 0,
            is_blocked: false,
            ends_at_block: true,
        }
    }

    /// Adds a piece of the input. Returns what is decided: text is held back only from the first position at which a
    /// match may still be in progress. After a block the input is dropped.
    pub fn push(&mut self, piece: &str) -> Vec<Piece> {
        let mut output = Vec::new();
        let mut rest = piece;
        while !rest.is_empty() && !self.is_blocked {
            let is_boundary = |at: &usize| rest.is_char_boundary(*at);
            let (part, after) = rest.split_at((STEP..rest.len()).find(is_boundary).unwrap_or(rest.len()));
            rest = after;
            let from = self.end();
            self.held.push_str(part);
            let window = Window { text: &self.held, at: self.released };
            for (searches, detector) in self.searches.iter_mut().zip(self.filter.detectors.iter()) {
                searches.deny.push(&detector.deny, window, from, self.last);
                if let (Some(tracker), Some(allow)) = (&mut searches.allow, &detector.allow) {
                    tracker.push(allow, window, from, self.last);
                }
            }
            self.last = part.as_bytes().last().copied();
            self.drain(&mut output);
        }
        output
    }

    /// Ends the input. Returns the rest of the output.
    pub fn finish(&mut self) -> Vec<Piece> {
        let mut output = Vec::new();
        if !self.is_blocked {
            let end = self.end();
            let window = Window { text: &self.held, at: self.released };
            for (searches, detector) in self.searches.iter_mut().zip(self.filter.detectors.iter()) {
                searches.deny.finish(&detector.deny, window, end);
                if let (Some(tracker), Some(allow)) = (&mut searches.allow, &detector.allow) {
                    tracker.finish(allow, window, end);
                }
            }
            self.drain(&mut output);
        }
        output
    }

    /// Input that is not released yet.
    #[must_use]
    pub fn held(&self) -> &str {
        &self.held
    }

    fn end(&self) -> usize {
        self.released + self.held.len()
    }

    /// Releases what is decided.
    fn drain(&mut self, output: &mut Vec<Piece>) {
        while let Some(at) = self.searches.iter_mut().filter_map(|searches| Some(searches.deny.front()?.0)).min() {
            self.release(at, output);
            if self.is_pending(at) {
                return;
            }
            let Some(Match { detector, end }) = self.select(at) else { continue };
            let rule = Arc::clone(&detector.name);
            match detector.action {
                Action::Block if self.ends_at_block => {
                    output.push(Piece::Blocked { rule, at });
                    self.is_blocked = true;
                    self.held = String::new();
                    return;
                }
                Action::Block | Action::Redact => {
                    let replacement = Arc::clone(&detector.replacement);
                    output.push(Piece::Redacted { rule, replacement, range: at..end });
                    self.held.drain(..end - at);
                    self.released = end;
                    self.searches.iter_mut().for_each(|searches| searches.deny.remove_before(end));
                }
            }
        }
        self.release(self.end(), output);
    }

    /// Releases the text before the offset `to`. Matches begin and end between characters: patterns match whole ones.
    fn release(&mut self, to: usize, output: &mut Vec<Piece>) {
        for searches in &mut self.searches {
            searches.forget_allowed(to);
        }
        let range = self.released..to;
        if range.is_empty() {
            return;
        }
        let released = self.held.drain(..range.len());
        match output.last_mut() {
            Some(Piece::Text { text, range: before }) => {
                text.extend(released);
                before.end = to;
            }
            _ => output.push(Piece::Text { text: released.collect(), range }),
        }
        self.released = to;
    }

    /// Whether a match that begins at `at` is not decided.
    fn is_pending(&mut self, at: usize) -> bool {
        self.searches.iter_mut().any(|searches| match searches.deny.front() {
            Some((from, Search::Live { .. })) => from == at,
            Some((from, Search::Done { end: Some(end) })) => from == at && searches.cover(at, end) == Cover::Pending,
            _ => false,
        })
    }

    /// Removes the matches that begin at `at` and selects one.
    fn select(&mut self, at: usize) -> Option<Match> {
        let (mut of_rules, mut of_personal): (Option<Match>, Option<Match>) = (None, None);
        for (searches, detector) in self.searches.iter_mut().zip(self.filter.detectors.iter()) {
            let Some((from, Search::Done { end: Some(end) })) = searches.deny.front() else { continue };
            if from != at {
                continue;
            }
            let is_allowed = searches.cover(at, end) == Cover::Allowed;
            searches.deny.remove_before(at + 1);
            let best = if detector.personal.is_some() { &mut of_personal } else { &mut of_rules };
            if !is_allowed && best.as_ref().is_none_or(|best| best.end < end) {
                *best = Some(Match { detector: Arc::clone(detector), end });
            }
        }
        let personal = of_personal.filter(|_| at >= self.personal_end);
        if let Some(found) = &personal
            && self.n_personal < self.filter.max_personal
        {
            self.n_personal += 1;
            self.personal_end = found.end;
            return of_rules;
        }
        match (of_rules, personal) {
            (Some(rule), Some(personal)) => Some(if personal.end > rule.end { personal } else { rule }),
            (rule, personal) => rule.or(personal),
        }
    }
}

impl Searches {
    /// Whether an `allow` match contains the match from `at` to `end`.
    fn cover(&self, at: usize, end: usize) -> Cover {
        let Some(allow) = &self.allow else { return Cover::Counts };
        if self.allowed_to >= end {
            return Cover::Allowed;
        }
        let mut cover = Cover::Counts;
        for search in allow.searches(at) {
            let (Search::Live { end: found } | Search::Done { end: found }) = search;
            if found >= Some(end) {
                return Cover::Allowed;
            }
            if let Search::Live { .. } = search {
                cover = Cover::Pending;
            }
        }
        cover
    }

    /// Removes the decided `allow` matches that begin at or before `at`, where the next match may begin.
    fn forget_allowed(&mut self, at: usize) {
        if let Some(end) = self.allow.as_mut().and_then(|allow| allow.remove_decided(at)) {
            self.allowed_to = self.allowed_to.max(end);
        }
    }
}

#[cfg(test)]
mod tests;

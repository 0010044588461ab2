//! Streaming search of one automaton: all positions at which a match may begin are followed at once. Positions in the
//! same DFA state form a group with a common future, so that a byte costs one transition per distinct state.

use std::collections::VecDeque;

use super::automaton::{Automaton, DEAD};

/// Check of the matched text beyond the pattern, for example a checksum.
pub(super) type Validator = fn(&str) -> bool;

/// Text from the byte offset `at` of the input.
#[derive(Debug, Clone, Copy)]
pub(super) struct Window<'a> {
    pub(super) text: &'a str,
    pub(super) at: usize,
}

/// State of the search from one position.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Search {
    /// A match or a longer match may follow; the longest so far ends at `end`.
    Live { end: Option<usize> },
    /// Decided: the longest match ends at `end`.
    Done { end: Option<usize> },
}

#[derive(Debug)]
pub(super) struct Tracker {
    /// Longest match in bytes.
    max_match: usize,
    validate: Option<Validator>,
    /// Positions in ascending order that have no answer yet or whose answer is not read yet.
    starts: VecDeque<Start>,
    /// Number of positions removed from the front of `starts`: position `i` of all is `starts[i - n_removed]`.
    n_removed: usize,
    /// Positions before this one, counted as in `n_removed`, are decided.
    first_live: usize,
    groups: Vec<Group>,
    /// Indices of `groups`.
    active: Vec<usize>,
    free: Vec<usize>,
    /// Group of each state, valid if that group has this state and `stepped` is the current offset.
    group_of: Vec<usize>,
}

#[derive(Debug)]
struct Start {
    /// Byte offset of the input.
    at: usize,
    /// `None`: decided.
    group: Option<usize>,
    /// Offset of the byte at which it joined its group: earlier matches of the group are not its matches.
    joined: usize,
    /// End of the longest match before it joined, or of the longest valid match if there is a validator.
    end: Option<usize>,
}

#[derive(Debug, Default)]
struct Group {
    state: u32,
    /// Offset of the last byte.
    stepped: usize,
    /// Its index in `active`, valid during a step.
    place: usize,
    /// Longest match of the members: its end, and the offset of the byte at which it was found.
    found: Option<(usize, usize)>,
    /// Numbers of positions; those decided since are still among them.
    members: Vec<usize>,
    n_live: usize,
}

impl Tracker {
    pub(super) fn new(automaton: &Automaton, max_match: usize, validate: Option<Validator>) -> Tracker {
        Tracker {
            max_match,
            validate,
            starts: VecDeque::new(),
            n_removed: 0,
            first_live: 0,
            groups: Vec::new(),
            active: Vec::new(),
            free: Vec::new(),
            group_of: vec![0; automaton.n_states()],
        }
    }

    /// Searches the text of `window` from the offset `from`, which `before` precedes. A validator needs a window that
    /// begins at or before the first position that is not decided.
    pub(super) fn push(&mut self, automaton: &Automaton, window: Window<'_>, from: usize, mut before: Option<u8>) {
        for (i, &byte) in window.text.as_bytes().iter().enumerate().skip(from - window.at) {
            let at = window.at + i;
            if !self.active.is_empty() {
                self.step(automaton, window, at, byte);
            }
            let is_char_start = byte & 0xc0 != 0x80;
            if is_char_start && automaton.begins(byte) {
                let state = automaton.step(automaton.start(before), byte);
                self.begin(automaton, window, at, state);
            }
            before = Some(byte);
        }
    }

    /// Decides all positions at the end of the text, at `end`.
    pub(super) fn finish(&mut self, automaton: &Automaton, window: Window<'_>, end: usize) {
        while let Some(group) = self.active.pop() {
            if automaton.ends_text(self.groups[group].state) {
                self.record(window, group, end, end);
            }
            self.decide_group(group);
        }
    }

    /// The first position that is live or has a match.
    pub(super) fn front(&mut self) -> Option<(usize, Search)> {
        loop {
            let start = self.starts.front()?;
            match self.search(start) {
                Search::Done { end: None } => self.remove_front(),
                search => return Some((start.at, search)),
            }
        }
    }

    /// Removes the positions before `at`.
    pub(super) fn remove_before(&mut self, at: usize) {
        while self.starts.front().is_some_and(|start| start.at < at) {
            self.decide(self.n_removed);
            self.remove_front();
        }
    }

    /// Removes the decided positions up to `at` from the front and returns the largest end of their matches.
    pub(super) fn remove_decided(&mut self, at: usize) -> Option<usize> {
        let mut largest = None;
        while let Some(start) = self.starts.front()
            && start.at <= at
            && start.group.is_none()
        {
            largest = largest.max(start.end);
            self.remove_front();
        }
        largest
    }

    /// The searches from positions up to `at`.
    pub(super) fn searches(&self, at: usize) -> impl Iterator<Item = Search> {
        self.starts.iter().take_while(move |start| start.at <= at).map(|start| self.search(start))
    }

    fn search(&self, start: &Start) -> Search {
        match start.group {
            None => Search::Done { end: start.end },
            Some(group) => Search::Live { end: longest(start, &self.groups[group]) },
        }
    }

    /// Follows all groups over the byte at offset `at`.
    fn step(&mut self, automaton: &Automaton, window: Window<'_>, at: usize, byte: u8) {
        self.decide_at_limit(automaton, window, at, byte);
        let mut active = std::mem::take(&mut self.active);
        let mut n_kept = 0;
        for i in 0..active.len() {
            let group = active[i];
            let state = automaton.step(self.groups[group].state, byte);
            if state == DEAD || self.groups[group].n_live == 0 {
                self.decide_group(group);
            } else if let Some(other) = self.group_in(state, at) {
                let place = self.groups[other].place;
                let kept = self.merge(group, other, at);
                active[place] = kept;
                self.set_state(kept, state, at, place);
            } else {
                active[n_kept] = group;
                self.set_state(group, state, at, n_kept);
                n_kept += 1;
            }
        }
        active.truncate(n_kept);
        active.retain(|&group| self.update(automaton, window, group, at));
        self.active = active;
    }

    /// Decides the position that is `max_match` bytes before the byte at offset `at`: this byte can only confirm a
    /// match that ends before it.
    fn decide_at_limit(&mut self, automaton: &Automaton, window: Window<'_>, at: usize, byte: u8) {
        let is_decided = |start: &Start| start.group.is_none();
        self.first_live = self.first_live.max(self.n_removed);
        while self.starts.get(self.first_live - self.n_removed).is_some_and(is_decided) {
            self.first_live += 1;
        }
        let first = self.first_live;
        let Some(start) = self.starts.get(first - self.n_removed).filter(|start| start.at + self.max_match == at)
        else {
            return;
        };
        let Some(group) = start.group else { return };
        let is_match = automaton.facts(automaton.step(self.groups[group].state, byte)).ended_before;
        self.decide(first);
        let start = &mut self.starts[first - self.n_removed];
        if is_match && is_valid(self.validate, window, start.at, at) {
            start.end = Some(at);
        }
    }

    /// Records the matches that the state of a group tells. Returns whether the group stays active.
    fn update(&mut self, automaton: &Automaton, window: Window<'_>, group: usize, at: usize) -> bool {
        let facts = automaton.facts(self.groups[group].state);
        if facts.ended_before {
            self.record(window, group, at, at);
        }
        if facts.ends_here {
            self.record(window, group, at + 1, at);
        }
        if !facts.pending {
            self.decide_group(group);
        }
        facts.pending
    }

    /// Follows a new position, whose state after its first byte is `state`.
    fn begin(&mut self, automaton: &Automaton, window: Window<'_>, at: usize, state: u32) {
        let facts = automaton.facts(state);
        if !facts.pending && !facts.ends_here {
            return;
        }
        let number = self.n_removed + self.starts.len();
        // a position joins after its first byte: matches found at this byte are recorded in `end`
        let end = (facts.ends_here && is_valid(self.validate, window, at, at + 1)).then_some(at + 1);
        let mut start = Start { at, group: None, joined: at, end };
        if facts.pending {
            let group = self.group_in(state, at).unwrap_or_else(|| {
                let group = self.new_group();
                self.set_state(group, state, at, self.active.len());
                self.active.push(group);
                group
            });
            start.group = Some(group);
            self.add_member(group, number);
        }
        self.starts.push_back(start);
    }

    fn add_member(&mut self, group: usize, number: usize) {
        let (starts, n_removed) = (&self.starts, self.n_removed);
        let joined = &mut self.groups[group];
        // a group may live as long as the text: forget decided members when they are the majority
        if joined.members.len() > 2 * joined.n_live + 16 {
            let start = |number: usize| number.checked_sub(n_removed).and_then(|i| starts.get(i));
            joined.members.retain(|number| start(*number).is_some_and(|start| start.group == Some(group)));
        }
        joined.members.push(number);
        joined.n_live += 1;
    }

    /// Records a match of the members of a group that ends at `end`, found at the byte at offset `at`.
    fn record(&mut self, window: Window<'_>, group: usize, end: usize, at: usize) {
        let Some(validate) = self.validate else {
            self.groups[group].found = Some((end, at));
            return;
        };
        for number in &self.groups[group].members {
            let Some(start) = number.checked_sub(self.n_removed).and_then(|i| self.starts.get_mut(i)) else { continue };
            let is_known = start.end.is_some_and(|known| known >= end);
            if start.group == Some(group) && !is_known && is_valid(Some(validate), window, start.at, end) {
                start.end = Some(end);
            }
        }
    }

    fn group_in(&self, state: u32, at: usize) -> Option<usize> {
        let group = self.group_of[state as usize];
        self.groups.get(group).filter(|found| found.state == state && found.stepped == at).map(|_| group)
    }

    fn set_state(&mut self, group: usize, state: u32, at: usize, place: usize) {
        let set = &mut self.groups[group];
        (set.state, set.stepped, set.place) = (state, at, place);
        self.group_of[state as usize] = group;
    }

    /// Merges two groups in the same state at the byte at offset `at`: the members of the smaller one move.
    /// Returns the group that stays.
    fn merge(&mut self, a: usize, b: usize, at: usize) -> usize {
        let is_larger = self.groups[a].members.len() > self.groups[b].members.len();
        let (kept, moved) = if is_larger { (a, b) } else { (b, a) };
        let from = std::mem::take(&mut self.groups[moved]);
        let to = &mut self.groups[kept];
        for number in &from.members {
            let Some(start) = number.checked_sub(self.n_removed).and_then(|i| self.starts.get_mut(i)) else { continue };
            if start.group == Some(moved) {
                start.end = longest(start, &from);
                (start.group, start.joined) = (Some(kept), at);
                to.members.push(*number);
                to.n_live += 1;
            }
        }
        self.free.push(moved);
        kept
    }

    fn decide(&mut self, number: usize) {
        let Some(start) = number.checked_sub(self.n_removed).and_then(|i| self.starts.get_mut(i)) else { return };
        if let Some(group) = start.group.take() {
            let group = &mut self.groups[group];
            start.end = longest(start, group);
            group.n_live -= 1;
        }
    }

    fn decide_group(&mut self, group: usize) {
        let decided = std::mem::take(&mut self.groups[group]);
        for number in &decided.members {
            let Some(start) = number.checked_sub(self.n_removed).and_then(|i| self.starts.get_mut(i)) else { continue };
            if start.group == Some(group) {
                start.end = longest(start, &decided);
                start.group = None;
            }
        }
        self.free.push(group);
    }

    fn new_group(&mut self) -> usize {
        self.free.pop().unwrap_or_else(|| {
            self.groups.push(Group::default());
            self.groups.len() - 1
        })
    }

    fn remove_front(&mut self) {
        self.starts.pop_front();
        self.n_removed += 1;
    }
}

fn longest(start: &Start, group: &Group) -> Option<usize> {
    match group.found {
        Some((end, at)) if at >= start.joined => Some(end),
        _ => start.end,
    }
}

fn is_valid(validate: Option<Validator>, window: Window<'_>, start: usize, end: usize) -> bool {
    let Some(validate) = validate else { return true };
    let matched = start.checked_sub(window.at).and_then(|from| window.text.get(from..end - window.at));
    matched.is_some_and(validate)
}

#[cfg(test)]
mod tests {
    use super::super::automaton::parse;
    use super::*;

    /// The memory of a search is bounded by the longest match, however long its groups live.
    #[test]
    fn memory_is_bounded() {
        for pattern in ["a+", "a+b", "[ab]*c", "a{1,64}@", "(?:ab|b)+a"] {
            let automaton = Automaton::new(&[parse(pattern).unwrap()]).unwrap();
            let mut tracker = Tracker::new(&automaton, 100, None);
            let mut before = None;
            for at in 0..20_000 {
                let text = if at % 7 == 3 { "b" } else { "a" };
                tracker.push(&automaton, Window { text, at }, at, before);
                before = text.bytes().next();
                tracker.remove_decided(at);
                let members: usize = tracker.groups.iter().map(|group| group.members.len()).sum();
                assert!(tracker.starts.len() <= 101 && tracker.groups.len() <= 101, "{pattern} at {at}");
                assert!(members <= 500, "{pattern} at {at}: {members}");
            }
        }
    }
}

//! The parser of an answer's text: a state machine that takes the text in any pieces. It decides only where more text cannot
//! change the decision, so that the cuts do not matter, and reads each byte a bounded number of times.

mod calls;
mod cut;
mod tags;

use super::plan::{Marker, OutputPlan};
use super::syntaxes::{Body, CallSyntax, Start};
use super::{Piece, strip_all};

/// Longest name of a function in bytes, and longest header of a message.
const MAX_NAME: usize = 256;
const MESSAGE: &str = "<|message|>";
/// Ends of messages of Harmony.
const ENDS: [&str; 4] = ["<|end|>", "<|return|>", "<|call|>", "<|start|>"];
/// What a header of Harmony begins with.
const HEADS: [&str; 6] = ["<|channel|>", "<|start|>", "<|constrain|>", " to=", "to=", "assistant"];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Content, in which markers are searched.
    Text,
    /// Content to the end.
    Literal,
    Reasoning,
    /// After an opening marker, or between the calls of a list.
    Begin,
    Name,
    /// Before the key of an object that is the name of Apertus.
    Key,
    /// Mistral's ID of a call.
    CallId,
    /// Before the object of arguments.
    JsonOpen,
    /// Between the members of a call's object.
    Object,
    /// Before the value of a member.
    Member,
    JsonArgs,
    TagArgs,
    /// Arguments `key=value` or `key:value`.
    PairArgs,
    /// After a call.
    Next,
    /// Header of a message of Harmony.
    Header,
    /// Message of Harmony; of reasoning or content.
    Message {
        is_reasoning: bool,
    },
}

/// A resumable search in the unit of text that is read next.
#[derive(Debug, Clone, Copy, Default)]
struct Scan {
    at: usize,
    depth: usize,
    /// Index of the quote of the open string.
    quote: Option<usize>,
}

/// The call that is read.
#[derive(Debug, Clone, Default)]
struct Call {
    /// Text held back: content if it turns out not to be a call.
    raw: String,
    /// Whether a marker opened it.
    is_marked: bool,
    name: Option<String>,
    /// Key of the member that is read.
    key: String,
    /// The arguments: the members of an object as JSON, without its brackets.
    args: String,
    /// Whether the arguments have begun, and whether they are complete.
    args_begun: bool,
    has_args: bool,
    /// Whether the function must be one of the request's.
    must_exist: bool,
    is_python: bool,
    is_list: bool,
    /// Between tags: whether a call ends only where the block around it does or another call begins.
    is_in_block: bool,
    /// After a comma between two parameters.
    is_after_comma: bool,
}

/// Parser of the text of one answer.
#[derive(Debug, Clone)]
pub struct OutputParser {
    plan: OutputPlan,
    choice: usize,
    state: State,
    /// Text that is not read yet, from `at`.
    buffer: String,
    at: usize,
    scan: Scan,
    /// White space and markers that are content if content follows.
    gap: String,
    /// Whether no content came since the start, the reasoning or the last call.
    is_fresh: bool,
    is_after_call: bool,
    is_after_reasoning: bool,
    /// Whether content came at all, and the white space before a later block of reasoning.
    has_content: bool,
    between: String,
    /// Whether the marker before a block of calls came.
    is_in_block: bool,
    /// Whether what looked like a call was none: the next marker beside calls is its end.
    has_failed: bool,
    /// Whether tags within values are not counted.
    is_flat: bool,
    call: Call,
    n_calls: usize,
    pieces: Vec<Piece>,
}

impl OutputParser {
    pub(super) fn new(plan: OutputPlan, choice: usize) -> OutputParser {
        let is_harmony = plan.syntax.is_some_and(|syntax| syntax.body == Body::Harmony);
        let starts_with_name = plan.syntax.is_some_and(|syntax| syntax.start == Start::Prompt);
        let state = match () {
            () if is_harmony => State::Header,
            () if plan.in_reasoning => State::Reasoning,
            () if starts_with_name => State::Name,
            () => State::Text,
        };
        OutputParser {
            is_flat: plan.is_enforced,
            plan,
            choice,
            state,
            buffer: String::new(),
            at: 0,
            scan: Scan::default(),
            gap: String::new(),
            is_fresh: true,
            is_after_call: false,
            is_after_reasoning: false,
            has_content: false,
            between: String::new(),
            is_in_block: false,
            has_failed: false,
            call: Call { is_marked: starts_with_name, ..Call::default() },
            n_calls: 0,
            pieces: Vec::new(),
        }
    }

    /// Whether the text so far ends within the reasoning.
    pub fn is_reasoning(&self) -> bool {
        matches!(self.state, State::Reasoning | State::Message { is_reasoning: true })
    }

    /// Parses the text of the next token. Returns its pieces, and whether the token is of the reasoning or a marker of it.
    pub fn push_token(&mut self, text: &str) -> (Vec<Piece>, bool) {
        let before = self.is_reasoning();
        let pieces = self.push(text);
        (pieces, before || self.is_reasoning())
    }

    /// Parses the next text.
    pub fn push(&mut self, text: &str) -> Vec<Piece> {
        self.buffer.push_str(text);
        self.run(false);
        std::mem::take(&mut self.pieces)
    }

    /// Ends the text. If it is `truncated`, an unfinished marker is dropped, and a call whose name is known is incomplete;
    /// else text that is no whole call is content.
    pub fn finish(&mut self, truncated: bool) -> Vec<Piece> {
        self.run(!truncated);
        while !truncated && self.is_in_call() && self.end_of_text() {
            self.run(true);
        }
        let rest = self.buffer.split_off(0);
        let is_content = !truncated && !rest.is_empty();
        let state = self.state;
        match state {
            State::Text | State::Literal | State::Reasoning | State::Message { .. } | State::Next => {
                if truncated && !rest.is_empty() {
                    self.gap.clear();
                }
            }
            State::Header if rest.starts_with("<|") => {}
            State::Header if is_content => self.content(&rest),
            State::Header => {}
            _ if truncated && self.cut(&rest) => {}
            _ => {
                let raw = std::mem::take(&mut self.call.raw) + &rest;
                if !truncated || !self.call.is_marked {
                    self.content(&strip_all(raw, &self.plan.hidden));
                }
            }
        }
        let gap = std::mem::take(&mut self.gap);
        // of a truncated answer, markers whose call did not come are dropped
        let gap = if truncated && !gap.trim().is_empty() { String::new() } else { gap };
        if !gap.is_empty() && !self.is_after_call && !self.is_reasoning() {
            self.pieces.push(Piece::Content(gap));
        }
        std::mem::take(&mut self.pieces)
    }

    /// Whether a call has begun and is not complete.
    fn is_in_call(&self) -> bool {
        !matches!(
            self.state,
            State::Text | State::Literal | State::Reasoning | State::Message { .. } | State::Next | State::Header
        )
    }

    fn run(&mut self, end: bool) {
        while self.step(end) {}
        self.buffer.drain(..self.at);
        self.at = 0;
    }

    fn rest(&self) -> &str {
        &self.buffer[self.at..]
    }

    fn first(&self) -> Option<u8> {
        self.rest().bytes().next()
    }

    fn consume(&mut self, n: usize) {
        self.at += n;
        self.scan = Scan::default();
    }

    /// Consumes text of a call.
    fn take(&mut self, n: usize) {
        let text = &self.buffer[self.at..self.at + n];
        self.call.raw.push_str(text);
        self.consume(n);
    }

    fn take_space(&mut self) {
        let rest = self.rest();
        let n = rest.len() - rest.trim_start().len();
        if n > 0 {
            self.take(n);
        }
    }

    /// Reads the next unit of text; returns whether there was one.
    fn step(&mut self, end: bool) -> bool {
        if self.rest().is_empty() {
            return false;
        }
        match self.state {
            State::Text => self.text(end),
            State::Literal => {
                let text = std::mem::take(&mut self.gap) + self.rest();
                self.consume(self.rest().len());
                self.pieces.push(Piece::Content(text));
                true
            }
            State::Reasoning => self.reasoning(end),
            State::Header => self.header(end),
            State::Message { is_reasoning } => {
                let found = self.until(&ENDS, end, is_reasoning);
                if found {
                    self.state = State::Header;
                }
                found
            }
            State::CallId => {
                let (n, found) = find(self.rest(), &["[ARGS]"], end);
                if n > MAX_NAME || found.is_none() {
                    return self.fail_name(n);
                }
                self.take(n + "[ARGS]".len());
                self.state = State::JsonOpen;
                true
            }
            _ => {
                self.take_space();
                self.first().is_some_and(|first| self.call_step(first, end))
            }
        }
    }

    fn call_step(&mut self, first: u8, end: bool) -> bool {
        match self.state {
            State::Begin => self.begin(first),
            State::Name => self.name(end),
            State::Key => self.key(first),
            State::JsonOpen => self.json_open(first, end),
            State::Object => self.object(first),
            State::Member => self.member(first),
            State::JsonArgs => self.json_args(first),
            State::TagArgs => self.tag_args(end),
            State::PairArgs => self.pair_args(first),
            State::Next => self.next(first),
            _ => self.fail(0),
        }
    }

    /// Emits text up to the first of `ends`, which is consumed; returns whether it was found.
    fn until(&mut self, ends: &[&str], end: bool, is_reasoning: bool) -> bool {
        let (n, found) = find(self.rest(), ends, end);
        let text = self.rest()[..n].to_string();
        self.consume(n + found.map_or(0, |i| ends[i].len()));
        self.emit(&text, is_reasoning);
        found.is_some()
    }

    fn content(&mut self, text: &str) {
        self.emit(text, false);
    }

    /// Emits text, with the gap before it. White space at its end is the next gap.
    fn emit(&mut self, text: &str, is_reasoning: bool) {
        let body = text.trim_end();
        if !body.is_empty() {
            let mut whole = std::mem::take(&mut self.gap);
            if is_reasoning && self.is_fresh {
                whole.clear();
                whole.push_str(body.trim_start());
            } else {
                whole.push_str(body);
            }
            self.has_content |= !is_reasoning;
            self.pieces.push(if is_reasoning { Piece::Reasoning(whole) } else { Piece::Content(whole) });
            (self.is_fresh, self.is_after_call, self.is_after_reasoning) = (false, false, false);
        }
        self.gap.push_str(&text[body.len()..]);
    }

    fn text(&mut self, end: bool) -> bool {
        let rest = self.rest();
        let n_space = rest.len() - rest.trim_start().len();
        if self.is_fresh && n_space > 0 {
            if !self.is_after_reasoning {
                let space = rest[..n_space].to_string();
                self.gap.push_str(&space);
            }
            self.consume(n_space);
            return true;
        }
        let is_bare = self.plan.syntax.is_some_and(|syntax| syntax.start == Start::Bare) && self.plan.has_tools();
        if self.is_fresh && is_bare && matches!(self.first(), Some(b'{' | b'[')) {
            return self.open("", true);
        }
        let (n, found) = self.plan.find_marker(rest, end);
        if self.plan.has_schema && self.is_fresh && n > 0 {
            self.state = State::Literal;
            return true;
        }
        let text = rest[..n].to_string();
        self.consume(n);
        self.content(&text);
        self.is_in_block &= text.trim().is_empty();
        let Some((marker, kind)) = found else { return false };
        self.consume(marker.len());
        if kind == Marker::Around {
            self.is_in_block = !marker.starts_with("</");
        }
        let ends_text = std::mem::take(&mut self.has_failed) && kind == Marker::Around;
        let is_hidden = self.plan.hidden.contains(&marker);
        match kind {
            Marker::Open => {
                let must_exist = self.plan.syntax.is_some_and(|syntax| syntax.start == Start::Known);
                return self.open(marker, must_exist);
            }
            Marker::Reasoning if self.is_fresh || self.plan.reasoning_repeats() => {
                let gap = std::mem::take(&mut self.gap);
                self.between = if self.has_content { gap } else { String::new() };
                (self.state, self.is_fresh) = (State::Reasoning, true);
            }
            Marker::Around if self.is_after_call => self.gap.clear(),
            _ if is_hidden => {}
            Marker::Around if ends_text => self.content(marker),
            Marker::Around => self.gap.push_str(marker),
            Marker::Reasoning | Marker::Other => self.content(marker),
        }
        true
    }

    /// Begins a call after the marker `marker`.
    fn open(&mut self, marker: &str, must_exist: bool) -> bool {
        let (raw, is_marked, is_in_block) = (marker.into(), !marker.is_empty(), self.is_in_block);
        self.call = Call { raw, is_marked, must_exist, is_in_block, ..Call::default() };
        self.state = State::Begin;
        true
    }

    /// Reads reasoning, which ends at its marker, and in some syntaxes at a call.
    fn reasoning(&mut self, end: bool) -> bool {
        let close = self.plan.reasoning.map_or("", |syntax| syntax.close);
        let calls = self.syntax().filter(|syntax| syntax.start == Start::Anywhere && self.plan.has_tools());
        let mut ends = vec![close];
        ends.extend(calls.into_iter().flat_map(|syntax| syntax.open.iter().chain(syntax.around)));
        let (n, found) = find(self.rest(), &ends, end);
        let text = self.rest()[..n].to_string();
        self.consume(n);
        self.emit(&text, true);
        let Some(found) = found else { return false };
        if found == 0 {
            self.consume(close.len());
        }
        self.gap = std::mem::take(&mut self.between);
        // content before and after the reasoning has the white space of one side between
        let is_apart = !self.has_content || !self.gap.is_empty();
        (self.state, self.is_fresh, self.is_after_reasoning) = (State::Text, true, is_apart);
        true
    }

    /// The text is not a call, or the call has ended: what was held back and the next `n` bytes are content.
    fn fail(&mut self, n: usize) -> bool {
        self.take(n);
        let raw = std::mem::take(&mut self.call.raw);
        let is_harmony = self.syntax().is_some_and(|syntax| syntax.body == Body::Harmony);
        self.state = if is_harmony { State::Message { is_reasoning: false } } else { State::Text };
        (self.call, self.is_in_block, self.has_failed) = (Call::default(), false, true);
        self.content(&strip_all(raw, &self.plan.hidden));
        // else the same text would be read as the start of an answer again
        self.is_fresh = false;
        true
    }

    /// A name that does not end within its first `n` bytes: waits, unless it is too long.
    fn fail_name(&mut self, n: usize) -> bool {
        let is_too_long = n > MAX_NAME;
        is_too_long && self.fail(floor(self.rest(), MAX_NAME))
    }

    fn syntax(&self) -> Option<&'static CallSyntax> {
        self.plan.syntax
    }

    fn body(&self) -> Body {
        self.syntax().map_or(Body::Json, |syntax| syntax.body)
    }

    fn header(&mut self, end: bool) -> bool {
        let rest = self.rest();
        if self.is_fresh && self.n_calls == 0 {
            let (n, found) = find(rest, &HEADS, end);
            if n > 0 || (found.is_none() && end) {
                self.state = State::Message { is_reasoning: false };
                return true;
            }
        }
        let (n, found) = find(rest, &[MESSAGE], end);
        if n > MAX_NAME || found.is_none() {
            return self.fail_name(n);
        }
        let header = &rest[..n];
        let word =
            |text: &str| text.split(|c: char| c.is_whitespace() || c == '<').next().unwrap_or_default().to_string();
        let channel = header.split_once("<|channel|>").map_or_else(String::new, |(_, rest)| word(rest));
        let recipient = header.split_once("to=").map(|(_, rest)| word(rest)).filter(|_| self.plan.has_tools());
        self.consume(n + MESSAGE.len());
        self.gap.clear();
        match recipient {
            Some(name) if !name.is_empty() => {
                self.call = Call { is_marked: true, ..Call::default() };
                let name = name.strip_prefix("functions.").map_or(name.clone(), str::to_string);
                self.set_name(name);
                self.state = State::JsonOpen;
            }
            _ => self.state = State::Message { is_reasoning: channel == "analysis" },
        }
        true
    }
}

/// The first of `markers` in a text, the longest of several at the same place, and its place. Without any: how much of the
/// text is before what may be the beginning of one, unless the text has come to its `end`.
pub(super) fn find(text: &str, markers: &[&str], end: bool) -> (usize, Option<usize>) {
    let bytes = text.as_bytes();
    for (at, byte) in bytes.iter().enumerate() {
        if !markers.iter().any(|marker| marker.as_bytes().first() == Some(byte)) {
            continue;
        }
        let tail = &bytes[at..];
        let longest =
            (0..markers.len()).filter(|i| tail.starts_with(markers[*i].as_bytes())).max_by_key(|i| markers[*i].len());
        let is_partial = |marker: &&str| marker.len() > tail.len() && marker.as_bytes().starts_with(tail);
        if !end && markers.iter().any(is_partial) {
            return (at, None);
        }
        if longest.is_some() {
            return (at, longest);
        }
    }
    (text.len(), None)
}

fn floor(text: &str, at: usize) -> usize {
    (0..=at.min(text.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0)
}

//! The parser of an answer's text: a state machine that takes the text in any pieces. It decides only where more text cannot
//! change the decision, so that the cuts do not matter, and reads each byte a bounded number of times.

use serde_json::Value;

use super::forms::{Body, CallForm, IdForm, Start};
use super::plan::{Marker, OutputPlan};
use super::values::{compact_json, json_parameter, json_string, literal_parameter, object_parameters, text_value};
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
    /// Text that becomes content if this is no call.
    raw: String,
    name: Option<String>,
    /// Key of the member that is read.
    key: String,
    /// Parameters before the name is known.
    pending: Vec<(String, String)>,
    n_params: usize,
    has_started: bool,
    has_args: bool,
    /// Whether the function must be one of the request's.
    must_exist: bool,
    is_python: bool,
    is_list: bool,
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
    call: Call,
    n_calls: usize,
    pieces: Vec<Piece>,
}

impl OutputParser {
    pub(super) fn new(plan: OutputPlan, choice: usize) -> OutputParser {
        let is_harmony = plan.form.is_some_and(|form| form.body == Body::Harmony);
        let starts_with_name = plan.form.is_some_and(|form| form.start == Start::Prompt);
        let state = match () {
            () if is_harmony => State::Header,
            () if plan.in_reasoning => State::Reasoning,
            () if starts_with_name => State::Name,
            () => State::Text,
        };
        OutputParser {
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
            call: Call::default(),
            n_calls: 0,
            pieces: Vec::new(),
        }
    }

    /// Whether the text so far ends within the reasoning.
    pub fn is_reasoning(&self) -> bool {
        matches!(self.state, State::Reasoning | State::Message { is_reasoning: true })
    }

    /// Parses the next text.
    pub fn push(&mut self, text: &str) -> Vec<Piece> {
        self.buffer.push_str(text);
        self.run(false);
        std::mem::take(&mut self.pieces)
    }

    /// Ends the text. If it is `truncated`, an unfinished marker, parameter, or call that has not started is dropped.
    pub fn finish(&mut self, truncated: bool) -> Vec<Piece> {
        self.run(!truncated);
        let rest = self.buffer.split_off(0);
        let is_content = !truncated && !rest.is_empty();
        match self.state {
            State::Text | State::Literal | State::Reasoning | State::Message { .. } | State::Next => {
                if truncated && !rest.is_empty() {
                    self.gap.clear();
                }
            }
            State::Header if rest.starts_with("<|") => {}
            State::Header if is_content => self.content(&rest),
            State::Header => {}
            _ => {
                let raw = std::mem::take(&mut self.call.raw) + &rest;
                self.end_call();
                if !truncated {
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
            State::Reasoning => {
                let close = self.plan.reasoning.map_or("", |form| form.close);
                let found = self.until(&[close], end, true);
                if found {
                    (self.state, self.is_fresh, self.is_after_reasoning) = (State::Text, true, true);
                    self.gap.clear();
                }
                found
            }
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
            State::JsonOpen if first == b'{' => {
                self.take(1);
                self.open_args(State::JsonArgs)
            }
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
        let is_bare = self.plan.form.is_some_and(|form| form.start == Start::Bare) && self.plan.has_tools();
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
        let Some((marker, kind)) = found else { return false };
        self.consume(marker.len());
        let is_hidden = self.plan.hidden.iter().any(|hidden| *hidden == marker);
        match kind {
            Marker::Open => {
                let must_exist = self.plan.form.is_some_and(|form| form.start == Start::Known);
                return self.open(marker, must_exist);
            }
            Marker::Reasoning if self.is_fresh => {
                self.state = State::Reasoning;
                self.gap.clear();
            }
            Marker::Around if self.is_after_call => self.gap.clear(),
            _ if is_hidden => {}
            Marker::Around => self.gap.push_str(marker),
            Marker::Reasoning | Marker::Other => self.content(marker),
        }
        true
    }

    /// Begins a call after the marker `marker`.
    fn open(&mut self, marker: &str, must_exist: bool) -> bool {
        self.call = Call { raw: marker.into(), must_exist, ..Call::default() };
        self.state = State::Begin;
        true
    }

    /// This is no call, or no more of one: its text and the next `n` bytes are content.
    fn fail(&mut self, n: usize) -> bool {
        self.take(n);
        let raw = std::mem::take(&mut self.call.raw);
        let is_harmony = self.form().is_some_and(|form| form.body == Body::Harmony);
        self.state = if is_harmony { State::Message { is_reasoning: false } } else { State::Text };
        self.end_call();
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

    fn form(&self) -> Option<&'static CallForm> {
        self.plan.form
    }

    fn body(&self) -> Body {
        self.form().map_or(Body::Json, |form| form.body)
    }

    fn begin(&mut self, first: u8) -> bool {
        let (body, is_list) = (self.body(), self.call.is_list);
        let has_json = matches!(body, Body::Json | Body::Named { .. } | Body::Python);
        match first {
            b'{' if has_json => {
                self.take(1);
                self.state = State::Object;
                true
            }
            b'[' if has_json && !is_list => {
                self.take(1);
                self.call.is_list = true;
                true
            }
            _ if body == Body::Json && !first.is_ascii_alphabetic() => self.fail(0),
            _ => {
                self.call.is_python = matches!(body, Body::Json | Body::Python);
                self.call.must_exist |= body == Body::Json;
                self.state = State::Name;
                true
            }
        }
    }

    fn name(&mut self, end: bool) -> bool {
        let rest = self.rest();
        let (ends, prefix, keeps_end): (&[&str], &str, bool) = match self.body() {
            Body::Named { prefix, end } => (end, prefix, false),
            Body::Tags(tags) if tags.name_end.is_empty() => (&["<", "\n", " "], "", true),
            Body::Tags(tags) => (&[tags.name_end], "", false),
            Body::Pairs { .. } => (&["{"], "call:", false),
            _ => (&["("], "", false),
        };
        let is_name = |c: char| c.is_alphanumeric() || "_-.:/".contains(c);
        let (n, found) = find(rest, ends, end);
        if self.call.is_python
            && let Some(at) = rest[..n].find(|c| !is_name(c))
        {
            return self.fail(at);
        }
        let Some(found) = found.filter(|_| n <= MAX_NAME) else { return self.fail_name(n) };
        let marker = ends[found];
        let name = rest[..n].trim();
        let name = name.strip_prefix(prefix).unwrap_or(name);
        let name = if self.call.is_python { name.strip_suffix(".call").unwrap_or(name) } else { name };
        let is_named = self.form().is_some_and(|form| form.ids == IdForm::Named);
        let name =
            name.rsplit_once(':').filter(|(_, n)| is_named && n.parse::<u32>().is_ok()).map_or(name, |(name, _)| name);
        let is_valid = !name.is_empty() && name.chars().all(is_name);
        let name = name.to_string();
        let keeps_end = keeps_end || (marker == "{" && matches!(self.body(), Body::Named { .. }));
        let n = if keeps_end { n } else { n + marker.len() };
        if name == "all" && self.form().is_some_and(|form| form.start == Start::Prompt) {
            self.consume(n);
            (self.call, self.state) = (Call::default(), State::Text);
            return true;
        }
        if !is_valid || !self.plan.has_tools() || !self.set_name(name) {
            return self.fail(n);
        }
        self.take(n);
        match self.body() {
            _ if self.call.is_python => self.open_args(State::PairArgs),
            Body::Tags(_) => self.open_args(State::TagArgs),
            Body::Pairs { .. } => self.open_args(State::PairArgs),
            _ => {
                self.state = if marker == "[CALL_ID]" { State::CallId } else { State::JsonOpen };
                true
            }
        }
    }

    /// Sets the name of the call; returns whether it may be called.
    fn set_name(&mut self, name: String) -> bool {
        let may_be = !self.call.must_exist || self.plan.tool(&name).is_some();
        self.call.name = Some(name);
        may_be
    }

    fn open_args(&mut self, state: State) -> bool {
        self.start();
        self.call.has_args = false;
        self.state = state;
        true
    }

    /// Starts the call once its name is known.
    fn start(&mut self) {
        let call = &mut self.call;
        let (false, Some(name)) = (call.has_started, call.name.clone()) else { return };
        call.has_started = true;
        call.raw.clear();
        let index = self.n_calls;
        self.n_calls += 1;
        self.gap.clear();
        let form = self.plan.form.map_or(IdForm::Hex, |form| form.ids);
        let id = self.plan.ids.choice(self.choice).id(index, form, &name);
        self.pieces.push(Piece::CallStart { index, id, name });
        for (key, value) in std::mem::take(&mut self.call.pending) {
            self.parameter(key, value);
        }
    }

    /// Adds a parameter, whose text is `n` bytes.
    fn add(&mut self, n: usize, parameter: Option<(String, String)>) -> bool {
        let Some((key, value)) = parameter else { return self.fail(n) };
        self.take(n);
        self.parameter(key, value);
        true
    }

    fn parameter(&mut self, key: String, value: String) {
        let call = &mut self.call;
        if !call.has_started {
            call.pending.push((key, value));
            return;
        }
        call.raw.clear();
        let open = if call.n_params == 0 { '{' } else { ',' };
        call.n_params += 1;
        self.pieces.push(Piece::CallArguments { index: self.n_calls - 1, json: format!("{open}{key}:{value}") });
    }

    /// Ends the call, if it has started.
    fn end_call(&mut self) {
        let Call { has_started, has_args, n_params, is_list, is_python, must_exist, .. } =
            std::mem::take(&mut self.call);
        // a list in the fence of Gemma 3 has one call in each line
        let is_python = is_python && must_exist;
        self.call = Call { is_list, is_python, must_exist, ..Call::default() };
        if has_started {
            let index = self.n_calls - 1;
            let json = if n_params == 0 { "{}" } else { "}" }.to_string();
            self.pieces.push(Piece::CallArguments { index, json });
            self.pieces.push(Piece::CallEnd { index, is_complete: has_args });
            (self.is_after_call, self.is_fresh, self.is_after_reasoning) = (true, true, false);
        }
    }

    /// Ends the arguments after `n` bytes, and the call with them.
    fn end_args(&mut self, n: usize) -> bool {
        self.take(n);
        self.call.has_args = true;
        self.end_call();
        self.state = State::Next;
        true
    }

    fn object(&mut self, first: u8) -> bool {
        match first {
            b'}' if self.call.name.is_some() => {
                self.start();
                self.end_args(1)
            }
            b',' => {
                self.take(1);
                true
            }
            b'"' => {
                let Some(n) = self.unit(b":", &["\""]) else { return false };
                let Ok(key) = serde_json::from_str(self.rest()[..n].trim()) else { return self.fail(n) };
                self.take(n + 1);
                self.call.key = key;
                self.state = State::Member;
                true
            }
            _ => self.fail(0),
        }
    }

    fn member(&mut self, first: u8) -> bool {
        let is_args = matches!(&*self.call.key, "arguments" | "parameters");
        if is_args && (self.call.has_args || self.call.n_params > 0) {
            return self.fail(0);
        }
        if is_args && first == b'{' {
            self.take(1);
            return self.open_args(State::JsonArgs);
        }
        let Some(n) = self.unit(b",", &["\""]) else { return false };
        let text = self.rest()[..n].to_string();
        let value = compact_json(&text).and_then(|json| serde_json::from_str::<Value>(&json).ok());
        let Some(value) = value else { return self.fail(n) };
        let is_good = match (&*self.call.key, value) {
            ("name" | "tool_name" | "function", Value::String(name)) if !name.is_empty() => self.set_name(name),
            ("arguments" | "parameters", Value::Null) => true,
            ("arguments" | "parameters", Value::String(text)) => {
                let value = serde_json::from_str::<Value>(&text).unwrap_or_default();
                let parameters = object_parameters(&value);
                let is_object = parameters.is_some();
                parameters.into_iter().flatten().for_each(|(key, value)| self.call.pending.push((key, value)));
                is_object
            }
            ("name" | "tool_name" | "arguments" | "parameters", _) => false,
            ("type" | "id" | "tool_call_id", _) => true,
            _ => !self.call.must_exist,
        };
        if !is_good {
            return self.fail(n);
        }
        self.take(n);
        self.state = State::Object;
        true
    }

    fn json_args(&mut self, first: u8) -> bool {
        match first {
            b'}' if self.call.key.is_empty() => self.end_args(1),
            b'}' => {
                self.take(1);
                self.call.has_args = true;
                self.state = State::Object;
                true
            }
            b',' if self.call.n_params + self.call.pending.len() > 0 => {
                self.take(1);
                true
            }
            b'"' => {
                let Some(n) = self.unit(b",", &["\""]) else { return false };
                self.add(n, json_parameter(&self.rest()[..n]))
            }
            _ => self.fail(0),
        }
    }

    fn pair_args(&mut self, first: u8) -> bool {
        let (close, separator, quote) = match self.body() {
            Body::Pairs { quote } => (b'}', ':', quote),
            _ => (b')', '=', ""),
        };
        let python: &[&str] = &["\"\"\"", "'''", "\"", "'"];
        match first {
            _ if first == close => self.end_args(1),
            b',' if self.call.n_params > 0 => {
                self.take(1);
                true
            }
            _ => {
                let quotes = if quote.is_empty() { python } else { &[quote, "\""] };
                let Some(n) = self.unit(b",", quotes) else { return false };
                self.add(n, literal_parameter(&self.rest()[..n], separator, quote))
            }
        }
    }

    fn tag_args(&mut self, end: bool) -> bool {
        let Body::Tags(tags) = self.body() else { return self.fail(0) };
        let around = self.form().map_or(&[][..], |form| form.around);
        let marks: Vec<&str> = [tags.key, tags.end].into_iter().chain(around.iter().copied()).collect();
        match find(self.rest(), &marks, end) {
            (0, Some(0)) => {}
            (0, Some(1)) => return self.end_args(tags.end.len()),
            // a call without its closing tag
            (0, Some(_)) => return self.end_args(0),
            (0, None) => return false,
            _ => return self.fail(0),
        }
        let rest = self.rest();
        let from = floor(rest, self.scan.at.max(tags.key.len()));
        let Some(at) = rest[from..].find(tags.value_end) else {
            self.scan.at = rest.len().saturating_sub(tags.value_end.len());
            return false;
        };
        let n = from + at;
        let unit = rest[tags.key.len()..n].split_once(tags.key_end);
        let parameter = unit.and_then(|(key, value)| {
            // DeepSeek says beside the key whether the value is a string
            let (key, attributes) = key.split_once('"').unwrap_or((key, ""));
            let value = if tags.value.is_empty() { value } else { value.trim_start().strip_prefix(tags.value)? };
            let value = value.strip_prefix('\n').unwrap_or(value);
            let value = value.strip_suffix('\n').unwrap_or(value);
            let key = key.trim();
            let schema = self.call.name.as_deref().and_then(|name| self.plan.parameter_schema(name, key));
            let value =
                if attributes.contains("string=\"true\"") { json_string(value) } else { text_value(value, schema) };
            (!key.is_empty()).then(|| (json_string(key), value))
        });
        self.add(n + tags.value_end.len(), parameter)
    }

    fn next(&mut self, first: u8) -> bool {
        let Call { is_list, is_python, .. } = self.call;
        let is_next = (is_list && first == b'{') || ((is_list || is_python) && first.is_ascii_alphabetic());
        let space = std::mem::take(&mut self.call.raw);
        match first {
            b',' if is_list => self.consume(1),
            b']' if is_list => {
                self.consume(1);
                (self.state, self.call) = (State::Text, Call::default());
            }
            _ if is_next => self.state = State::Begin,
            _ => {
                self.gap.push_str(&space);
                let is_harmony = self.body() == Body::Harmony;
                self.state = if is_harmony { State::Message { is_reasoning: false } } else { State::Text };
            }
        }
        true
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
                self.call = Call::default();
                let name = name.strip_prefix("functions.").map_or(name.clone(), str::to_string);
                self.set_name(name);
                self.state = State::JsonOpen;
            }
            _ => self.state = State::Message { is_reasoning: channel == "analysis" },
        }
        true
    }

    /// The length of a unit that ends before a bracket that closes more than the unit opened, or before one of `ends`
    /// outside of brackets and strings. `None` if it does not end yet.
    fn unit(&mut self, ends: &[u8], quotes: &[&str]) -> Option<usize> {
        let text = &self.buffer.as_bytes()[self.at..];
        let Scan { at, depth, quote } = &mut self.scan;
        while let Some(&byte) = text.get(*at) {
            let tail = &text[*at..];
            let is_partial = |quote: &&str| quote.len() > tail.len() && quote.as_bytes().starts_with(tail);
            match *quote {
                Some(i) if quotes[i].len() == 1 && byte == b'\\' => {
                    if tail.len() < 2 {
                        return None;
                    }
                    *at += 1;
                }
                Some(i) if tail.starts_with(quotes[i].as_bytes()) => {
                    (*quote, *at) = (None, *at + quotes[i].len());
                    continue;
                }
                Some(i) if is_partial(&quotes[i]) => return None,
                Some(_) => {}
                None => {
                    if quotes.iter().any(|quote| quote.len() > 1 && is_partial(&quote)) {
                        return None;
                    }
                    if let Some(i) = quotes.iter().position(|quote| tail.starts_with(quote.as_bytes())) {
                        (*quote, *at) = (Some(i), *at + quotes[i].len());
                        continue;
                    }
                    match byte {
                        b'[' | b'{' | b'(' => *depth += 1,
                        b']' | b'}' | b')' if *depth == 0 => return Some(*at),
                        b']' | b'}' | b')' => *depth -= 1,
                        _ if *depth == 0 && ends.contains(&byte) => return Some(*at),
                        _ => {}
                    }
                }
            }
            *at += 1;
        }
        None
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

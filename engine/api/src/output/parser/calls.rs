//! The states within a call.

use serde_json::Value;

use super::super::Piece;
use super::super::syntaxes::{Body, CallIdSyntax, Start};
use super::super::values::{compact_json, json_parameter, literal_parameter, object_parameters, quote_ends};
use super::{Call, MAX_NAME, OutputParser, Scan, State, find};
use crate::tools::{FunctionCall, ToolCall};

/// Whether a name may have this character.
fn is_name(c: char) -> bool {
    c.is_alphanumeric() || "_-.:/".contains(c)
}

impl Call {
    /// Adds a parameter: key and value as JSON.
    fn add(&mut self, key: &str, value: &str) {
        let comma = if self.args.is_empty() { "" } else { "," };
        self.args.push_str(&format!("{comma}{key}:{value}"));
    }
}

impl OutputParser {
    pub(super) fn begin(&mut self, first: u8) -> bool {
        let (body, is_list) = (self.body(), self.call.is_list);
        let has_json = matches!(body, Body::Json | Body::Keyed | Body::Named { .. } | Body::Python);
        match first {
            b'{' if has_json => {
                self.take(1);
                self.state = if body == Body::Keyed { State::Key } else { State::Object };
                true
            }
            b'[' if has_json && !is_list => {
                self.take(1);
                self.call.is_list = true;
                true
            }
            _ if body == Body::Keyed || (body == Body::Json && !first.is_ascii_alphabetic()) => self.fail(0),
            _ => {
                self.call.is_python = matches!(body, Body::Json | Body::Python);
                self.call.must_exist |= body == Body::Json;
                self.state = State::Name;
                true
            }
        }
    }

    pub(super) fn name(&mut self, end: bool) -> bool {
        let (ends, prefix, keeps_end): (&[&str], &str, bool) = match self.body() {
            Body::Named { prefix, end } => (end, prefix, false),
            Body::Tags(tags) if tags.name_end.is_empty() => (&["<", "\n", " "], "", true),
            Body::Tags(tags) => (&[tags.name_end], "", false),
            Body::Pairs { .. } => (&["{"], "call:", false),
            _ => (&["("], "", false),
        };
        if let Some(done) = self.bare_name(ends, end) {
            return done;
        }
        let rest = self.rest();
        let (n, found) = find(rest, ends, end);
        if self.call.is_python
            && let Some(at) = rest[..n].find(|c| !is_name(c))
        {
            return self.fail(at);
        }
        let Some(found) = found.filter(|_| n <= MAX_NAME) else { return self.fail_name(n) };
        let marker = ends[found];
        let name = self.plain_name(&rest[..n], prefix).to_string();
        let is_valid = !name.is_empty() && name.chars().all(is_name);
        let keeps_end = keeps_end || (marker == "{" && matches!(self.body(), Body::Named { .. }));
        let n = if keeps_end { n } else { n + marker.len() };
        if name == "all" && self.syntax().is_some_and(|syntax| syntax.start == Start::Prompt) {
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

    /// The name in `text`, without what a syntax writes around it.
    fn plain_name<'a>(&self, text: &'a str, prefix: &str) -> &'a str {
        let name = text.trim();
        let name = name.strip_prefix(prefix).unwrap_or(name);
        let name = if self.call.is_python { name.strip_suffix(".call").unwrap_or(name) } else { name };
        let is_named = self.syntax().is_some_and(|syntax| syntax.ids == CallIdSyntax::Named);
        name.rsplit_once(':').filter(|(_, n)| is_named && n.parse::<u32>().is_ok()).map_or(name, |(name, _)| name)
    }

    /// A name of one of the request's functions that the end of the call follows, or a marker beside calls: a call without
    /// arguments. `None` if another text is read first, which is one of `ends`.
    fn bare_name(&mut self, ends: &[&str], end: bool) -> Option<bool> {
        let (syntax, rest) = (self.syntax()?, self.rest());
        let prefix = match syntax.body {
            Body::Named { prefix, .. } => prefix,
            Body::Pairs { .. } => "call:",
            Body::Json => "",
            _ => return None,
        };
        let marks: Vec<&str> =
            syntax.open.iter().chain(syntax.around).copied().filter(|mark| !ends.contains(mark)).collect();
        let all: Vec<&str> = ends.iter().copied().chain(marks.iter().copied()).collect();
        let (n, found) = find(rest, &all, end);
        if n > MAX_NAME || found.is_some_and(|found| found < ends.len()) {
            return None;
        }
        let name = self.plain_name(&rest[..n], prefix).to_string();
        if !name.chars().all(is_name) {
            return None;
        }
        if found.is_none() {
            // what may be the beginning of a marker
            return (n < rest.len()).then_some(false);
        }
        self.plan.tool(&name)?;
        self.set_name(name);
        Some(self.end_args(n))
    }

    /// At the end of the text within a call: completes what may be absent there. Returns whether that changed anything.
    pub(super) fn end_of_text(&mut self) -> bool {
        let rest = self.rest();
        let (n, is_blank) = (rest.len(), rest.trim().is_empty());
        match self.state {
            State::JsonOpen if is_blank => self.end_args(n),
            State::TagArgs if is_blank => self.end_args(n),
            // a model may forget the last bracket
            State::Object if is_blank && self.call.has_args && self.call.name.is_some() => self.end_args(n),
            State::Name => {
                let prefix = match self.body() {
                    Body::Named { prefix, .. } => prefix,
                    Body::Tags(_) => "",
                    _ => return false,
                };
                let name = self.plain_name(rest, prefix).to_string();
                self.plan.tool(&name).is_some() && self.set_name(name) && self.end_args(n)
            }
            State::TagArgs if !self.is_flat => {
                self.is_flat = true;
                self.scan = Scan::default();
                true
            }
            _ => false,
        }
    }

    /// Sets the name of the call; returns whether it may be called.
    pub(super) fn set_name(&mut self, name: String) -> bool {
        let may_be = !self.call.must_exist || self.plan.tool(&name).is_some();
        self.call.name = Some(name);
        may_be
    }

    pub(super) fn open_args(&mut self, state: State) -> bool {
        (self.call.args_begun, self.call.has_args) = (true, false);
        self.state = state;
        true
    }

    /// Where the object of the arguments begins; without it, the call has none.
    pub(super) fn json_open(&mut self, first: u8, end: bool) -> bool {
        if first == b'{' {
            self.take(1);
            return self.open_args(State::JsonArgs);
        }
        let Some(syntax) = self.syntax() else { return self.fail(0) };
        let mut marks: Vec<&str> = syntax.open.iter().chain(syntax.around).copied().collect();
        if syntax.body == Body::Harmony {
            marks.extend(super::ENDS);
        }
        match find(self.rest(), &marks, end) {
            (0, Some(_)) => self.end_args(0),
            (0, None) => false,
            _ => self.fail(0),
        }
    }

    /// Adds a parameter, whose text is `n` bytes.
    pub(super) fn add(&mut self, n: usize, parameter: Option<(String, String)>) -> bool {
        let Some((key, value)) = parameter else { return self.fail(n) };
        self.take(n);
        self.call.add(&key, &value);
        true
    }

    /// Adds a call, of which nothing else is known.
    pub(super) fn add_call(&mut self, arguments: String, is_complete: bool) {
        let Some(name) = self.call.name.take() else { return };
        let index = self.n_calls;
        self.n_calls += 1;
        self.gap.clear();
        let syntax = self.plan.syntax.map_or(CallIdSyntax::Hex, |syntax| syntax.ids);
        let id = self.plan.ids.choice(self.choice).id(index, syntax, &name);
        let call = ToolCall { index, id, kind: "function", function: FunctionCall { name, arguments } };
        self.pieces.push(Piece::Call { call, is_complete });
        (self.is_after_call, self.is_fresh, self.is_after_reasoning) = (true, true, false);
    }

    /// Ends the arguments after `n` bytes, and the call with them.
    pub(super) fn end_args(&mut self, n: usize) -> bool {
        self.take(n);
        let arguments = format!("{{{}}}", self.call.args);
        self.add_call(arguments, true);
        let Call { is_list, is_python, must_exist, .. } = self.call;
        // a list in the fence of Gemma 3 has one call in each line
        let is_python = is_python && must_exist;
        self.call = Call { is_list, is_python, must_exist, is_marked: true, ..Call::default() };
        self.state = State::Next;
        true
    }

    /// The key of a call in a list of Apertus: the name.
    pub(super) fn key(&mut self, first: u8) -> bool {
        if first != b'"' {
            return self.fail(0);
        }
        let Some(n) = self.unit(b":", &["\""]) else { return false };
        let name = serde_json::from_str::<String>(self.rest()[..n].trim()).ok().filter(|name| !name.is_empty());
        let Some(name) = name.filter(|_| self.rest().as_bytes()[n] == b':') else { return self.fail(n) };
        if !self.set_name(name) {
            return self.fail(n);
        }
        self.take(n + 1);
        self.state = State::JsonOpen;
        true
    }

    pub(super) fn object(&mut self, first: u8) -> bool {
        match first {
            b'}' if self.call.name.is_some() => self.end_args(1),
            _ if self.body() == Body::Keyed => self.fail(0),
            b',' => {
                self.take(1);
                true
            }
            b'"' => {
                let Some(n) = self.unit(b":", &["\""]) else { return false };
                let key = serde_json::from_str::<String>(self.rest()[..n].trim()).ok();
                let is_known = |key: &str| {
                    ["name", "tool_name", "function", "arguments", "parameters", "type", "id", "tool_call_id"]
                        .contains(&key)
                };
                let key = key.filter(|key| !self.call.must_exist || is_known(key));
                let Some(key) = key.filter(|_| self.rest().as_bytes()[n] == b':') else { return self.fail(n) };
                self.take(n + 1);
                self.call.key = key;
                self.state = State::Member;
                true
            }
            _ => self.fail(0),
        }
    }

    pub(super) fn member(&mut self, first: u8) -> bool {
        let is_args = matches!(&*self.call.key, "arguments" | "parameters");
        if is_args && self.call.args_begun {
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
            ("arguments" | "parameters", Value::String(text)) => self.text_args(&text),
            ("name" | "tool_name" | "arguments" | "parameters", _) => false,
            _ => true,
        };
        if !is_good {
            return self.fail(n);
        }
        self.take(n);
        self.state = State::Object;
        true
    }

    /// Arguments that are the text of a JSON object. Returns whether they are.
    fn text_args(&mut self, text: &str) -> bool {
        let text = if text.trim().is_empty() { "{}" } else { text };
        let value = compact_json(text).and_then(|json| serde_json::from_str::<Value>(&json).ok());
        let Some(parameters) = value.as_ref().and_then(object_parameters) else { return false };
        parameters.iter().for_each(|(key, value)| self.call.add(key, value));
        (self.call.args_begun, self.call.has_args) = (true, true);
        true
    }

    pub(super) fn json_args(&mut self, first: u8) -> bool {
        let is_after_comma = self.call.is_after_comma;
        match first {
            b'}' if is_after_comma => self.fail(0),
            b'}' if self.call.key.is_empty() && self.body() != Body::Keyed => self.end_args(1),
            b'}' => {
                self.take(1);
                self.call.has_args = true;
                self.state = State::Object;
                true
            }
            b',' if !self.call.args.is_empty() && !is_after_comma => {
                self.take(1);
                self.call.is_after_comma = true;
                true
            }
            b'"' => {
                let Some(n) = self.unit(b",", &["\""]) else { return false };
                self.call.is_after_comma = false;
                self.add(n, json_parameter(&self.rest()[..n]))
            }
            _ => self.fail(0),
        }
    }

    pub(super) fn pair_args(&mut self, first: u8) -> bool {
        let (close, separator, quote) = match self.body() {
            Body::Pairs { quote } => (b'}', ':', quote),
            _ => (b')', '=', ""),
        };
        let python: &[&str] = &["\"\"\"", "'''", "\"", "'"];
        match first {
            _ if first == close => self.end_args(1),
            b',' if !self.call.args.is_empty() => {
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

    pub(super) fn next(&mut self, first: u8) -> bool {
        let Call { is_list, is_python, .. } = self.call;
        let is_next = (is_list && first == b'{') || ((is_list || is_python) && first.is_ascii_alphabetic());
        match first {
            b',' if is_list => self.take(1),
            b']' if is_list => {
                self.consume(1);
                (self.state, self.call) = (State::Text, Call::default());
            }
            _ if is_next => self.state = State::Begin,
            _ => {
                let space = std::mem::take(&mut self.call.raw);
                self.gap.push_str(&space);
                let is_harmony = self.body() == Body::Harmony;
                self.state = if is_harmony { State::Message { is_reasoning: false } } else { State::Text };
            }
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
                    // a quote that has no escapes ends a string only where something may follow it
                    let follows =
                        if quotes[i].starts_with('<') { quote_ends(&tail[quotes[i].len()..]) } else { Some(true) };
                    if !follows? {
                        *at += quotes[i].len();
                        continue;
                    }
                    (*quote, *at) = (None, *at + quotes[i].len());
                    continue;
                }
                Some(i) if is_partial(&quotes[i]) => return None,
                Some(_) => {}
                None => {
                    if quotes.iter().any(|quote| quote.len() > 1 && is_partial(quote)) {
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

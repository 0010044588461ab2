//! The states within a call.

use serde_json::Value;

use super::super::Piece;
use super::super::forms::{Body, IdForm, Start};
use super::super::values::{
    compact_json, json_parameter, json_string, literal_parameter, object_parameters, text_value,
};
use super::{Call, MAX_NAME, OutputParser, Scan, State, find, floor};

impl OutputParser {
    pub(super) fn begin(&mut self, first: u8) -> bool {
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

    pub(super) fn name(&mut self, end: bool) -> bool {
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
    pub(super) fn set_name(&mut self, name: String) -> bool {
        let may_be = !self.call.must_exist || self.plan.tool(&name).is_some();
        self.call.name = Some(name);
        may_be
    }

    pub(super) fn open_args(&mut self, state: State) -> bool {
        self.start();
        self.call.has_args = false;
        self.state = state;
        true
    }

    /// Starts the call once its name is known.
    pub(super) fn start(&mut self) {
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
    pub(super) fn end_call(&mut self) {
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

    pub(super) fn object(&mut self, first: u8) -> bool {
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

    pub(super) fn member(&mut self, first: u8) -> bool {
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

    pub(super) fn json_args(&mut self, first: u8) -> bool {
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

    pub(super) fn pair_args(&mut self, first: u8) -> bool {
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

    pub(super) fn tag_args(&mut self, end: bool) -> bool {
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

    pub(super) fn next(&mut self, first: u8) -> bool {
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
